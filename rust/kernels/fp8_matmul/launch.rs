//! FP8 on a GPU: matrices in the slices of `skinny_weights`, and the launch.
//!
//! A slice's note holds its scales, by super-tiles or by channels, which of the two, and a bit for every channel with a
//! code that is no number; `Fp8Slice` of `quantised_rows.cuh` reads it.

use rayon::prelude::*;

use super::{Activations, Fp8Matmul, Fp8MatmulArgs, Fp8Scales};
use crate::device::Device;
use crate::device::cuda::CudaDevice;
use crate::error::{DeviceError, KernelError};
use crate::kernels::row_format::RowFormat;
use crate::kernels::skinny_matmul::{SkinnyMatmul, SkinnyProduct};
use crate::kernels::skinny_weights::{
    FP8_NOTE_BYTES, SkinnyWeights, SliceFormat, SliceMap, TILE_CHANNELS, TILE_COLUMNS,
};
use crate::kernels::w12_matmul::WeightView;
use crate::kernels::{Kernel, check_size};

/// Where a note, after its scales, says whether they go by super-tiles, and which channels have codes that are no numbers.
const GOES_BY_TILES: usize = 64;
const NAN_CHANNELS: usize = 68;
/// Exponent fields of short scales: 2^-100 to 2^7, so that no product leaves BF16's normal numbers.
const SHORT_EXPONENTS: std::ops::RangeInclusive<u32> = 27..=134;

/// Runs `args`, which passed `check`.
///
/// # Errors
/// [`KernelError::WrongDevice`], [`KernelError::Device`].
pub(super) fn multiply(device: &CudaDevice, args: Fp8MatmulArgs<'_>) -> Result<(), KernelError> {
    let kernel = Fp8Matmul::NAME;
    let products = args
        .products
        .iter()
        .map(|product| SkinnyProduct::new(kernel, product.weight.cuda.as_ref(), product.y));
    let matmul = SkinnyMatmul {
        kernel,
        products: &products.collect::<Result<Vec<_>, _>>()?,
        view: WeightView::Exact,
        rows: match args.activations {
            Activations::Whole => RowFormat::Bf16,
            Activations::Quantised => RowFormat::E4m3,
        },
        num_rows: args.num_rows,
        epilogue: args.epilogue,
    };
    matmul.run(device, args.x)
}

/// A row-major matrix of codes.
pub(in crate::kernels) struct Fp8Codes<'a> {
    pub(in crate::kernels) codes: &'a [u8],
    pub(in crate::kernels) out_features: usize,
    pub(in crate::kernels) in_features: usize,
    pub(in crate::kernels) scales: &'a Fp8Scales,
}

