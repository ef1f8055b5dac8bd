//! Rows of several taps side by side: `y[i] = [taps[0][rows[i]], taps[1][rows[i]], ...]`.
//!
//! A pass leaves one tap per target layer for all its rows; a drafter's `fc` wants the accepted rows only, the taps of
//! one row concatenated. A plain copy: no bit changes.

use super::vectors::for_each_row;
use super::{Kernel, check_len, check_size};
use crate::device::{Buffer, HostDevice};
use crate::error::KernelError;

/// Arguments of [`GatherTaps`].
pub struct GatherTapsArgs<'a> {
    /// Each `[rows of the pass, width]`.
    pub taps: &'a [Buffer<f32>],
    /// Rows of the pass to take, in the order of the result.
    pub rows: &'a [u32],
    /// Length of a tap's row.
    pub width: usize,
    /// Result `[rows.len(), taps.len() * width]`.
    pub y: &'a mut Buffer<f32>,
}

/// The kernel; see the module's head for its contract.
pub struct GatherTaps;

impl Kernel for GatherTaps {
    const NAME: &'static str = "gather_taps";
    type Args<'a> = GatherTapsArgs<'a>;

    fn check(args: &GatherTapsArgs<'_>) -> Result<(), KernelError> {
        check_size(Self::NAME, "width", args.width, args.width.max(1))?;
        check_size(Self::NAME, "taps", args.taps.len(), args.taps.len().max(1))?;
        let num_rows = args.rows.iter().max().map_or(0, |&row| row as usize + 1);
        for tap in args.taps {
            check_len(Self::NAME, "taps", tap.len(), num_rows * args.width)?;
        }
        let y_len = args.rows.len() * args.taps.len() * args.width;
        check_len(Self::NAME, "y", args.y.len(), y_len)
    }

    fn host(device: &HostDevice, args: GatherTapsArgs<'_>) {
        let (width, row_len) = (args.width, args.taps.len() * args.width);
        let y = &mut args.y.host_mut()[..args.rows.len() * row_len];
        for_each_row(device, y, row_len, |i, y| {
            let start = args.rows[i] as usize * width;
            for (tap, y) in args.taps.iter().zip(y.chunks_exact_mut(width)) {
                y.copy_from_slice(&tap.host()[start..][..width]);
            }
        });
    }
}
