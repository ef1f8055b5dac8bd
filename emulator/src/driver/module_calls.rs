//! Modules of PTX text, their functions, and what fits of these at a time.

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::sync::Arc;

use super::device_calls::check_current;
use super::gpu::DEFAULT_SHARED_BYTES;
use super::launch_calls::{LaunchConfig, grid_of};
use super::registry::Handle;
use super::{Outcome, Status, answer, refuse, work_call};
use crate::ptx::Kernel;

/// The attribute of a function that says how much dynamic shared memory it may take.
const MAX_DYNAMIC_SHARED_BYTES: c_uint = 8;
/// First bytes of machine code.
const ELF_MAGIC: &[u8] = b"\x7fELF";

/// A kernel of a module.
#[derive(Clone)]
pub(super) struct Function {
    pub kernel: Arc<Kernel>,
    /// The handle of its module.
    module: usize,
    /// Dynamic shared memory that it may take.
    pub max_dynamic_shared_bytes: u32,
}

/// What `.target` of a text names.
fn target(text: &str) -> &str {
    let line = text
        .lines()
        .find_map(|line| line.trim().strip_prefix(".target"));
    let names = line.unwrap_or_default();
    names
        .split([',', ' ', '\t'])
        .find(|name| !name.is_empty())
        .unwrap_or_default()
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuModuleLoadData(module: *mut Handle, image: *const c_void) -> Status {
    work_call(|driver| {
        check_current()?;
        if image.is_null() {
            return Err(Status::INVALID_VALUE);
        }
        // SAFETY: the caller's promise of an image: machine code, which is longer than this and has no zero byte in
        // front of its magic's end, or a text with a zero byte behind it.
        let text = unsafe { CStr::from_ptr(image.cast::<c_char>()) };
        if text.to_bytes().starts_with(ELF_MAGIC) {
            let why = "machine code cannot be emulated; set SPECPILOT_KERNEL_CODE=ptx";
            return Err(refuse(Status::INVALID_PTX, why));
        }
        let text = text.to_str().map_err(|_| Status::INVALID_PTX)?;
        if !driver.gpu.runs_target(target(text)) {
            let (target, name) = (target(text), driver.gpu.arch.name);
            let why = format!("a text for {target:?} does not run on {name}");
            return Err(refuse(Status::INVALID_PTX, why));
        }
        let loaded = driver.module(text)?;
        // SAFETY: the caller's promise.
        unsafe { answer(module, driver.modules.add(loaded)) }
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuModuleUnload(module: Handle) -> Status {
    work_call(|driver| {
        driver.modules.remove(module)?;
        let is_of_another = |function: &Function| function.module != module.addr();
        driver.functions.retain(is_of_another);
        Ok(())
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuModuleGetFunction(
    function: *mut Handle,
    module: Handle,
    name: *const c_char,
) -> Status {
    work_call(|driver| {
        if name.is_null() {
            return Err(Status::INVALID_VALUE);
        }
        let parsed = driver.modules.get(module)?.clone();
        // SAFETY: the caller promises a zero byte behind the name.
        let name = unsafe { CStr::from_ptr(name) };
        let name = name.to_str().map_err(|_| Status::NOT_FOUND)?;
        let kernel = parsed.kernel(name).cloned().ok_or(Status::NOT_FOUND)?;
        let found = driver.functions.add(Function {
            kernel,
            module: module.addr(),
            max_dynamic_shared_bytes: DEFAULT_SHARED_BYTES,
        });
        // SAFETY: the caller's promise.
        unsafe { answer(function, found) }
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuFuncSetAttribute(function: Handle, id: c_uint, value: c_int) -> Status {
    work_call(|driver| {
        if id != MAX_DYNAMIC_SHARED_BYTES {
            return Err(refuse(
                Status::NOT_SUPPORTED,
                format!("function attribute {id}"),
            ));
        }
        let limit = driver.gpu.arch.block_shared_bytes;
        let function = driver.functions.get(function)?;
        let num_bytes = u32::try_from(value).map_err(|_| Status::INVALID_VALUE)?;
        let left = limit.saturating_sub(function.kernel.static_shared_bytes);
        if num_bytes > left {
            return Err(Status::INVALID_VALUE);
        }
        function.max_dynamic_shared_bytes = num_bytes;
        Ok(())
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuOccupancyMaxActiveClusters(
    num_clusters: *mut c_int,
    function: Handle,
    config: *const LaunchConfig,
) -> Status {
    work_call(|driver| {
        // SAFETY: the caller's promise.
        let config = unsafe { config.as_ref() }.ok_or(Status::INVALID_VALUE)?;
        let function = driver.functions.get(function)?.clone();
        // SAFETY: the caller's promise.
        let grid = unsafe { grid_of(&driver.gpu, &function, config) }?;
        let fitting = driver.gpu.max_clusters(
            grid.cluster_blocks,
            grid.block_threads,
            function.kernel.static_shared_bytes + grid.dynamic_shared_bytes,
        );
        let outcome: Outcome<c_int> = c_int::try_from(fitting).map_err(|_| Status::INVALID_VALUE);
        // SAFETY: the caller's promise.
        unsafe { answer(num_clusters, outcome?) }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_target_is_the_first_name_of_its_line() {
        let text = "//\n.version 9.0\n.target sm_90a, debug\n.address_size 64\n";
        assert_eq!(target(text), "sm_90a");
        assert_eq!(target(".version 9.0\n"), "");
    }
}
