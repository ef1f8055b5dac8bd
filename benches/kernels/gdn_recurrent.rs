//! Gated DeltaNet token by token: chains behind a committed state, and bringing states forward.

use std::hint::black_box;

use criterion::{BenchmarkId, Criterion, Throughput};
use specpilot_rs::device::{Buffer, Device};
use specpilot_rs::kernels::Kernel;
use specpilot_rs::kernels::gdn_recurrent::{
    AdvanceArgs, ChainArgs, GdnRecurrent, GdnRecurrentArgs, GdnRecurrentWeights, projected_len,
};
use specpilot_rs::kernels::gdn_wy::{GdnLayerCache, GdnShape, GdnTail};
use specpilot_rs::kernels::paths::RowPaths;

/// Name, key heads, value heads (heads of 128).
const SHAPES: [(&str, usize, usize); 2] = [("demo", 1, 2), ("27b", 16, 48)];
const COMMITTED_LEN: usize = 300;

fn filled(len: usize) -> Buffer<f32> {
    let values = (0..len as u32).map(|i| i.wrapping_mul(0x9E37_79B9) as i32 as f32 / 4e9);
    Buffer::from_slice(&values.collect::<Vec<_>>())
}

/// The kernel's benches.
pub fn bench(c: &mut Criterion) {
    let device = Device::host(None).expect("worker threads");
    let mut group = c.benchmark_group("gdn_recurrent");
    for (name, num_key_heads, num_value_heads) in SHAPES {
        let shape = GdnShape {
            num_key_heads,
            num_value_heads,
            key_dim: 128,
            value_dim: 128,
            conv_kernel: 4,
        };
        let mut cache = GdnLayerCache::new(&device, &shape, 1).unwrap();
        for buffer in [&mut cache.log_k, &mut cache.log_d, &mut cache.conv] {
            *buffer = filled(buffer.len());
        }
        let conv = filled(shape.conv_channels() * 4);
        let (a_log, dt_bias) = (filled(num_value_heads), filled(num_value_heads));
        for num_rows in [1, 16] {
            let mut paths = RowPaths::default();
            let parents: Vec<_> = (0..num_rows).map(|i: usize| i.checked_sub(1)).collect();
            paths
                .push_segment(0, COMMITTED_LEN, &[], &parents)
                .expect("at most 64 rows");
            let projected = filled(num_rows * projected_len(&shape));
            let mut tail = GdnTail::new(&device, &shape, num_rows).unwrap();
            let mut qkv = filled(num_rows * shape.conv_channels());
            let mut y = filled(num_rows * shape.values_len());
            let flops = 6 * num_rows * shape.state_len();
            group.throughput(Throughput::Elements(flops as u64));
            group.bench_function(BenchmarkId::new(name, format!("chain_{num_rows}")), |b| {
                b.iter(|| {
                    let args = ChainArgs {
                        shape: &shape,
                        weights: GdnRecurrentWeights {
                            conv: &conv,
                            a_log: &a_log,
                            dt_bias: &dt_bias,
                        },
                        projected: &projected,
                        paths: &paths,
                        segments: 0..1,
                        cache: &cache,
                        tail_qkv: &mut qkv,
                        tail: &mut tail,
                        y: &mut y,
                    };
                    GdnRecurrent::run(&device, GdnRecurrentArgs::Chain(args))
                        .expect("buffers fit the shape");
                    black_box(&y);
                });
            });
        }
        group.bench_function(BenchmarkId::new(name, "advance_5"), |b| {
            b.iter(|| {
                let args = AdvanceArgs {
                    shape: &shape,
                    layers: std::slice::from_mut(&mut cache),
                    slot: 0,
                    positions: COMMITTED_LEN..COMMITTED_LEN + 5,
                };
                GdnRecurrent::run(&device, GdnRecurrentArgs::Advance(args))
                    .expect("buffers fit the shape");
            });
        });
    }
    group.finish();
}
