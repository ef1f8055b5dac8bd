//! `mma.sync`: a warp multiplies a tile of 16 rows by one of eight columns, both spread over its registers.
//!
//! Lane `4 g + t` of register `r` holds what the PTX ISA gives it: of the left operand the row `g + 8 (r % 2)` and the
//! `t`-th word of half `r / 2` of K, of the right operand column `g` and the `t`-th word of half `r`, of the sums the row
//! `g + 8 (r / 2)` and the column `2 t + r % 2`. A word holds one TF32, two BF16 or four 8-bit numbers.

use super::convert::{bf16_to_f32, e4m3_to_f16, f16_to_f32};
use super::products::{COLUMNS, Left, ROWS, Right, Sums, add_8, add_16, add_integers};
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
enum LeftNumbers {
    Bf16(Left<f64, 16>),
    Tf32(Left<f64, 8>),
    E4m3([Left<f64, 16>; 2]),
    S8(Left<i32, 32>),
}

impl LeftTile {
    /// Unpacks the left operand's registers.
    pub fn new(format: Format, registers: &[Lanes; 4]) -> Self {
        LeftTile(match format {
            Format::Bf16 => LeftNumbers::Bf16(left(registers, bf16_pair)),
            Format::Tf32 => LeftNumbers::Tf32(left(registers, tf32)),
            Format::E4m3 => LeftNumbers::E4m3([
                left(registers, e4m3_low_pair),
                left(registers, e4m3_high_pair),
            ]),
            Format::S8 => LeftNumbers::S8(left(registers, signed_bytes)),
        })
    }

    /// Adds the product with a right operand to `sums`.
    pub fn multiply_add(&self, right_registers: &[Lanes; 2], sums: &mut [Lanes; 4]) {
        match &self.0 {
            LeftNumbers::Bf16(tile) => {
                let mut total = floats(sums);
                add_16(tile, &right(right_registers, bf16_pair), &mut total);
                put_floats(sums, &total);
            }
            LeftNumbers::Tf32(tile) => {
                let mut total = floats(sums);
                add_8(tile, &right(right_registers, tf32), &mut total);
                put_floats(sums, &total);
            }
            // As sm_90 does it, which has no such instruction: the lower pairs of all words as FP16 and then the upper
            // ones are summed from zero, and an ordinary addition brings the accumulator in.
            LeftNumbers::E4m3([low, high]) => {
                let mut total = [[0.0; COLUMNS]; ROWS];
                add_16(low, &right(right_registers, e4m3_low_pair), &mut total);
                add_16(high, &right(right_registers, e4m3_high_pair), &mut total);
                let mut before = floats(sums);
                for (before, total) in before.iter_mut().flatten().zip(total.iter().flatten()) {
                    *before += total;
                }
                put_floats(sums, &before);
            }
            LeftNumbers::S8(tile) => {
                let mut total = by_element(sums).map(|row| row.map(|sum| sum as i32));
                add_integers(tile, &right(right_registers, signed_bytes), &mut total);
                put(sums, |row, column| total[row][column] as u32);
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

fn bf16_pair(word: u32) -> [f64; 2] {
    [word as u16, (word >> 16) as u16].map(|bits| f64::from(bf16_to_f32(bits)))
}

fn tf32(word: u32) -> [f64; 1] {
    [f64::from(f32::from_bits(word & 0xffff_e000))]
}

fn e4m3_low_pair(word: u32) -> [f64; 2] {
    [word as u8, (word >> 8) as u8].map(|code| f64::from(f16_to_f32(e4m3_to_f16(code))))
}

fn e4m3_high_pair(word: u32) -> [f64; 2] {
    e4m3_low_pair(word >> 16)
}

fn signed_bytes(word: u32) -> [i32; 4] {
    word.to_le_bytes().map(|byte| i32::from(byte as i8))
}

/// Spreads the left operand by rows; a word gives `E` numbers of the `K`.
#[inline(always)]
fn left<T: Copy + Default, const E: usize, const K: usize>(
    registers: &[Lanes; 4],
    numbers: impl Fn(u32) -> [T; E],
) -> Left<T, K> {
    let mut tile = [[T::default(); K]; ROWS];
    for (register, words) in registers.iter().enumerate() {
        for lane in 0..WARP_LANES {
            let row = &mut tile[lane / 4 + register % 2 * 8];
            let first = (register / 2 * 4 + lane % 4) * E;
            row[first..first + E].copy_from_slice(&numbers(words[lane]));
        }
    }
    tile
}

/// Spreads the right operand by K.
#[inline(always)]
fn right<T: Copy + Default, const E: usize, const K: usize>(
    registers: &[Lanes; 2],
    numbers: impl Fn(u32) -> [T; E],
) -> Right<T, K> {
    let mut tile = [[T::default(); COLUMNS]; K];
    for (register, words) in registers.iter().enumerate() {
        for lane in 0..WARP_LANES {
            let first = (register * 4 + lane % 4) * E;
            for (row, number) in tile[first..first + E].iter_mut().zip(numbers(words[lane])) {
                row[lane / 4] = number;
            }
        }
    }
    tile
}

#[inline(always)]
fn by_element(registers: &[Lanes; 4]) -> [[u32; COLUMNS]; ROWS] {
    let mut tile = [[0; COLUMNS]; ROWS];
    for (register, words) in registers.iter().enumerate() {
        for lane in 0..WARP_LANES {
            tile[lane / 4 + register / 2 * 8][lane % 4 * 2 + register % 2] = words[lane];
        }
    }
    tile
}

#[inline(always)]
fn put(registers: &mut [Lanes; 4], element: impl Fn(usize, usize) -> u32) {
    for (register, words) in registers.iter_mut().enumerate() {
        for (lane, word) in words.iter_mut().enumerate() {
            *word = element(lane / 4 + register / 2 * 8, lane % 4 * 2 + register % 2);
        }
    }
}

fn floats(registers: &[Lanes; 4]) -> Sums {
    by_element(registers).map(|row| row.map(f32::from_bits))
}

fn put_floats(registers: &mut [Lanes; 4], sums: &Sums) {
    put(registers, |row, column| sums[row][column].to_bits());
}

#[cfg(test)]
#[path = "mma_tests.rs"]
mod tests;
