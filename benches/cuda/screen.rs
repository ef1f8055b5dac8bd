//! The screened LM head against the dense one at 248320 x 5120: what the GPU does, in graph replays without a read-back, and
//! whole calls by the clock.
//!
//! Two heads: rows of independent Gaussian weights, and rows of which every tenth has a weight 64 times as large, so that its
//! codes are coarse and its bounds wide: there thousands of channels survive, and times are of rescoring. Ids and logits are
//! compared first. Half of the rows lie along a channel of the head, as hidden states of a model that is sure do; the others
//! have no clear winner. The dense path's replays are of its matmul alone, whole calls have the choice of the token, too.

use serde_json::{Value, json};
use specpilot_rs::device::cuda::CudaDevice;
use specpilot_rs::device::{Buffer, Device, Staged};
use specpilot_rs::kernels::Kernel;
use specpilot_rs::kernels::bf16_matmul::{
    Bf16Matmul, Bf16MatmulArgs, Epilogue, PackedBf16, Product,
};
use specpilot_rs::kernels::embed_rows::{EmbedRows, EmbedRowsArgs};
use specpilot_rs::kernels::greedy_argmax::{GreedyArgmax, GreedyArgmaxArgs};
use specpilot_rs::kernels::lm_head_screen::{
    HeadScores, LmHeadScreen, LmHeadScreenArgs, ScreenScan, ScreenedHead, enqueue,
};
use specpilot_rs::kernels::masked_ids::MaskedIds;
use specpilot_rs::kernels::plant_matrix::{Recipe, RecipeKind, plant_bf16};

use super::planted::gaussian;
use super::timing::{call_us, graph_us};

const VOCAB: usize = 248_320;
const HIDDEN: usize = 5120;
const NUM_ROWS: [usize; 5] = [1, 8, 16, 32, 40];
const MAX_ROWS: usize = 40;
/// Calls in a graph.
const NUM_CALLS: usize = 4;

/// All heads and row counts.
pub fn bench(device: &Device, cuda: &CudaDevice) -> Vec<Value> {
    let heads = [
        ("gaussian", RecipeKind::Table),
        ("outliers", RecipeKind::Layer),
    ];
    let of_head = |(name, kind)| bench_head(device, cuda, name, kind);
    heads.into_iter().flat_map(of_head).collect()
}

/// One head with its rows.
struct Case<'a> {
    device: &'a Device,
    cuda: &'a CudaDevice,
    exact: &'a PackedBf16,
    x: &'a Buffer<f32>,
    logits: Buffer<f32>,
}

/// What a decision found.
#[derive(Default)]
struct Found {
    token_ids: Vec<u32>,
    best_logits: Vec<f32>,
    survivors: Vec<u32>,
    fell_back: Vec<bool>,
}

impl Found {
    fn of(num_rows: usize) -> Self {
        Self {
            token_ids: vec![0; num_rows],
            best_logits: vec![0.0; num_rows],
            survivors: vec![0; num_rows],
            fell_back: vec![false; num_rows],
        }
    }
}

