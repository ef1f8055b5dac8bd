//! Planting a matrix on the host: bytes of BF16 per second.

use std::hint::black_box;

use criterion::{BenchmarkId, Criterion, Throughput};
use half::bf16;
use specpilot_rs::device::Device;
use specpilot_rs::kernels::Kernel;
use specpilot_rs::kernels::plant_matrix::{PlantMatrix, PlantMatrixArgs, Recipe, RecipeKind};

/// Name, channels, columns.
const SHAPES: [(&str, usize, usize); 2] = [("demo", 768, 256), ("27b k", 1024, 5120)];

/// The kernel's benches.
pub fn bench(c: &mut Criterion) {
    let device = Device::host(Some(1)).expect("worker threads");
    let mut group = c.benchmark_group("plant_matrix");
    for (name, out_features, in_features) in SHAPES {
        let mut rows = device
            .try_alloc::<bf16>(out_features * in_features)
            .expect("room for a matrix");
        let recipe = Recipe {
            seed: 1,
            deviation: 0.02,
            kind: RecipeKind::Layer,
        };
        group.throughput(Throughput::Bytes((rows.len() * size_of::<bf16>()) as u64));
        group.bench_function(BenchmarkId::new(name, "layer"), |b| {
            b.iter(|| {
                let args = PlantMatrixArgs {
                    recipe,
                    out_features,
                    in_features,
                    rows: &mut rows,
                    first: 0,
                };
                PlantMatrix::run(&device, args).expect("the buffer fits the shape");
                black_box(&rows);
            });
        });
    }
    group.finish();
}
