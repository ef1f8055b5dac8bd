//! W12: time over real shapes, exact and Q view, and three lines on what the format costs and gains: encoding and
//! decoding speed, and one row against `bf16_matmul` on a matrix beyond the last-level cache.

use std::hint::black_box;
use std::time::{Duration, Instant};

use criterion::{BenchmarkId, Criterion, Throughput};
use half::bf16;
use rayon::prelude::*;
use specpilot_rs::device::{Buffer, Device};
use specpilot_rs::kernels::Kernel;
use specpilot_rs::kernels::bf16_matmul::{
    Bf16Matmul, Bf16MatmulArgs, Epilogue, PackedBf16, Product,
};
use specpilot_rs::kernels::w12_matmul::{PackedW12, W12Matmul, W12MatmulArgs, WeightView};
use specpilot_rs::weights::w12::{Encoding, W12Matrix, encode};

/// Name, output channels, input features.
const SHAPES: [(&str, usize, usize); 5] = [
    ("demo_gate_up", 1536, 256),
    ("demo_down", 256, 768),
    ("27b_kv", 2048, 5120),
    ("27b_out", 5120, 6144),
    ("27b_down", 5120, 17408),
];
const NUM_ROWS: [usize; 5] = [1, 8, 16, 32, 64];
/// 1 GiB of BF16 weights, far beyond the caches.
const STREAM_SHAPE: (usize, usize) = (131_072, 4096);
/// 128 MiB of BF16 weights to encode and decode.
const CODEC_SHAPE: (usize, usize) = (16_384, 4096);
/// Times that the fastest of is reported.
const NUM_TIMES: usize = 7;

/// Deterministic noise, all bits in play.
fn noise(i: usize) -> u32 {
    (i as u32)
        .wrapping_mul(0x9E37_79B9)
        .rotate_left(15)
        .wrapping_mul(0x85EB_CA6B)
        .rotate_left(13)
        .wrapping_mul(0xC2B2_AE35)
}

/// Near Gaussian weights (sums of eight 16-bit draws have too short tails to escape) of which one in 2,500 is divided by
/// 2^16: exponents are spread and escapes are as frequent as in real matrices.
fn weights(out_features: usize, in_features: usize) -> Vec<bf16> {
    let weight = |i: usize| {
        let draws = (0..4).map(|j| {
            let r = noise(4 * i + j);
            (r >> 16) as f32 + (r & 0xFFFF) as f32 - 65_535.0
        });
        let scale = if noise(i ^ 0x2F0F_0F0F) < u32::MAX / 2500 {
            1e-6 / 65_536.0
        } else {
            1e-6
        };
        bf16::from_f32(draws.sum::<f32>() * scale)
    };
    let weights = (0..out_features * in_features).into_par_iter();
    weights.map(weight).collect()
}

fn matrix(weights: &[bf16], out_features: usize, in_features: usize) -> W12Matrix {
    match encode(weights, out_features, in_features) {
        Encoding::W12(matrix) => matrix,
        Encoding::KeepBf16(reason) => panic!("the bench's weights stay BF16: {reason}"),
    }
}

struct Case {
    device: Device,
    weight: PackedW12,
    x: Buffer<f32>,
    y: Buffer<f32>,
}

impl Case {
    fn new(weight: PackedW12, num_rows: usize) -> Self {
        let x: Vec<f32> = (0..num_rows * weight.in_features())
            .map(|i| noise(i) as i32 as f32 / 2_147_483_648.0)
            .collect();
        let device = Device::host(None).expect("worker threads");
        Self {
            y: device.try_alloc(num_rows * weight.out_features()).unwrap(),
            device,
            weight,
            x: Buffer::from_slice(&x),
        }
    }

    fn run(&mut self, num_rows: usize, view: WeightView) {
        let args = W12MatmulArgs {
            x: (&self.x).into(),
            num_rows,
            products: vec![Product {
                weight: &self.weight,
                y: &mut self.y,
            }],
            epilogue: Epilogue::Store,
            view,
        };
        W12Matmul::run(&self.device, args).expect("buffers fit the shape");
        black_box(&self.y);
    }

