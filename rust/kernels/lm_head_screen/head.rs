//! The INT8 copy of an LM head, with what every row's bound needs.

use half::bf16;
use rayon::prelude::*;

use super::super::packed_bf16::PackedBf16;
use super::super::simd::bytes::{QuadRow, ZERO_BYTE};
use super::super::simd::{self, LANES, Lanes, Task};
use super::head_codes::{HeadCodes, ScreenScan};
use crate::device::{Backend, Buffer, Device};
use crate::error::KernelError;

/// Largest value of a weight's code.
const MAX_CODE: f64 = 127.0;

/// Adding this and taking it away rounds an f64 below 2^51 to the nearest integer.
pub(super) const ROUND: f64 = 6_755_399_441_055_744.0; // 1.5 * 2^52

/// INT8 codes of an LM head: `w = scale * code + residual`, with one scale per output channel.
///
/// Codes lie in tiles `[channels / 16][in_features / 4][16][4]`, so that a lane of a byte product is a channel. Norms are
/// rounded up, and a channel that holds a NaN or an infinity has an infinite residual.
#[derive(Clone, Debug)]
pub struct ScreenedHead {
    codes: Buffer<u8>,
    channels: Vec<TileBounds>,
    /// The codes on a GPU; `codes` and `channels` are empty then.
    cuda: Option<HeadCodes>,
    out_features: usize,
    in_features: usize,
    largest_norm: f64,
}

/// What the bounds of a tile's channels are made of; zero in the missing channels of the last tile.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct TileBounds {
    /// The scale, exactly as codes are multiplied.
    pub(super) scale: [f32; LANES],
    /// At least the norm of `w - scale * code`.
    pub(super) residual: [f32; LANES],
    /// At least the norm of `scale * code`.
    pub(super) coded: [f32; LANES],
}

impl ScreenedHead {
    /// Longest row that can be screened: sums of byte products must fit 32 bits.
    pub const MAX_IN_FEATURES: usize = 1 << 16;

    /// Codes `weight`.
    ///
    /// # Panics
    /// When the rows are longer than [`Self::MAX_IN_FEATURES`].
    pub fn new(weight: &PackedBf16) -> Self {
        let (n, k) = (weight.out_features(), weight.in_features());
        assert!(k <= Self::MAX_IN_FEATURES, "rows of {k} are too long");
        let num_tiles = n.div_ceil(LANES);
        let mut codes = Buffer::zeroed(num_tiles * tile_bytes(k));
        let mut channels = vec![TileBounds::default(); num_tiles];
        codes
            .host_mut()
            .par_chunks_exact_mut(tile_bytes(k))
            .zip(weight.tiles().par_chunks_exact(k * LANES))
            .zip(&mut channels)
            .for_each(|((codes, weights), bounds)| {
                *bounds = simd::dispatch(CodeTile { weights, codes });
            });
        let norms = channels.iter().flat_map(|tile| {
            (0..LANES).map(|lane| f64::from(tile.residual[lane]) + f64::from(tile.coded[lane]))
        });
        Self {
            largest_norm: norms.filter(|norm| norm.is_finite()).fold(0.0, f64::max),
            codes,
            channels,
            cuda: None,
            out_features: n,
            in_features: k,
        }
    }

    /// Codes `weight` where it lies, for kernels on `device`.
    ///
    /// # Errors
    /// [`KernelError::WrongDevice`] when it lies on another device; [`KernelError::Device`].
    pub fn new_on(device: &Device, weight: &PackedBf16) -> Result<Self, KernelError> {
        let Device::Cuda(cuda) = device else {
            return Ok(Self::new(weight));
        };
        let codes = HeadCodes::new(device, cuda, weight)?;
        Ok(Self {
            codes: Buffer::zeroed(0),
            channels: Vec::new(),
            largest_norm: codes.largest_norm()?,
            cuda: Some(codes),
            out_features: weight.out_features(),
            in_features: weight.in_features(),
        })
    }

    /// The same head, scanned by `scan` on a GPU: for tests, for which is faster is known.
    #[must_use]
    pub fn scanned_by(mut self, scan: ScreenScan) -> Self {
        if let Some(codes) = &mut self.cuda {
            codes.scan = scan;
        }
        self
    }

    /// The codes on a GPU.
    pub(super) fn on_cuda(&self) -> Option<&HeadCodes> {
        self.cuda.as_ref()
    }

    /// Number of output channels: the vocabulary.
    pub fn out_features(&self) -> usize {
        self.out_features
    }

    /// Length of a row.
    pub fn in_features(&self) -> usize {
        self.in_features
    }

