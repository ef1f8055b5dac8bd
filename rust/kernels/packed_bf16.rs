//! BF16 matrices in the order in which the matmul reads them.

use half::bf16;
use half::slice::HalfFloatSliceExt as _;
use rayon::prelude::*;

use super::simd::LANES;
use super::skinny_weights::{CudaParts, SkinnyWeights, SliceFormat, TILE_CHANNELS};
use crate::device::{Backend, Buffer, Device};
use crate::error::DeviceError;

/// A BF16 matrix `[out_features, in_features]` stored as tiles of 16 output channels, `[ceil(N / 16)][K][16]`, so that
/// a lane of a vector load is a channel. Missing channels of the last tile are zero.
#[derive(Clone, Debug)]
pub struct PackedBf16 {
    tiles: Buffer<bf16>,
    /// The matrix on a GPU; `tiles` is empty then.
    pub(super) cuda: Option<SkinnyWeights>,
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
            cuda: None,
            out_features,
            in_features,
        }
    }

    /// A matrix that was written on the device, in the layout of [`super::skinny_weights`].
    ///
    /// # Panics
    /// Panics if a part is shorter than its shape needs.
    pub fn from_cuda_parts(out_features: usize, in_features: usize, parts: CudaParts) -> Self {
        let cuda = SkinnyWeights::from_parts(SliceFormat::Bf16, out_features, in_features, parts);
        Self {
            tiles: Buffer::zeroed(0),
            cuda: Some(cuda),
            out_features,
            in_features,
        }
    }

    /// Packs row-major weights into the memory of `device`, as its kernels read them.
    ///
    /// # Errors
    /// [`DeviceError`] when it has no room.
    pub fn pack_on(
        device: &Device,
        weights: &[bf16],
        out_features: usize,
        in_features: usize,
    ) -> Result<Self, DeviceError> {
        let (n, k) = (out_features, in_features);
        if device.backend() == Backend::Host {
            return Ok(Self::pack(weights, n, k));
        }
        assert_eq!(weights.len(), n * k, "weights of a packed matrix");
        assert!(k > 0, "a packed matrix has columns");
        let bits: &[u16] = weights.reinterpret_cast();
        let cuda = SkinnyWeights::of_bf16(device, n, k, |tile, rows| {
            let own = &bits[tile * TILE_CHANNELS * k..];
            let len = own.len().min(rows.len());
            rows[..len].copy_from_slice(&own[..len]);
        })?;
        Ok(Self {
            tiles: Buffer::zeroed(0),
            cuda: Some(cuda),
            out_features,
            in_features,
        })
    }

    /// Bytes of a packed matrix of this shape, for planning memory before there is one.
    pub fn num_bytes_of(backend: Backend, out_features: usize, in_features: usize) -> usize {
        match backend {
            Backend::Host => Self::len_of(out_features, in_features) * size_of::<bf16>(),
            Backend::Cuda => {
                SkinnyWeights::bytes_of(SliceFormat::Bf16, out_features, in_features, 0)
            }
        }
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
        let host = self.tiles.len() * size_of::<bf16>();
        host + self.cuda.as_ref().map_or(0, SkinnyWeights::num_bytes)
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
