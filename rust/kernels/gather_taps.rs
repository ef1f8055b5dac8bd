//! Rows of several taps side by side: `y[i] = [taps[0][rows[i]], taps[1][rows[i]], ...]`.
//!
//! A pass leaves one tap per target layer for all its rows; a drafter's `fc` wants the accepted rows only, the taps of
//! one row concatenated. A plain copy: no bit changes.

use super::launcher::Launcher;
use super::vectors::for_each_row;
use super::{Kernel, check_len, check_size};
use crate::device::cuda::{CudaDevice, Shape};
use crate::device::{Buffer, HostDevice, Staged};
use crate::error::KernelError;

/// Arguments of [`GatherTaps`].
pub struct GatherTapsArgs<'a> {
    /// Each `[rows of the pass, width]`.
    pub taps: &'a [Buffer<f32>],
    /// Rows of the pass to take, in the order of the result.
    pub rows: &'a Staged<u32>,
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
        let rows = args.rows.values().iter();
        let num_rows = rows.max().map_or(0, |&row| row as usize + 1);
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
            let start = args.rows.values()[i] as usize * width;
            for (tap, y) in args.taps.iter().zip(y.chunks_exact_mut(width)) {
                y.copy_from_slice(&tap.host()[start..][..width]);
            }
        });
    }

    fn cuda(device: &CudaDevice, args: GatherTapsArgs<'_>) -> Result<(), KernelError> {
        let launcher = Launcher::of::<Self>(device);
        let num_rows = args.rows.len();
        if num_rows == 0 {
            return Ok(());
        }
        // Rows of whole 16-byte pieces start on such in every buffer.
        let (entry, piece_len) = match args.width.is_multiple_of(4) {
            true => ("gather_taps_16", 4),
            false => ("gather_taps_4", 1),
        };
        let width = args.width / piece_len;
        let (rows, y) = (
            launcher.list("rows", args.rows)?,
            launcher.buffer("y", args.y)?,
        );
        for (i, taps) in args.taps.chunks(MAX_TAPS).enumerate() {
            let mut params = GatherTapsParams {
                taps: [0; MAX_TAPS],
                rows,
                y: y + (i * MAX_TAPS * args.width * size_of::<f32>()) as u64,
                num_rows: num_rows as u32,
                num_taps: taps.len() as u32,
                width: width as u32,
                y_stride: (args.taps.len() * width) as u32,
            };
            for (address, tap) in params.taps.iter_mut().zip(taps) {
                *address = launcher.buffer("taps", tap)?;
            }
            let shape = Shape::of_values(num_rows * taps.len() * width);
            // SAFETY: `params` mirrors the kernel's; `check` saw that every tap holds the rows and `y` all of them.
            unsafe { launcher.run(entry, shape, &params)? };
        }
        Ok(())
    }
}

/// Taps of one launch.
const MAX_TAPS: usize = 16;

/// `GatherTapsParams` of `gather_taps.cu`.
#[repr(C)]
#[derive(Clone, Copy)]
struct GatherTapsParams {
    taps: [u64; MAX_TAPS],
    rows: u64,
    y: u64,
    num_rows: u32,
    num_taps: u32,
    width: u32,
    y_stride: u32,
}
