//! What CUDA launchers share: addresses of arguments, scratch, and errors that name the kernel.

use super::Kernel;
use super::packed_bf16::PackedBf16;
use crate::device::cuda::{CudaDevice, KernelSource, Launch, Shape};
use crate::device::{Buffer, Element, Staged};
use crate::error::{DeviceError, KernelError};

/// Launches entries of one kernel's `cuda/<stem>.cu`.
pub(super) struct Launcher<'a> {
    device: &'a CudaDevice,
    kernel: &'static str,
}

impl<'a> Launcher<'a> {
    /// A launcher of `K` on `device`.
    pub(super) fn of<K: Kernel>(device: &'a CudaDevice) -> Self {
        Self {
            device,
            kernel: K::NAME,
        }
    }

    /// What it launches on.
    pub(super) fn device(&self) -> &'a CudaDevice {
        self.device
    }

    fn named(&self, source: DeviceError) -> KernelError {
        KernelError::Device {
            kernel: self.kernel,
            source,
        }
    }

    fn on_cuda(&self, argument: &'static str, address: Option<u64>) -> Result<u64, KernelError> {
        address.ok_or(KernelError::WrongDevice {
            kernel: self.kernel,
            argument,
            expected: "cuda",
        })
    }

    /// Where `buffer` lies.
    ///
    /// # Errors
    /// [`KernelError::WrongDevice`] when it lies on the host.
    pub(super) fn buffer<T: Element>(
        &self,
        argument: &'static str,
        buffer: &Buffer<T>,
    ) -> Result<u64, KernelError> {
        self.on_cuda(argument, buffer.cuda_address())
    }

    /// Where the slices of a BF16 matrix lie.
    ///
    /// # Errors
    /// [`KernelError::WrongDevice`] when it lies on the host.
    pub(super) fn matrix(
        &self,
        argument: &'static str,
        matrix: &PackedBf16,
    ) -> Result<u64, KernelError> {
        let slices = matrix.cuda.as_ref().map(|weights| &weights.slices);
        self.on_cuda(argument, slices.and_then(Buffer::cuda_address))
    }

    /// Where the copy of `list` lies.
    ///
    /// # Errors
    /// [`KernelError::WrongDevice`] when it was filled for the host.
    pub(super) fn list<T: Element>(
        &self,
        argument: &'static str,
        list: &Staged<T>,
    ) -> Result<u64, KernelError> {
        self.on_cuda(argument, list.cuda_address())
    }

    /// The address of `num_bytes` of scratch; see [`CudaDevice::scratch`].
    ///
    /// # Errors
    /// [`KernelError::Device`].
    pub(super) fn scratch(&self, num_bytes: usize) -> Result<u64, KernelError> {
        self.device
            .scratch(num_bytes)
            .map_err(|source| self.named(source))
    }

    /// `len` elements that a kernel left `offset` bytes into the scratch, once it has run.
    ///
    /// # Errors
    /// [`KernelError::Device`].
    pub(super) fn read_scratch<T: Element>(
        &self,
        offset: usize,
        len: usize,
    ) -> Result<Vec<T>, KernelError> {
        self.device
            .read_scratch(offset, len)
            .map_err(|source| self.named(source))
    }

    /// Refuses a block that needs more shared memory than the GPU has, because of the size of `argument`.
    ///
    /// # Errors
    /// [`KernelError::SharedMemory`].
    pub(super) fn check_shared_bytes(
        &self,
        argument: &'static str,
        got: usize,
    ) -> Result<(), KernelError> {
        let expected = self.device.limits().block_shared_bytes;
        if got > expected {
            return Err(KernelError::SharedMemory {
                kernel: self.kernel,
                argument,
                expected,
                got,
            });
        }
        Ok(())
    }

    /// Clusters of `shape` that the GPU holds of `entry` at a time.
    ///
    /// # Errors
    /// [`KernelError::Device`].
    pub(super) fn max_clusters(&self, entry: &str, shape: Shape) -> Result<usize, KernelError> {
        let count = || {
            let device = self.device;
            let function = device.function(KernelSource::of(self.kernel), entry)?;
            device.allow_shared_bytes(&function, shape.shared_bytes as usize)?;
            Launch::new(&function, shape, false).max_clusters(device)
        };
        count().map_err(|source| self.named(source))
    }

    /// Launches `entry`, which waits for its predecessors itself (`wait_for_predecessors` in `async_copy.cuh`).
    ///
    /// # Safety
    /// As for [`Launch::run`].
    ///
    /// # Errors
    /// [`KernelError::Device`].
    pub(super) unsafe fn run<P: Copy>(
        &self,
        entry: &str,
        shape: Shape,
        params: &P,
    ) -> Result<(), KernelError> {
        let device = self.device;
        let function = device
            .function(KernelSource::of(self.kernel), entry)
            .map_err(|source| self.named(source))?;
        if shape.shared_bytes > 0 {
            device
                .allow_shared_bytes(&function, shape.shared_bytes as usize)
                .map_err(|source| self.named(source))?;
        }
        let launch = Launch::new(&function, shape, device.limits().has_clusters);
        // SAFETY: the caller's promise.
        unsafe { launch.run(device, params) }.map_err(|source| self.named(source))
    }
}
