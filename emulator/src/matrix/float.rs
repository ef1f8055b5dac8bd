//! Floating-point arithmetic that Rust has no operator for: directed roundings, packed BF16, approximations.
//!
//! Approximate instructions give the correctly rounded result, or nearly: a GPU may differ in the last places that its
//! documentation leaves open. What is NaN is the canonical one, which is what GPUs give.

use super::convert::{BF16_NAN, bf16_to_f32};
use super::dispatch::vectorised;
use super::{Lanes, WARP_LANES};

/// The NaN that fp32 arithmetic of a GPU gives.
pub const CANONICAL_NAN: u32 = 0x7fff_ffff;
/// The NaN that fp64 arithmetic of a GPU gives.
pub const CANONICAL_NAN_F64: u64 = 0xfff8_0000_0000_0000;

/// The number itself, or the canonical NaN.
#[inline(always)]
pub fn clear_nan(number: f32) -> f32 {
    if number.is_nan() {
        f32::from_bits(CANONICAL_NAN)
    } else {
        number
    }
}

/// `x + y` as the nearest f64 and what is missing to the exact sum.
#[inline(always)]
fn two_sum(x: f64, y: f64) -> (f64, f64) {
    let sum = x + y;
    let from_y = sum - x;
    let from_x = sum - from_y;
    (sum, (x - from_x) + (y - from_y))
}

/// The greatest fp32 number that is no more than `sum + rest`, of which `rest` is less than half a unit of `sum`.
#[inline(always)]
fn round_down(sum: f64, rest: f64) -> f32 {
    let nearest = sum as f32;
    let wide = f64::from(nearest);
    let is_above = wide > sum || (wide == sum && rest < 0.0);
    if is_above {
        nearest.next_down()
    } else {
        nearest
    }
}

/// `fma.rm.f32`: `a b + c`, rounded once, toward minus infinity.
#[inline(always)]
pub fn fma_down(a: f32, b: f32, c: f32) -> f32 {
    // Exact: 48 bits, and far from the ends of f64's range.
    let product = f64::from(a) * f64::from(b);
    let (sum, rest) = two_sum(product, f64::from(c));
    if !sum.is_finite() {
        return clear_nan(sum as f32);
    }
    // An exact zero of terms with different signs is negative in this rounding.
    let is_cancelled = sum == 0.0 && (product.is_sign_negative() || c.is_sign_negative());
    if is_cancelled {
        -0.0
    } else {
        round_down(sum, rest)
    }
}

/// `add.rz.f32`: rounded toward zero.
#[inline(always)]
pub fn add_toward_zero(a: f32, b: f32) -> f32 {
    let (sum, rest) = two_sum(f64::from(a), f64::from(b));
    if !sum.is_finite() {
        return clear_nan(sum as f32);
    }
    match sum < 0.0 {
        true => -round_down(-sum, -rest),
        false => round_down(sum, rest),
    }
}

/// A half of `fma.rn.bf16x2`, as the bits of an f64 that is a BF16 number.
#[inline(always)]
fn fma_bf16(a: u16, b: u16, c: u16) -> u16 {
    let [a, b, c] = [a, b, c].map(|bits| f64::from(bf16_to_f32(bits)));
    let (sum, rest) = two_sum(a * b, c);
    // Rounded to odd, so that rounding again to fewer bits is rounding once: what is cut off leaves its mark in the
    // last bit, on the side of zero.
    let is_toward_zero = (rest < 0.0) != (sum < 0.0);
    let cut = sum.to_bits() - u64::from(rest != 0.0 && is_toward_zero);
    let odd = if rest != 0.0 { cut | 1 } else { cut };
    const DROPPED_BITS: u64 = 52 - 7;
    let half = ((1 << (DROPPED_BITS - 1)) - 1) + (odd >> DROPPED_BITS & 1);
    let even = odd.wrapping_add(half);
    let normal = f64::from_bits(even & !((1 << DROPPED_BITS) - 1));
    // Adding this leaves the places of BF16's subnormal numbers, units of 2^-133.
    let magic = f64::from_bits((1023 + 52 - 133) << 52) * 1.5;
    let subnormal = (f64::from_bits(odd) + magic) - magic;
    let is_tiny = sum.abs() < f64::from(f32::MIN_POSITIVE);
    let rounded = if is_tiny { subnormal } else { normal };
    // What is tiny keeps its sign even as zero.
    let bits = (rounded.abs() as f32).to_bits() | ((sum.to_bits() >> 32) as u32 & 0x8000_0000);
    let is_infinite = sum.abs() == f64::INFINITY;
    let bits = if is_infinite {
        (sum as f32).to_bits()
    } else {
        bits
    };
    if sum.is_nan() {
        BF16_NAN
    } else {
        (bits >> 16) as u16
    }
}

