//! Typed memory on a device, aligned to a cache line.

use std::marker::PhantomData;
use std::ops::Range;
use std::sync::Arc;

use cudarc::driver::{CudaSlice, DevicePtr};
use half::bf16;

use super::cuda::{CudaDevice, HostCopies, ReadBack, driver};
use crate::error::DeviceError;

mod sealed {
    pub trait Sealed {}
}

/// Element types a buffer may hold: plain numbers for which every bit pattern is a value.
pub trait Element: sealed::Sealed + Copy + Default + Send + Sync + 'static {}

macro_rules! elements {
    ($($t:ty),*) => {$(impl sealed::Sealed for $t {} impl Element for $t {})*};
}
elements!(f32, bf16, u8, i8, u16, u32, i32, u64);

const LINE_BYTES: usize = 64;

/// A fixed-length array of `T` in device memory. On the host it starts on a 64-byte boundary, so that vector loads of
/// packed weights never straddle cache lines, and a zeroed one takes physical memory only where it is written: cache
/// pools may be reserved whole. On CUDA it is read and written by kernels, [`upload`](Self::upload) and
/// [`read_back`](Self::read_back) only.
pub struct Buffer<T: Element> {
    storage: Storage,
    len: usize,
    element: PhantomData<T>,
}

enum Storage {
    Host {
        // Bytes with a line of slack: only allocations of byte alignment come as untouched zero pages (the system
        // allocator clears over-aligned ones by hand), so the aligned start lies inside.
        bytes: Box<[u8]>,
        start: usize,
    },
    Cuda {
        slice: CudaSlice<u8>,
        copies: Arc<HostCopies>,
    },
}

impl<T: Element> Buffer<T> {
    pub(crate) fn zeroed(len: usize) -> Self {
        let num_bytes = len * size_of::<T>();
        let bytes = vec![0_u8; num_bytes + LINE_BYTES - 1].into_boxed_slice();
        let misaligned = bytes.as_ptr().addr() % LINE_BYTES;
        let start = (LINE_BYTES - misaligned) % LINE_BYTES;
        Self {
            storage: Storage::Host { bytes, start },
            len,
            element: PhantomData,
        }
    }

    /// Zero-filled memory of `device`.
    pub(super) fn zeroed_on_cuda(device: &CudaDevice, len: usize) -> Result<Self, DeviceError> {
        Ok(Self {
            storage: Storage::Cuda {
                slice: device.alloc::<T>(len)?,
                copies: device.copies().clone(),
            },
            len,
            element: PhantomData,
        })
    }

    /// A host buffer holding a copy of `values`.
    pub fn from_slice(values: &[T]) -> Self {
        let mut buffer = Self::zeroed(values.len());
        buffer.host_mut().copy_from_slice(values);
        buffer
    }

    /// Number of elements.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether the buffer holds no element.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Copies the first `len` elements of `source`, which must be on the same device.
    ///
    /// # Errors
    /// [`DeviceError::Driver`].
    ///
    /// # Panics
    /// Panics if one buffer is on the host and the other is not, or either is shorter.
    pub fn copy_from(&mut self, source: &Self, len: usize) -> Result<(), DeviceError> {
        self.copy_range(0, source, 0..len)
    }

    /// Copies `range` of `source`, which must be on the same device, to the elements from `at` on.
    ///
    /// # Errors
    /// [`DeviceError::Driver`].
    ///
    /// # Panics
    /// As for [`copy_from`](Self::copy_from).
    pub fn copy_range(
        &mut self,
        at: usize,
        source: &Self,
        range: Range<usize>,
    ) -> Result<(), DeviceError> {
        match (&mut self.storage, &source.storage) {
            (Storage::Cuda { slice: to, .. }, Storage::Cuda { slice: from, .. })
                if !range.is_empty() =>
            {
                let bytes =
                    |start: usize| start * size_of::<T>()..(start + range.len()) * size_of::<T>();
                let stream = to.stream().clone();
                stream
                    .memcpy_dtod(
                        &from.slice(bytes(range.start)),
                        &mut to.slice_mut(bytes(at)),
                    )
                    .map_err(driver("copying on the GPU"))
            }
            (Storage::Cuda { .. }, Storage::Cuda { .. }) => Ok(()),
            _ => {
                self.host_mut()[at..][..range.len()].copy_from_slice(&source.host()[range]);
                Ok(())
            }
        }
    }

