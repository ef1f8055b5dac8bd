//! Folding one interval into the state: time per layer over real shapes.

use std::hint::black_box;

use criterion::{BenchmarkId, Criterion, Throughput};
use specpilot_rs::device::Device;
use specpilot_rs::kernels::Kernel;
use specpilot_rs::kernels::gdn_fold::{GdnFold, GdnFoldArgs};
use specpilot_rs::kernels::gdn_wy::{FOLD_INTERVAL, GdnLayerCache, GdnShape};

/// Name, key heads, value heads (heads of 128).
const SHAPES: [(&str, usize, usize); 2] = [("demo", 1, 2), ("27b", 16, 48)];

/// The kernel's benches.
pub fn bench(c: &mut Criterion) {
    let device = Device::host(None).expect("worker threads");
    let mut group = c.benchmark_group("gdn_fold");
    for (name, num_key_heads, num_value_heads) in SHAPES {
        let shape = GdnShape {
            num_key_heads,
            num_value_heads,
            key_dim: 128,
            value_dim: 128,
            conv_kernel: 4,
        };
        let mut cache = GdnLayerCache::new(&device, &shape, 1).unwrap();
        cache.log_k.host_mut().fill(0.01);
        cache.log_d.host_mut().fill(0.01);
        cache.log_g.host_mut().fill(-0.1);
        let flops = 3 * FOLD_INTERVAL * shape.state_len();
        group.throughput(Throughput::Elements(flops as u64));
        group.bench_function(BenchmarkId::from_parameter(name), |b| {
            b.iter(|| {
                let args = GdnFoldArgs {
                    shape: &shape,
                    cache: &mut cache,
                    slot: 0,
                    anchor: 0,
                };
                GdnFold::run(&device, args).expect("buffers fit the shape");
                black_box(&cache);
            });
        });
    }
    group.finish();
}
