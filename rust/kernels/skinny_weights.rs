//! Weights in the order in which `cuda/include/slice_sums.cuh` streams them.
//!
//! A matrix is cut into tiles of 16 channels, a tile into slices of whole super-tiles (16 x 64 weights) along K. A slice
//! is one run of bytes that one copy brings: for W12 a note of 64 bytes (where escapes are, exponent bases, the first
//! escapes), the 8-bit planes of its super-tiles, their 4-bit planes; for BF16 the fragments as the matrix instruction
//! takes them; for FP8 a note of 80 bytes (scales) and codes, row by row. Which lane holds which weight is said in
//! `weights::w12`.
//!
//! The cut along K follows from K alone, so that every matrix of one K, merged or not and in whichever format, sums in one
//! order.

use std::ops::Range;

use rayon::prelude::*;

use super::packed_w12::{CodeTile, EscapedWeight, WeightView};
use crate::device::Buffer;
use crate::device::Device;
use crate::error::DeviceError;

/// Channels of a tile.
pub(super) const TILE_CHANNELS: usize = 16;
/// Columns of a super-tile.
pub(super) const TILE_COLUMNS: usize = 64;
/// Slices whose sums one block adds.
pub(super) const OCTET: usize = 8;
/// Super-tiles of a slice, at most: what a warp's registers hold of 32 rows.
const MAX_SLICE_TILES: usize = 5;
/// Bytes of a W12 slice before its planes.
pub(super) const NOTE_BYTES: usize = 64;
/// Bytes of an FP8 slice before its codes.
pub(super) const FP8_NOTE_BYTES: usize = 80;
/// Escapes that fit a note.
const NOTE_ENTRIES: usize = 10;
/// In a note's place for ends: the escapes are found through `escape_starts`.
const CROWDED: u32 = (1 << 30) - 1;
/// Beside the ends in a note: some escape is above its window.
const HAS_ABOVE: u32 = 1 << 30;
const WARP_LANES: usize = 32;
const FRAGMENTS: usize = 4;
/// Bytes of U and V of a super-tile, and of X.
const PLANE8_BYTES: usize = TILE_CHANNELS * TILE_COLUMNS;
const PLANE4_BYTES: usize = PLANE8_BYTES / 2;

/// How K is cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct SliceMap {
    /// Groups of eight slices, a power of two.
    pub(super) num_octets: usize,
    /// Super-tiles along K.
    pub(super) k_tiles: usize,
}

impl SliceMap {
    pub(super) fn of(in_features: usize) -> Self {
        let k_tiles = in_features.div_ceil(TILE_COLUMNS);
        let num_octets = k_tiles
            .div_ceil(OCTET * MAX_SLICE_TILES)
            .next_power_of_two();
        Self {
            num_octets,
            k_tiles,
        }
    }

    pub(super) fn num_slices(&self) -> usize {
        OCTET * self.num_octets
    }

    /// Super-tiles of a slice; none where there are fewer super-tiles than slices.
    pub(super) fn span(&self, slice: usize) -> Range<usize> {
        let start = |slice| slice * self.k_tiles / self.num_slices();
        start(slice)..start(slice + 1)
    }

    /// Super-tiles of the longest slice.
    pub(super) fn slice_tiles(&self) -> usize {
        self.k_tiles.div_ceil(self.num_slices())
    }
}

/// The formats.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum SliceFormat {
    W12,
    Bf16,
    Fp8 {
        /// Whether all scales are what `ShortScale` of `fp8_decode.cuh` asks for.
        has_short_scales: bool,
    },
}

impl SliceFormat {
    pub(super) fn note_bytes(self) -> usize {
        match self {
            Self::W12 => NOTE_BYTES,
            Self::Bf16 => 0,
            Self::Fp8 { .. } => FP8_NOTE_BYTES,
        }
    }

    /// Bytes of a super-tile that a view reads.
    pub(super) fn read_bytes(self, view: WeightView) -> usize {
        match view {
            WeightView::Exact => self.tile_bytes(),
            WeightView::Q => PLANE8_BYTES,
        }
    }

    /// Bytes of a super-tile in memory.
    pub(super) fn tile_bytes(self) -> usize {
        match self {
            Self::W12 => PLANE8_BYTES + PLANE4_BYTES,
            Self::Bf16 => 2 * PLANE8_BYTES,
            Self::Fp8 { .. } => PLANE8_BYTES,
        }
    }
}

