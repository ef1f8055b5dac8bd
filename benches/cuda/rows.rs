//! Row-wise kernels at 27B shapes: microseconds of graph replays, bytes read and written. They are far smaller than caches and
//! launches; what counts is that they take no longer than a launch.

use half::bf16;
use serde_json::{Value, json};
use specpilot_rs::device::cuda::CudaDevice;
use specpilot_rs::device::{Device, Staged};
use specpilot_rs::kernels::Kernel;
use specpilot_rs::kernels::bf16_matmul::PackedBf16;
use specpilot_rs::kernels::embed_rows::{EmbedRows, EmbedRowsArgs};
use specpilot_rs::kernels::gate::{Gate, GateArgs, GateKind};
use specpilot_rs::kernels::gather_taps::{GatherTaps, GatherTapsArgs};
use specpilot_rs::kernels::greedy_argmax::{GreedyArgmax, GreedyArgmaxArgs};
use specpilot_rs::kernels::masked_ids::MaskedIds;
use specpilot_rs::kernels::matmul_rows::MatmulRows;
use specpilot_rs::kernels::rms_norm::{RmsNorm, RmsNormArgs};
use specpilot_rs::kernels::rope::{HeadNorm, Rope, RopeArgs, RopeHeads, Rotation};

use super::planted::gaussian;
use super::timing::{call_us, graph_us};

const HIDDEN: usize = 5120;
const INTERMEDIATE: usize = 17_408;
const VOCAB: usize = 248_320;
/// Ids of the table: rows lie as far apart as in the whole one.
const TABLE_IDS: usize = 8192;
const HEADS: usize = 24;
const KV_HEADS: usize = 4;
const HEAD_DIM: usize = 256;
const ROTARY_DIM: usize = 64;
const NUM_TAPS: usize = 5;
const NUM_ROWS: [usize; 3] = [1, 32, 64];
const NUM_CALLS: usize = 50;

/// A line, printed and kept.
pub fn figure(kernel: &str, rows: usize, us: f64, num_bytes: usize) -> Value {
    let tb_per_s = num_bytes as f64 / us / 1e6;
    println!("{kernel:16} {rows:2} rows  {us:7.2} us  {num_bytes:9} bytes  {tb_per_s:.2} TB/s");
    json!({"kernel": kernel, "rows": rows, "us": us, "bytes": num_bytes, "tb_per_s": tb_per_s})
}

/// All row counts.
pub fn bench(device: &Device, cuda: &CudaDevice) -> Vec<Value> {
    NUM_ROWS
        .into_iter()
        .flat_map(|num_rows| bench_rows(device, cuda, num_rows))
        .collect()
}

