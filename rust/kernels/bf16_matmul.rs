//! `y[r, n] = sum_k x[r, k] * w[n, k]`: fp32 activations times BF16 weights, fp32 accumulation.
//!
//! One order for every row count: K is cut into blocks of [`K_BLOCK`]; inside a block one fused multiply-add chain runs
//! over ascending k from zero, and block sums are added in ascending order. Lanes run over output channels, so nothing
//! is ever summed across lanes, and the same code serves 1 row, 64 rows and prompts.

use half::bf16;
use rayon::prelude::*;

use super::simd::{self, LANES, Lanes, Task};
use super::{Kernel, check_len, check_size};
use crate::device::{Buffer, HostDevice};
use crate::error::KernelError;

/// Length of one multiply-add chain along K.
pub const K_BLOCK: usize = 256;

/// A BF16 matrix `[out_features, in_features]` stored as tiles of 16 output channels, `[ceil(N / 16)][K][16]`, so that
/// a lane of a vector load is a channel. Missing channels of the last tile are zero.
#[derive(Clone, Debug)]
pub struct PackedBf16 {
    tiles: Buffer<bf16>,
    out_features: usize,
    in_features: usize,
}

impl PackedBf16 {
    /// Packs row-major weights; `weights.len()` must be `out_features * in_features`.
    pub fn pack(weights: &[bf16], out_features: usize, in_features: usize) -> Self {
        assert_eq!(
            weights.len(),
            out_features * in_features,
            "weights of a packed matrix"
        );
        let mut tiles = Buffer::from_slice(&vec![
            bf16::ZERO;
            out_features.div_ceil(LANES) * in_features * LANES
        ]);
        tiles
            .host_mut()
            .par_chunks_mut(in_features * LANES)
            .enumerate()
            .for_each(|(t, tile)| {
                for (lane, row) in weights[t * LANES * in_features..]
                    .chunks_exact(in_features)
                    .take(LANES)
                    .enumerate()
                {
                    for (k, &w) in row.iter().enumerate() {
                        tile[k * LANES + lane] = w;
                    }
                }
            });
        Self {
            tiles,
            out_features,
            in_features,
        }
    }

    /// Number of output channels.
    pub fn out_features(&self) -> usize {
        self.out_features
    }

    /// Length of a row.
    pub fn in_features(&self) -> usize {
        self.in_features
    }

    /// Bytes of the packed weights.
    pub fn num_bytes(&self) -> usize {
        self.tiles.len() * size_of::<bf16>()
    }

    /// Copies output channel `channel`, widened, to `row` (`in_features` long).
    pub fn unpack_row(&self, channel: usize, row: &mut [f32]) {
        let tile = &self.tiles.host()[(channel / LANES) * self.in_features * LANES..];
        for (k, value) in row.iter_mut().enumerate() {
            *value = tile[k * LANES + channel % LANES].to_f32();
        }
    }

    pub(super) fn tiles(&self) -> &[bf16] {
        self.tiles.host()
    }
}

/// What happens to a finished sum.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Epilogue {
    /// `y = sum`.
    Store,
    /// `y = y + sum` (residual stream).
    AddToOutput,
}

/// Arguments of [`Bf16Matmul`].
pub struct Bf16MatmulArgs<'a> {
    /// Activations `[num_rows, in_features]`.
    pub x: &'a Buffer<f32>,
    /// Rows to multiply.
    pub num_rows: usize,
    /// Weights `[out_features, in_features]`.
    pub weight: &'a PackedBf16,
    /// Result `[num_rows, out_features]`.
    pub y: &'a mut Buffer<f32>,
    /// Store or add.
    pub epilogue: Epilogue,
}

/// The kernel; see the module's head for its contract.
pub struct Bf16Matmul;

impl Kernel for Bf16Matmul {
    const NAME: &'static str = "bf16_matmul";
    type Args<'a> = Bf16MatmulArgs<'a>;

    fn check(args: &Bf16MatmulArgs<'_>) -> Result<(), KernelError> {
        let (n, k) = (args.weight.out_features, args.weight.in_features);
        check_size(Self::NAME, "in_features", k, k.max(1))?;
        check_len(Self::NAME, "x", args.x.len(), args.num_rows * k)?;
        check_len(Self::NAME, "y", args.y.len(), args.num_rows * n)
    }

    fn host(device: &HostDevice, args: Bf16MatmulArgs<'_>) {
        let n = args.weight.out_features;
        let num_tiles = n.div_ceil(LANES);
        let mut sums = vec![0.0; num_tiles * args.num_rows * LANES];
        device.install(|| {
            sums.par_chunks_mut(args.num_rows * LANES)
                .enumerate()
                .for_each(|(tile, sums)| {
                    simd::dispatch(TileTask {
                        x: &args.x.host()[..args.num_rows * args.weight.in_features],
                        weight: &args.weight.tiles()[tile * args.weight.in_features * LANES..]
                            [..args.weight.in_features * LANES],
                        sums,
                        in_features: args.weight.in_features,
                    });
                });
        });
        for (r, y) in args.y.host_mut()[..args.num_rows * n]
            .chunks_exact_mut(n)
            .enumerate()
        {
            for (i, y) in y.iter_mut().enumerate() {
                let sum = sums[((i / LANES) * args.num_rows + r) * LANES + i % LANES];
                *y = match args.epilogue {
                    Epilogue::Store => sum,
                    Epilogue::AddToOutput => *y + sum,
                };
            }
        }
    }
}

/// All rows times one tile of 16 channels.
struct TileTask<'a> {
    x: &'a [f32],
    weight: &'a [bf16],
    sums: &'a mut [f32],
    in_features: usize,
}

impl Task for TileTask<'_> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(self) {
        for (x, sums) in self
            .x
            .chunks_exact(self.in_features)
            .zip(self.sums.chunks_exact_mut(LANES))
        {
            let mut total = L::splat(0.0);
            for (x, w) in x.chunks(K_BLOCK).zip(self.weight.chunks(K_BLOCK * LANES)) {
                let mut acc = L::splat(0.0);
                for (&x, w) in x.iter().zip(w.chunks_exact(LANES)) {
                    acc = L::load_bf16(w).mul_add(L::splat(x), acc);
                }
                total = total.add(acc);
            }
            total.store(sums);
        }
    }
}
