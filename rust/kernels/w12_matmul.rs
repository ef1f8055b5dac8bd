//! `y[r, n] = sum_k x[r, k] * w[n, k]` for W12 weights: the bits of `bf16_matmul` on the weights they stand for.
//!
//! A run of columns of a few tiles is decoded once into a buffer in the first-level cache, exact BF16 values two to a
//! word; escapes are written over their junk codes there; then all rows multiply what lies in the buffer. Values, chains
//! ([`K_BLOCK`] fused multiply-adds over ascending k from zero) and the order of block sums are those of `bf16_matmul`,
//! for every row count. Nothing is rescaled: the channel's base is added to the exponent fields while decoding, so tiny
//! activations whose products would turn subnormal under a scale keep their bits too.
//!
//! [`WeightView::Q`] multiplies by the 8-bit view with the same code.

use std::iter::repeat;
use std::ops::Range;

use super::bf16_matmul::{Epilogue, K_BLOCK, Product};
use super::channel_tasks::for_each_channel_task;
use super::matmul_rows::MatmulInput;
pub(crate) use super::packed_w12::EscapedWeight;
use super::packed_w12::{LaneWords, PIECE_COLUMNS};
pub use super::packed_w12::{PackedW12, WeightView};
use super::row_format::RowFormat;
use super::simd::{self, Isa, LANES, Lanes, Task, Words};
use super::skinny_matmul::{SkinnyMatmul, SkinnyProduct};
use super::{Kernel, check_len, check_size};
use crate::device::HostDevice;
use crate::device::cuda::CudaDevice;
use crate::error::KernelError;

/// Arguments of [`W12Matmul`].
pub struct W12MatmulArgs<'a> {
    /// Activations `[num_rows, in_features]`.
    pub x: MatmulInput<'a>,
    /// Rows to multiply.
    pub num_rows: usize,
    /// Matrices of one K, each with its own result; which of them are multiplied together shows in none.
    pub products: Vec<Product<'a, PackedW12>>,
    /// Store or add.
    pub epilogue: Epilogue,
    /// Exact weights or their 8-bit view.
    pub view: WeightView,
}

/// The kernel; see the module's head for its contract.
pub struct W12Matmul;

impl Kernel for W12Matmul {
    const NAME: &'static str = "w12_matmul";
    type Args<'a> = W12MatmulArgs<'a>;

    fn check(args: &W12MatmulArgs<'_>) -> Result<(), KernelError> {
        let k = args.products.first().map_or(0, |p| p.weight.in_features());
        for product in &args.products {
            let (n, own_k) = (product.weight.out_features(), product.weight.in_features());
            check_size(Self::NAME, "out_features", n, n.max(1))?;
            check_size(Self::NAME, "in_features", own_k, k.max(1))?;
            if args.view == WeightView::Exact && !product.weight.is_exact() {
                return Err(KernelError::QViewOnly { kernel: Self::NAME });
            }
            check_len(Self::NAME, "y", product.y.len(), args.num_rows * n)?;
        }
        args.x.check(Self::NAME, args.num_rows, k)
    }

    fn host(device: &HostDevice, args: W12MatmulArgs<'_>) {
        multiply(device, simd::isa(), args);
    }

    fn cuda(device: &CudaDevice, args: W12MatmulArgs<'_>) -> Result<(), KernelError> {
        let products = args
            .products
            .iter()
            .map(|product| SkinnyProduct::new(Self::NAME, product.weight.cuda.as_ref(), product.y));
        let matmul = SkinnyMatmul {
            kernel: Self::NAME,
            products: &products.collect::<Result<Vec<_>, _>>()?,
            view: args.view,
            rows: RowFormat::Bf16,
            num_rows: args.num_rows,
            epilogue: args.epilogue,
        };
        matmul.run(device, args.x)
    }
}

/// Decoded columns, summed over the tiles of a group, that the buffer holds: 16 KiB of weights.
const BUFFER_COLUMNS: usize = 512;
/// Rows that share one decoding of a run of columns; their sums wait in [`Sums`].
const PANEL_ROWS: usize = 64;
/// Sums of a panel, `[row][tile of the group][lane]`. Two tiles is the most that a full panel takes at once.
type Sums = [[f32; LANES]; 2 * PANEL_ROWS];