    /// Bytes in memory.
    pub fn num_bytes(&self) -> usize {
        let backend = match self.cuda {
            Some(_) => Backend::Cuda,
            None => Backend::Host,
        };
        Self::bytes_for(backend, self.out_features, self.in_features)
    }

    /// Bytes that the copy of a head of this shape takes.
    pub fn bytes_for(backend: Backend, out_features: usize, in_features: usize) -> usize {
        match backend {
            Backend::Host => {
                let tile = tile_bytes(in_features) + size_of::<TileBounds>();
                out_features.div_ceil(LANES) * tile
            }
            Backend::Cuda => HeadCodes::bytes_for(out_features, in_features),
        }
    }

    /// Codes of tile `tile`, four columns of 16 channels at a time.
    pub(super) fn tile(&self, tile: usize) -> &[QuadRow] {
        let len = tile_bytes(self.in_features);
        self.codes.host()[tile * len..][..len].as_chunks().0
    }

    /// Bounds of all tiles.
    pub(super) fn channels(&self) -> &[TileBounds] {
        &self.channels
    }

    /// At least the norm of every channel without NaN or infinity.
    pub(super) fn largest_norm(&self) -> f64 {
        self.largest_norm
    }

    /// Shrinks all norms: what an unsound bound looks like.
    #[cfg(test)]
    pub(super) fn with_loosened_bounds(mut self, factor: f32) -> Self {
        for tile in &mut self.channels {
            for lane in 0..LANES {
                tile.residual[lane] *= factor;
                tile.coded[lane] *= factor;
            }
        }
        self
    }
}

const fn tile_bytes(in_features: usize) -> usize {
    in_features.div_ceil(4) * size_of::<QuadRow>()
}

/// Codes one tile. Written lane by lane over arrays, which the compiler turns into the chosen instructions.
struct CodeTile<'a> {
    /// `[in_features][16]`.
    weights: &'a [bf16],
    codes: &'a mut [u8],
}

impl Task for CodeTile<'_> {
    type Output = TileBounds;

    #[inline(always)]
    fn run<L: Lanes>(self) -> TileBounds {
        let weights = self.weights.as_chunks::<LANES>().0;
        // Magnitudes order like their bits; NaN and infinity lie above all others.
        let mut largest = [0_u16; LANES];
        for weights in weights {
            for lane in 0..LANES {
                largest[lane] = largest[lane].max(weights[lane].to_bits() & 0x7FFF);
            }
        }
        let mut bounds = TileBounds::default();
        let mut inverse = [0.0; LANES];
        for lane in 0..LANES {
            let largest = bf16::from_bits(largest[lane]);
            if largest.is_finite() {
                bounds.scale[lane] = (f64::from(largest.to_f32()) / MAX_CODE) as f32;
            }
            if bounds.scale[lane] > 0.0 {
                inverse[lane] = 1.0 / f64::from(bounds.scale[lane]);
            }
        }
        let scale = bounds.scale.map(f64::from);
        let (mut residual, mut coded) = ([0.0_f64; LANES], [0.0_f64; LANES]);
        self.codes.fill(ZERO_BYTE);
        for (k, weights) in weights.iter().enumerate() {
            let codes = &mut self.codes.as_chunks_mut::<{ 4 * LANES }>().0[k / 4];
            for lane in 0..LANES {
                let w = f64::from(f32::from_bits(u32::from(weights[lane].to_bits()) << 16));
                let code = (w * inverse[lane] + ROUND - ROUND).clamp(-MAX_CODE, MAX_CODE);
                let product = scale[lane] * code;
                residual[lane] += (w - product) * (w - product);
                coded[lane] += product * product;
                // A NaN becomes 0 here; its channel is never bounded.
                codes[4 * lane + k % 4] = (code as i32 + i32::from(ZERO_BYTE)) as u8;
            }
        }
        for lane in 0..LANES {
            bounds.residual[lane] = norm_above(residual[lane]);
            bounds.coded[lane] = norm_above(coded[lane]);
            if !bf16::from_bits(largest[lane]).is_finite() {
                bounds.residual[lane] = f32::INFINITY;
                bounds.coded[lane] = 0.0;
            }
        }
        bounds
    }
}

/// An fp32 above the root of a sum of at most 2^16 squares; the f64 sum is off by less than one part in 2^30.
fn norm_above(squares: f64) -> f32 {
    if squares == 0.0 {
        return 0.0;
    }
    ((squares.sqrt() * (1.0 + 2.0_f64.powi(-30))) as f32).next_up()
}
