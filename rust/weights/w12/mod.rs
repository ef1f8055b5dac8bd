//! W12: BF16 matrices in 12 bits a weight, without changing a bit.
//!
//! Sixteen consecutive exponents per output channel take four bits; a weight outside its channel's window is an
//! *escape*, kept with all its bits beside the planes. [`encode`] is a pure function of the weights' bits; tensors that
//! do not pay stay BF16 ([`KeepReason`]).
//!
//! # Layout
//! `[out_features, in_features]` is padded to 16 channels and 64 columns and cut into *super-tiles* of 16 x 64 weights,
//! in order `[n_tile][k_tile]`. A super-tile is four fragments f of `mma.m16n8k16`, weights as operand A; lane = 4g + t
//! (g in 0..8, t in 0..4) holds channels g and g + 8 and the 16 consecutive columns 16t..16t + 16, four a fragment:
//!
//! | register | halves (low, high) | channel | columns            | names      |
//! |----------|--------------------|---------|--------------------|------------|
//! | r0       | A0, A1             | g       | 16t + 4f, + 1      | slots 0, 1 |
//! | r1       | A2, A3             | g + 8   | 16t + 4f, + 1      | slots 2, 3 |
//! | r2       | B0, B1             | g       | 16t + 4f + 2, + 3  | slots 4, 5 |
//! | r3       | B2, B3             | g + 8   | 16t + 4f + 2, + 3  | slots 6, 7 |
//!
//! (slot of a lane = 8f + the number above). So operand B of fragment f is, for lane 4g + t and token g,
//! b0 = x[16t + 4f], x[16t + 4f + 1] and b1 = x[16t + 4f + 2], x[16t + 4f + 3]: 16 consecutive activations a lane.
//!
//! A weight's *code* is sign s, offset o = exponent - base (4 bits), mantissa m (7 bits). A fragment's eight codes are
//! three little-endian words a lane; with k the byte index 0..4 and A, B the eight weights:
//! - U: bit 7 of byte k = s of A\[k\], bits 2..0 = top three bits of o of A\[k\], bits 6..4 = those of B\[k\], bit 3 of byte
//!   (k + 1) % 4 = s of B\[k\];
//! - V: high nibble of byte k = (low bit of o, top three bits of m) of A\[k\], low nibble that of B\[k\];
//! - X: low nibble of byte k = low four bits of m of A\[k\], high nibble of byte (k + 3) % 4 = those of B\[k\].
//!
//! Decoding to exponent 112 + o (then scale the channel's sum by 2^(base - 112)):
//! ```text
//! HA = (U & 0x87878787) | 0x38383838          HB = (rotr(U, 4) & 0x87878787) | 0x38383838
//! LA = (V & 0xF0F0F0F0) | (X & 0x0F0F0F0F)    LB = rotl((V & 0x0F0F0F0F) | (X & 0xF0F0F0F0), 4)
//! r0 = prmt(LA, HA, 0x5140)  r1 = prmt(LA, HA, 0x7362)  r2 = prmt(LB, HB, 0x5140)  r3 = prmt(LB, HB, 0x7362)
//! ```
//! - `plane8`, 1024 B a super-tile: `[U: lane][f]` words (16 B a lane, 512 B), then `[V: lane][f]`. It is the **Q view**
//!   (sign, exponent, three mantissa bits): the decoding above with X = 0x88888888, the midpoint.
//! - `plane4`, 512 B a super-tile: `[X: lane][f]` words.
//! - `base`, one byte a channel of the padded matrix, 1..=239 (112 for padding channels).
//! - `counts`, u16 escapes of each super-tile (at most 1024); `escapes`, u32 in super-tile order, inside one ascending by
//!   lane, then slot: bits 25..21 lane, 20..16 slot, 15..0 the weight's own bits, rest zero. A non-zero escape is never
//!   subnormal and its exponent + 112 - base lies in 1..=254, so that it can be rescaled like the codes.
//!
//! At an escape the planes hold the nearest code of its sign: o = m = 0 below the window, o = 15, m = 127 above. The Q
//! view leaves escapes below the window as they are (less than 1.07 times the window's smallest value each, next to
//! nothing in a window that is filled) and patches those above. Padding is code 0, never an escape; it does not decode to zero, so readers give padded columns
//! zero activations (or skip them) and drop padded channels.

mod check;
mod escapes;
mod planes;
mod window;

use half::bf16;
use half::slice::HalfFloatSliceExt;
use rayon::prelude::*;