/// Cuts the output channels into tasks and runs them. A task owns its channels of every row.
fn multiply(device: &HostDevice, isa: Isa, args: W12MatmulArgs<'_>) {
    for Product { weight, y } in args.products {
        let (n, k) = (weight.out_features(), weight.in_features());
        let x = &args.x.host()[..args.num_rows * k];
        let y = &mut y.host_mut()[..args.num_rows * n];
        for_each_channel_task(device, y, n, k, |tiles, y| {
            simd::dispatch_on(
                isa,
                TilesTask {
                    x,
                    weight,
                    tiles,
                    y,
                    epilogue: args.epilogue,
                    view: args.view,
                },
            );
        });
    }
}

/// All rows times a run of tiles.
struct TilesTask<'a> {
    x: &'a [f32],
    weight: &'a PackedW12,
    tiles: Range<usize>,
    /// These tiles' channels of every row.
    y: Vec<&'a mut [f32]>,
    epilogue: Epilogue,
    view: WeightView,
}

/// What a task works in: decoded weights and unfinished sums.
#[repr(align(64))]
struct Workspace {
    pairs: [LaneWords; BUFFER_COLUMNS / 2],
    /// Chains of the block of K that is under way.
    chains: Sums,
    /// Sums of finished blocks.
    sums: Sums,
}

impl Task for TilesTask<'_> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(mut self) {
        let mut space = Workspace {
            pairs: [[0; LANES]; BUFFER_COLUMNS / 2],
            chains: [[0.0; LANES]; 2 * PANEL_ROWS],
            sums: [[0.0; LANES]; 2 * PANEL_ROWS],
        };
        for first_row in (0..self.y.len()).step_by(PANEL_ROWS) {
            let num_rows = (self.y.len() - first_row).min(PANEL_ROWS);
            let rows = first_row..first_row + num_rows;
            // Blocks as large as the registers hold: tiles, then the row groups to choose from, largest first.
            match (L::NUM_REGISTERS >= 32, num_rows) {
                (true, 1) => self.panel::<L, 8, 1, 1, 1>(rows, &mut space),
                (true, 2) => self.panel::<L, 8, 2, 2, 2>(rows, &mut space),
                (true, 3..=4) => self.panel::<L, 4, 4, 4, 4>(rows, &mut space),
                (true, _) => self.panel::<L, 2, 12, 8, 4>(rows, &mut space),
                (false, 1) => self.panel::<L, 4, 1, 1, 1>(rows, &mut space),
                (false, 2) => self.panel::<L, 2, 2, 2, 2>(rows, &mut space),
                (false, _) => self.panel::<L, 1, 6, 4, 2>(rows, &mut space),
            }
        }
    }
}

impl TilesTask<'_> {
    /// Rows `rows`, `T` tiles at a time.
    #[inline(always)]
    fn panel<L: Lanes, const T: usize, const R0: usize, const R1: usize, const R2: usize>(
        &mut self,
        rows: Range<usize>,
        space: &mut Workspace,
    ) {
        const { assert!(BUFFER_COLUMNS / T >= PIECE_COLUMNS) };
        let run_len = (BUFFER_COLUMNS / T).min(K_BLOCK);
        let k = self.weight.in_features();
        for first_tile in self.tiles.clone().step_by(T) {
            let num_tiles = T.min(self.tiles.end - first_tile);
            let used = rows.len().next_multiple_of(R2) * T;
            space.sums[..used].fill([0.0; LANES]);
            for first_k in (0..k).step_by(run_len) {
                let len = run_len.min(k - first_k);
                for tile in 0..num_tiles {
                    let first_piece = first_k / PIECE_COLUMNS;
                    let pieces = first_piece..first_piece + len.div_ceil(PIECE_COLUMNS);
                    let pairs = &mut space.pairs[tile * run_len / 2..][..run_len / 2];
                    self.weight
                        .decode::<L>(self.view, first_tile + tile, pieces, pairs);
                }
                if first_k % K_BLOCK == 0 {
                    space.chains[..used].fill([0.0; LANES]);
                }
                let run = DecodedRun {
                    x: self.x,
                    in_features: k,
                    first_k,
                    len,
                    pairs: &space.pairs,
                    stride: run_len / 2,
                    num_tiles,
                };
                let mut row = 0;
                while row < rows.len() {
                    let left = rows.start + row..rows.end;
                    let chains = &mut space.chains[row * T..];
                    row += match left.len() {
                        n if n > R1 || R0 == R2 => run.extend::<L, R0, T>(left, chains),
                        n if n > R2 => run.extend::<L, R1, T>(left, chains),
                        _ => run.extend::<L, R2, T>(left, chains),
                    };
                }
                if (first_k + len).is_multiple_of(K_BLOCK) || first_k + len == k {
                    for (sum, chain) in space.sums[..used].iter_mut().zip(&space.chains) {
                        L::load(sum).add(L::load(chain)).store(sum);
                    }
                }
            }
            self.finish::<T>(rows.clone(), first_tile, &space.sums);
        }
    }

    /// Hands the sums of a group of `T` tiles to the output.
    #[inline(always)]
    fn finish<const T: usize>(&mut self, rows: Range<usize>, first_tile: usize, sums: &Sums) {
        let first = (first_tile - self.tiles.start) * LANES;
        for (y, sums) in self.y[rows].iter_mut().zip(sums.chunks_exact(T)) {
            let end = y.len().min(first + T * LANES);
            for (y, sum) in y[first..end].iter_mut().zip(sums.as_flattened()) {
                *y = match self.epilogue {
                    Epilogue::Store => *sum,
                    Epilogue::AddToOutput => *y + sum,
                };
            }
        }
    }
}

