//! Codes of a super-tile to plane words and back.
//!
//! A code is held in 16 bits like the BF16 value it came from, with the offset in the window in place of the exponent:
//! `[s 0000 oooo mmmmmmm]`. Adding the channel's base to the exponent field gives the weight back.

use super::window::{WINDOW, exponent};

/// Channels of a super-tile.
pub(in crate::weights) const TILE_CHANNELS: usize = 16;
/// Columns of a super-tile.
pub(in crate::weights) const TILE_COLUMNS: usize = 64;
/// Lanes of a warp, among which a super-tile is shared out.
const WARP_LANES: usize = 32;
/// Fragments of a super-tile.
const FRAGMENTS: usize = 4;
/// Weights of a lane in one fragment.
pub(super) const FRAGMENT_SLOTS: usize = 8;
/// Bytes of one word plane (U, V or X) of a super-tile.
const WORDS_BYTES: usize = WARP_LANES * FRAGMENTS * size_of::<u32>();

/// Codes of one super-tile, `[channel][column]`.
pub(super) type CodeTile = [[u16; TILE_COLUMNS]; TILE_CHANNELS];

/// Channel and column inside the super-tile of a lane's slot.
pub(super) fn position(lane: usize, slot: usize) -> (usize, usize) {
    let (g, t) = (lane / 4, lane % 4);
    let (fragment, slot) = (slot / FRAGMENT_SLOTS, slot % FRAGMENT_SLOTS);
    let channel = g + 8 * (slot / 2 % 2);
    let column = 16 * t + 4 * fragment + 2 * (slot / 4) + slot % 2;
    (channel, column)
}

/// The code of a weight outside the window: the nearest one of its sign.
pub(super) fn clamped_code(bits: u16, base: u8) -> u16 {
    let sign = bits & 0x8000;
    if exponent(bits) < base {
        sign
    } else {
        sign | 0x07FF
    }
}

/// Fills `codes` from columns `first..` of up to 16 rows of `in_features` weights, padding with code 0. Returns whether
/// any weight is outside its window.
pub(super) fn take_codes(
    rows: &[u16],
    in_features: usize,
    first: usize,
    bases: &[u8],
    codes: &mut CodeTile,
) -> bool {
    let len = TILE_COLUMNS.min(in_features - first);
    if len < TILE_COLUMNS || rows.len() < TILE_CHANNELS * in_features {
        *codes = [[0; TILE_COLUMNS]; TILE_CHANNELS];
    }
    let mut has_escapes = false;
    for ((row, &base), codes) in rows.chunks_exact(in_features).zip(bases).zip(codes) {
        let base_bits = u16::from(base) << 7;
        let mut outside = 0;
        for (code, &bits) in codes.iter_mut().zip(&row[first..first + len]) {
            let magnitude = (bits & 0x7FFF).wrapping_sub(base_bits);
            *code = (bits & 0x8000) | (magnitude & 0x7FF);
            outside |= magnitude;
        }
        if outside >= u16::from(WINDOW) << 7 {
            has_escapes = true;
            for (code, &bits) in codes.iter_mut().zip(&row[first..first + len]) {
                if !super::window::is_inside(exponent(bits), base) {
                    *code = clamped_code(bits, base);
                }
            }
        }
    }
    has_escapes
}

/// Writes the weights of `codes` to columns `first..` of up to 16 rows of `in_features`.
pub(super) fn put_codes(
    codes: &CodeTile,
    bases: &[u8],
    rows: &mut [u16],
    in_features: usize,
    first: usize,
) {
    let len = TILE_COLUMNS.min(in_features - first);
    for ((row, &base), codes) in rows.chunks_exact_mut(in_features).zip(bases).zip(codes) {
        let base_bits = u16::from(base) << 7;
        for (bits, code) in row[first..first + len].iter_mut().zip(codes) {
            *bits = code + base_bits;
        }
    }
}

/// Words U, V, X of one lane's fragment.
fn pack_fragment(a: [u16; 4], b: [u16; 4]) -> [u32; 3] {
    let low = |w: [u16; 4]| u32::from_le_bytes(w.map(|code| code as u8));
    let high = |w: [u16; 4]| u32::from_le_bytes(w.map(|code| (code >> 8) as u8));
    let (la, lb) = (low(a), low(b));
    [
        high(a) | high(b).rotate_left(4),
        (la & 0xF0F0_F0F0) | ((lb >> 4) & 0x0F0F_0F0F),
        (la & 0x0F0F_0F0F) | (lb.rotate_right(4) & 0xF0F0_F0F0),
    ]
}

/// Codes A and B of one lane's fragment.
fn unpack_fragment([u, v, x]: [u32; 3]) -> [[u16; 4]; 2] {
    let join = |low: u32, high: u32| -> [u16; 4] {
        let (low, high) = (low.to_le_bytes(), high.to_le_bytes());
        std::array::from_fn(|k| u16::from_le_bytes([low[k], high[k]]))
    };
    [
        join((v & 0xF0F0_F0F0) | (x & 0x0F0F_0F0F), u & 0x8787_8787),
        join(
            ((v & 0x0F0F_0F0F) | (x & 0xF0F0_F0F0)).rotate_left(4),
            u.rotate_right(4) & 0x8787_8787,
        ),
    ]
}

/// Packs a super-tile's codes into its plane bytes.
pub(super) fn pack_tile(codes: &CodeTile, plane8: &mut [u8], plane4: &mut [u8]) {
    let (plane_u, plane_v) = plane8.split_at_mut(WORDS_BYTES);
    let words = plane_u.as_chunks_mut::<4>().0.iter_mut();
    let words = words.zip(plane_v.as_chunks_mut::<4>().0);
    let words = words.zip(plane4.as_chunks_mut::<4>().0);
    for (i, ((u_word, v_word), x_word)) in words.enumerate() {
        let (lane, fragment) = (i / FRAGMENTS, i % FRAGMENTS);
        let (g, column) = (lane / 4, 16 * (lane % 4) + 4 * fragment);
        let upper = &codes[g][column..column + 4];
        let lower = &codes[g + 8][column..column + 4];
        let [u, v, x] = pack_fragment(
            [upper[0], upper[1], lower[0], lower[1]],
            [upper[2], upper[3], lower[2], lower[3]],
        );
        *u_word = u.to_le_bytes();
        *v_word = v.to_le_bytes();
        *x_word = x.to_le_bytes();
    }
}

/// Unpacks a super-tile's plane bytes.
pub(super) fn unpack_tile(plane8: &[u8], plane4: &[u8], codes: &mut CodeTile) {
    let (plane_u, plane_v) = plane8.split_at(WORDS_BYTES);
    let words = plane_u.as_chunks::<4>().0.iter();
    let words = words.zip(plane_v.as_chunks::<4>().0);
    let words = words.zip(plane4.as_chunks::<4>().0);
    for (i, ((u, v), x)) in words.enumerate() {
        let (lane, fragment) = (i / FRAGMENTS, i % FRAGMENTS);
        let (g, column) = (lane / 4, 16 * (lane % 4) + 4 * fragment);
        let [a, b] = unpack_fragment([*u, *v, *x].map(u32::from_le_bytes));
        codes[g][column..column + 4].copy_from_slice(&[a[0], a[1], b[0], b[1]]);
        codes[g + 8][column..column + 4].copy_from_slice(&[a[2], a[3], b[2], b[3]]);
    }
}
