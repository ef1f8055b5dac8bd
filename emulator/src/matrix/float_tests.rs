//! Holds the arithmetic against exact integers, neighbours of the result and f64.

use super::*;
use crate::matrix::convert::f32_to_bf16;
use crate::order::{Order, Policy};

/// fp32 numbers of all kinds, those at the ends of the range first.
fn samples(count: usize) -> Vec<f32> {
    let ends = [
        0.0,
        1.0,
        f32::MAX,
        f32::MIN_POSITIVE,
        f32::from_bits(1),
        f32::INFINITY,
    ];
    let mut order = Order::new(Policy::Random, 5);
    let mut numbers: Vec<f32> = ends.into_iter().flat_map(|end| [end, -end]).collect();
    while numbers.len() < count {
        let spread = [4, 40, 254][order.below(3) as usize];
        let exponent = 127 - spread / 2 + order.below(spread + 1);
        let short = [0, 0x7f_8000, 0x7f_ffff][order.below(3) as usize];
        numbers.push(f32::from_bits(
            order.below(2) << 31 | exponent << 23 | order.below(1 << 23) & short,
        ));
    }
    numbers
}

/// Integers in units of 2^-298, as sign and 640 bits: wide enough for the sum of any product and number.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
struct Wide([i64; 20]);

impl Wide {
    /// `factor` times `other` times 2^-298 for integers of fp32 numbers; limbs have 32 bits, all of the sign of the whole.
    fn product(a: f32, b: f32) -> Self {
        let parts = |number: f32| {
            let (bits, exponent) = (number.to_bits(), number.to_bits() >> 23 & 0xff);
            let mantissa = i128::from(bits & 0x7f_ffff) | i128::from(exponent > 0) << 23;
            (
                if number < 0.0 { -mantissa } else { mantissa },
                exponent.max(1) - 1,
            )
        };
        let ((a, a_shift), (b, b_shift)) = (parts(a), parts(b));
        let shift = (a_shift + b_shift) as usize;
        let product = (a * b) << (shift % 32);
        let mut limbs = [0; 20];
        for (i, limb) in limbs[shift / 32..].iter_mut().take(3).enumerate() {
            *limb = (product.unsigned_abs() >> (32 * i)) as u32 as i64 * product.signum() as i64;
        }
        Wide(limbs)
    }

    fn of(number: f32) -> Self {
        // One, in units of 2^-149 on its own side.
        Wide::product(number, 1.0)
    }

    fn plus(self, other: Self) -> Self {
        Wide(std::array::from_fn(|i| self.0[i] + other.0[i]))
    }

    /// The sign of the difference, by carrying from the lowest limb up.
    fn compare(self, other: Self) -> std::cmp::Ordering {
        let mut carry = 0i64;
        let mut is_zero = true;
        for i in 0..20 {
            let limb = self.0[i] - other.0[i] + carry;
            carry = limb >> 32;
            is_zero &= limb & 0xffff_ffff == 0;
        }
        match (carry < 0, is_zero) {
            (true, _) => std::cmp::Ordering::Less,
            (false, true) if carry == 0 => std::cmp::Ordering::Equal,
            _ => std::cmp::Ordering::Greater,
        }
    }
}

#[test]
fn rounding_down_gives_the_greatest_number_below() {
    let numbers = samples(60);
    for &a in &numbers {
        for &b in &numbers {
            for &c in &numbers {
                let found = fma_down(a, b, c);
                if !(a.is_finite() && b.is_finite() && c.is_finite()) {
                    let plain = a.mul_add(b, c);
                    assert!(found == plain || (found.is_nan() && plain.is_nan()));
                    continue;
                }
                let exact = Wide::product(a, b).plus(Wide::of(c));
                assert!(
                    found == f32::NEG_INFINITY || Wide::of(found).compare(exact).is_le(),
                    "{a} {b} {c}"
                );
                let next = found.next_up();
                assert!(
                    next == f32::INFINITY || Wide::of(next).compare(exact).is_gt(),
                    "{a} {b} {c}"
                );
            }
        }
    }
    assert_eq!(fma_down(1.0, 1.0, -1.0).to_bits(), (-0.0f32).to_bits());
    assert_eq!(fma_down(0.0, 1.0, 0.0).to_bits(), 0);
    assert_eq!(fma_down(f32::NAN, 1.0, 0.0).to_bits(), CANONICAL_NAN);
}