fn bench_rows(device: &Device, cuda: &CudaDevice, num_rows: usize) -> Vec<Value> {
    const F32: usize = size_of::<f32>();
    let buffer = |len: usize| device.buffer_of(&gaussian(len)).expect("room");
    let list = |values: Vec<u32>| Staged::of(device, &values).expect("room");
    let mut results = Vec::new();

    let weights: Vec<bf16> = vec![bf16::ONE; TABLE_IDS * HIDDEN];
    let table = PackedBf16::pack_on(device, &weights, TABLE_IDS, HIDDEN).expect("room");
    let token_ids = list(
        (0..num_rows)
            .map(|i| (i * 7919 % TABLE_IDS) as u32)
            .collect(),
    );
    let mut y = buffer(num_rows * HIDDEN);
    let us = graph_us(cuda, NUM_CALLS, |_| {
        let args = EmbedRowsArgs {
            table: &table,
            token_ids: &token_ids,
            scale: 1.0,
            y: &mut y,
        };
        EmbedRows::run(device, args).expect("buffers fit the shape");
    });
    let num_bytes = num_rows * HIDDEN * (2 + F32);
    results.push(figure("embed_rows", num_rows, us, num_bytes));

    let (x, weight) = (buffer(num_rows * HIDDEN), buffer(HIDDEN));
    let us = graph_us(cuda, NUM_CALLS, |_| {
        let args = RmsNormArgs {
            x: &x,
            x_offset: 0,
            x_stride: HIDDEN,
            num_vectors: num_rows,
            width: HIDDEN,
            weight: Some(&weight),
            eps: 1e-6,
            y: (&mut y).into(),
        };
        RmsNorm::run(device, args).expect("buffers fit the shape");
    });
    let num_bytes = 2 * num_rows * HIDDEN * F32;
    results.push(figure("rms_norm", num_rows, us, num_bytes));

    // Query heads of rows that hold [query | gate] per head.
    let q_projected = buffer(2 * num_rows * HEADS * HEAD_DIM);
    let k_projected = buffer(num_rows * KV_HEADS * HEAD_DIM);
    let mut q = buffer(num_rows * HEADS * HEAD_DIM);
    let mut k = buffer(num_rows * KV_HEADS * HEAD_DIM);
    let positions = list((8192..).take(num_rows).collect());
    let frequencies: Vec<f32> = (0..ROTARY_DIM / 2)
        .map(|j| 1e7_f32.powf(-2.0 * j as f32 / ROTARY_DIM as f32))
        .collect();
    let frequencies = device.buffer_of(&frequencies).expect("room");
    let us = graph_us(cuda, NUM_CALLS, |_| {
        let heads = |x, parts, num_heads, y| RopeHeads {
            norm: Some(HeadNorm {
                x,
                x_stride: parts * HEAD_DIM,
                weight: Some(&weight),
                eps: 1e-6,
            }),
            num_heads,
            y,
        };
        let args = RopeArgs {
            heads: vec![
                heads(&q_projected, 2, HEADS, &mut q),
                heads(&k_projected, 1, KV_HEADS, &mut k),
            ],
            head_dim: HEAD_DIM,
            positions: &positions,
            rotation: Some(Rotation {
                inverse_frequencies: &frequencies,
                pair_offset: ROTARY_DIM / 2,
            }),
        };
        Rope::run(device, args).expect("buffers fit the shape");
    });
    let num_bytes = 2 * num_rows * (HEADS + KV_HEADS) * HEAD_DIM * F32;
    results.push(figure("rope of normed heads", num_rows, us, num_bytes));

    let gate = buffer(num_rows * INTERMEDIATE);
    let up = buffer(num_rows * INTERMEDIATE);
    let mut rows = MatmulRows::with(INTERMEDIATE, |words| device.try_alloc(num_rows * words))
        .expect("room on the GPU");
    let us = graph_us(cuda, NUM_CALLS, |_| {
        let args = GateArgs {
            kind: GateKind::SiluMultiply,
            x: &gate,
            x_offset: 0,
            x_stride: INTERMEDIATE,
            num_vectors: num_rows,
            width: INTERMEDIATE,
            values: &up,
            per_row: 1,
            y: (&mut rows).into(),
        };
        Gate::run(device, args).expect("buffers fit the shape");
    });
    results.push(figure(
        "gate",
        num_rows,
        us,
        5 * num_rows * INTERMEDIATE * F32 / 2,
    ));

    let taps: Vec<_> = (0..NUM_TAPS).map(|_| buffer(num_rows * HIDDEN)).collect();
    let rows = list((0..num_rows as u32).rev().collect());
    let mut joined = buffer(num_rows * NUM_TAPS * HIDDEN);
    let us = graph_us(cuda, NUM_CALLS, |_| {
        let args = GatherTapsArgs {
            taps: &taps,
            rows: &rows,
            width: HIDDEN,
            y: &mut joined,
        };
        GatherTaps::run(device, args).expect("buffers fit the shape");
    });
    let num_bytes = 2 * num_rows * NUM_TAPS * HIDDEN * F32;
    results.push(figure("gather_taps", num_rows, us, num_bytes));

    let logits = buffer(num_rows * VOCAB);
    let masked = MaskedIds::of(device, &vec![&[][..]; num_rows]).expect("room");
    let (mut token_ids, mut best_logits) = (vec![0; num_rows], vec![0.0; num_rows]);
    let us = call_us(|| {
        let args = GreedyArgmaxArgs {
            logits: &logits,
            num_rows,
            vocab_size: VOCAB,
            masked: &masked,
            token_ids: &mut token_ids,
            best_logits: &mut best_logits,
        };
        GreedyArgmax::run(device, args).expect("buffers fit the shape");
    });
    results.push(figure(
        "greedy_argmax",
        num_rows,
        us,
        num_rows * VOCAB * F32,
    ));
    results
}
