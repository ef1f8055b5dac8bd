//! Drafts after the positions of an independent implementation's rounds: the same chains from exact context rows, and
//! clearly others when one alignment is wrong.
//!
//! The target's taps are computed once over each prompt and its continuation; the drafter then stands, round by round,
//! where the golden one stood. Each planted error is one that is easily made and says nothing when it is.

use std::path::Path;

use serde_json::{Value, json};

use crate::cache::gdn_state::Recurrence;
use crate::cache::slots::{CacheSizes, SequenceCaches};
use crate::device::Buffer;
use crate::drafter::config::format::tests::{
    deepspec_copy, speculators_dspark_copy, speculators_eagle3_copy,
};
use crate::drafter::proposal::{Candidate, Proposal};
use crate::drafter::tests::{Target, demo, open_in, sizes, target};
use crate::drafter::{ContextRows, DraftAnchor, DraftRequest, Drafter, Standing};
use crate::kernels::Kernel;
use crate::kernels::kv_span::PerSpan;
use crate::kernels::paths::RowPaths;
use crate::kernels::placed_rows::PlacedRows;
use crate::kernels::rms_norm::{RmsNorm, RmsNormArgs};
use crate::kernels::w12_matmul::WeightView;
use crate::model::Lent;
use crate::model::decoder::Decoder;
use crate::model::head::HeadPath;
use crate::model::weights::DecoderWeights;
use crate::options::WeightFormat;
use crate::options::speculation::DraftScores;
use crate::plan::footprint::gdn_shape;
use crate::plan::layer_caches;
use crate::weights::Checkpoint;
use crate::weights::raw_safetensors::{RawTensor, copy, demo_target, edit_json, edit_tensors};

const HIDDEN: usize = 256;
/// Pages of a context: the longest case has 130 positions.
const NUM_PAGES: usize = 4;
/// Positions that are left when a context is cut.
const CUT_TO: usize = 8;
/// Length of a code of the demo DSpark's Markov head.
const RANK: usize = 64;
/// A weight that takes whatever it multiplies to one end of a sigmoid.
const STEEP: f32 = (1 << 30) as f32;

struct Round {
    anchor: usize,
    draft: Vec<u32>,
}

struct Case {
    token_ids: Vec<u32>,
    rounds: Vec<Round>,
}

fn ids(value: &Value) -> Vec<u32> {
    serde_json::from_value(value.clone()).unwrap()
}

fn cases(method: &str) -> Vec<Case> {
    let text = std::fs::read(demo("golden.json")).unwrap();
    let golden: Value = serde_json::from_slice(&text).unwrap();
    let case = |case: &Value| Case {
        token_ids: [ids(&case["prompt_ids"]), ids(&case["greedy_ids"])].concat(),
        rounds: case["rounds"][method]
            .as_array()
            .unwrap()
            .iter()
            .map(|round| Round {
                anchor: round["anchor"].as_u64().unwrap() as usize,
                draft: ids(&round["draft"]),
            })
            .collect(),
    };
    golden["cases"]
        .as_array()
        .unwrap()
        .iter()
        .map(case)
        .collect()
}

/// Outputs of `layers` at every position of `token_ids`, by the target's own forward.
fn taps(layers: &[usize], token_ids: &[u32]) -> Vec<Buffer<f32>> {
    let Target { config, device, .. } = target();
    let checkpoint = Checkpoint::open(&demo_target()).unwrap();
    let format = WeightFormat::Auto;
    let weights = DecoderWeights::load(device, &checkpoint, config, format, false).unwrap();
    let head = HeadPath::Dense;
    let mut decoder = Decoder::new(config.clone(), weights, layers, head, 64, device).unwrap();
    let shape = gdn_shape(config);
    let cached = layer_caches(config);
    let cache_sizes = CacheSizes {
        num_slots: 1,
        num_pages: PerSpan::whole_only(NUM_PAGES),
        settled_rows: 0,
    };
    let mut caches =
        SequenceCaches::new(device, &cached, Recurrence::Anchored, shape, cache_sizes).unwrap();
    let slot = caches.admit(token_ids.len()).unwrap();
    let mut taps = vec![Vec::new(); layers.len()];
    for (chunk_index, chunk) in token_ids.chunks(32).enumerate() {
        let first = 32 * chunk_index;
        let parents: Vec<_> = (0..chunk.len()).map(|i: usize| i.checked_sub(1)).collect();
        let mut paths = RowPaths::default();
        let pages = caches.pages(slot);
        paths.push_segment(slot, first, pages, &parents).unwrap();
        paths.finish(device).unwrap();
        caches.prepare(device, &paths).unwrap();
        decoder
            .forward(device, WeightView::Exact, chunk, &paths, &mut caches, None)
            .unwrap();
        for (tap, rows) in taps.iter_mut().zip(decoder.taps()) {
            tap.extend_from_slice(&rows.host()[..chunk.len() * HIDDEN]);
        }
        let mut rows = PlacedRows::default();
        let pages = caches.pages(slot);
        rows.push(slot, first, pages, 0..chunk.len() as u32)
            .unwrap();
        decoder.commit(device, &mut caches, &rows).unwrap();
    }
    taps.iter().map(|tap| Buffer::from_slice(tap)).collect()
}

