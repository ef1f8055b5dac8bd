//! FP8 products against `bf16_matmul` bit for bit, and rows on their own.

use half::bf16;

use super::*;
use crate::device::{Buffer, Device};
use crate::kernels::bf16_matmul::{Bf16Matmul, Bf16MatmulArgs, PackedBf16};

/// Words that look random.
fn words(seed: u32) -> impl Iterator<Item = u32> {
    (0..).map(move |i: u32| {
        let word = i.wrapping_add(seed).wrapping_mul(0x9E37_79B9);
        (word ^ (word >> 15)).wrapping_mul(0x85EB_CA6B) ^ (word >> 9)
    })
}

struct Problem {
    codes: Vec<u8>,
    scales: Fp8Scales,
    x: Vec<f32>,
    n: usize,
    k: usize,
}

impl Problem {
    fn new(num_rows: usize, n: usize, k: usize, block: [usize; 2]) -> Self {
        let codes = words(1)
            .map(|word| word as u8)
            .filter(|code| code & 0x7F != 0x7F);
        let [block_rows, block_columns] = block;
        let num_scales = n.div_ceil(block_rows) * k.div_ceil(block_columns);
        let unit = |word: u32| word as i32 as f32 / 2_147_483_648.0;
        Self {
            codes: codes.take(n * k).collect(),
            scales: Fp8Scales {
                values: words(2)
                    .map(|w| 0.01 * (1.5 + unit(w)))
                    .take(num_scales)
                    .collect(),
                block_rows,
                block_columns,
            },
            x: words(3).map(unit).take(num_rows * k).collect(),
            n,
            k,
        }
    }

    fn run(&self, device: &Device, x: &[f32], activations: Activations) -> Vec<f32> {
        let weight = PackedFp8::pack(&self.codes, self.n, self.k, &self.scales);
        let num_rows = x.len() / self.k;
        let mut y = Buffer::zeroed(num_rows * self.n);
        let args = Fp8MatmulArgs {
            x: MatmulInput::Values(&Buffer::from_slice(x)),
            num_rows,
            products: vec![Product {
                weight: &weight,
                y: &mut y,
            }],
            activations,
            epilogue: Epilogue::Store,
        };
        Fp8Matmul::run(device, args).unwrap();
        y.host().to_vec()
    }
}

const BLOCKS: [[usize; 2]; 4] = [[128, 128], [1, 4096], [4096, 4096], [32, 24]];

#[test]
fn whole_activations_give_the_bits_of_bf16_matmul_on_dequantised_weights() {
    let device = Device::host(Some(2)).unwrap();
    for block in BLOCKS {
        for (num_rows, n, k) in [(1, 37, 300), (3, 200, 517), (13, 130, 256), (70, 16, 1)] {
            let problem = Problem::new(num_rows, n, k, block);
            let got = problem.run(&device, &problem.x, Activations::Whole);
            let weights: Vec<bf16> = dequantise(&problem.codes, k, &problem.scales);
            let weight = PackedBf16::pack(&weights, n, k);
            let mut y = Buffer::zeroed(num_rows * n);
            let args = Bf16MatmulArgs {
                x: MatmulInput::Values(&Buffer::from_slice(&problem.x)),
                num_rows,
                products: vec![Product {
                    weight: &weight,
                    y: &mut y,
                }],
                epilogue: Epilogue::Store,
            };
            Bf16Matmul::run(&device, args).unwrap();
            let bits = |values: &[f32]| values.iter().map(|v| v.to_bits()).collect::<Vec<_>>();
            assert_eq!(
                bits(&got),
                bits(y.host()),
                "{num_rows} x {n} x {k}, {block:?}"
            );
        }
    }
}

#[test]
fn rows_do_not_see_each_other_in_either_configuration() {
    let device = Device::host(Some(2)).unwrap();
    for activations in [Activations::Whole, Activations::Quantised] {
        let problem = Problem::new(70, 100, 400, [128, 128]);
        let together = problem.run(&device, &problem.x, activations);
        for row in [0, 7, 69] {
            let alone = problem.run(&device, &problem.x[row * 400..][..400], activations);
            assert_eq!(alone, together[row * 100..][..100], "{activations:?}");
        }
    }
}

#[test]
fn groups_that_reach_over_two_scales_are_refused() {
    let device = Device::host(Some(1)).unwrap();
    let problem = Problem::new(1, 16, 256, [16, 64]);
    let weight = PackedFp8::pack(&problem.codes, 16, 256, &problem.scales);
    let mut y = Buffer::zeroed(16);
    let args = Fp8MatmulArgs {
        x: MatmulInput::Values(&Buffer::from_slice(&problem.x)),
        num_rows: 1,
        products: vec![Product {
            weight: &weight,
            y: &mut y,
        }],
        activations: Activations::Quantised,
        epilogue: Epilogue::Store,
    };
    let refused = Fp8Matmul::run(&device, args);
    assert!(matches!(
        refused,
        Err(KernelError::Size {
            argument: "block_columns",
            expected: 128,
            got: 64,
            ..
        })
    ));
}
