//! W12 matrices in the order in which the host's matmul reads them.
//!
//! As in `packed_bf16` a tile is 16 output channels and a vector lane one channel. The eight bits of the Q view and the
//! four bits below them lie apart, so that the Q view streams one byte a weight. One 32-bit word a lane:
//! - `eight`, a word for columns 4i..4i+4. Low half: column 4i in bits 15 (sign) and 10..4 (offset, mantissa top); column
//!   4i + 2 in bits 11 (sign), 14..12 (top three bits of the offset) and 3..0. High half: columns 4i + 1 and 4i + 3.
//! - `four`, a word for columns 8i..8i+8: nibble j of the low half is column 8i + 2j, of the high half 8i + 2j + 1.
//!
//! So two columns decode at once into the halves of a word, each a BF16 value once the channel's base is added to both
//! exponent fields: three bit operations for the 8-bit view, two for the nibbles, one addition.
//!
//! Both arrays are ordered `[tile][word][lane]`: side by side, tiles make as many streams for the memory to serve, which
//! is faster than one run that alternates between them.

use std::ops::Range;

use rayon::prelude::*;

use super::simd::{LANES, Lanes, Words};
use super::skinny_weights::{CudaParts, SkinnyWeights, SliceFormat};
use crate::device::{Backend, Buffer, Device};
use crate::error::DeviceError;

/// Columns of a piece: what is decoded at a time, and over which escapes are counted.
pub(super) const PIECE_COLUMNS: usize = 64;
/// Columns of one `four` word.
const STEP: usize = 8;
/// How far ahead of its use a line of weights is asked for, in steps: about what one core reads in 200 ns.
const PREFETCH_STEPS: usize = 8;
/// Bits of a pair of weights that the Q view knows.
const PAIR_EIGHT: u32 = 0x87F0_87F0;
/// Bits of a pair of weights below the Q view.
const PAIR_FOUR: u32 = 0x000F_000F;
/// The middle of what the Q view leaves open.
const PAIR_MIDPOINT: u32 = 0x0008_0008;
/// Bits of a second pair that lie three above their place in an `eight` word; the others lie four below theirs.
const SECOND_HIGH: u32 = 0x0700_0700;

/// Words of all lanes: two decoded columns, or a step of a packed plane.
pub(super) type LaneWords = [u32; LANES];

/// Codes of 16 channels and 64 columns: `[s 0000 oooo mmmmmmm]`, a BF16 value less the channel's base.
pub(crate) type CodeTile = [[u16; PIECE_COLUMNS]; LANES];

/// A weight that has no code, by its place in a [`CodeTile`].
#[derive(Clone, Copy, Debug)]
pub(crate) struct EscapedWeight {
    /// Channel of the tile.
    pub(crate) channel: usize,
    /// Column of the tile.
    pub(crate) column: usize,
    /// BF16 bits.
    pub(crate) bits: u16,
}

impl EscapedWeight {
    /// The escape in a word: column, channel, bits.
    fn entry(self) -> u32 {
        ((self.column * LANES + self.channel) as u32) << 16 | u32::from(self.bits)
    }

    fn from_entry(entry: u32) -> Self {
        let place = (entry >> 16) as usize;
        Self {
            channel: place % LANES,
            column: place / LANES,
            bits: entry as u16,
        }
    }
}

/// What a multiplication reads of the weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum WeightView {
    /// Every bit: the checkpoint's BF16 weights.
    Exact,
    /// Sign, exponent and the top three bits of the mantissa, the rest at the midpoint. Escapes above the window are exact,
    /// those below count as the window's smallest code.
    Q,
}

/// A W12 matrix `[out_features, in_features]`, packed for [`super::w12_matmul::W12Matmul`].
#[derive(Clone, Debug)]
pub struct PackedW12 {
    eight: Buffer<u32>,
    /// Empty when only the Q view is kept.
    four: Buffer<u32>,
    /// Base of each channel, padding included.
    bases: Buffer<u8>,
    /// First escape of each tile's every piece, `[tile][piece]`, and the end.
    escape_starts: Vec<u32>,
    /// See [`EscapedWeight::entry`].
    escapes: Vec<u32>,
    /// The matrix on a GPU; all above are empty then.
    pub(super) cuda: Option<SkinnyWeights>,
    out_features: usize,
    in_features: usize,
}

