//! Holds `mma` against plain matrix products in exact integers, through fragment layouts written the other way round.

use super::*;
use crate::order::{Order, Policy};

/// Where the PTX ISA puts element (row, k) of the left operand: register, lane, first bit of the word.
fn left_place(row: usize, k: usize, word_numbers: usize) -> (usize, usize, usize) {
    let register = match (row < 8, k < 4 * word_numbers) {
        (true, true) => 0,
        (false, true) => 1,
        (true, false) => 2,
        (false, false) => 3,
    };
    let lane = row % 8 * 4 + k / word_numbers % 4;
    (register, lane, k % word_numbers * 32 / word_numbers)
}

/// The same for element (k, column) of the right operand.
fn right_place(k: usize, column: usize, word_numbers: usize) -> (usize, usize, usize) {
    let register = usize::from(k >= 4 * word_numbers);
    let lane = column * 4 + k / word_numbers % 4;
    (register, lane, k % word_numbers * 32 / word_numbers)
}

/// The same for the sums.
fn sum_place(row: usize, column: usize) -> (usize, usize) {
    (
        usize::from(row >= 8) * 2 + column % 2,
        row % 8 * 4 + column / 2,
    )
}

/// Raw operands of one step: numbers as their bits, by element.
struct Step {
    word_numbers: usize,
    left: Vec<Vec<u32>>,
    right: Vec<Vec<u32>>,
    sums: Vec<Vec<u32>>,
}

impl Step {
    fn draw(
        word_numbers: usize,
        mut number: impl FnMut() -> u32,
        mut sum: impl FnMut() -> u32,
    ) -> Self {
        let k = 8 * word_numbers;
        Step {
            word_numbers,
            left: (0..16)
                .map(|_| (0..k).map(|_| number()).collect())
                .collect(),
            right: (0..k).map(|_| (0..8).map(|_| number()).collect()).collect(),
            sums: (0..16).map(|_| (0..8).map(|_| sum()).collect()).collect(),
        }
    }

    fn run(&self, format: Format) -> Vec<Vec<u32>> {
        let (mut a, mut b, mut c) = ([[0; 32]; 4], [[0; 32]; 2], [[0; 32]; 4]);
        for (row, numbers) in self.left.iter().enumerate() {
            for (k, number) in numbers.iter().enumerate() {
                let (register, lane, bit) = left_place(row, k, self.word_numbers);
                a[register][lane] |= number << bit;
            }
        }
        for (k, numbers) in self.right.iter().enumerate() {
            for (column, number) in numbers.iter().enumerate() {
                let (register, lane, bit) = right_place(k, column, self.word_numbers);
                b[register][lane] |= number << bit;
            }
        }
        for (row, numbers) in self.sums.iter().enumerate() {
            for (column, number) in numbers.iter().enumerate() {
                let (register, lane) = sum_place(row, column);
                c[register][lane] = *number;
            }
        }
        let d = multiply_add(format, &a, &b, &c);
        let element = |row, column| {
            let (register, lane) = sum_place(row, column);
            d[register][lane]
        };
        (0..16)
            .map(|row| (0..8).map(|column| element(row, column)).collect())
            .collect()
    }

    /// Every element with its row, column, accumulator and pairs of factors in the order of K.
    fn for_each(&self, mut check: impl FnMut(usize, usize, u32, Vec<(u32, u32)>)) {
        for row in 0..16 {
            for column in 0..8 {
                let factors = self.left[row].iter().zip(&self.right);
                let pairs = factors.map(|(&a, others)| (a, others[column])).collect();
                check(row, column, self.sums[row][column], pairs);
            }
        }
    }
}

/// A finite number as an integer times a power of two.
fn exact(number: f32) -> (i128, i32) {
    let bits = number.to_bits();
    let exponent = (bits >> 23 & 0xff) as i32;
    let mantissa = i128::from(bits & 0x7f_ffff);
    let (magnitude, power) = match exponent {
        0 => (mantissa, -149),
        _ => (mantissa | 1 << 23, exponent - 150),
    };
    (if number < 0.0 { -magnitude } else { magnitude }, power)
}

