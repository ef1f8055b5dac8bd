//! The demo drafters through the trait: what is proposed does not depend on how the context came in, on the requests
//! beside, or on scratch rows that were dropped. Agreement with independent values: `golden_tests.rs`.

use std::path::PathBuf;
use std::sync::OnceLock;

use tempfile::TempDir;

use super::config::NgramConfig;
use super::proposal::{Candidate, Children, ListId};
use super::*;
use crate::error::{DrafterError, Error};
use crate::kernels::lm_head_screen::ScreenedHead;
use crate::model::DecoderWeights;
use crate::options::WeightFormat;
use crate::weights::Checkpoint;
use crate::weights::raw_safetensors::{RawTensor, copy, demo_target, edit_json, edit_tensors};

const NUM_SLOTS: usize = 3;
pub(super) const HIDDEN: usize = 256;
pub(super) const NUM_DRAFT_TOKENS: usize = 15;
const WIDTH: usize = 8;

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

pub(super) struct Target {
    pub(super) config: ModelConfig,
    pub(super) weights: DecoderWeights,
    pub(super) device: Device,
    screened: ScreenedHead,
}

impl Target {
    /// What it lends to be drafted by its exact logits.
    pub(super) fn lent(&self) -> Lent<'_> {
        Lent::new(&self.weights, None)
    }

    /// What it lends to be drafted by estimates of them.
    pub(super) fn lent_with_estimates(&self) -> Lent<'_> {
        Lent::new(&self.weights, Some(&self.screened))
    }
}

pub(super) fn target() -> &'static Target {
    static TARGET: OnceLock<Target> = OnceLock::new();
    TARGET.get_or_init(|| {
        let config = ModelConfig::read(&demo_target()).unwrap();
        let checkpoint = Checkpoint::open(&demo_target()).unwrap();
        let device = Device::host(None).unwrap();
        let format = WeightFormat::Auto;
        let weights = DecoderWeights::load(&device, &checkpoint, &config, format, false).unwrap();
        Target {
            screened: ScreenedHead::new(weights.head_bf16().unwrap()),
            weights,
            config,
            device,
        }
    })
}

pub(super) fn sizes(num_pages: usize, num_draft_tokens: usize) -> DrafterSizes {
    DrafterSizes {
        num_slots: NUM_SLOTS,
        num_pages,
        pages_per_sequence: 8,
        vocab_size: target().config.vocab_size,
        num_draft_tokens,
        width: WIDTH,
    }
}

/// Opens the drafter in `dir`, or the one without files when there is none.
pub(super) fn open_in(dir: Option<&Path>, sizes: DrafterSizes) -> Result<Box<dyn Drafter>> {
    let Target { config, device, .. } = target();
    let files = PairFiles {
        drafter: dir.unwrap_or(Path::new("")),
        target: &demo_target(),
    };
    let drafter = match dir {
        Some(dir) => DrafterConfig::read(dir)?,
        None => DrafterConfig::Ngram(NgramConfig { min: 1, max: 3 }),
    };
    open(files, &drafter, config, device, sizes)
}

pub(super) fn open_demo(name: &str, num_pages: usize) -> Box<dyn Drafter> {
    let dir = demo(name);
    let dir = (name != "ngram").then_some(dir.as_path());
    open_in(dir, sizes(num_pages, NUM_DRAFT_TOKENS)).unwrap()
}

