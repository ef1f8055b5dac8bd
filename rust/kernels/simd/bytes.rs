//! Sixteen 32-bit sums of byte products with one meaning on every instruction set.
//!
//! A weight byte `b` stands for `b - 128`. Sums are exact integers, so neither the instruction set nor the order shows.
//! [`dispatch`] picks byte dot products of AVX-512 VNNI where the machine has them, else AVX2, else the portable path.

use super::{Isa, LANES};

/// What a weight byte is above its value.
pub const ZERO_BYTE: u8 = 128;

/// Multipliers of four weights that lie side by side.
pub type Quad = [i8; 4];

/// Bytes of 16 lanes with four weights each.
pub type QuadRow = [u8; 4 * LANES];

/// Sixteen 32-bit sums, one per lane. Implementations are private, as for [`super::Lanes`].
pub trait ByteLanes: Copy {
    /// Values of this type that fit in registers: for choosing block sizes, never results.
    const NUM_REGISTERS: usize;
    /// Weights in registers, ready for [`Self::add_products`].
    type Weights: Copy;
    /// Zero, where `quads_sum` is the sum of all multipliers that will be added.
    fn start(quads_sum: i32) -> Self;
    /// Reads four weights of every lane.
    fn load(weights: &QuadRow) -> Self::Weights;
    /// Adds to every lane the four products of its weights with `quad`, whose values lie in -127..=127.
    fn add_products(self, weights: Self::Weights, quad: Quad) -> Self;
    /// The sums, once all multipliers announced at the start were added.
    fn sums(self) -> [i32; LANES];
}

/// Work written over [`ByteLanes`]; `run` and all generic functions it calls should be `#[inline(always)]`.
pub trait ByteTask {
    /// What the work gives back.
    type Output;
    /// Does the work.
    fn run<B: ByteLanes>(self) -> Self::Output;
}

/// Runs `task` with the byte instructions that go with `isa`; those that this machine lacks fall back to the next.
#[inline]
pub fn dispatch_on<T: ByteTask>(isa: Isa, task: T) -> T::Output {
    #[cfg(target_arch = "x86_64")]
    {
        if isa == Isa::Avx512 && x86::has_vnni() {
            // SAFETY: this machine has avx512f and avx512vnni.
            return unsafe { x86::run_vnni(task) };
        }
        if isa != Isa::Portable && is_x86_feature_detected!("avx2") {
            // SAFETY: this machine has avx2.
            return unsafe { x86::run_avx2(task) };
        }
    }
    let _ = isa;
    task.run::<PortableBytes>()
}

/// Whether byte products have an instruction of their own here, several times faster than going through 16 bits.
pub fn has_byte_products() -> bool {
    #[cfg(target_arch = "x86_64")]
    {
        x86::has_vnni()
    }
    #[cfg(not(target_arch = "x86_64"))]
    {
        false
    }
}

#[derive(Clone, Copy)]
struct PortableBytes([i32; LANES]);

impl ByteLanes for PortableBytes {
    const NUM_REGISTERS: usize = 8;
    type Weights = QuadRow;
    #[inline(always)]
    fn start(_: i32) -> Self {
        Self([0; LANES])
    }
    #[inline(always)]
    fn load(weights: &QuadRow) -> QuadRow {
        *weights
    }
    #[inline(always)]
    fn add_products(mut self, weights: QuadRow, quad: Quad) -> Self {
        for (lane, sum) in self.0.iter_mut().enumerate() {
            for (i, &x) in quad.iter().enumerate() {
                let weight = i32::from(weights[4 * lane + i]) - i32::from(ZERO_BYTE);
                *sum += weight * i32::from(x);
            }
        }
        self
    }
    #[inline(always)]
    fn sums(self) -> [i32; LANES] {
        self.0
    }
}

#[cfg(target_arch = "x86_64")]
#[allow(
    clippy::undocumented_unsafe_blocks,
    reason = "as in `super::x86`: the types are private and entered only through the checked `run_*`"
)]
mod x86 {
    use std::arch::x86_64::*;

    use super::{ByteLanes, ByteTask, LANES, Quad, QuadRow, ZERO_BYTE};

    pub(super) fn has_vnni() -> bool {
        is_x86_feature_detected!("avx512f")
            && is_x86_feature_detected!("avx512vnni")
            && is_x86_feature_detected!("fma")
    }

    /// # Safety
    /// The machine must have avx512f, avx512vnni and fma.
    #[target_feature(enable = "avx512f,avx512vnni,avx2,fma")]
    pub(super) unsafe fn run_vnni<T: ByteTask>(task: T) -> T::Output {
        task.run::<Vnni>()
    }

    /// # Safety
    /// The machine must have avx2.
    #[target_feature(enable = "avx2")]
    pub(super) unsafe fn run_avx2<T: ByteTask>(task: T) -> T::Output {
        task.run::<Avx2Bytes>()
    }

    /// Unsigned weight bytes times signed multipliers; the start takes the weights' offset back.
    #[derive(Clone, Copy)]
    struct Vnni(__m512i);

