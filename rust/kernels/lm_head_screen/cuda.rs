//! Screening on CUDA: rows to codes, a scan, survivors, their exact logits; see `cuda/lm_head_screen.cu`.
//!
//! Everything is launched before anything is read back: keys of the best survivors and their number, once per call. Rows that
//! are left undecided then take the dense path, all rows of the call with them: that is rare, and it is the same logits.
//!
//! # The bound
//! A logit is a product with `x` rounded to BF16: that is part of what it is here, and `x` below is the rounded row. `f` is a
//! sum of slices of K, each one chain of `mma.m16n8k16` from zero, then fp32 additions of eight slices and of the octets.
//! How a matrix unit adds is not specified. As measured (Fasi, Higham, Mikaitis and Pranesh, Numerical behavior of NVIDIA
//! tensor cores, PeerJ CS 2021), it aligns the exact products and the sum so far to the largest of them, cuts each off at no
//! fewer than 24 bits, adds, and cuts the result off. So an instruction errs by at most `(17 + 1) 2^-23` of the largest
//! magnitude it meets, which is at most `sum |w_k x_k|` over what the chain has seen. A chain of m instructions errs by
//! `18 m 2^-23`, an addition by u: with the longest slice `g = (18 m 2^-23 + (8 + octets) 2^-24) / (1 - that)`, 4.3e-5 at
//! K = 5120 ([`order_error`]; a test holds sums that err most against it on the GPU at hand). Matrix units may take numbers below
//! 2^-126 for zero, inputs and sums: at most `2^-125 (K + sqrt(K) (|x| + |w|))`, with the largest `|w|` that is worked with.
//!
//! Intervals are computed in fp32. Scales outside 2^-60..2^60 make a channel survive, steps outside 2^-60..2^30 send a row to
//! the dense path, so that nothing overflows or underflows. Then the centre, `(scale sum) step` with the sum rounded once, is
//! off by three roundings, the radius by three, their sum by one more. `|centre| <= |s q| (|x| + |e|)`, so `|s q|` is
//! multiplied with `2^-19 (|x| + |e|)` more than its share, and all constants of a row are raised by `1 + 2^-20`. What the codes
//! of a row leave out of it is one rounding off in each column, and perhaps below 2^-126: `|e|` is raised by 2^-22 of it, and
//! by 2^-120.

use super::rescore::gap_of;
use super::scan_launch::{BLOCK_THREADS, ScanGoal, Scans, Scratch, ScreenParams};
use super::{HeadScores, LmHeadScreen, LmHeadScreenArgs, most_survivors};
use crate::device::cuda::{CudaDevice, Shape};
use crate::error::KernelError;
use crate::kernels::Kernel;
use crate::kernels::bf16_matmul::{Bf16Matmul, Bf16MatmulArgs, Epilogue, Product};
use crate::kernels::greedy_argmax::{GreedyArgmax, GreedyArgmaxArgs};
use crate::kernels::launcher::Launcher;
use crate::kernels::skinny_weights::{OCTET, SliceMap, TILE_COLUMNS};

/// Groups of 16 channels that a block of `select_survivors` looks at.
const PART_GROUPS: usize = 512;
/// Columns of one matrix instruction of the exact product.
const MMA_COLUMNS: usize = 16;
/// In place of a count of survivors.
const NOT_SCREENED: u32 = u32::MAX;

/// Decides all rows; `args` passed `check`.
pub(super) fn screen(device: &CudaDevice, args: LmHeadScreenArgs<'_>) -> Result<(), KernelError> {
    if args.scores == HeadScores::Estimates {
        return Err(KernelError::NoCuda {
            kernel: "lm_head_screen by estimates",
        });
    }
    let num_rows = args.num_rows;
    if num_rows == 0 {
        return Ok(());
    }
    // The gap is asked for by audits alone: all logits give it.
    let wants_gap = args.top2_gap.is_some();
    let mut counts = vec![NOT_SCREENED; num_rows];
    if !wants_gap {
        let best;
        (best, counts) = decide_by_survivors(device, &args)?;
        for (row, key) in best.into_iter().enumerate() {
            args.token_ids[row] = !(key as u32);
            args.best_logits[row] = logit_of_key(key);
        }
    }
    let limit = most_survivors(args.exact.out_features());
    for (row, count) in counts.into_iter().enumerate() {
        args.survivors[row] = if count == NOT_SCREENED { 0 } else { count };
        args.fell_back[row] = !(1..=limit).contains(&(count as usize));
    }
    match args.fell_back[..num_rows].contains(&true) {
        true => decide_densely(device, args),
        false => Ok(()),
    }
}

