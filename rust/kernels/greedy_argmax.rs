//! The greedy token of every row: the id of the largest unrounded fp32 logit.
//!
//! The lowest id wins ties, a NaN never wins, and masked ids count as -inf. If nothing is above -inf, the lowest
//! unmasked id is taken. Masked ids beyond the vocabulary mask nothing.

use std::ops::Range;

use super::launcher::Launcher;
use super::masked_ids::MaskedIds;
use super::simd::{self, LANES, Lanes, Task};
use super::vectors::MIN_PARALLEL_ELEMENTS;
use super::{Kernel, check_len, check_size};
use crate::device::cuda::{CudaDevice, Shape};
use crate::device::{Buffer, HostDevice};
use crate::error::KernelError;
use rayon::prelude::*;

/// Arguments of [`GreedyArgmax`].
pub struct GreedyArgmaxArgs<'a> {
    /// Logits `[num_rows, vocab_size]`.
    pub logits: &'a Buffer<f32>,
    /// Rows to decide.
    pub num_rows: usize,
    /// Length of a row.
    pub vocab_size: usize,
    /// Per row, the ids that may not be chosen.
    pub masked: &'a MaskedIds,
    /// Result, one id per row.
    pub token_ids: &'a mut [u32],
    /// Result, the logits of these ids.
    pub best_logits: &'a mut [f32],
}

/// The kernel; see the module's head for its contract.
pub struct GreedyArgmax;

impl Kernel for GreedyArgmax {
    const NAME: &'static str = "greedy_argmax";
    type Args<'a> = GreedyArgmaxArgs<'a>;

    fn check(args: &GreedyArgmaxArgs<'_>) -> Result<(), KernelError> {
        let (num_rows, vocab_size) = (args.num_rows, args.vocab_size);
        check_size(Self::NAME, "vocab_size", vocab_size, vocab_size.max(1))?;
        check_len(
            Self::NAME,
            "logits",
            args.logits.len(),
            num_rows * vocab_size,
        )?;
        check_len(Self::NAME, "masked", args.masked.num_rows(), num_rows)?;
        check_len(Self::NAME, "token_ids", args.token_ids.len(), num_rows)?;
        check_len(Self::NAME, "best_logits", args.best_logits.len(), num_rows)?;
        check_masks(Self::NAME, args.masked, vocab_size)
    }

    fn host(device: &HostDevice, args: GreedyArgmaxArgs<'_>) {
        let logits = &args.logits.host()[..args.num_rows * args.vocab_size];
        let token_ids = &mut args.token_ids[..args.num_rows];
        let best_logits = &mut args.best_logits[..args.num_rows];
        let decide = |row: usize, id: &mut u32, best: &mut f32| {
            let logits = &logits[row * args.vocab_size..][..args.vocab_size];
            *id = row_argmax(logits, args.masked.row(row));
            *best = logits[*id as usize];
        };
        if logits.len() < MIN_PARALLEL_ELEMENTS || args.num_rows == 1 {
            for (row, (id, best)) in token_ids.iter_mut().zip(best_logits).enumerate() {
                decide(row, id, best);
            }
        } else {
            device.install(|| {
                token_ids
                    .par_iter_mut()
                    .zip(best_logits)
                    .enumerate()
                    .for_each(|(row, (id, best))| decide(row, id, best));
            });
        }
    }

    fn cuda(device: &CudaDevice, args: GreedyArgmaxArgs<'_>) -> Result<(), KernelError> {
        let launcher = Launcher::of::<Self>(device);
        let num_rows = args.num_rows;
        if num_rows == 0 {
            return Ok(());
        }
        let num_parts = args.vocab_size.div_ceil(PART_LEN);
        let logits_at = num_rows * size_of::<u32>();
        let keys_at = (logits_at + num_rows * size_of::<f32>()) as u64;
        let num_keys = num_rows * num_parts;
        let scratch = launcher.scratch(keys_at as usize + num_keys * size_of::<u64>())?;
        let params = GreedyArgmaxParams {
            logits: launcher.buffer("logits", args.logits)?,
            mask_starts: launcher.list("masked", args.masked.starts())?,
            masked: launcher.list("masked", args.masked.ids())?,
            keys: scratch + keys_at,
            token_ids: scratch,
            best_logits: scratch + logits_at as u64,
            num_rows: num_rows as u32,
            vocab_size: args.vocab_size as u32,
            num_parts: num_parts as u32,
        };
        // SAFETY: `params` mirrors the kernels'; `check` saw that there are logits and masks of all rows, and the scratch
        // holds results and keys.
        unsafe {
            let parts = Shape::of_blocks(num_keys, 256);
            launcher.run("greedy_argmax_parts", parts, &params)?;
            launcher.run(
                "greedy_argmax_rows",
                Shape::of_blocks(num_rows, 32),
                &params,
            )?;
        }
        // Ids and the bits of their logits, in one copy.
        let results: Vec<u32> = launcher.read_scratch(0, 2 * num_rows)?;
        let (token_ids, best_logits) = results.split_at(num_rows);
        args.token_ids[..num_rows].copy_from_slice(token_ids);
        for (best, bits) in args.best_logits.iter_mut().zip(best_logits) {
            *best = f32::from_bits(*bits);
        }
        Ok(())
    }
}