fn bench_head(device: &Device, cuda: &CudaDevice, head_name: &str, kind: RecipeKind) -> Vec<Value> {
    let recipe = Recipe {
        seed: 7,
        deviation: 0.02,
        kind,
    };
    let exact = plant_bf16(device, recipe, [VOCAB, HIDDEN]).expect("room for a head");
    let head = ScreenedHead::new_on(device, &exact).expect("room for a copy");
    let by_mma = head.clone().scanned_by(ScreenScan::Mma);
    let x = hidden_rows(device, &exact);
    let mut case = Case {
        device,
        cuda,
        exact: &exact,
        x: &x,
        logits: device.try_alloc(MAX_ROWS * VOCAB).expect("room"),
    };
    let mut results = Vec::new();
    for num_rows in NUM_ROWS {
        let masked = MaskedIds::of(device, &vec![&[][..]; num_rows]).expect("room");
        let mut dense = Found::of(num_rows);
        case.decide_densely(&masked, &mut dense);
        let mut line = format!("lm_head_screen, {head_name} head, {num_rows:2} rows");
        for (name, head) in [
            ("dense", None),
            ("wgmma", Some(&head)),
            ("mma", Some(&by_mma)),
        ] {
            let mut found = Found::of(num_rows);
            let graph = match head {
                Some(head) => {
                    case.screen(head, &masked, &mut found);
                    assert!(
                        found.token_ids == dense.token_ids
                            && found.best_logits == dense.best_logits,
                        "{name} decides otherwise"
                    );
                    case.screen_us(head, &masked, &mut found)
                }
                None => case.matmul_us(num_rows),
            };
            let call = call_us(|| match head {
                Some(head) => case.screen(head, &masked, &mut found),
                None => case.decide_densely(&masked, &mut found),
            });
            let num_bytes = head.map_or(exact.num_bytes(), ScreenedHead::num_bytes);
            let tb_per_s = num_bytes as f64 / graph / 1e6;
            let most = head.and(found.survivors.iter().max());
            let num_fallen = found.fell_back.iter().filter(|&&fell| fell).count();
            line += &format!("  {name} {graph:6.1} us {tb_per_s:.2} TB/s, call {call:6.1}");
            line += &most.map_or(String::new(), |most| {
                format!(" ({most} survive at most, {num_fallen} fell back)")
            });
            results.push(json!({
                "kernel": "lm_head_screen", "head": head_name, "path": name, "rows": num_rows, "graph_us": graph,
                "call_us": call, "bytes": num_bytes, "tb_per_s": tb_per_s, "most_survivors": most,
                "fallbacks": num_fallen,
            }));
        }
        println!("{line}");
    }
    results
}

impl Case<'_> {
    fn args<'a>(
        &'a mut self,
        head: &'a ScreenedHead,
        masked: &'a MaskedIds,
        found: &'a mut Found,
    ) -> LmHeadScreenArgs<'a> {
        LmHeadScreenArgs {
            x: self.x,
            num_rows: found.token_ids.len(),
            head,
            exact: self.exact,
            scores: HeadScores::Logits,
            masked,
            dense_logits: &mut self.logits,
            token_ids: &mut found.token_ids,
            best_logits: &mut found.best_logits,
            survivors: &mut found.survivors,
            fell_back: &mut found.fell_back,
            top2_gap: None,
        }
    }

    fn screen(&mut self, head: &ScreenedHead, masked: &MaskedIds, found: &mut Found) {
        let device = self.device;
        let args = self.args(head, masked, found);
        LmHeadScreen::run(device, args).expect("buffers fit the shape");
    }

    fn screen_us(&mut self, head: &ScreenedHead, masked: &MaskedIds, found: &mut Found) -> f64 {
        let cuda = self.cuda;
        let args = self.args(head, masked, found);
        graph_us(cuda, NUM_CALLS, |_| {
            enqueue(cuda, &args).expect("buffers fit the shape");
        })
    }

    fn multiply(&mut self, num_rows: usize) {
        let args = Bf16MatmulArgs {
            x: self.x.into(),
            num_rows,
            products: vec![Product {
                weight: self.exact,
                y: &mut self.logits,
            }],
            epilogue: Epilogue::Store,
        };
        Bf16Matmul::run(self.device, args).expect("buffers fit the shape");
    }

    fn matmul_us(&mut self, num_rows: usize) -> f64 {
        graph_us(self.cuda, NUM_CALLS, |_| self.multiply(num_rows))
    }

    fn decide_densely(&mut self, masked: &MaskedIds, found: &mut Found) {
        let num_rows = found.token_ids.len();
        self.multiply(num_rows);
        let args = GreedyArgmaxArgs {
            logits: &self.logits,
            num_rows,
            vocab_size: VOCAB,
            masked,
            token_ids: &mut found.token_ids,
            best_logits: &mut found.best_logits,
        };
        GreedyArgmax::run(self.device, args).expect("buffers fit the shape");
    }
}

/// Rows of the final norm: noise, every other one with a channel of the head in it.
fn hidden_rows(device: &Device, exact: &PackedBf16) -> Buffer<f32> {
    let ids: Vec<u32> = (0..MAX_ROWS as u32).map(|i| i * 3877 + 5).collect();
    let mut channels = device.try_alloc::<f32>(MAX_ROWS * HIDDEN).expect("room");
    let args = EmbedRowsArgs {
        table: exact,
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
