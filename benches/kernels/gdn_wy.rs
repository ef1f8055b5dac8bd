//! Gated DeltaNet rows: time per layer over real shapes, for one row, trees and prompt chunks, at the longest log.

use std::hint::black_box;

use criterion::{BenchmarkId, Criterion, Throughput};
use specpilot_rs::device::{Buffer, Device};
use specpilot_rs::kernels::Kernel;
use specpilot_rs::kernels::gdn_wy::{
    GdnLayerCache, GdnShape, GdnTail, GdnWeights, GdnWy, GdnWyArgs, anchor_of,
};
use specpilot_rs::kernels::paths::RowPaths;

/// Name, key heads, value heads (heads of 128).
const SHAPES: [(&str, usize, usize); 2] = [("demo", 1, 2), ("27b", 16, 48)];
/// Committed tokens: the first row reads 95 entries.
const COMMITTED_LEN: usize = 64 + 32 * 8 + 31;

fn filled(len: usize) -> Buffer<f32> {
    let values = (0..len as u32).map(|i| i.wrapping_mul(0x9E37_79B9) as i32 as f32 / 4e9);
    Buffer::from_slice(&values.collect::<Vec<_>>())
}

/// The kernel's benches.
pub fn bench(c: &mut Criterion) {
    let device = Device::host(None).expect("worker threads");
    let mut group = c.benchmark_group("gdn_wy");
    for (name, num_key_heads, num_value_heads) in SHAPES {
        let shape = GdnShape {
            num_key_heads,
            num_value_heads,
            key_dim: 128,
            value_dim: 128,
            conv_kernel: 4,
        };
        let mut cache = GdnLayerCache::new(&device, &shape, 1).unwrap();
        for buffer in [
            &mut cache.states,
            &mut cache.log_k,
            &mut cache.log_d,
            &mut cache.conv,
        ] {
            *buffer = filled(buffer.len());
        }
        let [conv, a_log, dt_bias, norm] = [
            shape.conv_channels() * 4,
            num_value_heads,
            num_value_heads,
            shape.value_dim,
        ]
        .map(filled);
        for (kind, num_rows) in [("chain", 1), ("tree", 32), ("tree", 64), ("chain", 64)] {
            let parent = |i: usize| match kind {
                "chain" => i.checked_sub(1),
                _ => i.checked_sub(1).map(|p| p / 2),
            };
            let parents: Vec<_> = (0..num_rows).map(parent).collect();
            let mut paths = RowPaths::default();
            paths
                .push_segment(0, COMMITTED_LEN, &[], &parents)
                .expect("at most 64 rows");
            let [qkv, z, a, b] = [
                num_rows * shape.conv_channels(),
                num_rows * shape.values_len(),
                num_rows * num_value_heads,
                num_rows * num_value_heads,
            ]
            .map(filled);
            let mut tail = GdnTail::new(&device, &shape, num_rows).unwrap();
            let mut y = device
                .try_alloc::<f32>(num_rows * shape.values_len())
                .unwrap();
            let entries = |p: &u32| *p as usize - anchor_of(*p as usize);
            let num_entries: usize = paths.positions().values().iter().map(entries).sum();
            let flops = 4 * shape.values_len() * (num_rows * shape.key_dim + num_entries)
                + 4 * shape.keys_len() * num_entries;
            group.throughput(Throughput::Elements(flops as u64));
            group.bench_function(
                BenchmarkId::new(name, format!("{kind}_{num_rows}")),
                |bench| {
                    bench.iter(|| {
                        let args = GdnWyArgs {
                            shape: &shape,
                            weights: GdnWeights {
                                conv: &conv,
                                a_log: &a_log,
                                dt_bias: &dt_bias,
                                norm: &norm,
                                norm_eps: 1e-6,
                            },
                            qkv: &qkv,
                            z: &z,
                            a: &a,
                            b: &b,
                            paths: &paths,
                            segments: 0..1,
                            cache: &cache,
                            tail: &mut tail,
                            y: (&mut y).into(),
                        };
                        GdnWy::run(&device, args).expect("buffers fit the shape");
                        black_box(&y);
                    });
                },
            );
        }
    }
    group.finish();
}
