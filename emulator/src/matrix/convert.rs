//! `cvt`: conversions between number formats, with the rounding that the instruction names.
//!
//! Conversions that Rust's `as` does in the same way (integers to floats and f64 to f32, to nearest) are not repeated.

use super::dispatch::vectorised;
use super::float::{CANONICAL_NAN, clear_nan};
use super::{Lanes, WARP_LANES};

/// BF16's NaN, as conversions give it.
pub(super) const BF16_NAN: u16 = 0x7fff;

/// The value of a BF16 number.
#[inline(always)]
pub fn bf16_to_f32(bits: u16) -> f32 {
    f32::from_bits(u32::from(bits) << 16)
}

/// `cvt.rn.bf16.f32`: to nearest, ties to even.
#[inline(always)]
pub fn f32_to_bf16(number: f32) -> u16 {
    let bits = number.to_bits();
    let rounded = (bits.wrapping_add(0x7fff + (bits >> 16 & 1)) >> 16) as u16;
    if number.is_nan() { BF16_NAN } else { rounded }
}

vectorised! {
    /// `cvt.rn.bf16x2.f32 d, high, low`.
    pub fn pack_bf16(high: &Lanes, low: &Lanes) -> Lanes {
        let mut packed = [0; WARP_LANES];
        for lane in 0..WARP_LANES {
            let [high, low] = [high[lane], low[lane]].map(f32::from_bits).map(f32_to_bf16);
            packed[lane] = u32::from(high) << 16 | u32::from(low);
        }
        packed
    }
}

/// `cvt.f32.f16`, exact.
#[inline(always)]
pub fn f16_to_f32(bits: u16) -> f32 {
    let sign = u32::from(bits & 0x8000) << 16;
    let magnitude = u32::from(bits & 0x7fff);
    let unsigned = match magnitude {
        0x7c01.. => return f32::from_bits(CANONICAL_NAN),
        0x7c00 => f32::INFINITY,
        // Subnormal numbers count units of 2^-24.
        0..0x400 => magnitude as f32 * f32::from_bits((127 - 24) << 23),
        _ => f32::from_bits((magnitude << 13) + ((127 - 15) << 23)),
    };
    f32::from_bits(unsigned.to_bits() | sign)
}

/// An E4M3 code as FP16, exact; both codes without a value become NaN.
#[inline(always)]
pub fn e4m3_to_f16(code: u8) -> u16 {
    let sign = u16::from(code & 0x80) << 8;
    let magnitude = u16::from(code & 0x7f);
    let unsigned = match magnitude {
        0x7f => 0x7fff,
        // Subnormal codes count units of 2^-9, which are normal numbers of FP16.
        0 => 0,
        1 => 6 << 10,
        2..4 => 7 << 10 | (magnitude & 1) << 9,
        4..8 => 8 << 10 | (magnitude & 3) << 8,
        _ => (magnitude << 7) + (8 << 10),
    };
    if magnitude == 0x7f {
        unsigned
    } else {
        sign | unsigned
    }
}

/// The value of an E4M3 code.
#[inline(always)]
pub fn e4m3_to_f32(code: u8) -> f32 {
    let [sign, magnitude] = [code & 0x80, code & 0x7f].map(u32::from);
    let is_subnormal = magnitude < 8;
    // Exponent fields count from 2^-7 here and from 2^-127 there. Subnormal codes count from 2^-6 and have no leading one.
    let base = if is_subnormal { 121 << 23 } else { 120 << 23 };
    let leading = if is_subnormal {
        f32::from_bits(121 << 23)
    } else {
        0.0
    };
    let value = f32::from_bits((magnitude << 20) + base) - leading;
    let signed = f32::from_bits(value.to_bits() | sign << 24);
    if magnitude == 0x7f { f32::NAN } else { signed }
}

