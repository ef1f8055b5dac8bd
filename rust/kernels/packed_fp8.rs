//! FP8 (E4M3) matrices with their scales, in the order in which the matmul reads them.
//!
//! The format's numbers: sign, four bits of exponent (bias 7), three of mantissa; no infinities, `0x7F` and `0xFF` are
//! NaN, the largest is 448. A weight is `bf16(code * scale)`, the product in fp32.

use half::bf16;
use rayon::prelude::*;

use super::fp8_matmul::launch::Fp8Codes;
use super::simd::LANES;
use super::skinny_weights::{CudaParts, SkinnyWeights, SliceFormat};
use crate::device::{Backend, Buffer, Device};
use crate::error::KernelError;

/// Largest finite value.
pub(super) const MAX_E4M3: f32 = 448.0;

/// Value of every code.
static VALUES: [f32; 256] = values();

const fn values() -> [f32; 256] {
    let mut values = [0.0; 256];
    let mut code = 0;
    while code < 256 {
        let (exponent, mantissa) = ((code as u32 >> 3) & 15, code as u32 & 7);
        let magnitude = match (exponent, mantissa) {
            (15, 7) => f32::NAN,
            // 2^-9 steps below the smallest normal.
            (0, _) => mantissa as f32 / 512.0,
            _ => f32::from_bits(((exponent + 120) << 23) | (mantissa << 20)),
        };
        values[code] = if code & 0x80 == 0 {
            magnitude
        } else {
            -magnitude
        };
        code += 1;
    }
    values
}

/// Value of `code`.
#[inline(always)]
pub(super) fn value_of(code: u8) -> f32 {
    VALUES[usize::from(code)]
}

/// The value of E4M3 nearest to `x`, ties to even, beyond the largest the largest; NaN stays NaN.
#[inline(always)]
pub(super) fn round_to_e4m3(x: f32) -> f32 {
    const SMALLEST_NORMAL: f32 = 0.015_625;
    let clamped = x.clamp(-MAX_E4M3, MAX_E4M3);
    if clamped.abs() < SMALLEST_NORMAL {
        return (clamped * 512.0).round_ties_even() / 512.0;
    }
    if clamped.is_nan() {
        return clamped;
    }
    let bits = clamped.to_bits();
    let rounded = bits + 0x7_FFFF + ((bits >> 20) & 1);
    f32::from_bits(rounded & 0xFFF0_0000)
}

/// The code of [`round_to_e4m3`]; `x` is a number.
pub(super) fn code_of(x: f32) -> u8 {
    let rounded = round_to_e4m3(x);
    let magnitude = rounded.abs();
    let code = if magnitude < 0.015_625 {
        (magnitude * 512.0) as u32
    } else {
        (magnitude.to_bits() >> 20) - (120 << 3)
    };
    code as u8 | u8::from(rounded.is_sign_negative()) << 7
}

/// Scales of a matrix `[rows, columns]`: one for every block, blocks row by row.
#[derive(Clone, Debug, PartialEq)]
pub struct Fp8Scales {
    /// `[ceil(rows / block_rows), ceil(columns / block_columns)]`.
    pub values: Vec<f32>,
    /// Rows that share a scale.
    pub block_rows: usize,
    /// Columns that share a scale.
    pub block_columns: usize,
}

impl Fp8Scales {
    /// Blocks beside each other in a matrix of so many columns.
    pub fn grid_columns(&self, columns: usize) -> usize {
        columns.div_ceil(self.block_columns)
    }

    pub(super) fn row(&self, row: usize, columns: usize) -> &[f32] {
        let grid_columns = self.grid_columns(columns);
        &self.values[row / self.block_rows * grid_columns..][..grid_columns]
    }
}

/// The BF16 weights that row-major `codes` and their scales stand for.
pub fn dequantise(codes: &[u8], columns: usize, scales: &Fp8Scales) -> Vec<bf16> {
    let mut weights = vec![bf16::ZERO; codes.len()];
    let rows = weights
        .par_chunks_mut(columns)
        .zip(codes.par_chunks(columns));
    rows.enumerate().for_each(|(row, (weights, codes))| {
        let scales_of_row = scales.row(row, columns);
        let blocks = weights
            .chunks_mut(scales.block_columns)
            .zip(codes.chunks(scales.block_columns));
        for ((weights, codes), scale) in blocks.zip(scales_of_row) {
            for (weight, &code) in weights.iter_mut().zip(codes) {
                *weight = bf16::from_f32(value_of(code) * scale);
            }
        }
    });
    weights
}

