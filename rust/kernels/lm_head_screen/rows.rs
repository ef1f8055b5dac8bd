//! The activation side: a row as two byte terms, and the interval that a channel's logit lies in.

use super::super::bf16_matmul::K_BLOCK;
use super::super::simd::bytes::Quad;
use super::super::simd::{self, LANES, Lanes, Task};
use super::head::{ROUND, ScreenedHead, TileBounds};

/// A row is `step * (TERM_BASE * high + low)` with `high` and `low` in -127..=127.
const TERM_BASE: f64 = 255.0;
const MAX_SUM: f64 = TERM_BASE * 127.0 + 127.0;

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
        simd::dispatch(CodeRow { x, head })
    }

    pub(super) fn bound(&self) -> RowBound {
        self.bound
    }

    /// From here on every interval is its centre.
    pub(super) fn take_for_exact(&mut self) {
        self.bound = RowBound {
            step: self.bound.step,
            norm: 0.0,
            rest_norm: 0.0,
            order: 0.0,
            underflow: 0.0,
        };
    }
}

/// Codes one row. Written lane by lane over arrays, which the compiler turns into the chosen instructions.
struct CodeRow<'a> {
    x: &'a [f32],
    head: &'a ScreenedHead,
}

impl Task for CodeRow<'_> {
    type Output = Option<CodedRow>;

    #[inline(always)]
    fn run<L: Lanes>(self) -> Option<CodedRow> {
        // Magnitudes order like their bits; NaN and infinity lie above all others.
        let (mut largest, mut squares) = ([0_u32; LANES], [0.0_f64; LANES]);
        for x in padded_blocks(self.x) {
            for lane in 0..LANES {
                largest[lane] = largest[lane].max(x[lane].to_bits() & 0x7FFF_FFFF);
                squares[lane] += f64::from(x[lane]) * f64::from(x[lane]);
            }
        }
        let largest = f32::from_bits(largest.into_iter().fold(0, u32::max));
        let up = 1.0 + 2.0_f64.powi(-30);
        let norm = squares.iter().sum::<f64>().sqrt() * up;
        let can_overflow = self.head.largest_norm() * norm >= 2.0_f64.powi(126);
        if largest == 0.0 || !largest.is_finite() || can_overflow {
            return None;
        }
        // 24 significant bits times a 16-bit integer: `step * sum` below is exact.
        let step = f64::from(largest) / MAX_SUM;
        let step = f64::from_bits(step.to_bits() & !((1 << 29) - 1));
        let inverse = 1.0 / step;
        let num_quads = self.x.len().div_ceil(LANES) * (LANES / 4);
        let (mut high, mut low) = (vec![[0; 4]; num_quads], vec![[0; 4]; num_quads]);
        let (mut high_sums, mut low_sums) = ([0.0_f64; LANES], [0.0_f64; LANES]);
        let mut rest = [0.0_f64; LANES];
        let blocks = padded_blocks(self.x)
            .zip(high.as_flattened_mut().as_chunks_mut::<LANES>().0)
            .zip(low.as_flattened_mut().as_chunks_mut::<LANES>().0);
        for ((x, high), low) in blocks {
            for lane in 0..LANES {
                let x = f64::from(x[lane]);
                let sum = (x * inverse + ROUND - ROUND).clamp(-MAX_SUM, MAX_SUM);
                // No integer over 255 is near half of one: rounding to the nearest leaves -127..=127.
                let upper = sum * (1.0 / TERM_BASE) + ROUND;
                let lower = sum - TERM_BASE * (upper - ROUND) + ROUND;
                // The last bits of such a sum are those of the integer.
                high[lane] = upper.to_bits() as i8;
                low[lane] = lower.to_bits() as i8;
                high_sums[lane] += upper - ROUND;
                low_sums[lane] += lower - ROUND;
                let left = x - step * sum;
                rest[lane] += left * left;
            }
        }
        let rest_norm = rest.iter().sum::<f64>().sqrt() * up;
        let k = self.x.len();
        Some(CodedRow {
            high,
            low,
            high_sum: high_sums.iter().sum::<f64>() as i32,
            low_sum: low_sums.iter().sum::<f64>() as i32,
            bound: RowBound {
                step,
                norm,
                rest_norm: (rest_norm + 2.0_f64.powi(-48) * (norm + rest_norm)) * up,
                order: order_error(k) * norm * up,
                underflow: k as f64 * 2.0_f64.powi(-148),
            },
        })
    }
}

/// The row in blocks of 16, the last one padded with zeros.
#[inline(always)]
fn padded_blocks(x: &[f32]) -> impl Iterator<Item = [f32; LANES]> {
    let (blocks, rest) = x.as_chunks::<LANES>();
    let mut last = [0.0; LANES];
    last[..rest.len()].copy_from_slice(rest);
    let last = (!rest.is_empty()).then_some(last);
    blocks.iter().copied().chain(last)
}

impl RowBound {
    /// What the codes give, from the sums `high` and `low`.
    #[inline(always)]
    pub(super) fn centre(&self, bounds: &TileBounds, lane: usize, (high, low): (i32, i32)) -> f64 {
        let sum = TERM_BASE * f64::from(high) + f64::from(low);
        self.step * f64::from(bounds.scale[lane]) * sum
    }

    /// The interval of channel `lane` of a tile, whose codes gave the sums of both terms.
    #[inline(always)]
    pub(super) fn interval(&self, bounds: &TileBounds, lane: usize, sums: (i32, i32)) -> Interval {
        let (residual, coded) = (
            f64::from(bounds.residual[lane]),
            f64::from(bounds.coded[lane]),
        );
        Interval {
            centre: self.centre(bounds, lane, sums),
            screen: residual * self.norm + coded * self.rest_norm,
            order: (residual + coded) * self.order + self.underflow,
        }
    }
}
