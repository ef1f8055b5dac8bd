//! Bits against `bf16_matmul` on the weights that W12 stands for; the Q view against its definition.

use half::bf16;
use proptest::prelude::*;

use super::*;
use crate::device::{Buffer, Device, HostDevice};
use crate::kernels::bf16_matmul::{Bf16Matmul, Bf16MatmulArgs, PackedBf16, Product};
use crate::weights::w12::{Encoding, W12Matrix, encode};

const ISAS: [Isa; 3] = [Isa::Avx512, Isa::Avx2, Isa::Portable];

/// Row-major weights in both formats and activations.
#[derive(Debug)]
struct Problem {
    num_rows: usize,
    out_features: usize,
    in_features: usize,
    x: Vec<f32>,
    weights: Vec<bf16>,
    matrix: W12Matrix,
}

fn noise(i: usize, seed: u32) -> u32 {
    (i as u32 ^ seed)
        .wrapping_mul(0x9E37_79B9)
        .rotate_left(15)
        .wrapping_mul(0x85EB_CA6B)
        .rotate_left(13)
        .wrapping_mul(0xC2B2_AE35)
}

impl Problem {
    /// Weights around 2^(base - 127), a share of `escape_rate` outside every window on both sides, some of them zeros;
    /// `None` where they stay BF16. Activations are no BF16 values and of size `x_scale`.
    fn new(
        (num_rows, out_features, in_features): (usize, usize, usize),
        base: u8,
        escape_rate: f64,
        x_scale: f32,
        seed: u32,
    ) -> Option<Self> {
        let weights: Vec<bf16> = (0..out_features * in_features)
            .map(|i| {
                let r = noise(i, seed);
                let mut exponent = u32::from(base) + (r >> 8) % 16;
                if f64::from(noise(i, !seed)) < escape_rate * f64::from(u32::MAX) {
                    exponent = match r >> 12 & 3 {
                        0 => return bf16::from_bits((r & 0x8000) as u16),
                        1 => (u32::from(base) + 16 + (r >> 14) % 9).min(254),
                        _ => u32::from(base).saturating_sub(1 + (r >> 14) % 9).max(1),
                    };
                }
                bf16::from_bits(((r & 0x8000) | exponent << 7 | (r & 0x7F)) as u16)
            })
            .collect();
        let Encoding::W12(matrix) = encode(&weights, out_features, in_features) else {
            return None;
        };
        let x = (0..num_rows * in_features)
            .map(|i| noise(i + 7919, seed) as i32 as f32 / 2_147_483_648.0 * x_scale)
            .collect();
        Some(Self {
            num_rows,
            out_features,
            in_features,
            x,
            weights,
            matrix,
        })
    }

    fn w12(&self, isa: Isa, num_threads: usize, rows: Range<usize>, view: WeightView) -> Vec<f32> {
        self.w12_onto(None, isa, num_threads, rows, view)
    }

    fn w12_onto(
        &self,
        residual: Option<&[f32]>,
        isa: Isa,
        num_threads: usize,
        rows: Range<usize>,
        view: WeightView,
    ) -> Vec<f32> {
        let host = HostDevice::new(Some(num_threads)).expect("threads");
        let nan = vec![f32::NAN; rows.len() * self.out_features];
        let mut y = Buffer::from_slice(residual.unwrap_or(&nan));
        let weight = &self.matrix.pack();
        let args = W12MatmulArgs {
            x: MatmulInput::Values(&Buffer::from_slice(
                &self.x[rows.start * self.in_features..rows.end * self.in_features],
            )),
            num_rows: rows.len(),
            products: vec![Product { weight, y: &mut y }],
            epilogue: residual.map_or(Epilogue::Store, |_| Epilogue::AddToOutput),
            view,
        };
        W12Matmul::check(&args).expect("buffers fit");
        multiply(&host, isa, args);
        y.host().to_vec()
    }