/// `cvt.rn.f16x2.e4m3x2`: the low code to the low half.
pub fn e4m3x2_to_f16x2(codes: u16) -> u32 {
    let [low, high] = codes.to_le_bytes().map(e4m3_to_f16);
    u32::from(high) << 16 | u32::from(low)
}

/// `cvt.rp.f32.f64`: toward plus infinity.
pub fn f64_to_f32_up(number: f64) -> f32 {
    let nearest = number as f32;
    if f64::from(nearest) < number {
        nearest.next_up()
    } else {
        clear_nan(nearest)
    }
}

/// `cvt.rni.f64.f64`: to the nearest integer, ties to even.
pub fn round_f64(number: f64) -> f64 {
    number.round_ties_even()
}

/// `cvt.sat.f32.f32`: to [0, 1]; NaN becomes +0.
#[inline(always)]
pub fn saturate(number: f32) -> f32 {
    // A comparison with NaN is false.
    let floored = if number > 0.0 { number } else { 0.0 };
    if floored > 1.0 { 1.0 } else { floored }
}

/// `cvt.rzi.s32.f64`: toward zero, clamped; NaN becomes the least integer, as it does from f64 only.
pub fn f64_to_s32_toward_zero(number: f64) -> i32 {
    if number.is_nan() {
        i32::MIN
    } else {
        number as i32
    }
}

/// `cvt.rni.s32.f32`: to the nearest, ties to even, clamped; NaN becomes zero.
pub fn f32_to_s32(number: f32) -> i32 {
    number.round_ties_even() as i32
}

