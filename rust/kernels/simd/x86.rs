//! The x86 register types. Their methods hold unsafe intrinsics behind safe names: sound because the types are private
//! and only `run_avx512`/`run_avx2`, entered after a feature check, hand them to a task.

use std::arch::x86_64::*;

use half::bf16;

use super::{LANES, Lanes, Task, Words};

/// # Safety
/// The machine must have avx512f and fma.
#[target_feature(enable = "avx512f,avx2,fma")]
pub(super) unsafe fn run_avx512<T: Task>(task: T) -> T::Output {
    task.run::<Avx512>()
}

/// # Safety
/// The machine must have avx2 and fma.
#[target_feature(enable = "avx2,fma")]
pub(super) unsafe fn run_avx2<T: Task>(task: T) -> T::Output {
    task.run::<Avx2>()
}

#[inline(always)]
fn sum_256(v: __m256) -> f32 {
    unsafe {
        let v = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps::<1>(v));
        let v = _mm_add_ps(v, _mm_movehl_ps(v, v));
        _mm_cvtss_f32(_mm_add_ss(v, _mm_movehdup_ps(v)))
    }
}

#[derive(Clone, Copy)]
struct Avx512(__m512);

impl Lanes for Avx512 {
    const NUM_REGISTERS: usize = 32;
    type Words = Avx512Words;
    #[inline(always)]
    fn from_words(words: Avx512Words) -> Self {
        Self(unsafe { _mm512_castsi512_ps(words.0) })
    }
    #[inline(always)]
    fn splat(value: f32) -> Self {
        Self(unsafe { _mm512_set1_ps(value) })
    }
    #[inline(always)]
    fn load(values: &[f32]) -> Self {
        let values = &values[..LANES];
        Self(unsafe { _mm512_loadu_ps(values.as_ptr()) })
    }
    #[inline(always)]
    fn load_bf16(values: &[bf16]) -> Self {
        let values = &values[..LANES];
        unsafe {
            let bits = _mm256_loadu_si256(values.as_ptr().cast());
            Self(_mm512_castsi512_ps(_mm512_slli_epi32::<16>(
                _mm512_cvtepu16_epi32(bits),
            )))
        }
    }
    #[inline(always)]
    fn store(self, values: &mut [f32]) {
        let values = &mut values[..LANES];
        unsafe { _mm512_storeu_ps(values.as_mut_ptr(), self.0) }
    }
    #[inline(always)]
    fn mul_add(self, b: Self, c: Self) -> Self {
        Self(unsafe { _mm512_fmadd_ps(self.0, b.0, c.0) })
    }
    #[inline(always)]
    fn add(self, b: Self) -> Self {
        Self(unsafe { _mm512_add_ps(self.0, b.0) })
    }
    #[inline(always)]
    fn sub(self, b: Self) -> Self {
        Self(unsafe { _mm512_sub_ps(self.0, b.0) })
    }
    #[inline(always)]
    fn mul(self, b: Self) -> Self {
        Self(unsafe { _mm512_mul_ps(self.0, b.0) })
    }
    #[inline(always)]
    fn div(self, b: Self) -> Self {
        Self(unsafe { _mm512_div_ps(self.0, b.0) })
    }
    #[inline(always)]
    fn max(self, b: Self) -> Self {
        Self(unsafe { _mm512_max_ps(self.0, b.0) })
    }
    #[inline(always)]
    fn min(self, b: Self) -> Self {
        Self(unsafe { _mm512_min_ps(self.0, b.0) })
    }
    #[inline(always)]
    fn select_below(self, bound: Self, low: Self, other: Self) -> Self {
        unsafe {
            let below = _mm512_cmp_ps_mask::<_CMP_LT_OQ>(self.0, bound.0);
            Self(_mm512_mask_blend_ps(below, other.0, low.0))
        }
    }
    #[inline(always)]
    fn pow2_of_shifted(self) -> Self {
        unsafe {
            let bits = _mm512_add_epi32(_mm512_castps_si512(self.0), _mm512_set1_epi32(127));
            Self(_mm512_castsi512_ps(_mm512_slli_epi32::<23>(bits)))
        }
    }
    #[inline(always)]
    fn sum(self) -> f32 {
        unsafe {
            let high = _mm256_castpd_ps(_mm512_extractf64x4_pd::<1>(_mm512_castps_pd(self.0)));
            sum_256(_mm256_add_ps(_mm512_castps512_ps256(self.0), high))
        }
    }
}