    impl ByteLanes for Vnni {
        const NUM_REGISTERS: usize = 32;
        type Weights = __m512i;
        #[inline(always)]
        fn start(quads_sum: i32) -> Self {
            Self(unsafe { _mm512_set1_epi32(-i32::from(ZERO_BYTE) * quads_sum) })
        }
        #[inline(always)]
        fn load(weights: &QuadRow) -> __m512i {
            unsafe { _mm512_loadu_si512(weights.as_ptr().cast()) }
        }
        #[inline(always)]
        fn add_products(self, weights: __m512i, quad: Quad) -> Self {
            let quad = i32::from_ne_bytes(quad.map(|x| x as u8));
            Self(unsafe { _mm512_dpbusd_epi32(self.0, weights, _mm512_set1_epi32(quad)) })
        }
        #[inline(always)]
        fn sums(self) -> [i32; LANES] {
            let mut sums = [0; LANES];
            unsafe { _mm512_storeu_si512(sums.as_mut_ptr().cast(), self.0) }
            sums
        }
    }

    /// Absolute weights times multipliers that take the weights' signs: pairs of products then fit 16 bits, where
    /// 255 * 127 * 2 would not.
    #[derive(Clone, Copy)]
    struct Avx2Bytes(__m256i, __m256i);

    impl ByteLanes for Avx2Bytes {
        const NUM_REGISTERS: usize = 8;
        /// Values and absolute values of the first and the last eight lanes.
        type Weights = [(__m256i, __m256i); 2];
        #[inline(always)]
        fn start(_: i32) -> Self {
            let zero = unsafe { _mm256_setzero_si256() };
            Self(zero, zero)
        }
        #[inline(always)]
        fn load(weights: &QuadRow) -> Self::Weights {
            let half = |offset: usize| unsafe {
                let bytes = _mm256_loadu_si256(weights.as_ptr().add(offset).cast());
                let values = _mm256_xor_si256(bytes, _mm256_set1_epi8(ZERO_BYTE as i8));
                (values, _mm256_abs_epi8(values))
            };
            [half(0), half(32)]
        }
        #[inline(always)]
        fn add_products(self, weights: Self::Weights, quad: Quad) -> Self {
            unsafe {
                let quad = _mm256_set1_epi32(i32::from_ne_bytes(quad.map(|x| x as u8)));
                let add = |sum, (values, absolute)| {
                    let pairs = _mm256_maddubs_epi16(absolute, _mm256_sign_epi8(quad, values));
                    _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)))
                };
                Self(add(self.0, weights[0]), add(self.1, weights[1]))
            }
        }
        #[inline(always)]
        fn sums(self) -> [i32; LANES] {
            let mut sums = [0; LANES];
            unsafe {
                _mm256_storeu_si256(sums.as_mut_ptr().cast(), self.0);
                _mm256_storeu_si256(sums.as_mut_ptr().add(8).cast(), self.1);
            }
            sums
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Products<'a>(&'a [QuadRow], &'a [Quad]);

    impl ByteTask for Products<'_> {
        type Output = [i32; LANES];
        #[inline(always)]
        fn run<B: ByteLanes>(self) -> [i32; LANES] {
            let total = self.1.iter().flatten().map(|&x| i32::from(x)).sum();
            let products = self.0.iter().zip(self.1);
            products
                .fold(B::start(total), |sum, (weights, quad)| {
                    sum.add_products(B::load(weights), *quad)
                })
                .sums()
        }
    }

    #[test]
    fn instruction_sets_agree_with_plain_integers() {
        let mut state = 1_u32;
        let mut byte = |low: u8| {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            ((state >> 24) as u8).max(low)
        };
        // Bytes of value -127..=127, multipliers likewise, and rows of nothing but the extremes.
        let mut weights: Vec<QuadRow> = (0..70).map(|_| std::array::from_fn(|_| byte(1))).collect();
        let mut quads: Vec<Quad> = (0..70)
            .map(|_| std::array::from_fn(|_| (byte(1) ^ 0x80) as i8))
            .collect();
        for (i, (weights, quad)) in weights.iter_mut().zip(&mut quads).take(8).enumerate() {
            weights.fill(if i % 2 == 0 { 1 } else { 255 });
            quad.fill(if i % 4 < 2 { -127 } else { 127 });
        }
        let want: [i32; LANES] = std::array::from_fn(|lane| {
            let terms = weights.iter().zip(&quads).flat_map(|(weights, quad)| {
                let weights = weights[4 * lane..][..4].iter();
                weights
                    .zip(quad)
                    .map(|(&w, &x)| (i32::from(w) - 128) * i32::from(x))
            });
            terms.sum()
        });
        for isa in [Isa::Avx512, Isa::Avx2, Isa::Portable] {
            assert_eq!(
                dispatch_on(isa, Products(&weights, &quads)),
                want,
                "{isa:?}"
            );
        }
    }
}