impl PackedW12 {
    /// Packs a matrix that `read_piece(tile, piece, codes, escapes)` gives piece by piece. `bases` holds a byte for each
    /// channel of the padded matrix.
    pub(crate) fn pack(
        out_features: usize,
        in_features: usize,
        bases: &[u8],
        read_piece: impl Fn(usize, usize, &mut CodeTile, &mut Vec<EscapedWeight>) + Sync,
    ) -> Self {
        let num_tiles = out_features.div_ceil(LANES);
        let num_steps = in_features.div_ceil(STEP);
        assert_eq!(bases.len(), num_tiles * LANES, "bases of a packed matrix");
        assert!(num_steps > 0, "a packed matrix has columns");
        let tile_len = num_steps * LANES;
        let mut eight = Buffer::<u32>::zeroed(num_tiles * 2 * tile_len);
        let mut four = Buffer::<u32>::zeroed(num_tiles * tile_len);
        let escapes: Vec<Vec<Vec<u32>>> = eight
            .host_mut()
            .par_chunks_exact_mut(2 * tile_len)
            .zip(four.host_mut().par_chunks_exact_mut(tile_len))
            .enumerate()
            .map(|(tile, (eight, four))| {
                let mut codes = [[0; PIECE_COLUMNS]; LANES];
                let mut found = Vec::new();
                let eight = eight.chunks_mut(PIECE_COLUMNS / 4 * LANES);
                let four = four.chunks_mut(PIECE_COLUMNS / STEP * LANES);
                let pieces = eight.zip(four).enumerate();
                let escapes = pieces.map(|(piece, (eight, four))| {
                    found.clear();
                    read_piece(tile, piece, &mut codes, &mut found);
                    pack_codes(&codes, eight, four);
                    found.iter().copied().map(EscapedWeight::entry).collect()
                });
                escapes.collect()
            })
            .collect();
        let mut packed = Self {
            eight,
            four,
            bases: Buffer::from_slice(bases),
            escape_starts: vec![0],
            escapes: Vec::new(),
            cuda: None,
            out_features,
            in_features,
        };
        for escapes in escapes.iter().flatten() {
            packed.escapes.extend(escapes);
            let end = u32::try_from(packed.escapes.len()).expect("escapes of one matrix");
            packed.escape_starts.push(end);
        }
        packed
    }

    /// A matrix that was written on the device, in the layout of [`super::skinny_weights`].
    ///
    /// # Panics
    /// Panics if a part is shorter than its shape needs.
    pub fn from_cuda_parts(out_features: usize, in_features: usize, parts: CudaParts) -> Self {
        let weights = SkinnyWeights::from_parts(SliceFormat::W12, out_features, in_features, parts);
        Self::on_cuda(weights)
    }

    /// As [`pack`](Self::pack), into the memory of `device`, as its kernels read it.
    ///
    /// # Errors
    /// [`DeviceError`] when it has no room.
    pub(crate) fn pack_on(
        device: &Device,
        out_features: usize,
        in_features: usize,
        bases: &[u8],
        read_piece: impl Fn(usize, usize, &mut CodeTile, &mut Vec<EscapedWeight>) + Sync,
    ) -> Result<Self, DeviceError> {
        let (n, k) = (out_features, in_features);
        Ok(match device.backend() {
            Backend::Host => Self::pack(n, k, bases, read_piece),
            Backend::Cuda => Self::on_cuda(SkinnyWeights::of_w12(device, n, k, bases, read_piece)?),
        })
    }

    fn on_cuda(weights: SkinnyWeights) -> Self {
        Self {
            eight: Buffer::zeroed(0),
            four: Buffer::zeroed(0),
            bases: Buffer::zeroed(0),
            escape_starts: Vec::new(),
            escapes: Vec::new(),
            out_features: weights.out_features,
            in_features: weights.in_features,
            cuda: Some(weights),
        }
    }

    /// Number of output channels.
    pub fn out_features(&self) -> usize {
        self.out_features
    }

    /// Length of a row.
    pub fn in_features(&self) -> usize {
        self.in_features
    }

    /// Drops what the Q view does not read, on the host; a GPU's slices hold both together.
    pub fn into_q_view(mut self) -> Self {
        self.four = Buffer::zeroed(0);
        self
    }

    /// Whether all bits are there, or the Q view alone.
    pub fn is_exact(&self) -> bool {
        self.cuda.is_some() || !self.four.is_empty()
    }