    /// Overwrites the first elements with `values`, wherever the buffer lies, and waits until they are there.
    ///
    /// # Errors
    /// [`DeviceError::Driver`].
    pub fn upload(&mut self, values: &[T]) -> Result<(), DeviceError> {
        self.upload_in_order(values)?;
        match &self.storage {
            Storage::Host { .. } => Ok(()),
            Storage::Cuda { copies, .. } => copies.synchronize(),
        }
    }

    /// Likewise, but the copy only takes its place among the device's work; `values` may go away at once.
    ///
    /// # Errors
    /// [`DeviceError::Driver`].
    pub fn upload_in_order(&mut self, values: &[T]) -> Result<(), DeviceError> {
        assert!(values.len() <= self.len, "values fit the buffer");
        match &mut self.storage {
            Storage::Host { .. } => self.host_mut()[..values.len()].copy_from_slice(values),
            Storage::Cuda { .. } if values.is_empty() => {}
            Storage::Cuda { slice, copies } => copies.upload(as_bytes(values), slice)?,
        }
        Ok(())
    }

    /// Sets the elements in `range` to zero.
    ///
    /// # Errors
    /// [`DeviceError::Driver`].
    pub fn clear(&mut self, range: Range<usize>) -> Result<(), DeviceError> {
        match &mut self.storage {
            Storage::Host { .. } => self.host_mut()[range].fill(T::default()),
            Storage::Cuda { .. } if range.is_empty() => {}
            Storage::Cuda { slice, .. } => {
                let stream = slice.stream().clone();
                let bytes = range.start * size_of::<T>()..range.end * size_of::<T>();
                stream
                    .memset_zeros(&mut slice.slice_mut(bytes))
                    .map_err(driver("clearing memory of the GPU"))?;
            }
        }
        Ok(())
    }

    /// A copy of the first `len` elements, after all work that writes them.
    ///
    /// # Errors
    /// [`DeviceError::Driver`] with the first error of that work.
    pub fn read_back(&self, len: usize) -> Result<Vec<T>, DeviceError> {
        self.read_range(0..len)
    }

    /// A copy of the elements in `range`, after all work that writes them.
    ///
    /// # Errors
    /// [`DeviceError::Driver`] with the first error of that work.
    pub fn read_range(&self, range: Range<usize>) -> Result<Vec<T>, DeviceError> {
        match &self.storage {
            Storage::Host { .. } => Ok(self.host()[range].to_vec()),
            Storage::Cuda { copies, .. } => {
                let mut values = vec![T::default(); range.len()];
                copies.read(self.part(range, &mut values).into_iter().collect())?;
                Ok(values)
            }
        }
    }

    /// Copies of the first elements of this buffer and another, after all work that writes them, for one wait.
    ///
    /// # Errors
    /// As for [`read_back`](Self::read_back).
    ///
    /// # Panics
    /// Panics if one buffer is on the host and the other is not.
    pub fn read_back_with<U: Element>(
        &self,
        len: usize,
        other: &Buffer<U>,
        other_len: usize,
    ) -> Result<(Vec<T>, Vec<U>), DeviceError> {
        match &self.storage {
            Storage::Host { .. } => Ok((
                self.host()[..len].to_vec(),
                other.host()[..other_len].to_vec(),
            )),
            Storage::Cuda { copies, .. } => {
                let (mut own, mut others) =
                    (vec![T::default(); len], vec![U::default(); other_len]);
                let parts = [
                    self.part(0..len, &mut own),
                    other.part(0..other_len, &mut others),
                ];
                copies.read(parts.into_iter().flatten().collect())?;
                Ok((own, others))
            }
        }
    }

    /// What copies `range` to `values`; `None` for nothing.
    fn part<'a>(&'a self, range: Range<usize>, values: &'a mut [T]) -> Option<ReadBack<'a>> {
        let Storage::Cuda { slice, .. } = &self.storage else {
            panic!("a buffer on the host was read as one on CUDA");
        };
        (!range.is_empty()).then(|| ReadBack {
            from: slice.slice(range.start * size_of::<T>()..range.end * size_of::<T>()),
            to: as_bytes_mut(values),
        })
    }

    /// Whether the buffer lies in the memory of a GPU.
    pub fn is_on_cuda(&self) -> bool {
        matches!(self.storage, Storage::Cuda { .. })
    }

