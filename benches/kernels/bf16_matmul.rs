//! BF16 matmul: time and multiply-add rate over real shapes, and how near one row comes to the read bandwidth.

use std::cell::Cell;
use std::hint::black_box;
use std::time::{Duration, Instant};

use criterion::{BenchmarkId, Criterion, Throughput};
use half::bf16;
use rayon::prelude::*;
use specpilot_rs::device::{Buffer, Device, HostDevice};
use specpilot_rs::kernels::Kernel;
use specpilot_rs::kernels::bf16_matmul::{
    Bf16Matmul, Bf16MatmulArgs, Epilogue, PackedBf16, Product,
};
use specpilot_rs::kernels::simd::{self, LANES, Lanes, Task};

/// Name, output channels, input features.
const SHAPES: [(&str, usize, usize); 7] = [
    ("demo_square", 256, 256),
    ("demo_gate_up", 1536, 256),
    ("demo_down", 256, 768),
    ("demo_head", 8192, 256),
    ("27b_kv", 2048, 5120),
    ("27b_out", 5120, 6144),
    ("27b_down", 5120, 17408),
];
const NUM_ROWS: [usize; 5] = [1, 8, 16, 32, 64];

/// 1 GiB of weights, far beyond the caches.
const STREAM_SHAPE: (usize, usize) = (131_072, 4096);

/// Weights and activations between -1 and 1 with all mantissa bits in play.
fn values(len: usize) -> impl Iterator<Item = f32> {
    (0..len as u32).map(|i| i.wrapping_mul(0x9E37_79B9) as i32 as f32 / 2_147_483_648.0)
}

fn packed(out_features: usize, in_features: usize) -> PackedBf16 {
    let weights: Vec<bf16> = values(out_features * in_features)
        .map(bf16::from_f32)
        .collect();
    PackedBf16::pack(&weights, out_features, in_features)
}

struct Case {
    device: Device,
    weight: PackedBf16,
    x: Buffer<f32>,
    y: Buffer<f32>,
}

impl Case {
    fn new(out_features: usize, in_features: usize, num_rows: usize) -> Self {
        let x: Vec<f32> = values(num_rows * in_features).collect();
        let device = Device::host(None).expect("worker threads");
        Self {
            y: device.try_alloc(num_rows * out_features).unwrap(),
            device,
            weight: packed(out_features, in_features),
            x: Buffer::from_slice(&x),
        }
    }

    fn run(&mut self, num_rows: usize) {
        let args = Bf16MatmulArgs {
            x: (&self.x).into(),
            num_rows,
            products: vec![Product {
                weight: &self.weight,
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
    let mut group = c.benchmark_group("bf16_matmul");
    for (name, out_features, in_features) in SHAPES {
        let mut case = None;
        for num_rows in NUM_ROWS {
            let flops = 2 * num_rows * out_features * in_features;
            group.throughput(Throughput::Elements(flops as u64));
            group.bench_function(BenchmarkId::new(name, num_rows), |b| {
                let case = case.get_or_insert_with(|| Case::new(out_features, in_features, 64));
                b.iter(|| case.run(num_rows));
            });
        }
    }
    group.finish();
}

/// Sum of all values; eight chains, so that loads and not latency are the limit.
struct Sum<'a>(&'a [f32]);

impl Task for Sum<'_> {
    type Output = f32;

    #[inline(always)]
    fn run<L: Lanes>(self) -> f32 {
        let mut acc = [L::splat(0.0); 8];
        for values in self.0.chunks_exact(8 * LANES) {
            for (acc, values) in acc.iter_mut().zip(values.chunks_exact(LANES)) {
                *acc = acc.add(L::load(values));
            }
        }
        acc.into_iter().fold(0.0, |sum, acc| sum + acc.sum())
    }
}

/// One row against a read-only stream over as many bytes; ends with a line that compares the two.
fn one_row_bandwidth(c: &mut Criterion) {
    let (out_features, in_features) = STREAM_SHAPE;
    let num_bytes = (out_features * in_features * size_of::<bf16>()) as u64;
    let mut group = c.benchmark_group("bf16_matmul/bandwidth");
    group.throughput(Throughput::Bytes(num_bytes));
    let best = [Cell::new(Duration::MAX), Cell::new(Duration::MAX)];
    let timed = |best: &Cell<Duration>, num_times: u64, work: &mut dyn FnMut()| {
        let mut total = Duration::ZERO;
        for _ in 0..num_times {
            let start = Instant::now();
            work();
            let time = start.elapsed();
            best.set(best.get().min(time));
            total += time;
        }
        total
    };
    let mut stream = None;
    group.bench_function("read_stream", |b| {
        let (host, values) = stream.get_or_insert_with(|| {
            let host = HostDevice::new(None).expect("worker threads");
            let ones = vec![1.0_f32; num_bytes as usize / size_of::<f32>()];
            (host, Buffer::from_slice(&ones))
        });
        let per_task = values.len() / (4 * host.num_threads());
        b.iter_custom(|num_times| {
            timed(&best[0], num_times, &mut || {
                let sum: f32 = host.install(|| {
                    let parts = values.host().par_chunks(per_task);
                    parts.map(|part| simd::dispatch(Sum(part))).sum()
                });
                black_box(sum);
            })
        });
    });
    drop(stream);
    let mut case = None;
    group.bench_function("matmul_one_row", |b| {
        let case = case.get_or_insert_with(|| Case::new(out_features, in_features, 1));
        b.iter_custom(|num_times| timed(&best[1], num_times, &mut || case.run(1)));
    });
    group.finish();
    if best.iter().all(|best| best.get() < Duration::MAX) {
        let [read, matmul] = best.map(|best| num_bytes as f64 / 1e9 / best.get().as_secs_f64());
        println!(
            "read stream {read:.1} GB/s, bf16_matmul one row {matmul:.1} GB/s, ratio {:.2}",
            matmul / read
        );
    }
}

/// The matmul's benches.
pub fn bench(c: &mut Criterion) {
    shapes(c);
    one_row_bandwidth(c);
}
