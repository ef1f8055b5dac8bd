//! Floating-point instructions. A NaN that arithmetic makes is the GPU's, whatever the host's is.

use super::{Alu, Cell, RegisterFile, alu, alu_of};
use crate::matrix::float::{
    CANONICAL_NAN_F64, add_toward_zero, clear_nan, fma_bf16x2, fma_down, inverse_root, max_f32,
    max_f64, min_f32, min_f64, powers_of_two, quotient,
};
use crate::ptx::inst::{Args, Width};

/// The number itself, or the NaN of a GPU's fp64 arithmetic.
#[inline(always)]
fn clear_nan_f64(number: f64) -> f64 {
    if number.is_nan() {
        f64::from_bits(CANONICAL_NAN_F64)
    } else {
        number
    }
}

/// The entry of `opcode`.
#[rustfmt::skip]
pub fn lookup(opcode: &str) -> Option<Alu> {
    Some(match opcode {
        "add.f32" | "add.rn.f32" => alu!(|a: f32, b: f32| -> f32 { clear_nan(a + b) }),
        "add.rz.f32" => alu!(|a: f32, b: f32| -> f32 { add_toward_zero(a, b) }),
        "sub.f32" | "sub.rn.f32" => alu!(|a: f32, b: f32| -> f32 { clear_nan(a - b) }),
        "mul.f32" | "mul.rn.f32" => alu!(|a: f32, b: f32| -> f32 { clear_nan(a * b) }),
        "fma.rn.f32" => alu!(|a: f32, b: f32, c: f32| -> f32 { clear_nan(a.mul_add(b, c)) }),
        "fma.rm.f32" => alu!(|a: f32, b: f32, c: f32| -> f32 { fma_down(a, b, c) }),
        "div.rn.f32" => alu!(|a: f32, b: f32| -> f32 { clear_nan(a / b) }),
        "div.approx.f32" => alu!(|a: f32, b: f32| -> f32 { quotient(a, b) }),
        "rcp.rn.f32" => alu!(|a: f32| -> f32 { clear_nan(1.0 / a) }),
        "sqrt.rn.f32" => alu!(|a: f32| -> f32 { clear_nan(a.sqrt()) }),
        "rsqrt.approx.f32" => alu!(|a: f32| -> f32 { inverse_root(a) }),
        "neg.f32" => alu!(|a: f32| -> f32 { -a }),
        "abs.f32" => alu!(|a: f32| -> f32 { a.abs() }),
        "min.f32" => alu!(|a: f32, b: f32| -> f32 { min_f32(a, b) }),
        "max.f32" => alu!(|a: f32, b: f32| -> f32 { max_f32(a, b) }),
        "setp.eq.f32" => alu!(|a: f32, b: f32| -> bool { a == b }),
        "setp.ne.f32" => alu!(|a: f32, b: f32| -> bool { a != b && !a.is_nan() && !b.is_nan() }),
        "setp.lt.f32" => alu!(|a: f32, b: f32| -> bool { a < b }),
        "setp.le.f32" => alu!(|a: f32, b: f32| -> bool { a <= b }),
        "setp.gt.f32" => alu!(|a: f32, b: f32| -> bool { a > b }),
        "setp.ge.f32" => alu!(|a: f32, b: f32| -> bool { a >= b }),
        "setp.equ.f32" => alu!(|a: f32, b: f32| -> bool { a == b || a.is_nan() || b.is_nan() }),
        "setp.neu.f32" => alu!(|a: f32, b: f32| -> bool { a != b }),
        "setp.ltu.f32" => alu!(|a: f32, b: f32| -> bool { a < b || a.is_nan() || b.is_nan() }),
        "setp.leu.f32" => alu!(|a: f32, b: f32| -> bool { a <= b || a.is_nan() || b.is_nan() }),
        "setp.gtu.f32" => alu!(|a: f32, b: f32| -> bool { a > b || a.is_nan() || b.is_nan() }),
        "setp.geu.f32" => alu!(|a: f32, b: f32| -> bool { a >= b || a.is_nan() || b.is_nan() }),
        "setp.num.f32" => alu!(|a: f32, b: f32| -> bool { !a.is_nan() && !b.is_nan() }),
        "setp.nan.f32" => alu!(|a: f32, b: f32| -> bool { a.is_nan() || b.is_nan() }),
        "add.f64" | "add.rn.f64" => alu!(|a: f64, b: f64| -> f64 { clear_nan_f64(a + b) }),
        "sub.f64" | "sub.rn.f64" => alu!(|a: f64, b: f64| -> f64 { clear_nan_f64(a - b) }),
        "mul.f64" | "mul.rn.f64" => alu!(|a: f64, b: f64| -> f64 { clear_nan_f64(a * b) }),
        "fma.rn.f64" => alu!(|a: f64, b: f64, c: f64| -> f64 { clear_nan_f64(a.mul_add(b, c)) }),
        "div.rn.f64" => alu!(|a: f64, b: f64| -> f64 { clear_nan_f64(a / b) }),
        "rcp.rn.f64" => alu!(|a: f64| -> f64 { clear_nan_f64(1.0 / a) }),
        "sqrt.rn.f64" => alu!(|a: f64| -> f64 { clear_nan_f64(a.sqrt()) }),
        "neg.f64" => alu!(|a: f64| -> f64 { -a }),
        "abs.f64" => alu!(|a: f64| -> f64 { a.abs() }),
        "min.f64" => alu!(|a: f64, b: f64| -> f64 { min_f64(a, b) }),
        "max.f64" => alu!(|a: f64, b: f64| -> f64 { max_f64(a, b) }),
        "setp.eq.f64" => alu!(|a: f64, b: f64| -> bool { a == b }),
        "setp.lt.f64" => alu!(|a: f64, b: f64| -> bool { a < b }),
        "setp.le.f64" => alu!(|a: f64, b: f64| -> bool { a <= b }),
        "setp.gt.f64" => alu!(|a: f64, b: f64| -> bool { a > b }),
        "setp.ge.f64" => alu!(|a: f64, b: f64| -> bool { a >= b }),
        "setp.neu.f64" => alu!(|a: f64, b: f64| -> bool { a != b }),
        "setp.geu.f64" => alu!(|a: f64, b: f64| -> bool { a >= b || a.is_nan() || b.is_nan() }),
        "setp.gtu.f64" => alu!(|a: f64, b: f64| -> bool { a > b || a.is_nan() || b.is_nan() }),
        "setp.leu.f64" => alu!(|a: f64, b: f64| -> bool { a <= b || a.is_nan() || b.is_nan() }),
        "setp.ltu.f64" => alu!(|a: f64, b: f64| -> bool { a < b || a.is_nan() || b.is_nan() }),
        "setp.nan.f64" => alu!(|a: f64, b: f64| -> bool { a.is_nan() || b.is_nan() }),
        "ex2.approx.ftz.f32" => alu_of!(power_of_two, Width::W32, &[Width::W32]),
        "fma.rn.bf16x2" => alu_of!(fma_pairs, Width::W32, &[Width::W32; 3]),
        _ => return None,
    })
}

/// # Safety
/// As for [`super::AluFn`].
unsafe fn power_of_two(file: &RegisterFile, args: &Args, mask: u32) {
    // SAFETY: the caller says that the operands exist; the result lies elsewhere until it is written.
    unsafe {
        let a = &*<u32 as Cell>::source(file, args.a);
        file.write(args.d, &powers_of_two(a), mask);
    }
}

/// # Safety
/// As for [`super::AluFn`].
unsafe fn fma_pairs(file: &RegisterFile, args: &Args, mask: u32) {
    // SAFETY: as above.
    unsafe {
        let [a, b, c] = [args.a, args.b, args.c].map(|slot| &*<u32 as Cell>::source(file, slot));
        file.write(args.d, &fma_bf16x2(a, b, c), mask);
    }
}
