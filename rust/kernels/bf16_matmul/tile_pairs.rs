//! Chosen rows times chosen tiles, bit for bit what the whole matmul gives there: for re-scoring a few channels.

use half::bf16;
use rayon::prelude::*;

use super::{K_BLOCK, PackedBf16};
use crate::device::HostDevice;
use crate::kernels::channel_tasks::MIN_PARALLEL_WORK;
use crate::kernels::simd::{self, Isa, LANES, Lanes, Task};

/// A row of activations and a tile of 16 output channels.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(in crate::kernels) struct TilePair {
    /// Channels `16 * tile..16 * (tile + 1)`. First in order, so that sorted pairs read a tile once.
    pub(in crate::kernels) tile: u32,
    /// Row of `x`.
    pub(in crate::kernels) row: u32,
}

/// The sums of every pair in `pairs`; `x` is `[rows, in_features]`.
pub(in crate::kernels) fn multiply_tile_pairs(
    device: &HostDevice,
    isa: Isa,
    x: &[f32],
    weight: &PackedBf16,
    pairs: &[TilePair],
) -> Vec<[f32; LANES]> {
    let k = weight.in_features();
    let mut sums = vec![[0.0; LANES]; pairs.len()];
    let run = |(pairs, sums)| {
        let task = PairsTask {
            x,
            weight: weight.tiles(),
            in_features: k,
            pairs,
            sums,
        };
        simd::dispatch_on(isa, task);
    };
    let num_threads = device.num_threads();
    if num_threads == 1 || pairs.len() * k * LANES < MIN_PARALLEL_WORK {
        run((pairs, &mut sums));
    } else {
        let per_task = pairs.len().div_ceil(2 * num_threads).next_multiple_of(8);
        device.install(|| {
            let sums = sums.par_chunks_mut(per_task);
            pairs.par_chunks(per_task).zip(sums).for_each(run);
        });
    }
    sums
}

struct PairsTask<'a> {
    x: &'a [f32],
    weight: &'a [bf16],
    in_features: usize,
    pairs: &'a [TilePair],
    sums: &'a mut [[f32; LANES]],
}

impl Task for PairsTask<'_> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(self) {
        if L::NUM_REGISTERS >= 32 {
            self.groups::<L, 8>();
        } else {
            self.groups::<L, 4>();
        }
    }
}

impl PairsTask<'_> {
    /// `N` pairs at a time, so that their chains hide each other's latency.
    #[inline(always)]
    fn groups<L: Lanes, const N: usize>(self) {
        for (pairs, sums) in self.pairs.chunks(N).zip(self.sums.chunks_mut(N)) {
            let mut totals = [L::splat(0.0); N];
            for first_k in (0..self.in_features).step_by(K_BLOCK) {
                let len = K_BLOCK.min(self.in_features - first_k);
                let mut x = [&self.x[..0]; N];
                let mut weight = [&self.weight.as_chunks::<LANES>().0[..0]; N];
                for n in 0..N {
                    // A short group repeats its last pair: no chain sees its neighbours.
                    let pair = pairs[n.min(pairs.len() - 1)];
                    x[n] = &self.x[pair.row as usize * self.in_features + first_k..][..len];
                    let start = pair.tile as usize * self.in_features + first_k;
                    weight[n] = &self.weight.as_chunks::<LANES>().0[start..][..len];
                }
                let mut acc = [L::splat(0.0); N];
                for k in 0..len {
                    for n in 0..N {
                        acc[n] = L::load_bf16(&weight[n][k]).mul_add(L::splat(x[n][k]), acc[n]);
                    }
                }
                for n in 0..N {
                    totals[n] = totals[n].add(acc[n]);
                }
            }
            for (sums, total) in sums.iter_mut().zip(totals) {
                total.store(sums);
            }
        }
    }
}
