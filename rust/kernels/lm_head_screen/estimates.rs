//! Every logit as the INT8 copy of the head has it: for drafts, which decide nothing.
//!
//! The estimate of a row's logit is the centre of its interval: the product of the codes, in integers, times the channel's
//! scale and the row's step. So it is a function of the row alone. Channels and rows that are not coded (a NaN, an
//! infinity, nothing but zeros, beyond the range; see the kernel's head) have an estimate of zero: never anything that is
//! no number.

use rayon::prelude::*;

use super::super::simd::bytes;
use super::super::simd::{self, Isa, LANES};
use super::LmHeadScreen;
use super::head::{ScreenedHead, TileBounds};
use super::rows::CodedRow;
use super::scan::{self, TileSums};
use super::scan_launch::{ScanGoal, Scans, Scratch};
use crate::device::cuda::CudaDevice;
use crate::device::{Buffer, HostDevice};
use crate::error::KernelError;
use crate::kernels::{Kernel, check_len};

/// Arguments of [`LogitEstimates`].
pub struct LogitEstimatesArgs<'a> {
    /// Final hidden rows `[num_rows, in_features]`.
    pub x: &'a Buffer<f32>,
    /// Rows to estimate.
    pub num_rows: usize,
    /// INT8 copy of the LM head.
    pub head: &'a ScreenedHead,
    /// Result `[num_rows, vocab_size]`, finite.
    pub logits: &'a mut Buffer<f32>,
}

/// The kernel, a part of [`LmHeadScreen`]'s file; see the module's head.
pub struct LogitEstimates;

impl Kernel for LogitEstimates {
    const NAME: &'static str = LmHeadScreen::NAME;
    type Args<'a> = LogitEstimatesArgs<'a>;

    fn check(args: &LogitEstimatesArgs<'_>) -> Result<(), KernelError> {
        let (name, num_rows) = (Self::NAME, args.num_rows);
        let (n, k) = (args.head.out_features(), args.head.in_features());
        check_len(name, "x", args.x.len(), num_rows * k)?;
        check_len(name, "logits", args.logits.len(), num_rows * n)
    }

    fn host(device: &HostDevice, args: LogitEstimatesArgs<'_>) {
        estimate(device, simd::isa(), args);
    }

    fn cuda(device: &CudaDevice, args: LogitEstimatesArgs<'_>) -> Result<(), KernelError> {
        let LogitEstimatesArgs {
            x,
            num_rows,
            head,
            logits,
        } = args;
        if num_rows == 0 {
            return Ok(());
        }
        let scans = Scans::new(device, head, num_rows)?;
        let mut scratch = Scratch::default();
        let coded = scans.take(&mut scratch);
        // What coding a row notes for survivors.
        let counts = scratch.take(scans.rows() * size_of::<u32>());
        let best = scratch.take(scans.rows() * size_of::<u64>());
        let start = scans.launcher.scratch(scratch.end)?;
        let mut params = scans.params(x, &coded, start)?;
        params.counts = start + counts as u64;
        params.best = start + best as u64;
        params.estimates = scans.launcher.buffer("logits", logits)?;
        for (first, params) in scans.groups(params, num_rows) {
            let written = first * head.out_features() * size_of::<f32>();
            let mut params = params;
            params.estimates += written as u64;
            // SAFETY: `check` saw that `x` and `logits` hold the rows; the scratch holds the rest.
            unsafe { scans.launch(ScanGoal::Estimates, params)? };
        }
        Ok(())
    }
}

pub(super) fn estimate(device: &HostDevice, isa: Isa, args: LogitEstimatesArgs<'_>) {
    let LogitEstimatesArgs {
        x,
        num_rows,
        head,
        logits,
    } = args;
    let (n, k) = (head.out_features(), head.in_features());
    let logits = &mut logits.host_mut()[..num_rows * n];
    let (mut coded, mut estimates) = (Vec::new(), Vec::new());
    let rows = x.host()[..num_rows * k].chunks_exact(k);
    for (x, logits) in rows.zip(logits.chunks_exact_mut(n)) {
        match CodedRow::new(x, head) {
            Some(row) => {
                coded.push(row);
                estimates.push(logits);
            }
            None => logits.fill(0.0),
        }
    }
    if coded.is_empty() {
        return;
    }
    let tiles_per_task = scan::tiles_per_task(device, head, coded.len());
    // The part of every row that a task writes.
    let mut tasks = Vec::new();
    for (row, logits) in estimates.into_iter().enumerate() {
        for (task, part) in logits.chunks_mut(tiles_per_task * LANES).enumerate() {
            if row == 0 {
                tasks.push(Vec::with_capacity(coded.len()));
            }
            tasks[task].push(part);
        }
    }
    let run = |(task, logits): (usize, Vec<&mut [f32]>)| {
        let first = task * tiles_per_task;
        let task = scan::ScanTask {
            head,
            rows: &coded,
            tiles: first..head.channels().len().min(first + tiles_per_task),
            sums: Estimates {
                first_tile: first,
                logits,
            },
        };
        bytes::dispatch_on(isa, task);
    };
    match tasks.len() {
        1 => tasks.into_iter().enumerate().for_each(run),
        _ => device.install(|| {
            tasks
                .into_par_iter()
                .enumerate()
                .with_max_len(1)
                .for_each(run)
        }),
    }
}

/// Estimates of some tiles on their way to the logits.
struct Estimates<'a> {
    first_tile: usize,
    /// Of every row, the logits of the tiles.
    logits: Vec<&'a mut [f32]>,
}

impl TileSums for Estimates<'_> {
    #[inline(always)]
    fn take(
        &mut self,
        (row, coded): (usize, &CodedRow),
        (tile, bounds): (usize, &TileBounds),
        high: &[i32; LANES],
        low: &[i32; LANES],
    ) {
        let bound = coded.bound();
        let mut estimates = [0.0; LANES];
        for lane in 0..LANES {
            estimates[lane] = bound.centre(bounds, lane, (high[lane], low[lane])) as f32;
        }
        let logits = &mut self.logits[row][(tile - self.first_tile) * LANES..];
        // The last tile may be cut short.
        let len = logits.len().min(LANES);
        logits[..len].copy_from_slice(&estimates[..len]);
    }
}