/// Super-tiles at which the slices of a matrix of this K begin, and where the last ends: for those who write the layout
/// on the device.
pub fn slice_starts(in_features: usize) -> Vec<usize> {
    let map = SliceMap::of(in_features);
    let ends = (0..map.num_slices()).map(|slice| map.span(slice).end);
    std::iter::once(0).chain(ends).collect()
}

/// The parts of a matrix that was written on the device; lengths follow from the shape.
#[derive(Clone, Debug)]
pub struct CudaParts {
    /// Slices, tile by tile.
    pub slices: Buffer<u8>,
    /// First escape of every super-tile, and the end. BF16: one zero.
    pub escape_starts: Buffer<u32>,
    /// Escapes, `lane << 21 | slot << 16 | bits`.
    pub escapes: Buffer<u32>,
}

/// A matrix on a GPU.
#[derive(Clone, Debug)]
pub(super) struct SkinnyWeights {
    pub(super) slices: Buffer<u8>,
    /// First escape of every super-tile, and the end; looked at only where a note is crowded.
    pub(super) escape_starts: Buffer<u32>,
    pub(super) escapes: Buffer<u32>,
    pub(super) format: SliceFormat,
    pub(super) out_features: usize,
    pub(super) in_features: usize,
}

impl SkinnyWeights {
    /// Takes parts that were written on the device. Nothing reads them here: codes decode to *some* weights whatever they
    /// are.
    ///
    /// # Panics
    /// Panics if a part is shorter than its shape needs.
    pub(super) fn from_parts(
        format: SliceFormat,
        out_features: usize,
        in_features: usize,
        parts: CudaParts,
    ) -> Self {
        let map = SliceMap::of(in_features);
        let num_tiles = out_features.div_ceil(TILE_CHANNELS);
        let tile_bytes = map.k_tiles * format.tile_bytes() + map.num_slices() * format.note_bytes();
        assert!(
            parts.slices.len() >= num_tiles * tile_bytes,
            "slices of a matrix"
        );
        if format == SliceFormat::W12 {
            assert!(
                parts.escape_starts.len() > num_tiles * map.k_tiles,
                "starts of escapes"
            );
        }
        Self {
            slices: parts.slices,
            escape_starts: parts.escape_starts,
            escapes: parts.escapes,
            format,
            out_features,
            in_features,
        }
    }

    /// Bytes of all parts of a matrix of this shape with `num_escapes` escapes (W12 alone has any).
    pub(super) fn bytes_of(
        format: SliceFormat,
        out_features: usize,
        in_features: usize,
        num_escapes: usize,
    ) -> usize {
        let map = SliceMap::of(in_features);
        let num_tiles = out_features.div_ceil(TILE_CHANNELS);
        let tile_bytes = map.k_tiles * format.tile_bytes() + map.num_slices() * format.note_bytes();
        let num_starts = match format {
            SliceFormat::W12 => num_tiles * map.k_tiles + 1,
            SliceFormat::Bf16 | SliceFormat::Fp8 { .. } => 1,
        };
        num_tiles * tile_bytes + (num_starts + num_escapes) * size_of::<u32>()
    }

    /// Bytes of all parts.
    pub(super) fn num_bytes(&self) -> usize {
        self.slices.len() + (self.escape_starts.len() + self.escapes.len()) * size_of::<u32>()
    }

