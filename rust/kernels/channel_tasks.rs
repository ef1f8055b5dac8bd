//! Sharing out a matmul among threads: by output channels, never along K, so that the split never shows in a sum.

use std::ops::Range;

use rayon::prelude::*;

use super::simd::LANES;
use crate::device::HostDevice;

/// Below this much work, as [`work`] counts it, a call stays on its own thread: about 25 us of one core, against the 5
/// to 10 us that waking the pool costs.
pub(super) const MIN_PARALLEL_WORK: usize = 1 << 21;
/// Tasks per thread: enough to even out threads, few enough to read long runs of weights.
const TASKS_PER_THREAD: usize = 4;
/// Most tiles of a register block; a task holds a multiple of it.
const MAX_BLOCK_TILES: usize = 8;

/// Multiply-adds, plus three rows' worth for reading the weights.
fn work(num_rows: usize, out_features: usize, in_features: usize) -> usize {
    (num_rows + 3) * out_features * in_features
}

/// Calls `run` with runs of tiles of 16 channels that together cover `out_features`, and with those channels of every
/// row of `y` `[_, out_features]`.
pub(super) fn for_each_channel_task(
    device: &HostDevice,
    y: &mut [f32],
    out_features: usize,
    in_features: usize,
    run: impl Fn(Range<usize>, Vec<&mut [f32]>) + Sync,
) {
    let num_rows = y.len() / out_features;
    let num_tiles = out_features.div_ceil(LANES);
    let num_tasks = match device.num_threads() {
        num_threads
            if num_threads > 1
                && work(num_rows, out_features, in_features) >= MIN_PARALLEL_WORK =>
        {
            TASKS_PER_THREAD * num_threads
        }
        _ => 1,
    };
    let tiles_per_task = num_tiles
        .div_ceil(num_tasks)
        .next_multiple_of(MAX_BLOCK_TILES);
    let mut outputs: Vec<Vec<&mut [f32]>> = Vec::new();
    outputs.resize_with(num_tiles.div_ceil(tiles_per_task), || {
        Vec::with_capacity(num_rows)
    });
    for row in y.chunks_exact_mut(out_features) {
        for (output, part) in outputs
            .iter_mut()
            .zip(row.chunks_mut(tiles_per_task * LANES))
        {
            output.push(part);
        }
    }
    let run = |(task, y): (usize, Vec<&mut [f32]>)| {
        let first = task * tiles_per_task;
        run(first..num_tiles.min(first + tiles_per_task), y);
    };
    if outputs.len() == 1 {
        outputs.into_iter().enumerate().for_each(run);
    } else {
        device.install(|| {
            outputs
                .into_par_iter()
                .enumerate()
                .with_max_len(1)
                .for_each(run);
        });
    }
}
