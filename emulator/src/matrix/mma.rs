//! `mma.sync`: a warp multiplies a tile of 16 rows by one of eight columns, both spread over its registers.
//!
//! Lane `4 g + t` of register `r` holds what the PTX ISA gives it: of the left operand the row `g + 8 (r % 2)` and the
//! `t`-th word of half `r / 2` of K, of the right operand column `g` and the `t`-th word of half `r`, of the sums the row
//! `g + 8 (r / 2)` and the column `2 t + r % 2`. A word holds one TF32, two BF16 or four 8-bit numbers.

use super::convert::{bf16_to_f32, e4m3_to_f32};
use super::dispatch::vectorised;
use super::float::clear_nan;
use super::products::{COLUMNS, Left, ROWS, Right, add_8, add_16, sum_32};
use super::{Lanes, WARP_LANES};

/// What the operands' words hold, which also says how long a step along K is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Format {
    /// Pairs of BF16, 16 along K, fp32 sums.
    Bf16,
    /// The upper 19 bits of fp32, 8 along K, fp32 sums.
    Tf32,
    /// Four E4M3 codes, 32 along K, fp32 sums.
    E4m3,
    /// Four signed bytes, 32 along K, wrapping 32-bit sums.
    S8,
}

/// The left operand of a step, ready to be multiplied by any number of right operands.
#[derive(Debug, Clone)]
pub struct LeftTile(LeftNumbers);

#[derive(Debug, Clone)]
#[expect(
    clippy::large_enum_variant,
    reason = "lives on the stack, for one instruction"
)]
enum LeftNumbers {
    Bf16(Left<f64, 16>),
    Tf32(Left<f64, 8>),
    /// The lower pairs of all words, and the upper ones.
    E4m3([Left<f64, 16>; 2]),
    S8(Left<f32, 32>),
}

impl LeftTile {
    /// Unpacks the left operand's registers.
    pub fn new(format: Format, registers: &[Lanes; 4]) -> Self {
        LeftTile(match format {
            Format::Bf16 => LeftNumbers::Bf16(left_bf16(registers)),
            Format::Tf32 => LeftNumbers::Tf32(left_tf32(registers)),
            Format::E4m3 => {
                LeftNumbers::E4m3([left_e4m3(registers), left_e4m3(&upper_pairs(registers))])
            }
            Format::S8 => LeftNumbers::S8(left_s8(registers)),
        })
    }

    /// Adds the product with a right operand to `sums`.
    pub fn multiply_add(&self, right: &[Lanes; 2], sums: &mut [Lanes; 4]) {
        let mut total = by_element(sums).map(|row| row.map(f32::from_bits));
        match &self.0 {
            LeftNumbers::Bf16(left) => add_16(left, &right_bf16(right), &mut total),
            LeftNumbers::Tf32(left) => add_8(left, &right_tf32(right), &mut total),
            // As sm_90 does it, which has no such instruction: the pairs as FP16 are summed from zero in two steps, and
            // an ordinary addition brings the accumulator in.
            LeftNumbers::E4m3([lower, upper]) => {
                let mut products = [[0.0; COLUMNS]; ROWS];
                add_16(lower, &right_e4m3(right), &mut products);
                add_16(upper, &right_e4m3(&upper_pairs(right)), &mut products);
                let pairs = total.iter_mut().flatten().zip(products.iter().flatten());
                pairs.for_each(|(total, products)| *total = clear_nan(*total + products));
            }
            LeftNumbers::S8(left) => {
                let products = sum_32(left, &right_s8(right));
                let pairs = total.iter_mut().flatten().zip(products.iter().flatten());
                pairs.for_each(|(total, &products)| {
                    let sum = total.to_bits().wrapping_add(products as i32 as u32);
                    *total = f32::from_bits(sum);
                });
            }
        }
        for (register, words) in sums.iter_mut().enumerate() {
            for (lane, word) in words.iter_mut().enumerate() {
                let (row, column) = sum_place(register, lane);
                *word = total[row][column].to_bits();
            }
        }
    }
}

/// `d = a b + c` for one step along K.
pub fn multiply_add(format: Format, a: &[Lanes; 4], b: &[Lanes; 2], c: &[Lanes; 4]) -> [Lanes; 4] {
    let mut sums = *c;
    LeftTile::new(format, a).multiply_add(b, &mut sums);
    sums
}

/// Row and column of the sum that a lane of a register holds.
#[inline(always)]
fn sum_place(register: usize, lane: usize) -> (usize, usize) {
    (lane / 4 + register / 2 * 8, lane % 4 * 2 + register % 2)
}

