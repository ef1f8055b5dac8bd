//! Committing rows of the 27B shape to all caches: microseconds a commit.

use serde_json::{Value, json};
use specpilot_rs::device::cuda::CudaDevice;
use specpilot_rs::device::{Buffer, Device};
use specpilot_rs::kernels::Kernel;
use specpilot_rs::kernels::append_kv::{AppendKv, AppendKvArgs, KvLayer};
use specpilot_rs::kernels::append_ring::{AppendRing, AppendRingArgs, Ring};
use specpilot_rs::kernels::kv_span::KvSpan;
use specpilot_rs::kernels::placed_rows::PlacedRows;
use specpilot_rs::kernels::tree_attention::KV_BLOCK;

use super::numbers::filled;
use super::timing;

const NUM_GDN_LAYERS: usize = 48;
const NUM_ATTENTION_LAYERS: usize = 16;
const KV_HEADS: usize = 4;
const HEAD_DIM: usize = 256;
/// Lengths of a layer's rows k, d, g and convolution inputs, and of their rings.
const RINGS: [(usize, usize); 4] = [(2048, 128), (6144, 128), (48, 128), (10240, 4)];
const PASS_ROWS: usize = 64;

/// A line per number of rows.
pub fn bench(device: &Device, cuda: &CudaDevice) -> Vec<Value> {
    let rows_of = |len: usize, num: usize| filled(device, len * num, 1.0);
    let tails = RINGS.map(|(row_len, _)| rows_of(row_len, PASS_ROWS));
    let mut rings: Vec<Buffer<f32>> = (0..NUM_GDN_LAYERS)
        .flat_map(|_| RINGS)
        .map(|(row_len, ring_len)| rows_of(row_len, ring_len))
        .collect();
    let kv_tail = rows_of(KV_HEADS * HEAD_DIM, PASS_ROWS);
    let mut pages: Vec<[Buffer<f32>; 2]> = (0..NUM_ATTENTION_LAYERS)
        .map(|_| [(); 2].map(|()| rows_of(KV_HEADS * HEAD_DIM, 2 * KV_BLOCK)))
        .collect();
    let mut results = Vec::new();
    for num_rows in [1, 13, 64] {
        let mut rows = PlacedRows::default();
        rows.push(0, 40, &[1, 0], 0..num_rows)
            .expect("two pages hold the rows");
        rows.finish(device).expect("room for the rows");
        let us = timing::graph_us(cuda, 1, |_| {
            let rings = rings.iter_mut().enumerate().map(|(i, rings)| Ring {
                tail: &tails[i % RINGS.len()],
                row_len: RINGS[i % RINGS.len()].0,
                ring_len: RINGS[i % RINGS.len()].1,
                rings,
            });
            let rings = rings.collect();
            AppendRing::run(device, AppendRingArgs { rows: &rows, rings }).expect("a commit");
            let layers = pages.iter_mut().map(|[k_pages, v_pages]| KvLayer {
                k_tail: &kv_tail,
                v_tail: &kv_tail,
                kv_heads: KV_HEADS,
                head_dim: HEAD_DIM,
                k_pages,
                v_pages,
            });
            let layers = layers.collect();
            AppendKv::run(
                device,
                AppendKvArgs {
                    rows: &rows,
                    span: KvSpan::Whole,
                    layers,
                },
            )
            .expect("a commit");
        });
        let row_len: usize = RINGS.iter().map(|(row_len, _)| row_len).sum();
        let num_bytes = num_rows as usize
            * (NUM_GDN_LAYERS * row_len + NUM_ATTENTION_LAYERS * 2 * KV_HEADS * HEAD_DIM)
            * size_of::<f32>();
        println!("append {num_rows:2} rows: {us:6.1} us, {num_bytes} bytes");
        results.push(json!({"kernel": "append", "rows": num_rows, "us": us, "bytes": num_bytes}));
    }
    results
}
