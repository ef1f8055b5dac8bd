//! `y[r, n] = sum_k x[r, k] * w[n, k]`: fp32 activations times BF16 weights, fp32 accumulation.
//!
//! One order for every row count: K is cut into blocks of [`K_BLOCK`]; inside a block one fused multiply-add chain runs
//! over ascending k from zero, and block sums are added in ascending order. Lanes run over output channels, so nothing
//! is ever summed across lanes, and the same code serves 1 row, 64 rows and prompts.
//!
//! Rows and tiles of channels are multiplied in register blocks, so that a widened weight vector serves several rows
//! and the chains of several tiles hide each other's latency. A block only groups chains; it changes none of them.

mod tile_pairs;

use std::iter::repeat;
use std::ops::Range;

use half::bf16;

use super::channel_tasks::for_each_channel_task;
use super::matmul_rows::MatmulInput;
pub use super::packed_bf16::PackedBf16;
use super::row_format::RowFormat;
use super::simd::{self, Isa, LANES, Lanes, Task};
use super::skinny_matmul::{SkinnyMatmul, SkinnyProduct};
use super::w12_matmul::WeightView;
use super::{Kernel, check_len, check_size};
use crate::device::cuda::CudaDevice;
use crate::device::{Buffer, HostDevice};
use crate::error::KernelError;
pub(super) use tile_pairs::{TilePair, multiply_tile_pairs};

/// Length of one multiply-add chain along K.
pub const K_BLOCK: usize = 256;

/// What happens to a finished sum.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Epilogue {
    /// `y = sum`.
    Store,
    /// `y = y + sum` (residual stream).
    AddToOutput,
}

/// A matrix and its result.
pub struct Product<'a, W> {
    /// Weights `[out_features, in_features]`.
    pub weight: &'a W,
    /// Result `[num_rows, out_features]`.
    pub y: &'a mut Buffer<f32>,
}

/// Arguments of [`Bf16Matmul`].
pub struct Bf16MatmulArgs<'a> {
    /// Activations `[num_rows, in_features]`.
    pub x: MatmulInput<'a>,
    /// Rows to multiply.
    pub num_rows: usize,
    /// Matrices of one K, each with its own result; which of them are multiplied together shows in none.
    pub products: Vec<Product<'a, PackedBf16>>,
    /// Store or add.
    pub epilogue: Epilogue,
}

/// The kernel; see the module's head for its contract.
pub struct Bf16Matmul;

impl Kernel for Bf16Matmul {
    const NAME: &'static str = "bf16_matmul";
    type Args<'a> = Bf16MatmulArgs<'a>;

    fn check(args: &Bf16MatmulArgs<'_>) -> Result<(), KernelError> {
        let k = args.products.first().map_or(0, |p| p.weight.in_features());
        for product in &args.products {
            let (n, own_k) = (product.weight.out_features(), product.weight.in_features());
            check_size(Self::NAME, "out_features", n, n.max(1))?;
            check_size(Self::NAME, "in_features", own_k, k.max(1))?;
            check_len(Self::NAME, "y", product.y.len(), args.num_rows * n)?;
        }
        args.x.check(Self::NAME, args.num_rows, k)
    }

    fn host(device: &HostDevice, args: Bf16MatmulArgs<'_>) {
        multiply(device, simd::isa(), args);
    }

    fn cuda(device: &CudaDevice, args: Bf16MatmulArgs<'_>) -> Result<(), KernelError> {
        let products = args
            .products
            .iter()
            .map(|product| SkinnyProduct::new(Self::NAME, product.weight.cuda.as_ref(), product.y));
        let matmul = SkinnyMatmul {
            kernel: Self::NAME,
            products: &products.collect::<Result<Vec<_>, _>>()?,
            view: WeightView::Exact,
            rows: RowFormat::Bf16,
            num_rows: args.num_rows,
            epilogue: args.epilogue,
        };
        matmul.run(device, args.x)
    }
}

/// Rows that share one pass over a group of tiles; their block sums wait in [`PanelSums`].
const PANEL_ROWS: usize = 64;
/// Sums of a panel, `[row][tile of the group][lane]`. Two tiles is the most that a full panel takes at once.
type PanelSums = [[f32; LANES]; 2 * PANEL_ROWS];

