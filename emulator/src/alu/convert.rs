//! Conversions. The PTX rule that a conversion's registers may be wider than its types is not needed by our kernels.

use super::{Alu, alu};
use crate::matrix::convert;
use crate::matrix::float::clear_nan;

/// The entry of `opcode`.
#[rustfmt::skip]
pub fn lookup(opcode: &str) -> Option<Alu> {
    Some(match opcode {
        "cvt.u64.u32" => alu!(|a: u32| -> u64 { u64::from(a) }),
        "cvt.s64.s32" => alu!(|a: i32| -> i64 { i64::from(a) }),
        "cvt.u32.u64" | "cvt.s32.s64" => alu!(|a: u64| -> u32 { a as u32 }),
        "cvt.u32.u16" => alu!(|a: u16| -> u32 { u32::from(a) }),
        "cvt.s32.s16" => alu!(|a: u16| -> i32 { i32::from(a as i16) }),
        "cvt.u64.u16" => alu!(|a: u16| -> u64 { u64::from(a) }),
        "cvt.u16.u32" => alu!(|a: u32| -> u16 { a as u16 }),
        "cvt.u16.u64" => alu!(|a: u64| -> u16 { a as u16 }),
        "cvt.rn.f32.u32" => alu!(|a: u32| -> f32 { a as f32 }),
        "cvt.rn.f32.s32" => alu!(|a: i32| -> f32 { a as f32 }),
        "cvt.rn.f32.u64" => alu!(|a: u64| -> f32 { a as f32 }),
        "cvt.rn.f32.s64" => alu!(|a: i64| -> f32 { a as f32 }),
        "cvt.rn.f32.f64" => alu!(|a: f64| -> f32 { clear_nan(a as f32) }),
        "cvt.rp.f32.f64" => alu!(|a: f64| -> f32 { convert::f64_to_f32_up(a) }),
        "cvt.rn.f64.u32" => alu!(|a: u32| -> f64 { f64::from(a) }),
        "cvt.rn.f64.s32" => alu!(|a: i32| -> f64 { f64::from(a) }),
        "cvt.rn.f64.s64" => alu!(|a: i64| -> f64 { a as f64 }),
        "cvt.rn.f64.u64" => alu!(|a: u64| -> f64 { a as f64 }),
        "cvt.f64.f32" => alu!(|a: f32| -> f64 { f64::from(a) }),
        "cvt.f32.f16" => alu!(|a: u16| -> f32 { convert::f16_to_f32(a) }),
        "cvt.rni.f32.f32" => alu!(|a: f32| -> f32 { a.round_ties_even() }),
        "cvt.rni.f64.f64" => alu!(|a: f64| -> f64 { convert::round_f64(a) }),
        "cvt.sat.f32.f32" => alu!(|a: f32| -> f32 { convert::saturate(a) }),
        "cvt.rzi.s32.f64" => alu!(|a: f64| -> i32 { convert::f64_to_s32_toward_zero(a) }),
        // Rust's casts too clamp, and take what is no number for zero.
        "cvt.rzi.s32.f32" => alu!(|a: f32| -> i32 { a as i32 }),
        "cvt.rni.s32.f32" => alu!(|a: f32| -> i32 { convert::f32_to_s32(a) }),
        "cvt.rni.u32.f32" => alu!(|a: f32| -> u32 { convert::f32_to_u32(a) }),
        "cvt.rn.bf16x2.f32" => alu!(|a: f32, b: f32| -> u32 {
            u32::from(convert::f32_to_bf16(a)) << 16 | u32::from(convert::f32_to_bf16(b))
        }),
        "cvt.rn.bf16.f32" => alu!(|a: f32| -> u16 { convert::f32_to_bf16(a) }),
        "cvt.rn.f16x2.e4m3x2" => alu!(|a: u16| -> u32 { convert::e4m3x2_to_f16x2(a) }),
        _ => return None,
    })
}
