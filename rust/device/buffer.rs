//! Typed memory on a device, aligned to a cache line.

use std::marker::PhantomData;

use half::bf16;

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
/// pools may be reserved whole.
pub struct Buffer<T: Element> {
    // Bytes with a line of slack: only allocations of byte alignment come as untouched zero pages (the system
    // allocator clears over-aligned ones by hand), so the aligned start lies inside.
    storage: Box<[u8]>,
    start: usize,
    len: usize,
    element: PhantomData<T>,
}

impl<T: Element> Buffer<T> {
    pub(crate) fn zeroed(len: usize) -> Self {
        let num_bytes = len * size_of::<T>();
        let storage = vec![0_u8; num_bytes + LINE_BYTES - 1].into_boxed_slice();
        let misaligned = storage.as_ptr().addr() % LINE_BYTES;
        Self {
            storage,
            start: (LINE_BYTES - misaligned) % LINE_BYTES,
            len,
            element: PhantomData,
        }
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
    pub fn copy_from(&mut self, source: &Self, len: usize) {
        self.host_mut()[..len].copy_from_slice(&source.host()[..len]);
    }

    /// The elements, for host kernels and read-back.
    pub fn host(&self) -> &[T] {
        let bytes = &self.storage[self.start..][..self.len * size_of::<T>()];
        // SAFETY: `bytes` is initialised, `len * size_of::<T>()` long and starts on a multiple of 64, which covers
        // every `Element`; each bit pattern is a valid `Element`; the borrow ties the slice to `self`.
        unsafe { std::slice::from_raw_parts(bytes.as_ptr().cast::<T>(), self.len) }
    }

    /// The elements for writing.
    pub fn host_mut(&mut self) -> &mut [T] {
        let bytes = &mut self.storage[self.start..][..self.len * size_of::<T>()];
        // SAFETY: as in `host`; the exclusive borrow of `self` makes the slice unique.
        unsafe { std::slice::from_raw_parts_mut(bytes.as_mut_ptr().cast::<T>(), self.len) }
    }
}

impl<T: Element> Clone for Buffer<T> {
    fn clone(&self) -> Self {
        Self::from_slice(self.host())
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
