//! Sixteen fp32 lanes with one meaning on every instruction set.
//!
//! A host kernel is written once over [`Lanes`] and entered through [`dispatch`], which picks the widest instruction
//! set of this machine. Every operation is defined lane by lane (fused multiply-add included) and [`Lanes::sum`] has
//! one fixed order, so a kernel gives the same bits on AVX-512, AVX2 and the portable path.

pub mod bytes;
mod portable;
mod words;
#[cfg(target_arch = "x86_64")]
#[allow(
    clippy::undocumented_unsafe_blocks,
    reason = "one argument for all, in the module's head"
)]
mod x86;

use std::sync::OnceLock;

use half::bf16;

use portable::Portable;
pub use words::Words;

/// Number of lanes of every [`Lanes`] implementation.
pub const LANES: usize = 16;

/// A vector of [`LANES`] fp32 values. Implementations are private to this module: only [`dispatch`] may choose one,
/// after it has seen that the machine has the instructions.
pub trait Lanes: Copy {
    /// Values of this type that fit in registers: for choosing block sizes, never results.
    const NUM_REGISTERS: usize;
    /// The same lanes as 32-bit words.
    type Words: Words;
    /// The words' bits as fp32 values.
    fn from_words(words: Self::Words) -> Self;
    /// All lanes `value`.
    fn splat(value: f32) -> Self;
    /// The first 16 elements of `values` (panics when there are fewer).
    fn load(values: &[f32]) -> Self;
    /// The first 16 elements of `values`, widened exactly (panics when there are fewer).
    fn load_bf16(values: &[bf16]) -> Self;
    /// Writes 16 elements to the front of `values` (panics when there are fewer).
    fn store(self, values: &mut [f32]);
    /// `self * b + c`, rounded once.
    fn mul_add(self, b: Self, c: Self) -> Self;
    /// `self + b`.
    fn add(self, b: Self) -> Self;
    /// `self - b`.
    fn sub(self, b: Self) -> Self;
    /// `self * b`.
    fn mul(self, b: Self) -> Self;
    /// `self / b`.
    fn div(self, b: Self) -> Self;
    /// Lane-wise `if self > b { self } else { b }`.
    fn max(self, b: Self) -> Self;
    /// Lane-wise `if self < b { self } else { b }`.
    fn min(self, b: Self) -> Self;
    /// Lane-wise `if self < bound { low } else { other }`.
    fn select_below(self, bound: Self, low: Self, other: Self) -> Self;
    /// 2^n where each lane of `self` is `n + 1.5 * 2^23`, -126 <= n <= 127.
    fn pow2_of_shifted(self) -> Self;
    /// Sum of the lanes: halves are added pairwise (8 apart, then 4, 2, 1).
    fn sum(self) -> f32;

    /// The values of a slice of at most 16, missing lanes zero.
    #[inline(always)]
    fn load_partial(values: &[f32]) -> Self {
        let mut lanes = [0.0; LANES];
        lanes[..values.len()].copy_from_slice(values);
        Self::load(&lanes)
    }

    /// Writes the first `values.len()` (at most 16) lanes.
    #[inline(always)]
    fn store_partial(self, values: &mut [f32]) {
        let mut lanes = [0.0; LANES];
        self.store(&mut lanes);
        let len = values.len();
        values.copy_from_slice(&lanes[..len]);
    }

    /// e^x with a relative error of about 2 ulp: range reduction by ln 2 in two parts, degree-6 polynomial. Inputs
    /// below -87.3 (and -inf) give 0, inputs above 88.3 the value at 88.3.
    #[inline(always)]
    fn exp(self) -> Self {
        // -ln 2 = HIGH + LOW; HIGH has so few bits that n * HIGH is exact.
        const LN_2_HIGH: f32 = -355.0 / 512.0;
        const LN_2_LOW: f32 = 2.121_944_4e-4;
        const SHIFT: f32 = 12_582_912.0; // 1.5 * 2^23: adding it rounds to the nearest integer
        let lowest = Self::splat(-87.3);
        let x = self.max(lowest).min(Self::splat(88.3));
        let shifted = x.mul_add(Self::splat(std::f32::consts::LOG2_E), Self::splat(SHIFT));
        let n = shifted.sub(Self::splat(SHIFT));
        let r = n.mul_add(Self::splat(LN_2_HIGH), x);
        let r = n.mul_add(Self::splat(LN_2_LOW), r);
        let mut p = Self::splat(1.0 / 720.0);
        for c in [1.0 / 120.0, 1.0 / 24.0, 1.0 / 6.0, 0.5, 1.0, 1.0] {
            p = p.mul_add(r, Self::splat(c));
        }
        let y = p.mul(shifted.pow2_of_shifted());
        self.select_below(lowest, Self::splat(0.0), y)
    }

