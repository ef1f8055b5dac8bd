//! Matmuls of many rows, as prompts bring them, at 27B shapes: microseconds and TFLOP/s, beside cuBLASLt in the same run.

use serde_json::{Value, json};
use specpilot_rs::device::Device;
use specpilot_rs::device::cuda::{CudaDevice, LtOperands, LtShape, LtValues};
use specpilot_rs::kernels::bf16_matmul::Epilogue;
use specpilot_rs::kernels::rounded_matmul::{RoundedWeights, multiply_rounded};
use specpilot_rs::kernels::w12_matmul::WeightView;

use super::planted::{Planted, activations};
use super::timing;

/// Name, channels, columns.
const MATRICES: [(&str, usize, usize); 3] = [
    ("gate+up", 34816, 5120),
    ("down", 5120, 17408),
    ("o", 5120, 6144),
];
const ROWS: [usize; 8] = [33, 48, 64, 96, 128, 256, 300, 2048];
const NUM_COPIES: usize = 3;

/// A line per matrix and row count.
pub fn bench(device: &Device, cuda: &CudaDevice) -> Vec<Value> {
    let most = ROWS[ROWS.len() - 1];
    let mut results = Vec::new();
    for (name, n, k) in MATRICES {
        let copies: Vec<Planted> = (0..NUM_COPIES as u32)
            .map(|seed| Planted::new(device, n, k, seed + 1).expect("room for a matrix"))
            .collect();
        let x = activations(device, most, k).expect("room for activations");
        let mut y = device.try_alloc::<f32>(most * n).expect("room for results");
        for rows in ROWS {
            let mut line = format!("{name} {n} x {k}, {rows:4} rows:");
            let mut keep = |label: &str, us: f64| {
                let tflops = 2.0 * (rows * n * k) as f64 / us / 1e6;
                line += &format!("  {label} {us:6.1} us {tflops:5.0} TFLOP/s");
                results.push(json!({"matrix": name, "rows": rows, "kernel": label, "us": us, "tflops": tflops}));
            };
            if let Ok(lt) = cuda.cublaslt() {
                let shape = LtShape {
                    values: LtValues::Bf16,
                    out_features: n,
                    in_features: k,
                    num_rows: rows,
                    rounds: false,
                    adds_to_output: false,
                };
                let at = |address: Option<u64>| address.expect("a buffer on the GPU");
                let us = timing::graph_us(cuda, NUM_COPIES, |call| {
                    let operands = LtOperands {
                        weights: at(copies[call].rows.cuda_address()),
                        x: at(x.cuda_address()),
                        y: at(y.cuda_address()),
                    };
                    // SAFETY: all three lie on the GPU and have the sizes of the shape.
                    unsafe { lt.multiply(cuda, shape, operands) }.expect("a multiplication");
                });
                keep("cublaslt", us);
            }
            for label in ["bf16", "w12"] {
                let us = timing::graph_us(cuda, NUM_COPIES, |call| {
                    let weights = match label {
                        "bf16" => RoundedWeights::Bf16(&copies[call % NUM_COPIES].bf16),
                        _ => RoundedWeights::W12(&copies[call % NUM_COPIES].w12, WeightView::Exact),
                    };
                    multiply_rounded(cuda, &x, rows, weights, &mut y, Epilogue::Store)
                        .expect("a multiplication");
                });
                keep(label, us);
            }
            println!("{line}");
        }
    }
    results
}