/// The rule of `products` in integers.
fn aligned_sum(start: f32, pairs: &[(f32, f32)]) -> f32 {
    let mut terms: Vec<(i128, i32)> = vec![exact(start)];
    terms.extend(pairs.iter().map(|&(a, b)| {
        let ((a, a_power), (b, b_power)) = (exact(a), exact(b));
        (a * b, a_power + b_power)
    }));
    let leading = |(mantissa, power): &(i128, i32)| {
        127 - mantissa.unsigned_abs().leading_zeros() as i32 + power
    };
    let top = terms
        .iter()
        .filter(|term| term.0 != 0)
        .map(leading)
        .max()
        .unwrap_or(-124)
        .max(-124);
    let unit = top - 25;
    let cut = |(mantissa, power): (i128, i32)| match power - unit {
        left @ 0.. => mantissa << left,
        // Division of integers is toward zero.
        right => mantissa / 2i128.checked_pow(-right as u32).unwrap_or(i128::MAX),
    };
    let sum: i128 = terms.into_iter().map(cut).sum();
    let excess = (128 - sum.unsigned_abs().leading_zeros() as i32 - 24).max(0);
    ((sum / (1 << excess)) as f64 * 2f64.powi(unit + excess)) as f32
}

fn random() -> impl FnMut(u32) -> u32 {
    let mut order = Order::new(Policy::Random, 11);
    move |bound| order.below(bound)
}

/// A number of about 2^`spread` around one, or from all of the range for a spread of 254, as fp32.
fn draw_float(random: &mut impl FnMut(u32) -> u32, spread: u32) -> f32 {
    let exponent = 127 - spread / 2 + random(spread + 1);
    f32::from_bits(random(2) << 31 | exponent << 23 | random(1 << 23))
}

#[test]
fn bf16_steps_follow_the_rule() {
    for spread in [0, 6, 40, 254] {
        let (mut numbers, mut sums) = (random(), random());
        let step = Step::draw(
            2,
            || draw_float(&mut numbers, spread).to_bits() >> 16,
            || draw_float(&mut sums, spread).to_bits(),
        );
        let found = step.run(Format::Bf16);
        step.for_each(|row, column, start, pairs| {
            let wide = |bits: u32| f32::from_bits(bits << 16);
            let pairs: Vec<_> = pairs.into_iter().map(|(a, b)| (wide(a), wide(b))).collect();
            let expected = aligned_sum(f32::from_bits(start), &pairs);
            assert_eq!(
                found[row][column],
                expected.to_bits(),
                "{row} {column} spread {spread}"
            );
        });
    }
}

#[test]
fn tf32_steps_follow_the_rule_and_drop_low_bits() {
    for spread in [0, 6, 40, 254] {
        let (mut numbers, mut sums) = (random(), random());
        let step = Step::draw(
            1,
            || draw_float(&mut numbers, spread).to_bits(),
            || draw_float(&mut sums, spread).to_bits(),
        );
        let found = step.run(Format::Tf32);
        step.for_each(|row, column, start, pairs| {
            let short = |bits: u32| f32::from_bits(bits >> 13 << 13);
            let pairs: Vec<_> = pairs
                .into_iter()
                .map(|(a, b)| (short(a), short(b)))
                .collect();
            let expected = aligned_sum(f32::from_bits(start), &pairs);
            assert_eq!(
                found[row][column],
                expected.to_bits(),
                "{row} {column} spread {spread}"
            );
        });
    }
}

