//! `y[r, n] = sum_k x[r, k] * w[n, k]` for FP8 weights, in one of two configurations that are chosen when a matrix is
//! loaded, never by the number of rows.
//!
//! - **W8A16** ([`Activations::Whole`]): `w = bf16(code * scale)`, and then the bits of `bf16_matmul` on these weights,
//!   whose panels and order of sums it uses: a block of K is decoded once and serves all rows.
//! - **W8A8** ([`Activations::Quantised`]): each row's activations are rounded to BF16, as which models have them, and
//!   then to E4M3, by groups of 128 columns with a scale of their own (`max |x| / 448`). A group's codes are multiplied by one chain over ascending k from zero; the
//!   chains, times both scales, are added in ascending order.
//!
//! On a GPU W8A16 has the bits of `bf16_matmul` there. W8A8 cuts a group's chain in two, and from compute capability 8.9
//! on multiplies codes as they are, in the precision that tensor cores add E4M3 products with.
//!
//! In both a row's result depends on that row alone.

pub(super) mod launch;
mod quantised;

use std::ops::Range;

use half::bf16;

use super::bf16_matmul::{Epilogue, K_BLOCK, Product, TileWeights, TilesTask};
use super::channel_tasks::for_each_channel_task;
use super::matmul_rows::MatmulInput;
use super::packed_fp8::value_of;
pub use super::packed_fp8::{Fp8Scales, PackedFp8, dequantise};
use super::simd::{self, LANES};
use super::{Kernel, check_len, check_size};
use crate::device::HostDevice;
use crate::device::cuda::CudaDevice;
use crate::error::KernelError;
pub use quantised::GROUP_COLUMNS;

/// What becomes of activations.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Activations {
    /// They are multiplied as they are.
    Whole,
    /// They are rounded to BF16, then to E4M3 by groups of [`GROUP_COLUMNS`].
    Quantised,
}

/// Arguments of [`Fp8Matmul`].
pub struct Fp8MatmulArgs<'a> {
    /// Activations `[num_rows, in_features]`.
    pub x: MatmulInput<'a>,
    /// Rows to multiply.
    pub num_rows: usize,
    /// Matrices of one K, each with its own result.
    pub products: Vec<Product<'a, PackedFp8>>,
    /// Whether activations are rounded.
    pub activations: Activations,
    /// Store or add.
    pub epilogue: Epilogue,
}

/// The kernel; see the module's head for its contract.
pub struct Fp8Matmul;

impl Kernel for Fp8Matmul {
    const NAME: &'static str = "fp8_matmul";
    type Args<'a> = Fp8MatmulArgs<'a>;

    fn check(args: &Fp8MatmulArgs<'_>) -> Result<(), KernelError> {
        let k = args.products.first().map_or(0, |p| p.weight.in_features());
        for product in &args.products {
            let (n, own_k) = (product.weight.out_features(), product.weight.in_features());
            check_size(Self::NAME, "out_features", n, n.max(1))?;
            check_size(Self::NAME, "in_features", own_k, k.max(1))?;
            check_len(Self::NAME, "y", product.y.len(), args.num_rows * n)?;
            if args.activations == Activations::Quantised {
                // A group of activations must not reach over two scales of weights.
                let block = product.weight.block_columns();
                let whole = block.next_multiple_of(GROUP_COLUMNS);
                let expected = if block >= k { block } else { whole };
                check_size(Self::NAME, "block_columns", block, expected)?;
            }
        }
        args.x.check(Self::NAME, args.num_rows, k)
    }

    fn host(device: &HostDevice, args: Fp8MatmulArgs<'_>) {
        let k = args.products.first().map_or(0, |p| p.weight.in_features());
        let x = &args.x.host()[..args.num_rows * k];
        match args.activations {
            Activations::Whole => multiply_whole(device, x, args.products, args.epilogue),
            Activations::Quantised => {
                quantised::multiply(device, x, args.products, args.epilogue);
            }
        }
    }

    fn cuda(device: &CudaDevice, args: Fp8MatmulArgs<'_>) -> Result<(), KernelError> {
        launch::multiply(device, args)
    }
}

fn multiply_whole(
    device: &HostDevice,
    x: &[f32],
    products: Vec<Product<'_, PackedFp8>>,
    epilogue: Epilogue,
) {
    for Product { weight, y } in products {
        let (n, k) = (weight.out_features(), weight.in_features());
        let num_rows = x.len() / k;
        let y = &mut y.host_mut()[..num_rows * n];
        for_each_channel_task(device, y, n, k, |tiles, y| {
            simd::dispatch(TilesTask {
                x,
                weight: Fp8Tiles {
                    weight,
                    first_tile: tiles.start,
                },
                num_tiles: tiles.len(),
                y,
                in_features: k,
                epilogue,
            });
        });
    }
}

/// The tiles of a task.
#[derive(Clone, Copy)]
struct Fp8Tiles<'a> {
    weight: &'a PackedFp8,
    first_tile: usize,
}

impl TileWeights for Fp8Tiles<'_> {
    type Scratch = Vec<[bf16; LANES]>;

    #[inline(always)]
    fn scratch(&self) -> Self::Scratch {
        Vec::new()
    }

    #[inline(always)]
    fn block<'s>(
        &'s self,
        tiles: Range<usize>,
        first_k: usize,
        len: usize,
        scratch: &'s mut Self::Scratch,
    ) -> (&'s [[bf16; LANES]], usize) {
        scratch.resize(tiles.len() * K_BLOCK, [bf16::ZERO; LANES]);
        for (tile, decoded) in tiles.zip(scratch.chunks_exact_mut(K_BLOCK)) {
            self.decode(self.first_tile + tile, first_k, &mut decoded[..len]);
        }
        (scratch, K_BLOCK)
    }
}

impl Fp8Tiles<'_> {
    /// Decodes columns of a tile from `first_k` on.
    #[inline(always)]
    fn decode(&self, tile: usize, first_k: usize, decoded: &mut [[bf16; LANES]]) {
        let codes = self.weight.codes(tile, first_k, decoded.len());
        let block_columns = self.weight.block_columns();
        let mut done = 0;
        while done < decoded.len() {
            let block = (first_k + done) / block_columns;
            let end = decoded.len().min((block + 1) * block_columns - first_k);
            let scales = self.weight.scales(tile, block);
            for (decoded, codes) in decoded[done..end].iter_mut().zip(&codes[done..end]) {
                for lane in 0..LANES {
                    decoded[lane] = bf16::from_f32(value_of(codes[lane]) * scales[lane]);
                }
            }
            done = end;
        }
    }
}

#[cfg(test)]
mod tests;
