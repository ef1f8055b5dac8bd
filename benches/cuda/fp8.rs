//! FP8 matrices at 27B shapes: rows as they are, with scales of BF16 and of 24 bits, and rows rounded to E4M3, which is
//! part of its time; against cuBLASLt on BF16, and on E4M3 without scales.

use serde_json::{Value, json};
use specpilot_rs::device::cuda::{CudaDevice, LtValues};
use specpilot_rs::device::{Buffer, Device};
use specpilot_rs::kernels::Kernel;
use specpilot_rs::kernels::bf16_matmul::{Epilogue, PackedBf16, Product};
use specpilot_rs::kernels::fp8_matmul::{
    Activations, Fp8Matmul, Fp8MatmulArgs, Fp8Scales, PackedFp8, dequantise,
};
use specpilot_rs::kernels::rounded_matmul::{RoundedRows, RoundedWeights, multiply_rounded};

use super::planted::{activations, address, gaussian, rows_bf16};
use super::{CHECKED_ROWS, LtRun, ROTATED_BYTES, TIMED_ROWS, timing};

/// Name, channels, columns.
const MATRICES: [(&str, usize, usize); 3] = [
    ("gate+up", 34816, 5120),
    ("down", 5120, 17408),
    ("o", 5120, 6144),
];
const BLOCK: usize = 128;

/// A line per matrix and row count.
pub fn bench(device: &Device, cuda: &CudaDevice) -> Vec<Value> {
    MATRICES
        .into_iter()
        .flat_map(|(name, n, k)| bench_matrix(device, cuda, name, n, k))
        .collect()
}

/// Codes that are numbers, and scales in blocks; `is_short` makes these BF16 numbers.
fn matrix(n: usize, k: usize, seed: u64, is_short: bool) -> (Vec<u8>, Fp8Scales) {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    let mut word = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state
    };
    let mut codes = vec![0_u8; n * k];
    for eight in codes.chunks_exact_mut(8) {
        let bytes = word().to_le_bytes();
        // The exponent's upper half alone: no code of 0x7F or 0xFF, and all others of some size.
        eight.copy_from_slice(&bytes.map(|byte| byte & 0xBF));
    }
    let keep = if is_short { 0xFFFF_0000 } else { u32::MAX };
    let scale = |word: u64| f32::from_bits((0.01 + (word >> 40) as f32 / 1e9).to_bits() & keep);
    let values = (0..n.div_ceil(BLOCK) * k.div_ceil(BLOCK)).map(|_| scale(word()));
    let scales = Fp8Scales {
        values: values.collect(),
        block_rows: BLOCK,
        block_columns: BLOCK,
    };
    (codes, scales)
}

