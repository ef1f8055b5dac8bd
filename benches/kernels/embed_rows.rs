//! Embedding rows out of a tiled table.

use criterion::{BenchmarkId, Criterion, Throughput};
use half::bf16;
use specpilot_rs::device::{Device, Staged};
use specpilot_rs::kernels::Kernel;
use specpilot_rs::kernels::bf16_matmul::PackedBf16;
use specpilot_rs::kernels::embed_rows::{EmbedRows, EmbedRowsArgs};

/// Name, vocabulary, width, rows. The wide table is cut to 32768 tokens: rows lie as far apart, memory stays small.
const SHAPES: [(&str, usize, usize, usize); 4] = [
    ("demo_row", 8192, 256, 1),
    ("demo_64_rows", 8192, 256, 64),
    ("27b_row", 32_768, 5120, 1),
    ("27b_64_rows", 32_768, 5120, 64),
];

/// Time and bytes of useful weights.
pub fn bench(c: &mut Criterion) {
    let device = Device::host(None).expect("worker threads");
    let mut group = c.benchmark_group("embed_rows");
    for (name, vocab_size, width, num_rows) in SHAPES {
        let mut table = None;
        let id = |i| (i * 7919 % vocab_size) as u32;
        let token_ids = Staged::on_host((0..num_rows).map(id).collect());
        let mut y = device.try_alloc(num_rows * width).unwrap();
        group.throughput(Throughput::Bytes(
            (num_rows * width * size_of::<bf16>()) as u64,
        ));
        group.bench_function(BenchmarkId::from_parameter(name), |b| {
            let table = table.get_or_insert_with(|| {
                let weights = vec![bf16::ONE; vocab_size * width];
                PackedBf16::pack(&weights, vocab_size, width)
            });
            b.iter(|| {
                let args = EmbedRowsArgs {
                    table,
                    token_ids: &token_ids,
                    scale: 1.0,
                    y: &mut y,
                };
                EmbedRows::run(&device, args).expect("buffers fit the shape");
            });
        });
    }
    group.finish();
}
