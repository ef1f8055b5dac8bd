//! BF16 matrices in the order in which the matmul reads them.

use half::bf16;
use rayon::prelude::*;

use super::simd::LANES;
use crate::device::Buffer;

/// A BF16 matrix `[out_features, in_features]` stored as tiles of 16 output channels, `[ceil(N / 16)][K][16]`, so that
/// a lane of a vector load is a channel. Missing channels of the last tile are zero.
#[derive(Clone, Debug)]
pub struct PackedBf16 {
    tiles: Buffer<bf16>,
    out_features: usize,
    in_features: usize,
}

impl PackedBf16 {
    /// Packs row-major weights; `weights.len()` must be `out_features * in_features`.
    pub fn pack(weights: &[bf16], out_features: usize, in_features: usize) -> Self {
        assert_eq!(
            weights.len(),
            out_features * in_features,
            "weights of a packed matrix"
        );
        assert!(in_features > 0, "a packed matrix has columns");
        let mut tiles = Buffer::zeroed(Self::len_of(out_features, in_features));
        tiles
            .host_mut()
            .par_chunks_exact_mut(in_features * LANES)
            .zip(weights.par_chunks(in_features * LANES))
            .for_each(|(tile, rows)| {
                for (lane, row) in rows.chunks_exact(in_features).enumerate() {
                    for (channels, &w) in tile.chunks_exact_mut(LANES).zip(row) {
                        channels[lane] = w;
                    }
                }
            });
        Self {
            tiles,
            out_features,
            in_features,
        }
    }

    /// Bytes of a packed matrix of this shape, for planning memory before there is one.
    pub fn num_bytes_of(out_features: usize, in_features: usize) -> usize {
        Self::len_of(out_features, in_features) * size_of::<bf16>()
    }

    fn len_of(out_features: usize, in_features: usize) -> usize {
        out_features.next_multiple_of(LANES) * in_features
    }

    /// Number of output channels.
    pub fn out_features(&self) -> usize {
        self.out_features
    }

    /// Length of a row.
    pub fn in_features(&self) -> usize {
        self.in_features
    }

    /// Bytes of the packed weights.
    pub fn num_bytes(&self) -> usize {
        self.tiles.len() * size_of::<bf16>()
    }

    /// Copies output channel `channel`, widened, to `row` (`in_features` long).
    pub fn unpack_row(&self, channel: usize, row: &mut [f32]) {
        let tile = &self.tiles.host()[(channel / LANES) * self.in_features * LANES..];
        for (k, value) in row.iter_mut().enumerate() {
            // `to_f32` would quiet a signalling NaN; this is the bits as they are.
            let bits = tile[k * LANES + channel % LANES].to_bits();
            *value = f32::from_bits(u32::from(bits) << 16);
        }
    }

    pub(super) fn tiles(&self) -> &[bf16] {
        self.tiles.host()
    }
}