/// Ids that a block looks at.
const PART_LEN: usize = 4096;

/// `GreedyArgmaxParams` of `greedy_argmax.cu`.
#[repr(C)]
#[derive(Clone, Copy)]
struct GreedyArgmaxParams {
    logits: u64,
    mask_starts: u64,
    masked: u64,
    keys: u64,
    token_ids: u64,
    best_logits: u64,
    num_rows: u32,
    vocab_size: u32,
    num_parts: u32,
}

/// Refuses a row all of whose ids are masked.
pub(super) fn check_masks(
    kernel: &'static str,
    masked: &MaskedIds,
    vocab_size: usize,
) -> Result<(), KernelError> {
    let lists = (0..masked.num_rows()).map(|row| masked.row(row));
    for masked in lists.filter(|ids| ids.len() >= vocab_size) {
        let got = sorted_within(masked, vocab_size).len();
        if got == vocab_size {
            return Err(KernelError::OutOfRange {
                kernel,
                argument: "number of masked ids",
                bound: vocab_size,
                got,
            });
        }
    }
    Ok(())
}

/// The distinct ids below `vocab_size`, ascending.
fn sorted_within(ids: &[u32], vocab_size: usize) -> Vec<usize> {
    let mut ids: Vec<usize> = ids
        .iter()
        .map(|&id| id as usize)
        .filter(|&id| id < vocab_size)
        .collect();
    ids.sort_unstable();
    ids.dedup();
    ids
}

/// The runs of ids between masked ones, ascending.
pub(super) fn unmasked_runs(
    vocab_size: usize,
    masked: &[u32],
) -> impl Iterator<Item = Range<usize>> {
    let mut start = 0;
    sorted_within(masked, vocab_size)
        .into_iter()
        .chain([vocab_size])
        .map(move |end| std::mem::replace(&mut start, end + 1)..end)
}

/// Runs of candidates come in ascending order, so a later one must be strictly larger.
pub(super) fn row_argmax(logits: &[f32], masked: &[u32]) -> u32 {
    let mut best = f32::NEG_INFINITY;
    let mut best_id = None;
    let mut lowest_unmasked = None;
    for Range { start, end } in unmasked_runs(logits.len(), masked) {
        let run = &logits[start..end];
        if !run.is_empty() {
            lowest_unmasked.get_or_insert(start);
            let largest = simd::dispatch(LargestTask(run));
            if largest > best {
                best = largest;
                best_id = run
                    .iter()
                    .position(|&logit| logit == largest)
                    .map(|i| start + i);
            }
        }
    }
    best_id.or(lowest_unmasked).unwrap_or(0) as u32
}

/// The largest value that is not NaN, or -inf.
struct LargestTask<'a>(&'a [f32]);

impl Task for LargestTask<'_> {
    type Output = f32;

    #[inline(always)]
    fn run<L: Lanes>(self) -> f32 {
        // Several accumulators hide the latency of `max`; no order matters, for a maximum is exact.
        const STEP: usize = 4 * LANES;
        let lowest = L::splat(f32::NEG_INFINITY);
        let mut best = [lowest; 4];
        let mut steps = self.0.chunks_exact(STEP);
        for step in &mut steps {
            for (best, values) in best.iter_mut().zip(step.chunks_exact(LANES)) {
                // In this operand order a NaN value loses.
                *best = L::load(values).max(*best);
            }
        }
        let mut lanes = [0.0; LANES];
        best[0]
            .max(best[1])
            .max(best[2].max(best[3]))
            .store(&mut lanes);
        lanes
            .iter()
            .chain(steps.remainder())
            .fold(f32::NEG_INFINITY, |a, &b| if b > a { b } else { a })
    }
}
