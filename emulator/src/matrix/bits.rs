//! Integer instructions beyond Rust's operators: byte permutes, bit fields, funnel shifts, reductions over a warp.

use super::Lanes;

/// `prmt.b32` without a mode: byte `i` of the result is that of the eight bytes of `a` and `b` which nibble `i` of
/// `selector` names, or with the nibble's top bit set that byte's sign, eight times.
#[inline(always)]
pub fn permute_bytes(a: u32, b: u32, selector: u32) -> u32 {
    let bytes = u64::from(b) << 32 | u64::from(a);
    (0..4).fold(0, |result, i| {
        let nibble = selector >> (4 * i);
        let byte = (bytes >> (nibble % 8 * 8)) as u8;
        let chosen = match nibble & 8 {
            0 => byte,
            _ => ((byte as i8) >> 7) as u8,
        };
        result | u32::from(chosen) << (8 * i)
    })
}

/// `bfi.b32 d, field, base, start, len`: `base` with `len` bits from `start` up replaced by the low bits of `field`.
#[inline(always)]
pub fn insert_bits_32(field: u32, base: u32, start: u32, len: u32) -> u32 {
    insert_bits(field.into(), base.into(), start, len, 32) as u32
}

/// `bfi.b64`, likewise.
#[inline(always)]
pub fn insert_bits_64(field: u64, base: u64, start: u32, len: u32) -> u64 {
    insert_bits(field, base, start, len, 64)
}

/// Start and length are the low bytes of their registers; what lies beyond `num_bits` is dropped.
#[inline(always)]
fn insert_bits(field: u64, base: u64, start: u32, len: u32, num_bits: u32) -> u64 {
    let (start, len) = (start & 0xff, len & 0xff);
    if start >= num_bits || len == 0 {
        return base;
    }
    let mask = (u64::MAX >> (64 - len.min(num_bits - start))) << start;
    base & !mask | field << start & mask
}

/// `shf.l.wrap.b32`: the upper half of `high:low` shifted left by the low five bits of `shift`.
#[inline(always)]
pub fn funnel_left(low: u32, high: u32, shift: u32) -> u32 {
    let both = u64::from(high) << 32 | u64::from(low);
    ((both << (shift & 31)) >> 32) as u32
}

/// `shf.r.wrap.b32`: the lower half of `high:low` shifted right by the low five bits of `shift`.
#[inline(always)]
pub fn funnel_right(low: u32, high: u32, shift: u32) -> u32 {
    let both = u64::from(high) << 32 | u64::from(low);
    (both >> (shift & 31)) as u32
}

/// `mul.hi.u64`.
#[inline(always)]
pub fn multiply_high(a: u64, b: u64) -> u64 {
    ((u128::from(a) * u128::from(b)) >> 64) as u64
}

/// What `redux.sync` does with the values of the member lanes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reduction {
    /// Wrapping sum, of either sign.
    Add,
    /// Least unsigned value.
    MinUnsigned,
    /// Greatest unsigned value.
    MaxUnsigned,
    /// Least signed value.
    MinSigned,
    /// Greatest signed value.
    MaxSigned,
}

/// `redux.sync` over the lanes of `members`, of which there is at least one.
pub fn reduce(reduction: Reduction, values: &Lanes, members: u32) -> u32 {
    let member_values = (values.iter().enumerate())
        .filter(|(lane, _)| members >> lane & 1 == 1)
        .map(|(_, &value)| value);
    let combine = |a: u32, b: u32| match reduction {
        Reduction::Add => a.wrapping_add(b),
        Reduction::MinUnsigned => a.min(b),
        Reduction::MaxUnsigned => a.max(b),
        Reduction::MinSigned => (a as i32).min(b as i32) as u32,
        Reduction::MaxSigned => (a as i32).max(b as i32) as u32,
    };
    member_values.reduce(combine).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_are_picked_by_nibble() {
        let (a, b) = (0x8322_1100, 0x77f6_5544);
        assert_eq!(permute_bytes(a, b, 0x3210), a);
        assert_eq!(permute_bytes(a, b, 0x7654), b);
        assert_eq!(permute_bytes(a, b, 0x5140), 0x5511_4400);
        // Signs of bytes 3 and 6 are set, those of 0 and 7 are not.
        assert_eq!(permute_bytes(a, b, 0xbe8f), 0xffff_0000);
        // Only four nibbles count.
        assert_eq!(permute_bytes(a, b, 0xffff_3210), a);
    }

    #[test]
    fn fields_are_inserted_bit_by_bit() {
        let field = 0x9e37_79b9_7f4a_7c15u64;
        for base in [0, u64::MAX, 0xbf58_476d_1ce4_e5b9] {
            for start in 0..70 {
                for len in 0..70 {
                    let expected = |num_bits: u32| {
                        (0..num_bits).fold(0u64, |bits, i| {
                            let is_field = i >= start && i < start + len;
                            let bit = if is_field {
                                field >> (i - start)
                            } else {
                                base >> i
                            };
                            bits | (bit & 1) << i
                        })
                    };
                    assert_eq!(insert_bits_64(field, base, start, len), expected(64));
                    let narrow = insert_bits_32(field as u32, base as u32, start, len);
                    assert_eq!(u64::from(narrow), expected(32));
                }
            }
        }
    }

    #[test]
    fn funnel_shifts_of_one_word_are_rotations() {
        let word = 0x8322_1177u32;
        for shift in 0..64 {
            assert_eq!(funnel_left(word, word, shift), word.rotate_left(shift));
            assert_eq!(funnel_right(word, word, shift), word.rotate_right(shift));
        }
        assert_eq!(funnel_left(0xf000_0000, 1, 4), 0x1f);
        assert_eq!(funnel_right(0x10, 0xf, 4), 0xf000_0001);
    }

    #[test]
    fn high_products_come_from_long_multiplication() {
        for (a, b) in [
            (u64::MAX, u64::MAX),
            (0x9e37_79b9_7f4a_7c15, 0xbf58_476d_1ce4_e5b9),
            (3, 5),
        ] {
            let [a0, b0] = [a, b].map(|x| x & 0xffff_ffff);
            let [a1, b1] = [a, b].map(|x| x >> 32);
            let middle = a1 * b0 + ((a0 * b0) >> 32);
            let carry = (middle & 0xffff_ffff) + a0 * b1;
            assert_eq!(
                multiply_high(a, b),
                a1 * b1 + (middle >> 32) + (carry >> 32)
            );
        }
    }

    #[test]
    fn reductions_see_members_only() {
        let values: Lanes = std::array::from_fn(|lane| (lane as u32).wrapping_sub(16));
        let members = 1 << 3 | 1 << 20 | 1 << 30;
        let found = [
            Reduction::Add,
            Reduction::MinUnsigned,
            Reduction::MaxUnsigned,
            Reduction::MinSigned,
            Reduction::MaxSigned,
        ]
        .map(|reduction| reduce(reduction, &values, members) as i32);
        assert_eq!(found, [-13 + 4 + 14, 4, -13, -13, 14]);
    }
}
