//! Rows of the embedding table, widened to fp32: `y[r] = scale * table[token_ids[r]]`.
//!
//! The table is a [`PackedBf16`], so that a tied LM head and the embedding share one copy of the weights, on CUDA too:
//! there rows are picked out of the order in which the matmul streams them. A scale of 1 changes no bit.

use super::bf16_matmul::PackedBf16;
use super::launcher::Launcher;
use super::vectors::for_each_row;
use super::{Kernel, check_len, check_size};
use crate::device::cuda::{CudaDevice, Shape};
use crate::device::{Buffer, HostDevice, Staged};
use crate::error::KernelError;

/// Arguments of [`EmbedRows`].
pub struct EmbedRowsArgs<'a> {
    /// Embedding table `[vocab_size, hidden_size]`.
    pub table: &'a PackedBf16,
    /// One id per row, each below the vocabulary size.
    pub token_ids: &'a Staged<u32>,
    /// Factor on every value.
    pub scale: f32,
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
        match args
            .token_ids
            .values()
            .iter()
            .find(|&&id| id as usize >= bound)
        {
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
            args.table
                .unpack_row(args.token_ids.values()[row] as usize, y);
            if args.scale != 1.0 {
                y.iter_mut().for_each(|y| *y *= args.scale);
            }
        });
    }

    fn cuda(device: &CudaDevice, args: EmbedRowsArgs<'_>) -> Result<(), KernelError> {
        let launcher = Launcher::of::<Self>(device);
        let (num_rows, width) = (args.token_ids.len(), args.table.in_features());
        if num_rows == 0 {
            return Ok(());
        }
        let params = EmbedRowsParams {
            slices: launcher.matrix("table", args.table)?,
            token_ids: launcher.list("token_ids", args.token_ids)?,
            y: launcher.buffer("y", args.y)?,
            num_rows: num_rows as u32,
            width: width as u32,
            scale: args.scale,
        };
        let num_blocks = (num_rows * width.div_ceil(4)).div_ceil(BLOCK_THREADS);
        let shape = Shape::of_blocks(num_blocks, BLOCK_THREADS);
        // SAFETY: `params` mirrors the kernel's; `check` saw that `y` holds the rows and the table all ids.
        unsafe { launcher.run("embed_rows", shape, &params) }
    }
}

const BLOCK_THREADS: usize = 256;

/// `EmbedRowsParams` of `embed_rows.cu`.
#[repr(C)]
#[derive(Clone, Copy)]
struct EmbedRowsParams {
    slices: u64,
    token_ids: u64,
    y: u64,
    num_rows: u32,
    width: u32,
    scale: f32,
}