    /// Bytes of the packed weights, all parts.
    pub fn num_bytes(&self) -> usize {
        let bytes_of = match (&self.cuda, self.is_exact()) {
            (Some(cuda), _) => return cuda.num_bytes(),
            (None, true) => Self::num_bytes_of,
            (None, false) => Self::q_view_bytes_of,
        };
        let num_escapes = self.escapes.len();
        bytes_of(
            Backend::Host,
            self.out_features,
            self.in_features,
            num_escapes,
        )
    }

    /// Bytes of a packed matrix of this shape with `num_escapes` escapes.
    pub fn num_bytes_of(
        backend: Backend,
        out_features: usize,
        in_features: usize,
        num_escapes: usize,
    ) -> usize {
        let (n, k) = (out_features, in_features);
        match backend {
            Backend::Host => {
                let four_words = n.div_ceil(LANES) * k.div_ceil(STEP) * LANES;
                Self::q_view_bytes_of(backend, n, k, num_escapes) + four_words * size_of::<u32>()
            }
            Backend::Cuda => SkinnyWeights::bytes_of(SliceFormat::W12, n, k, num_escapes),
        }
    }

    /// Bytes of the Q view of such a matrix alone; a GPU's slices hold all bits with it.
    pub fn q_view_bytes_of(
        backend: Backend,
        out_features: usize,
        in_features: usize,
        num_escapes: usize,
    ) -> usize {
        if backend == Backend::Cuda {
            return Self::num_bytes_of(backend, out_features, in_features, num_escapes);
        }
        let num_tiles = out_features.div_ceil(LANES);
        let num_words = num_tiles * 2 * in_features.div_ceil(STEP) * LANES;
        let num_starts = num_tiles * in_features.div_ceil(PIECE_COLUMNS) + 1;
        num_tiles * LANES + (num_words + num_starts + num_escapes) * size_of::<u32>()
    }

    /// Copies output channel `channel`, widened, to `row` (`in_features` long).
    pub fn unpack_row(&self, channel: usize, row: &mut [f32]) {
        let (tile, lane) = (channel / LANES, channel % LANES);
        let base = u16::from(self.bases.host()[channel]) << 7;
        for (i, row) in row.chunks_mut(PIECE_COLUMNS).enumerate() {
            let piece = self.piece(tile, i);
            for (k, value) in row.iter_mut().enumerate() {
                let code = code_of(piece.eight[k / 4][lane], piece.four[k / STEP][lane], k);
                *value = widen(code + base);
            }
            let escapes = piece.escapes.iter().copied().map(EscapedWeight::from_entry);
            for escape in escapes.filter(|escape| escape.channel == lane) {
                row[escape.column] = widen(escape.bits);
            }
        }
    }

    /// Piece `piece` of a tile.
    #[inline(always)]
    fn piece(&self, tile: usize, piece: usize) -> Piece<'_> {
        let steps = self.in_features.div_ceil(STEP);
        let first = piece * (PIECE_COLUMNS / STEP);
        let num_steps = (PIECE_COLUMNS / STEP).min(steps - first);
        let start = tile * steps + first;
        let escapes = tile * self.in_features.div_ceil(PIECE_COLUMNS) + piece;
        let escapes = self.escape_starts[escapes]..self.escape_starts[escapes + 1];
        Piece {
            eight: &self.eight.host().as_chunks().0[2 * start..][..2 * num_steps],
            four: match self.is_exact() {
                true => &self.four.host().as_chunks().0[start..][..num_steps],
                false => &[],
            },
            escapes: &self.escapes[escapes.start as usize..escapes.end as usize],
        }
    }

    /// Decodes pieces `pieces` of a tile into pairs of columns (low half, high half); columns after the last hold junk.
    /// `pairs` has room for whole pieces.
    #[inline(always)]
    pub(super) fn decode<L: Lanes>(
        &self,
        view: WeightView,
        tile: usize,
        pieces: Range<usize>,
        pairs: &mut [LaneWords],
    ) {
        let bases = &self.bases.host()[tile * LANES..][..LANES];
        let base: LaneWords = std::array::from_fn(|lane| u32::from(bases[lane]) * 0x0080_0080);
        let base = L::Words::load(&base);
        for (i, pairs) in pieces.zip(pairs.chunks_exact_mut(PIECE_COLUMNS / 2)) {
            let piece = self.piece(tile, i);
            match view {
                WeightView::Exact => piece.decode_exact(base, pairs),
                WeightView::Q => piece.decode_q(base, pairs),
            }
            for escape in piece.escapes.iter().copied().map(EscapedWeight::from_entry) {
                let is_below = ((escape.bits >> 7) as u8) < bases[escape.channel];
                if view == WeightView::Exact || !is_below {
                    let shift = 16 * (escape.column % 2);
                    let pair = &mut pairs[escape.column / 2][escape.channel];
                    *pair = *pair & !(0xFFFF << shift) | u32::from(escape.bits) << shift;
                }
            }
        }
    }
}

