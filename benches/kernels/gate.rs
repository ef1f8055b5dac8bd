//! Gates: the MLP's SiLU gate and the attention output's sigmoid gate with interleaved heads.

use criterion::{BenchmarkId, Criterion, Throughput};
use specpilot_rs::device::{Buffer, Device};
use specpilot_rs::kernels::Kernel;
use specpilot_rs::kernels::gate::{Gate, GateArgs, GateKind};

/// Name, kind, vectors, width, distance between gate vectors.
const SHAPES: [(&str, GateKind, usize, usize, usize); 5] = [
    ("demo_mlp_row", GateKind::SiluMultiply, 1, 768, 768),
    ("demo_mlp_64_rows", GateKind::SiluMultiply, 64, 768, 768),
    ("27b_mlp_row", GateKind::SiluMultiply, 1, 17408, 17408),
    ("27b_mlp_64_rows", GateKind::SiluMultiply, 64, 17408, 17408),
    (
        "27b_heads_64_rows",
        GateKind::SigmoidMultiply,
        64 * 24,
        256,
        512,
    ),
];

/// Time and gated elements.
pub fn bench(c: &mut Criterion) {
    let device = Device::host(None).expect("worker threads");
    let mut group = c.benchmark_group("gate");
    for (name, kind, num_vectors, width, x_stride) in SHAPES {
        let x = Buffer::from_slice(&vec![0.5; num_vectors * x_stride]);
        let values = Buffer::from_slice(&vec![1.0; num_vectors * width]);
        let mut y = Buffer::from_slice(&vec![0.0; num_vectors * width]);
        group.throughput(Throughput::Elements((num_vectors * width) as u64));
        group.bench_function(BenchmarkId::from_parameter(name), |b| {
            b.iter(|| {
                let args = GateArgs {
                    kind,
                    x: &x,
                    x_offset: x_stride - width,
                    x_stride,
                    num_vectors,
                    width,
                    values: &values,
                    per_row: 1,
                    y: (&mut y).into(),
                };
                Gate::run(&device, args).expect("buffers fit the shape");
            });
        });
    }
    group.finish();
}
