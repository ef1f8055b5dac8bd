//! Shaping of a draft's logits in place: rows of a block times the vocabulary of a target.

use criterion::{BenchmarkId, Criterion, Throughput};
use specpilot_rs::device::{Buffer, Device};
use specpilot_rs::kernels::Kernel;
use specpilot_rs::kernels::draft_select::LogitShape;
use specpilot_rs::kernels::shape_logits::{ShapeLogits, ShapeLogitsArgs};

/// Name, rows, vocabulary.
const SHAPES: [(&str, usize, usize); 2] = [("demo", 15, 8_192), ("gemma_12b", 7, 262_144)];

/// Time and logits.
pub fn bench(c: &mut Criterion) {
    let device = Device::host(None).expect("worker threads");
    let mut group = c.benchmark_group("shape_logits");
    for (name, num_rows, vocab_size) in SHAPES {
        let mut logits = Buffer::from_slice(&vec![8.0; num_rows * vocab_size]);
        group.throughput(Throughput::Elements((num_rows * vocab_size) as u64));
        group.bench_function(BenchmarkId::from_parameter(name), |b| {
            b.iter(|| {
                let args = ShapeLogitsArgs {
                    shape: LogitShape {
                        multiplier: 1.0,
                        softcap: Some(30.0),
                    },
                    num_rows,
                    vocab_size,
                    logits: &mut logits,
                };
                ShapeLogits::run(&device, args).expect("buffers fit the shape");
            });
        });
    }
    group.finish();
}
