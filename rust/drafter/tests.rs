//! The demo drafters through the trait: what is proposed does not depend on how the context came in, on the requests
//! beside, or on how much is asked for. Agreement with independent values: `tests/test_golden_drafts.py`.

use std::path::PathBuf;
use std::sync::OnceLock;

use tempfile::TempDir;

use super::proposal::Level;
use super::*;
use crate::error::{DrafterError, Error};
use crate::options::WeightFormat;
use crate::weights::Checkpoint;
use crate::weights::raw_safetensors::{RawTensor, copy, demo_target, edit_json, edit_tensors};

const NUM_SLOTS: usize = 3;
const HIDDEN: usize = 256;

/// Directory of a demo drafter.
pub(super) fn demo(name: &str) -> PathBuf {
    let root = PathBuf::from(env!("CARGO_MANIFEST_DIR"));
    match name {
        "dflash2" => root.join("python/specpilot_rs/demo/dflash2"),
        name => root.join("tests/fixtures/demo").join(name),
    }
}

/// A copy of the demo DFlash drafter to damage.
pub(super) fn dflash_copy() -> TempDir {
    copy(&demo("dflash"))
}

/// A copy of the demo DFlash2 drafter to damage.
pub(super) fn dflash2_copy() -> TempDir {
    copy(&demo("dflash2"))
}

struct Target {
    config: ModelConfig,
    weights: DecoderWeights,
    device: Device,
}

fn target() -> &'static Target {
    static TARGET: OnceLock<Target> = OnceLock::new();
    TARGET.get_or_init(|| {
        let config = ModelConfig::read(&demo_target()).unwrap();
        let checkpoint = Checkpoint::open(&demo_target()).unwrap();
        Target {
            weights: DecoderWeights::load(&checkpoint, &config, WeightFormat::Auto).unwrap(),
            config,
            device: Device::host(None).unwrap(),
        }
    })
}

fn open_demo(name: &str, num_pages: usize) -> Box<dyn Drafter> {
    let Target { config, device, .. } = target();
    open(
        &demo(name),
        DrafterConfig::read(&demo(name)).unwrap(),
        &demo_target(),
        config,
        device,
        NUM_SLOTS,
        num_pages,
    )
    .unwrap()
}

/// Three taps of `num_rows` rows with values as large as a residual stream's.
fn taps(seed: u32, num_rows: usize) -> Vec<Buffer<f32>> {
    (0..3)
        .map(|tap| {
            let values: Vec<f32> = (0..(num_rows * HIDDEN) as u32)
                .map(|i| {
                    let bits = (i ^ (seed << 8) ^ (tap << 28)).wrapping_mul(0x9E37_79B9);
                    ((bits ^ bits >> 15).wrapping_mul(0x85EB_CA6B) >> 8) as f32 / 4_194_304.0 - 2.0
                })
                .collect();
            Buffer::from_slice(&values)
        })
        .collect()
}

fn extend(
    drafter: &mut dyn Drafter,
    slot: usize,
    first: usize,
    taps: &[Buffer<f32>],
    rows: &[u32],
) {
    assert!(drafter.reserve(slot, first + rows.len()));
    drafter
        .extend_context(&target().device, slot, first, taps, rows)
        .unwrap();
}

/// Fills `slot` with a context of `len` positions that `seed` determines.
fn fill(drafter: &mut dyn Drafter, slot: usize, seed: u32, len: usize) {
    let rows: Vec<u32> = (0..len as u32).collect();
    extend(drafter, slot, 0, &taps(seed, len), &rows);
}

fn anchor(slot: usize, token_id: u32, position: usize) -> DraftAnchor {
    DraftAnchor {
        slot,
        token_id,
        position,
    }
}

fn propose(
    drafter: &mut dyn Drafter,
    anchors: &[DraftAnchor],
    num_draft_tokens: usize,
    scores: ScoreKind,
) -> Result<Vec<Proposal>> {
    let Target {
        weights, device, ..
    } = target();
    let wanted = DraftRequest {
        num_draft_tokens,
        scores,
    };
    drafter.propose(device, weights, anchors, wanted)
}

const MARGINAL: ScoreKind = ScoreKind::Marginal { top_k: 8 };

