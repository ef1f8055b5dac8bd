//! Dynamic causal convolution over the rows of a draft block, channel by channel.
//!
//! `y[i, c] = sum over taps t <= i of (base[side, t, c] + delta[i, side, t, c / group_size]) * x[i - t, c]` for row i
//! of a block: a base kernel per channel plus a kernel predicted per row and channel group. Rows before the block count
//! as zero, so nothing crosses from one block to another. Rows are packed position-major (`row = i * num_blocks + b`),
//! which makes the row t positions back `row - t * num_blocks`. Taps are added in ascending order, fused.

use super::launcher::Launcher;
use super::matmul_rows::{CudaRows, MatmulRows, RowsOutput};
use super::simd::{self, LANES, Lanes, Task};
use super::vectors::for_each_row;
use super::{Kernel, check_len, check_size};
use crate::device::cuda::{CudaDevice, Shape};
use crate::device::{Buffer, HostDevice};
use crate::error::KernelError;

/// Which of a sublayer's two convolutions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ConvSide {
    /// On the sublayer's input.
    Input,
    /// On the sublayer's output.
    Output,
}

/// What becomes of a result `[block_size, blocks, width]`.
#[derive(Debug)]
pub enum ConvOutput<'a> {
    /// `y = sum`.
    Store(RowsOutput<'a>),
    /// `y = y + sum` (residual stream).
    AddTo(&'a mut Buffer<f32>),
}

impl<'a> From<&'a mut Buffer<f32>> for ConvOutput<'a> {
    fn from(values: &'a mut Buffer<f32>) -> Self {
        Self::Store(values.into())
    }
}

impl<'a> From<&'a mut MatmulRows> for ConvOutput<'a> {
    fn from(rows: &'a mut MatmulRows) -> Self {
        Self::Store(rows.into())
    }
}

impl<'a> ConvOutput<'a> {
    /// Where results go, and whether they are added.
    fn parts(self) -> (RowsOutput<'a>, bool) {
        match self {
            Self::Store(y) => (y, false),
            Self::AddTo(y) => (y.into(), true),
        }
    }
}

/// Arguments of [`BlockConv`].
pub struct BlockConvArgs<'a> {
    /// Source `[block_size, blocks, width]`.
    pub x: &'a Buffer<f32>,
    /// Predicted kernels `[block_size, blocks, 2 sides, kernel_size, width / group_size]`.
    pub delta: &'a Buffer<f32>,
    /// Base kernels `[2 sides, kernel_size, width]`.
    pub base: &'a Buffer<f32>,
    /// Which half of `delta` and `base`.
    pub side: ConvSide,
    /// Rows of all blocks; a multiple of `num_blocks`.
    pub num_rows: usize,
    /// Blocks packed side by side.
    pub num_blocks: usize,
    /// Channels.
    pub width: usize,
    /// Taps, the row's own included.
    pub kernel_size: usize,
    /// Channels that share a predicted kernel.
    pub group_size: usize,
    /// Takes the result.
    pub y: ConvOutput<'a>,
}

/// The kernel; see the module's head for its contract.
pub struct BlockConv;

impl Kernel for BlockConv {
    const NAME: &'static str = "block_conv";
    type Args<'a> = BlockConvArgs<'a>;

    fn check(args: &BlockConvArgs<'_>) -> Result<(), KernelError> {
        let name = Self::NAME;
        for (argument, size) in [
            ("width", args.width),
            ("kernel_size", args.kernel_size),
            ("group_size", args.group_size),
            ("num_blocks", args.num_blocks),
        ] {
            check_size(name, argument, size, size.max(1))?;
        }
        let num_groups = args.width / args.group_size;
        check_size(name, "width", args.width, num_groups * args.group_size)?;
        let block_size = args.num_rows / args.num_blocks;
        check_size(
            name,
            "num_rows",
            args.num_rows,
            block_size * args.num_blocks,
        )?;
        let kernels = 2 * args.kernel_size;
        check_len(name, "x", args.x.len(), args.num_rows * args.width)?;
        let delta_len = args.num_rows * kernels * num_groups;
        check_len(name, "delta", args.delta.len(), delta_len)?;
        check_len(name, "base", args.base.len(), kernels * args.width)?;
        match &args.y {
            ConvOutput::Store(y) => y.check(name, args.num_rows, args.width),
            ConvOutput::AddTo(y) => check_len(name, "y", y.len(), args.num_rows * args.width),
        }
    }

