//! CUDA kernels on the shapes of a 27B model, all in one run; matmuls against cuBLASLt.
//!
//! For each matrix: bits first (W12 against BF16 weights that were written by another kernel, every row count against
//! 64 rows, float64 by tolerance), then microseconds of graph replays over copies that together are far larger than the
//! L2 cache. `SPECPILOT_BENCH_JSON=FILE` also writes the figures there; names of matrices or of other parts as arguments
//! pick some.

mod append;
mod drafter;
mod fp8;
mod gdn_wy;
mod layer;
mod numbers;
mod planted;
mod prompts;
mod rows;
mod screen;
mod stock;
mod timing;
mod tree_attention;

use planted::{Planted, activations, address};
use serde_json::{Value, json};
use specpilot_rs::device::cuda::{CudaDevice, LtOperands, LtProduct, LtShape, LtValues};
use specpilot_rs::device::{Buffer, Device};
use specpilot_rs::kernels::bf16_matmul::Epilogue;
use specpilot_rs::kernels::rounded_matmul::{RoundedRows, RoundedWeights, multiply_rounded};
use specpilot_rs::kernels::w12_matmul::WeightView;

/// Name, channels, columns.
const MATRICES: [(&str, usize, usize); 7] = [
    ("gate+up", 34816, 5120),
    ("down", 5120, 17408),
    ("q+gate", 12288, 5120),
    ("k+v", 2048, 5120),
    ("qkv+z", 16384, 5120),
    ("o", 5120, 6144),
    ("head", 248_320, 5120),
];
const CHECKED_ROWS: [usize; 12] = [1, 2, 7, 8, 9, 16, 17, 31, 32, 33, 63, 64];
const TIMED_ROWS: [usize; 6] = [1, 8, 16, 24, 32, 64];
/// Rows compared with float64.
const REFERENCE_ROWS: usize = 2;
/// Bytes that copies of one matrix take together, several times an L2 cache.
const ROTATED_BYTES: usize = 400_000_000;

/// What is timed against cuBLASLt.
#[derive(Clone, Copy)]
enum Variant {
    Exact,
    QView,
    Bf16,
}

impl Variant {
    const ALL: [(Self, &'static str); 3] = [
        (Self::Exact, "w12"),
        (Self::QView, "w12_q"),
        (Self::Bf16, "bf16"),
    ];

    fn weights(self, planted: &Planted) -> RoundedWeights<'_> {
        match self {
            Self::Exact => RoundedWeights::W12(&planted.w12, WeightView::Exact),
            Self::QView => RoundedWeights::W12(&planted.w12, WeightView::Q),
            Self::Bf16 => RoundedWeights::Bf16(&planted.bf16),
        }
    }

    /// Bytes of weights that one multiplication reads.
    fn num_bytes(self, n: usize, k: usize, num_escapes: usize) -> usize {
        match self {
            Self::Exact => n * k * 3 / 2 + n + 4 * num_escapes,
            Self::QView => n * k,
            Self::Bf16 => n * k * 2,
        }
    }
}

fn main() {
    let device = match Device::cuda(0) {
        Ok(device) => device,
        Err(error) => return println!("cuda bench skipped: {error}"),
    };
    let Device::Cuda(cuda) = &device else {
        unreachable!("a GPU was opened")
    };
    let wanted: Vec<String> = std::env::args()
        .skip(1)
        .filter(|a| !a.starts_with('-'))
        .collect();
    let is_wanted = |name: &str| wanted.is_empty() || wanted.iter().any(|w| w == name);
    println!("{}, {:?}", cuda.gpu_name().expect("a name"), cuda.limits());
    let mut results = Vec::new();
    for (name, n, k) in MATRICES {
        if is_wanted(name) {
            results.extend(bench_matrix(&device, cuda, name, n, k));
        }
    }
    type Bench = fn(&Device, &CudaDevice) -> Vec<Value>;
    let parts: [(&str, Bench); 10] = [
        ("layer", layer::bench),
        ("append", append::bench),
        ("gdn_wy", gdn_wy::bench),
        ("tree_attention", tree_attention::bench),
        ("rows", rows::bench),
        ("drafter", drafter::bench),
        ("fp8", fp8::bench),
        ("screen", screen::bench),
        ("stock", stock::bench),
        ("prompts", prompts::bench),
    ];
    for (name, bench) in parts {
        if is_wanted(name) {
            results.extend(bench(&device, cuda));
        }
    }
    print_means(&results);
    if let Some(file) = std::env::var_os("SPECPILOT_BENCH_JSON") {
        let text = serde_json::to_string_pretty(&results).expect("plain values");
        std::fs::write(file, text).expect("the file for figures can be written");
    }
}