/// Every drafter with every kind of scores it has.
const CASES: [(&str, ScoreKind); 3] = [
    ("dflash", MARGINAL),
    ("dflash2", MARGINAL),
    ("dflash2", ScoreKind::Conditional),
];

#[test]
fn drafters_say_what_they_are() {
    for (name, conditional) in [("dflash", false), ("dflash2", true)] {
        let drafter = open_demo(name, 4);
        assert_eq!(drafter.method(), name);
        assert_eq!(drafter.taps(), [1, 4, 6]);
        assert_eq!(drafter.max_draft_tokens(), 15);
        assert_eq!(drafter.has_conditional_scores(), conditional);
    }
}

fn assert_distributions(level: &Level) {
    let top_k = level.token_ids.len();
    let mut distinct = level.token_ids.clone();
    distinct.sort_unstable();
    distinct.dedup();
    assert_eq!(distinct.len(), top_k);
    assert_eq!(level.log_probs.len(), level.num_parents * top_k);
    assert!(level.log_probs.iter().all(|&p| p <= 0.0));
}

#[test]
fn proposals_hold_what_was_asked_for() {
    for (name, scores) in CASES {
        let mut drafter = open_demo(name, 4);
        fill(&mut *drafter, 1, 7, 90);
        let proposals = propose(&mut *drafter, &[anchor(1, 55, 90)], 15, scores).unwrap();
        assert_eq!(proposals.len(), 1);
        assert_eq!(proposals[0].num_levels(), 15);
        for (depth, level) in proposals[0].levels.iter().enumerate() {
            assert_distributions(level);
            let top_k = level.token_ids.len();
            match scores {
                ScoreKind::Marginal { top_k: wanted } => {
                    assert_eq!((top_k, level.num_parents), (wanted, 1));
                    assert!(level.log_probs.is_sorted_by(|a, b| a >= b));
                }
                ScoreKind::Conditional => {
                    assert_eq!(
                        (top_k, level.num_parents),
                        (16, if depth == 0 { 1 } else { 16 })
                    );
                    for given_parent in level.log_probs.chunks(top_k) {
                        let sum: f32 = given_parent.iter().map(|p| p.exp()).sum();
                        assert!((sum - 1.0).abs() < 1e-5, "{sum}");
                    }
                }
            }
        }
    }
}

#[test]
fn an_empty_context_is_enough() {
    for (name, scores) in CASES {
        let mut drafter = open_demo(name, 1);
        let proposals = propose(&mut *drafter, &[anchor(0, 9, 0)], 3, scores).unwrap();
        proposals[0].levels.iter().for_each(assert_distributions);
    }
}

#[test]
fn fewer_drafts_are_the_first_of_more() {
    for (name, scores) in CASES {
        let mut drafter = open_demo(name, 4);
        fill(&mut *drafter, 0, 1, 70);
        let all = propose(&mut *drafter, &[anchor(0, 12, 70)], 15, scores).unwrap();
        for num_draft_tokens in [1, 8] {
            let few = propose(
                &mut *drafter,
                &[anchor(0, 12, 70)],
                num_draft_tokens,
                scores,
            )
            .unwrap();
            assert_eq!(few[0].levels, all[0].levels[..num_draft_tokens], "{name}");
        }
    }
}

#[test]
fn requests_do_not_see_each_other() {
    for (name, scores) in CASES {
        let mut drafter = open_demo(name, 8);
        let anchors = [anchor(0, 100, 65), anchor(1, 200, 1), anchor(2, 300, 128)];
        for (slot, anchor) in anchors.iter().enumerate() {
            fill(&mut *drafter, slot, slot as u32, anchor.position);
        }
        let together = propose(&mut *drafter, &anchors, 15, scores).unwrap();
        for (anchor, expected) in anchors.iter().zip(&together) {
            let alone = propose(&mut *drafter, &[*anchor], 15, scores).unwrap();
            assert_eq!(&alone[0], expected, "{name}, slot {}", anchor.slot);
        }
        assert_ne!(together[0], together[2]);
    }
}