#[derive(Clone, Copy)]
struct Avx2(__m256, __m256);

impl Lanes for Avx2 {
    const NUM_REGISTERS: usize = 8;
    type Words = Avx2Words;
    #[inline(always)]
    fn from_words(words: Avx2Words) -> Self {
        unsafe { Self(_mm256_castsi256_ps(words.0), _mm256_castsi256_ps(words.1)) }
    }
    #[inline(always)]
    fn splat(value: f32) -> Self {
        let v = unsafe { _mm256_set1_ps(value) };
        Self(v, v)
    }
    #[inline(always)]
    fn load(values: &[f32]) -> Self {
        let p = values[..LANES].as_ptr();
        unsafe { Self(_mm256_loadu_ps(p), _mm256_loadu_ps(p.add(8))) }
    }
    #[inline(always)]
    fn load_bf16(values: &[bf16]) -> Self {
        let p = values[..LANES].as_ptr();
        unsafe {
            let low = _mm256_cvtepu16_epi32(_mm_loadu_si128(p.cast()));
            let high = _mm256_cvtepu16_epi32(_mm_loadu_si128(p.add(8).cast()));
            Self(
                _mm256_castsi256_ps(_mm256_slli_epi32::<16>(low)),
                _mm256_castsi256_ps(_mm256_slli_epi32::<16>(high)),
            )
        }
    }
    #[inline(always)]
    fn store(self, values: &mut [f32]) {
        let p = values[..LANES].as_mut_ptr();
        unsafe {
            _mm256_storeu_ps(p, self.0);
            _mm256_storeu_ps(p.add(8), self.1);
        }
    }
    #[inline(always)]
    fn mul_add(self, b: Self, c: Self) -> Self {
        unsafe {
            Self(
                _mm256_fmadd_ps(self.0, b.0, c.0),
                _mm256_fmadd_ps(self.1, b.1, c.1),
            )
        }
    }
    #[inline(always)]
    fn add(self, b: Self) -> Self {
        unsafe { Self(_mm256_add_ps(self.0, b.0), _mm256_add_ps(self.1, b.1)) }
    }
    #[inline(always)]
    fn sub(self, b: Self) -> Self {
        unsafe { Self(_mm256_sub_ps(self.0, b.0), _mm256_sub_ps(self.1, b.1)) }
    }
    #[inline(always)]
    fn mul(self, b: Self) -> Self {
        unsafe { Self(_mm256_mul_ps(self.0, b.0), _mm256_mul_ps(self.1, b.1)) }
    }
    #[inline(always)]
    fn div(self, b: Self) -> Self {
        unsafe { Self(_mm256_div_ps(self.0, b.0), _mm256_div_ps(self.1, b.1)) }
    }
    #[inline(always)]
    fn max(self, b: Self) -> Self {
        unsafe { Self(_mm256_max_ps(self.0, b.0), _mm256_max_ps(self.1, b.1)) }
    }
    #[inline(always)]
    fn min(self, b: Self) -> Self {
        unsafe { Self(_mm256_min_ps(self.0, b.0), _mm256_min_ps(self.1, b.1)) }
    }
    #[inline(always)]
    fn select_below(self, bound: Self, low: Self, other: Self) -> Self {
        unsafe {
            let pick = |x, bound, low, other| {
                _mm256_blendv_ps(other, low, _mm256_cmp_ps::<_CMP_LT_OQ>(x, bound))
            };
            Self(
                pick(self.0, bound.0, low.0, other.0),
                pick(self.1, bound.1, low.1, other.1),
            )
        }
    }
    #[inline(always)]
    fn pow2_of_shifted(self) -> Self {
        unsafe {
            let pow2 = |x| {
                let bits = _mm256_add_epi32(_mm256_castps_si256(x), _mm256_set1_epi32(127));
                _mm256_castsi256_ps(_mm256_slli_epi32::<23>(bits))
            };
            Self(pow2(self.0), pow2(self.1))
        }
    }
    #[inline(always)]
    fn sum(self) -> f32 {
        sum_256(unsafe { _mm256_add_ps(self.0, self.1) })
    }
}

