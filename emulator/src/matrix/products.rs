//! Sums of products as a tensor core forms them: one rule for every shape, so that equal steps give equal bits.
//!
//! The rule for fp32 sums, per element and step along K: the exact products and the accumulator are aligned to the
//! largest of them, each is cut toward zero [`FRACTION_BITS`] places behind its leading one, these integers are added
//! exactly, and the sum is cut toward zero to 24 significant bits. No order among the products is left in it.
//! Infinities and NaN act as in IEEE additions. Sums of integers are exact and wrap.

use super::float::clear_nan;

/// Rows of a tile of sums.
pub(super) const ROWS: usize = 16;
/// Columns of a tile of sums.
pub(super) const COLUMNS: usize = 8;

/// Places behind the leading one of the largest term that count: those of fp32 and two more.
const FRACTION_BITS: u64 = 25;
/// Mantissa bits of f64 and its exponent field.
const MANTISSA_BITS: u64 = 52;
const EXPONENT_FIELD: u64 = 0x7ff << MANTISSA_BITS;
const EXPONENT_BIAS: u64 = 1023;
/// Terms are aligned to no less than this, so that the last place is that of fp32's subnormal numbers: 2^-124.
const LEAST_ALIGNMENT: f64 = f64::from_bits((EXPONENT_BIAS - 149 + FRACTION_BITS) << MANTISSA_BITS);
/// Exponent fields of a power of two and of what brings the last place that counts beside it to one add up to this.
const ONE_PLACE: u64 = (2 * EXPONENT_BIAS + FRACTION_BITS) << MANTISSA_BITS;
/// The part of an f64 that 24 significant bits need.
const KEPT_BITS: u64 = !((1 << (MANTISSA_BITS - 23)) - 1);

/// A tile of fp32 sums.
pub(super) type Sums = [[f32; COLUMNS]; ROWS];
/// The left operand of a step of `K` products, by rows.
pub(super) type Left<T, const K: usize> = [[T; K]; ROWS];
/// The right operand of a step of `K` products, by K.
pub(super) type Right<T, const K: usize> = [[T; COLUMNS]; K];

/// Adds a step of `K` products, as the rule says.
///
/// Integers are held in f64: they stay far below 2^53, and additions that the compiler must not reorder keep it
/// working on columns side by side. With an infinity among the terms all that is finite is cut to zero.
#[inline(always)]
pub(super) fn add_numbers<const K: usize>(
    left: &Left<f64, K>,
    right: &Right<f64, K>,
    sums: &mut Sums,
) {
    for (row, sums) in left.iter().zip(sums) {
        let mut largest = [LEAST_ALIGNMENT; COLUMNS];
        for column in 0..COLUMNS {
            largest[column] = greater(f64::from(sums[column]).abs(), largest[column]);
        }
        for (&factor, factors) in row.iter().zip(right) {
            for column in 0..COLUMNS {
                largest[column] = greater((factor * factors[column]).abs(), largest[column]);
            }
        }
        // Powers of two: what brings the last place that counts to one, and back.
        let (mut up, mut down) = ([0.0; COLUMNS], [0.0; COLUMNS]);
        for column in 0..COLUMNS {
            let exponent = largest[column].to_bits() & EXPONENT_FIELD;
            up[column] = f64::from_bits(ONE_PLACE - exponent);
            down[column] = f64::from_bits(exponent - (FRACTION_BITS << MANTISSA_BITS));
        }
        let mut totals = [0.0; COLUMNS];
        for column in 0..COLUMNS {
            totals[column] += (f64::from(sums[column]) * up[column]).trunc();
        }
        for (&factor, factors) in row.iter().zip(right) {
            for column in 0..COLUMNS {
                totals[column] += (factor * factors[column] * up[column]).trunc();
            }
        }
        for column in 0..COLUMNS {
            let sum = totals[column] * down[column];
            sums[column] = clear_nan(f64::from_bits(sum.to_bits() & KEPT_BITS) as f32);
        }
    }
}

/// The greater of two numbers; `b` if `a` is NaN.
#[inline(always)]
fn greater(a: f64, b: f64) -> f64 {
    if a > b { a } else { b }
}

/// Adds 32 products of integers of eight bits, whose sum fp32 holds exactly.
#[inline(always)]
pub(super) fn add_bytes(
    left: &Left<f32, 32>,
    right: &Right<f32, 32>,
    sums: &mut [[u32; COLUMNS]; ROWS],
) {
    for (row, sums) in left.iter().zip(sums) {
        let mut products = [0.0; COLUMNS];
        for (&factor, factors) in row.iter().zip(right) {
            for column in 0..COLUMNS {
                products[column] += factor * factors[column];
            }
        }
        for (sum, product) in sums.iter_mut().zip(products) {
            *sum = sum.wrapping_add(product as i32 as u32);
        }
    }
}