/// Three taps of `num_rows` rows with values as large as a residual stream's.
pub(super) fn taps(seed: u32, num_rows: usize) -> Vec<Buffer<f32>> {
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

/// Tokens of positions from `first` on: few, so that they repeat.
pub(super) fn tokens(seed: u32, first: usize, len: usize) -> Vec<u32> {
    (first as u32..)
        .take(len)
        .map(|position| (position * (seed + 3) / 2) % 7 + 20 * seed)
        .collect()
}

/// Appends `rows` of `taps`; tokens are those of `seed`.
pub(super) fn append(
    drafter: &mut dyn Drafter,
    slot: usize,
    first_position: usize,
    seed: u32,
    (taps, rows): (&[Buffer<f32>], &[u32]),
    standing: Standing,
) -> Result<()> {
    let target = target();
    let num_taps = drafter.taps().len();
    let rows = ContextRows {
        slot,
        first_position,
        taps: &taps[..num_taps.min(taps.len())],
        rows,
        token_ids: &tokens(seed, first_position, rows.len()),
        standing,
    };
    drafter.extend(&target.device, target.lent(), rows)
}

pub(super) fn extend(
    drafter: &mut dyn Drafter,
    slot: usize,
    first: usize,
    seed: u32,
    rows: (&[Buffer<f32>], &[u32]),
) {
    assert!(drafter.reserve(slot, first + rows.1.len()));
    append(drafter, slot, first, seed, rows, Standing::Verified).unwrap();
}

/// Fills `slot` with a context of `len` positions that `seed` determines.
pub(super) fn fill(drafter: &mut dyn Drafter, slot: usize, seed: u32, len: usize) {
    let rows: Vec<u32> = (0..len as u32).collect();
    extend(drafter, slot, 0, seed, (&taps(seed, len), &rows));
}

pub(super) fn anchor(slot: usize, token_id: u32, position: usize) -> DraftAnchor {
    DraftAnchor {
        slot,
        token_id,
        position,
    }
}

pub(super) fn wanted(num_draft_tokens: usize, scores: DraftScores) -> DraftRequest {
    DraftRequest {
        num_draft_tokens,
        scores,
        width: WIDTH,
        min_confidence: 0.0,
    }
}

pub(super) fn propose(
    drafter: &mut dyn Drafter,
    anchors: &[DraftAnchor],
    wanted: DraftRequest,
) -> Result<Vec<Proposal>> {
    propose_by(drafter, target().lent(), anchors, wanted)
}

/// Proposals by what `lent` says.
pub(super) fn propose_by(
    drafter: &mut dyn Drafter,
    lent: Lent<'_>,
    anchors: &[DraftAnchor],
    wanted: DraftRequest,
) -> Result<Vec<Proposal>> {
    let mut proposals = vec![Proposal::default(); anchors.len()];
    drafter.propose(&target().device, lent, anchors, wanted, &mut proposals)?;
    Ok(proposals)
}

pub(super) fn propose_all(
    drafter: &mut dyn Drafter,
    anchors: &[DraftAnchor],
    scores: DraftScores,
) -> Vec<Proposal> {
    propose(drafter, anchors, wanted(NUM_DRAFT_TOKENS, scores)).unwrap()
}

use DraftScores::{Conditional, Greedy, Marginal};

/// Every drafter with every kind of scores it has.
pub(super) const CASES: [(&str, DraftScores); 12] = [
    ("dflash", Greedy),
    ("dflash", Marginal),
    ("dflash2", Greedy),
    ("dflash2", Marginal),
    ("dflash2", Conditional),
    ("dspark", Greedy),
    ("dspark", Marginal),
    ("dspark", Conditional),
    ("eagle3", Greedy),
    ("eagle3", Conditional),
    ("ngram", Greedy),
    ("ngram", Conditional),
];

/// Lists below each other along the likeliest candidates, first to last.
fn spine(proposal: &Proposal) -> Vec<Children<'_>> {
    let mut lists = Vec::new();
    let mut list: Option<ListId> = proposal.first_list();
    while let Some(id) = list {
        let children = proposal.children(id);
        let best = (0..children.log_probs.len())
            .reduce(|a, b| {
                if children.log_probs[b] > children.log_probs[a] {
                    b
                } else {
                    a
                }
            })
            .unwrap();
        lists.push(children);
        list = proposal.below(Candidate {
            list: id,
            slot: best,
        });
    }
    lists
}

/// Positions that a proposal reaches.
fn depth(proposal: &Proposal) -> usize {
    let mut lists: Vec<ListId> = proposal.first_list().into_iter().collect();
    let mut depth = 0;
    while !lists.is_empty() {
        depth += 1;
        lists = lists
            .iter()
            .flat_map(|&list| {
                let slots = 0..proposal.children(list).token_ids.len();
                slots.filter_map(move |slot| proposal.below(Candidate { list, slot }))
            })
            .collect();
        lists.sort_unstable();
        lists.dedup();
    }
    depth
}