/// Weights of the tiles of a task, a block of K at a time: as they lie, or decoded first.
pub(super) trait TileWeights: Copy + Send {
    /// What decoding works in.
    type Scratch;

    /// A scratch, once a task.
    fn scratch(&self) -> Self::Scratch;

    /// Columns `first_k..first_k + len` of `tiles`, counted from the task's first: `[tile][column][lane]`, and the number
    /// of columns from one tile to the next.
    fn block<'s>(
        &'s self,
        tiles: Range<usize>,
        first_k: usize,
        len: usize,
        scratch: &'s mut Self::Scratch,
    ) -> (&'s [[bf16; LANES]], usize);
}

/// BF16 tiles, `[tile][in_features][lane]`.
#[derive(Clone, Copy)]
struct PlainTiles<'a> {
    columns: &'a [[bf16; LANES]],
    in_features: usize,
}

impl TileWeights for PlainTiles<'_> {
    type Scratch = ();

    #[inline(always)]
    fn scratch(&self) {}

    #[inline(always)]
    fn block<'s>(
        &'s self,
        tiles: Range<usize>,
        first_k: usize,
        _len: usize,
        _scratch: &'s mut (),
    ) -> (&'s [[bf16; LANES]], usize) {
        let start = tiles.start * self.in_features + first_k;
        (&self.columns[start..], self.in_features)
    }
}

/// Cuts the output channels into tasks and runs them. A task owns its channels of every row.
fn multiply(device: &HostDevice, isa: Isa, args: Bf16MatmulArgs<'_>) {
    for Product { weight, y } in args.products {
        let (n, k) = (weight.out_features(), weight.in_features());
        let x = &args.x.host()[..args.num_rows * k];
        let y = &mut y.host_mut()[..args.num_rows * n];
        for_each_channel_task(device, y, n, k, |tiles, y| {
            simd::dispatch_on(
                isa,
                TilesTask {
                    x,
                    weight: PlainTiles {
                        columns: &weight.tiles().as_chunks().0[tiles.start * k..tiles.end * k],
                        in_features: k,
                    },
                    num_tiles: tiles.len(),
                    y,
                    in_features: k,
                    epilogue: args.epilogue,
                },
            );
        });
    }
}

/// All rows times a run of tiles.
pub(super) struct TilesTask<'a, W> {
    pub(super) x: &'a [f32],
    pub(super) weight: W,
    pub(super) num_tiles: usize,
    /// These tiles' channels of every row.
    pub(super) y: Vec<&'a mut [f32]>,
    pub(super) in_features: usize,
    pub(super) epilogue: Epilogue,
}

impl<W: TileWeights> Task for TilesTask<'_, W> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(mut self) {
        let mut space = Workspace {
            sums: [[0.0; LANES]; 2 * PANEL_ROWS],
            scratch: self.weight.scratch(),
        };
        for first_row in (0..self.y.len()).step_by(PANEL_ROWS) {
            let num_rows = (self.y.len() - first_row).min(PANEL_ROWS);
            // Blocks as large as the registers hold: tiles, then the row groups to choose from, largest first.
            match (L::NUM_REGISTERS >= 32, num_rows) {
                (true, 1) => self.panel::<L, 8, 1, 1, 1>(first_row, num_rows, &mut space),
                (true, 2) => self.panel::<L, 8, 2, 2, 2>(first_row, num_rows, &mut space),
                (true, 3..=4) => self.panel::<L, 4, 4, 4, 4>(first_row, num_rows, &mut space),
                (true, _) => self.panel::<L, 2, 12, 8, 4>(first_row, num_rows, &mut space),
                (false, 1) => self.panel::<L, 4, 1, 1, 1>(first_row, num_rows, &mut space),
                (false, 2) => self.panel::<L, 2, 2, 2, 2>(first_row, num_rows, &mut space),
                (false, _) => self.panel::<L, 1, 6, 4, 2>(first_row, num_rows, &mut space),
            }
        }
    }
}

/// What a task works in.
struct Workspace<S> {
    sums: PanelSums,
    scratch: S,
}

