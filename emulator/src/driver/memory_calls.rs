//! Device memory, page-locked host memory and copies between them.

use std::ffi::{c_uchar, c_uint, c_void};

use super::device_calls::check_current;
use super::registry::Handle;
use super::work::Operation;
use super::{Status, answer, refuse, work_call};

#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemGetInfo_v2(free: *mut usize, total: *mut usize) -> Status {
    work_call(|driver| {
        check_current()?;
        driver.work.finish()?;
        let all = driver.gpu.memory_bytes as usize;
        // SAFETY: the caller's promise.
        unsafe {
            answer(free, all - driver.work.used_bytes() as usize)?;
            answer(total, all)
        }
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemAllocAsync(
    address: *mut u64,
    num_bytes: usize,
    stream: Handle,
) -> Status {
    work_call(|driver| {
        driver.check_not_captured(stream, "an allocation")?;
        let allocated = driver.work.allocate(num_bytes)?;
        // SAFETY: the caller's promise.
        unsafe { answer(address, allocated) }
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuMemFreeAsync(address: u64, stream: Handle) -> Status {
    work_call(|driver| {
        driver.check_not_captured(stream, "giving memory back")?;
        driver.work.give(Operation::Free { address })
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemHostAlloc(
    start: *mut *mut c_void,
    num_bytes: usize,
    flags: c_uint,
) -> Status {
    work_call(|driver| {
        check_current()?;
        if flags != 0 {
            let why = format!("page-locked memory with flags {flags}");
            return Err(refuse(Status::NOT_SUPPORTED, why));
        }
        let allocated = driver.host_memory.allocate(num_bytes);
        let allocated = allocated.ok_or(Status::OUT_OF_MEMORY)?;
        // SAFETY: the caller's promise.
        unsafe { answer(start, allocated.cast()) }
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuMemFreeHost(start: *mut c_void) -> Status {
    work_call(|driver| {
        driver.work.finish()?;
        match driver.host_memory.free(start.cast()) {
            true => Ok(()),
            false => Err(Status::INVALID_VALUE),
        }
    })
}

/// The host's bytes are copied before the call returns, as the real driver does with memory that is not page-locked;
/// page-locked memory is copied from later there, which nobody here asks for.
#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemcpyHtoDAsync_v2(
    to: u64,
    from: *const c_void,
    num_bytes: usize,
    stream: Handle,
) -> Status {
    work_call(|driver| {
        driver.check_not_captured(stream, "a copy from the host")?;
        if num_bytes == 0 {
            return Ok(());
        }
        if from.is_null() {
            return Err(Status::INVALID_VALUE);
        }
        if driver.host_memory.holds(from.cast(), 1) {
            let why = "an upload of page-locked memory";
            return Err(refuse(Status::NOT_SUPPORTED, why));
        }
        // SAFETY: the caller's promise.
        let bytes = unsafe { std::slice::from_raw_parts(from.cast::<u8>(), num_bytes) };
        let bytes = bytes.into();
        driver.work.give(Operation::Upload { bytes, to })
    })
}

/// Memory that is not page-locked has its bytes when the call returns; page-locked memory must be waited for.
#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemcpyDtoHAsync_v2(
    to: *mut c_void,
    from: u64,
    num_bytes: usize,
    stream: Handle,
) -> Status {
    work_call(|driver| {
        driver.check_not_captured(stream, "a copy to the host")?;
        if num_bytes == 0 {
            return Ok(());
        }
        if to.is_null() {
            return Err(Status::INVALID_VALUE);
        }
        driver.work.give(Operation::ReadBack {
            from,
            to: to.expose_provenance(),
            num_bytes,
        })?;
        match driver.host_memory.holds(to.cast(), num_bytes) {
            true => Ok(()),
            false => driver.work.finish(),
        }
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuMemcpyDtoDAsync_v2(to: u64, from: u64, num_bytes: usize, stream: Handle) -> Status {
    work_call(|driver| {
        let copy = Operation::CopyWithin {
            from,
            to,
            num_bytes,
        };
        driver.give(stream, copy)
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuMemsetD8Async(to: u64, value: c_uchar, num_bytes: usize, stream: Handle) -> Status {
    work_call(|driver| {
        let fill = Operation::Fill {
            to,
            num_bytes,
            value,
        };
        driver.give(stream, fill)
    })
}