#[test]
fn proposals_hold_what_was_asked_for() {
    for (name, scores) in CASES {
        let mut drafter = open_demo(name, 4);
        fill(&mut *drafter, 1, 2, 90);
        let token = tokens(2, 90, 1)[0];
        let proposals = propose_all(&mut *drafter, &[anchor(1, token, 90)], scores);
        assert_eq!(depth(&proposals[0]), NUM_DRAFT_TOKENS, "{name}");
        for children in spine(&proposals[0]) {
            let mut distinct = children.token_ids.to_vec();
            distinct.sort_unstable();
            distinct.dedup();
            assert_eq!(distinct.len(), children.token_ids.len(), "{name}");
            assert!(children.log_probs.iter().all(|&p| p <= 0.0));
            let sum: f32 = children.log_probs.iter().map(|p| p.exp()).sum();
            assert!(sum <= 1.0 + 1e-5, "{name}: {sum}");
            match (name, scores) {
                ("dflash2", Greedy | Conditional) => {
                    assert_eq!(children.token_ids.len(), 16);
                    assert!(
                        (sum - 1.0).abs() < 1e-5,
                        "scores are relative to the candidates"
                    );
                }
                ("ngram", _) => {}
                (_, Greedy) => assert_eq!(children.token_ids.len(), 1),
                _ => {
                    assert_eq!(children.token_ids.len(), WIDTH);
                    assert!(children.log_probs.is_sorted_by(|a, b| a >= b));
                }
            }
        }
    }
}

#[test]
fn a_wider_draft_has_the_greedy_path_in_it() {
    for name in ["dspark", "eagle3"] {
        let mut drafter = open_demo(name, 4);
        fill(&mut *drafter, 1, 2, 90);
        let [greedy, wide] =
            [Greedy, Conditional].map(|s| propose_all(&mut *drafter, &[anchor(1, 9, 90)], s));
        let mut list = wide[0].first_list();
        for children in spine(&greedy[0]) {
            let Some(id) = list else {
                panic!("{name}: a beam of {WIDTH} lost the greedy path at once")
            };
            let wider = wide[0].children(id);
            assert_eq!(wider.token_ids[0], children.token_ids[0], "{name}");
            assert_eq!(wider.log_probs[0], children.log_probs[0], "{name}");
            list = wide[0].below(Candidate { list: id, slot: 0 });
            if list.is_none() {
                break;
            }
        }
    }
}

#[test]
fn an_empty_context_is_no_error() {
    for (name, scores) in CASES {
        let mut drafter = open_demo(name, 1);
        let proposals = propose_all(&mut *drafter, &[anchor(0, 9, 0)], scores);
        let drafts = proposals[0].first_list().is_some();
        assert_eq!(drafts, !matches!(name, "eagle3" | "ngram"), "{name}");
    }
}

/// Other numbers of rows than a block was trained with, and other depths.
#[test]
fn drafts_have_the_length_that_was_asked_for() {
    for name in ["dflash", "dflash2", "dspark", "eagle3"] {
        let dir = demo(name);
        let mut drafter = open_in(Some(&dir), sizes(4, 24)).unwrap();
        fill(&mut *drafter, 0, 1, 70);
        for num_draft_tokens in [1, 8, 24] {
            let wanted = wanted(num_draft_tokens, Greedy);
            let proposals = propose(&mut *drafter, &[anchor(0, 12, 70)], wanted).unwrap();
            assert_eq!(spine(&proposals[0]).len(), num_draft_tokens, "{name}");
        }
    }
}

#[test]
fn requests_do_not_see_each_other() {
    for (name, scores) in CASES {
        let mut drafter = open_demo(name, 8);
        let anchors = [anchor(0, 3, 65), anchor(1, 22, 1), anchor(2, 43, 128)];
        for (slot, anchor) in anchors.iter().enumerate() {
            fill(&mut *drafter, slot, slot as u32, anchor.position);
        }
        let together = propose_all(&mut *drafter, &anchors, scores);
        for (anchor, expected) in anchors.iter().zip(&together) {
            let alone = propose_all(&mut *drafter, &[*anchor], scores);
            assert_eq!(&alone[0], expected, "{name}, slot {}", anchor.slot);
        }
        assert_ne!(together[0], together[2]);
        let wanted = wanted(NUM_DRAFT_TOKENS, scores);
        let mut by_estimates = |anchors: &[_]| {
            let lent = target().lent_with_estimates();
            propose_by(&mut *drafter, lent, anchors, wanted).unwrap()
        };
        let estimated = by_estimates(&anchors);
        for (anchor, expected) in anchors.iter().zip(&estimated) {
            let alone = by_estimates(&[*anchor]);
            assert_eq!(&alone[0], expected, "{name}, slot {}", anchor.slot);
        }
        let has_own_logits = matches!(name, "eagle3" | "ngram");
        assert_eq!(estimated == together, has_own_logits, "{name}");
    }
}