/// What is done wrong on the way from the target to the drafter.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Mistake {
    None,
    /// Taps go through the target's final norm.
    NormedTaps,
    /// Positions before the last few say nothing.
    CutContext,
    /// Each position comes with the token before its own.
    ShiftedTokens,
}

fn normed(taps: &[Buffer<f32>]) -> Vec<Buffer<f32>> {
    let Target {
        weights,
        device,
        config,
        ..
    } = target();
    let norm = |tap: &Buffer<f32>| {
        let mut y = tap.clone();
        let args = RmsNormArgs {
            x: tap,
            x_offset: 0,
            x_stride: HIDDEN,
            num_vectors: tap.len() / HIDDEN,
            width: HIDDEN,
            weight: Some(&weights.final_norm),
            eps: config.rms_norm_eps,
            y: (&mut y).into(),
        };
        RmsNorm::run(device, args).unwrap();
        y
    };
    taps.iter().map(norm).collect()
}

fn cut(taps: &[Buffer<f32>], end: usize) -> Vec<Buffer<f32>> {
    let mut cut = taps.to_vec();
    for tap in &mut cut {
        tap.host_mut()[..end.saturating_sub(CUT_TO) * HIDDEN].fill(0.0);
    }
    cut
}

/// How a replay compares with the golden one.
struct Replay {
    num_rounds: usize,
    num_equal: usize,
    /// Tokens per round, the target's own included.
    tau: f64,
    golden_tau: f64,
    /// What was drafted, round by round.
    drafts: Vec<Vec<u32>>,
}

fn replay(dir: &Path, method: &str, mistake: Mistake) -> Replay {
    replay_by(dir, method, mistake, target().lent())
}

/// A replay whose chains are drafted by what `lent` says.
fn replay_by(dir: &Path, method: &str, mistake: Mistake, lent: Lent<'_>) -> Replay {
    let cases = cases(method);
    let num_drafts = cases[0].rounds[0].draft.len();
    let mut drafter = open_in(Some(dir), sizes(NUM_PAGES, num_drafts)).unwrap();
    let (mut num_rounds, mut num_equal, mut num_tokens, mut num_golden) = (0, 0, 0, 0);
    let mut drafts = Vec::new();
    for Case { token_ids, rounds } in &cases {
        let exact = taps(drafter.taps(), token_ids);
        let given = match mistake {
            Mistake::NormedTaps => normed(&exact),
            _ => exact,
        };
        let accepted = |draft: &[u32], anchor: usize| {
            let rest = &token_ids[anchor + 1..];
            draft.iter().zip(rest).take_while(|(a, b)| a == b).count()
        };
        let mut end = 0;
        assert!(drafter.reserve(0, token_ids.len()));
        for Round { anchor, draft } in rounds {
            let shift = usize::from(mistake == Mistake::ShiftedTokens);
            if mistake == Mistake::CutContext {
                drafter.release(0);
                assert!(drafter.reserve(0, token_ids.len()));
                extend(
                    &mut *drafter,
                    &cut(&given, *anchor),
                    token_ids,
                    0..*anchor,
                    0,
                );
            } else {
                extend(&mut *drafter, &given, token_ids, end..*anchor, shift);
            }
            end = *anchor;
            let got = chain(&mut *drafter, lent, token_ids[*anchor], *anchor, num_drafts);
            num_rounds += 1;
            num_equal += usize::from(got == *draft);
            num_tokens += 1 + accepted(&got, *anchor);
            num_golden += 1 + accepted(draft, *anchor);
            drafts.push(got);
        }
        drafter.release(0);
    }
    let mean = |sum: usize| sum as f64 / num_rounds as f64;
    Replay {
        num_rounds,
        num_equal,
        tau: mean(num_tokens),
        golden_tau: mean(num_golden),
        drafts,
    }
}

