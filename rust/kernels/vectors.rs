//! Vectors at a fixed stride in a buffer, and the one rule for sharing them out among threads.
//!
//! Row-wise kernels read vectors of `width` elements that start `stride` apart (heads, or parts of a fused projection)
//! and write contiguous rows. Each row is computed whole by one thread, so the split never shows in the result.

use rayon::prelude::*;

use super::{check_len, check_size};
use crate::device::{Buffer, HostDevice};
use crate::error::KernelError;

/// Below this many elements a call stays on its own thread: waking the pool costs 5 to 10 us, as long as streaming
/// about this much through a simple kernel.
pub(crate) const MIN_PARALLEL_ELEMENTS: usize = 32 * 1024;

/// Vector `i` is `values[offset + i * stride..][..width]`.
pub(crate) struct StridedVectors<'a> {
    pub(crate) values: &'a Buffer<f32>,
    pub(crate) offset: usize,
    pub(crate) stride: usize,
    pub(crate) num_vectors: usize,
    pub(crate) width: usize,
}

impl<'a> StridedVectors<'a> {
    /// Refuses a zero width and a source that ends before the last vector.
    pub(crate) fn check(&self, kernel: &'static str) -> Result<(), KernelError> {
        check_size(kernel, "width", self.width, self.width.max(1))?;
        if let Some(last) = self.num_vectors.checked_sub(1) {
            let expected = self.offset + last * self.stride + self.width;
            check_len(kernel, "x", self.values.len(), expected)?;
        }
        Ok(())
    }

    /// Vector `i`.
    pub(crate) fn vector(&self, i: usize) -> &'a [f32] {
        &self.values.host()[self.offset + i * self.stride..][..self.width]
    }
}

/// Calls `row(i, &mut y[i * width..][..width])` for every row of `y`, on the pool when that is worth waking it.
pub(crate) fn for_each_row<T: Send>(
    device: &HostDevice,
    y: &mut [T],
    width: usize,
    row: impl Fn(usize, &mut [T]) + Send + Sync,
) {
    let num_threads = device.num_threads();
    if y.len() < MIN_PARALLEL_ELEMENTS || num_threads == 1 {
        for (i, y) in y.chunks_exact_mut(width).enumerate() {
            row(i, y);
        }
        return;
    }
    let min_len = (y.len() / width).div_ceil(4 * num_threads);
    device.install(|| {
        y.par_chunks_exact_mut(width)
            .with_min_len(min_len)
            .enumerate()
            .for_each(|(i, y)| row(i, y));
    });
}