    fn host(device: &HostDevice, args: BlockConvArgs<'_>) {
        let (width, num_taps) = (args.width, args.kernel_size);
        let num_groups = width / args.group_size;
        let side = args.side as usize;
        let base = &args.base.host()[side * num_taps * width..][..num_taps * width];
        let (mut y, adds_to_output) = args.y.parts();
        let y = &mut y.host_mut()[..args.num_rows * width];
        for_each_row(device, y, width, |row, y| {
            let delta = &args.delta.host()[(2 * row + side) * num_taps * num_groups..];
            simd::dispatch(RowTask {
                taps: (0..num_taps)
                    .map_while(|tap| {
                        let source = row.checked_sub(tap * args.num_blocks)?;
                        Some(Tap {
                            x: &args.x.host()[source * width..][..width],
                            base: &base[tap * width..][..width],
                            delta: &delta[tap * num_groups..][..num_groups],
                        })
                    })
                    .collect(),
                group_size: args.group_size,
                y,
                adds_to_output,
            });
        });
    }

    fn cuda(device: &CudaDevice, args: BlockConvArgs<'_>) -> Result<(), KernelError> {
        let launcher = Launcher::of::<Self>(device);
        let (y, adds_to_output) = args.y.parts();
        let params = BlockConvParams {
            x: launcher.buffer("x", args.x)?,
            delta: launcher.buffer("delta", args.delta)?,
            base: launcher.buffer("base", args.base)?,
            y: y.on_cuda(&launcher, args.num_rows, args.width)?,
            num_rows: args.num_rows as u32,
            num_blocks: args.num_blocks as u32,
            width: args.width as u32,
            kernel_size: args.kernel_size as u32,
            group_size: args.group_size as u32,
            side: args.side as u32,
            adds_to_output: u32::from(adds_to_output),
        };
        let shape = Shape::of_blocks((args.num_rows * args.width).div_ceil(256), 256);
        // SAFETY: `params` mirrors the kernel's; `check` saw that all buffers are as long as the shape asks.
        unsafe { launcher.run("block_conv", shape, &params) }
    }
}

/// `BlockConvParams` of `block_conv.cu`.
#[repr(C)]
#[derive(Clone, Copy)]
struct BlockConvParams {
    x: u64,
    delta: u64,
    base: u64,
    y: CudaRows,
    num_rows: u32,
    num_blocks: u32,
    width: u32,
    kernel_size: u32,
    group_size: u32,
    side: u32,
    adds_to_output: u32,
}

struct Tap<'a> {
    x: &'a [f32],
    base: &'a [f32],
    delta: &'a [f32],
}

/// One row.
struct RowTask<'a> {
    taps: Vec<Tap<'a>>,
    group_size: usize,
    y: &'a mut [f32],
    adds_to_output: bool,
}

impl Task for RowTask<'_> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(self) {
        for (group, y) in self.y.chunks_exact_mut(self.group_size).enumerate() {
            let mut start = group * self.group_size;
            for y in y.chunks_mut(LANES) {
                let channels = start..start + y.len();
                let mut sum = L::splat(0.0);
                for tap in &self.taps {
                    let base = load::<L>(&tap.base[channels.clone()]);
                    let weight = base.add(L::splat(tap.delta[group]));
                    sum = weight.mul_add(load(&tap.x[channels.clone()]), sum);
                }
                let sum = match self.adds_to_output {
                    true => load::<L>(y).add(sum),
                    false => sum,
                };
                match y.len() {
                    LANES => sum.store(y),
                    _ => sum.store_partial(y),
                }
                start = channels.end;
            }
        }
    }
}

/// At most 16 values, missing lanes zero.
#[inline(always)]
fn load<L: Lanes>(values: &[f32]) -> L {
    match values.len() {
        LANES => L::load(values),
        _ => L::load_partial(values),
    }
}