fn bench_matrix(device: &Device, cuda: &CudaDevice, name: &str, n: usize, k: usize) -> Vec<Value> {
    let num_copies = (ROTATED_BYTES / (n * k)).clamp(1, 6) + 1;
    let copies = |is_short: bool| -> Vec<PackedFp8> {
        (0..num_copies as u64)
            .map(|seed| {
                let (codes, scales) = matrix(n, k, seed, is_short);
                PackedFp8::pack_on(device, &codes, n, k, &scales).expect("room for a matrix")
            })
            .collect()
    };
    let (short, whole) = (copies(true), copies(false));
    let x = activations(device, 64, k).expect("room for activations");
    for (is_short, packed) in [(true, &short[0]), (false, &whole[0])] {
        check_bits(device, cuda, packed, &x, is_short);
    }
    println!("fp8 {name} {n} x {k}: bits agree with BF16");
    let fp32 = device.buffer_of(&gaussian(64 * k)).expect("room for rows");
    let mut y = device.try_alloc::<f32>(64 * n).expect("room for results");
    let lt_rows: Vec<_> = (0..num_copies as u32)
        .map(|seed| rows_bf16(device, n, k, seed))
        .collect();
    let lt_codes: Vec<_> = (0..num_copies as u64)
        .map(|seed| {
            device
                .buffer_of(&matrix(n, k, seed, true).0)
                .expect("room for codes")
        })
        .collect();
    let x_codes = device
        .buffer_of(&matrix(64, k, 1, true).0)
        .expect("room for activations");
    let mut results = Vec::new();
    for num_rows in TIMED_ROWS {
        let lt_us = |values, copies: Vec<u64>, x| {
            let run = LtRun {
                out_features: n,
                in_features: k,
                num_rows,
                values,
            };
            run.best_us(device, cuda, &copies, x)
        };
        let rows = lt_rows.iter().map(address).collect();
        let baseline = lt_us(
            LtValues::Bf16,
            rows,
            x.cuda_address().expect("rows on the GPU"),
        );
        let codes = lt_codes.iter().map(address).collect();
        let fp8_baseline = lt_us(LtValues::E4m3, codes, address(&x_codes));
        let mut line = format!("  {num_rows:2} rows");
        for (label, us) in [("bf16", baseline), ("e4m3", fp8_baseline)] {
            if let Some(us) = us {
                line += &format!("  cublaslt {label} {us:6.1} us");
            }
        }
        let mut report = |label: &str, us: f64| {
            let num_bytes = short[0].num_bytes();
            line += &format!(
                "  {label} {us:6.1} us {:.2} TB/s",
                num_bytes as f64 / us / 1e6
            );
            results.push(json!({
                "matrix": name, "out_features": n, "in_features": k, "rows": num_rows, "kernel": label, "us": us,
                "bytes": num_bytes, "cublaslt_us": baseline, "cublaslt_e4m3_us": fp8_baseline, "ratio": baseline.map(|baseline| baseline / us),
            }));
        };
        for (label, copies) in [("fp8", &short), ("fp8_whole_scales", &whole)] {
            let us = timing::graph_us(cuda, 24, |call| {
                let weights = RoundedWeights::Fp8(&copies[call % num_copies]);
                multiply_rounded(cuda, &x, num_rows, weights, &mut y, Epilogue::Store)
                    .expect("a multiplication");
            });
            report(label, us);
        }
        let us = timing::graph_us(cuda, 24, |call| {
            let args = Fp8MatmulArgs {
                x: (&fp32).into(),
                num_rows,
                products: vec![Product {
                    weight: &short[call % num_copies],
                    y: &mut y,
                }],
                activations: Activations::Quantised,
                epilogue: Epilogue::Store,
            };
            Fp8Matmul::run(device, args).expect("a multiplication");
        });
        report("fp8_w8a8", us);
        println!("{line}");
    }
    results
}

/// Panics unless every row count gives the bits of BF16 weights.
fn check_bits(
    device: &Device,
    cuda: &CudaDevice,
    packed: &PackedFp8,
    x: &RoundedRows,
    is_short: bool,
) {
    let (n, k) = (packed.out_features(), packed.in_features());
    let run = |weights: RoundedWeights<'_>, num_rows: usize| -> Vec<u32> {
        let nan = vec![f32::NAN; num_rows * n];
        let mut y: Buffer<f32> = device.buffer_of(&nan).expect("room");
        multiply_rounded(cuda, x, num_rows, weights, &mut y, Epilogue::Store)
            .expect("a multiplication");
        let y = y.read_back(num_rows * n).expect("the multiplication runs");
        y.into_iter().map(f32::to_bits).collect()
    };
    let (codes, scales) = matrix(n, k, 0, is_short);
    let weights = dequantise(&codes, k, &scales);
    let bf16 = PackedBf16::pack_on(device, &weights, n, k).expect("room for a matrix");
    let want = run(RoundedWeights::Bf16(&bf16), 64);
    for num_rows in CHECKED_ROWS {
        let got = run(RoundedWeights::Fp8(packed), num_rows);
        assert!(got == want[..num_rows * n], "{num_rows} rows differ");
    }
}
