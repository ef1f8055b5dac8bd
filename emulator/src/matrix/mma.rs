//! `mma.sync`: a warp multiplies a tile of 16 rows by one of eight columns, both spread over its registers.
//!
//! Lane `4 g + t` of register `r` holds what the PTX ISA gives it: of the left operand the row `g + 8 (r % 2)` and the
//! `t`-th word of half `r / 2` of K, of the right operand column `g` and the `t`-th word of half `r`, of the sums the row
//! `g + 8 (r / 2)` and the column `2 t + r % 2`. A word holds one TF32, two BF16 or four 8-bit numbers.

use super::convert::{bf16_to_f32, e4m3_to_f32};
use super::dispatch::vectorised;
use super::float::clear_nan;
use super::products::{COLUMNS, Left, ROWS, Right, Sums, add_bytes, add_numbers};
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

/// `d = a b + c` for one step along K.
pub fn multiply_add(format: Format, a: &[Lanes; 4], b: &[Lanes; 2], c: &[Lanes; 4]) -> [Lanes; 4] {
    let mut sums = [*c];
    multiply_add_groups(format, a, &[*b], &mut sums);
    sums[0]
}

/// Adds the products of one left operand with several right ones to the sums of each.
pub fn multiply_add_groups(
    format: Format,
    left: &[Lanes; 4],
    rights: &[[Lanes; 2]],
    sums: &mut [[Lanes; 4]],
) {
    match format {
        Format::Bf16 => multiply_bf16(left, rights, sums),
        Format::Tf32 => multiply_tf32(left, rights, sums),
        Format::E4m3 => multiply_e4m3(left, rights, sums),
        Format::S8 => multiply_s8(left, rights, sums),
    }
}

vectorised! {
    fn multiply_bf16(left: &[Lanes; 4], rights: &[[Lanes; 2]], sums: &mut [[Lanes; 4]]) {
        let left: Left<f64, 16> = spread_left::<_, 2, 16>(left, bf16);
        for (right, sums) in rights.iter().zip(sums) {
            let mut tile = numbers(sums);
            add_numbers(&left, &spread_right::<_, 2, 16>(right, bf16), &mut tile);
            put_numbers(sums, &tile);
        }
    }

    fn multiply_tf32(left: &[Lanes; 4], rights: &[[Lanes; 2]], sums: &mut [[Lanes; 4]]) {
        let left: Left<f64, 8> = spread_left::<_, 1, 8>(left, tf32);
        for (right, sums) in rights.iter().zip(sums) {
            let mut tile = numbers(sums);
            add_numbers(&left, &spread_right::<_, 1, 8>(right, tf32), &mut tile);
            put_numbers(sums, &tile);
        }
    }

    /// As sm_90 does it, which has no such instruction: the lower pairs of all words as FP16 and then the upper ones are
    /// summed from zero in two steps, and an ordinary addition brings the accumulator in.
    fn multiply_e4m3(left: &[Lanes; 4], rights: &[[Lanes; 2]], sums: &mut [[Lanes; 4]]) {
        let lower: Left<f64, 16> = spread_left::<_, 2, 16>(left, e4m3_lower);
        let upper: Left<f64, 16> = spread_left::<_, 2, 16>(left, e4m3_upper);
        for (right, sums) in rights.iter().zip(sums) {
            let mut products = [[0.0; COLUMNS]; ROWS];
            add_numbers(&lower, &spread_right::<_, 2, 16>(right, e4m3_lower), &mut products);
            add_numbers(&upper, &spread_right::<_, 2, 16>(right, e4m3_upper), &mut products);
            let mut tile = numbers(sums);
            for (sum, product) in tile.iter_mut().flatten().zip(products.iter().flatten()) {
                *sum = clear_nan(*sum + product);
            }
            put_numbers(sums, &tile);
        }
    }

    fn multiply_s8(left: &[Lanes; 4], rights: &[[Lanes; 2]], sums: &mut [[Lanes; 4]]) {
        let left: Left<f32, 32> = spread_left::<_, 4, 32>(left, s8);
        for (right, sums) in rights.iter().zip(sums) {
            let mut tile = [[0; COLUMNS]; ROWS];
            for_each_sum(|register, lane, row, column| tile[row][column] = sums[register][lane]);
            add_bytes(&left, &spread_right::<_, 4, 32>(right, s8), &mut tile);
            for_each_sum(|register, lane, row, column| sums[register][lane] = tile[row][column]);
        }
    }
}

/// Register, lane, row and column of every sum.
#[inline(always)]
fn for_each_sum(mut visit: impl FnMut(usize, usize, usize, usize)) {
    for register in 0..4 {
        for lane in 0..WARP_LANES {
            visit(
                register,
                lane,
                lane / 4 + register / 2 * 8,
                lane % 4 * 2 + register % 2,
            );
        }
    }
}

#[inline(always)]
fn numbers(sums: &[Lanes; 4]) -> Sums {
    let mut tile = [[0.0; COLUMNS]; ROWS];
    for_each_sum(|register, lane, row, column| {
        tile[row][column] = f32::from_bits(sums[register][lane]);
    });
    tile
}

#[inline(always)]
fn put_numbers(sums: &mut [Lanes; 4], tile: &Sums) {
    for_each_sum(|register, lane, row, column| sums[register][lane] = tile[row][column].to_bits());
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
fn e4m3_lower(word: u32, i: usize) -> f64 {
    f64::from(e4m3_to_f32((word >> (8 * i)) as u8))
}

#[inline(always)]
fn e4m3_upper(word: u32, i: usize) -> f64 {
    e4m3_lower(word >> 16, i)
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
        for (i, element) in numbers.iter_mut().enumerate() {
            *element = number(word, i);
        }
    }
    numbers
}

/// Spreads the left operand by rows.
#[inline(always)]
fn spread_left<T: Copy + Default, const E: usize, const K: usize>(
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
fn spread_right<T: Copy + Default, const E: usize, const K: usize>(
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

#[cfg(test)]
#[path = "mma_tests.rs"]
mod tests;