#[test]
fn contexts_do_not_depend_on_the_passes_that_brought_them() {
    for (name, scores) in CASES {
        let mut drafter = open_demo(name, 6);
        let len = 80;
        let whole = taps(5, len);
        fill(&mut *drafter, 0, 5, len);
        // One by one, and as the accepted rows of larger passes.
        for position in 0..len {
            extend(&mut *drafter, 1, position, &whole, &[position as u32]);
        }
        for first in (0..len).step_by(5) {
            let scattered: Vec<Buffer<f32>> = whole
                .iter()
                .map(|tap| {
                    let mut rows = Buffer::from_slice(&[f32::NAN; 16 * HIDDEN]);
                    for i in 0..5 {
                        rows.host_mut()[3 * i * HIDDEN..][..HIDDEN]
                            .copy_from_slice(&tap.host()[(first + i) * HIDDEN..][..HIDDEN]);
                    }
                    rows
                })
                .collect();
            extend(&mut *drafter, 2, first, &scattered, &[0, 3, 6, 9, 12]);
        }
        let anchors = [0, 1, 2].map(|slot| anchor(slot, 77, len));
        let proposals = propose(&mut *drafter, &anchors, 15, scores).unwrap();
        assert_eq!(proposals[0], proposals[1], "{name}");
        assert_eq!(proposals[0], proposals[2], "{name}");
    }
}

#[test]
fn every_tap_every_position_and_the_anchor_matter() {
    let mut drafter = open_demo("dflash2", 6);
    let len = 70;
    fill(&mut *drafter, 0, 3, len);
    let reference = propose(&mut *drafter, &[anchor(0, 40, len)], 15, MARGINAL).unwrap();
    let other_anchor = propose(&mut *drafter, &[anchor(0, 41, len)], 15, MARGINAL).unwrap();
    assert_ne!(reference, other_anchor);
    for (tap, position) in [(0, 0), (1, 35), (2, len - 1)] {
        let mut changed = taps(3, len);
        changed[tap].host_mut()[position * HIDDEN..][..HIDDEN].fill(1.5);
        let rows: Vec<u32> = (0..len as u32).collect();
        extend(&mut *drafter, 1, 0, &changed, &rows);
        let proposals = propose(&mut *drafter, &[anchor(1, 40, len)], 15, MARGINAL).unwrap();
        assert_ne!(reference, proposals, "tap {tap}, position {position}");
        drafter.release(1);
    }
}

/// The demo target with a head of its own and the values of its embedding table times `scale`, a power of two.
fn untied_target(scale: f32) -> DecoderWeights {
    const SHARD: &str = "model-00001-of-00002.safetensors";
    let dir = copy(&demo_target());
    edit_json(dir.path(), "config.json", |config| {
        config["tie_word_embeddings"] = false.into();
    });
    edit_json(dir.path(), "model.safetensors.index.json", |index| {
        index["weight_map"]["lm_head.weight"] = SHARD.into();
    });
    edit_tensors(dir.path(), SHARD, |tensors| {
        let name = "model.embed_tokens.weight";
        let table = tensors.iter_mut().find(|t| t.name == name).unwrap();
        let head = RawTensor {
            name: "lm_head.weight".to_owned(),
            ..table.clone()
        };
        table.bytes = table
            .values()
            .iter()
            .flat_map(|value| ((value * scale).to_bits() >> 16).to_le_bytes()[..2].to_vec())
            .collect();
        tensors.push(head);
    });
    let config = ModelConfig::read(dir.path()).unwrap();
    let checkpoint = Checkpoint::open(dir.path()).unwrap();
    DecoderWeights::load(&checkpoint, &config, WeightFormat::Auto).unwrap()
}

/// A scale of two over the target's table drafts what a table of twice the values does, to the bit.
#[test]
fn input_embeddings_are_scaled() {
    let drafted = |scale_key: Option<f64>, weights: &DecoderWeights| {
        let dir = dflash_copy();
        edit_json(dir.path(), "config.json", |config| {
            if let Some(scale) = scale_key {
                config["input_embedding_scale"] = scale.into();
            }
        });
        let Target { config, device, .. } = target();
        let drafter = DrafterConfig::read(dir.path()).unwrap();
        let mut drafter = open(dir.path(), drafter, &demo_target(), config, device, 1, 2).unwrap();
        fill(&mut *drafter, 0, 3, 70);
        let wanted = DraftRequest {
            num_draft_tokens: 15,
            scores: MARGINAL,
        };
        drafter
            .propose(device, weights, &[anchor(0, 40, 70)], wanted)
            .unwrap()
    };
    let (once, twice) = (untied_target(1.0), untied_target(2.0));
    let scaled = drafted(Some(2.0), &once);
    assert_eq!(scaled, drafted(None, &twice));
    assert_ne!(scaled, drafted(None, &once));
    assert_eq!(drafted(Some(1.0), &once), drafted(None, &once));
}