    /// `bf16_matmul` of all rows by `weights`.
    fn bf16(&self, residual: Option<&[f32]>, weights: &[bf16]) -> Vec<f32> {
        let nan = vec![f32::NAN; self.num_rows * self.out_features];
        let mut y = Buffer::from_slice(residual.unwrap_or(&nan));
        let weight = &PackedBf16::pack(weights, self.out_features, self.in_features);
        let args = Bf16MatmulArgs {
            x: MatmulInput::Values(&Buffer::from_slice(&self.x)),
            num_rows: self.num_rows,
            products: vec![Product { weight, y: &mut y }],
            epilogue: residual.map_or(Epilogue::Store, |_| Epilogue::AddToOutput),
        };
        Bf16Matmul::run(&Device::host(Some(1)).expect("threads"), args).expect("buffers fit");
        y.host().to_vec()
    }

    /// The weights of the Q view: nibble 8 below the kept bits; escapes exact above the window, its smallest code below.
    fn q_weights(&self) -> Vec<bf16> {
        let rows = self.weights.chunks_exact(self.in_features);
        let rows = rows.zip(self.matrix.planes().base);
        let q = rows.flat_map(|(row, &base)| {
            row.iter().map(move |w| {
                let (bits, base) = (w.to_bits(), u16::from(base));
                bf16::from_bits(match bits >> 7 & 0xFF {
                    e if e < base => bits & 0x8000 | base << 7 | 8,
                    e if e > base + 15 => bits,
                    _ => bits & 0xFFF0 | 8,
                })
            })
        });
        q.collect()
    }
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|v| v.to_bits()).collect()
}

fn problems() -> impl Strategy<Value = Problem> {
    // Beyond a panel of rows, a group of tiles and two blocks of K, with every kind of remainder. Bases and scales go
    // where products are subnormal or overflow.
    (
        (1..80_usize, 1..200_usize, 1..700_usize),
        prop_oneof![Just(110_u8), 1..=239_u8],
        prop_oneof![Just(0.0), Just(0.003), Just(0.0095)],
        prop_oneof![Just(1.0_f32), Just(1e-30), Just(1e-38), Just(1e30)],
        any::<u32>(),
    )
        .prop_filter_map("stays BF16", |(shape, base, escape_rate, x_scale, seed)| {
            Problem::new(shape, base, escape_rate, x_scale, seed)
        })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 32, max_global_rejects: 100_000, ..ProptestConfig::default() })]

    #[test]
    fn exact_mode_has_the_bits_of_bf16_matmul(problem in problems()) {
        let all = 0..problem.num_rows;
        let want = bits(&problem.bf16(None, &problem.weights));
        prop_assert_eq!(
            &bits(&problem.w12(simd::isa(), 2, all.clone(), WeightView::Exact)),
            &want
        );
        let some = 0..problem.num_rows.min(9);
        for isa in ISAS {
            let got = bits(&problem.w12(isa, 1, some.clone(), WeightView::Exact));
            prop_assert_eq!(&got, &want[..got.len()], "{:?}", isa);
        }
    }

    #[test]
    fn both_epilogues_agree_with_bf16_matmul(problem in problems()) {
        let len = problem.num_rows * problem.out_features;
        let residual: Vec<f32> = (0..len).map(|i| noise(i, 77) as i32 as f32 * 1e-9).collect();
        let want = problem.bf16(Some(&residual), &problem.weights);
        let got = problem.w12_onto(
            Some(&residual), simd::isa(), 2, 0..problem.num_rows, WeightView::Exact,
        );
        prop_assert_eq!(bits(&got), bits(&want));
    }

    #[test]
    fn q_view_has_the_bits_of_bf16_matmul_on_its_weights(problem in problems()) {
        let want = bits(&problem.bf16(None, &problem.q_weights()));
        let some = 0..problem.num_rows.min(9);
        for isa in ISAS {
            let got = bits(&problem.w12(isa, 1, some.clone(), WeightView::Q));
            prop_assert_eq!(&got, &want[..got.len()], "{:?}", isa);
        }
        let all = problem.w12(simd::isa(), 3, 0..problem.num_rows, WeightView::Q);
        prop_assert_eq!(bits(&all), want);
    }

    #[test]
    fn every_row_alone_equals_itself_among_others(problem in problems(), cut in 0.0..1.0) {
        let n = problem.out_features;
        let row = (cut * problem.num_rows as f64) as usize;
        for view in [WeightView::Exact, WeightView::Q] {
            let all = problem.w12(simd::isa(), 2, 0..problem.num_rows, view);
            let alone = problem.w12(simd::isa(), 1, row..row + 1, view);
            prop_assert_eq!(bits(&alone), bits(&all[row * n..(row + 1) * n]));
        }
    }
}

