//! Integer and predicate instructions.

use super::{Alu, alu};
use crate::matrix::bits;

/// Parts of moves between a register and a pair of registers of half its width.
#[derive(Debug, Clone, Copy)]
pub struct PairMoves {
    /// Both halves, the low one first, to the whole.
    pub join: Alu,
    /// The whole to its low half.
    pub low: Alu,
    /// The whole to its high half.
    pub high: Alu,
}

/// Moves of a pair to or from a register of `num_bits` bits.
pub fn pair_moves(num_bits: u32) -> Option<PairMoves> {
    match num_bits {
        32 => Some(PairMoves {
            join: alu!(|a: u16, b: u16| -> u32 { u32::from(b) << 16 | u32::from(a) }),
            low: alu!(|a: u32| -> u16 { a as u16 }),
            high: alu!(|a: u32| -> u16 { (a >> 16) as u16 }),
        }),
        64 => Some(PairMoves {
            join: alu!(|a: u32, b: u32| -> u64 { u64::from(b) << 32 | u64::from(a) }),
            low: alu!(|a: u64| -> u32 { a as u32 }),
            high: alu!(|a: u64| -> u32 { (a >> 32) as u32 }),
        }),
        _ => None,
    }
}

/// `bfi` with start and length in one source, the length eight bits up.
pub fn insert_bits(num_bits: u32) -> Option<Alu> {
    match num_bits {
        32 => Some(alu!(|a: u32, b: u32, c: u32| -> u32 {
            bits::insert_bits_32(a, b, c, c >> 8)
        })),
        64 => Some(alu!(|a: u64, b: u64, c: u32| -> u64 {
            bits::insert_bits_64(a, b, c, c >> 8)
        })),
        _ => None,
    }
}