/// What a call reads back: keys of the best survivors and their number, side by side in the scratch.
pub struct Results {
    offset: usize,
    num_rows: usize,
}

/// Keys of the best survivors, and how many there are.
fn decide_by_survivors(
    device: &CudaDevice,
    args: &LmHeadScreenArgs<'_>,
) -> Result<(Vec<u64>, Vec<u32>), KernelError> {
    let Results { offset, num_rows } = enqueue(device, args)?;
    let launcher = Launcher::of::<LmHeadScreen>(device);
    let words = launcher.read_scratch::<u32>(offset, 3 * num_rows)?;
    let (keys, counts) = words.split_at(2 * num_rows);
    let key = |words: &[u32]| u64::from(words[1]) << 32 | u64::from(words[0]);
    Ok((keys.chunks_exact(2).map(key).collect(), counts.to_vec()))
}

/// Launches all of a call that is decided by survivors, and waits for nothing: what a GPU does of it, to be timed alone.
/// The fields of `args` that are results stay as they are.
///
/// # Errors
/// [`KernelError::WrongDevice`], [`KernelError::Device`].
pub fn enqueue(device: &CudaDevice, args: &LmHeadScreenArgs<'_>) -> Result<Results, KernelError> {
    let (num_rows, in_features) = (args.num_rows, args.exact.in_features());
    let scans = Scans::new(device, args.head, num_rows)?;
    let (launcher, rows) = (&scans.launcher, scans.rows());
    let num_channels = scans.codes.num_channels();
    let limit = most_survivors(args.exact.out_features());
    let has_masks = !args.masked.ids().is_empty();
    let mut scratch = Scratch::default();
    // Results side by side, for one copy.
    let results = scratch.take(num_rows * (size_of::<u64>() + size_of::<u32>()));
    let (best, counts) = (results, results + num_rows * size_of::<u64>());
    let coded = scans.take(&mut scratch);
    let mask_bits = scratch.take(if has_masks {
        rows * num_channels / 8
    } else {
        0
    });
    let upper = scratch.take(rows * num_channels * size_of::<f32>());
    let group_upper = scratch.take(rows * num_channels / 16 * size_of::<f32>());
    let survivors = scratch.take(rows * limit * size_of::<u32>());
    let start = launcher.scratch(scratch.end)?;
    let at = |offset: usize| start + offset as u64;
    let map = SliceMap::of(in_features);
    let params = ScreenParams {
        exact: launcher.matrix("exact", args.exact)?,
        mask_starts: launcher.list("masked", args.masked.starts())?,
        masked: launcher.list("masked", args.masked.ids())?,
        mask_bits: if has_masks { at(mask_bits) } else { 0 },
        upper: at(upper),
        group_upper: at(group_upper),
        survivors: at(survivors),
        order: order_error(in_features),
        max_survivors: limit as u32,
        num_octets: map.num_octets as u32,
        log2_slices: map.num_slices().ilog2(),
        ..scans.params(args.x, &coded, start)?
    };
    for (first, params) in scans.groups(params, num_rows) {
        let params = ScreenParams {
            mask_starts: params.mask_starts + (first * size_of::<u32>()) as u64,
            counts: at(counts + first * size_of::<u32>()),
            best: at(best + first * size_of::<u64>()),
            ..params
        };
        let num_parts = (num_channels / 16).div_ceil(PART_GROUPS);
        let parts = Shape::of_blocks(params.num_rows as usize * num_parts, BLOCK_THREADS);
        // SAFETY: `params` mirrors the kernels'; `check` saw that `x` and the masks hold the rows, the scratch holds the rest, and
        // the head was made for `exact`.
        unsafe {
            scans.launch(ScanGoal::Bounds, params)?;
            launcher.run("select_survivors", parts, &params)?;
            launcher.run("rescore_survivors", scans.turns(), &params)?;
        }
    }
    Ok(Results {
        offset: results,
        num_rows,
    })
}

