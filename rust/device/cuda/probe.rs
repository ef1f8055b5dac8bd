//! Whether there is a driver to talk to, asked before anything talks to it, and what GPUs it has.

use cudarc::driver::sys::CUdevice_attribute as Attribute;
use cudarc::driver::{CudaContext, result, sys};

use super::{Arch, compiler_version, driver};
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

/// A GPU as its driver describes it.
#[derive(Clone, Debug)]
pub struct GpuFacts {
    /// Its own name.
    pub name: String,
    /// Compute capability, major and minor.
    pub compute_capability: (i32, i32),
    /// What kernels are compiled for; `None` if none runs there.
    pub arch: Option<Arch>,
    /// Bytes of memory.
    pub total_bytes: u64,
}

/// Describes GPU `ordinal`, without opening it.
///
/// # Errors
/// As for [`num_devices`]; [`DeviceError::NoSuchGpu`], [`DeviceError::Driver`].
pub fn gpu_facts(ordinal: usize) -> Result<GpuFacts, DeviceError> {
    check_ordinal(ordinal)?;
    let index = i32::try_from(ordinal).unwrap_or(i32::MAX);
    let device = result::device::get(index).map_err(driver("finding the GPU"))?;
    let attribute = |attribute| {
        // SAFETY: `device` is a handle that the driver just gave.
        unsafe { result::device::get_attribute(device, attribute) }
            .map_err(driver("reading the compute capability"))
    };
    let major = attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?;
    let minor = attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?;
    // SAFETY: as above.
    let total = unsafe { result::device::total_mem(device) };
    Ok(GpuFacts {
        name: result::device::get_name(device).map_err(driver("reading the GPU's name"))?,
        compute_capability: (major, minor),
        arch: Arch::of_gpu(major, minor).ok(),
        total_bytes: total.map_err(driver("reading the GPU's memory"))? as u64,
    })
}

/// Whether there is a GPU `ordinal`, kernels run on it, and their compiler is there.
pub fn is_usable(ordinal: usize) -> bool {
    gpu_facts(ordinal).is_ok_and(|facts| facts.arch.is_some()) && compiler_version().is_ok()
}

/// Bytes of the memory of GPU `ordinal` that are free.
///
/// # Errors
/// As for [`gpu_facts`].
pub fn free_bytes(ordinal: usize) -> Result<u64, DeviceError> {
    check_ordinal(ordinal)?;
    let (free, _) = CudaContext::new(ordinal)
        .and_then(|context| context.mem_get_info())
        .map_err(driver("reading the GPU's free memory"))?;
    Ok(free as u64)
}

/// Refuses a GPU that is not there.
pub(super) fn check_ordinal(ordinal: usize) -> Result<(), DeviceError> {
    let num_devices = num_devices()?;
    match ordinal < num_devices {
        true => Ok(()),
        false => Err(DeviceError::NoSuchGpu {
            ordinal,
            num_devices,
        }),
    }
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
