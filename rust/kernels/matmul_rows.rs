//! Rows as matmuls take them, written so by the kernels that make them.
//!
//! On the host that is fp32. On a GPU it is BF16: values are rounded once, to nearest even, each row is padded with zeros
//! to whole super-tiles, and a matmul copies what it reads. It rounds fp32 rows to the same bits itself, in a launch of its
//! own; which of the two it is given shows in no result. Of more than [`MAX_PLAIN_ROWS`] rows Hopper's wgmma takes the most,
//! from where they lie *arranged* besides, as `cuda/include/matmul_rows.cuh` tells: producers write both, as they do not
//! know what reads them.
//!
//! The memory is counted in 32-bit words and is the same on every device, so a plan need not know which it is for. It is
//! cut by its length alone, so a reader need not know how many rows were written.

use half::bf16;
use half::slice::HalfBitsSliceExt as _;

use super::check_len;
use super::launcher::Launcher;
use super::skinny_weights::TILE_COLUMNS;
use crate::device::cuda::{Arch, CudaDevice};
use crate::device::{Buffer, Device};
use crate::error::{DeviceError, KernelError};

/// Of no more rows than these none is arranged: mma.sync multiplies them all.
pub(super) const MAX_PLAIN_ROWS: usize = 8;
/// Rows that are arranged together.
pub(super) const GROUP_ROWS: usize = 8;
/// Values of a group's super-tile of columns.
const GROUP_LEN: usize = GROUP_ROWS * TILE_COLUMNS;
/// Words of a row's super-tile of columns as it is, and arranged: with more than [`MAX_PLAIN_ROWS`] rows, whole groups are
/// less than twice as many. Both together also hold it in fp32.
const PLAIN_WORDS: usize = TILE_COLUMNS / 2;
const ARRANGED_WORDS: usize = 2 * PLAIN_WORDS;

/// Memory for the rows of one matmul after another, of any width up to one. `B` is a buffer; planning memory puts a number
/// in its place.
#[derive(Clone, Debug)]
pub struct MatmulRows<B = Buffer<f32>> {
    words: B,
}

/// Words of a row of `width` values.
const fn row_words(width: usize) -> usize {
    width.div_ceil(TILE_COLUMNS) * (PLAIN_WORDS + ARRANGED_WORDS)
}

/// Where arranged rows of `width` values begin in a memory of `len` words, and its groups of rows.
const fn arranged_part(len: usize, width: usize) -> (usize, usize) {
    let row_tiles = len / (PLAIN_WORDS + ARRANGED_WORDS);
    let num_groups = row_tiles * ARRANGED_WORDS * 2 / (width.div_ceil(TILE_COLUMNS) * GROUP_LEN);
    (row_tiles * PLAIN_WORDS, num_groups)
}

/// Whether producers arrange as many rows.
pub(super) fn are_arranged(device: &CudaDevice, num_rows: usize) -> bool {
    device.arch() == Arch::Sm90a && num_rows > MAX_PLAIN_ROWS
}

