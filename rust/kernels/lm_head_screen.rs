//! The greedy token of every row from an INT8 copy of the LM head: the ids of the dense path, always.
//!
//! Every channel's logit is bounded from the copy; channels that could still win (*survivors*) are multiplied exactly, in
//! the canonical order of [`bf16_matmul`](super::bf16_matmul), and the largest wins as in [`greedy_argmax`]
//! (super::greedy_argmax): the lowest id among equals, never a NaN, never a masked id. Rows that cannot be screened, or
//! leave too many survivors, take the dense path in the same call.
//!
//! # The bound
//! Row `w = s q + r` with codes `q` in -127..=127, activations `x = x' + e` with `x' = t (255 h + l)`, `h` and `l` in
//! -127..=127. The codes give `z = s q.x'` from exact integers, so by Cauchy-Schwarz (`|.|` the 2-norm)
//! `|w.x - z| = |r.x + s q.e| <= |r| |x| + |s q| |e|`: [`Interval::screen`].
//! The engine's logit `f` is a sum in fp32: chains of at most [`K_BLOCK`](super::bf16_matmul::K_BLOCK) = 256 fused
//! multiply-adds from zero, then block sums one after another. A product passes at most `min(K, 256)` roundings in its
//! chain and `ceil(K / 256)` in the sum of blocks, each a factor `1 + d`, `|d| <= u = 2^-24`. With `n` the sum of the
//! two, `|f - w.x| <= g sum |w_k x_k| <= g |w| |x|` where `g = n u / (1 - n u)` (Higham, Accuracy and Stability, 3.1;
//! 1.6e-5 at K = 5120), and `|w| <= |r| + |s q|`. A multiply-add that underflows adds at most 2^-150, grown by later
//! roundings to less than 2^-149: K 2^-148 covers them. That is [`Interval::order`]. No sum overflows while
//! `|w| |x| < 2^126`; larger ones go to the dense path. So `z - B <= f <= z + B` with `B = screen + order`, and a
//! channel whose upper bound lies below the largest lower bound of an unmasked channel (strictly, so that ties survive)
//! cannot win. Norms are stored rounded up; everything else is f64 with factors above its roundings.
//! Channels with a NaN or an infinity have an infinite bound and always survive.
//! On CUDA the order of sums is another, and so is its error: see `cuda`.

mod cuda;
mod estimates;
mod head;
mod head_codes;
mod rescore;
mod rows;
mod scan;
mod scan_config;
mod scan_launch;

use super::greedy_argmax::check_masks;
use super::masked_ids::MaskedIds;
use super::packed_bf16::PackedBf16;
use super::simd::{self, Isa, LANES};
use super::{Kernel, check_len, check_size};
use crate::device::cuda::CudaDevice;
use crate::device::{Buffer, HostDevice};
use crate::error::KernelError;

pub use cuda::enqueue;
pub use estimates::{LogitEstimates, LogitEstimatesArgs};
pub use head::ScreenedHead;
pub use head_codes::ScreenScan;
pub use rows::Interval;

/// What the choice among the channels goes by.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HeadScores {
    /// The engine's logits: the dense path's token.
    Logits,
    /// What the INT8 copy alone says they are, for choices that decide nothing.
    Estimates,
}

/// Arguments of [`LmHeadScreen`].
pub struct LmHeadScreenArgs<'a> {
    /// Final hidden rows `[num_rows, in_features]`.
    pub x: &'a Buffer<f32>,
    /// Rows to decide.
    pub num_rows: usize,
    /// INT8 copy of `exact`.
    pub head: &'a ScreenedHead,
    /// The LM head `[vocab_size, in_features]`.
    pub exact: &'a PackedBf16,
    /// What the largest is the largest of. By estimates no channel is multiplied exactly: nothing survives, and what
    /// cannot be screened is decided densely as ever.
    pub scores: HeadScores,
    /// Per row, the ids that may not be chosen.
    pub masked: &'a MaskedIds,
    /// Room for the logits of rows that take the dense path, `[num_rows, vocab_size]`.
    pub dense_logits: &'a mut Buffer<f32>,
    /// Result, one id per row.
    pub token_ids: &'a mut [u32],
    /// Result, the logits of these ids, or their estimates.
    pub best_logits: &'a mut [f32],
    /// Per row, how many channels the bounds left; 0 for a row that was not screened.
    pub survivors: &'a mut [u32],
    /// Per row, whether the dense path decided.
    pub fell_back: &'a mut [bool],
    /// Per row, the exact difference between the largest and the second logit that are neither masked nor NaN, infinite
    /// when there is no second. The runner-up must survive too, so asking for it costs survivors.
    pub top2_gap: Option<&'a mut [f32]>,
}

/// The kernel; see the module's head for its contract.
pub struct LmHeadScreen;

impl Kernel for LmHeadScreen {
    const NAME: &'static str = "lm_head_screen";
    type Args<'a> = LmHeadScreenArgs<'a>;