fn extend(
    drafter: &mut dyn Drafter,
    taps: &[Buffer<f32>],
    token_ids: &[u32],
    positions: std::ops::Range<usize>,
    shift: usize,
) {
    let target = target();
    let rows: Vec<u32> = positions.clone().map(|position| position as u32).collect();
    let tokens: Vec<u32> = positions
        .clone()
        .map(|position| token_ids[position.saturating_sub(shift)])
        .collect();
    let rows = ContextRows {
        slot: 0,
        first_position: positions.start,
        taps,
        rows: &rows,
        token_ids: &tokens,
        standing: Standing::Verified,
    };
    drafter.extend(&target.device, target.lent(), rows).unwrap();
}

/// The greedy chain that follows an anchor.
fn chain(
    drafter: &mut dyn Drafter,
    lent: Lent<'_>,
    token_id: u32,
    position: usize,
    num_draft_tokens: usize,
) -> Vec<u32> {
    confident_chain(drafter, lent, token_id, position, num_draft_tokens, 0.0)
}

/// As much of it as is confident enough.
fn confident_chain(
    drafter: &mut dyn Drafter,
    lent: Lent<'_>,
    token_id: u32,
    position: usize,
    num_draft_tokens: usize,
    min_confidence: f64,
) -> Vec<u32> {
    let anchor = DraftAnchor {
        slot: 0,
        token_id,
        position,
    };
    let wanted = DraftRequest {
        num_draft_tokens,
        scores: DraftScores::Greedy,
        width: 1,
        min_confidence,
    };
    let mut proposals = [Proposal::default()];
    drafter
        .propose(&target().device, lent, &[anchor], wanted, &mut proposals)
        .unwrap();
    let (mut tokens, mut list) = (Vec::new(), proposals[0].first_list());
    while let Some(id) = list {
        let children = proposals[0].children(id);
        let best = |a: usize, b: usize| match children.log_probs[b] > children.log_probs[a] {
            true => b,
            false => a,
        };
        let slot = (0..children.log_probs.len()).reduce(best).unwrap();
        tokens.push(children.token_ids[slot]);
        list = proposals[0].below(Candidate { list: id, slot });
    }
    tokens
}

#[test]
fn golden_chains_are_reproduced() {
    for method in ["dflash", "dflash2", "dspark", "eagle3"] {
        let replay = replay(&demo(method), method, Mistake::None);
        assert_eq!(replay.num_equal, replay.num_rounds, "{method}");
    }
}

/// Estimated logits cost a chain hardly anything.
#[test]
fn chains_by_estimates_are_nearly_the_golden_ones() {
    for method in ["dflash", "dflash2", "dspark"] {
        let lent = target().lent_with_estimates();
        let replay = replay_by(&demo(method), method, Mistake::None, lent);
        let Replay {
            num_equal,
            num_rounds,
            tau,
            golden_tau,
            ..
        } = replay;
        println!(
            "{method}: {num_equal} of {num_rounds} chains, tau {tau:.4}, golden {golden_tau:.4}"
        );
        assert!(
            num_equal * 5 >= num_rounds * 4,
            "{method}: {num_equal} of {num_rounds}"
        );
        assert!(
            (tau / golden_tau - 1.0).abs() < 0.01,
            "{method}: {tau}, golden {golden_tau}"
        );
    }
}

#[test]
fn every_packaging_drafts_the_same() {
    for (dir, method) in [
        (deepspec_copy(), "dspark"),
        (speculators_dspark_copy(16), "dspark"),
        (speculators_eagle3_copy(), "eagle3"),
    ] {
        let replay = replay(dir.path(), method, Mistake::None);
        assert_eq!(replay.num_equal, replay.num_rounds, "{method}");
    }
}