/// A decoded run of columns of a group of tiles.
struct DecodedRun<'a> {
    x: &'a [f32],
    in_features: usize,
    first_k: usize,
    len: usize,
    /// Pairs of columns of each tile, `stride` apart.
    pairs: &'a [LaneWords],
    stride: usize,
    num_tiles: usize,
}

impl DecodedRun<'_> {
    /// Continues the chains `[R][T]` of the first `R` of `rows` over the run; returns `R`. Where fewer rows or tiles are
    /// left the last one is repeated: no chain sees its neighbours.
    #[inline(always)]
    fn extend<L: Lanes, const R: usize, const T: usize>(
        &self,
        rows: Range<usize>,
        chains: &mut [[f32; LANES]],
    ) -> usize {
        let mut x = [&self.x[..0]; R];
        for (x, row) in x.iter_mut().zip(rows.clone().chain(repeat(rows.end - 1))) {
            *x = &self.x[row * self.in_features + self.first_k..][..self.len];
        }
        let mut pairs = [&self.pairs[..0]; T];
        for (t, pairs) in pairs.iter_mut().enumerate() {
            let tile = t.min(self.num_tiles - 1);
            *pairs = &self.pairs[tile * self.stride..][..self.len.div_ceil(2)];
        }
        let chains = &mut chains[..R * T];
        let mut acc = [[L::splat(0.0); T]; R];
        for (acc, chain) in acc.as_flattened_mut().iter_mut().zip(&*chains) {
            *acc = L::load(chain);
        }
        let high = L::Words::splat(0xFFFF_0000);
        for pair in 0..self.len / 2 {
            let mut w = [L::splat(0.0); T];
            for t in 0..T {
                w[t] = L::from_words(L::Words::load(&pairs[t][pair]).shift_left::<16>());
            }
            for r in 0..R {
                let x = L::splat(x[r][2 * pair]);
                for t in 0..T {
                    acc[r][t] = w[t].mul_add(x, acc[r][t]);
                }
            }
            for t in 0..T {
                w[t] = L::from_words(L::Words::load(&pairs[t][pair]).and(high));
            }
            for r in 0..R {
                let x = L::splat(x[r][2 * pair + 1]);
                for t in 0..T {
                    acc[r][t] = w[t].mul_add(x, acc[r][t]);
                }
            }
        }
        if self.len % 2 == 1 {
            let pair = self.len / 2;
            for r in 0..R {
                let x = L::splat(x[r][2 * pair]);
                for t in 0..T {
                    let w = L::from_words(L::Words::load(&pairs[t][pair]).shift_left::<16>());
                    acc[r][t] = w.mul_add(x, acc[r][t]);
                }
            }
        }
        for (acc, chain) in acc.as_flattened().iter().zip(chains) {
            acc.store(chain);
        }
        R
    }
}

#[cfg(test)]
mod tests;
