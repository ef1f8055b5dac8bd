//! Rotary position embedding, rotate-half form, in place.
//!
//! Pair `j` of every head is `(x[j], x[j + pair_offset])` and turns by `position * inverse_frequencies[j]`, a product
//! in fp32 as in the published models. Dimensions outside the pairs stay as they are: partial rotary has fewer
//! frequencies than half a head.

use super::launcher::Launcher;
use super::simd::{self, Lanes, Task};
use super::vectors::for_each_row;
use super::{Kernel, check_len, check_size};
use crate::device::cuda::{CudaDevice, Shape};
use crate::device::{Buffer, HostDevice, Staged};
use crate::error::KernelError;

/// Arguments of [`Rope`].
pub struct RopeArgs<'a> {
    /// Queries or keys `[num_rows, num_heads, head_dim]`, turned in place.
    pub x: &'a mut Buffer<f32>,
    /// Heads of a row.
    pub num_heads: usize,
    /// Length of a head.
    pub head_dim: usize,
    /// Position of each row; its length is the number of rows.
    pub positions: &'a Staged<u32>,
    /// One per pair: `rotary_dim / 2` values.
    pub inverse_frequencies: &'a Buffer<f32>,
    /// Distance between the two dimensions of a pair.
    pub pair_offset: usize,
}

/// The kernel; see the module's head for its contract.
pub struct Rope;

impl Kernel for Rope {
    const NAME: &'static str = "rope";
    type Args<'a> = RopeArgs<'a>;

    fn check(args: &RopeArgs<'_>) -> Result<(), KernelError> {
        let num_pairs = args.inverse_frequencies.len();
        check_size(
            Self::NAME,
            "num_heads",
            args.num_heads,
            args.num_heads.max(1),
        )?;
        check_size(Self::NAME, "head_dim", args.head_dim, args.head_dim.max(1))?;
        // A shorter distance would make pairs overlap, a longer one would leave the head.
        check_len(Self::NAME, "pair_offset", args.pair_offset, num_pairs)?;
        check_len(
            Self::NAME,
            "head_dim",
            args.head_dim,
            args.pair_offset + num_pairs,
        )?;
        let row_len = args.num_heads * args.head_dim;
        check_len(
            Self::NAME,
            "x",
            args.x.len(),
            args.positions.len() * row_len,
        )
    }

    fn host(device: &HostDevice, args: RopeArgs<'_>) {
        let frequencies = args.inverse_frequencies.host();
        let row_len = args.num_heads * args.head_dim;
        let x = &mut args.x.host_mut()[..args.positions.len() * row_len];
        for_each_row(device, x, row_len, |row, x| {
            let position = args.positions.values()[row] as f32;
            let (sin, cos): (Vec<f32>, Vec<f32>) = frequencies
                .iter()
                .map(|frequency| (position * frequency).sin_cos())
                .unzip();
            simd::dispatch(RowTask {
                x,
                head_dim: args.head_dim,
                pair_offset: args.pair_offset,
                sin: &sin,
                cos: &cos,
            });
        });
    }

    fn cuda(device: &CudaDevice, args: RopeArgs<'_>) -> Result<(), KernelError> {
        let launcher = Launcher::of::<Self>(device);
        let (num_rows, num_pairs) = (args.positions.len(), args.inverse_frequencies.len());
        if num_rows * num_pairs == 0 {
            return Ok(());
        }
        let params = RopeParams {
            x: launcher.buffer("x", args.x)?,
            positions: launcher.list("positions", args.positions)?,
            inverse_frequencies: launcher
                .buffer("inverse_frequencies", args.inverse_frequencies)?,
            num_rows: num_rows as u32,
            num_heads: args.num_heads as u32,
            head_dim: args.head_dim as u32,
            num_pairs: num_pairs as u32,
            pair_offset: args.pair_offset as u32,
        };
        let num_threads = num_rows * args.num_heads * num_pairs;
        let shape = Shape::of_blocks(num_threads.div_ceil(128), 128);
        // SAFETY: `params` mirrors the kernel's; `check` saw that `x` holds the rows and a head all pairs.
        unsafe { launcher.run("rope", shape, &params) }
    }
}

/// `RopeParams` of `rope.cu`.
#[repr(C)]
#[derive(Clone, Copy)]
struct RopeParams {
    x: u64,
    positions: u64,
    inverse_frequencies: u64,
    num_rows: u32,
    num_heads: u32,
    head_dim: u32,
    num_pairs: u32,
    pair_offset: u32,
}

/// All heads of one row.
struct RowTask<'a> {
    x: &'a mut [f32],
    head_dim: usize,
    pair_offset: usize,
    sin: &'a [f32],
    cos: &'a [f32],
}

impl Task for RowTask<'_> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(self) {
        let num_pairs = self.cos.len();
        for head in self.x.chunks_exact_mut(self.head_dim) {
            let (first, second) = head.split_at_mut(self.pair_offset);
            for (((a, b), &sin), &cos) in first[..num_pairs]
                .iter_mut()
                .zip(&mut second[..num_pairs])
                .zip(self.sin)
                .zip(self.cos)
            {
                (*a, *b) = (*a * cos - *b * sin, *b * cos + *a * sin);
            }
        }
    }
}