#[derive(Clone, Copy)]
struct Avx512Words(__m512i);

impl Words for Avx512Words {
    #[inline(always)]
    fn splat(value: u32) -> Self {
        Self(unsafe { _mm512_set1_epi32(value.cast_signed()) })
    }
    #[inline(always)]
    fn load(words: &[u32; LANES]) -> Self {
        Self(unsafe { _mm512_loadu_si512(words.as_ptr().cast()) })
    }
    #[inline(always)]
    fn prefetch(words: *const [u32; LANES]) {
        unsafe { _mm_prefetch::<_MM_HINT_T0>(words.cast()) }
    }
    #[inline(always)]
    fn store(self, words: &mut [u32; LANES]) {
        unsafe { _mm512_storeu_si512(words.as_mut_ptr().cast(), self.0) }
    }
    #[inline(always)]
    fn and(self, b: Self) -> Self {
        Self(unsafe { _mm512_and_si512(self.0, b.0) })
    }
    #[inline(always)]
    fn add(self, b: Self) -> Self {
        Self(unsafe { _mm512_add_epi32(self.0, b.0) })
    }
    #[inline(always)]
    fn select(self, set: Self, clear: Self) -> Self {
        // Truth table of `self ? set : clear`.
        Self(unsafe { _mm512_ternarylogic_epi32::<0xCA>(self.0, set.0, clear.0) })
    }
    #[inline(always)]
    fn shift_left<const N: u32>(self) -> Self {
        Self(unsafe { _mm512_slli_epi32::<N>(self.0) })
    }
    #[inline(always)]
    fn shift_right<const N: u32>(self) -> Self {
        Self(unsafe { _mm512_srli_epi32::<N>(self.0) })
    }
}

#[derive(Clone, Copy)]
struct Avx2Words(__m256i, __m256i);

impl Words for Avx2Words {
    #[inline(always)]
    fn splat(value: u32) -> Self {
        let v = unsafe { _mm256_set1_epi32(value.cast_signed()) };
        Self(v, v)
    }
    #[inline(always)]
    fn load(words: &[u32; LANES]) -> Self {
        let p = words.as_ptr();
        unsafe {
            Self(
                _mm256_loadu_si256(p.cast()),
                _mm256_loadu_si256(p.add(8).cast()),
            )
        }
    }
    #[inline(always)]
    fn prefetch(words: *const [u32; LANES]) {
        unsafe { _mm_prefetch::<_MM_HINT_T0>(words.cast()) }
    }
    #[inline(always)]
    fn store(self, words: &mut [u32; LANES]) {
        let p = words.as_mut_ptr();
        unsafe {
            _mm256_storeu_si256(p.cast(), self.0);
            _mm256_storeu_si256(p.add(8).cast(), self.1);
        }
    }
    #[inline(always)]
    fn and(self, b: Self) -> Self {
        unsafe { Self(_mm256_and_si256(self.0, b.0), _mm256_and_si256(self.1, b.1)) }
    }
    #[inline(always)]
    fn add(self, b: Self) -> Self {
        unsafe { Self(_mm256_add_epi32(self.0, b.0), _mm256_add_epi32(self.1, b.1)) }
    }
    #[inline(always)]
    fn select(self, set: Self, clear: Self) -> Self {
        unsafe {
            let pick = |mask, set, clear| {
                _mm256_or_si256(
                    _mm256_and_si256(mask, set),
                    _mm256_andnot_si256(mask, clear),
                )
            };
            Self(pick(self.0, set.0, clear.0), pick(self.1, set.1, clear.1))
        }
    }
    #[inline(always)]
    fn shift_left<const N: u32>(self) -> Self {
        // The count is a constant: the compiler makes this the immediate form, whose parameter has another type.
        let count = unsafe { _mm_cvtsi32_si128(N.cast_signed()) };
        unsafe {
            Self(
                _mm256_sll_epi32(self.0, count),
                _mm256_sll_epi32(self.1, count),
            )
        }
    }
    #[inline(always)]
    fn shift_right<const N: u32>(self) -> Self {
        let count = unsafe { _mm_cvtsi32_si128(N.cast_signed()) };
        unsafe {
            Self(
                _mm256_srl_epi32(self.0, count),
                _mm256_srl_epi32(self.1, count),
            )
        }
    }
}
