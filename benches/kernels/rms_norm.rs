//! RMS norm over residual rows and over heads.

use criterion::{BenchmarkId, Criterion, Throughput};
use specpilot_rs::device::{Buffer, Device};
use specpilot_rs::kernels::Kernel;
use specpilot_rs::kernels::rms_norm::{RmsNorm, RmsNormArgs};

/// Name, vectors, width.
const SHAPES: [(&str, usize, usize); 5] = [
    ("demo_row", 1, 256),
    ("demo_64_rows", 64, 256),
    ("27b_row", 1, 5120),
    ("27b_64_rows", 64, 5120),
    ("27b_query_heads_64_rows", 64 * 24, 256),
];

/// Time and bytes moved: the vectors once in, once out.
pub fn bench(c: &mut Criterion) {
    let device = Device::host(None).expect("worker threads");
    let mut group = c.benchmark_group("rms_norm");
    for (name, num_vectors, width) in SHAPES {
        let x = Buffer::from_slice(&vec![0.5; num_vectors * width]);
        let weight = Buffer::from_slice(&vec![1.5; width]);
        let mut y = device.try_alloc(num_vectors * width).unwrap();
        let num_bytes = 2 * num_vectors * width * size_of::<f32>();
        group.throughput(Throughput::Bytes(num_bytes as u64));
        group.bench_function(BenchmarkId::from_parameter(name), |b| {
            b.iter(|| {
                let args = RmsNormArgs {
                    x: &x,
                    x_offset: 0,
                    x_stride: width,
                    num_vectors,
                    width,
                    weight: Some(&weight),
                    eps: 1e-6,
                    y: (&mut y).into(),
                };
                RmsNorm::run(&device, args).expect("buffers fit the shape");
            });
        });
    }
    group.finish();
}