    /// Lays BF16 weights out. `read_rows(tile, rows)` gives the bits of a tile's channels, `in_features` each; missing
    /// channels stay as they are, zero.
    ///
    /// # Errors
    /// [`DeviceError`] when the GPU has no room.
    pub(super) fn of_bf16(
        device: &Device,
        out_features: usize,
        in_features: usize,
        read_rows: impl Fn(usize, &mut [u16]) + Sync,
    ) -> Result<Self, DeviceError> {
        let map = SliceMap::of(in_features);
        let format = SliceFormat::Bf16;
        let num_tiles = out_features.div_ceil(TILE_CHANNELS);
        let stride = map.k_tiles * format.tile_bytes();
        let mut slices = vec![0_u8; num_tiles * stride];
        device.install(|| {
            slices
                .par_chunks_exact_mut(stride)
                .enumerate()
                .for_each(|(tile, bytes)| {
                    let mut rows = vec![0; TILE_CHANNELS * in_features];
                    read_rows(tile, &mut rows);
                    let weight = |channel: usize, column: usize| {
                        let row = &rows[channel * in_features..][..in_features];
                        row.get(column).copied().unwrap_or(0)
                    };
                    for (k_tile, bytes) in bytes.chunks_exact_mut(format.tile_bytes()).enumerate() {
                        for (i, lane) in bytes.chunks_exact_mut(16).enumerate() {
                            let (fragment, lane_index) = (i / WARP_LANES, i % WARP_LANES);
                            for (slot, bits) in lane.chunks_exact_mut(2).enumerate() {
                                let (channel, column) = place(lane_index, 8 * fragment + slot);
                                let bit = weight(channel, k_tile * TILE_COLUMNS + column);
                                bits.copy_from_slice(&bit.to_le_bytes());
                            }
                        }
                    }
                });
        });
        Ok(Self {
            slices: device.buffer_of(&slices)?,
            escape_starts: device.buffer_of(&[0])?,
            escapes: device.buffer_of(&[])?,
            format,
            out_features,
            in_features,
        })
    }

    /// Lays W12 codes out. `bases` holds a byte for each channel of the padded matrix; `read_piece(tile, piece, codes,
    /// escapes)` gives a super-tile.
    ///
    /// # Errors
    /// [`DeviceError`] when the GPU has no room.
    pub(super) fn of_w12(
        device: &Device,
        out_features: usize,
        in_features: usize,
        bases: &[u8],
        read_piece: impl Fn(usize, usize, &mut CodeTile, &mut Vec<EscapedWeight>) + Sync,
    ) -> Result<Self, DeviceError> {
        let map = SliceMap::of(in_features);
        let format = SliceFormat::W12;
        let num_tiles = out_features.div_ceil(TILE_CHANNELS);
        let stride = map.k_tiles * format.tile_bytes() + map.num_slices() * NOTE_BYTES;
        let mut slices = vec![0_u8; num_tiles * stride];
        let entries: Vec<Vec<Vec<u32>>> = device.install(|| {
            let tiles = slices
                .par_chunks_exact_mut(stride)
                .zip(bases.par_chunks_exact(16));
            tiles
                .enumerate()
                .map(|(tile, (bytes, bases))| write_tile(map, tile, bytes, bases, &read_piece))
                .collect()
        });
        let mut escape_starts = vec![0_u32];
        let mut escapes = Vec::new();
        for entries in entries.iter().flatten() {
            escapes.extend(entries);
            escape_starts.push(u32::try_from(escapes.len()).expect("escapes of one matrix"));
        }
        Ok(Self {
            slices: device.buffer_of(&slices)?,
            escape_starts: device.buffer_of(&escape_starts)?,
            escapes: device.buffer_of(&escapes)?,
            format,
            out_features,
            in_features,
        })
    }
}

/// Writes the slices of a tile; returns the escape entries of its super-tiles.
fn write_tile(
    map: SliceMap,
    tile: usize,
    bytes: &mut [u8],
    bases: &[u8],
    read_piece: &(impl Fn(usize, usize, &mut CodeTile, &mut Vec<EscapedWeight>) + Sync),
) -> Vec<Vec<u32>> {
    let mut codes = [[0; TILE_COLUMNS]; TILE_CHANNELS];
    let mut found = Vec::new();
    let mut all_entries = Vec::with_capacity(map.k_tiles);
    let mut rest = bytes;
    for slice in 0..map.num_slices() {
        let span = map.span(slice);
        let (note, after) = rest.split_at_mut(NOTE_BYTES);
        let (plane8, after) = after.split_at_mut(span.len() * PLANE8_BYTES);
        let (plane4, after) = after.split_at_mut(span.len() * PLANE4_BYTES);
        rest = after;
        let first = all_entries.len();
        for ((piece, plane8), plane4) in span
            .clone()
            .zip(plane8.chunks_exact_mut(PLANE8_BYTES))
            .zip(plane4.chunks_exact_mut(PLANE4_BYTES))
        {
            found.clear();
            read_piece(tile, piece, &mut codes, &mut found);
            write_planes(&codes, plane8, plane4);
            let mut entries: Vec<u32> = found.iter().map(entry).collect();
            entries.sort_unstable();
            all_entries.push(entries);
        }
        let first_tile =
            u32::try_from(tile * map.k_tiles + span.start).expect("super-tiles of a matrix");
        write_note(note, first_tile, bases, &all_entries[first..]);
    }
    all_entries
}

