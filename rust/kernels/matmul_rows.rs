//! Rows as matmuls take them, written so by the kernels that make them.
//!
//! On the host that is fp32. On a GPU it is BF16: values are rounded once, to nearest even, each row is padded with zeros
//! to whole super-tiles, and a matmul copies what it reads. It rounds fp32 rows to the same bits itself, in a launch of its
//! own; which of the two it is given shows in no result.
//!
//! The memory is counted in 32-bit words and is the same on every device, so a plan need not know which it is for.

use half::bf16;
use half::slice::HalfBitsSliceExt as _;

use super::check_len;
use super::launcher::Launcher;
use super::skinny_weights::TILE_COLUMNS;
use crate::device::{Buffer, Device};
use crate::error::{DeviceError, KernelError};

/// Memory for the rows of one matmul after another, of any width up to one. `B` is a buffer; planning memory puts a number
/// in its place.
#[derive(Clone, Debug)]
pub struct MatmulRows<B = Buffer<f32>> {
    words: B,
}

/// Words of a row of `width` values, on whichever device takes more.
const fn row_words(width: usize) -> usize {
    let rounded = width.next_multiple_of(TILE_COLUMNS) / 2;
    if rounded > width { rounded } else { width }
}

impl<B> MatmulRows<B> {
    /// Rows of up to `width` values in what `alloc` makes of the words of a row.
    ///
    /// # Errors
    /// What `alloc` says.
    pub fn with<E>(width: usize, alloc: impl FnOnce(usize) -> Result<B, E>) -> Result<Self, E> {
        let words = alloc(row_words(width))?;
        Ok(Self { words })
    }
}

impl MatmulRows {
    /// Rows of `width` values on `device`.
    ///
    /// # Errors
    /// [`DeviceError`] when the device has no room.
    pub fn of(device: &Device, values: &[f32], width: usize) -> Result<Self, DeviceError> {
        let num_rows = values.len() / width;
        let mut rows = Self::with(width, |words| device.try_alloc(num_rows * words))?;
        match device {
            Device::Host(_) => rows.words.upload(values)?,
            Device::Cuda(_) => {
                let mut words = Vec::new();
                for row in values.chunks_exact(width) {
                    let mut row: Vec<u16> =
                        row.iter().map(|&x| bf16::from_f32(x).to_bits()).collect();
                    row.resize(width.next_multiple_of(TILE_COLUMNS), 0);
                    let pairs = row.as_chunks::<2>().0.iter();
                    words.extend(pairs.map(|[low, high]| {
                        f32::from_bits(u32::from(*low) | u32::from(*high) << 16)
                    }));
                }
                rows.words.upload(&words)?;
            }
        }
        Ok(rows)
    }

    /// The values of `num_rows` rows of `width`, as a matmul sees them.
    ///
    /// # Errors
    /// [`DeviceError::Driver`] with the first error of the work that makes them.
    pub fn read_back(&self, num_rows: usize, width: usize) -> Result<Vec<f32>, DeviceError> {
        if self.words.cuda_address().is_none() {
            return self.words.read_back(num_rows * width);
        }
        let padded = width.next_multiple_of(TILE_COLUMNS);
        let words = self.words.read_back(num_rows * padded / 2)?;
        let bits: Vec<u16> = words
            .iter()
            .flat_map(|word| [word.to_bits() as u16, (word.to_bits() >> 16) as u16])
            .collect();
        let values: &[bf16] = bits.reinterpret_cast();
        let rows = values.chunks_exact(padded);
        Ok(rows
            .flat_map(|row| row[..width].iter().map(|x| x.to_f32()))
            .collect())
    }

    fn check(
        &self,
        kernel: &'static str,
        argument: &'static str,
        num_rows: usize,
        width: usize,
    ) -> Result<(), KernelError> {
        check_len(
            kernel,
            argument,
            self.words.len(),
            num_rows * row_words(width),
        )
    }
}

