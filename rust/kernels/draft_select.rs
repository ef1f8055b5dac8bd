//! From a drafter's logits to the candidates of every position and their log-probabilities.
//!
//! Per row the `top_k` largest logits, ties to the lowest id, largest first; their index is the candidate's *slot*.
//! Scores are the logits after the drafter's own shaping, `U = cap(multiplier * logit)`, `cap(l) = c * tanh(l / c)`.
//! Marginal: `log_probs[row, b] = U(b) - logsumexp over the vocabulary`. Conditional, with a selector:
//! `S(a, b) = U(b) + sum_j predecessor[a, j] * gate[row, j] * successor[b, j]` for every candidate a of the level before
//! (the anchor token for level 0), and `log_probs[row, a, b] = S(a, b) - logsumexp over the candidates`.
//! Rows are packed level-major (`row = level * num_blocks + block`); a row depends on its own block's rows only.

use rayon::prelude::*;

use super::bf16_matmul::PackedBf16;
use super::launcher::Launcher;
use super::simd::{self, LANES, Lanes, Task};
use super::{Kernel, check_len, check_size};
use crate::device::cuda::{CudaDevice, Shape};
use crate::device::{Buffer, HostDevice, Staged};
use crate::error::KernelError;

/// What a drafter does to the head's logits before it reads probabilities off them.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LogitShape {
    /// Factor on every logit; positive, so that it keeps their order.
    pub multiplier: f32,
    /// The bound `c` of `c * tanh(logit / c)`, applied after the multiplier.
    pub softcap: Option<f32>,
}

/// Low-rank scores of a candidate given the one before it.
pub struct Selector<'a> {
    /// `[rows, rank]`: what the row's hidden state makes of each rank.
    pub gate: &'a Buffer<f32>,
    /// `[vocab_size, rank]`, by the token before.
    pub predecessor: &'a PackedBf16,
    /// `[vocab_size, rank]`, by the candidate.
    pub successor: &'a PackedBf16,
    /// Token before level 0, one per block.
    pub anchor_tokens: &'a Staged<u32>,
}

/// Arguments of [`DraftSelect`].
pub struct DraftSelectArgs<'a> {
    /// `[levels, blocks, vocab_size]`.
    pub logits: &'a Buffer<f32>,
    /// Columns of `logits`.
    pub vocab_size: usize,
    /// Positions drafted.
    pub num_levels: usize,
    /// Blocks packed side by side.
    pub num_blocks: usize,
    /// Candidates per row.
    pub top_k: usize,
    /// Applied to logits before scores are read off them.
    pub shape: LogitShape,
    /// Conditional scores; marginals when `None`.
    pub selector: Option<Selector<'a>>,
    /// Candidates `[levels, blocks, top_k]`.
    pub token_ids: &'a mut Buffer<u32>,
    /// Marginal `[levels, blocks, top_k]`; conditional `[levels, blocks, top_k (before), top_k]`, of which level 0 has
    /// only its first `top_k` values written: there the anchor is the only parent.
    pub log_probs: &'a mut Buffer<f32>,
}

impl DraftSelectArgs<'_> {
    fn num_rows(&self) -> usize {
        self.num_levels * self.num_blocks
    }

    /// Elements of `log_probs` per row.
    fn scores_per_row(&self) -> usize {
        match self.selector {
            Some(_) => self.top_k * self.top_k,
            None => self.top_k,
        }
    }
}

/// The kernel; see the module's head for its contract.
pub struct DraftSelect;

impl Kernel for DraftSelect {
    const NAME: &'static str = "draft_select";
    type Args<'a> = DraftSelectArgs<'a>;