/// Decides the rows that fell back by all of their logits.
fn decide_densely(device: &CudaDevice, mut args: LmHeadScreenArgs<'_>) -> Result<(), KernelError> {
    let (num_rows, vocab_size) = (args.num_rows, args.exact.out_features());
    let matmul = Bf16MatmulArgs {
        x: args.x.into(),
        num_rows,
        products: vec![Product {
            weight: args.exact,
            y: &mut *args.dense_logits,
        }],
        epilogue: Epilogue::Store,
    };
    Bf16Matmul::cuda(device, matmul)?;
    let (mut token_ids, mut best_logits) = (vec![0; num_rows], vec![0.0; num_rows]);
    let argmax = GreedyArgmaxArgs {
        logits: &*args.dense_logits,
        num_rows,
        vocab_size,
        masked: args.masked,
        token_ids: &mut token_ids,
        best_logits: &mut best_logits,
    };
    GreedyArgmax::cuda(device, argmax)?;
    for row in (0..num_rows).filter(|&row| args.fell_back[row]) {
        (args.token_ids[row], args.best_logits[row]) = (token_ids[row], best_logits[row]);
    }
    let Some(gaps) = &mut args.top2_gap else {
        return Ok(());
    };
    for (row, gap) in gaps.iter_mut().take(num_rows).enumerate() {
        let range = row * vocab_size..(row + 1) * vocab_size;
        let logits = args.dense_logits.read_range(range);
        let logits = logits.map_err(|source| KernelError::Device {
            kernel: LmHeadScreen::NAME,
            source,
        })?;
        *gap = gap_of(&logits, args.masked.row(row));
    }
    Ok(())
}

/// The logit of a key of `logit_keys.cuh`.
fn logit_of_key(key: u64) -> f32 {
    let order = (key >> 32) as u32;
    f32::from_bits(match order >> 31 {
        1 => order ^ 0x8000_0000,
        _ => !order,
    })
}

/// Relative error, against the sum of absolute products, of a dot product in the order of the CUDA matmuls (module head of
/// [`super`]).
fn order_error(in_features: usize) -> f64 {
    let map = SliceMap::of(in_features);
    let chain = map.slice_tiles() * TILE_COLUMNS / MMA_COLUMNS * (MMA_COLUMNS + 2);
    let additions = OCTET + map.num_octets;
    let error = chain as f64 * 2.0_f64.powi(-23) + additions as f64 * 2.0_f64.powi(-24);
    error / (1.0 - error)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_give_their_logits_back() {
        // As `logit_key` makes them.
        for (key, logit) in [
            (0xC060_0000_FFFF_FFF8_u64, 3.5),
            (0x3F9F_FFFF_0000_0000, -3.5),
            (0x8000_0000_FFFF_FFFF, 0.0),
            (0x007F_FFFF_FFFF_FFFF, f32::NEG_INFINITY),
        ] {
            assert_eq!(logit_of_key(key), logit);
        }
    }

    #[test]
    fn the_order_of_5120_columns_is_known_to_4e_5() {
        // 20 instructions of 18 roundings a slice; 8 slices and 2 octets.
        let expected = 360.0 * 2.0_f64.powi(-23) + 10.0 * 2.0_f64.powi(-24);
        assert!((order_error(5120) / expected - 1.0).abs() < 1e-4);
        assert!(order_error(5120) < 4.5e-5 && order_error(1 << 16) < 1e-4);
    }
}