/// `ArrangedRows::place` of `matmul_rows.cuh`, in values.
const fn arranged_place(row: usize, column: usize, num_groups: usize) -> usize {
    let group = column / TILE_COLUMNS * num_groups + row / GROUP_ROWS;
    let (pair, eighth) = (column % 16 / 2, column % TILE_COLUMNS / 16);
    ((group * 8 + pair) * GROUP_ROWS + row % GROUP_ROWS) * 8 + eighth * 2 + column % 2
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
    /// Rows of `width` values on `device`, as a kernel would leave them.
    ///
    /// # Errors
    /// [`DeviceError`] when the device has no room.
    pub fn of(device: &Device, values: &[f32], width: usize) -> Result<Self, DeviceError> {
        let num_rows = values.len() / width;
        let mut rows = Self::with(width, |words| device.try_alloc(num_rows * words))?;
        let Device::Cuda(cuda) = device else {
            rows.words.upload(values)?;
            return Ok(rows);
        };
        let padded = width.next_multiple_of(TILE_COLUMNS);
        let (start, num_groups) = arranged_part(rows.words.len(), width);
        let mut halves = vec![0_u16; 2 * rows.words.len()];
        for (i, value) in values.iter().enumerate() {
            let (row, column, bits) = (i / width, i % width, bf16::from_f32(*value).to_bits());
            halves[row * padded + column] = bits;
            if are_arranged(cuda, num_rows) {
                halves[2 * start + arranged_place(row, column, num_groups)] = bits;
            }
        }
        let pairs = halves.as_chunks::<2>().0.iter();
        let words: Vec<f32> = pairs
            .map(|[low, high]| f32::from_bits(u32::from(*low) | u32::from(*high) << 16))
            .collect();
        rows.words.upload(&words)?;
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
        let halves = self.halves(num_rows * padded)?;
        let values: &[bf16] = halves.reinterpret_cast();
        let rows = values.chunks_exact(padded);
        Ok(rows
            .flat_map(|row| row[..width].iter().map(|x| x.to_f32()))
            .collect())
    }

    /// Whether `num_rows` rows of `width` that a kernel on `device` left are padded with zeros, and as matmuls take them
    /// otherwise are the same.
    ///
    /// # Errors
    /// As for [`read_back`](Self::read_back).
    pub fn is_whole(
        &self,
        device: &Device,
        num_rows: usize,
        width: usize,
    ) -> Result<bool, DeviceError> {
        let Device::Cuda(cuda) = device else {
            return Ok(true);
        };
        let padded = width.next_multiple_of(TILE_COLUMNS);
        let halves = self.halves(2 * self.words.len())?;
        let (start, num_groups) = arranged_part(self.words.len(), width);
        let arranged = &halves[2 * start..];
        let are_arranged = are_arranged(cuda, num_rows);
        let mut places = (0..num_rows * padded).map(|i| (i / padded, i % padded, halves[i]));
        Ok(places.all(|(row, column, bits)| {
            let is_same = || arranged[arranged_place(row, column, num_groups)] == bits;
            (column < width || bits == 0) && (!are_arranged || is_same())
        }))
    }

    /// The first halves of words on a GPU, an even number of them.
    fn halves(&self, len: usize) -> Result<Vec<u16>, DeviceError> {
        let words = self.words.read_back(len / 2)?;
        let halves = words.iter().map(|word| word.to_bits());
        Ok(halves
            .flat_map(|bits| [bits as u16, (bits >> 16) as u16])
            .collect())
    }

    fn arranged(&self, width: usize) -> Option<ArrangedRows> {
        let (start, num_groups) = arranged_part(self.words.len(), width);
        Some(ArrangedRows {
            address: self.words.cuda_address()? + (start * size_of::<f32>()) as u64,
            row_groups: num_groups as u32,
        })
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

    /// Where more than [`MAX_PLAIN_ROWS`] of them, of `width`, lie arranged on a GPU that has wgmma.
    pub(super) fn arranged(&self, width: usize) -> Option<ArrangedRows> {
        match self {
            Self::Values(_) => None,
            Self::Rows(rows) => rows.arranged(width),
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

    /// `RowsOutput` of `matmul_rows.cuh`, for `num_rows` rows of `width`, however many launches write them.
    ///
    /// # Errors
    /// [`KernelError::WrongDevice`] when they lie on the host.
    pub(super) fn on_cuda(
        &self,
        launcher: &Launcher<'_>,
        num_rows: usize,
        width: usize,
    ) -> Result<CudaRows, KernelError> {
        let (values, rounded, arranged) = match self {
            Self::Values(values) => (launcher.buffer("y", values)?, 0, None),
            Self::Rows(rows) => (0, launcher.buffer("y", &rows.words)?, rows.arranged(width)),
        };
        let are_arranged = are_arranged(launcher.device(), num_rows);
        Ok(CudaRows {
            values,
            rounded,
            arranged: arranged.filter(|_| are_arranged).unwrap_or_default(),
            width: width as u32,
            padded_width: width.next_multiple_of(TILE_COLUMNS) as u32,
        })
    }
}

/// `ArrangedRows` of `matmul_rows.cuh`; none by default.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct ArrangedRows {
    pub(super) address: u64,
    pub(super) row_groups: u32,
}

/// `RowsOutput` of `matmul_rows.cuh`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct CudaRows {
    values: u64,
    rounded: u64,
    arranged: ArrangedRows,
    width: u32,
    padded_width: u32,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_have_room_in_every_form() {
        for widest in [1, 64, 65, 1000, 5120] {
            for most_rows in 1..70 {
                let len = most_rows * row_words(widest);
                for (num_rows, width) in [
                    (most_rows, widest),
                    (most_rows, 1),
                    (1, widest),
                    (most_rows.div_ceil(2), widest.div_ceil(2)),
                ] {
                    let padded = width.next_multiple_of(TILE_COLUMNS);
                    assert!(num_rows * width <= len, "fp32");
                    let (start, num_groups) = arranged_part(len, width);
                    assert!(num_rows * padded <= 2 * start, "rounded");
                    let end = start + num_groups * GROUP_ROWS * padded / 2;
                    assert!(end <= len, "arranged");
                    let has_room = num_groups * GROUP_ROWS >= num_rows;
                    assert!(has_room || num_rows <= MAX_PLAIN_ROWS, "{num_rows} rows");
                }
            }
        }
    }

    #[test]
    fn arranged_values_have_places_of_their_own() {
        let (num_rows, padded, num_groups) = (19, 128, 5);
        let mut bytes = Vec::new();
        for row in 0..num_rows {
            for column in 0..padded {
                let [k, t] = [column / 64, column / 16 % 4];
                let [f, h, e] = [column / 4 % 4, column / 2 % 2, column % 2];
                let place = arranged_place(row, column, num_groups);
                let core = (k * num_groups + row / 8) * 8 + 2 * f + h;
                assert_eq!(2 * place, core * 128 + row % 8 * 16 + t * 4 + e * 2);
                bytes.push(2 * place);
            }
        }
        bytes.sort_unstable();
        bytes.dedup();
        assert_eq!(bytes.len(), num_rows * padded);
    }
}