impl Fp8Codes<'_> {
    /// Lays the matrix out in the memory of a GPU.
    ///
    /// # Errors
    /// [`KernelError::Size`] for blocks whose scales a note cannot hold, [`KernelError::Device`] without room.
    ///
    /// # Panics
    /// Panics unless there are as many codes and scales as the shape asks for.
    pub(in crate::kernels) fn lay_out_on(
        &self,
        device: &Device,
    ) -> Result<SkinnyWeights, KernelError> {
        let (n, k) = (self.out_features, self.in_features);
        assert!(
            self.codes.len() == n * k && k > 0,
            "codes of a packed matrix"
        );
        assert_eq!(
            self.scales.values.len(),
            n.div_ceil(self.scales.block_rows) * self.scales.grid_columns(k),
            "scales of a packed matrix"
        );
        if !self.goes_by_channels() {
            let Fp8Scales {
                block_rows,
                block_columns,
                ..
            } = *self.scales;
            let (name, rows) = (Fp8Matmul::NAME, block_rows.next_multiple_of(TILE_CHANNELS));
            check_size(name, "block_rows", block_rows, rows)?;
            let columns = block_columns.next_multiple_of(TILE_COLUMNS);
            check_size(name, "block_columns", block_columns, columns)?;
        }
        let slices = device.install(|| self.slices());
        let no_room = |source: DeviceError| KernelError::Device {
            kernel: Fp8Matmul::NAME,
            source,
        };
        Ok(SkinnyWeights {
            slices: device.buffer_of(&slices).map_err(no_room)?,
            escape_starts: device.buffer_of(&[0]).map_err(no_room)?,
            escapes: device.buffer_of(&[]).map_err(no_room)?,
            format: SliceFormat::Fp8 {
                has_short_scales: self.scales.values.iter().all(|&scale| is_short(scale)),
            },
            out_features: n,
            in_features: k,
        })
    }

    /// Whether a row has one scale.
    fn goes_by_channels(&self) -> bool {
        self.scales.block_columns >= self.in_features
    }

    /// The bytes of all slices, tile by tile.
    fn slices(&self) -> Vec<u8> {
        let (map, k) = (SliceMap::of(self.in_features), self.in_features);
        let super_tile_bytes = TILE_CHANNELS * TILE_COLUMNS;
        let tile_bytes = map.k_tiles * super_tile_bytes + map.num_slices() * FP8_NOTE_BYTES;
        let mut slices = vec![0_u8; self.out_features.div_ceil(TILE_CHANNELS) * tile_bytes];
        let tiles = slices
            .par_chunks_exact_mut(tile_bytes)
            .zip(self.codes.par_chunks(TILE_CHANNELS * k));
        tiles.enumerate().for_each(|(tile, (bytes, rows))| {
            let mut rest = bytes;
            for slice in 0..map.num_slices() {
                let span = map.span(slice);
                let columns = span.start * TILE_COLUMNS..k.min(span.end * TILE_COLUMNS);
                let (note, after) = rest.split_at_mut(FP8_NOTE_BYTES);
                let (codes, after) = after.split_at_mut(span.len() * super_tile_bytes);
                rest = after;
                let mut nan_channels = 0_u32;
                for (channel, row) in rows.chunks_exact(k).enumerate() {
                    let row = &row[columns.clone()];
                    for (codes, row) in codes
                        .chunks_exact_mut(super_tile_bytes)
                        .zip(row.chunks(TILE_COLUMNS))
                    {
                        codes[channel * TILE_COLUMNS..][..row.len()].copy_from_slice(row);
                    }
                    let has_nan = row.iter().any(|code| code & 0x7F == 0x7F);
                    nan_channels |= u32::from(has_nan) << channel;
                }
                self.write_note(note, tile, span, nan_channels);
            }
        });
        slices
    }

    fn write_note(
        &self,
        note: &mut [u8],
        tile: usize,
        span: std::ops::Range<usize>,
        nan_channels: u32,
    ) {
        let first_row = tile * TILE_CHANNELS;
        let scales_of = |row| self.scales.row(row, self.in_features);
        let scales: Vec<f32> = if self.goes_by_channels() {
            let rows = first_row..self.out_features.min(first_row + TILE_CHANNELS);
            rows.map(|row| scales_of(row)[0]).collect()
        } else {
            let of_tile = scales_of(first_row);
            span.map(|k_tile| of_tile[k_tile * TILE_COLUMNS / self.scales.block_columns])
                .collect()
        };
        let goes_by_tiles = u32::from(!self.goes_by_channels());
        for (to, scale) in note[..GOES_BY_TILES].chunks_exact_mut(4).zip(&scales) {
            to.copy_from_slice(&scale.to_le_bytes());
        }
        note[GOES_BY_TILES..][..4].copy_from_slice(&goes_by_tiles.to_le_bytes());
        note[NAN_CHANNELS..][..4].copy_from_slice(&nan_channels.to_le_bytes());
    }
}