/// An FP8 matrix `[out_features, in_features]` stored as tiles of 16 output channels, `[ceil(N / 16)][K][16]`, as BF16
/// matrices are. Missing channels of the last tile are zero.
#[derive(Clone, Debug)]
pub struct PackedFp8 {
    tiles: Buffer<u8>,
    /// Of each tile, for every block of columns, the scale of each lane.
    lane_scales: Buffer<f32>,
    /// The matrix on a GPU; `tiles` and `lane_scales` are empty then.
    pub(super) cuda: Option<SkinnyWeights>,
    block_columns: usize,
    out_features: usize,
    in_features: usize,
}

impl PackedFp8 {
    /// Packs row-major codes.
    ///
    /// # Panics
    /// Panics unless there are `out_features * in_features` codes and a scale for every block.
    pub fn pack(codes: &[u8], out_features: usize, in_features: usize, scales: &Fp8Scales) -> Self {
        let (n, k) = (out_features, in_features);
        assert!(codes.len() == n * k && k > 0, "codes of a packed matrix");
        let grid_columns = scales.grid_columns(k);
        assert_eq!(
            scales.values.len(),
            n.div_ceil(scales.block_rows) * grid_columns,
            "scales of a packed matrix"
        );
        let mut tiles = Buffer::zeroed(n.next_multiple_of(LANES) * k);
        tiles
            .host_mut()
            .par_chunks_exact_mut(k * LANES)
            .zip(codes.par_chunks(k * LANES))
            .for_each(|(tile, rows)| {
                for (lane, row) in rows.chunks_exact(k).enumerate() {
                    for (channels, &code) in tile.chunks_exact_mut(LANES).zip(row) {
                        channels[lane] = code;
                    }
                }
            });
        let mut lane_scales = Buffer::zeroed(n.next_multiple_of(LANES) * grid_columns);
        let tile_len = grid_columns * LANES;
        for (tile, values) in lane_scales
            .host_mut()
            .chunks_exact_mut(tile_len)
            .enumerate()
        {
            for lane in 0..LANES.min(n - tile * LANES) {
                let of_row = scales.row(tile * LANES + lane, k);
                for (block, scale) in of_row.iter().enumerate() {
                    values[block * LANES + lane] = *scale;
                }
            }
        }
        Self {
            tiles,
            lane_scales,
            cuda: None,
            block_columns: scales.block_columns,
            out_features,
            in_features,
        }
    }

    /// Packs row-major codes into the memory of `device`, as its kernels read them. On a GPU a tile of 16 channels
    /// shares its scales, or a row has one: what checkpoints hold.
    ///
    /// # Errors
    /// [`KernelError::Size`] for blocks of another shape on a GPU, [`KernelError::Device`] when it has no room.
    ///
    /// # Panics
    /// As for [`Self::pack`].
    pub fn pack_on(
        device: &Device,
        codes: &[u8],
        out_features: usize,
        in_features: usize,
        scales: &Fp8Scales,
    ) -> Result<Self, KernelError> {
        if device.backend() == Backend::Host {
            return Ok(Self::pack(codes, out_features, in_features, scales));
        }
        let matrix = Fp8Codes {
            codes,
            out_features,
            in_features,
            scales,
        };
        Ok(Self {
            tiles: Buffer::zeroed(0),
            lane_scales: Buffer::zeroed(0),
            cuda: Some(matrix.lay_out_on(device)?),
            block_columns: scales.block_columns,
            out_features,
            in_features,
        })
    }

