//! Rotary embedding of the query heads of a pass.

use criterion::{BenchmarkId, Criterion, Throughput};
use specpilot_rs::device::{Buffer, Device, Staged};
use specpilot_rs::kernels::Kernel;
use specpilot_rs::kernels::rope::{Rope, RopeArgs, RopeHeads, Rotation};

/// Name, rows, heads, length of a head, rotated dimensions.
const SHAPES: [(&str, usize, usize, usize, usize); 4] = [
    ("demo_row", 1, 2, 128, 32),
    ("demo_64_rows", 64, 2, 128, 32),
    ("27b_row", 1, 24, 256, 64),
    ("27b_64_rows", 64, 24, 256, 64),
];

/// Time and rotated elements.
pub fn bench(c: &mut Criterion) {
    let device = Device::host(None).expect("worker threads");
    let mut group = c.benchmark_group("rope");
    for (name, num_rows, num_heads, head_dim, rotary_dim) in SHAPES {
        let mut x = Buffer::from_slice(&vec![0.5; num_rows * num_heads * head_dim]);
        let positions = Staged::on_host((8192..).take(num_rows).collect());
        let frequencies: Vec<f32> = (0..rotary_dim / 2)
            .map(|j| 1e7_f32.powf(-2.0 * j as f32 / rotary_dim as f32))
            .collect();
        let inverse_frequencies = Buffer::from_slice(&frequencies);
        group.throughput(Throughput::Elements(
            (num_rows * num_heads * rotary_dim) as u64,
        ));
        group.bench_function(BenchmarkId::from_parameter(name), |b| {
            b.iter(|| {
                let args = RopeArgs {
                    heads: vec![RopeHeads {
                        norm: None,
                        num_heads,
                        y: &mut x,
                    }],
                    head_dim,
                    positions: &positions,
                    rotation: Some(Rotation {
                        inverse_frequencies: &inverse_frequencies,
                        pair_offset: rotary_dim / 2,
                    }),
                };
                Rope::run(&device, args).expect("buffers fit the shape");
            });
        });
    }
    group.finish();
}
