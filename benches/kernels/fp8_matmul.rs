//! FP8 matmul on the host: both configurations over real shapes.

use std::hint::black_box;

use criterion::{BenchmarkId, Criterion, Throughput};
use specpilot_rs::device::{Buffer, Device};
use specpilot_rs::kernels::Kernel;
use specpilot_rs::kernels::bf16_matmul::{Epilogue, Product};
use specpilot_rs::kernels::fp8_matmul::{
    Activations, Fp8Matmul, Fp8MatmulArgs, Fp8Scales, PackedFp8,
};

/// Name, output channels, input features.
const SHAPES: [(&str, usize, usize); 3] = [
    ("demo_gate_up", 1536, 256),
    ("27b_kv", 2048, 5120),
    ("27b_out", 5120, 6144),
];
const BLOCK: usize = 128;

/// Time per shape, configuration and row count; the throughput counts a multiply-add as two operations.
pub fn bench(c: &mut Criterion) {
    let device = Device::host(None).expect("worker threads");
    let mut group = c.benchmark_group("fp8_matmul");
    for (name, n, k) in SHAPES {
        let codes: Vec<u8> = (0..n * k).map(|i| (i % 120) as u8).collect();
        let scales = Fp8Scales {
            values: vec![0.01; n.div_ceil(BLOCK) * k.div_ceil(BLOCK)],
            block_rows: BLOCK,
            block_columns: BLOCK,
        };
        let weight = PackedFp8::pack(&codes, n, k, &scales);
        for (configuration, activations) in [
            ("w8a16", Activations::Whole),
            ("w8a8", Activations::Quantised),
        ] {
            for num_rows in [1, 8, 32] {
                let x = Buffer::from_slice(&vec![0.5; num_rows * k]);
                let mut y = Buffer::from_slice(&vec![0.0; num_rows * n]);
                group.throughput(Throughput::Elements((2 * num_rows * n * k) as u64));
                let id = BenchmarkId::new(format!("{name}_{configuration}"), num_rows);
                group.bench_function(id, |b| {
                    b.iter(|| {
                        let args = Fp8MatmulArgs {
                            x: (&x).into(),
                            num_rows,
                            products: vec![Product {
                                weight: &weight,
                                y: &mut y,
                            }],
                            activations,
                            epilogue: Epilogue::Store,
                        };
                        Fp8Matmul::run(&device, args).expect("buffers fit the shape");
                        black_box(&y);
                    });
                });
            }
        }
    }
    group.finish();
}