#[test]
fn e4m3_steps_are_two_of_half_the_numbers_and_an_addition() {
    let (mut numbers, mut sums) = (random(), random());
    let step = Step::draw(
        4,
        || numbers(2) << 7 | numbers(0x7f),
        || draw_float(&mut sums, 4).to_bits(),
    );
    let found = step.run(Format::E4m3);
    let value = |code: u32| {
        let (exponent, mantissa) = (code >> 3 & 15, (code & 7) as f32);
        let magnitude = match exponent {
            0 => mantissa * 2f32.powi(-9),
            _ => (8.0 + mantissa) * 2f32.powi(exponent as i32 - 10),
        };
        if code & 0x80 == 0 {
            magnitude
        } else {
            -magnitude
        }
    };
    step.for_each(|row, column, start, pairs| {
        let chain = [0, 2].into_iter().fold(0.0, |sum, first| {
            let half: Vec<_> = (pairs.iter().enumerate())
                .filter(|(k, _)| k % 4 / 2 * 2 == first)
                .map(|(_, &(a, b))| (value(a), value(b)))
                .collect();
            aligned_sum(sum, &half)
        });
        let expected = f32::from_bits(start) + chain;
        assert_eq!(found[row][column], expected.to_bits());
        // Codes are few bits wide: nothing is lost but by the last addition.
        let exact: f64 = pairs
            .iter()
            .map(|&(a, b)| f64::from(value(a) * value(b)))
            .sum();
        let total = exact + f64::from(f32::from_bits(start));
        assert!((f64::from(expected) - total).abs() <= total.abs().max(exact.abs()) * 1e-6 + 1e-2);
    });
}

#[test]
fn byte_steps_are_exact_and_wrap() {
    let (mut numbers, mut sums) = (random(), random());
    let step = Step::draw(4, || numbers(256), || sums(u32::MAX));
    let found = step.run(Format::S8);
    step.for_each(|row, column, start, pairs| {
        let products = pairs
            .iter()
            .map(|&(a, b)| i64::from(a as u8 as i8) * i64::from(b as u8 as i8));
        let expected = i64::from(start as i32) + products.sum::<i64>();
        assert_eq!(found[row][column], expected as u32);
    });
}

#[test]
fn short_sums_are_exact() {
    // Integers up to 8: no bit is lost, so the rule must give what anybody would.
    let mut numbers = random();
    let step = Step::draw(
        2,
        || (numbers(17) as f32 - 8.0).to_bits() >> 16,
        || 3f32.to_bits(),
    );
    let found = step.run(Format::Bf16);
    step.for_each(|row, column, _, pairs| {
        let wide = |bits: u32| f32::from_bits(bits << 16);
        let expected: f32 = 3.0 + pairs.iter().map(|&(a, b)| wide(a) * wide(b)).sum::<f32>();
        assert_eq!(f32::from_bits(found[row][column]), expected);
    });
}

#[test]
fn infinities_and_nan_reach_their_elements_only() {
    let mut numbers = random();
    let mut step = Step::draw(2, || draw_float(&mut numbers, 6).to_bits() >> 16, || 0);
    let tame = step.run(Format::Bf16);
    step.left[2][5] = f32::INFINITY.to_bits() >> 16;
    step.left[9][0] = f32::NAN.to_bits() >> 16;
    step.sums[9][0] = f32::INFINITY.to_bits();
    step.sums[12][3] = f32::NEG_INFINITY.to_bits();
    let found = step.run(Format::Bf16);
    for row in 0..16 {
        for column in 0..8 {
            let element = f32::from_bits(found[row][column]);
            match (row, column) {
                (2, _) => {
                    let sign = f32::from_bits(step.right[5][column] << 16).signum();
                    assert_eq!(element, f32::INFINITY * sign);
                }
                (9, _) => assert_eq!(found[row][column], 0x7fff_ffff),
                (12, 3) => assert_eq!(element, f32::NEG_INFINITY),
                _ => assert_eq!(found[row][column], tame[row][column]),
            }
        }
    }
}

#[test]
fn sums_beyond_the_range_are_infinite() {
    let huge = f32::MAX.to_bits() >> 16;
    let step = Step::draw(2, || huge, || 0);
    assert!(
        step.run(Format::Bf16)
            .iter()
            .flatten()
            .all(|&sum| sum == f32::INFINITY.to_bits())
    );
}

#[test]
fn the_order_along_k_does_not_count() {
    let mut numbers = random();
    let mut step = Step::draw(
        2,
        || draw_float(&mut numbers, 30).to_bits() >> 16,
        || 1f32.to_bits(),
    );
    let before = step.run(Format::Bf16);
    step.left.iter_mut().for_each(|row| row.rotate_left(5));
    step.right.rotate_left(5);
    assert_eq!(step.run(Format::Bf16), before);
}