    fn run_bf16(&mut self, weight: &PackedBf16, num_rows: usize) {
        let args = Bf16MatmulArgs {
            x: (&self.x).into(),
            num_rows,
            products: vec![Product {
                weight,
                y: &mut self.y,
            }],
            epilogue: Epilogue::Store,
        };
        Bf16Matmul::run(&self.device, args).expect("buffers fit the shape");
        black_box(&self.y);
    }
}

/// Time per shape and row count; the throughput is multiply-adds times two, in floating-point operations.
fn shapes(c: &mut Criterion) {
    for (group_name, view) in [
        ("w12_matmul", WeightView::Exact),
        ("w12_matmul/q_view", WeightView::Q),
    ] {
        let mut group = c.benchmark_group(group_name);
        for (name, out_features, in_features) in SHAPES {
            let mut case = None;
            for num_rows in NUM_ROWS {
                let flops = 2 * num_rows * out_features * in_features;
                group.throughput(Throughput::Elements(flops as u64));
                group.bench_function(BenchmarkId::new(name, num_rows), |b| {
                    let case = case.get_or_insert_with(|| {
                        let weights = weights(out_features, in_features);
                        Case::new(matrix(&weights, out_features, in_features).pack(), 64)
                    });
                    b.iter(|| case.run(num_rows, view));
                });
            }
        }
        group.finish();
    }
}

/// The fastest of some runs of each of several pieces of work, taken in turns so that all see the same machine.
fn fastest<const N: usize>(work: [&mut dyn FnMut(); N]) -> [Duration; N] {
    let mut best = [Duration::MAX; N];
    let mut work = work;
    for _ in 0..NUM_TIMES {
        for (work, best) in work.iter_mut().zip(&mut best) {
            let start = Instant::now();
            work();
            *best = start.elapsed().min(*best);
        }
    }
    best
}

/// Prints bytes of BF16 weights encoded and decoded per second.
fn codec_speed() {
    let (out_features, in_features) = CODEC_SHAPE;
    let weights = weights(out_features, in_features);
    let encoded = matrix(&weights, out_features, in_features);
    let [encoding, decoding] = fastest([
        &mut || drop(black_box(encode(&weights, out_features, in_features))),
        &mut || drop(black_box(encoded.decode())),
    ])
    .map(|time| size_of_val(&weights[..]) as f64 / time.as_secs_f64());
    println!(
        "w12 encode {:.0} MB/s of BF16, decode {:.2} GB/s of BF16, {:.4} bits a weight",
        encoding / 1e6,
        decoding / 1e9,
        encoded.stats().bits_per_weight
    );
}

/// Prints one row of W12 and of its Q view against one row of BF16 on a matrix beyond the last-level cache.
fn one_row_ratio() {
    let (out_features, in_features) = STREAM_SHAPE;
    let weights = weights(out_features, in_features);
    let bf16 = PackedBf16::pack(&weights, out_features, in_features);
    let encoded = matrix(&weights, out_features, in_features);
    drop(weights);
    let case = std::cell::RefCell::new(Case::new(encoded.pack(), 1));
    drop(encoded);
    let [dense, exact, q] = fastest([
        &mut || case.borrow_mut().run_bf16(&bf16, 1),
        &mut || case.borrow_mut().run(1, WeightView::Exact),
        &mut || case.borrow_mut().run(1, WeightView::Q),
    ])
    .map(|time| time.as_secs_f64());
    println!(
        "w12_matmul one row {:.1} ms, bf16_matmul {:.1} ms, speed ratio {:.2}; Q view {:.1} ms, {:.2}",
        exact * 1e3,
        dense * 1e3,
        dense / exact,
        q * 1e3,
        dense / q
    );
}

/// The format's benches.
pub fn bench(c: &mut Criterion) {
    shapes(c);
    // Criterion has no ratios of two measurements: these run in a plain `cargo bench` or for a filter that names them.
    let mut filters = std::env::args().skip(1).filter(|arg| !arg.starts_with('-'));
    if filters.all(|filter| "w12_matmul/ratios".contains(&filter)) {
        codec_speed();
        one_row_ratio();
    }
}
