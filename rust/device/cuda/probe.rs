//! Whether there is a driver to talk to, asked before anything talks to it.

use cudarc::driver::{CudaContext, result, sys};

use crate::error::DeviceError;

/// Oldest driver interface that kernels are compiled for, as CUDA counts: 13.0.
pub const MIN_DRIVER_VERSION: i32 = 13_000;

/// Number of GPUs.
///
/// # Errors
/// [`DeviceError::NoDriver`] when the driver's library is missing or finds no GPU, [`DeviceError::DriverTooOld`].
pub fn num_devices() -> Result<usize, DeviceError> {
    // SAFETY: only looks for the library on the loader's path.
    if !unsafe { sys::is_culib_present() } {
        return Err(DeviceError::NoDriver {
            reason: "libcuda.so.1 was not found".to_owned(),
        });
    }
    let refused = |error| DeviceError::NoDriver {
        reason: format!("{error:?}"),
    };
    result::init().map_err(refused)?;
    let mut got = 0;
    // SAFETY: `got` is a valid place for the version.
    unsafe { sys::cuDriverGetVersion(&mut got) }
        .result()
        .map_err(refused)?;
    if got < MIN_DRIVER_VERSION {
        return Err(DeviceError::DriverTooOld {
            expected: MIN_DRIVER_VERSION,
            got,
        });
    }
    let count = CudaContext::device_count().map_err(refused)?;
    Ok(usize::try_from(count).unwrap_or(0))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::Device;

    #[test]
    fn a_machine_without_a_driver_gets_an_error_and_no_panic() {
        // SAFETY: only looks for the library.
        if unsafe { sys::is_culib_present() } && num_devices().is_ok_and(|n| n > 0) {
            let error = Device::cuda(10_000).map(|_| ()).unwrap_err();
            assert!(
                matches!(
                    error,
                    DeviceError::NoSuchGpu {
                        ordinal: 10_000,
                        ..
                    }
                ),
                "{error}"
            );
        } else {
            let error = Device::cuda(0).map(|_| ()).unwrap_err();
            assert!(
                matches!(
                    error,
                    DeviceError::NoDriver { .. } | DeviceError::NoSuchGpu { .. }
                ),
                "{error}"
            );
        }
    }
}
