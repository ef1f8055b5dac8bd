//! The screened LM head against the dense one at 248320 x 5120: whole calls, results read back, by the clock.
//!
//! Ids and logits are compared first. Half of the rows lie along a channel of the head, as hidden states of a model that is
//! sure do; the others have no clear winner.

use serde_json::{Value, json};
use specpilot_rs::device::cuda::CudaDevice;
use specpilot_rs::device::{Buffer, Device, Staged};
use specpilot_rs::kernels::Kernel;
use specpilot_rs::kernels::bf16_matmul::{Bf16Matmul, Bf16MatmulArgs, Epilogue, Product};
use specpilot_rs::kernels::embed_rows::{EmbedRows, EmbedRowsArgs};
use specpilot_rs::kernels::greedy_argmax::{GreedyArgmax, GreedyArgmaxArgs};
use specpilot_rs::kernels::lm_head_screen::{
    HeadScores, LmHeadScreen, LmHeadScreenArgs, ScreenScan, ScreenedHead,
};
use specpilot_rs::kernels::masked_ids::MaskedIds;

use super::planted::{Planted, gaussian};
use super::timing::call_us;

const VOCAB: usize = 248_320;
const HIDDEN: usize = 5120;
const NUM_ROWS: [usize; 5] = [1, 8, 16, 32, 64];
const MAX_ROWS: usize = 64;

/// All row counts.
pub fn bench(device: &Device, _cuda: &CudaDevice) -> Vec<Value> {
    let planted = Planted::new(device, VOCAB, HIDDEN, 7).expect("room for a head");
    let exact = &planted.bf16;
    let head = ScreenedHead::new_on(device, exact).expect("room for a copy");
    let by_mma = head.clone().scanned_by(ScreenScan::Mma);
    let x = hidden_rows(device, &planted);
    let mut logits = device.try_alloc::<f32>(MAX_ROWS * VOCAB).expect("room");
    let mut results = Vec::new();
    for num_rows in NUM_ROWS {
        let masked = MaskedIds::of(device, &vec![&[][..]; num_rows]).expect("room");
        let (mut ids, mut best) = (vec![0; num_rows], vec![0.0; num_rows]);
        let (mut survivors, mut fell_back) = (vec![0; num_rows], vec![false; num_rows]);
        let mut decide = |head: Option<&ScreenedHead>, ids: &mut Vec<u32>| match head {
            Some(head) => {
                let args = LmHeadScreenArgs {
                    x: &x,
                    num_rows,
                    head,
                    exact,
                    scores: HeadScores::Logits,
                    masked: &masked,
                    dense_logits: &mut logits,
                    token_ids: ids,
                    best_logits: &mut best,
                    survivors: &mut survivors,
                    fell_back: &mut fell_back,
                    top2_gap: None,
                };
                LmHeadScreen::run(device, args).expect("buffers fit the shape");
                (best.clone(), survivors.clone())
            }
            None => {
                let args = Bf16MatmulArgs {
                    x: (&x).into(),
                    num_rows,
                    products: vec![Product {
                        weight: exact,
                        y: &mut logits,
                    }],
                    epilogue: Epilogue::Store,
                };
                Bf16Matmul::run(device, args).expect("buffers fit the shape");
                let args = GreedyArgmaxArgs {
                    logits: &logits,
                    num_rows,
                    vocab_size: VOCAB,
                    masked: &masked,
                    token_ids: ids,
                    best_logits: &mut best,
                };
                GreedyArgmax::run(device, args).expect("buffers fit the shape");
                (best.clone(), Vec::new())
            }
        };
        let (dense_best, _) = decide(None, &mut ids);
        let dense_ids = ids.clone();
        let mut line = format!("lm_head_screen {num_rows:2} rows");
        for (name, head) in [
            ("dense", None),
            ("wgmma", Some(&head)),
            ("mma", Some(&by_mma)),
        ] {
            let (best, survivors) = decide(head, &mut ids);
            assert!(
                ids == dense_ids && best == dense_best,
                "{name} decides otherwise"
            );
            let us = call_us(|| {
                decide(head, &mut ids);
            });
            let num_bytes = match head {
                Some(head) => head.num_bytes(),
                None => exact.num_bytes(),
            };
            let tb_per_s = num_bytes as f64 / us / 1e6;
            let most = survivors.iter().max();
            line += &format!("  {name} {us:6.1} us {tb_per_s:.2} TB/s");
            line += &most.map_or(String::new(), |most| format!(" (up to {most} survive)"));
            results.push(json!({
                "kernel": "lm_head_screen", "path": name, "rows": num_rows, "us": us, "bytes": num_bytes,
                "tb_per_s": tb_per_s, "most_survivors": most,
            }));
        }
        println!("{line}");
    }
    results
}

/// Rows of the final norm: noise, every other one with a channel of the head in it.
fn hidden_rows(device: &Device, planted: &Planted) -> Buffer<f32> {
    let ids: Vec<u32> = (0..MAX_ROWS as u32).map(|i| i * 3877 + 5).collect();
    let mut channels = device.try_alloc::<f32>(MAX_ROWS * HIDDEN).expect("room");
    let args = EmbedRowsArgs {
        table: &planted.bf16,
        token_ids: &Staged::of(device, &ids).expect("room"),
        scale: 1.0,
        y: &mut channels,
    };
    EmbedRows::run(device, args).expect("buffers fit the shape");
    let channels = channels.read_back(MAX_ROWS * HIDDEN).expect("the rows");
    let mut x = gaussian(MAX_ROWS * HIDDEN);
    for (row, (x, channel)) in x
        .chunks_exact_mut(HIDDEN)
        .zip(channels.chunks_exact(HIDDEN))
        .enumerate()
    {
        let norm = |values: &[f32]| values.iter().map(|v| v * v).sum::<f32>().sqrt();
        let share = if row % 2 == 0 {
            0.3 * norm(x) / norm(channel)
        } else {
            0.0
        };
        x.iter_mut().zip(channel).for_each(|(x, w)| *x += share * w);
    }
    device.buffer_of(&x).expect("room")
}
