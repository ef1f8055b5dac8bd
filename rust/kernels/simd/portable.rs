//! Sixteen lanes as an array: what every instruction set must agree with, and the path of machines without vectors.

use half::bf16;

use super::{LANES, Lanes, Words};

#[derive(Clone, Copy)]
pub(super) struct Portable([f32; LANES]);

impl Portable {
    #[inline(always)]
    fn zip(self, b: Self, f: impl Fn(f32, f32) -> f32) -> Self {
        Self(std::array::from_fn(|l| f(self.0[l], b.0[l])))
    }
}

impl Lanes for Portable {
    const NUM_REGISTERS: usize = 8;
    type Words = PortableWords;
    #[inline(always)]
    fn from_words(words: PortableWords) -> Self {
        Self(words.0.map(f32::from_bits))
    }
    #[inline(always)]
    fn splat(value: f32) -> Self {
        Self([value; LANES])
    }
    #[inline(always)]
    fn load(values: &[f32]) -> Self {
        Self(std::array::from_fn(|l| values[l]))
    }
    #[inline(always)]
    fn load_bf16(values: &[bf16]) -> Self {
        Self(std::array::from_fn(|l| values[l].to_f32()))
    }
    #[inline(always)]
    fn store(self, values: &mut [f32]) {
        values[..LANES].copy_from_slice(&self.0);
    }
    #[inline(always)]
    fn mul_add(self, b: Self, c: Self) -> Self {
        Self(std::array::from_fn(|l| self.0[l].mul_add(b.0[l], c.0[l])))
    }
    #[inline(always)]
    fn add(self, b: Self) -> Self {
        self.zip(b, |a, b| a + b)
    }
    #[inline(always)]
    fn sub(self, b: Self) -> Self {
        self.zip(b, |a, b| a - b)
    }
    #[inline(always)]
    fn mul(self, b: Self) -> Self {
        self.zip(b, |a, b| a * b)
    }
    #[inline(always)]
    fn div(self, b: Self) -> Self {
        self.zip(b, |a, b| a / b)
    }
    #[inline(always)]
    fn max(self, b: Self) -> Self {
        self.zip(b, |a, b| if a > b { a } else { b })
    }
    #[inline(always)]
    fn min(self, b: Self) -> Self {
        self.zip(b, |a, b| if a < b { a } else { b })
    }
    #[inline(always)]
    fn select_below(self, bound: Self, low: Self, other: Self) -> Self {
        Self(std::array::from_fn(|l| {
            if self.0[l] < bound.0[l] {
                low.0[l]
            } else {
                other.0[l]
            }
        }))
    }
    #[inline(always)]
    fn pow2_of_shifted(self) -> Self {
        Self(
            self.0
                .map(|x| f32::from_bits(x.to_bits().wrapping_add(127) << 23)),
        )
    }
    #[inline(always)]
    fn sum(self) -> f32 {
        let v = self.0;
        let v: [f32; 8] = std::array::from_fn(|l| v[l] + v[l + 8]);
        let v: [f32; 4] = std::array::from_fn(|l| v[l] + v[l + 4]);
        (v[0] + v[2]) + (v[1] + v[3])
    }
}

#[derive(Clone, Copy)]
pub(super) struct PortableWords([u32; LANES]);

impl Words for PortableWords {
    #[inline(always)]
    fn splat(value: u32) -> Self {
        Self([value; LANES])
    }
    #[inline(always)]
    fn load(words: &[u32; LANES]) -> Self {
        Self(*words)
    }
    #[inline(always)]
    fn prefetch(_: *const [u32; LANES]) {}
    #[inline(always)]
    fn store(self, words: &mut [u32; LANES]) {
        *words = self.0;
    }
    #[inline(always)]
    fn and(self, b: Self) -> Self {
        Self(std::array::from_fn(|l| self.0[l] & b.0[l]))
    }
    #[inline(always)]
    fn add(self, b: Self) -> Self {
        Self(std::array::from_fn(|l| self.0[l].wrapping_add(b.0[l])))
    }
    #[inline(always)]
    fn select(self, set: Self, clear: Self) -> Self {
        Self(std::array::from_fn(|l| {
            (set.0[l] & self.0[l]) | (clear.0[l] & !self.0[l])
        }))
    }
    #[inline(always)]
    fn shift_left<const N: u32>(self) -> Self {
        Self(self.0.map(|word| word << N))
    }
    #[inline(always)]
    fn shift_right<const N: u32>(self) -> Self {
        Self(self.0.map(|word| word >> N))
    }
}