    /// A matrix that was written on the device, in the layout of `fp8_matmul::launch`, with a scale of BF16 for each row.
    ///
    /// # Panics
    /// Panics if `slices` are shorter than the shape needs.
    pub(super) fn from_cuda_parts(
        out_features: usize,
        in_features: usize,
        parts: CudaParts,
    ) -> Self {
        let format = SliceFormat::Fp8 {
            has_short_scales: true,
        };
        let cuda = SkinnyWeights::from_parts(format, out_features, in_features, parts);
        Self {
            tiles: Buffer::zeroed(0),
            lane_scales: Buffer::zeroed(0),
            cuda: Some(cuda),
            block_columns: in_features,
            out_features,
            in_features,
        }
    }

    /// Bytes of a packed matrix of this shape with scales for blocks of so many columns, for planning memory before
    /// there is one.
    pub fn num_bytes_of(
        backend: Backend,
        out_features: usize,
        in_features: usize,
        block_columns: usize,
    ) -> usize {
        if backend == Backend::Cuda {
            let format = SliceFormat::Fp8 {
                has_short_scales: true,
            };
            return SkinnyWeights::bytes_of(format, out_features, in_features, 0);
        }
        let channels = out_features.next_multiple_of(LANES);
        let grid_columns = in_features.div_ceil(block_columns);
        channels * (in_features + grid_columns * size_of::<f32>())
    }

    /// Number of output channels.
    pub fn out_features(&self) -> usize {
        self.out_features
    }

    /// Length of a row.
    pub fn in_features(&self) -> usize {
        self.in_features
    }

    /// Columns that share a scale.
    pub fn block_columns(&self) -> usize {
        self.block_columns
    }

    /// Bytes of codes and scales.
    pub fn num_bytes(&self) -> usize {
        let host = self.tiles.len() + self.lane_scales.len() * size_of::<f32>();
        host + self.cuda.as_ref().map_or(0, SkinnyWeights::num_bytes)
    }

    /// Codes of columns `first_k..first_k + len` of a tile.
    #[inline(always)]
    pub(super) fn codes(&self, tile: usize, first_k: usize, len: usize) -> &[[u8; LANES]] {
        let start = tile * self.in_features + first_k;
        &self.tiles.host().as_chunks().0[start..start + len]
    }

    /// Scales of a tile's channels in block `block` of columns.
    #[inline(always)]
    pub(super) fn scales(&self, tile: usize, block: usize) -> &[f32; LANES] {
        let grid_columns = self.in_features.div_ceil(self.block_columns);
        &self.lane_scales.host().as_chunks().0[tile * grid_columns + block]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_have_the_values_of_the_format() {
        for (code, value) in [
            (0x00, 0.0),
            (0x01, 0.001_953_125),
            (0x07, 0.013_671_875),
            (0x08, 0.015_625),
            (0x38, 1.0),
            (0x3C, 1.5),
            (0x7E, 448.0),
            (0xFE, -448.0),
            (0xB9, -1.125),
        ] {
            assert_eq!(value_of(code), value, "{code:#x}");
        }
        assert!(value_of(0x7F).is_nan() && value_of(0xFF).is_nan());
        assert!(value_of(0x80).is_sign_negative());
        let finite = |code: &u8| !value_of(*code).is_nan();
        for code in (0..=255_u8).filter(finite) {
            assert_eq!(round_to_e4m3(value_of(code)), value_of(code));
            assert_eq!(code_of(value_of(code)), code);
        }
    }

    #[test]
    fn rounding_takes_the_nearest_value_and_of_two_the_even_one() {
        // Between any two neighbours: just below the middle, the middle, just above.
        for code in 0..0x7E_u8 {
            let (low, high) = (value_of(code), value_of(code + 1));
            let middle = (low + high) / 2.0;
            let even = if code % 2 == 0 { low } else { high };
            assert_eq!(round_to_e4m3(middle), even, "{code:#x}");
            assert_eq!(round_to_e4m3(-middle), -even);
            assert_eq!(round_to_e4m3(middle.next_down()), low);
            assert_eq!(round_to_e4m3(middle.next_up()), high);
        }
        assert_eq!(round_to_e4m3(1e30), 448.0);
        assert_eq!(round_to_e4m3(f32::NEG_INFINITY), -448.0);
        assert!(round_to_e4m3(f32::NAN).is_nan());
    }
}