use crate::device::Device;
use crate::error::DeviceError;
use crate::kernels::w12_matmul::{EscapedWeight, PackedW12};
use escapes::Escape;
use planes::CodeTile;
pub(super) use planes::{TILE_CHANNELS, TILE_COLUMNS};
pub use window::KeepReason;

/// Bytes of the 8-bit plane of one super-tile: U words, then V words.
pub(super) const PLANE8_TILE_BYTES: usize = 1024;
/// Bytes of the 4-bit plane of one super-tile: X words.
pub(super) const PLANE4_TILE_BYTES: usize = 512;
/// Base of channels that only pad the last tile.
const PADDING_BASE: u8 = 112;
/// Largest share of escapes, in percent.
const MAX_ESCAPE_PERCENT: u64 = 1;
/// Largest size against BF16, in percent (exclusive).
const MAX_SIZE_PERCENT: u64 = 90;

/// One matrix in W12; the module's head holds the layout.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct W12Matrix {
    out_features: usize,
    in_features: usize,
    plane8: Vec<u8>,
    plane4: Vec<u8>,
    base: Vec<u8>,
    counts: Vec<u16>,
    escapes: Vec<u32>,
}

/// The five parts of a [`W12Matrix`] as they lie in a file.
#[derive(Clone, Copy, Debug)]
pub struct W12Planes<'a> {
    /// U and V of every super-tile, 1024 B each.
    pub plane8: &'a [u8],
    /// X of every super-tile, 512 B each.
    pub plane4: &'a [u8],
    /// First exponent of each channel's window, padding channels included.
    pub base: &'a [u8],
    /// Escapes of each super-tile.
    pub counts: &'a [u16],
    /// Escape entries in super-tile order.
    pub escapes: &'a [u32],
}

/// What a matrix costs.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct W12Stats {
    /// Weights outside their channel's window.
    pub num_escapes: usize,
    /// Bits a weight of the unpadded matrix, all five parts included.
    pub bits_per_weight: f64,
    /// Bytes of the five parts.
    pub num_bytes: usize,
    /// Bytes of the BF16 matrix.
    pub source_bytes: usize,
}

/// What [`encode`] makes of a matrix.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Encoding {
    /// The matrix in W12.
    W12(W12Matrix),
    /// The matrix should stay BF16.
    KeepBf16(KeepReason),
}

/// Numbers of super-tiles along both axes.
#[derive(Clone, Copy)]
struct Grid {
    n_tiles: usize,
    k_tiles: usize,
}

impl Grid {
    fn new(out_features: usize, in_features: usize) -> Self {
        Self {
            n_tiles: out_features.div_ceil(TILE_CHANNELS),
            k_tiles: in_features.div_ceil(TILE_COLUMNS),
        }
    }

    fn num_tiles(self) -> usize {
        self.n_tiles * self.k_tiles
    }

    /// Bytes of all parts, given the number of escapes.
    fn num_bytes(self, num_escapes: usize) -> usize {
        self.num_tiles() * (PLANE8_TILE_BYTES + PLANE4_TILE_BYTES + size_of::<u16>())
            + self.n_tiles * TILE_CHANNELS
            + num_escapes * size_of::<u32>()
    }
}

/// Encodes row-major `weights` `[out_features, in_features]` on the threads of the current pool; the result depends on
/// the bits alone. Panics when `weights` has another length or a size is zero.
pub fn encode(weights: &[bf16], out_features: usize, in_features: usize) -> Encoding {
    assert_eq!(
        weights.len(),
        out_features * in_features,
        "weights of a matrix to encode"
    );
    assert!(!weights.is_empty(), "a matrix to encode has weights");
    let bits: &[u16] = weights.reinterpret_cast();
    let grid = Grid::new(out_features, in_features);
    let bases = match choose_bases(bits, in_features, grid) {
        Ok(bases) => bases,
        Err(reason) => return Encoding::KeepBf16(reason),
    };
    let mut matrix = W12Matrix {
        out_features,
        in_features,
        plane8: vec![0; grid.num_tiles() * PLANE8_TILE_BYTES],
        plane4: vec![0; grid.num_tiles() * PLANE4_TILE_BYTES],
        base: bases,
        counts: vec![0; grid.num_tiles()],
        escapes: Vec::new(),
    };
    let escapes: Vec<Vec<u32>> = bits
        .par_chunks(TILE_CHANNELS * in_features)
        .zip(matrix.base.par_chunks_exact(TILE_CHANNELS))
        .zip(
            matrix
                .plane8
                .par_chunks_exact_mut(grid.k_tiles * PLANE8_TILE_BYTES),
        )
        .zip(
            matrix
                .plane4
                .par_chunks_exact_mut(grid.k_tiles * PLANE4_TILE_BYTES),
        )
        .zip(matrix.counts.par_chunks_exact_mut(grid.k_tiles))
        .map(|((((rows, bases), plane8), plane4), counts)| {
            let mut escapes = Vec::new();
            let mut codes = [[0; TILE_COLUMNS]; TILE_CHANNELS];
            let tiles = plane8
                .chunks_exact_mut(PLANE8_TILE_BYTES)
                .zip(plane4.chunks_exact_mut(PLANE4_TILE_BYTES))
                .zip(counts);
            for (k_tile, ((plane8, plane4), count)) in tiles.enumerate() {
                let before = escapes.len();
                let first = k_tile * TILE_COLUMNS;
                let has_escapes = planes::take_codes(rows, in_features, first, bases, &mut codes);
                if has_escapes {
                    escapes::collect(rows, in_features, first, bases, &mut escapes);
                }
                planes::pack_tile(&codes, plane8, plane4);
                *count = (escapes.len() - before) as u16;
            }
            escapes
        })
        .collect();
    matrix.escapes = escapes.concat();
    Encoding::W12(matrix)
}

