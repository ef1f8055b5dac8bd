//! Gathering taps of accepted rows: time and bytes moved over real numbers of taps and widths.

use std::hint::black_box;

use criterion::{BenchmarkId, Criterion, Throughput};
use specpilot_rs::device::{Buffer, Device, Staged};
use specpilot_rs::kernels::Kernel;
use specpilot_rs::kernels::gather_taps::{GatherTaps, GatherTapsArgs};

/// Name, taps, width of each.
const SHAPES: [(&str, usize, usize); 2] = [("demo", 3, 256), ("27b", 5, 5120)];
/// Accepted rows of a pass of 64, and a prompt chunk.
const NUM_ROWS: [usize; 2] = [6, 64];

/// The kernel's benches.
pub fn bench(c: &mut Criterion) {
    let device = Device::host(None).expect("worker threads");
    let mut group = c.benchmark_group("gather_taps");
    for (name, num_taps, width) in SHAPES {
        let taps = vec![Buffer::from_slice(&vec![0.1_f32; 64 * width]); num_taps];
        for num_rows in NUM_ROWS {
            let step = 64 / num_rows as u32;
            let rows = Staged::on_host((0..num_rows as u32).map(|i| i * step).collect());
            let mut y = device
                .try_alloc::<f32>(num_rows * num_taps * width)
                .unwrap();
            group.throughput(Throughput::Bytes((2 * y.len() * size_of::<f32>()) as u64));
            group.bench_function(BenchmarkId::new(name, num_rows), |b| {
                b.iter(|| {
                    let args = GatherTapsArgs {
                        taps: &taps,
                        rows: &rows,
                        width,
                        y: &mut y,
                    };
                    GatherTaps::run(&device, args).expect("buffers fit the shape");
                    black_box(&y);
                });
            });
        }
    }
    group.finish();
}
