//! Appending accepted rows to pages: bytes per second over real head shapes.

use std::hint::black_box;

use criterion::{BenchmarkId, Criterion, Throughput};
use specpilot_rs::device::{Buffer, Device};
use specpilot_rs::kernels::Kernel;
use specpilot_rs::kernels::append_kv::{AppendKv, AppendKvArgs, KvLayer};
use specpilot_rs::kernels::kv_span::KvSpan;
use specpilot_rs::kernels::placed_rows::PlacedRows;
use specpilot_rs::kernels::tree_attention::KV_BLOCK;

/// Name, kv heads, head length.
const SHAPES: [(&str, usize, usize); 2] = [("demo", 1, 128), ("27b", 4, 256)];

/// The kernel's benches.
pub fn bench(c: &mut Criterion) {
    let device = Device::host(Some(1)).expect("worker threads");
    let mut group = c.benchmark_group("append_kv");
    for (name, kv_heads, head_dim) in SHAPES {
        for num_rows in [1, 13, 64] {
            let row_len = kv_heads * head_dim;
            let tail = Buffer::from_slice(&vec![0.1_f32; 64 * row_len]);
            let mut rows = PlacedRows::default();
            rows.push(0, 40, &[1, 0], 0..num_rows as u32)
                .expect("two pages hold the rows");
            let mut k_pages = device.try_alloc::<f32>(2 * KV_BLOCK * row_len).unwrap();
            let mut v_pages = device.try_alloc::<f32>(2 * KV_BLOCK * row_len).unwrap();
            let num_bytes = 2 * num_rows * row_len * size_of::<f32>();
            group.throughput(Throughput::Bytes(num_bytes as u64));
            group.bench_function(BenchmarkId::new(name, num_rows), |b| {
                b.iter(|| {
                    let args = AppendKvArgs {
                        rows: &rows,
                        span: KvSpan::Whole,
                        layers: vec![KvLayer {
                            k_tail: &tail,
                            v_tail: &tail,
                            kv_heads,
                            head_dim,
                            k_pages: &mut k_pages,
                            v_pages: &mut v_pages,
                        }],
                    };
                    AppendKv::run(&device, args).expect("buffers fit the shape");
                    black_box((&k_pages, &v_pages));
                });
            });
        }
    }
    group.finish();
}
