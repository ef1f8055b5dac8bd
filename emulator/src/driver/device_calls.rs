//! Start, the one GPU and its context.

use std::cell::Cell;
use std::ffi::{c_char, c_int, c_uint, c_void};

use super::gpu::Gpu;
use super::registry::Handle;
use super::{Outcome, Status, answer, call, initialise, refuse};

/// CUDA 13.0, as CUDA counts.
const DRIVER_VERSION: c_int = 13_000;
const NAME: &str = "PTX emulator";
/// Sixteen bytes of a name, as identities go.
const UUID: [u8; 16] = *b"ptx-emulator-gpu";
/// The one context.
const CONTEXT: usize = 1;

thread_local! {
    /// The calling thread's context.
    static CURRENT: Cell<usize> = const { Cell::new(0) };
}

/// Attributes by the numbers of the real driver.
fn attribute(gpu: &Gpu, id: c_uint) -> Option<c_int> {
    let (major, minor) = gpu.arch.compute_capability;
    Some(match id {
        16 => gpu.num_multiprocessors as c_int,
        75 => major,
        76 => minor,
        97 => gpu.arch.block_shared_bytes as c_int,
        // Memory pools, which allocations in the order of a stream come from.
        115 => 1,
        _ => return None,
    })
}

fn check_device(device: c_int) -> Outcome {
    match device {
        0 => Ok(()),
        _ => Err(Status::INVALID_DEVICE),
    }
}

#[unsafe(no_mangle)]
extern "C" fn cuInit(flags: c_uint) -> Status {
    match flags {
        0 => initialise(),
        _ => Status::INVALID_VALUE,
    }
}

/// The compiler asks the driver for tables of functions that only the two of them know, and does without where there are
/// none; it falls over a driver that does not say so.
#[unsafe(no_mangle)]
extern "C" fn cuGetExportTable(_table: *mut *const c_void, _id: *const c_void) -> Status {
    Status::NOT_FOUND
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuDriverGetVersion(version: *mut c_int) -> Status {
    // SAFETY: the caller's promise.
    let outcome = unsafe { answer(version, DRIVER_VERSION) };
    outcome.err().unwrap_or(Status::SUCCESS)
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuDeviceGetCount(count: *mut c_int) -> Status {
    // SAFETY: the caller's promise.
    call(|_| unsafe { answer(count, 1) })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuDeviceGet(device: *mut c_int, ordinal: c_int) -> Status {
    call(|_| {
        check_device(ordinal)?;
        // SAFETY: the caller's promise.
        unsafe { answer(device, ordinal) }
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuDeviceGetName(name: *mut c_char, len: c_int, device: c_int) -> Status {
    call(|_| {
        check_device(device)?;
        let room = usize::try_from(len).unwrap_or(0);
        if name.is_null() || room == 0 {
            return Err(Status::INVALID_VALUE);
        }
        let bytes = &NAME.as_bytes()[..NAME.len().min(room - 1)];
        // SAFETY: the caller promises `len` bytes of room, and the name with a zero byte behind it is no longer.
        unsafe {
            std::ptr::copy_nonoverlapping(bytes.as_ptr(), name.cast(), bytes.len());
            name.add(bytes.len()).write(0);
        }
        Ok(())
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuDeviceGetUuid_v2(uuid: *mut [u8; 16], device: c_int) -> Status {
    call(|_| {
        check_device(device)?;
        // SAFETY: the caller's promise.
        unsafe { answer(uuid, UUID) }
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuDeviceTotalMem_v2(num_bytes: *mut usize, device: c_int) -> Status {
    call(|driver| {
        check_device(device)?;
        // SAFETY: the caller's promise.
        unsafe { answer(num_bytes, driver.gpu.memory_bytes as usize) }
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuDeviceGetAttribute(value: *mut c_int, id: c_uint, device: c_int) -> Status {
    call(|driver| {
        check_device(device)?;
        let known = attribute(&driver.gpu, id)
            .ok_or_else(|| refuse(Status::NOT_SUPPORTED, format!("device attribute {id}")))?;
        // SAFETY: the caller's promise.
        unsafe { answer(value, known) }
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuDevicePrimaryCtxRetain(context: *mut Handle, device: c_int) -> Status {
    call(|driver| {
        check_device(device)?;
        // SAFETY: the caller's promise.
        unsafe { answer(context, std::ptr::without_provenance_mut(CONTEXT)) }?;
        driver.num_retains += 1;
        Ok(())
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuDevicePrimaryCtxRelease_v2(device: c_int) -> Status {
    call(|driver| {
        check_device(device)?;
        let left = driver.num_retains.checked_sub(1);
        driver.num_retains = left.ok_or(Status::INVALID_CONTEXT)?;
        match driver.num_retains {
            0 => driver.start_afresh(),
            _ => Ok(()),
        }
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuCtxGetCurrent(context: *mut Handle) -> Status {
    let current = std::ptr::without_provenance_mut(CURRENT.get());
    // SAFETY: the caller's promise.
    call(|_| unsafe { answer(context, current) })
}

#[unsafe(no_mangle)]
extern "C" fn cuCtxSetCurrent(context: Handle) -> Status {
    call(|_| match context.addr() {
        id @ (0 | CONTEXT) => {
            CURRENT.set(id);
            Ok(())
        }
        _ => Err(Status::INVALID_CONTEXT),
    })
}

/// Refuses a thread that has not entered the context.
pub(super) fn check_current() -> Outcome {
    match CURRENT.get() {
        CONTEXT => Ok(()),
        _ => Err(refuse(
            Status::INVALID_CONTEXT,
            "the calling thread has entered no context",
        )),
    }
}