fn by_element(registers: &[Lanes; 4]) -> [[u32; COLUMNS]; ROWS] {
    let mut tile = [[0; COLUMNS]; ROWS];
    for (register, words) in registers.iter().enumerate() {
        for (lane, &word) in words.iter().enumerate() {
            let (row, column) = sum_place(register, lane);
            tile[row][column] = word;
        }
    }
    tile
}

/// The upper halves of all words, for what reads lower halves.
fn upper_pairs<const REGISTERS: usize>(registers: &[Lanes; REGISTERS]) -> [Lanes; REGISTERS] {
    registers.map(|words| words.map(|word| word >> 16))
}

/// Number `i` of a word.
#[inline(always)]
fn bf16(word: u32, i: usize) -> f64 {
    f64::from(bf16_to_f32((word >> (16 * i)) as u16))
}

#[inline(always)]
fn tf32(word: u32, _: usize) -> f64 {
    f64::from(f32::from_bits(word & 0xffff_e000))
}

#[inline(always)]
fn e4m3(word: u32, i: usize) -> f64 {
    f64::from(e4m3_to_f32((word >> (8 * i)) as u8))
}

#[inline(always)]
fn s8(word: u32, i: usize) -> f32 {
    f32::from((word >> (8 * i)) as i8)
}

/// Unpacks all words of a register, `E` numbers each.
#[inline(always)]
fn unpack<T: Copy + Default, const E: usize>(
    words: &Lanes,
    number: impl Fn(u32, usize) -> T,
) -> [[T; E]; WARP_LANES] {
    let mut numbers = [[T::default(); E]; WARP_LANES];
    for (numbers, &word) in numbers.iter_mut().zip(words) {
        *numbers = std::array::from_fn(|i| number(word, i));
    }
    numbers
}

/// Spreads the left operand by rows.
#[inline(always)]
fn left<T: Copy + Default, const E: usize, const K: usize>(
    registers: &[Lanes; 4],
    number: impl Fn(u32, usize) -> T,
) -> Left<T, K> {
    let mut tile = [[T::default(); K]; ROWS];
    for (register, words) in registers.iter().enumerate() {
        let numbers: [[T; E]; WARP_LANES] = unpack(words, &number);
        for (row, numbers) in numbers.chunks_exact(4).enumerate() {
            let first = register / 2 * 4 * E;
            tile[row + register % 2 * 8][first..first + 4 * E]
                .copy_from_slice(numbers.as_flattened());
        }
    }
    tile
}

/// Spreads the right operand by K.
#[inline(always)]
fn right<T: Copy + Default, const E: usize, const K: usize>(
    registers: &[Lanes; 2],
    number: impl Fn(u32, usize) -> T,
) -> Right<T, K> {
    let mut tile = [[T::default(); COLUMNS]; K];
    for (register, words) in registers.iter().enumerate() {
        let numbers: [[T; E]; WARP_LANES] = unpack(words, &number);
        for in_half in 0..4 * E {
            for column in 0..COLUMNS {
                tile[register * 4 * E + in_half][column] =
                    numbers[column * 4 + in_half / E][in_half % E];
            }
        }
    }
    tile
}

vectorised! {
    fn left_bf16(registers: &[Lanes; 4]) -> Left<f64, 16> {
        left::<_, 2, 16>(registers, bf16)
    }

    fn right_bf16(registers: &[Lanes; 2]) -> Right<f64, 16> {
        right::<_, 2, 16>(registers, bf16)
    }

    fn left_tf32(registers: &[Lanes; 4]) -> Left<f64, 8> {
        left::<_, 1, 8>(registers, tf32)
    }

    fn right_tf32(registers: &[Lanes; 2]) -> Right<f64, 8> {
        right::<_, 1, 8>(registers, tf32)
    }

    fn left_e4m3(registers: &[Lanes; 4]) -> Left<f64, 16> {
        left::<_, 2, 16>(registers, e4m3)
    }

    fn right_e4m3(registers: &[Lanes; 2]) -> Right<f64, 16> {
        right::<_, 2, 16>(registers, e4m3)
    }

    fn left_s8(registers: &[Lanes; 4]) -> Left<f32, 32> {
        left::<_, 4, 32>(registers, s8)
    }

    fn right_s8(registers: &[Lanes; 2]) -> Right<f32, 32> {
        right::<_, 4, 32>(registers, s8)
    }
}

#[cfg(test)]
#[path = "mma_tests.rs"]
mod tests;