#[test]
fn every_tap_every_position_and_the_anchor_matter() {
    for name in ["dflash2", "dspark", "eagle3"] {
        let mut drafter = open_demo(name, 6);
        let len = 70;
        fill(&mut *drafter, 0, 3, len);
        let reference = propose_all(&mut *drafter, &[anchor(0, 40, len)], Conditional);
        let other_anchor = propose_all(&mut *drafter, &[anchor(0, 41, len)], Conditional);
        assert_ne!(reference, other_anchor);
        for (tap, position) in [(0, 0), (1, 35), (2, len - 1)] {
            let mut changed = taps(3, len);
            changed[tap].host_mut()[position * HIDDEN..][..HIDDEN].fill(1.5);
            let rows: Vec<u32> = (0..len as u32).collect();
            extend(&mut *drafter, 1, 0, 3, (&changed, &rows));
            let proposals = propose_all(&mut *drafter, &[anchor(1, 40, len)], Conditional);
            assert_ne!(
                reference, proposals,
                "{name}, tap {tap}, position {position}"
            );
            drafter.release(1);
        }
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
    let device = &target().device;
    DecoderWeights::load(device, &checkpoint, &config, WeightFormat::Auto, false).unwrap()
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
        let mut drafter = open_in(Some(dir.path()), sizes(2, NUM_DRAFT_TOKENS)).unwrap();
        fill(&mut *drafter, 0, 3, 70);
        let mut proposals = [Proposal::default()];
        let wanted = wanted(NUM_DRAFT_TOKENS, Marginal);
        let anchors = [anchor(0, 40, 70)];
        let lent = Lent::new(weights, None);
        drafter
            .propose(&target().device, lent, &anchors, wanted, &mut proposals)
            .unwrap();
        proposals
    };
    let (once, twice) = (untied_target(1.0), untied_target(2.0));
    let scaled = drafted(Some(2.0), &once);
    assert_eq!(scaled, drafted(None, &twice));
    assert_ne!(scaled, drafted(None, &once));
    assert_eq!(drafted(Some(1.0), &once), drafted(None, &once));
}

#[test]
fn requests_a_drafter_cannot_serve_are_refused() {
    for name in ["dflash", "eagle3", "ngram"] {
        let mut drafter = open_demo(name, 1);
        for length in [0, 16] {
            let error = propose(&mut *drafter, &[anchor(0, 1, 0)], wanted(length, Greedy));
            assert!(matches!(
                error,
                Err(Error::Drafter(DrafterError::DraftLength { expected: 15, got })) if got == length
            ));
        }
        let scores = if name == "dflash" {
            Conditional
        } else {
            Marginal
        };
        let error = propose(&mut *drafter, &[anchor(0, 1, 0)], wanted(3, scores));
        assert!(matches!(
            error,
            Err(Error::Drafter(DrafterError::NoScores { method, .. })) if method == name
        ));
        assert_eq!(propose(&mut *drafter, &[], wanted(3, Greedy)).unwrap(), []);
    }
}

/// A threshold between the confidences along a path stops it there; one above them all stops it at once.
#[test]
fn drafts_stop_where_confidence_ends() {
    let mut drafter = open_demo("dspark", 4);
    fill(&mut *drafter, 0, 1, 70);
    let mut draft = |min_confidence: f64| {
        let wanted = DraftRequest {
            min_confidence,
            ..wanted(NUM_DRAFT_TOKENS, Greedy)
        };
        let proposals = propose(&mut *drafter, &[anchor(0, 12, 70)], wanted).unwrap();
        let lists = spine(&proposals[0]);
        lists
            .iter()
            .map(|children| children.token_ids[0])
            .collect::<Vec<_>>()
    };
    let whole = draft(0.0);
    let lens: Vec<usize> = (1..1000)
        .map(|thousandths| {
            let tokens = draft(f64::from(thousandths) / 1000.0);
            assert_eq!(tokens, whole[..tokens.len()]);
            tokens.len()
        })
        .collect();
    assert!(lens.is_sorted_by(|a, b| a >= b), "{lens:?}");
    let mut distinct = lens.clone();
    distinct.dedup();
    assert!(distinct.len() > 2 && lens[998] == 0, "{distinct:?}");
}

#[test]
fn a_drafter_for_another_target_does_not_open() {
    let dir = dflash2_copy();
    edit_json(dir.path(), "config.json", |config| {
        config["num_target_layers"] = 64.into();
    });
    let error = open_in(Some(dir.path()), sizes(1, 15)).err().unwrap();
    assert!(matches!(
        error,
        Error::Drafter(DrafterError::Pairing {
            expected: 8,
            got: 64,
            ..
        })
    ));
}
