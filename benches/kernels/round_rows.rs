//! Rounding to BF16 with what comes before it: norms of rows, gates of an MLP, gated norms of heads.

use criterion::{BenchmarkId, Criterion, Throughput};
use half::bf16;
use specpilot_rs::device::{Buffer, Device};
use specpilot_rs::kernels::Kernel;
use specpilot_rs::kernels::gate::GateKind;
use specpilot_rs::kernels::round_rows::{
    GatedBy, Norm, RoundRows, RoundRowsArgs, RowSource, Vectors,
};

/// Name, vectors, width, whether normed, whether gated.
const SHAPES: [(&str, usize, usize, bool, bool); 4] = [
    ("demo_normed_row", 1, 256, true, false),
    ("27b_normed_32_rows", 32, 5120, true, false),
    ("27b_gated_32_rows", 32, 17408, false, true),
    ("27b_heads_32_rows", 32 * 48, 128, true, true),
];

/// Time and rounded elements.
pub fn bench(c: &mut Criterion) {
    let device = Device::host(None).expect("worker threads");
    let mut group = c.benchmark_group("round_rows");
    for (name, num_vectors, width, is_normed, is_gated) in SHAPES {
        let x = Buffer::from_slice(&vec![0.5; num_vectors * width]);
        let weight = Buffer::from_slice(&vec![1.0; width]);
        let mut y = Buffer::from_slice(&vec![bf16::ZERO; num_vectors * width]);
        let norm = Norm {
            weight: &weight,
            eps: 1e-6,
        };
        let gate = GatedBy {
            kind: GateKind::SiluMultiply,
            gates: Vectors::rows(&x, width),
        };
        let source = match (is_normed, is_gated) {
            (true, true) => RowSource::NormedAndGated(norm, gate),
            (true, false) => RowSource::Normed(norm),
            (false, true) => RowSource::Gated(gate),
            (false, false) => RowSource::Plain,
        };
        group.throughput(Throughput::Elements((num_vectors * width) as u64));
        group.bench_function(BenchmarkId::from_parameter(name), |b| {
            b.iter(|| {
                let args = RoundRowsArgs {
                    source,
                    x: Vectors::rows(&x, width),
                    num_vectors,
                    width,
                    y: &mut y,
                };
                RoundRows::run(&device, args).expect("buffers fit the shape");
            });
        });
    }
    group.finish();
}