/// 64 columns of one tile.
struct Piece<'a> {
    eight: &'a [LaneWords],
    four: &'a [LaneWords],
    escapes: &'a [u32],
}

impl Piece<'_> {
    #[inline(always)]
    fn decode_exact<W: Words>(&self, base: W, pairs: &mut [LaneWords]) {
        let (keep, low) = (W::splat(PAIR_EIGHT), W::splat(PAIR_FOUR));
        let steps = self.eight.as_chunks::<2>().0.iter().zip(self.four);
        for ((eight, four), pairs) in steps.zip(pairs.as_chunks_mut::<4>().0) {
            for eight in eight {
                W::prefetch(std::ptr::from_ref(eight).wrapping_add(2 * PREFETCH_STEPS));
            }
            W::prefetch(std::ptr::from_ref(four).wrapping_add(PREFETCH_STEPS));
            let four = W::load(four);
            let [a, b] = split_pairs(W::load(&eight[0]));
            let [c, d] = split_pairs(W::load(&eight[1]));
            let rest = [
                four.and(low),
                four.shift_right::<4>().and(low),
                four.shift_right::<8>().and(low),
                four.shift_right::<12>().and(low),
            ];
            for ((pair, top), rest) in pairs.iter_mut().zip([a, b, c, d]).zip(rest) {
                keep.select(top, rest).add(base).store(pair);
            }
        }
    }

    #[inline(always)]
    fn decode_q<W: Words>(&self, base: W, pairs: &mut [LaneWords]) {
        let keep = W::splat(PAIR_EIGHT);
        let base = base.add(W::splat(PAIR_MIDPOINT));
        for (eight, pairs) in self.eight.iter().zip(pairs.as_chunks_mut::<2>().0) {
            W::prefetch(std::ptr::from_ref(eight).wrapping_add(2 * PREFETCH_STEPS));
            let tops = split_pairs(W::load(eight));
            for (pair, top) in pairs.iter_mut().zip(tops) {
                top.and(keep).add(base).store(pair);
            }
        }
    }
}

/// Both pairs of an `eight` word; only the bits of [`PAIR_EIGHT`] are meant.
#[inline(always)]
fn split_pairs<W: Words>(word: W) -> [W; 2] {
    let second = W::splat(SECOND_HIGH).select(word.shift_right::<4>(), word.shift_left::<4>());
    [word, second]
}

/// Packs codes of up to 64 columns; `eight` and `four` say how many.
fn pack_codes(codes: &CodeTile, eight: &mut [u32], four: &mut [u32]) {
    let pair = |lane: usize, k: usize| -> u32 {
        u32::from(codes[lane][k]) | u32::from(codes[lane][k + 1]) << 16
    };
    for (i, words) in eight.chunks_exact_mut(LANES).enumerate() {
        for (lane, word) in words.iter_mut().enumerate() {
            let first = pair(lane, 4 * i) & PAIR_EIGHT;
            let second = pair(lane, 4 * i + 2) & PAIR_EIGHT;
            let high = (second & SECOND_HIGH) << 4;
            *word = first | high | (second & !SECOND_HIGH) >> 4;
        }
    }
    for (i, words) in four.chunks_exact_mut(LANES).enumerate() {
        for (lane, word) in words.iter_mut().enumerate() {
            let nibbles = |j: usize| (pair(lane, STEP * i + 2 * j) & PAIR_FOUR) << (4 * j);
            *word = (0..4).map(nibbles).sum();
        }
    }
}

/// The code of column `k` from its packed words: what [`Piece::decode_exact`] does, for one weight.
fn code_of(eight: u32, four: u32, k: usize) -> u16 {
    let eight = (eight >> (16 * (k % 2))) as u16;
    let four = (four >> (16 * (k % 2) + 4 * (k % STEP / 2))) as u16 & 0xF;
    let top = if k % 4 < 2 {
        eight
    } else {
        (eight >> 4 & 0x0700) | (eight << 4 & 0x80F0)
    };
    (top & 0x87F0) | four
}

/// BF16 bits as fp32, NaN payloads kept.
fn widen(bits: u16) -> f32 {
    f32::from_bits(u32::from(bits) << 16)
}
