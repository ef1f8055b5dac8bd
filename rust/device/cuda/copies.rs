//! Copies between host and GPU: counted, in the order of the stream, and read back through page-locked memory.

use std::sync::{Arc, Mutex, PoisonError};

use cudarc::driver::{CudaContext, CudaSlice, CudaStream, CudaView, DriverError, PinnedHostSlice};

use super::driver;
use crate::device::activity::Activity;
use crate::error::DeviceError;

/// Bytes that are read back at a time through page-locked memory; more go the driver's way.
const PINNED_BYTES: usize = 256 << 10;

/// What copies of one GPU share; its buffers hold it too.
pub struct HostCopies {
    stream: Arc<CudaStream>,
    activity: Activity,
    pinned: Mutex<PinnedHostSlice<u8>>,
}

/// A part of a GPU's memory, and as many bytes on the host that are to become equal to it.
pub struct ReadBack<'a> {
    /// On the GPU.
    pub from: CudaView<'a, u8>,
    /// On the host.
    pub to: &'a mut [u8],
}

impl HostCopies {
    pub(super) fn new(
        context: &Arc<CudaContext>,
        stream: &Arc<CudaStream>,
    ) -> Result<Self, DeviceError> {
        // SAFETY: nothing of this memory is read before a copy has written it.
        let pinned = unsafe { context.alloc_pinned_with_flags(PINNED_BYTES, 0) };
        Ok(Self {
            stream: stream.clone(),
            activity: Activity::default(),
            pinned: Mutex::new(pinned.map_err(driver("allocating page-locked memory"))?),
        })
    }

    /// What the device was asked to do.
    pub(in crate::device) fn activity(&self) -> &Activity {
        &self.activity
    }

    /// Puts a copy of `bytes` to the front of `to` in its place among the device's work. They may go away at once: the
    /// driver stages memory that is not page-locked before its call returns (CUDA API synchronization behavior).
    ///
    /// # Errors
    /// [`DeviceError::Driver`].
    pub(in crate::device) fn upload(
        &self,
        bytes: &[u8],
        to: &mut CudaSlice<u8>,
    ) -> Result<(), DeviceError> {
        self.activity.note(|counts| counts.num_uploads += 1);
        self.stream
            .memcpy_htod(bytes, &mut to.slice_mut(..bytes.len()))
            .map_err(driver("copying to the GPU"))
    }

    /// Waits for all work.
    ///
    /// # Errors
    /// [`DeviceError::Driver`] with the first error of the work waited for.
    pub(in crate::device) fn synchronize(&self) -> Result<(), DeviceError> {
        self.activity
            .waiting(|| self.stream.synchronize())
            .map_err(driver("waiting for the GPU"))
    }

    /// Copies all `parts` after all work, and waits once.
    ///
    /// # Errors
    /// [`DeviceError::Driver`] with the first error of that work.
    pub(in crate::device) fn read(&self, mut parts: Vec<ReadBack<'_>>) -> Result<(), DeviceError> {
        if parts.is_empty() {
            return Ok(());
        }
        self.activity.note(|counts| counts.num_read_backs += 1);
        let num_bytes: usize = parts.iter().map(|part| part.to.len()).sum();
        let outcome = match num_bytes <= PINNED_BYTES {
            true => self.read_pinned(&mut parts),
            false => self.activity.waiting(|| {
                for ReadBack { from, to } in &mut parts {
                    self.stream.memcpy_dtoh(&*from, &mut **to)?;
                }
                self.stream.synchronize()
            }),
        };
        outcome.map_err(driver("copying from the GPU"))
    }

    fn read_pinned(&self, parts: &mut [ReadBack<'_>]) -> Result<(), DriverError> {
        let mut pinned = self.pinned.lock().unwrap_or_else(PoisonError::into_inner);
        let pinned = pinned.as_mut_slice()?;
        let mut left = &mut *pinned;
        for part in parts.iter() {
            let (place, rest) = std::mem::take(&mut left).split_at_mut(part.to.len());
            self.stream.memcpy_dtoh(&part.from, place)?;
            left = rest;
        }
        self.activity.waiting(|| self.stream.synchronize())?;
        let mut left = &*pinned;
        for part in parts {
            let (place, rest) = left.split_at(part.to.len());
            part.to.copy_from_slice(place);
            left = rest;
        }
        Ok(())
    }
}