    fn check(args: &DraftSelectArgs<'_>) -> Result<(), KernelError> {
        let (name, num_rows, vocab_size) = (Self::NAME, args.num_rows(), args.vocab_size);
        for (argument, size) in [
            ("vocab_size", vocab_size),
            ("num_blocks", args.num_blocks),
            ("top_k", args.top_k),
        ] {
            check_size(name, argument, size, size.max(1))?;
        }
        check_len(name, "vocab_size", vocab_size, args.top_k)?;
        check_len(name, "logits", args.logits.len(), num_rows * vocab_size)?;
        if let Some(selector) = &args.selector {
            let rank = selector.predecessor.in_features();
            for (argument, codebook) in [
                ("predecessor", selector.predecessor),
                ("successor", selector.successor),
            ] {
                check_size(name, argument, codebook.out_features(), vocab_size)?;
                check_size(name, argument, codebook.in_features(), rank)?;
            }
            check_len(name, "gate", selector.gate.len(), num_rows * rank)?;
            let anchors = selector.anchor_tokens.values();
            check_len(name, "anchor_tokens", anchors.len(), args.num_blocks)?;
            if let Some(&id) = anchors.iter().find(|&&id| id as usize >= vocab_size) {
                return Err(KernelError::OutOfRange {
                    kernel: name,
                    argument: "anchor_tokens",
                    bound: vocab_size,
                    got: id as usize,
                });
            }
        }
        check_len(
            name,
            "token_ids",
            args.token_ids.len(),
            num_rows * args.top_k,
        )?;
        let scores_len = num_rows * args.scores_per_row();
        check_len(name, "log_probs", args.log_probs.len(), scores_len)
    }

    fn host(device: &HostDevice, args: DraftSelectArgs<'_>) {
        let (num_rows, top_k, num_blocks) = (args.num_rows(), args.top_k, args.num_blocks);
        let scores_per_row = args.scores_per_row();
        let logits = &args.logits.host()[..num_rows * args.vocab_size];
        let token_ids = &mut args.token_ids.host_mut()[..num_rows * top_k];
        let log_probs = &mut args.log_probs.host_mut()[..num_rows * scores_per_row];
        device.install(|| {
            // Conditional rows read the candidates of the level before, so all candidates come first; their scores U
            // go to the front of the row's log_probs.
            logits
                .par_chunks_exact(args.vocab_size)
                .zip(token_ids.par_chunks_exact_mut(top_k))
                .zip(log_probs.par_chunks_exact_mut(scores_per_row))
                .for_each(|((logits, token_ids), log_probs)| {
                    let scores = &mut log_probs[..top_k];
                    simd::dispatch(TopK {
                        logits,
                        shape: args.shape,
                        token_ids,
                        scores,
                    });
                    if args.selector.is_none() {
                        simd::dispatch(Marginal {
                            logits,
                            shape: args.shape,
                            scores,
                        });
                    }
                });
            let Some(selector) = &args.selector else {
                return;
            };
            let token_ids = &*token_ids;
            log_probs
                .par_chunks_exact_mut(scores_per_row)
                .enumerate()
                .for_each(|(row, log_probs)| {
                    let parents = match row.checked_sub(num_blocks) {
                        Some(before) => &token_ids[before * top_k..][..top_k],
                        None => &selector.anchor_tokens.values()[row..=row],
                    };
                    simd::dispatch(SelectorScores {
                        selector,
                        row,
                        parents,
                        candidates: &token_ids[row * top_k..][..top_k],
                        log_probs,
                    });
                });
        });
    }