/// Every channel's base, padding included, or why the matrix stays BF16. Of several reasons the first channel's counts,
/// then escapes, then size.
fn choose_bases(bits: &[u16], in_features: usize, grid: Grid) -> Result<Vec<u8>, KeepReason> {
    let windows: Vec<_> = bits
        .par_chunks_exact(in_features)
        .map(window::choose)
        .collect();
    let mut bases = Vec::with_capacity(grid.n_tiles * TILE_CHANNELS);
    let mut num_escapes = 0;
    for (channel, window) in windows.into_iter().enumerate() {
        let window = window.map_err(|defect| defect.of_channel(channel))?;
        bases.push(window.base);
        num_escapes += window.num_escapes;
    }
    bases.resize(grid.n_tiles * TILE_CHANNELS, PADDING_BASE);
    if num_escapes as u64 * 100 > bits.len() as u64 * MAX_ESCAPE_PERCENT {
        return Err(KeepReason::TooManyEscapes {
            num_escapes,
            num_weights: bits.len(),
        });
    }
    let out_features = bits.len() / in_features;
    if !W12Matrix::pays(out_features, in_features, num_escapes) {
        return Err(KeepReason::DoesNotPay {
            num_bytes: grid.num_bytes(num_escapes),
            source_bytes: size_of_val(bits),
        });
    }
    Ok(bases)
}

impl W12Matrix {
    /// Bytes of all five parts of a matrix of this shape with `num_escapes` escapes.
    pub fn num_bytes_of(out_features: usize, in_features: usize, num_escapes: usize) -> usize {
        Grid::new(out_features, in_features).num_bytes(num_escapes)
    }

    /// Whether such a matrix is small enough against BF16 to be converted.
    pub fn pays(out_features: usize, in_features: usize, num_escapes: usize) -> bool {
        let num_bytes = Self::num_bytes_of(out_features, in_features, num_escapes);
        let source_bytes = out_features * in_features * size_of::<bf16>();
        (num_bytes as u64 * 100) < source_bytes as u64 * MAX_SIZE_PERCENT
    }

    /// Number of output channels.
    pub fn out_features(&self) -> usize {
        self.out_features
    }

    /// Length of a row.
    pub fn in_features(&self) -> usize {
        self.in_features
    }