/// The entry of `opcode`.
#[rustfmt::skip]
pub fn lookup(opcode: &str) -> Option<Alu> {
    Some(match opcode {
        "add.s32" | "add.u32" => alu!(|a: u32, b: u32| -> u32 { a.wrapping_add(b) }),
        "add.s64" | "add.u64" => alu!(|a: u64, b: u64| -> u64 { a.wrapping_add(b) }),
        "sub.s32" | "sub.u32" => alu!(|a: u32, b: u32| -> u32 { a.wrapping_sub(b) }),
        "sub.s64" | "sub.u64" => alu!(|a: u64, b: u64| -> u64 { a.wrapping_sub(b) }),
        "neg.s32" => alu!(|a: u32| -> u32 { a.wrapping_neg() }),
        "neg.s64" => alu!(|a: u64| -> u64 { a.wrapping_neg() }),
        "abs.s32" => alu!(|a: i32| -> i32 { a.wrapping_abs() }),
        "mul.lo.s32" | "mul.lo.u32" => alu!(|a: u32, b: u32| -> u32 { a.wrapping_mul(b) }),
        "mul.lo.s64" | "mul.lo.u64" => alu!(|a: u64, b: u64| -> u64 { a.wrapping_mul(b) }),
        "mul.hi.u32" => alu!(|a: u32, b: u32| -> u32 { ((u64::from(a) * u64::from(b)) >> 32) as u32 }),
        "mul.hi.u64" => alu!(|a: u64, b: u64| -> u64 { bits::multiply_high(a, b) }),
        "mul.wide.u16" => alu!(|a: u16, b: u16| -> u32 { u32::from(a) * u32::from(b) }),
        "mul.wide.u32" => alu!(|a: u32, b: u32| -> u64 { u64::from(a) * u64::from(b) }),
        "mul.wide.s32" => alu!(|a: i32, b: i32| -> i64 { i64::from(a) * i64::from(b) }),
        "mad.lo.s32" | "mad.lo.u32" => alu!(|a: u32, b: u32, c: u32| -> u32 { a.wrapping_mul(b).wrapping_add(c) }),
        "mad.lo.s64" | "mad.lo.u64" => alu!(|a: u64, b: u64, c: u64| -> u64 { a.wrapping_mul(b).wrapping_add(c) }),
        "mad.wide.u32" => alu!(|a: u32, b: u32, c: u64| -> u64 { (u64::from(a) * u64::from(b)).wrapping_add(c) }),
        "mad.wide.s32" => alu!(|a: i32, b: i32, c: i64| -> i64 { (i64::from(a) * i64::from(b)).wrapping_add(c) }),
        // Division by zero has no defined result; all ones is what the hardware gives.
        "div.u32" => alu!(|a: u32, b: u32| -> u32 { a.checked_div(b).unwrap_or(u32::MAX) }),
        "div.u64" => alu!(|a: u64, b: u64| -> u64 { a.checked_div(b).unwrap_or(u64::MAX) }),
        "div.s32" => alu!(|a: i32, b: i32| -> i32 { if b == 0 { -1 } else { a.wrapping_div(b) } }),
        "rem.u32" => alu!(|a: u32, b: u32| -> u32 { a.checked_rem(b).unwrap_or(a) }),
        "rem.u64" => alu!(|a: u64, b: u64| -> u64 { a.checked_rem(b).unwrap_or(a) }),
        "rem.s32" => alu!(|a: i32, b: i32| -> i32 { if b == 0 { a } else { a.wrapping_rem(b) } }),
        "min.u32" => alu!(|a: u32, b: u32| -> u32 { a.min(b) }),
        "max.u32" => alu!(|a: u32, b: u32| -> u32 { a.max(b) }),
        "min.s32" => alu!(|a: i32, b: i32| -> i32 { a.min(b) }),
        "max.s32" => alu!(|a: i32, b: i32| -> i32 { a.max(b) }),
        "min.u64" => alu!(|a: u64, b: u64| -> u64 { a.min(b) }),
        "max.u64" => alu!(|a: u64, b: u64| -> u64 { a.max(b) }),
        "min.s64" => alu!(|a: i64, b: i64| -> i64 { a.min(b) }),
        "max.s64" => alu!(|a: i64, b: i64| -> i64 { a.max(b) }),
        "and.b16" => alu!(|a: u16, b: u16| -> u16 { a & b }),
        "or.b16" => alu!(|a: u16, b: u16| -> u16 { a | b }),
        "and.b32" => alu!(|a: u32, b: u32| -> u32 { a & b }),
        "or.b32" => alu!(|a: u32, b: u32| -> u32 { a | b }),
        "xor.b32" => alu!(|a: u32, b: u32| -> u32 { a ^ b }),
        "not.b16" => alu!(|a: u16| -> u16 { !a }),
        "not.b32" => alu!(|a: u32| -> u32 { !a }),
        "and.b64" => alu!(|a: u64, b: u64| -> u64 { a & b }),
        "or.b64" => alu!(|a: u64, b: u64| -> u64 { a | b }),
        "xor.b64" => alu!(|a: u64, b: u64| -> u64 { a ^ b }),
        "not.b64" => alu!(|a: u64| -> u64 { !a }),
        "and.pred" => alu!(|a: bool, b: bool| -> bool { a & b }),
        "or.pred" => alu!(|a: bool, b: bool| -> bool { a | b }),
        "xor.pred" => alu!(|a: bool, b: bool| -> bool { a ^ b }),
        "not.pred" => alu!(|a: bool| -> bool { !a }),
        // Shifts by the register's width or more give what shifting bit by bit would.
        "shl.b32" => alu!(|a: u32, b: u32| -> u32 { if b < 32 { a << b } else { 0 } }),
        "shr.u32" | "shr.b32" => alu!(|a: u32, b: u32| -> u32 { if b < 32 { a >> b } else { 0 } }),
        "shr.s32" => alu!(|a: i32, b: u32| -> i32 { a >> b.min(31) }),
        "shl.b64" => alu!(|a: u64, b: u32| -> u64 { if b < 64 { a << b } else { 0 } }),
        "shr.u64" | "shr.b64" => alu!(|a: u64, b: u32| -> u64 { if b < 64 { a >> b } else { 0 } }),
        "shr.s64" => alu!(|a: i64, b: u32| -> i64 { a >> b.min(63) }),
        "shl.b16" => alu!(|a: u16, b: u32| -> u16 { if b < 16 { a << b } else { 0 } }),
        "shr.u16" | "shr.b16" => alu!(|a: u16, b: u32| -> u16 { if b < 16 { a >> b } else { 0 } }),
        "shf.l.wrap.b32" => alu!(|a: u32, b: u32, c: u32| -> u32 { bits::funnel_left(a, b, c) }),
        "shf.r.wrap.b32" => alu!(|a: u32, b: u32, c: u32| -> u32 { bits::funnel_right(a, b, c) }),
        // No instruction by this name: `lop3.b32` of 0xE2, bits of `a` where `b` has ones, else of `c`.
        "select.b32" => alu!(|a: u32, b: u32, c: u32| -> u32 { (a & b) | (c & !b) }),
        "prmt.b32" => alu!(|a: u32, b: u32, c: u32| -> u32 { bits::permute_bytes(a, b, c) }),
        "popc.b32" => alu!(|a: u32| -> u32 { a.count_ones() }),
        "popc.b64" => alu!(|a: u64| -> u32 { a.count_ones() }),
        "clz.b32" => alu!(|a: u32| -> u32 { a.leading_zeros() }),
        "brev.b32" => alu!(|a: u32| -> u32 { a.reverse_bits() }),
        "mov.pred" => alu!(|a: bool| -> bool { a }),
        "add.s16" | "add.u16" => alu!(|a: u16, b: u16| -> u16 { a.wrapping_add(b) }),
        "mov.b16" | "mov.u16" | "mov.s16" => alu!(|a: u16| -> u16 { a }),
        "mov.b32" | "mov.u32" | "mov.s32" | "mov.f32" => alu!(|a: u32| -> u32 { a }),
        "mov.b64" | "mov.u64" | "mov.s64" | "mov.f64" => alu!(|a: u64| -> u64 { a }),
        // Device addresses are the same everywhere, see `memory`.
        "cvta.to.global.u64" | "cvta.global.u64" => alu!(|a: u64| -> u64 { a }),
        "cvta.shared.u64" => alu!(|a: u64| -> u64 { crate::address::SHARED_WINDOW | a }),
        "cvta.to.shared.u64" => alu!(|a: u64| -> u64 { a & !crate::address::SHARED_WINDOW }),
        "cvta.local.u64" => alu!(|a: u64| -> u64 { crate::address::LOCAL_WINDOW | a }),
        "mapa.shared::cluster.u32" => alu!(|a: u32, b: u32| -> u32 { crate::address::cluster_address(a, b) }),
        "selp.b16" | "selp.u16" | "selp.s16" => alu!(|a: u16, b: u16, c: bool| -> u16 { if c { a } else { b } }),
        "selp.b32" | "selp.u32" | "selp.s32" | "selp.f32" => alu!(|a: u32, b: u32, c: bool| -> u32 { if c { a } else { b } }),
        "selp.b64" | "selp.u64" | "selp.s64" | "selp.f64" => alu!(|a: u64, b: u64, c: bool| -> u64 { if c { a } else { b } }),
        "setp.eq.b16" | "setp.eq.s16" | "setp.eq.u16" => alu!(|a: u16, b: u16| -> bool { a == b }),
        "setp.ne.b16" | "setp.ne.s16" | "setp.ne.u16" => alu!(|a: u16, b: u16| -> bool { a != b }),
        "setp.lt.u16" => alu!(|a: u16, b: u16| -> bool { a < b }),
        "setp.ge.u16" => alu!(|a: u16, b: u16| -> bool { a >= b }),
        "setp.gt.u16" => alu!(|a: u16, b: u16| -> bool { a > b }),
        "setp.eq.b32" | "setp.eq.s32" | "setp.eq.u32" => alu!(|a: u32, b: u32| -> bool { a == b }),
        "setp.ne.b32" | "setp.ne.s32" | "setp.ne.u32" => alu!(|a: u32, b: u32| -> bool { a != b }),
        "setp.lt.u32" | "setp.lo.u32" => alu!(|a: u32, b: u32| -> bool { a < b }),
        "setp.le.u32" | "setp.ls.u32" => alu!(|a: u32, b: u32| -> bool { a <= b }),
        "setp.gt.u32" | "setp.hi.u32" => alu!(|a: u32, b: u32| -> bool { a > b }),
        "setp.ge.u32" | "setp.hs.u32" => alu!(|a: u32, b: u32| -> bool { a >= b }),
        "setp.lt.s32" => alu!(|a: i32, b: i32| -> bool { a < b }),
        "setp.le.s32" => alu!(|a: i32, b: i32| -> bool { a <= b }),
        "setp.gt.s32" => alu!(|a: i32, b: i32| -> bool { a > b }),
        "setp.ge.s32" => alu!(|a: i32, b: i32| -> bool { a >= b }),
        "setp.eq.b64" | "setp.eq.s64" | "setp.eq.u64" => alu!(|a: u64, b: u64| -> bool { a == b }),
        "setp.ne.b64" | "setp.ne.s64" | "setp.ne.u64" => alu!(|a: u64, b: u64| -> bool { a != b }),
        "setp.lt.u64" => alu!(|a: u64, b: u64| -> bool { a < b }),
        "setp.le.u64" => alu!(|a: u64, b: u64| -> bool { a <= b }),
        "setp.gt.u64" => alu!(|a: u64, b: u64| -> bool { a > b }),
        "setp.ge.u64" => alu!(|a: u64, b: u64| -> bool { a >= b }),
        "setp.lt.s64" => alu!(|a: i64, b: i64| -> bool { a < b }),
        "setp.le.s64" => alu!(|a: i64, b: i64| -> bool { a <= b }),
        "setp.gt.s64" => alu!(|a: i64, b: i64| -> bool { a > b }),
        "setp.ge.s64" => alu!(|a: i64, b: i64| -> bool { a >= b }),
        _ => return None,
    })
}
