//! Sums of products as a tensor core forms them: one rule for every shape, so that equal steps give equal bits.
//!
//! The rule for fp32 sums, per element and step along K: the exact products and the accumulator are aligned to the
//! largest of them, each is cut toward zero [`FRACTION_BITS`] places behind its leading one, these integers are added
//! exactly, and the sum is cut toward zero to 24 significant bits. No order among the products is left in it. An
//! infinity or NaN among the terms decides the element as IEEE addition would. Sums of integers are exact and wrap.

use super::dispatch::vectorised;

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
/// The part of an f64 that 24 significant bits need.
const KEPT_BITS: u64 = !((1 << (MANTISSA_BITS - 23)) - 1);

/// A tile of fp32 sums.
pub(super) type Sums = [[f32; COLUMNS]; ROWS];
/// The left operand of a step of `K` products, by rows.
pub(super) type Left<T, const K: usize> = [[T; K]; ROWS];
/// The right operand of a step of `K` products, by K.
pub(super) type Right<T, const K: usize> = [[T; COLUMNS]; K];

/// Adds a step of `K` products of finite numbers, as the rule says. At most 28 of them fit the integers.
#[inline(always)]
fn add_finite<const K: usize>(left: &Left<f64, K>, right: &Right<f64, K>, sums: &mut Sums) {
    for (row, sums) in left.iter().zip(sums) {
        let mut largest = [LEAST_ALIGNMENT; COLUMNS];
        let mut grow = |column: usize, term: f64| {
            let magnitude = term.abs();
            if magnitude > largest[column] {
                largest[column] = magnitude;
            }
        };
        for (column, &sum) in sums.iter().enumerate() {
            grow(column, f64::from(sum));
        }
        for (&factor, factors) in row.iter().zip(right) {
            for (column, &other) in factors.iter().enumerate() {
                grow(column, factor * other);
            }
        }
        // Powers of two: what brings the last place that counts to one, and back.
        let up = largest.map(|term| {
            let exponent = term.to_bits() & EXPONENT_FIELD;
            f64::from_bits(((2 * EXPONENT_BIAS + FRACTION_BITS) << MANTISSA_BITS) - exponent)
        });
        let down = largest.map(|term| {
            f64::from_bits((term.to_bits() & EXPONENT_FIELD) - (FRACTION_BITS << MANTISSA_BITS))
        });
        // SAFETY: the caller's numbers are finite, and no term exceeds the one that `up` brings below 2^26.
        let cut = |term: f64| unsafe { term.to_int_unchecked::<i32>() };
        let mut totals = [0i32; COLUMNS];
        for column in 0..COLUMNS {
            totals[column] = cut(f64::from(sums[column]) * up[column]);
        }
        for (&factor, factors) in row.iter().zip(right) {
            for column in 0..COLUMNS {
                totals[column] += cut(factor * factors[column] * up[column]);
            }
        }
        for column in 0..COLUMNS {
            let sum = f64::from(totals[column]) * down[column];
            sums[column] = f64::from_bits(sum.to_bits() & KEPT_BITS) as f32;
        }
    }
}

vectorised! {
    fn add_16_finite(left: &Left<f64, 16>, right: &Right<f64, 16>, sums: &mut Sums) {
        add_finite(left, right, sums)
    }

    fn add_8_finite(left: &Left<f64, 8>, right: &Right<f64, 8>, sums: &mut Sums) {
        add_finite(left, right, sums)
    }

    /// Adds 32 products of integers.
    pub(super) fn add_integers(left: &Left<i32, 32>, right: &Right<i32, 32>, sums: &mut [[i32; COLUMNS]; ROWS]) {
        for (row, sums) in left.iter().zip(sums) {
            for (&factor, factors) in row.iter().zip(right) {
                for (sum, &other) in sums.iter_mut().zip(factors) {
                    *sum = sum.wrapping_add(factor.wrapping_mul(other));
                }
            }
        }
    }
}

/// A step that some infinity or NaN takes part in: elements that it reaches are sums in f64, the others as ever.
fn add_special<const K: usize>(
    left: &Left<f64, K>,
    right: &Right<f64, K>,
    sums: &mut Sums,
    add_finite: fn(&Left<f64, K>, &Right<f64, K>, &mut Sums),
) {
    let tame = |number: f64| if number.is_finite() { number } else { 0.0 };
    let mut tame_sums = sums.map(|row| row.map(|sum| if sum.is_finite() { sum } else { 0.0 }));
    let tame_left = left.map(|row| row.map(tame));
    let tame_right = right.map(|row| row.map(tame));
    add_finite(&tame_left, &tame_right, &mut tame_sums);
    for (row, (sums, tame_sums)) in left.iter().zip(sums.iter_mut().zip(tame_sums)) {
        for (column, (sum, tame_sum)) in sums.iter_mut().zip(tame_sums).enumerate() {
            let total = (row.iter().zip(right))
                .fold(f64::from(*sum), |total, (&factor, factors)| {
                    total + factor * factors[column]
                });
            // A finite f64 sum cannot overflow: its terms are products of fp32 numbers.
            *sum = match total {
                total if total.is_nan() => f32::from_bits(super::float::CANONICAL_NAN),
                total if total.is_infinite() => total as f32,
                _ => tame_sum,
            };
        }
    }
}

fn is_finite<const K: usize>(left: &Left<f64, K>, right: &Right<f64, K>, sums: &Sums) -> bool {
    // An exponent field of ones makes the difference with itself a NaN, which no addition loses.
    let mut poison = [0.0f64; COLUMNS];
    for row in left {
        for chunk in row.chunks_exact(COLUMNS) {
            (poison.iter_mut().zip(chunk)).for_each(|(poison, &number)| *poison += number - number);
        }
    }
    for row in right {
        (poison.iter_mut().zip(row)).for_each(|(poison, &number)| *poison += number - number);
    }
    for row in sums {
        (poison.iter_mut().zip(row))
            .for_each(|(poison, &number)| *poison += f64::from(number - number));
    }
    poison.iter().all(|&poison| poison == 0.0)
}

/// Adds a step of 16 products.
pub(super) fn add_16(left: &Left<f64, 16>, right: &Right<f64, 16>, sums: &mut Sums) {
    if is_finite(left, right, sums) {
        add_16_finite(left, right, sums);
    } else {
        add_special(left, right, sums, add_16_finite);
    }
}

/// Adds a step of eight products.
pub(super) fn add_8(left: &Left<f64, 8>, right: &Right<f64, 8>, sums: &mut Sums) {
    if is_finite(left, right, sums) {
        add_8_finite(left, right, sums);
    } else {
        add_special(left, right, sums, add_8_finite);
    }
}