/// Activations `[num_rows, in_features]` of a matmul.
#[derive(Clone, Copy, Debug)]
pub enum MatmulInput<'a> {
    /// Fp32, contiguous; a GPU rounds them on the way.
    Values(&'a Buffer<f32>),
    /// As they are multiplied.
    Rows(&'a MatmulRows),
}

impl<'a> From<&'a Buffer<f32>> for MatmulInput<'a> {
    fn from(values: &'a Buffer<f32>) -> Self {
        Self::Values(values)
    }
}

impl<'a> From<&'a MatmulRows> for MatmulInput<'a> {
    fn from(rows: &'a MatmulRows) -> Self {
        Self::Rows(rows)
    }
}

impl<'a> MatmulInput<'a> {
    /// Refuses fewer than `num_rows` rows of `width`.
    pub(super) fn check(
        &self,
        kernel: &'static str,
        num_rows: usize,
        width: usize,
    ) -> Result<(), KernelError> {
        match self {
            Self::Values(values) => check_len(kernel, "x", values.len(), num_rows * width),
            Self::Rows(rows) => rows.check(kernel, "x", num_rows, width),
        }
    }

    /// Fp32 rows of the host, one after another.
    pub(super) fn host(&self) -> &'a [f32] {
        match self {
            Self::Values(values) => values.host(),
            Self::Rows(rows) => rows.words.host(),
        }
    }

    /// Where they lie on a GPU.
    pub(super) fn cuda_address(&self) -> Option<u64> {
        match self {
            Self::Values(values) => values.cuda_address(),
            Self::Rows(rows) => rows.words.cuda_address(),
        }
    }
}

/// Where a kernel leaves rows.
#[derive(Debug)]
pub enum RowsOutput<'a> {
    /// Fp32, contiguous.
    Values(&'a mut Buffer<f32>),
    /// For a matmul.
    Rows(&'a mut MatmulRows),
}

impl<'a> From<&'a mut Buffer<f32>> for RowsOutput<'a> {
    fn from(values: &'a mut Buffer<f32>) -> Self {
        Self::Values(values)
    }
}

impl<'a> From<&'a mut MatmulRows> for RowsOutput<'a> {
    fn from(rows: &'a mut MatmulRows) -> Self {
        Self::Rows(rows)
    }
}

impl RowsOutput<'_> {
    /// Refuses room for fewer than `num_rows` rows of `width`.
    pub(super) fn check(
        &self,
        kernel: &'static str,
        num_rows: usize,
        width: usize,
    ) -> Result<(), KernelError> {
        match self {
            Self::Values(values) => check_len(kernel, "y", values.len(), num_rows * width),
            Self::Rows(rows) => rows.check(kernel, "y", num_rows, width),
        }
    }

    /// Fp32 rows of the host, one after another.
    pub(super) fn host_mut(&mut self) -> &mut [f32] {
        match self {
            Self::Values(values) => values.host_mut(),
            Self::Rows(rows) => rows.words.host_mut(),
        }
    }

    /// `RowsOutput` of `matmul_rows.cuh`, for rows of `width`.
    ///
    /// # Errors
    /// [`KernelError::WrongDevice`] when they lie on the host.
    pub(super) fn on_cuda(
        &self,
        launcher: &Launcher<'_>,
        width: usize,
    ) -> Result<CudaRows, KernelError> {
        let (values, rounded) = match self {
            Self::Values(values) => (launcher.buffer("y", values)?, 0),
            Self::Rows(rows) => (0, launcher.buffer("y", &rows.words)?),
        };
        Ok(CudaRows {
            values,
            rounded,
            width: width as u32,
            padded_width: width.next_multiple_of(TILE_COLUMNS) as u32,
        })
    }
}

/// `RowsOutput` of `matmul_rows.cuh`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct CudaRows {
    values: u64,
    rounded: u64,
    width: u32,
    padded_width: u32,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_row_has_room_in_either_form() {
        for width in 1..300 {
            assert!(row_words(width) >= width);
            assert!(2 * row_words(width) >= width.next_multiple_of(TILE_COLUMNS));
        }
        assert_eq!(row_words(5120), 5120);
    }
}