    fn cuda(device: &CudaDevice, args: DraftSelectArgs<'_>) -> Result<(), KernelError> {
        let launcher = Launcher::of::<Self>(device);
        let (num_rows, top_k) = (args.num_rows(), args.top_k);
        if num_rows == 0 {
            return Ok(());
        }
        if top_k > BLOCK_THREADS {
            return Err(KernelError::OutOfRange {
                kernel: Self::NAME,
                argument: "top_k",
                bound: BLOCK_THREADS + 1,
                got: top_k,
            });
        }
        let num_parts = args.vocab_size.div_ceil(PART_LEN);
        let sums_at = num_rows * num_parts * top_k * size_of::<u64>();
        let scratch = launcher.scratch(sums_at + num_rows * num_parts * 2 * size_of::<f32>())?;
        let mut params = DraftSelectParams {
            logits: launcher.buffer("logits", args.logits)?,
            gate: 0,
            predecessor: 0,
            successor: 0,
            anchor_tokens: 0,
            keys: scratch,
            sums: scratch + sums_at as u64,
            token_ids: launcher.buffer("token_ids", args.token_ids)?,
            log_probs: launcher.buffer("log_probs", args.log_probs)?,
            num_rows: num_rows as u32,
            num_blocks: args.num_blocks as u32,
            vocab_size: args.vocab_size as u32,
            num_parts: num_parts as u32,
            top_k: top_k as u32,
            rank: 0,
            multiplier: args.shape.multiplier,
            softcap: args.shape.softcap.unwrap_or(0.0),
        };
        let mut scores = None;
        if let Some(selector) = &args.selector {
            let rank = selector.predecessor.in_features();
            // Codes of parents and candidates, the candidates' own scores, scores of all pairs.
            let shared_len = 2 * top_k * (rank | 1) + top_k + top_k * top_k;
            let shared_bytes = shared_len * size_of::<f32>();
            launcher.check_shared_bytes("top_k", shared_bytes)?;
            params.gate = launcher.buffer("gate", selector.gate)?;
            params.predecessor = launcher.matrix("predecessor", selector.predecessor)?;
            params.successor = launcher.matrix("successor", selector.successor)?;
            params.anchor_tokens = launcher.list("anchor_tokens", selector.anchor_tokens)?;
            params.rank = rank as u32;
            scores = Some(Shape {
                shared_bytes: shared_bytes as u32,
                ..Shape::of_blocks(num_rows, BLOCK_THREADS)
            });
        }
        // SAFETY: `params` mirrors the kernels'; `check` saw that all buffers are as long as the shape asks and every anchor
        // has a code, and the scratch holds keys and sums.
        unsafe {
            let parts = Shape::of_blocks(num_rows * num_parts, BLOCK_THREADS);
            launcher.run("draft_select_parts", parts, &params)?;
            let rows = Shape::of_blocks(num_rows, BLOCK_THREADS);
            launcher.run("draft_select_rows", rows, &params)?;
            scores.map_or(Ok(()), |scores| {
                launcher.run("draft_select_scores", scores, &params)
            })
        }
    }
}

const BLOCK_THREADS: usize = 256;
/// Ids that a block looks at.
const PART_LEN: usize = 16 * BLOCK_THREADS;

/// `DraftSelectParams` of `draft_select.cu`.
#[repr(C)]
#[derive(Clone, Copy)]
struct DraftSelectParams {
    logits: u64,
    gate: u64,
    predecessor: u64,
    successor: u64,
    anchor_tokens: u64,
    keys: u64,
    sums: u64,
    token_ids: u64,
    log_probs: u64,
    num_rows: u32,
    num_blocks: u32,
    vocab_size: u32,
    num_parts: u32,
    top_k: u32,
    rank: u32,
    multiplier: f32,
    softcap: f32,
}

impl LogitShape {
    /// Logits as they are.
    pub const PLAIN: Self = Self {
        multiplier: 1.0,
        softcap: None,
    };

    /// What becomes of one logit.
    pub fn of(self, logit: f64) -> f64 {
        let logit = logit * f64::from(self.multiplier);
        match self.softcap.map(f64::from) {
            None => logit,
            Some(cap) => cap * (logit / cap).tanh(),
        }
    }

    /// Replaces `logits` by what becomes of them.
    pub fn apply_to(self, logits: &mut [f32]) {
        if self != Self::PLAIN {
            let shaped = |logit: &mut f32| *logit = self.of(f64::from(*logit)) as f32;
            logits.iter_mut().for_each(shaped);
        }
    }

    #[inline(always)]
    pub(super) fn apply<L: Lanes>(self, logits: L) -> L {
        let logits = logits.mul(L::splat(self.multiplier));
        match self.softcap {
            None => logits,
            Some(cap) => {
                // c * tanh(l / c) = c - 2c / (e^(2l / c) + 1)
                let grown = logits.mul(L::splat(2.0 / cap)).exp().add(L::splat(1.0));
                L::splat(cap).sub(L::splat(2.0 * cap).div(grown))
            }
        }
    }
}

/// The largest logits of a row and their scores.
struct TopK<'a> {
    logits: &'a [f32],
    shape: LogitShape,
    token_ids: &'a mut [u32],
    scores: &'a mut [f32],
}

