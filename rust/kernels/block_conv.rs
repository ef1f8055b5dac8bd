//! Dynamic causal convolution over the rows of a draft block, channel by channel.
//!
//! `y[i, c] = sum over taps t <= i of (base[side, t, c] + delta[i, side, t, c / group_size]) * x[i - t, c]` for row i
//! of a block: a base kernel per channel plus a kernel predicted per row and channel group. Rows before the block count
//! as zero, so nothing crosses from one block to another. Rows are packed position-major (`row = i * num_blocks + b`),
//! which makes the row t positions back `row - t * num_blocks`. Taps are added in ascending order, fused.

use super::bf16_matmul::Epilogue;
use super::launcher::Launcher;
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
    /// Result `[block_size, blocks, width]`.
    pub y: &'a mut Buffer<f32>,
    /// Store or add.
    pub epilogue: Epilogue,
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
        check_len(name, "y", args.y.len(), args.num_rows * args.width)
    }

    fn host(device: &HostDevice, args: BlockConvArgs<'_>) {
        let (width, num_taps) = (args.width, args.kernel_size);
        let num_groups = width / args.group_size;
        let side = args.side as usize;
        let base = &args.base.host()[side * num_taps * width..][..num_taps * width];
        let y = &mut args.y.host_mut()[..args.num_rows * width];
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
                epilogue: args.epilogue,
            });
        });
    }

    fn cuda(device: &CudaDevice, args: BlockConvArgs<'_>) -> Result<(), KernelError> {
        let launcher = Launcher::of::<Self>(device);
        let params = BlockConvParams {
            x: launcher.buffer("x", args.x)?,
            delta: launcher.buffer("delta", args.delta)?,
            base: launcher.buffer("base", args.base)?,
            y: launcher.buffer("y", args.y)?,
            num_rows: args.num_rows as u32,
            num_blocks: args.num_blocks as u32,
            width: args.width as u32,
            kernel_size: args.kernel_size as u32,
            group_size: args.group_size as u32,
            side: args.side as u32,
            adds_to_output: u32::from(args.epilogue == Epilogue::AddToOutput),
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
    y: u64,
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
    epilogue: Epilogue,
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
                let sum = match self.epilogue {
                    Epilogue::Store => sum,
                    Epilogue::AddToOutput => load::<L>(y).add(sum),
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