/// Whether `ShortScale` of `fp8_decode.cuh` serves: a BF16 number in the middle of its range.
fn is_short(scale: f32) -> bool {
    let bits = scale.to_bits();
    bits & 0xFFFF == 0 && SHORT_EXPONENTS.contains(&(bits >> 23 & 0xFF))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Code and scale of a weight, and whether its channel's note says that a code is no number, as a lane finds them.
    fn look_up(slices: &[u8], k: usize, row: usize, column: usize) -> (u8, f32, bool) {
        let map = SliceMap::of(k);
        let super_tile_bytes = TILE_CHANNELS * TILE_COLUMNS;
        let tile_bytes = map.k_tiles * super_tile_bytes + map.num_slices() * FP8_NOTE_BYTES;
        let (tile, channel) = (row / TILE_CHANNELS, row % TILE_CHANNELS);
        let k_tile = column / TILE_COLUMNS;
        let slice = (0..map.num_slices())
            .find(|&slice| map.span(slice).contains(&k_tile))
            .unwrap();
        let first = map.span(slice).start;
        let note = &slices[tile * tile_bytes + slice * FP8_NOTE_BYTES + first * super_tile_bytes..];
        let word = |at: usize| u32::from_le_bytes(note[at..at + 4].try_into().unwrap());
        let (lane, half) = (channel % 8 * 4 + column % 64 / 16, channel / 8);
        let codes = &note[FP8_NOTE_BYTES + (k_tile - first) * super_tile_bytes..];
        let place = match word(64) {
            0 => channel,
            _ => k_tile - first,
        };
        (
            codes[half * 512 + lane * 16 + column % 16],
            f32::from_bits(word(4 * place)),
            word(68) >> channel & 1 == 1,
        )
    }

    #[test]
    fn lanes_find_their_codes_and_scales() {
        for (n, k) in [(16_usize, 64_usize), (37, 300), (130, 2560), (20, 5200)] {
            for [block_rows, block_columns] in [[128, 128], [1, k], [n, k], [16, 192]] {
                let grid_columns = k.div_ceil(block_columns);
                let scale_of = |row: usize, column: usize| {
                    (row / block_rows * grid_columns + column / block_columns) as f32 + 0.5
                };
                let num_scales = n.div_ceil(block_rows) * grid_columns;
                let scales = Fp8Scales {
                    values: (0..num_scales).map(|i| i as f32 + 0.5).collect(),
                    block_rows,
                    block_columns,
                };
                let mut codes: Vec<u8> = (0..n * k).map(|i| (i * 37 % 127) as u8).collect();
                codes[3 * k + 5] = 0xFF;
                codes[15 * k + k - 1] = 0x7F;
                let matrix = Fp8Codes {
                    codes: &codes,
                    out_features: n,
                    in_features: k,
                    scales: &scales,
                };
                let slices = matrix.slices();
                let format = SliceFormat::Fp8 {
                    has_short_scales: true,
                };
                let words = SkinnyWeights::bytes_of(format, n, k, 0) - slices.len();
                assert_eq!(words, size_of::<u32>(), "the one start of escapes");
                for row in 0..n {
                    for column in 0..k {
                        let (code, scale, _) = look_up(&slices, k, row, column);
                        assert_eq!(code, codes[row * k + column], "{row} {column}");
                        assert_eq!(scale, scale_of(row, column), "{row} {column}");
                    }
                }
                assert!(look_up(&slices, k, 3, 5).2 && look_up(&slices, k, 15, k - 1).2);
                assert!(!look_up(&slices, k, 4, 5).2 && !look_up(&slices, k, 2, k - 1).2);
            }
        }
    }

    #[test]
    fn short_scales_are_bf16_numbers_of_middling_size() {
        for (scale, expected) in [
            (1.0, true),
            (-0.007_812_5, true),
            (255.0, true),
            (256.0, false),
            (0.0, false),
            (1e-31, false),
            (1.0 / 3.0, false),
            (f32::NAN, false),
        ] {
            assert_eq!(is_short(scale), expected, "{scale}");
        }
    }
}