/// A BF16 tensor with `value(row, column)`, which must be exact in BF16.
fn tensor(name: &str, shape: &[usize], value: impl Fn(usize, usize) -> f32) -> RawTensor {
    let columns = *shape.last().unwrap();
    let len: usize = shape.iter().product();
    let bits = (0..len).map(|i| (value(i / columns, i % columns).to_bits() >> 16) as u16);
    RawTensor {
        name: format!("markov_head.{name}"),
        dtype: "BF16".to_owned(),
        shape: shape.to_vec(),
        bytes: bits.flat_map(u16::to_le_bytes).collect(),
    }
}

/// The demo DSpark with another kind of Markov head.
fn with_head(kind: &str, tensors: Vec<RawTensor>, w2_shift: u16) -> tempfile::TempDir {
    let dir = copy(&demo("dspark"));
    edit_json(dir.path(), "config.json", |config| {
        config["dflash_config"]["markov_head_type"] = json!(kind);
    });
    edit_tensors(dir.path(), "model.safetensors", |all| {
        let w2 = all
            .iter_mut()
            .find(|t| t.name == "markov_head.markov_w2.weight");
        for value in w2.unwrap().bytes.chunks_exact_mut(2) {
            let bits = u16::from_le_bytes([value[0], value[1]]);
            // Times a power of two, by the exponent; zeros stay.
            if bits & 0x7fff != 0 {
                value.copy_from_slice(&(bits + (w2_shift << 7)).to_le_bytes());
            }
        }
        all.extend(tensors);
    });
    dir
}

/// An open gate, and a recurrent head that hands on the code (its tanh of 1/128 of the code is as good as linear),
/// draft what the vanilla head drafts; a shut gate corrects nothing.
#[test]
fn other_markov_heads_can_say_what_the_vanilla_one_says() {
    let gate = |bias: f32| {
        vec![
            tensor("gate_proj.weight", &[RANK, HIDDEN + RANK], |_, _| 0.0),
            tensor("gate_proj.bias", &[RANK], |_, _| bias),
        ]
    };
    let open = with_head("gated", gate(32.0), 0);
    let gated = replay(open.path(), "dspark", Mistake::None);
    assert_eq!(gated.num_equal, gated.num_rounds);
    let shut = with_head("gated", gate(-96.0), 0);
    let uncorrected = replay(shut.path(), "dspark", Mistake::None);
    assert!(uncorrected.tau < 0.8 * gated.tau, "{}", uncorrected.tau);

    // Rows are gate, content, output; columns are state, code, hidden state.
    let joint = tensor(
        "joint_proj.weight",
        &[3 * RANK, 2 * RANK + HIDDEN],
        |row, column| {
            let is_code = row >= 2 * RANK && column == row - RANK;
            if is_code { 1.0 / 128.0 } else { 0.0 }
        },
    );
    let recurrent = with_head("rnn", vec![joint], 7);
    let handed_on = replay(recurrent.path(), "dspark", Mistake::None);
    assert!(handed_on.num_equal * 50 >= handed_on.num_rounds * 49);
}

/// The demo DSpark with `edit` made to its tensors, and the first component of every token's code.
fn edited_dspark(edit: impl FnOnce(&mut Vec<RawTensor>, &[f32])) -> (tempfile::TempDir, Vec<f32>) {
    let dir = copy(&demo("dspark"));
    let mut first = Vec::new();
    edit_tensors(dir.path(), "model.safetensors", |all| {
        let codes = named(all, "markov_head.markov_w1.weight").values();
        first = codes.chunks_exact(RANK).map(|code| code[0]).collect();
        edit(all, &first);
    });
    (dir, first)
}

fn named<'a>(all: &'a mut [RawTensor], name: &str) -> &'a mut RawTensor {
    all.iter_mut().find(|tensor| tensor.name == name).unwrap()
}

/// A gate that one component of the code opens and shuts is a vanilla head without the codes that it shuts out.
#[test]
fn a_gate_reads_the_code_behind_the_hidden_state() {
    let steep = |_, column| if column == HIDDEN { STEEP } else { 0.0 };
    let gate = vec![
        tensor("gate_proj.weight", &[RANK, HIDDEN + RANK], steep),
        tensor("gate_proj.bias", &[RANK], |_, _| 0.0),
    ];
    let gated = replay(with_head("gated", gate, 0).path(), "dspark", Mistake::None);
    let (without, _) = edited_dspark(|all, first| {
        let codes = named(all, "markov_head.markov_w1.weight");
        for (code, first) in codes.bytes.chunks_exact_mut(2 * RANK).zip(first) {
            if *first < 0.0 {
                code.fill(0);
            }
        }
    });
    let vanilla = replay(without.path(), "dspark", Mistake::None);
    assert_eq!(gated.drafts, vanilla.drafts);
    assert!(gated.num_equal < gated.num_rounds, "it shuts out none");
}