    /// 1 / (1 + e^-x).
    #[inline(always)]
    fn sigmoid(self) -> Self {
        let one = Self::splat(1.0);
        one.div(one.add(Self::splat(0.0).sub(self).exp()))
    }

    /// x / (1 + e^-x).
    #[inline(always)]
    fn silu(self) -> Self {
        let one = Self::splat(1.0);
        self.div(one.add(Self::splat(0.0).sub(self).exp()))
    }

    /// x / 2 * (1 + tanh(u)) = x / (1 + e^-2u) with u = sqrt(2 / pi) * (x + 0.044715 x^3).
    #[inline(always)]
    fn gelu_tanh(self) -> Self {
        const MINUS_2_SQRT_2_OVER_PI: f32 = -1.595_769_2;
        let one = Self::splat(1.0);
        let cubic = self.mul(self).mul_add(Self::splat(0.044_715), one);
        let exponent = self.mul(cubic).mul(Self::splat(MINUS_2_SQRT_2_OVER_PI));
        self.div(one.add(exponent.exp()))
    }
}

/// Work written over [`Lanes`]; `run` should be `#[inline(always)]`, as should all generic functions it calls, so that
/// the whole body is compiled with the chosen instructions.
pub trait Task {
    /// What the work gives back.
    type Output;
    /// Does the work.
    fn run<L: Lanes>(self) -> Self::Output;
}

/// The instruction sets a task may be compiled for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Isa {
    /// One 512-bit register for 16 lanes.
    Avx512,
    /// Two 256-bit registers for 16 lanes.
    Avx2,
    /// Whatever the compiler makes of arrays of 16.
    Portable,
}

/// The widest instruction set of this machine, read once.
pub fn isa() -> Isa {
    static ISA: OnceLock<Isa> = OnceLock::new();
    *ISA.get_or_init(|| {
        #[cfg(target_arch = "x86_64")]
        {
            if is_x86_feature_detected!("avx512f") && is_x86_feature_detected!("fma") {
                return Isa::Avx512;
            }
            if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") {
                return Isa::Avx2;
            }
        }
        Isa::Portable
    })
}

/// Runs `task` on this machine's widest instruction set.
#[inline]
pub fn dispatch<T: Task>(task: T) -> T::Output {
    dispatch_on(isa(), task)
}

/// Runs `task` on a given instruction set; one that this machine lacks falls back to the portable path. For tests that
/// compare instruction sets; kernels call [`dispatch`].
#[inline]
pub fn dispatch_on<T: Task>(wanted: Isa, task: T) -> T::Output {
    match (wanted, isa()) {
        #[cfg(target_arch = "x86_64")]
        // SAFETY: `isa` saw avx512f and fma on this machine.
        (Isa::Avx512, Isa::Avx512) => unsafe { x86::run_avx512(task) },
        #[cfg(target_arch = "x86_64")]
        // SAFETY: `isa` saw avx2 and fma (every AVX-512 machine has both).
        (Isa::Avx2, Isa::Avx512 | Isa::Avx2) => unsafe { x86::run_avx2(task) },
        _ => task.run::<Portable>(),
    }
}

/// Dot product of two slices of one length: lane l sums elements l, l+16, ..., then [`Lanes::sum`].
#[inline(always)]
pub fn dot<L: Lanes>(a: &[f32], b: &[f32]) -> f32 {
    debug_assert_eq!(a.len(), b.len());
    let mut acc = L::splat(0.0);
    let mut a_chunks = a.chunks_exact(LANES);
    let mut b_chunks = b.chunks_exact(LANES);
    for (x, y) in (&mut a_chunks).zip(&mut b_chunks) {
        acc = L::load(x).mul_add(L::load(y), acc);
    }
    if !a_chunks.remainder().is_empty() {
        let x = L::load_partial(a_chunks.remainder());
        acc = x.mul_add(L::load_partial(b_chunks.remainder()), acc);
    }
    acc.sum()
}

/// The [`dot`] of `a` with each of `bs`, all of one length: the same bits, with `N` chains under way at a time.
#[inline(always)]
pub fn dots<L: Lanes, const N: usize>(a: &[f32], bs: [&[f32]; N]) -> [f32; N] {
    let len = a.len();
    let bs = bs.map(|b| &b[..len]);
    let mut acc = [L::splat(0.0); N];
    let mut at = 0;
    while at + LANES <= len {
        let x = L::load(&a[at..at + LANES]);
        for (acc, b) in acc.iter_mut().zip(&bs) {
            *acc = x.mul_add(L::load(&b[at..at + LANES]), *acc);
        }
        at += LANES;
    }
    if at < len {
        let x = L::load_partial(&a[at..]);
        for (acc, b) in acc.iter_mut().zip(&bs) {
            *acc = x.mul_add(L::load_partial(&b[at..]), *acc);
        }
    }
    acc.map(|acc| acc.sum())
}