/// `cvt.rni.u32.f32`: to the nearest, ties to even, clamped; NaN becomes zero.
pub fn f32_to_u32(number: f32) -> u32 {
    number.round_ties_even() as u32
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The value of a float format by its definition; none for NaN.
    fn value(bits: u32, exponent_bits: u32, mantissa_bits: u32, has_infinity: bool) -> Option<f64> {
        let sign = if bits >> (exponent_bits + mantissa_bits) == 1 {
            -1.0
        } else {
            1.0
        };
        let exponent = bits >> mantissa_bits & ((1 << exponent_bits) - 1);
        let mantissa = bits & ((1 << mantissa_bits) - 1);
        let bias = (1 << (exponent_bits - 1)) - 1;
        let is_top = exponent == (1 << exponent_bits) - 1;
        let fraction = f64::from(mantissa) / f64::from(1 << mantissa_bits);
        match (is_top, has_infinity) {
            (true, true) if mantissa == 0 => Some(sign * f64::INFINITY),
            (true, true) => None,
            (true, false) if mantissa == (1 << mantissa_bits) - 1 => None,
            _ if exponent == 0 => Some(sign * fraction * 2f64.powi(1 - bias)),
            _ => Some(sign * (1.0 + fraction) * 2f64.powi(exponent as i32 - bias)),
        }
    }

    #[test]
    fn all_f16_and_bf16_numbers_have_their_values() {
        for bits in 0..=u16::MAX {
            for (found, exponent_bits, mantissa_bits) in
                [(f16_to_f32(bits), 5, 10), (bf16_to_f32(bits), 8, 7)]
            {
                match value(u32::from(bits), exponent_bits, mantissa_bits, true) {
                    Some(expected) => {
                        assert_eq!(f64::from(found).to_bits(), expected.to_bits(), "{bits:#x}")
                    }
                    None => assert!(found.is_nan(), "{bits:#x}"),
                }
            }
        }
    }

    #[test]
    fn all_pairs_of_e4m3_codes_have_their_values() {
        for codes in 0..=u16::MAX {
            let pair = e4m3x2_to_f16x2(codes);
            for (code, half) in [(codes & 0xff, pair & 0xffff), (codes >> 8, pair >> 16)] {
                let wide = f64::from(e4m3_to_f32(code as u8));
                let wide = (!wide.is_nan()).then(|| wide.to_bits());
                let found = value(half, 5, 10, true).map(f64::to_bits);
                assert_eq!(found, wide, "{code:#x}");
                assert_eq!(
                    found,
                    value(u32::from(code), 4, 3, false).map(f64::to_bits),
                    "{code:#x}"
                );
            }
        }
    }

    #[test]
    fn bf16_rounding_picks_the_nearer_neighbour_and_the_even_one_of_a_tie() {
        // Every BF16 number with the next one, and points on the way between them.
        for bits in (0..0x7f80u16).chain(0x8000..0xff80) {
            let low = f64::from(bf16_to_f32(bits));
            let next = bits + 1;
            // Behind the largest number, infinity stands where the next number would.
            let high = value(u32::from(next), 8, 7, true).filter(|high| high.is_finite());
            let high = high.unwrap_or(low.signum() * 2f64.powi(128));
            for sixteenth in 0..16 {
                let number = (low + (high - low) * f64::from(sixteenth) / 16.0) as f32;
                let expected = match sixteenth {
                    0..8 => bits,
                    8 if bits % 2 == 0 => bits,
                    _ => next,
                };
                assert_eq!(f32_to_bf16(number), expected, "{number:e}");
            }
        }
        assert_eq!(f32_to_bf16(f32::NAN), BF16_NAN);
        assert_eq!(f32_to_bf16(f32::from_bits(0xff80_0001)), BF16_NAN);
        let [high, low] = [1.0f32, -2.0].map(|number| [number.to_bits(); WARP_LANES]);
        assert_eq!(pack_bf16(&high, &low), [0x3f80_c000; WARP_LANES]);
    }

    #[test]
    fn rounding_up_gives_the_least_number_above() {
        let tenth = f64_to_f32_up(0.1);
        assert!(f64::from(tenth) >= 0.1 && f64::from(tenth.next_down()) < 0.1);
        let less = f64_to_f32_up(-0.1);
        assert!(f64::from(less) >= -0.1 && f64::from(less.next_down()) < -0.1);
        assert_eq!(f64_to_f32_up(1.5), 1.5);
        assert_eq!(f64_to_f32_up(1e300), f32::INFINITY);
        assert_eq!(f64_to_f32_up(-1e300), f32::MIN);
        assert_eq!(f64_to_f32_up(1e-300), f32::from_bits(1));
        assert_eq!(f64_to_f32_up(-1e-300).to_bits(), (-0.0f32).to_bits());
        assert_eq!(f64_to_f32_up(f64::NAN).to_bits(), CANONICAL_NAN);
    }

    #[test]
    fn integers_are_clamped_and_ties_go_to_even() {
        let ties = [-2.5f32, -1.5, -0.5, 0.5, 1.5, 2.5];
        assert_eq!(ties.map(f32_to_s32), [-2, -2, 0, 0, 2, 2]);
        assert_eq!(ties.map(f32_to_u32), [0, 0, 0, 0, 2, 2]);
        assert_eq!(f32_to_u32(1e10), u32::MAX);
        assert_eq!(
            [f32_to_s32(1e10), f32_to_s32(-1e10), f32_to_s32(f32::NAN)],
            [i32::MAX, i32::MIN, 0]
        );
        assert_eq!(f32_to_u32(f32::NAN), 0);
        assert_eq!(
            [1.9, -1.9, 3e9, f64::NAN].map(f64_to_s32_toward_zero),
            [1, -1, i32::MAX, i32::MIN]
        );
        assert_eq!(
            [0.5, 1.5, -2.5, 4503599627370497.5].map(round_f64),
            [0.0, 2.0, -2.0, 4503599627370498.0]
        );
    }

    #[test]
    fn saturating_leaves_the_unit_interval_alone() {
        assert_eq!(
            [0.25, 1.0, 7.0, -3.0, f32::INFINITY].map(saturate),
            [0.25, 1.0, 1.0, 0.0, 1.0]
        );
        assert_eq!(
            [f32::NAN, -0.0].map(|number| saturate(number).to_bits()),
            [0, 0]
        );
    }
}