#[test]
fn rounding_toward_zero_never_grows() {
    let numbers = samples(600);
    for &a in &numbers {
        for &b in &numbers {
            let found = add_toward_zero(a, b);
            if !(a.is_finite() && b.is_finite()) {
                assert!(found == a + b || (found.is_nan() && (a + b).is_nan()));
                continue;
            }
            let exact = Wide::of(a).plus(Wide::of(b));
            let magnitude = if exact.compare(Wide::of(0.0)).is_lt() {
                Wide::of(-a).plus(Wide::of(-b))
            } else {
                exact
            };
            assert!(Wide::of(found.abs()).compare(magnitude).is_le(), "{a} {b}");
            let next = found.abs().next_up();
            assert!(
                next == f32::INFINITY || Wide::of(next).compare(magnitude).is_gt(),
                "{a} {b}"
            );
            assert!(found == 0.0 || (found < 0.0) == (f64::from(a) + f64::from(b) < 0.0));
        }
    }
}

#[test]
fn packed_bf16_is_rounded_once() {
    let numbers: Vec<u16> = samples(96)
        .into_iter()
        .map(|x| (x.to_bits() >> 16) as u16)
        .collect();
    for &a in &numbers {
        for &b in &numbers {
            let pair = |bits: u16| [u32::from(bits) << 16 | 0x3f80; WARP_LANES];
            for chunk in numbers.chunks_exact(WARP_LANES) {
                let c: Lanes = std::array::from_fn(|lane| u32::from(chunk[lane]) << 16 | 0x4000);
                let found = fma_bf16x2(&pair(a), &pair(b), &c);
                for lane in 0..WARP_LANES {
                    assert_eq!(found[lane] & 0xffff, 0x4040, "1 * 1 + 2 in the low half");
                    check_bf16(a, b, chunk[lane], (found[lane] >> 16) as u16);
                }
            }
        }
    }
    // 1 + 2^-8 lies halfway; 2^-133 more or less than that decides, which no fp32 sum can tell.
    let [one, half_unit, least] =
        [0x3f80_3f80, 0x3b80_3b80, 0x0001_8001].map(|pair| [pair; WARP_LANES]);
    assert_eq!(fma_bf16x2(&one, &half_unit, &one)[0], 0x3f80_3f80);
    // (1 + 2^-7) (1 + 2^-7) = 1 + 2^-6 + 2^-14, and half a unit more, lies between ties.
    let odd = [0x3f81_3f81; WARP_LANES];
    assert_eq!(fma_bf16x2(&odd, &half_unit, &odd)[0], 0x3f82_3f82);
    assert_eq!(fma_bf16x2(&odd, &one, &least)[0], 0x3f81_3f81);
}

/// The nearest of the result's neighbours, the even one of two.
fn check_bf16(a: u16, b: u16, c: u16, found: u16) {
    let [a, b, c] = [a, b, c].map(bf16_to_f32);
    let plain = a.mul_add(b, c);
    let result = bf16_to_f32(found);
    if !(a.is_finite() && b.is_finite() && c.is_finite()) {
        assert!(
            result == plain || (found == BF16_NAN && plain.is_nan()),
            "{a} {b} {c}"
        );
        return;
    }
    let exact = Wide::product(a, b).plus(Wide::of(c));
    if result.is_infinite() {
        // From half a unit above the largest number on.
        let limit = f32::from_bits(0x7f7f_8000).copysign(result);
        let order = Wide::of(limit).compare(exact);
        assert!(
            if result > 0.0 {
                order.is_le()
            } else {
                order.is_ge()
            },
            "{a} {b} {c}"
        );
        return;
    }
    // Midpoints of neighbours are fp32 numbers.
    let half_unit = |from: f32, to: f32| ((f64::from(from) + f64::from(to)) / 2.0) as f32;
    let step = |up: bool| {
        let away = (result >= 0.0) == up;
        let bits = (result.abs().to_bits() >> 16) as u16;
        match (away, bits) {
            (_, 0) => half_unit(0.0, bf16_to_f32(1).copysign(if up { 1.0 } else { -1.0 })),
            (true, 0x7f7f) => f32::from_bits(0x7f7f_8000).copysign(result),
            (true, _) => half_unit(result, bf16_to_f32(bits + 1).copysign(result)),
            (false, _) => half_unit(result, bf16_to_f32(bits - 1).copysign(result)),
        }
    };
    let is_even = found.is_multiple_of(2);
    let (above, below) = (
        Wide::of(step(true)).compare(exact),
        Wide::of(step(false)).compare(exact),
    );
    let fits = if is_even {
        above.is_ge() && below.is_le()
    } else {
        above.is_gt() && below.is_lt()
    };
    assert!(fits, "{a:e} {b:e} {c:e} {result:e}");
}