/// A number of the result of `ex2.approx.ftz.f32`.
#[inline(always)]
fn power_of_two(x: f32) -> f32 {
    // Taylor coefficients of 2^f, ln(2)^i / i!, highest first: 1e-14 of the value for |f| <= 1/2.
    const COEFFICIENTS: [f64; 12] = {
        let mut coefficients = [1.0; 12];
        let mut i = 1;
        while i < 12 {
            coefficients[i] = coefficients[i - 1] * std::f64::consts::LN_2 / i as f64;
            i += 1;
        }
        coefficients
    };
    // What lies outside is zero or infinite in fp32 anyway; NaN is put back at the end.
    let clamped = f64::from(x.clamp(-200.0, 200.0));
    // Adding this rounds to an integer, whose low bits are then the low bits of the sum.
    const MAGIC: f64 = 6755399441055744.0;
    let shifted = clamped + MAGIC;
    let fraction = clamped - (shifted - MAGIC);
    let scale = f64::from_bits((shifted.to_bits() << 52).wrapping_add(1023 << 52));
    let mut power = 0.0;
    for coefficient in COEFFICIENTS.iter().rev() {
        power = power * fraction + coefficient;
    }
    let value = (power * scale) as f32;
    let flushed = if value < f32::MIN_POSITIVE {
        0.0
    } else {
        value
    };
    clear_nan(if x.is_nan() { x } else { flushed })
}

vectorised! {
    /// `fma.rn.f32`: rounded once, to nearest.
    pub fn fma_f32(a: &Lanes, b: &Lanes, c: &Lanes) -> Lanes {
        let mut d = [0; WARP_LANES];
        for lane in 0..WARP_LANES {
            let [a, b, c] = [a[lane], b[lane], c[lane]].map(f32::from_bits);
            d[lane] = clear_nan(a.mul_add(b, c)).to_bits();
        }
        d
    }

    /// `fma.rn.f64`: rounded once, to nearest.
    pub fn fma_f64(a: &[u64; WARP_LANES], b: &[u64; WARP_LANES], c: &[u64; WARP_LANES]) -> [u64; WARP_LANES] {
        let mut d = [0; WARP_LANES];
        for lane in 0..WARP_LANES {
            let [a, b, c] = [a[lane], b[lane], c[lane]].map(f64::from_bits);
            let sum = a.mul_add(b, c);
            d[lane] = if sum.is_nan() { CANONICAL_NAN_F64 } else { sum.to_bits() };
        }
        d
    }

    /// `fma.rn.bf16x2`: both halves on their own, rounded once, to nearest.
    pub fn fma_bf16x2(a: &Lanes, b: &Lanes, c: &Lanes) -> Lanes {
        let mut d = [0; WARP_LANES];
        for lane in 0..WARP_LANES {
            let low = fma_bf16(a[lane] as u16, b[lane] as u16, c[lane] as u16);
            let [a, b, c] = [a[lane], b[lane], c[lane]].map(|pair| (pair >> 16) as u16);
            d[lane] = u32::from(fma_bf16(a, b, c)) << 16 | u32::from(low);
        }
        d
    }

    /// `ex2.approx.ftz.f32`: 2^x; subnormal results become zero.
    pub fn powers_of_two(x: &Lanes) -> Lanes {
        x.map(|x| power_of_two(f32::from_bits(x)).to_bits())
    }
}

/// `rsqrt.approx.f32`.
pub fn inverse_root(x: f32) -> f32 {
    clear_nan((1.0 / f64::from(x).sqrt()) as f32)
}

/// `div.approx.f32`; divisors above 2^126 give zero, as there.
pub fn quotient(a: f32, b: f32) -> f32 {
    let is_large = b.is_finite() && b.abs() > f32::from_bits((127 + 126) << 23);
    clear_nan(match is_large {
        true if a.is_infinite() => f32::NAN,
        true => a * 0.0f32.copysign(b),
        false => (f64::from(a) / f64::from(b)) as f32,
    })
}

/// Defines what Rust leaves open: a NaN loses to a number, and -0 is less than +0.
macro_rules! define_extremes {
    ($minimum:ident, $maximum:ident, $float:ty, $nan:expr, $name:literal) => {
        #[doc = concat!("`min.", $name, "`: of a number and NaN the number; -0 is less than +0.")]
        #[inline(always)]
        pub fn $minimum(a: $float, b: $float) -> $float {
            let both = <$float>::from_bits(a.to_bits() | b.to_bits());
            let least = if a < b { a } else { b };
            let least = if a == b { both } else { least };
            let least = if b.is_nan() { a } else { least };
            if a.is_nan() && b.is_nan() {
                <$float>::from_bits($nan)
            } else {
                least
            }
        }

        #[doc = concat!("`max.", $name, "`: of a number and NaN the number; -0 is less than +0.")]
        #[inline(always)]
        pub fn $maximum(a: $float, b: $float) -> $float {
            let both = <$float>::from_bits(a.to_bits() & b.to_bits());
            let most = if a > b { a } else { b };
            let most = if a == b { both } else { most };
            let most = if b.is_nan() { a } else { most };
            if a.is_nan() && b.is_nan() {
                <$float>::from_bits($nan)
            } else {
                most
            }
        }
    };
}

define_extremes!(min_f32, max_f32, f32, CANONICAL_NAN, "f32");
define_extremes!(min_f64, max_f64, f64, CANONICAL_NAN_F64, "f64");

#[cfg(test)]
#[path = "float_tests.rs"]
mod tests;