#[test]
fn pages_are_given_out_whole_and_come_back() {
    let mut drafter = open_demo("dflash", 3);
    assert!(drafter.reserve(0, 65));
    assert!(drafter.reserve(0, 128), "room is there already");
    assert!(!drafter.reserve(1, 65), "one page is left");
    assert!(drafter.reserve(1, 64));
    drafter.release(0);
    assert!(drafter.reserve(2, 128));
    drafter.release(1);
    drafter.release(2);
    // A slot used before drafts like a fresh one.
    fill(&mut *drafter, 2, 1, 100);
    let first = propose(&mut *drafter, &[anchor(2, 5, 100)], 15, MARGINAL).unwrap();
    drafter.release(2);
    fill(&mut *drafter, 1, 2, 64);
    fill(&mut *drafter, 0, 1, 100);
    let second = propose(&mut *drafter, &[anchor(0, 5, 100)], 15, MARGINAL).unwrap();
    assert_eq!(first, second);
}

#[test]
fn contexts_with_gaps_are_refused() {
    let mut drafter = open_demo("dflash", 4);
    fill(&mut *drafter, 0, 1, 10);
    let device = &target().device;
    assert!(drafter.reserve(0, 20));
    for first in [9, 11] {
        let error = drafter.extend_context(device, 0, first, &taps(1, 1), &[0]);
        assert!(matches!(
            error,
            Err(Error::Drafter(DrafterError::ContextGap { slot: 0, expected: 10, got })) if got == first
        ));
    }
    let behind = propose(&mut *drafter, &[anchor(0, 1, 11)], 3, MARGINAL);
    assert!(matches!(
        behind,
        Err(Error::Drafter(DrafterError::ContextGap {
            expected: 10,
            got: 11,
            ..
        }))
    ));
    let unreserved = drafter.extend_context(device, 1, 0, &taps(1, 1), &[0]);
    assert!(matches!(unreserved, Err(Error::Kernel(_))));
    let too_few = drafter.extend_context(device, 0, 10, &taps(1, 1)[..2], &[0]);
    assert!(matches!(too_few, Err(Error::Kernel(_))));
}

#[test]
fn requests_a_drafter_cannot_serve_are_refused() {
    let mut drafter = open_demo("dflash", 1);
    for num_draft_tokens in [0, 16] {
        let error = propose(
            &mut *drafter,
            &[anchor(0, 1, 0)],
            num_draft_tokens,
            MARGINAL,
        );
        assert!(matches!(
            error,
            Err(Error::Drafter(DrafterError::DraftLength { expected: 15, got })) if got == num_draft_tokens
        ));
    }
    let error = propose(&mut *drafter, &[anchor(0, 1, 0)], 3, ScoreKind::Conditional);
    assert!(matches!(
        error,
        Err(Error::Drafter(DrafterError::NoConditionalScores {
            method: "dflash",
            ..
        }))
    ));
    assert_eq!(propose(&mut *drafter, &[], 3, MARGINAL).unwrap(), []);
}

#[test]
fn a_drafter_for_another_target_does_not_open() {
    let dir = dflash2_copy();
    edit_json(dir.path(), "config.json", |config| {
        config["num_target_layers"] = 64.into();
    });
    let drafter = DrafterConfig::read(dir.path()).unwrap();
    let Target { config, device, .. } = target();
    let error = open(dir.path(), drafter, &demo_target(), config, device, 1, 1)
        .err()
        .unwrap();
    assert!(matches!(
        error,
        Error::Drafter(DrafterError::Pairing {
            expected: 8,
            got: 64,
            ..
        })
    ));
}
