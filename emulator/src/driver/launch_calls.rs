//! Launches.

use std::ffi::{c_uint, c_void};

use super::gpu::{Gpu, MAX_CLUSTER_BLOCKS};
use super::module_calls::Function;
use super::registry::Handle;
use super::work::Operation;
use super::{Outcome, Status, refuse, work_call};
use crate::grid::GridLaunch;

/// `CUlaunchConfig`.
#[repr(C)]
pub(super) struct LaunchConfig {
    grid: [c_uint; 3],
    block: [c_uint; 3],
    shared_bytes: c_uint,
    stream: Handle,
    attributes: *const LaunchAttribute,
    num_attributes: c_uint,
}

/// `CUlaunchAttribute`; the value's first words are all that is looked at.
#[repr(C, align(8))]
struct LaunchAttribute {
    id: c_uint,
    padding: c_uint,
    value: [c_uint; 16],
}

/// Launch attributes that are known.
const IGNORE: c_uint = 0;
const CLUSTER_DIMENSION: c_uint = 4;
/// Permission to start before the kernel ahead has ended; kernels run one by one here, which is allowed.
const PROGRAMMATIC_STREAM_SERIALIZATION: c_uint = 6;

/// The grid of a configuration, checked against what the GPU and the function allow.
///
/// # Safety
/// `config.attributes` must point to as many attributes as it says.
pub(super) unsafe fn grid_of(
    gpu: &Gpu,
    function: &Function,
    config: &LaunchConfig,
) -> Outcome<GridLaunch> {
    let LaunchConfig { grid, block, .. } = config;
    if grid[1..] != [1, 1] || block[1..] != [1, 1] {
        let why =
            format!("a grid {grid:?} of blocks {block:?}: only the first dimension is emulated");
        return Err(refuse(Status::NOT_SUPPORTED, why));
    }
    let attributes = match config.num_attributes {
        0 => &[],
        // SAFETY: the caller's promise.
        count => unsafe { std::slice::from_raw_parts(config.attributes, count as usize) },
    };
    let mut cluster_blocks = 1;
    for attribute in attributes {
        match (attribute.id, attribute.value) {
            (IGNORE | PROGRAMMATIC_STREAM_SERIALIZATION, _) => (),
            (CLUSTER_DIMENSION, [x, 1, 1, ..]) => cluster_blocks = x,
            (id, value) => {
                let why = format!("launch attribute {id} of {value:?}");
                return Err(refuse(Status::NOT_SUPPORTED, why));
            }
        }
    }
    let launch = GridLaunch {
        num_blocks: grid[0],
        block_threads: block[0],
        cluster_blocks,
        dynamic_shared_bytes: config.shared_bytes,
    };
    check(gpu, function, &launch)?;
    Ok(launch)
}

fn check(gpu: &Gpu, function: &Function, launch: &GridLaunch) -> Outcome {
    let kernel = &function.kernel;
    let refused = |status, why: String| Err(refuse(status, format!("{}: {why}", kernel.name)));
    if launch.num_blocks == 0 || launch.block_threads == 0 || launch.cluster_blocks == 0 {
        return refused(
            Status::INVALID_VALUE,
            format!("nothing to launch: {launch:?}"),
        );
    }
    if !launch.num_blocks.is_multiple_of(launch.cluster_blocks) {
        return refused(
            Status::INVALID_VALUE,
            format!("blocks are no whole clusters: {launch:?}"),
        );
    }
    if launch.cluster_blocks > 1 && !gpu.arch.has_clusters {
        return refused(
            Status::INVALID_VALUE,
            format!("{} has no clusters", gpu.arch.name),
        );
    }
    if launch.cluster_blocks > MAX_CLUSTER_BLOCKS {
        let why = format!("more than {MAX_CLUSTER_BLOCKS} blocks in a cluster: {launch:?}");
        return refused(Status::INVALID_VALUE, why);
    }
    if launch.block_threads > kernel.max_block_threads {
        let why = format!("more threads than {}: {launch:?}", kernel.max_block_threads);
        return refused(Status::LAUNCH_OUT_OF_RESOURCES, why);
    }
    if launch.dynamic_shared_bytes > function.max_dynamic_shared_bytes {
        let allowed = function.max_dynamic_shared_bytes;
        let why = format!("more shared memory than the {allowed} allowed: {launch:?}");
        return refused(Status::INVALID_VALUE, why);
    }
    Ok(())
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuLaunchKernelEx(
    config: *const LaunchConfig,
    function: Handle,
    params: *const *const c_void,
    extra: *const *const c_void,
) -> Status {
    work_call(|driver| {
        // SAFETY: the caller's promise.
        let config = unsafe { config.as_ref() }.ok_or(Status::INVALID_VALUE)?;
        let function = driver.functions.get(function)?.clone();
        // SAFETY: the caller's promise.
        let grid = unsafe { grid_of(&driver.gpu, &function, config) }?;
        let kernel = function.kernel;
        let is_incomplete = params.is_null() && !kernel.params.is_empty();
        if is_incomplete || !extra.is_null() {
            return Err(Status::INVALID_VALUE);
        }
        let mut bytes = vec![0_u8; kernel.num_param_bytes as usize];
        for (index, &(offset, num_bytes)) in kernel.params.iter().enumerate() {
            let place = &mut bytes[offset as usize..][..num_bytes as usize];
            // SAFETY: the caller promises a pointer for each parameter, to as many bytes as the kernel declares.
            unsafe {
                let param = params.add(index).read().cast::<u8>();
                std::ptr::copy_nonoverlapping(param, place.as_mut_ptr(), place.len());
            }
        }
        let params = bytes.into();
        let launch = Operation::Launch {
            kernel,
            grid,
            params,
        };
        driver.give(config.stream, launch)
    })
}
