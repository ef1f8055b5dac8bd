//! Greedy argmax over whole vocabularies.

use std::hint::black_box;

use criterion::{BenchmarkId, Criterion, Throughput};
use specpilot_rs::device::{Buffer, Device};
use specpilot_rs::kernels::Kernel;
use specpilot_rs::kernels::greedy_argmax::{GreedyArgmax, GreedyArgmaxArgs};
use specpilot_rs::kernels::masked_ids::MaskedIds;

/// Name, rows, vocabulary.
const SHAPES: [(&str, usize, usize); 4] = [
    ("demo_row", 1, 8192),
    ("demo_32_rows", 32, 8192),
    ("27b_row", 1, 248_320),
    ("27b_32_rows", 32, 248_320),
];

/// Time and bytes of logits read.
pub fn bench(c: &mut Criterion) {
    let device = Device::host(None).expect("worker threads");
    let mut group = c.benchmark_group("greedy_argmax");
    for (name, num_rows, vocab_size) in SHAPES {
        let logits: Vec<f32> = (0..num_rows * vocab_size)
            .map(|i| (i * 7919 % 10_007) as f32)
            .collect();
        let logits = Buffer::from_slice(&logits);
        let masked = MaskedIds::on_host(&vec![&[7, 4711][..]; num_rows]);
        let mut token_ids = vec![0; num_rows];
        let mut best_logits = vec![0.0; num_rows];
        let num_bytes = num_rows * vocab_size * size_of::<f32>();
        group.throughput(Throughput::Bytes(num_bytes as u64));
        group.bench_function(BenchmarkId::from_parameter(name), |b| {
            b.iter(|| {
                let args = GreedyArgmaxArgs {
                    logits: &logits,
                    num_rows,
                    vocab_size,
                    masked: &masked,
                    token_ids: &mut token_ids,
                    best_logits: &mut best_logits,
                };
                GreedyArgmax::run(&device, args).expect("buffers fit the shape");
                black_box(&token_ids);
            });
        });
    }
    group.finish();
}