impl Task for TopK<'_> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(self) {
        const CHUNK: usize = 4 * LANES;
        let top_k = self.token_ids.len();
        let mut num_found = 0;
        for (i, chunk) in self.logits.chunks(CHUNK).enumerate() {
            // Once the list is full nearly every chunk is skipped by its maximum.
            if num_found == top_k && chunk.len() == CHUNK {
                let max = (0..4).fold(L::splat(f32::NEG_INFINITY), |max, n| {
                    L::load(&chunk[n * LANES..]).max(max)
                });
                let mut lanes = [0.0; LANES];
                max.store(&mut lanes);
                let worst = self.scores[top_k - 1];
                if !lanes.iter().any(|&logit| logit > worst) {
                    continue;
                }
            }
            for (j, &logit) in chunk.iter().enumerate() {
                if num_found == top_k && logit <= self.scores[top_k - 1] {
                    continue;
                }
                // Ids ascend, so going behind equal logits keeps the lowest ids.
                let place = self.scores[..num_found]
                    .partition_point(|&kept| kept >= logit || logit.is_nan());
                if place == top_k {
                    continue;
                }
                num_found = top_k.min(num_found + 1);
                self.scores[place..num_found].rotate_right(1);
                self.token_ids[place..num_found].rotate_right(1);
                self.scores[place] = logit;
                self.token_ids[place] = (i * CHUNK + j) as u32;
            }
        }
        simd::map1::<L>(self.scores, |logits| self.shape.apply(logits));
    }
}

/// Turns scores of a row's candidates into log-probabilities over the whole vocabulary.
struct Marginal<'a> {
    logits: &'a [f32],
    shape: LogitShape,
    scores: &'a mut [f32],
}

impl Task for Marginal<'_> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(self) {
        // The best candidate is the row's maximum: shaping keeps the order.
        let max = L::splat(self.scores[0]);
        let mut chunks = self.logits.chunks_exact(LANES);
        let mut sum = L::splat(0.0);
        for part in &mut chunks {
            sum = sum.add(self.shape.apply(L::load(part)).sub(max).exp());
        }
        let rest = chunks.remainder();
        if !rest.is_empty() {
            let mut weights = [0.0; LANES];
            let scores = self.shape.apply(L::load_partial(rest));
            scores.sub(max).exp().store(&mut weights);
            // Lanes past the end must not count.
            sum = sum.add(L::load_partial(&weights[..rest.len()]));
        }
        normalise::<L>(self.scores, self.scores[0], sum.sum());
    }
}

/// Scores of a row's candidates after each parent; the candidates' own scores stand at the front of `log_probs`.
struct SelectorScores<'a> {
    selector: &'a Selector<'a>,
    row: usize,
    parents: &'a [u32],
    candidates: &'a [u32],
    log_probs: &'a mut [f32],
}

impl Task for SelectorScores<'_> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(self) {
        let rank = self.selector.predecessor.in_features();
        let top_k = self.candidates.len();
        let own = self.log_probs[..top_k].to_vec();
        let mut successors = vec![0.0; top_k * rank];
        for (&id, row) in self
            .candidates
            .iter()
            .zip(successors.chunks_exact_mut(rank))
        {
            self.selector.successor.unpack_row(id as usize, row);
        }
        let gate = &self.selector.gate.host()[self.row * rank..][..rank];
        let mut gated = vec![0.0; rank];
        for (&parent, scores) in self
            .parents
            .iter()
            .zip(self.log_probs.chunks_exact_mut(top_k))
        {
            self.selector
                .predecessor
                .unpack_row(parent as usize, &mut gated);
            simd::map2::<L>(gate, &mut gated, |gate, row| gate.mul(row));
            for ((score, &own), successor) in scores
                .iter_mut()
                .zip(&own)
                .zip(successors.chunks_exact(rank))
            {
                *score = own + simd::dot::<L>(&gated, successor);
            }
            let max = scores.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            let mut weights = scores.to_vec();
            for part in weights.chunks_mut(LANES) {
                let relative = L::load_partial(part).sub(L::splat(max));
                relative.exp().store_partial(part);
            }
            normalise::<L>(scores, max, weights.iter().sum());
        }
    }
}

/// `scores = min(0, scores - max - ln(sum))`: rounding must not make a probability exceed 1.
#[inline(always)]
fn normalise<L: Lanes>(scores: &mut [f32], max: f32, sum: f32) {
    let (max, log_sum, zero) = (L::splat(max), L::splat(sum.ln()), L::splat(0.0));
    simd::map1::<L>(scores, |score| score.sub(max).sub(log_sum).min(zero));
}