/// `y += alpha * x`, each element rounded once.
#[inline(always)]
pub fn axpy<L: Lanes>(alpha: f32, x: &[f32], y: &mut [f32]) {
    let alpha = L::splat(alpha);
    map2::<L>(x, y, |x, y| alpha.mul_add(x, y));
}

/// `y = f(x, y)` element by element; a tail shorter than 16 goes through zero-padded lanes.
///
/// `f` has a single call site, here and in [`map1`], on purpose: a closure cannot be marked `inline(always)`, and one that
/// is not inlined into the chosen instruction set calls every intrinsic as a function, some fifty times slower.
#[inline(always)]
pub fn map2<L: Lanes>(x: &[f32], y: &mut [f32], f: impl Fn(L, L) -> L) {
    debug_assert_eq!(x.len(), y.len());
    for (x, y) in x.chunks(LANES).zip(y.chunks_mut(LANES)) {
        let whole = x.len() == LANES && y.len() == LANES;
        let (a, b) = if whole {
            (L::load(x), L::load(y))
        } else {
            (L::load_partial(x), L::load_partial(y))
        };
        let result = f(a, b);
        if whole {
            result.store(y);
        } else {
            result.store_partial(y);
        }
    }
}

/// `y = f(y)` element by element; a tail shorter than 16 goes through zero-padded lanes.
#[inline(always)]
pub fn map1<L: Lanes>(y: &mut [f32], f: impl Fn(L) -> L) {
    for y in y.chunks_mut(LANES) {
        let whole = y.len() == LANES;
        let value = if whole {
            L::load(y)
        } else {
            L::load_partial(y)
        };
        let result = f(value);
        if whole {
            result.store(y);
        } else {
            result.store_partial(y);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Everything<'a>(&'a [f32], &'a [f32]);

    impl Task for Everything<'_> {
        type Output = Vec<u32>;
        #[inline(always)]
        fn run<L: Lanes>(self) -> Vec<u32> {
            let mut y = self.1.to_vec();
            axpy::<L>(0.37, self.0, &mut y);
            let mut out = vec![dot::<L>(self.0, self.1)];
            out.extend(dots::<L, 2>(self.0, [self.1, self.0]));
            assert_eq!(out[1..], [out[0], dot::<L>(self.0, self.0)]);
            out.extend(&y);
            map1::<L>(&mut y, |v| v.exp());
            out.extend(&y);
            map2::<L>(self.0, &mut y, |a, b| {
                a.silu().add(b.sigmoid()).div(b.max(a))
            });
            out.extend(&y);
            let weights: Vec<bf16> = self.0.iter().map(|&v| bf16::from_f32(v)).collect();
            out.push(L::load_bf16(&weights).sum());
            out.into_iter().map(f32::to_bits).collect()
        }
    }

    #[test]
    fn instruction_sets_agree_bit_for_bit() {
        let a: Vec<f32> = (0..77)
            .map(|i| ((i * 37 % 101) as f32 - 50.0) * 0.173)
            .collect();
        let b: Vec<f32> = (0..77)
            .map(|i| ((i * 53 % 97) as f32 - 48.0) * 0.211)
            .collect();
        let portable = dispatch_on(Isa::Portable, Everything(&a, &b));
        assert_eq!(portable, dispatch_on(Isa::Avx2, Everything(&a, &b)));
        assert_eq!(portable, dispatch_on(Isa::Avx512, Everything(&a, &b)));
    }

    struct Exp(f32);

    impl Task for Exp {
        type Output = f32;
        #[inline(always)]
        fn run<L: Lanes>(self) -> f32 {
            let mut out = [0.0; LANES];
            L::splat(self.0).exp().store(&mut out);
            out[0]
        }
    }

    #[test]
    fn exp_is_close_everywhere_and_zero_at_minus_infinity() {
        let mut worst = 0.0_f64;
        for i in -8700..8800 {
            let x = i as f32 * 0.01;
            let want = f64::from(x).exp();
            worst = worst.max((f64::from(dispatch(Exp(x))) / want - 1.0).abs());
        }
        assert!(worst < 3e-7, "largest relative error {worst:e}");
        assert_eq!(dispatch(Exp(f32::NEG_INFINITY)), 0.0);
        assert_eq!(dispatch(Exp(0.0)), 1.0);
        assert!(dispatch(Exp(f32::NAN)).is_finite() || dispatch(Exp(f32::NAN)).is_nan());
    }
}
