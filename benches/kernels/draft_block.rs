//! Block attention: time per layer over real head shapes, at growing context and with the published window.

use std::hint::black_box;

use criterion::{BenchmarkId, Criterion, Throughput};
use specpilot_rs::device::{Buffer, Device};
use specpilot_rs::kernels::Kernel;
use specpilot_rs::kernels::draft_block::{BlockContext, BlockContexts, DraftBlock, DraftBlockArgs};
use specpilot_rs::kernels::tree_attention::KV_BLOCK;

/// Name, block size, query heads, kv heads, head length.
const SHAPES: [(&str, usize, usize, usize, usize); 2] =
    [("demo", 16, 4, 2, 64), ("27b_dflash2", 8, 32, 8, 128)];
/// Context and window.
const CASES: [(usize, Option<usize>); 3] = [(200, None), (2000, None), (8000, Some(2048))];

/// The kernel's benches.
pub fn bench(c: &mut Criterion) {
    let device = Device::host(None).expect("worker threads");
    let mut group = c.benchmark_group("draft_block");
    for (name, block_size, q_heads, kv_heads, head_dim) in SHAPES {
        for (context_len, window) in CASES {
            let num_pages = context_len.div_ceil(KV_BLOCK);
            let page_table: Vec<u32> = (0..num_pages as u32).collect();
            let context = BlockContext {
                page_table: &page_table,
                context_len,
            };
            let contexts = BlockContexts::of(&device, &[context]).unwrap();
            let pages =
                Buffer::from_slice(&vec![0.1_f32; num_pages * KV_BLOCK * kv_heads * head_dim]);
            let block = Buffer::from_slice(&vec![0.1_f32; block_size * kv_heads * head_dim]);
            let q = Buffer::from_slice(&vec![0.1_f32; block_size * q_heads * head_dim]);
            let mut out = device.try_alloc::<f32>(q.len()).unwrap();
            let num_keys =
                window.map_or(context_len, |window| window.min(context_len)) + block_size;
            let flops = 4 * block_size * num_keys * q_heads * head_dim;
            group.throughput(Throughput::Elements(flops as u64));
            group.bench_function(BenchmarkId::new(name, context_len), |b| {
                b.iter(|| {
                    let args = DraftBlockArgs {
                        q: &q,
                        k_block: &block,
                        v_block: &block,
                        k_pages: &pages,
                        v_pages: &pages,
                        contexts: &contexts,
                        block_size,
                        q_heads,
                        kv_heads,
                        head_dim,
                        scale: 0.1,
                        window,
                        causal: false,
                        out: &mut out,
                    };
                    DraftBlock::run(&device, args).expect("buffers fit the shape");
                    black_box(&out);
                });
            });
        }
    }
    group.finish();
}