fn bench_matrix(device: &Device, cuda: &CudaDevice, name: &str, n: usize, k: usize) -> Vec<Value> {
    let num_copies = (ROTATED_BYTES / (n * k)).clamp(1, 24) + 1;
    let copies: Vec<Planted> = (0..num_copies as u32)
        .map(|seed| Planted::new(device, n, k, seed + 1).expect("room for a matrix"))
        .collect();
    let x = activations(device, 64, k).expect("room for activations");
    check_bits(device, cuda, &copies[0], &x);
    let escape_rate = copies[0].num_escapes as f64 / (n * k) as f64;
    println!("{name} {n} x {k}: bits agree; escapes {escape_rate:.1e}");
    let mut y = device.try_alloc::<f32>(64 * n).expect("room for results");
    let num_calls = if n > 100_000 { 4 } else { 24 };
    let rows: Vec<_> = copies.iter().map(|copy| address(&copy.rows)).collect();
    let mut results = Vec::new();
    for num_rows in TIMED_ROWS {
        let baseline = LtRun {
            out_features: n,
            in_features: k,
            num_rows,
            values: LtValues::Bf16,
        }
        .best_us(
            device,
            cuda,
            &rows,
            x.cuda_address().expect("rows on the GPU"),
        );
        let mut line = format!("  {num_rows:2} rows");
        if let Some(us) = baseline {
            line += &format!("  cublaslt {us:6.1} us");
        }
        for (variant, label) in Variant::ALL {
            let us = timing::graph_us(cuda, num_calls, |call| {
                let weights = variant.weights(&copies[call % num_copies]);
                multiply_rounded(cuda, &x, num_rows, weights, &mut y, Epilogue::Store)
                    .expect("a multiplication");
            });
            let num_bytes = variant.num_bytes(n, k, copies[0].num_escapes);
            let tb_per_s = num_bytes as f64 / us / 1e6;
            line += &format!("  {label} {us:6.1} us {tb_per_s:.2} TB/s");
            if let Some(baseline) = baseline {
                line += &format!(" {:.2}x", baseline / us);
            }
            results.push(json!({
                "matrix": name, "out_features": n, "in_features": k, "rows": num_rows, "kernel": label,
                "us": us, "bytes": num_bytes, "tb_per_s": tb_per_s, "cublaslt_us": baseline,
                "ratio": baseline.map(|baseline| baseline / us), "escape_rate": escape_rate,
            }));
        }
        println!("{line}");
    }
    results
}

/// A product of cuBLASLt, to BF16.
struct LtRun {
    out_features: usize,
    in_features: usize,
    num_rows: usize,
    values: LtValues,
}

impl LtRun {
    /// Microseconds of its fastest algorithm over copies of row-major weights, all by their addresses; `None` where there
    /// is no cuBLASLt, or it does not serve the shape.
    fn best_us(&self, device: &Device, cuda: &CudaDevice, copies: &[u64], x: u64) -> Option<f64> {
        let lt = cuda.cublaslt().ok()?;
        let n = self.out_features;
        let y = device.try_alloc::<u16>(64 * n).expect("room for results");
        let shape = LtShape {
            out_features: n,
            in_features: self.in_features,
            num_rows: self.num_rows,
            values: self.values,
            rounds: true,
            adds_to_output: false,
        };
        let matmul = LtProduct::new(lt, shape).ok()?;
        let run = |candidate: usize, copy: usize| {
            let operands = LtOperands {
                weights: copies[copy],
                x,
                y: address(&y),
            };
            // SAFETY: weights, activations and result lie on the GPU and have the sizes of the shape.
            unsafe { matmul.run(lt, cuda, candidate, operands) }.is_ok()
        };
        let num_calls = if n > 100_000 { 4 } else { 24 };
        let times = (0..matmul.num_candidates())
            .filter(|&i| run(i, 0))
            .map(|i| {
                timing::graph_us(cuda, num_calls, |call| {
                    run(i, call % copies.len());
                })
            });
        times.reduce(f64::min)
    }
}

/// Panics unless all row counts and both formats give the same bits, and the values are right.
fn check_bits(device: &Device, cuda: &CudaDevice, planted: &Planted, x: &RoundedRows) {
    let n = planted.w12.out_features();
    let run = |variant: Variant, num_rows: usize| -> Vec<u32> {
        let mut y: Buffer<f32> = device
            .buffer_of(&vec![f32::NAN; num_rows * n])
            .expect("room");
        let weights = variant.weights(planted);
        multiply_rounded(cuda, x, num_rows, weights, &mut y, Epilogue::Store)
            .expect("a multiplication");
        let y = y.read_back(num_rows * n).expect("the multiplication runs");
        y.into_iter().map(f32::to_bits).collect()
    };
    let exact = run(Variant::Exact, 64);
    assert!(exact == run(Variant::Bf16, 64), "W12 and BF16 differ");
    assert!(exact == run(Variant::Exact, 64), "two runs differ");
    let q_view = run(Variant::QView, 64);
    for num_rows in CHECKED_ROWS {
        for (variant, all) in [
            (Variant::Exact, &exact),
            (Variant::Bf16, &exact),
            (Variant::QView, &q_view),
        ] {
            let got = run(variant, num_rows);
            assert!(got == all[..num_rows * n], "{num_rows} rows differ from 64");
        }
    }
    let [reference, magnitude] = planted
        .reference(device, x, REFERENCE_ROWS)
        .expect("room for the reference");
    for ((bits, reference), magnitude) in exact.iter().zip(&reference).zip(&magnitude) {
        let error = (f64::from(f32::from_bits(*bits)) - reference).abs();
        assert!(
            error <= 2e-6 * magnitude,
            "{error} off, terms sum to {magnitude}"
        );
    }
    let norm = |values: &mut dyn Iterator<Item = f64>| values.map(|v| v * v).sum::<f64>().sqrt();
    let mut errors = q_view
        .iter()
        .zip(&reference)
        .map(|(bits, r)| f64::from(f32::from_bits(*bits)) - r);
    let error = norm(&mut errors) / norm(&mut reference.iter().copied());
    assert!(
        (0.02..0.035).contains(&error),
        "the 8-bit view is {error} off"
    );
}

/// Geometric means of the ratios.
fn print_means(results: &[Value]) {
    for (_, label) in Variant::ALL {
        for rows in TIMED_ROWS {
            let logs: Vec<f64> = results
                .iter()
                .filter(|r| r["kernel"] == label && r["rows"] == rows)
                .filter_map(|r| r["ratio"].as_f64())
                .map(f64::ln)
                .collect();
            if !logs.is_empty() {
                let mean = (logs.iter().sum::<f64>() / logs.len() as f64).exp();
                println!("{label} {rows} rows: geometric mean {mean:.3}x of cuBLASLt");
            }
        }
    }
}
