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

#[derive(Clone, Copy)]
#[repr(C, align(64))]
struct CacheLine([u8; LINE_BYTES]);

/// A fixed-length array of `T` in device memory. On the host it starts on a 64-byte boundary, so that vector loads of
/// packed weights never straddle cache lines.
pub struct Buffer<T: Element> {
    lines: Vec<CacheLine>,
    len: usize,
    element: PhantomData<T>,
}

impl<T: Element> Buffer<T> {
    pub(crate) fn zeroed(len: usize) -> Self {
        let num_lines = (len * size_of::<T>()).div_ceil(LINE_BYTES);
        Self {
            lines: vec![CacheLine([0; LINE_BYTES]); num_lines],
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

    /// The elements, for host kernels and read-back.
    pub fn host(&self) -> &[T] {
        // SAFETY: `zeroed` allocated at least `len * size_of::<T>()` initialised bytes at an alignment of 64, which
        // covers every `Element`; each bit pattern is a valid `Element`; the borrow ties the slice to `self`.
        unsafe { std::slice::from_raw_parts(self.lines.as_ptr().cast::<T>(), self.len) }
    }

    /// The elements for writing.
    pub fn host_mut(&mut self) -> &mut [T] {
        // SAFETY: as in `host`; the exclusive borrow of `self` makes the slice unique.
        unsafe { std::slice::from_raw_parts_mut(self.lines.as_mut_ptr().cast::<T>(), self.len) }
    }
}

impl<T: Element> Clone for Buffer<T> {
    fn clone(&self) -> Self {
        Self {
            lines: self.lines.clone(),
            len: self.len,
            element: PhantomData,
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
        assert!(Buffer::<bf16>::zeroed(0).is_empty());
    }
}
