//! Tree attention: time per layer over real head shapes, one row and trees, at growing context.

use std::hint::black_box;

use criterion::{BenchmarkId, Criterion, Throughput};
use specpilot_rs::device::{Buffer, Device};
use specpilot_rs::kernels::Kernel;
use specpilot_rs::kernels::kv_span::KvSpan;
use specpilot_rs::kernels::paths::RowPaths;
use specpilot_rs::kernels::tree_attention::{KV_BLOCK, TreeAttention, TreeAttentionArgs};

/// Name, query heads, kv heads, head length.
const SHAPES: [(&str, usize, usize, usize); 2] = [("demo", 2, 1, 128), ("27b", 24, 4, 256)];
/// Committed tokens and rows (a binary tree).
const CASES: [(usize, usize); 5] = [(500, 1), (500, 32), (500, 64), (4000, 1), (4000, 32)];

/// The kernel's benches.
pub fn bench(c: &mut Criterion) {
    let device = Device::host(None).expect("worker threads");
    let mut group = c.benchmark_group("tree_attention");
    for (name, q_heads, kv_heads, head_dim) in SHAPES {
        for (committed_len, num_rows) in CASES {
            let num_pages = committed_len.div_ceil(KV_BLOCK);
            let table: Vec<u32> = (0..num_pages as u32).collect();
            let pool_len = num_pages * KV_BLOCK * kv_heads * head_dim;
            let pages = Buffer::from_slice(&vec![0.1_f32; pool_len]);
            let tail = Buffer::from_slice(&vec![0.1_f32; num_rows * kv_heads * head_dim]);
            let q = Buffer::from_slice(&vec![0.1_f32; num_rows * q_heads * head_dim]);
            let mut out = device.try_alloc::<f32>(q.len()).unwrap();
            let mut paths = RowPaths::default();
            let parents: Vec<_> = (0..num_rows)
                .map(|i| i.checked_sub(1).map(|p| p / 2))
                .collect();
            paths
                .push_segment(0, committed_len, &table, &parents)
                .expect("a short tree");
            let flops = 4 * num_rows * committed_len * q_heads * head_dim;
            group.throughput(Throughput::Elements(flops as u64));
            let id = BenchmarkId::new(name, format!("{num_rows}_rows_at_{committed_len}"));
            group.bench_function(id, |b| {
                b.iter(|| {
                    let args = TreeAttentionArgs {
                        q: &q,
                        k_tail: &tail,
                        v_tail: &tail,
                        k_pages: &pages,
                        v_pages: &pages,
                        paths: &paths,
                        span: KvSpan::Whole,
                        q_heads,
                        kv_heads,
                        head_dim,
                        scale: 0.1,
                        window: None,
                        out: &mut out,
                    };
                    TreeAttention::run(&device, args).expect("buffers fit the shape");
                    black_box(&out);
                });
            });
        }
    }
    group.finish();
}
