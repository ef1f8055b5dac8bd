//! One token per row, drawn from the distribution that the row's fp32 logits and its sampler describe.
//!
//! In: logits, masked ids, one [`RowSampler`] per row. Out: an id per row and its logit. The order is vLLM's: the
//! model's softcap, masks, temperature, `min_p`, `top_k`, `top_p`. Where ids tie at a limit the lowest stay. What is left is drawn from by the
//! Gumbel trick: to `logit / temperature` each id adds noise that is a function of the row's seed, its position and the
//! id alone, and the largest sum wins, the lowest id among equals. So a row's token depends on its logits and its
//! sampler and on nothing else: not on other rows, on threads, or on whether the row was drafted.
//!
//! Temperature 0 gives the token of [`greedy_argmax`](super::greedy_argmax). So does a row whose largest logit is not
//! finite: its logit tells the caller. A NaN never wins, as there. All arithmetic on logits is f64.

mod filters;
pub mod philox;

use rayon::prelude::*;

use super::draft_select::LogitShape;
use super::greedy_argmax::{
    GreedyArgmax, GreedyArgmaxArgs, check_masks, row_argmax, unmasked_runs,
};
use super::masked_ids::MaskedIds;
use super::vectors::MIN_PARALLEL_ELEMENTS;
use super::{Kernel, check_len, check_size};
use crate::device::cuda::CudaDevice;
use crate::device::{Buffer, HostDevice};
use crate::error::KernelError;

use filters::Candidate;

/// How the token of one row is drawn.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RowSampler {
    /// Divides the logits; 0 takes the largest one, whatever else is set.
    pub temperature: f64,
    /// Most ids to draw from, the likeliest; 0 = all.
    pub top_k: usize,
    /// Draws from the fewest of the likeliest ids that have at least this share of the probability, in (0, 1].
    pub top_p: f64,
    /// Drops ids less likely than this times the likeliest, in [0, 1].
    pub min_p: f64,
    /// Key of the noise, one per request.
    pub seed: u64,
    /// Absolute position of the row; its token is the next one.
    pub position: u32,
}

impl RowSampler {
    /// The largest logit.
    pub const GREEDY: Self = Self {
        temperature: 0.0,
        top_k: 0,
        top_p: 1.0,
        min_p: 0.0,
        seed: 0,
        position: 0,
    };

    /// Whether it takes the largest logit.
    pub fn is_greedy(&self) -> bool {
        self.temperature == 0.0
    }
}

/// Arguments of [`SampleRows`].
pub struct SampleRowsArgs<'a> {
    /// Logits `[num_rows, vocab_size]`.
    pub logits: &'a Buffer<f32>,
    /// Rows to decide.
    pub num_rows: usize,
    /// Length of a row.
    pub vocab_size: usize,
    /// Applied to logits before they become probabilities.
    pub shape: LogitShape,
    /// Per row, the ids that may not be drawn.
    pub masked: &'a MaskedIds,
    /// Per row, how to draw.
    pub samplers: &'a [RowSampler],
    /// Result, one id per row.
    pub token_ids: &'a mut [u32],
    /// Result, the logits of these ids.
    pub chosen_logits: &'a mut [f32],
}

/// The kernel; see the module's head for its contract.
pub struct SampleRows;

impl Kernel for SampleRows {
    const NAME: &'static str = "sample_rows";
    type Args<'a> = SampleRowsArgs<'a>;

    fn check(args: &SampleRowsArgs<'_>) -> Result<(), KernelError> {
        let (num_rows, vocab_size) = (args.num_rows, args.vocab_size);
        check_size(Self::NAME, "vocab_size", vocab_size, vocab_size.max(1))?;
        for (argument, got, expected) in [
            ("logits", args.logits.len(), num_rows * vocab_size),
            ("masked", args.masked.num_rows(), num_rows),
            ("samplers", args.samplers.len(), num_rows),
            ("token_ids", args.token_ids.len(), num_rows),
            ("chosen_logits", args.chosen_logits.len(), num_rows),
        ] {
            check_len(Self::NAME, argument, got, expected)?;
        }
        for sampler in &args.samplers[..num_rows] {
            let (temperature, top_p, min_p) = (sampler.temperature, sampler.top_p, sampler.min_p);
            for (argument, expected, got, holds) in [
                (
                    "temperature",
                    "finite and not negative",
                    temperature,
                    (0.0..f64::INFINITY).contains(&temperature),
                ),
                (
                    "top_p",
                    "above 0 and at most 1",
                    top_p,
                    top_p > 0.0 && top_p <= 1.0,
                ),
                ("min_p", "in 0..=1", min_p, (0.0..=1.0).contains(&min_p)),
            ] {
                if !holds {
                    return Err(KernelError::Number {
                        kernel: Self::NAME,
                        argument,
                        expected,
                        got,
                    });
                }
            }
        }
        check_masks(Self::NAME, args.masked, vocab_size)
    }

