//! The activation side: a row as two byte terms, and the interval that a channel's logit lies in.

use super::super::bf16_matmul::K_BLOCK;
use super::super::simd::bytes::Quad;
use super::head::{ROUND, ScreenedHead};

/// A row is `step * (TERM_BASE * high + low)` with `high` and `low` in -127..=127.
const TERM_BASE: i32 = 255;
const MAX_TERM: i32 = 127;
const MAX_SUM: i32 = TERM_BASE * MAX_TERM + MAX_TERM;

/// A row of activations in two byte terms, with all that its bounds need. Factors of 1 + 2^-30 and the like are above
/// every rounding of the f64 arithmetic around them.
pub(super) struct CodedRow {
    /// High and low terms of four columns, the last ones padded with zeros.
    pub(super) high: Vec<Quad>,
    pub(super) low: Vec<Quad>,
    /// Sums of all terms.
    pub(super) high_sum: i32,
    pub(super) low_sum: i32,
    bound: RowBound,
}

/// The numbers of a row that its intervals are made of.
#[derive(Clone, Copy)]
pub(super) struct RowBound {
    step: f64,
    /// At least the row's norm.
    norm: f64,
    /// At least the norm of what the two terms leave, and the f64 roundings of centre and radius.
    rest_norm: f64,
    /// [`order_error`] times `norm`.
    order: f64,
    /// What underflow may add to the engine's sums.
    underflow: f64,
}

/// Where a channel's logit lies: `|exact product - centre| <= screen`, `|engine's logit - exact product| <= order`.
#[derive(Clone, Copy, Debug)]
pub struct Interval {
    /// What the INT8 codes give.
    pub centre: f64,
    /// Bound of the coding error.
    pub screen: f64,
    /// Bound of the rounding errors of the canonical fp32 order.
    pub order: f64,
}

impl Interval {
    /// The logit is not below this.
    #[inline(always)]
    pub fn lower(&self) -> f64 {
        self.centre - (self.screen + self.order)
    }

    /// The logit is not above this.
    #[inline(always)]
    pub fn upper(&self) -> f64 {
        self.centre + (self.screen + self.order)
    }
}

/// Relative error, against the sum of absolute products, of a dot product in the canonical order (module head of
/// [`super`]).
pub(super) fn order_error(in_features: usize) -> f64 {
    let roundings = in_features.min(K_BLOCK) + in_features.div_ceil(K_BLOCK);
    let nu = roundings as f64 * 2.0_f64.powi(-24);
    nu / (1.0 - nu)
}

impl CodedRow {
    /// `None` when `x` cannot be screened: it holds a NaN or an infinity or nothing but zeros, or the engine's sums
    /// could overflow.
    pub(super) fn new(x: &[f32], head: &ScreenedHead) -> Option<Self> {
        let largest = x.iter().fold(0.0_f32, |largest, x| largest.max(x.abs()));
        // `max` passes over a NaN, a sum keeps it.
        let squares: f64 = x.iter().map(|&x| f64::from(x) * f64::from(x)).sum();
        if largest == 0.0 || !squares.is_finite() || largest == f32::INFINITY {
            return None;
        }
        let up = 1.0 + 2.0_f64.powi(-30);
        let norm = squares.sqrt() * up;
        if head.largest_norm() * norm >= 2.0_f64.powi(126) {
            return None;
        }
        // 24 significant bits times a 16-bit integer: `step * sum` below is exact.
        let step = f64::from(largest) / f64::from(MAX_SUM);
        let step = f64::from_bits(step.to_bits() & !((1 << 29) - 1));
        let inverse = 1.0 / step;
        let num_quads = x.len().div_ceil(4);
        let (mut high, mut low) = (vec![[0; 4]; num_quads], vec![[0; 4]; num_quads]);
        let (mut high_sum, mut low_sum, mut rest) = (0, 0, 0.0);
        for (i, &x) in x.iter().enumerate() {
            let x = f64::from(x);
            let sum = ((x * inverse + ROUND - ROUND) as i32).clamp(-MAX_SUM, MAX_SUM);
            let upper = (sum + MAX_TERM).div_euclid(TERM_BASE);
            let lower = sum - TERM_BASE * upper;
            high[i / 4][i % 4] = upper as i8;
            low[i / 4][i % 4] = lower as i8;
            high_sum += upper;
            low_sum += lower;
            let left = x - step * f64::from(sum);
            rest += left * left;
        }
        let rest_norm = rest.sqrt() * up;
        let k = x.len();
        Some(Self {
            high,
            low,
            high_sum,
            low_sum,
            bound: RowBound {
                step,
                norm,
                rest_norm: (rest_norm + 2.0_f64.powi(-48) * (norm + rest_norm)) * up,
                order: order_error(k) * norm * up,
                underflow: k as f64 * 2.0_f64.powi(-148),
            },
        })
    }

    pub(super) fn bound(&self) -> RowBound {
        self.bound
    }
}

impl RowBound {
    /// The interval of a channel with this scale and these norms, whose codes gave the sums `high` and `low`.
    #[inline(always)]
    pub(super) fn interval(
        &self,
        scale: f32,
        residual: f32,
        coded: f32,
        (high, low): (i32, i32),
    ) -> Interval {
        let (scale, residual, coded) = (f64::from(scale), f64::from(residual), f64::from(coded));
        let sum = f64::from(TERM_BASE) * f64::from(high) + f64::from(low);
        Interval {
            centre: self.step * scale * sum,
            screen: residual * self.norm + coded * self.rest_norm,
            order: (residual + coded) * self.order + self.underflow,
        }
    }
}
