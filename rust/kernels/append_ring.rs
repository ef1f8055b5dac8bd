//! Copies accepted rows from the pass's tail into a slot's ring: row `rows[i]` goes to lane `(first_position + i) % ring`.
//!
//! A plain copy that changes no bit. The recurrent layers' logs and convolution inputs are such rings.

use super::{Kernel, check_len, check_size};
use crate::device::{Buffer, HostDevice};
use crate::error::KernelError;

/// Arguments of [`AppendRing`].
pub struct AppendRingArgs<'a> {
    /// Rows of the pass, `[rows, row_len]`.
    pub tail: &'a Buffer<f32>,
    /// Accepted rows in position order.
    pub rows: &'a [u32],
    /// Position of the first of them.
    pub first_position: usize,
    /// Length of a row.
    pub row_len: usize,
    /// Lanes of a ring.
    pub ring_len: usize,
    /// Which ring.
    pub slot: usize,
    /// Rings `[slots, ring_len, row_len]`.
    pub rings: &'a mut Buffer<f32>,
}

/// The kernel; see the module's head for its contract.
pub struct AppendRing;

impl Kernel for AppendRing {
    const NAME: &'static str = "append_ring";
    type Args<'a> = AppendRingArgs<'a>;

    fn check(args: &AppendRingArgs<'_>) -> Result<(), KernelError> {
        check_size(Self::NAME, "row_len", args.row_len, args.row_len.max(1))?;
        check_size(Self::NAME, "ring_len", args.ring_len, args.ring_len.max(1))?;
        let num_rows = args.rows.iter().max().map_or(0, |&row| row as usize + 1);
        check_len(Self::NAME, "tail", args.tail.len(), num_rows * args.row_len)?;
        let rings_len = (args.slot + 1) * args.ring_len * args.row_len;
        check_len(Self::NAME, "rings", args.rings.len(), rings_len)
    }

    fn host(_device: &HostDevice, args: AppendRingArgs<'_>) {
        let (row_len, ring_len) = (args.row_len, args.ring_len);
        let ring =
            &mut args.rings.host_mut()[args.slot * ring_len * row_len..][..ring_len * row_len];
        for (position, &row) in (args.first_position..).zip(args.rows) {
            ring[position % ring_len * row_len..][..row_len]
                .copy_from_slice(&args.tail.host()[row as usize * row_len..][..row_len]);
        }
    }
}