    fn host(device: &HostDevice, args: SampleRowsArgs<'_>) {
        let logits = &args.logits.host()[..args.num_rows * args.vocab_size];
        let token_ids = &mut args.token_ids[..args.num_rows];
        let chosen_logits = &mut args.chosen_logits[..args.num_rows];
        let decide = |row: usize, id: &mut u32, chosen: &mut f32| {
            let logits = &logits[row * args.vocab_size..][..args.vocab_size];
            *id = draw(
                logits,
                args.shape,
                args.masked.row(row),
                &args.samplers[row],
            );
            *chosen = logits[*id as usize];
        };
        if logits.len() < MIN_PARALLEL_ELEMENTS || args.num_rows == 1 {
            for (row, (id, chosen)) in token_ids.iter_mut().zip(chosen_logits).enumerate() {
                decide(row, id, chosen);
            }
        } else {
            device.install(|| {
                token_ids
                    .par_iter_mut()
                    .zip(chosen_logits)
                    .enumerate()
                    .for_each(|(row, (id, chosen))| decide(row, id, chosen));
            });
        }
    }

    /// Finds the likeliest ids on the GPU; rows that draw are few, come to the host and are drawn from there.
    fn cuda(device: &CudaDevice, args: SampleRowsArgs<'_>) -> Result<(), KernelError> {
        let (num_rows, vocab_size) = (args.num_rows, args.vocab_size);
        let argmax = GreedyArgmaxArgs {
            logits: args.logits,
            num_rows,
            vocab_size,
            masked: args.masked,
            token_ids: &mut *args.token_ids,
            best_logits: &mut *args.chosen_logits,
        };
        GreedyArgmax::cuda(device, argmax)?;
        let drawn = (0..num_rows).filter(|&row| !args.samplers[row].is_greedy());
        let logits = drawn.map(|row| {
            let range = row * vocab_size..(row + 1) * vocab_size;
            let logits = args.logits.read_range(range);
            let logits = logits.map_err(|source| KernelError::Device {
                kernel: Self::NAME,
                source,
            });
            Ok((row, logits?))
        });
        let logits = logits.collect::<Result<Vec<_>, _>>()?;
        let choices: Vec<(usize, u32, f32)> = device.host().install(|| {
            let draw = |(row, logits): &(usize, Vec<f32>)| {
                let masked = args.masked.row(*row);
                let id = draw(logits, args.shape, masked, &args.samplers[*row]);
                (*row, id, logits[id as usize])
            };
            logits.par_iter().map(draw).collect()
        });
        for (row, id, logit) in choices {
            (args.token_ids[row], args.chosen_logits[row]) = (id, logit);
        }
        Ok(())
    }
}

/// The token of one row.
fn draw(logits: &[f32], shape: LogitShape, masked: &[u32], sampler: &RowSampler) -> u32 {
    let likeliest = row_argmax(logits, masked);
    let largest = logits[likeliest as usize];
    if sampler.is_greedy() || !largest.is_finite() {
        return likeliest;
    }
    let most = shape.of(f64::from(largest));
    let mut race = Race::new(sampler, likeliest);
    let runs = unmasked_runs(logits.len(), masked);
    let scaled = runs.flatten().map(|id| {
        // Taking the largest off first keeps every temperature above 0 within range.
        let below = shape.of(f64::from(logits[id])) - most;
        (id as u32, below / sampler.temperature)
    });
    if sampler.min_p == 0.0 && sampler.top_k == 0 && sampler.top_p == 1.0 {
        scaled.for_each(|(id, scaled)| race.enter(id, scaled));
    } else {
        let candidates = scaled.map(|(id, scaled)| Candidate {
            id,
            logit: logits[id as usize],
            scaled,
        });
        for candidate in filters::kept(candidates, sampler) {
            race.enter(candidate.id, candidate.scaled);
        }
    }
    race.best_id
}

/// No noise is larger: that of the last of 2^52 steps below 1, and more than any rounding adds.
const MOST_NOISE: f64 = 53.0 * std::f64::consts::LN_2 + 1e-9;

/// Finds the id whose scaled logit and noise add up to most, whatever the order in which ids come.
struct Race {
    seed: u64,
    position: u32,
    best_id: u32,
    best_sum: f64,
}

impl Race {
    /// Starts with the likeliest id, whose scaled logit is 0: most others need no look at their noise then.
    fn new(sampler: &RowSampler, likeliest: u32) -> Self {
        let (seed, position) = (sampler.seed, sampler.position);
        Self {
            seed,
            position,
            best_id: likeliest,
            best_sum: gumbel(philox::token_bits(seed, position, likeliest)),
        }
    }

    fn enter(&mut self, id: u32, scaled: f64) {
        // Each step costs more than the one before and rules out nearly all ids that come to it. A NaN ends here.
        let may_win = |noise: f64| scaled + noise >= self.best_sum;
        if !may_win(MOST_NOISE) {
            return;
        }
        let bits = philox::token_bits(self.seed, self.position, id);
        if !may_win(noise_bound(bits)) {
            return;
        }
        let sum = scaled + gumbel(bits);
        if sum > self.best_sum || (sum == self.best_sum && id < self.best_id) {
            (self.best_id, self.best_sum) = (id, sum);
        }
    }
}

/// Standard Gumbel noise, `-ln(-ln(u))` with u the middle of one of 2^52 steps of (0, 1).
fn gumbel(bits: u64) -> f64 {
    const NUM_STEPS: f64 = (1_u64 << 52) as f64;
    let u = ((bits >> 12) as f64 + 0.5) / NUM_STEPS;
    -(-u.ln()).ln()
}

/// A bound of [`gumbel`] without logarithms: k leading ones leave `1 - u > 2^-(k + 1)`, and `-ln(u) > 1 - u`.
fn noise_bound(bits: u64) -> f64 {
    f64::from(bits.leading_ones().min(52) + 1) * std::f64::consts::LN_2 + 1e-9
}

#[cfg(test)]
mod tests;