    /// Where the buffer lies on its GPU, for a launcher; `None` on the host. The address is good as long as the buffer.
    pub fn cuda_address(&self) -> Option<u64> {
        match &self.storage {
            Storage::Host { .. } => None,
            Storage::Cuda { slice, .. } => Some(slice.device_ptr(slice.stream()).0),
        }
    }

    /// The elements, for host kernels.
    ///
    /// # Panics
    /// Panics if the buffer is not on the host.
    pub fn host(&self) -> &[T] {
        let Storage::Host { bytes, start } = &self.storage else {
            panic!("a buffer on CUDA was read as a host buffer");
        };
        let bytes = &bytes[*start..][..self.len * size_of::<T>()];
        // SAFETY: `bytes` is initialised, `len * size_of::<T>()` long and starts on a multiple of 64, which covers
        // every `Element`; each bit pattern is a valid `Element`; the borrow ties the slice to `self`.
        unsafe { std::slice::from_raw_parts(bytes.as_ptr().cast::<T>(), self.len) }
    }

    /// The elements for writing.
    ///
    /// # Panics
    /// Panics if the buffer is not on the host.
    pub fn host_mut(&mut self) -> &mut [T] {
        let Storage::Host { bytes, start } = &mut self.storage else {
            panic!("a buffer on CUDA was written as a host buffer");
        };
        let bytes = &mut bytes[*start..][..self.len * size_of::<T>()];
        // SAFETY: as in `host`; the exclusive borrow of `self` makes the slice unique.
        unsafe { std::slice::from_raw_parts_mut(bytes.as_mut_ptr().cast::<T>(), self.len) }
    }
}

pub(super) fn as_bytes<T: Element>(values: &[T]) -> &[u8] {
    // SAFETY: elements are plain numbers without padding; the borrow ties the bytes to them.
    unsafe { std::slice::from_raw_parts(values.as_ptr().cast(), size_of_val(values)) }
}

pub(super) fn as_bytes_mut<T: Element>(values: &mut [T]) -> &mut [u8] {
    // SAFETY: as in `as_bytes`, and every bit pattern is an element.
    unsafe { std::slice::from_raw_parts_mut(values.as_mut_ptr().cast(), size_of_val(values)) }
}

impl<T: Element> Clone for Buffer<T> {
    /// # Panics
    /// Panics if a GPU has no memory left for a copy.
    fn clone(&self) -> Self {
        match &self.storage {
            Storage::Host { .. } => Self::from_slice(self.host()),
            Storage::Cuda { slice, copies } => Self {
                storage: Storage::Cuda {
                    slice: slice.try_clone().expect("memory for a copy of a buffer"),
                    copies: copies.clone(),
                },
                len: self.len,
                element: PhantomData,
            },
        }
    }
}

impl<T: Element + std::fmt::Debug> std::fmt::Debug for Buffer<T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Buffer").field("len", &self.len).finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buffers_start_zeroed_and_aligned() {
        let mut buffer = Buffer::<f32>::zeroed(17);
        assert_eq!(buffer.host(), &[0.0; 17]);
        assert_eq!(buffer.host().as_ptr() as usize % LINE_BYTES, 0);
        buffer.host_mut()[16] = 2.5;
        assert_eq!(buffer.clone().host()[16], 2.5);
        assert_eq!(buffer.read_range(15..17).unwrap(), [0.0, 2.5]);
        buffer.clear(16..17).unwrap();
        assert_eq!(buffer.read_back(17).unwrap(), [0.0; 17]);
        assert!(Buffer::<bf16>::zeroed(0).is_empty());
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn an_untouched_pool_takes_address_space_only() {
        let resident_pages = || -> usize {
            let statm = std::fs::read_to_string("/proc/self/statm").unwrap();
            statm.split(' ').nth(1).unwrap().parse().unwrap()
        };
        let before = resident_pages();
        let mut pool = Buffer::<f32>::zeroed(1 << 30);
        pool.host_mut()[1 << 29] = 1.0;
        assert_eq!(pool.host()[(1 << 29) - 1], 0.0);
        // 4 GiB would be a million pages of 4 KiB; other tests of this process may allocate meanwhile.
        let grown = resident_pages().saturating_sub(before);
        assert!(grown < 100_000, "{grown} pages became resident");
    }
}
