//! Appending accepted rows to a ring: bytes per second over the logs of real models.

use std::hint::black_box;

use criterion::{BenchmarkId, Criterion, Throughput};
use specpilot_rs::device::{Buffer, Device};
use specpilot_rs::kernels::Kernel;
use specpilot_rs::kernels::append_ring::{AppendRing, AppendRingArgs, Ring};
use specpilot_rs::kernels::placed_rows::PlacedRows;

/// Name, length of a logged value row.
const SHAPES: [(&str, usize); 2] = [("demo", 512), ("27b", 6144)];
const RING_LEN: usize = 96;

/// The kernel's benches.
pub fn bench(c: &mut Criterion) {
    let device = Device::host(Some(1)).expect("worker threads");
    let mut group = c.benchmark_group("append_ring");
    for (name, row_len) in SHAPES {
        for num_rows in [1, 13, 64] {
            let tail = Buffer::from_slice(&vec![0.1_f32; 64 * row_len]);
            let mut rows = PlacedRows::default();
            rows.push(0, 40, &[], 0..num_rows as u32)
                .expect("no pages are asked for");
            let mut rings = device.try_alloc::<f32>(RING_LEN * row_len).unwrap();
            let num_bytes = num_rows * row_len * size_of::<f32>();
            group.throughput(Throughput::Bytes(num_bytes as u64));
            group.bench_function(BenchmarkId::new(name, num_rows), |b| {
                b.iter(|| {
                    let args = AppendRingArgs {
                        rows: &rows,
                        rings: vec![Ring {
                            tail: &tail,
                            row_len,
                            ring_len: RING_LEN,
                            rings: &mut rings,
                        }],
                    };
                    AppendRing::run(&device, args).expect("buffers fit the shape");
                    black_box(&rings);
                });
            });
        }
    }
    group.finish();
}
