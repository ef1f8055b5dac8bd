//! Sixteen 32-bit words: the integer side of a [`super::Lanes`], for unpacking compressed weights.

use super::LANES;

/// A vector of [`LANES`] 32-bit words, one a lane. Like the fp32 side it is private to this module's parent.
pub trait Words: Copy {
    /// All lanes `value`.
    fn splat(value: u32) -> Self;
    /// All 16 words.
    fn load(words: &[u32; LANES]) -> Self;
    /// Asks for the cache line at `words`, which may lie anywhere, to be brought closer.
    fn prefetch(words: *const [u32; LANES]);
    /// Writes all 16 words.
    fn store(self, words: &mut [u32; LANES]);
    /// Bits set in both.
    fn and(self, b: Self) -> Self;
    /// Lane-wise sum, modulo 2^32.
    fn add(self, b: Self) -> Self;
    /// Bit by bit: `set` where `self` is 1, `clear` where it is 0.
    fn select(self, set: Self, clear: Self) -> Self;
    /// Each lane shifted up by `N` bits, zeros below.
    fn shift_left<const N: u32>(self) -> Self;
    /// Each lane shifted down by `N` bits, zeros above.
    fn shift_right<const N: u32>(self) -> Self;
}
