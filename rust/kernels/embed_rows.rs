//! Rows of the embedding table, widened to fp32: `y[r] = table[token_ids[r]]`.
//!
//! The table is a [`PackedBf16`], so that a tied LM head and the embedding share one copy of the weights.

use super::bf16_matmul::PackedBf16;
use super::vectors::for_each_row;
use super::{Kernel, check_len, check_size};
use crate::device::{Buffer, HostDevice};
use crate::error::KernelError;

/// Arguments of [`EmbedRows`].
pub struct EmbedRowsArgs<'a> {
    /// Embedding table `[vocab_size, hidden_size]`.
    pub table: &'a PackedBf16,
    /// One id per row, each below the vocabulary size.
    pub token_ids: &'a [u32],
    /// Result `[token_ids.len(), hidden_size]`.
    pub y: &'a mut Buffer<f32>,
}

/// The kernel; see the module's head for its contract.
pub struct EmbedRows;

impl Kernel for EmbedRows {
    const NAME: &'static str = "embed_rows";
    type Args<'a> = EmbedRowsArgs<'a>;

    fn check(args: &EmbedRowsArgs<'_>) -> Result<(), KernelError> {
        let width = args.table.in_features();
        check_size(Self::NAME, "hidden_size", width, width.max(1))?;
        check_len(Self::NAME, "y", args.y.len(), args.token_ids.len() * width)?;
        let bound = args.table.out_features();
        match args.token_ids.iter().find(|&&id| id as usize >= bound) {
            Some(&id) => Err(KernelError::OutOfRange {
                kernel: Self::NAME,
                argument: "token_ids",
                bound,
                got: id as usize,
            }),
            None => Ok(()),
        }
    }

    fn host(device: &HostDevice, args: EmbedRowsArgs<'_>) {
        let width = args.table.in_features();
        let y = &mut args.y.host_mut()[..args.token_ids.len() * width];
        for_each_row(device, y, width, |row, y| {
            args.table.unpack_row(args.token_ids[row] as usize, y);
        });
    }
}