impl<W: TileWeights> TilesTask<'_, W> {
    /// Rows `first_row..first_row + num_rows`, `T` tiles at a time. Every K block of the group's weights is read once
    /// from memory and serves all row groups from the first-level cache.
    #[inline(always)]
    fn panel<L: Lanes, const T: usize, const R0: usize, const R1: usize, const R2: usize>(
        &mut self,
        first_row: usize,
        num_rows: usize,
        Workspace { sums, scratch }: &mut Workspace<W::Scratch>,
    ) {
        for first_tile in (0..self.num_tiles).step_by(T) {
            let tiles = first_tile..self.num_tiles.min(first_tile + T);
            sums[..(num_rows.next_multiple_of(R2)) * T].fill([0.0; LANES]);
            for first_k in (0..self.in_features).step_by(K_BLOCK) {
                let len = K_BLOCK.min(self.in_features - first_k);
                let (weight, tile_stride) = self.weight.block(tiles.clone(), first_k, len, scratch);
                let block = KBlock {
                    x: self.x,
                    weight,
                    tile_stride,
                    in_features: self.in_features,
                    first_k,
                    len,
                };
                let mut row = 0;
                while row < num_rows {
                    let rows = first_row + row..first_row + num_rows;
                    let sums = &mut sums[row * T..];
                    row += match rows.len() {
                        left if left > R1 || R0 == R2 => {
                            block.add_to::<L, R0, T>(rows, tiles.len(), sums)
                        }
                        left if left > R2 => block.add_to::<L, R1, T>(rows, tiles.len(), sums),
                        _ => block.add_to::<L, R2, T>(rows, tiles.len(), sums),
                    };
                }
            }
            for (y, sums) in self.y[first_row..][..num_rows]
                .iter_mut()
                .zip(sums.chunks_exact(T))
            {
                let channels = y.len().min((first_tile + T) * LANES);
                let y = &mut y[first_tile * LANES..channels];
                for (y, sum) in y.iter_mut().zip(sums.as_flattened()) {
                    *y = match self.epilogue {
                        Epilogue::Store => *sum,
                        Epilogue::AddToOutput => *y + sum,
                    };
                }
            }
        }
    }
}

/// One block of K of all rows and tiles.
struct KBlock<'a> {
    x: &'a [f32],
    /// The block's columns of the group's first tile, then `tile_stride` columns on, of the next.
    weight: &'a [[bf16; LANES]],
    tile_stride: usize,
    in_features: usize,
    first_k: usize,
    len: usize,
}

impl KBlock<'_> {
    /// Adds the block's chains of the first `R` of `rows` and the `num_tiles`, at most `T`, to `sums`, `[R][T]`; returns `R`.
    /// Where fewer are left the last one is repeated: no chain sees its neighbours, and a set of smaller blocks for
    /// every remainder would cost more than it saves.
    #[inline(always)]
    fn add_to<L: Lanes, const R: usize, const T: usize>(
        &self,
        rows: Range<usize>,
        num_tiles: usize,
        sums: &mut [[f32; LANES]],
    ) -> usize {
        let mut x = [&self.x[..0]; R];
        for (x, row) in x.iter_mut().zip(rows.clone().chain(repeat(rows.end - 1))) {
            *x = &self.x[row * self.in_features + self.first_k..][..self.len];
        }
        let mut weight = [&self.weight[..0]; T];
        for (t, weight) in weight.iter_mut().enumerate() {
            let start = t.min(num_tiles - 1) * self.tile_stride;
            *weight = &self.weight[start..][..self.len];
        }
        let mut acc = [[L::splat(0.0); T]; R];
        for k in 0..self.len {
            let mut w = [L::splat(0.0); T];
            for t in 0..T {
                w[t] = L::load_bf16(&weight[t][k]);
            }
            for r in 0..R {
                let x = L::splat(x[r][k]);
                for t in 0..T {
                    acc[r][t] = w[t].mul_add(x, acc[r][t]);
                }
            }
        }
        for (sum, acc) in sums.iter_mut().zip(acc.as_flattened()) {
            L::load(sum).add(*acc).store(sum);
        }
        R
    }
}

#[cfg(test)]
mod tests;
