//! Sampling from whole vocabularies, with and without filters.

use std::hint::black_box;

use criterion::{BenchmarkId, Criterion, Throughput};
use specpilot_rs::device::{Buffer, Device};
use specpilot_rs::kernels::Kernel;
use specpilot_rs::kernels::draft_select::LogitShape;
use specpilot_rs::kernels::masked_ids::MaskedIds;
use specpilot_rs::kernels::sample_rows::{RowSampler, SampleRows, SampleRowsArgs};

const TEMPERATURE_1: RowSampler = RowSampler {
    temperature: 1.0,
    ..RowSampler::GREEDY
};

/// Name, rows, vocabulary, sampler.
const SHAPES: [(&str, usize, usize, RowSampler); 6] = [
    ("demo_row", 1, 8192, TEMPERATURE_1),
    ("demo_32_rows", 32, 8192, TEMPERATURE_1),
    ("27b_row", 1, 248_320, TEMPERATURE_1),
    ("27b_32_rows", 32, 248_320, TEMPERATURE_1),
    (
        "27b_row_top_k_20_top_p_0.95",
        1,
        248_320,
        RowSampler {
            top_k: 20,
            top_p: 0.95,
            ..TEMPERATURE_1
        },
    ),
    (
        "27b_row_top_p_0.95",
        1,
        248_320,
        RowSampler {
            top_p: 0.95,
            ..TEMPERATURE_1
        },
    ),
];

/// Time and bytes of logits read.
pub fn bench(c: &mut Criterion) {
    let device = Device::host(None).expect("worker threads");
    let mut group = c.benchmark_group("sample_rows");
    for (name, num_rows, vocab_size, sampler) in SHAPES {
        // Between 0 and 20: most of the probability lies with some hundred ids.
        let logits: Vec<f32> = (0..num_rows * vocab_size)
            .map(|i| (i * 7919 % 10_007) as f32 * 0.002)
            .collect();
        let logits = Buffer::from_slice(&logits);
        let masked = MaskedIds::on_host(&vec![&[7, 4711][..]; num_rows]);
        let samplers = vec![sampler; num_rows];
        let mut token_ids = vec![0; num_rows];
        let mut chosen_logits = vec![0.0; num_rows];
        let num_bytes = num_rows * vocab_size * size_of::<f32>();
        group.throughput(Throughput::Bytes(num_bytes as u64));
        group.bench_function(BenchmarkId::from_parameter(name), |b| {
            b.iter(|| {
                let args = SampleRowsArgs {
                    logits: &logits,
                    num_rows,
                    vocab_size,
                    shape: LogitShape::PLAIN,
                    masked: &masked,
                    samplers: &samplers,
                    token_ids: &mut token_ids,
                    chosen_logits: &mut chosen_logits,
                };
                SampleRows::run(&device, args).expect("buffers fit the shape");
                black_box(&token_ids);
            });
        });
    }
    group.finish();
}
