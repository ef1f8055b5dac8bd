//! Attention over the 16 attention layers of the 27B shape: microseconds a layer, and keys and values per second.

use serde_json::{Value, json};
use specpilot_rs::device::cuda::CudaDevice;
use specpilot_rs::device::{Buffer, Device};
use specpilot_rs::kernels::Kernel;
use specpilot_rs::kernels::kv_span::KvSpan;
use specpilot_rs::kernels::paths::RowPaths;
use specpilot_rs::kernels::tree_attention::{KV_BLOCK, TreeAttention, TreeAttentionArgs};

use super::numbers::{filled, tree};
use super::timing;

const NUM_LAYERS: usize = 16;
const Q_HEADS: usize = 24;
const KV_HEADS: usize = 4;
const HEAD_DIM: usize = 256;
/// Committed tokens; none fills its last block.
const CONTEXTS: [usize; 3] = [500, 2020, 8170];
/// Rows, and levels of their tree.
const CASES: [(usize, usize); 5] = [(1, 1), (8, 8), (16, 12), (32, 16), (64, 16)];

/// A line per context and number of rows.
pub fn bench(device: &Device, cuda: &CudaDevice) -> Vec<Value> {
    let mut results = Vec::new();
    for committed_len in CONTEXTS {
        let num_pages = committed_len.div_ceil(KV_BLOCK);
        let pool_len = num_pages * KV_HEADS * KV_BLOCK * HEAD_DIM;
        let layers: Vec<[Buffer<f32>; 2]> = (0..NUM_LAYERS)
            .map(|_| [filled(device, pool_len, 1.0), filled(device, pool_len, 1.0)])
            .collect();
        for (num_rows, num_levels) in CASES {
            let us = layer_us(device, cuda, &layers, committed_len, num_rows, num_levels);
            let num_bytes = 2 * committed_len * KV_HEADS * HEAD_DIM * size_of::<f32>();
            let tb_per_s = num_bytes as f64 / us / 1e6;
            println!(
                "tree_attention {num_rows:2} rows at {committed_len}: {us:6.1} us a layer, {tb_per_s:.2} TB/s of keys and values"
            );
            results.push(json!({
                "kernel": "tree_attention", "rows": num_rows, "levels": num_levels, "committed": committed_len,
                "us": us, "bytes": num_bytes, "tb_per_s": tb_per_s,
            }));
        }
    }
    results
}

fn layer_us(
    device: &Device,
    cuda: &CudaDevice,
    layers: &[[Buffer<f32>; 2]],
    committed_len: usize,
    num_rows: usize,
    num_levels: usize,
) -> f64 {
    let num_pages = committed_len.div_ceil(KV_BLOCK) as u32;
    // Neighbours in the sequence are none in the pool.
    let pages: Vec<u32> = (0..num_pages).map(|i| (i * 37 + 5) % num_pages).collect();
    let mut paths = RowPaths::default();
    paths
        .push_segment(0, committed_len, &pages, &tree(num_rows, num_levels))
        .expect("a short tree");
    paths.finish(device).expect("room for the rows");
    let [q, k, v] =
        [Q_HEADS, KV_HEADS, KV_HEADS].map(|heads| filled(device, num_rows * heads * HEAD_DIM, 1.0));
    let mut out = filled(device, q.len(), 1.0);
    timing::graph_us(cuda, NUM_LAYERS, |call| {
        let args = TreeAttentionArgs {
            q: &q,
            k_tail: &k,
            v_tail: &v,
            k_pages: &layers[call][0],
            v_pages: &layers[call][1],
            paths: &paths,
            span: KvSpan::Whole,
            q_heads: Q_HEADS,
            kv_heads: KV_HEADS,
            head_dim: HEAD_DIM,
            scale: 0.0625,
            window: None,
            out: &mut out,
        };
        TreeAttention::run(device, args).expect("a pass");
    })
}