/// Fills a slice's note; `SliceNote` in `w12_matmul.cu` says how it is read.
fn write_note(note: &mut [u8], first_tile: u32, bases: &[u8], entries: &[Vec<u32>]) {
    let num_escapes: usize = entries.iter().map(Vec::len).sum();
    let mut ends = CROWDED;
    if num_escapes <= NOTE_ENTRIES {
        let mut end = 0;
        ends = 0;
        for j in 0..MAX_SLICE_TILES {
            end += entries.get(j).map_or(0, Vec::len) as u32;
            ends |= end << (6 * j);
        }
        for (to, entry) in note[24..].chunks_exact_mut(4).zip(entries.iter().flatten()) {
            to.copy_from_slice(&entry.to_le_bytes());
        }
    }
    if entries
        .iter()
        .flatten()
        .any(|&entry| is_above(entry, bases))
    {
        ends |= HAS_ABOVE;
    }
    note[..4].copy_from_slice(&ends.to_le_bytes());
    note[4..8].copy_from_slice(&first_tile.to_le_bytes());
    note[8..24].copy_from_slice(bases);
}

/// Whether an escape's exponent is more than its channel's window begins with, and so lies behind the window.
fn is_above(entry: u32, bases: &[u8]) -> bool {
    let (channel, _) = place((entry >> 21) as usize, (entry >> 16 & 31) as usize);
    entry >> 7 & 0xFF >= u32::from(bases[channel])
}

/// Channel and column inside a super-tile of a lane's slot.
fn place(lane: usize, slot: usize) -> (usize, usize) {
    let (g, t) = (lane / 4, lane % 4);
    let (fragment, within) = (slot / 8, slot % 8);
    (
        g + 8 * (within / 2 % 2),
        16 * t + 4 * fragment + 2 * (within / 4) + within % 2,
    )
}

/// `lane << 21 | slot << 16 | bits`.
fn entry(escape: &EscapedWeight) -> u32 {
    let (g, t) = (escape.channel % 8, escape.column / 16);
    let within = escape.column % 4;
    let slot =
        8 * (escape.column % 16 / 4) + 4 * (within / 2) + 2 * (escape.channel / 8) + within % 2;
    ((4 * g + t) as u32) << 21 | (slot as u32) << 16 | u32::from(escape.bits)
}

/// Words U, V and X of a super-tile, `[lane][fragment]` each.
fn write_planes(codes: &CodeTile, plane8: &mut [u8], plane4: &mut [u8]) {
    let (plane_u, plane_v) = plane8.split_at_mut(PLANE8_BYTES / 2);
    let words = plane_u.chunks_exact_mut(4).zip(plane_v.chunks_exact_mut(4));
    for (i, ((u, v), x)) in words.zip(plane4.chunks_exact_mut(4)).enumerate() {
        let (lane, fragment) = (i / FRAGMENTS, i % FRAGMENTS);
        let code = |slot: usize| -> u16 {
            let (channel, column) = place(lane, 8 * fragment + slot);
            codes[channel][column]
        };
        // Low and high bytes of slots 0..4 (A) and 4..8 (B).
        let low = |first| u32::from_le_bytes(std::array::from_fn(|k| code(first + k) as u8));
        let high =
            |first| u32::from_le_bytes(std::array::from_fn(|k| (code(first + k) >> 8) as u8));
        let (low_a, low_b) = (low(0), low(4));
        let words = [
            high(0) | high(4).rotate_left(4),
            (low_a & 0xF0F0_F0F0) | ((low_b >> 4) & 0x0F0F_0F0F),
            (low_a & 0x0F0F_0F0F) | (low_b.rotate_right(4) & 0xF0F0_F0F0),
        ];
        for (to, word) in [u, v, x].into_iter().zip(words) {
            to.copy_from_slice(&word.to_le_bytes());
        }
    }
}

#[cfg(test)]
mod tests;