#[test]
fn fused_multiplication_is_rounded_once() {
    let bits = |number: f32| [number.to_bits(); WARP_LANES];
    let near_one = 1.0 + f32::EPSILON;
    let found = fma_f32(
        &bits(near_one),
        &bits(near_one),
        &bits(-1.0 - 2.0 * f32::EPSILON),
    );
    assert_eq!(f32::from_bits(found[7]), f32::EPSILON * f32::EPSILON);
    assert_eq!(
        fma_f32(&bits(f32::INFINITY), &bits(0.0), &bits(1.0))[0],
        CANONICAL_NAN
    );
    let wide = |number: f64| [number.to_bits(); WARP_LANES];
    let near_one = 1.0 + f64::EPSILON;
    let found = fma_f64(
        &wide(near_one),
        &wide(near_one),
        &wide(-1.0 - 2.0 * f64::EPSILON),
    );
    assert_eq!(f64::from_bits(found[31]), f64::EPSILON * f64::EPSILON);
    let numbers = samples(200);
    for triple in numbers.windows(3) {
        let found = fma_f32(&bits(triple[0]), &bits(triple[1]), &bits(triple[2]))[3];
        let expected = triple[0].mul_add(triple[1], triple[2]);
        assert_eq!(f32::from_bits(found).is_nan(), expected.is_nan());
        assert!(expected.is_nan() || found == expected.to_bits());
    }
}

#[test]
fn powers_of_two_are_within_a_unit_of_the_truth() {
    let mut x = -127.0f32;
    while x < 128.0 {
        let found = f32::from_bits(powers_of_two(&[x.to_bits(); WARP_LANES])[0]);
        let truth = f64::from(x).exp2();
        if truth < f64::from(f32::MIN_POSITIVE) {
            assert_eq!(found.to_bits(), 0);
        } else {
            let unit = f64::from(found.next_up()) - f64::from(found);
            assert!((f64::from(found) - truth).abs() <= 0.51 * unit, "{x}");
        }
        x += 0.01171875;
    }
    let special = [
        f32::INFINITY,
        f32::NEG_INFINITY,
        f32::NAN,
        -0.0,
        128.0,
        -1e30,
        1e30,
        3.0,
    ];
    let found = special.map(|x| powers_of_two(&[x.to_bits(); WARP_LANES])[31]);
    let infinity = f32::INFINITY.to_bits();
    let one = 1f32.to_bits();
    assert_eq!(
        found,
        [
            infinity,
            0,
            CANONICAL_NAN,
            one,
            infinity,
            0,
            infinity,
            8f32.to_bits()
        ]
    );
}

#[test]
fn approximate_quotients_and_roots_are_the_nearest_numbers() {
    for &x in &samples(2000) {
        if x.is_finite() && x > 0.0 {
            let root = inverse_root(x);
            // r^2 x is one, to within twice the relative error of r.
            let product = f64::from(root) * f64::from(root) * f64::from(x);
            assert!((product - 1.0).abs() < 2.0f64.powi(-23) + 1e-15, "{x}");
        }
    }
    assert_eq!(
        [0.0, -0.0].map(inverse_root),
        [f32::INFINITY, f32::NEG_INFINITY]
    );
    assert_eq!(inverse_root(-1.0).to_bits(), CANONICAL_NAN);
    assert_eq!(inverse_root(f32::INFINITY), 0.0);
    assert_eq!(quotient(1.0, 3.0), 1.0 / 3.0);
    assert_eq!(quotient(-1.0, 0.0), f32::NEG_INFINITY);
    assert_eq!(quotient(1e30, 1e38).to_bits(), 0);
    assert_eq!(quotient(-1e30, 1e38).to_bits(), (-0.0f32).to_bits());
    assert_eq!(quotient(f32::INFINITY, 1e38).to_bits(), CANONICAL_NAN);
    assert_eq!(quotient(0.0, 0.0).to_bits(), CANONICAL_NAN);
}

#[test]
fn extremes_prefer_numbers_and_tell_zeros_apart() {
    let numbers = [-1.0f32, -0.0, 0.0, 2.0];
    for (i, &a) in numbers.iter().enumerate() {
        for (j, &b) in numbers.iter().enumerate() {
            assert_eq!(min_f32(a, b).to_bits(), numbers[i.min(j)].to_bits());
            assert_eq!(max_f32(a, b).to_bits(), numbers[i.max(j)].to_bits());
            let [a, b] = [a, b].map(f64::from);
            assert_eq!(
                min_f64(a, b).to_bits(),
                f64::from(numbers[i.min(j)]).to_bits()
            );
            assert_eq!(
                max_f64(a, b).to_bits(),
                f64::from(numbers[i.max(j)]).to_bits()
            );
        }
        assert_eq!([min_f32(a, f32::NAN), max_f32(f32::NAN, a)], [a, a]);
        assert_eq!([min_f32(f32::NAN, a), max_f32(a, f32::NAN)], [a, a]);
    }
    assert_eq!(max_f32(f32::NAN, -f32::NAN).to_bits(), CANONICAL_NAN);
    assert_eq!(min_f64(f64::NAN, f64::NAN).to_bits(), CANONICAL_NAN_F64);
    assert_eq!(f32_to_bf16(min_f32(1.0, 2.0)), 0x3f80);
}