    fn check(args: &LmHeadScreenArgs<'_>) -> Result<(), KernelError> {
        let (name, num_rows) = (Self::NAME, args.num_rows);
        let (n, k) = (args.exact.out_features(), args.exact.in_features());
        check_size(name, "out_features", args.head.out_features(), n)?;
        check_size(name, "in_features", args.head.in_features(), k)?;
        check_len(name, "x", args.x.len(), num_rows * k)?;
        check_len(name, "masked", args.masked.num_rows(), num_rows)?;
        check_len(name, "token_ids", args.token_ids.len(), num_rows)?;
        check_len(name, "best_logits", args.best_logits.len(), num_rows)?;
        check_len(name, "dense_logits", args.dense_logits.len(), num_rows * n)?;
        check_len(name, "survivors", args.survivors.len(), num_rows)?;
        check_len(name, "fell_back", args.fell_back.len(), num_rows)?;
        if let Some(gaps) = &args.top2_gap {
            check_len(name, "top2_gap", gaps.len(), num_rows)?;
        }
        check_masks(name, args.masked, n)
    }

    fn host(device: &HostDevice, args: LmHeadScreenArgs<'_>) {
        screen(device, simd::isa(), args);
    }

    fn cuda(device: &CudaDevice, args: LmHeadScreenArgs<'_>) -> Result<(), KernelError> {
        cuda::screen(device, args)
    }
}

/// Most survivors of a row: multiplying a survivor costs as much as 16 channels of the dense path, and beyond this the
/// dense path is not far.
pub fn most_survivors(vocab_size: usize) -> usize {
    (vocab_size / 32).max(64)
}

fn screen(device: &HostDevice, isa: Isa, args: LmHeadScreenArgs<'_>) {
    let k = args.exact.in_features();
    let x = &args.x.host()[..args.num_rows * k];
    let mut screened = Vec::new();
    let (mut coded_rows, mut masked) = (Vec::new(), Vec::new());
    for (row, x) in x.chunks_exact(k).enumerate() {
        (args.survivors[row], args.fell_back[row]) = (0, true);
        if let Some(mut coded) = rows::CodedRow::new(x, args.head) {
            if args.scores == HeadScores::Estimates {
                coded.take_for_exact();
            }
            screened.push(row);
            coded_rows.push(coded);
            masked.push(mask_bits(args.masked.row(row), args.exact.out_features()));
        }
    }
    let with_gap = args.top2_gap.is_some();
    let mut candidates = Vec::new();
    if !coded_rows.is_empty() {
        candidates = scan::scan(device, isa, args.head, &coded_rows, &masked, with_gap);
    }
    let limit = most_survivors(args.exact.out_features());
    let mut survivors = Vec::new();
    for (row, candidates) in screened.into_iter().zip(candidates) {
        if args.scores == HeadScores::Estimates {
            if let Some((estimate, id)) = candidates.best() {
                (args.token_ids[row], args.best_logits[row]) = (id, estimate as f32);
                args.fell_back[row] = false;
            }
            continue;
        }
        let first = survivors.len();
        survivors.extend(
            candidates
                .survivors()
                .map(|id| rescore::Survivor { row, id }),
        );
        let count = survivors.len() - first;
        args.survivors[row] = count as u32;
        args.fell_back[row] = !(1..=limit).contains(&count);
        if args.fell_back[row] {
            survivors.truncate(first);
        }
    }
    let problem = rescore::Problem {
        device,
        isa,
        x,
        exact: args.exact,
    };
    let dense: Vec<usize> = (0..args.num_rows)
        .filter(|&row| args.fell_back[row])
        .collect();
    let choices = rescore::decide_survivors(&problem, &survivors);
    let fallen =
        rescore::decide_densely(&problem, &dense, args.masked, with_gap, args.dense_logits);
    let mut gaps = args.top2_gap;
    for choice in choices.into_iter().chain(fallen) {
        args.token_ids[choice.row] = choice.id;
        args.best_logits[choice.row] = choice.logit;
        if let Some(gaps) = &mut gaps {
            gaps[choice.row] = choice.gap;
        }
    }
}

/// One word per tile: the channels that are masked, and those beyond the vocabulary.
fn mask_bits(masked: &[u32], vocab_size: usize) -> Vec<u16> {
    let mut bits = vec![0_u16; vocab_size.div_ceil(LANES)];
    let beyond = vocab_size..vocab_size.next_multiple_of(LANES);
    let masked = masked.iter().map(|&id| id as usize);
    for id in masked.filter(|&id| id < vocab_size).chain(beyond) {
        bits[id / LANES] |= 1 << (id % LANES);
    }
    bits
}

/// The bounds of every channel's logit for a row; `None` when the row takes the dense path. For audits of the bound.
#[cfg(any(test, feature = "python"))]
pub(crate) fn intervals(isa: Isa, x: &[f32], head: &ScreenedHead) -> Option<Vec<Interval>> {
    let row = rows::CodedRow::new(x, head)?;
    let task = scan::IntervalsTask { head, row: &row };
    Some(simd::bytes::dispatch_on(isa, task))
}

#[cfg(test)]
mod tests;
