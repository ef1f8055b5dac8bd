//! W8A8 on the host: activations rounded to BF16, then to E4M3 by groups, codes multiplied, scales applied to a group's sum.

use half::bf16;

use crate::device::HostDevice;
use crate::kernels::bf16_matmul::{Epilogue, Product};
use crate::kernels::channel_tasks::for_each_channel_task;
use crate::kernels::packed_fp8::{MAX_E4M3, PackedFp8, round_to_e4m3, value_of};
use crate::kernels::simd::{self, LANES, Lanes, Task};

/// Columns whose activations share a scale.
pub const GROUP_COLUMNS: usize = 128;

/// Rows of activations as the configuration multiplies them.
struct QuantisedRows {
    /// Values of E4M3, `[rows, in_features]`.
    codes: Vec<f32>,
    /// `[rows, groups]`.
    scales: Vec<f32>,
}

impl QuantisedRows {
    fn of(x: &[f32], in_features: usize) -> Self {
        let mut codes = Vec::with_capacity(x.len());
        let mut scales = Vec::new();
        for row in x.chunks_exact(in_features) {
            let row: Vec<f32> = row.iter().map(|&x| bf16::from_f32(x).to_f32()).collect();
            for group in row.chunks(GROUP_COLUMNS) {
                let largest = group.iter().fold(0.0, |max: f32, x| max.max(x.abs()));
                // A group of zeros has no scale; any will do. That of the smallest BF16 numbers is above zero.
                let scale = match largest {
                    0.0 => 1.0,
                    largest => largest / MAX_E4M3,
                };
                codes.extend(group.iter().map(|x| round_to_e4m3(x / scale)));
                scales.push(scale);
            }
        }
        Self { codes, scales }
    }
}

pub(super) fn multiply(
    device: &HostDevice,
    x: &[f32],
    products: Vec<Product<'_, PackedFp8>>,
    epilogue: Epilogue,
) {
    let Some(k) = products.first().map(|p| p.weight.in_features()) else {
        return;
    };
    let rows = QuantisedRows::of(x, k);
    for Product { weight, y } in products {
        let n = weight.out_features();
        let y = &mut y.host_mut()[..x.len() / k * n];
        for_each_channel_task(device, y, n, k, |tiles, mut y| {
            for (i, tile) in tiles.enumerate() {
                simd::dispatch(TileTask {
                    rows: &rows,
                    weight,
                    tile,
                    y: &mut y,
                    first_channel: i * LANES,
                    epilogue,
                });
            }
        });
    }
}

/// All rows times a tile.
struct TileTask<'a, 'y> {
    rows: &'a QuantisedRows,
    weight: &'a PackedFp8,
    tile: usize,
    y: &'a mut [&'y mut [f32]],
    first_channel: usize,
    epilogue: Epilogue,
}

impl Task for TileTask<'_, '_> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(self) {
        let k = self.weight.in_features();
        let num_groups = k.div_ceil(GROUP_COLUMNS);
        let mut sums = vec![[0.0; LANES]; self.y.len()];
        let mut decoded = [[0.0; LANES]; GROUP_COLUMNS];
        for group in 0..num_groups {
            let first_k = group * GROUP_COLUMNS;
            let len = GROUP_COLUMNS.min(k - first_k);
            let codes = self.weight.codes(self.tile, first_k, len);
            for (decoded, codes) in decoded.iter_mut().zip(codes) {
                *decoded = codes.map(value_of);
            }
            let block = first_k / self.weight.block_columns();
            let weight_scales = L::load(self.weight.scales(self.tile, block));
            for (row, sum) in sums.iter_mut().enumerate() {
                let x = &self.rows.codes[row * k + first_k..][..len];
                let mut chain = L::splat(0.0);
                for (weights, &x) in decoded.iter().zip(x) {
                    chain = L::load(weights).mul_add(L::splat(x), chain);
                }
                let row_scale = L::splat(self.rows.scales[row * num_groups + group]);
                let scales = weight_scales.mul(row_scale);
                chain.mul_add(scales, L::load(sum)).store(sum);
            }
        }
        for (y, sums) in self.y.iter_mut().zip(&sums) {
            let end = y.len().min(self.first_channel + LANES);
            for (y, sum) in y[self.first_channel..end].iter_mut().zip(sums) {
                *y = match self.epilogue {
                    Epilogue::Store => *sum,
                    Epilogue::AddToOutput => *y + sum,
                };
            }
        }
    }
}