/// A confidence that one component of the code decides ends a draft behind the first token where that is negative.
#[test]
fn confidence_reads_the_code_behind_the_hidden_state() {
    let (dir, first) = edited_dspark(|all, _| {
        named(all, "confidence_head.proj.bias").bytes.fill(0);
        let weight = &mut named(all, "confidence_head.proj.weight").bytes;
        weight.fill(0);
        let steep = (STEEP.to_bits() >> 16) as u16;
        weight[2 * HIDDEN..][..2].copy_from_slice(&steep.to_le_bytes());
    });
    let mut drafter = open_in(Some(dir.path()), sizes(NUM_PAGES, 16)).unwrap();
    let mut lens = Vec::new();
    for Case { token_ids, rounds } in &cases("dspark") {
        let anchor = rounds[0].anchor;
        assert!(drafter.reserve(0, token_ids.len()));
        let taps = taps(drafter.taps(), token_ids);
        extend(&mut *drafter, &taps, token_ids, 0..anchor, 0);
        for &token in &token_ids[..anchor] {
            let lent = target().lent();
            let mut draft = |min| confident_chain(&mut *drafter, lent, token, anchor, 16, min);
            let whole = draft(0.0);
            let before = [token].into_iter().chain(whole.iter().copied());
            let len = before
                .take(whole.len())
                .take_while(|&token| first[token as usize] >= 0.0)
                .count();
            assert_eq!(draft(0.5), whole[..len]);
            lens.push(len);
        }
        drafter.release(0);
    }
    assert!((0..4).all(|len| lens.contains(&len)), "{lens:?}");
}

/// A wrong alignment must not pass for the right one: few chains agree, and fewer tokens are accepted.
#[track_caller]
fn assert_caught(name: &str, replay: &Replay) {
    let Replay {
        num_rounds,
        num_equal,
        tau,
        golden_tau,
        ..
    } = *replay;
    let share = num_equal as f64 / num_rounds as f64;
    assert!(
        share < 0.6,
        "{name}: {share} of the chains are the golden ones"
    );
    assert!(tau < golden_tau, "{name}: tau {tau}, golden {golden_tau}");
}

#[test]
fn a_block_read_one_row_off_is_caught() {
    for (method, from_anchor) in [("dflash", true), ("dflash2", true), ("dspark", false)] {
        let dir = copy(&demo(method));
        edit_json(dir.path(), "config.json", |config| {
            config["dflash_config"]["sample_from_anchor"] = json!(from_anchor);
        });
        assert_caught(method, &replay(dir.path(), method, Mistake::None));
    }
    let shifted = replay(&demo("eagle3"), "eagle3", Mistake::ShiftedTokens);
    assert_caught("eagle3", &shifted);
}

#[test]
fn taps_one_layer_early_are_caught() {
    for method in ["dflash", "dflash2", "dspark", "eagle3"] {
        let dir = copy(&demo(method));
        edit_json(dir.path(), "config.json", |config| match method {
            "eagle3" => config["eagle_aux_hidden_state_layer_ids"] = json!([1, 4, 6]),
            _ => config["dflash_config"]["target_layer_ids"] = json!([0, 3, 5]),
        });
        let replay = replay(dir.path(), method, Mistake::None);
        assert_caught(method, &replay);
    }
}

#[test]
fn normed_taps_are_caught() {
    for method in ["dflash", "dflash2", "dspark", "eagle3"] {
        let replay = replay(&demo(method), method, Mistake::NormedTaps);
        assert_caught(method, &replay);
    }
}

#[test]
fn a_cut_context_is_caught() {
    for method in ["dflash", "dflash2", "dspark", "eagle3"] {
        let replay = replay(&demo(method), method, Mistake::CutContext);
        assert_caught(method, &replay);
    }
}