#[test]
fn every_row_count_gives_the_bits_of_bf16_matmul() {
    let problem = Problem::new((PANEL_ROWS + 3, 150, 700), 110, 0.009, 1.0, 4).expect("pays");
    let want = bits(&problem.bf16(None, &problem.weights));
    for isa in [Isa::Avx512, Isa::Avx2] {
        for num_rows in 1..=problem.num_rows {
            let got = problem.w12(isa, 1, 0..num_rows, WeightView::Exact);
            assert_eq!(bits(&got), want[..got.len()], "{num_rows} rows, {isa:?}");
        }
    }
}

#[test]
fn a_tile_that_is_all_escapes_is_exact() {
    let (n, k) = (16, 128 * 1024);
    let mut problem = Problem::new((2, n, k), 110, 0.0, 1.0, 8).expect("pays");
    for i in 0..1023 {
        problem.weights[(i % 16) * k + 64 + i / 16] = bf16::from_f32(i as f32 * 1e3);
    }
    let Encoding::W12(matrix) = encode(&problem.weights, n, k) else {
        panic!("pays");
    };
    assert_eq!(matrix.planes().counts[1], 1023);
    problem.matrix = matrix;
    for (view, weights) in [
        (WeightView::Exact, problem.weights.clone()),
        (WeightView::Q, problem.q_weights()),
    ] {
        let want = bits(&problem.bf16(None, &weights));
        assert_eq!(bits(&problem.w12(simd::isa(), 2, 0..2, view)), want);
    }
}

#[test]
fn tiny_activations_keep_products_that_a_rescaled_channel_would_lose() {
    // 2^100 * 2^-140: normal as it is, but 2^-15 * 2^-140 rounds to nothing.
    let x_scale = f32::from_bits(1 << 9);
    let problem = Problem::new((3, 48, 300), 220, 0.0, x_scale, 8).expect("pays");
    let want = problem.bf16(None, &problem.weights);
    assert!(want.iter().all(|y| y.abs() > 1e-20));
    let got = problem.w12(simd::isa(), 1, 0..3, WeightView::Exact);
    assert_eq!(bits(&got), bits(&want));
}

#[test]
fn rows_come_back_from_packing() {
    let problem = Problem::new((1, 47, 380), 105, 0.009, 1.0, 3).expect("pays");
    let packed = problem.matrix.pack();
    assert_eq!((packed.out_features(), packed.in_features()), (47, 380));
    let num_escapes = problem.matrix.stats().num_escapes;
    assert_eq!(
        packed.num_bytes(),
        48 * 384 * 3 / 2 + 48 + 4 * (3 * 6 + 1) + 4 * num_escapes
    );
    let mut row = vec![f32::NAN; 380];
    for (n, want) in problem.weights.chunks_exact(380).enumerate() {
        packed.unpack_row(n, &mut row);
        let want: Vec<f32> = want.iter().map(|w| w.to_f32()).collect();
        assert_eq!(bits(&row), bits(&want), "row {n}");
    }
}

#[test]
fn short_buffers_are_refused() {
    let problem = Problem::new((2, 32, 320), 110, 0.0, 1.0, 1).expect("pays");
    let device = Device::host(Some(1)).expect("threads");
    let run = |x_len: usize, y_len: usize| {
        W12Matmul::run(
            &device,
            W12MatmulArgs {
                x: MatmulInput::Values(&device.try_alloc(x_len).unwrap()),
                num_rows: 2,
                products: vec![Product {
                    weight: &problem.matrix.pack(),
                    y: &mut device.try_alloc(y_len).unwrap(),
                }],
                epilogue: Epilogue::Store,
                view: WeightView::Exact,
            },
        )
    };
    assert!(run(640, 64).is_ok());
    let message = run(639, 64).expect_err("short").to_string();
    assert_eq!(
        message,
        "w12_matmul: `x` needs at least 640 elements, got 639"
    );
    let message = run(640, 63).expect_err("short").to_string();
    assert_eq!(
        message,
        "w12_matmul: `y` needs at least 64 elements, got 63"
    );
}