    /// The parts, for writing them to a file.
    pub fn planes(&self) -> W12Planes<'_> {
        W12Planes {
            plane8: &self.plane8,
            plane4: &self.plane4,
            base: &self.base,
            counts: &self.counts,
            escapes: &self.escapes,
        }
    }

    /// Escapes and sizes.
    pub fn stats(&self) -> W12Stats {
        let num_weights = self.out_features * self.in_features;
        let num_bytes = self.grid().num_bytes(self.escapes.len());
        W12Stats {
            num_escapes: self.escapes.len(),
            bits_per_weight: num_bytes as f64 * 8.0 / num_weights as f64,
            num_bytes,
            source_bytes: num_weights * size_of::<bf16>(),
        }
    }

    /// The row-major weights, bit for bit those that were encoded.
    pub fn decode(&self) -> Vec<bf16> {
        let mut weights = vec![bf16::ZERO; self.out_features * self.in_features];
        let first_escapes = self.first_escapes();
        weights
            .par_chunks_mut(TILE_CHANNELS * self.in_features)
            .enumerate()
            .for_each(|(n_tile, rows)| {
                self.decode_band(n_tile, &self.escapes[first_escapes[n_tile]..], rows);
            });
        weights
    }

    /// The weights of [`Self::decode`], 16 rows at a time and in order, on this thread: for checksums, which are one long
    /// chain anyway.
    pub fn decode_in_order(&self, mut take: impl FnMut(&[bf16])) {
        let mut band = vec![bf16::ZERO; TILE_CHANNELS * self.in_features];
        let mut escapes = &self.escapes[..];
        for n_tile in 0..self.grid().n_tiles {
            let num_rows = TILE_CHANNELS.min(self.out_features - n_tile * TILE_CHANNELS);
            let rows = &mut band[..num_rows * self.in_features];
            escapes = self.decode_band(n_tile, escapes, rows);
            take(rows);
        }
    }

    /// Decodes a row of super-tiles, whose escapes come first in `escapes`; the others are returned.
    fn decode_band<'e>(
        &self,
        n_tile: usize,
        mut escapes: &'e [u32],
        rows: &mut [bf16],
    ) -> &'e [u32] {
        let k_tiles = self.grid().k_tiles;
        let rows: &mut [u16] = rows.reinterpret_cast_mut();
        let mut codes = [[0; TILE_COLUMNS]; TILE_CHANNELS];
        for k_tile in 0..k_tiles {
            let first = k_tile * TILE_COLUMNS;
            self.unpack_tile(n_tile * k_tiles + k_tile, &mut codes);
            let bases = &self.base[n_tile * TILE_CHANNELS..];
            planes::put_codes(&codes, bases, rows, self.in_features, first);
            let count = self.counts[n_tile * k_tiles + k_tile];
            let (own, rest) = escapes.split_at(usize::from(count));
            for escape in own.iter().map(|&entry| Escape::from_entry(entry)) {
                rows[escape.channel() * self.in_features + first + escape.column()] = escape.bits;
            }
            escapes = rest;
        }
        escapes
    }

    /// The matrix in the order in which the host's `w12_matmul` reads it.
    pub fn pack(&self) -> PackedW12 {
        let (n, k) = (self.out_features, self.in_features);
        PackedW12::pack(n, k, &self.base, self.pieces())
    }

    /// The matrix in the memory of `device`, as its `w12_matmul` reads it.
    ///
    /// # Errors
    /// [`DeviceError`] when it has no room.
    pub fn pack_on(&self, device: &Device) -> Result<PackedW12, DeviceError> {
        let (n, k) = (self.out_features, self.in_features);
        PackedW12::pack_on(device, n, k, &self.base, self.pieces())
    }

    /// Gives codes and escapes of a super-tile, by its row and column of them.
    fn pieces(&self) -> impl Fn(usize, usize, &mut CodeTile, &mut Vec<EscapedWeight>) + Sync + '_ {
        let grid = self.grid();
        let mut tile_starts = Vec::with_capacity(grid.num_tiles() + 1);
        let mut start = 0;
        tile_starts.push(0);
        for &count in &self.counts {
            start += usize::from(count);
            tile_starts.push(start);
        }
        move |n_tile, k_tile, codes, escapes| {
            let tile = n_tile * grid.k_tiles + k_tile;
            self.unpack_tile(tile, codes);
            let entries = &self.escapes[tile_starts[tile]..tile_starts[tile + 1]];
            escapes.extend(entries.iter().map(|&entry| {
                let escape = Escape::from_entry(entry);
                EscapedWeight {
                    channel: escape.channel(),
                    column: escape.column(),
                    bits: escape.bits,
                }
            }));
        }
    }

    fn grid(&self) -> Grid {
        Grid::new(self.out_features, self.in_features)
    }

    fn unpack_tile(&self, tile: usize, codes: &mut CodeTile) {
        planes::unpack_tile(
            &self.plane8[tile * PLANE8_TILE_BYTES..][..PLANE8_TILE_BYTES],
            &self.plane4[tile * PLANE4_TILE_BYTES..][..PLANE4_TILE_BYTES],
            codes,
        );
    }

    /// Index of the first escape of every row of super-tiles.
    fn first_escapes(&self) -> Vec<usize> {
        self.counts
            .chunks_exact(self.grid().k_tiles)
            .scan(0, |next, counts| {
                let first = *next;
                *next += counts
                    .iter()
                    .map(|&count| usize::from(count))
                    .sum::<usize>();
                Some(first)
            })
            .collect()
    }
}

#[cfg(test)]
mod tests;
