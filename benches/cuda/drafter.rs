//! The drafter's kernels at the shapes of DFlash2 for a 27B target.

use half::bf16;
use serde_json::Value;
use specpilot_rs::device::cuda::CudaDevice;
use specpilot_rs::device::{Device, Staged};
use specpilot_rs::kernels::Kernel;
use specpilot_rs::kernels::bf16_matmul::PackedBf16;
use specpilot_rs::kernels::block_conv::{BlockConv, BlockConvArgs, ConvSide};
use specpilot_rs::kernels::draft_block::{BlockContext, BlockContexts, DraftBlock, DraftBlockArgs};
use specpilot_rs::kernels::draft_select::{DraftSelect, DraftSelectArgs, LogitShape, Selector};
use specpilot_rs::kernels::tree_attention::KV_BLOCK;

use super::planted::gaussian;
use super::rows::figure;
use super::timing::graph_us;

const BLOCK_SIZE: usize = 16;
const HIDDEN: usize = 5120;
const Q_HEADS: usize = 32;
const KV_HEADS: usize = 8;
const HEAD_DIM: usize = 128;
const VOCAB: usize = 248_320;
const RANK: usize = 256;
const TOP_K: usize = 16;
const CONV_TAPS: usize = 2;
const CONV_GROUP: usize = 16;
/// Context and window.
const CONTEXTS: [(usize, Option<usize>); 3] = [(512, None), (2048, None), (8192, Some(2048))];
const NUM_CALLS: usize = 20;

/// One block.
pub fn bench(device: &Device, cuda: &CudaDevice) -> Vec<Value> {
    const F32: usize = size_of::<f32>();
    let buffer = |len: usize| device.buffer_of(&gaussian(len)).expect("room");
    let mut results = Vec::new();

    let groups = HIDDEN / CONV_GROUP;
    let x = buffer(BLOCK_SIZE * HIDDEN);
    let delta = buffer(BLOCK_SIZE * 2 * CONV_TAPS * groups);
    let base = buffer(2 * CONV_TAPS * HIDDEN);
    let mut y = buffer(BLOCK_SIZE * HIDDEN);
    let us = graph_us(cuda, NUM_CALLS, |_| {
        let args = BlockConvArgs {
            x: &x,
            delta: &delta,
            base: &base,
            side: ConvSide::Input,
            num_rows: BLOCK_SIZE,
            num_blocks: 1,
            width: HIDDEN,
            kernel_size: CONV_TAPS,
            group_size: CONV_GROUP,
            y: (&mut y).into(),
        };
        BlockConv::run(device, args).expect("buffers fit the shape");
    });
    let num_bytes = 2 * BLOCK_SIZE * HIDDEN * F32;
    results.push(figure("block_conv", BLOCK_SIZE, us, num_bytes));

    for (context_len, window) in CONTEXTS {
        let num_pages = context_len / KV_BLOCK;
        let page_table: Vec<u32> = (0..num_pages as u32).rev().collect();
        let context = BlockContext {
            page_table: &page_table,
            context_len,
        };
        let contexts = BlockContexts::of(device, &[context]).expect("room");
        let page_len = KV_HEADS * KV_BLOCK * HEAD_DIM;
        let (k_pages, v_pages) = (buffer(num_pages * page_len), buffer(num_pages * page_len));
        let block = buffer(BLOCK_SIZE * KV_HEADS * HEAD_DIM);
        let q = buffer(BLOCK_SIZE * Q_HEADS * HEAD_DIM);
        let mut out = buffer(BLOCK_SIZE * Q_HEADS * HEAD_DIM);
        let us = graph_us(cuda, NUM_CALLS, |_| {
            let args = DraftBlockArgs {
                q: &q,
                k_block: &block,
                v_block: &block,
                k_pages: &k_pages,
                v_pages: &v_pages,
                contexts: &contexts,
                block_size: BLOCK_SIZE,
                q_heads: Q_HEADS,
                kv_heads: KV_HEADS,
                head_dim: HEAD_DIM,
                scale: 0.1,
                window,
                causal: false,
                out: &mut out,
            };
            DraftBlock::run(device, args).expect("buffers fit the shape");
        });
        let num_keys = window.map_or(context_len, |window| window.min(context_len));
        let num_bytes = 2 * num_keys * KV_HEADS * HEAD_DIM * F32;
        let name = format!("draft_block {num_keys}");
        results.push(figure(&name, BLOCK_SIZE, us, num_bytes));
    }

    let num_levels = BLOCK_SIZE - 1;
    let logits = buffer(num_levels * VOCAB);
    let gate = buffer(num_levels * RANK);
    let weights: Vec<bf16> = gaussian(VOCAB * RANK)
        .into_iter()
        .map(bf16::from_f32)
        .collect();
    let codebook = PackedBf16::pack_on(device, &weights, VOCAB, RANK).expect("room");
    let anchor_tokens = Staged::of(device, &[7]).expect("room");
    let mut token_ids = device.try_alloc::<u32>(num_levels * TOP_K).expect("room");
    let mut log_probs = buffer(num_levels * TOP_K * TOP_K);
    for (name, with_selector) in [("draft_select", false), ("draft_select S", true)] {
        let us = graph_us(cuda, NUM_CALLS, |_| {
            let args = DraftSelectArgs {
                logits: &logits,
                vocab_size: VOCAB,
                num_levels,
                num_blocks: 1,
                top_k: TOP_K,
                shape: LogitShape::PLAIN,
                selector: with_selector.then_some(Selector {
                    gate: &gate,
                    predecessor: &codebook,
                    successor: &codebook,
                    anchor_tokens: &anchor_tokens,
                }),
                token_ids: &mut token_ids,
                log_probs: &mut log_probs,
            };
            DraftSelect::run(device, args).expect("buffers fit the shape");
        });
        results.push(figure(name, num_levels, us, num_levels * VOCAB * F32));
    }
    results
}
