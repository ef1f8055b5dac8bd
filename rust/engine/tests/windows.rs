//! Engines whose sliding layers keep their windows: the bits of engines that keep everything, from nothing but what is
//! kept, and the memory that is planned.

use std::fs;

use tempfile::TempDir;

use super::*;
use crate::cache::slots::{CacheSizes, SequenceCaches};
use crate::model::config::AttentionConfig;
use crate::plan::layer_caches;
use crate::weights::raw_safetensors::edit_json;

const FAMILIES: [&str; 2] = ["gemma4_unified", "muse_glimmer"];
/// Longest requests: more than three windows of the widest, and no multiple of a page.
const MAX_MODEL_LEN: usize = 450;

/// The family's model with another window.
fn model(name: &str, window: usize) -> TempDir {
    let dir = tempfile::tempdir().unwrap();
    for entry in fs::read_dir(family(name)).unwrap() {
        let path = entry.unwrap().path();
        fs::copy(&path, dir.path().join(path.file_name().unwrap())).unwrap();
    }
    edit_json(dir.path(), "config.json", |config| {
        config["text_config"]["sliding_window"] = window.into();
    });
    dir
}

fn with_chunks(max_num_batched_tokens: usize, max_num_seqs: usize) -> EngineOptions {
    EngineOptions {
        max_model_len: Some(MAX_MODEL_LEN),
        max_num_batched_tokens: Some(max_num_batched_tokens),
        ..options(max_num_seqs)
    }
}

/// Before a step, spoils what no row of it may see.
fn poison(engine: &mut Engine) {
    let window = |attention: &AttentionConfig| attention.window;
    let windows: Vec<_> = engine.config().attention_layers().map(window).collect();
    let running = engine.scheduler.running_mut().iter();
    let slots = running.filter_map(|request| match request.state {
        State::Running { slot } => Some((slot, request.committed_len)),
        _ => None,
    });
    let slots: Vec<_> = slots.collect();
    engine.pair.caches.poison_unseen(&windows, &slots);
}

fn open(model: &TempDir, options: &EngineOptions) -> Engine {
    Engine::open(model.path(), None, options).unwrap()
}

/// Tokens of some requests, more than run at once, and the bits of the logits that chose them.
fn texts(mut engine: Engine, is_poisoned: bool) -> Vec<(Vec<u32>, Vec<u32>)> {
    let num_pages = engine.num_free_kv_pages();
    let params = SamplingParams {
        max_tokens: Some(40),
        min_tokens: 0,
        ignore_eos: true,
        stop_token_ids: vec![],
        sampling: None,
    };
    let record = Record {
        logits: true,
        rounds: false,
    };
    // What a request repeats prompt lookup finds again.
    let prompt = |len: usize, seed: usize| (0..len).map(|i| (seed + i * i % 29) as u32).collect();
    let ids: Vec<_> = [(400, 3), (65, 5), (7, 8), (257, 13)]
        .map(|(len, seed)| engine.add_request(prompt(len, seed), &params, record))
        .into_iter()
        .collect::<Result<_>>()
        .unwrap();
    while engine.has_unfinished() {
        if is_poisoned {
            poison(&mut engine);
        }
        engine.step().unwrap();
    }
    assert_eq!(engine.num_free_kv_pages(), num_pages);
    let text = |id| {
        let request = engine.take_output(id).unwrap().request;
        let logits = request.record.logits.iter().map(|logit| logit.to_bits());
        (request.output().to_vec(), logits.collect())
    };
    ids.into_iter().map(text).collect()
}

#[test]
fn windows_give_the_bits_of_layers_that_keep_everything() {
    for name in FAMILIES {
        for window in [1, 16, 100, 129] {
            let dir = model(name, window);
            // Rows of a whole prompt are written before its first row looks back: rings that hold them never turn.
            let keeping_all = with_chunks(1024, 1);
            let longest = MAX_MODEL_LEN.div_ceil(64);
            let engine = open(&dir, &keeping_all);
            assert_eq!(engine.plan().num_kv_pages.window, longest);
            let reference = texts(engine, false);
            assert!(reference.iter().all(|(tokens, _)| tokens.len() == 40));
            for (chunk_rows, method) in [
                (64, None),
                (129, None),
                (256, None),
                (1024, None),
                (64, Some("ngram")),
                (193, Some("ngram")),
            ] {
                let options = EngineOptions {
                    method: method.map(str::to_owned),
                    ..with_chunks(chunk_rows, 3)
                };
                let got = texts(open(&dir, &options), true);
                assert!(
                    got == reference,
                    "{name}, window {window}, chunks of {chunk_rows}, {method:?}"
                );
            }
        }
    }
}

/// The same test with rings that have no room for the rows that a pass settles: it can fail.
#[test]
fn rings_that_are_too_short_give_other_bits() {
    let dir = model("gemma4_unified", 129);
    let reference = texts(open(&dir, &with_chunks(1024, 1)), false);
    for settled_rows in [192, 128, 0] {
        let mut engine = open(&dir, &with_chunks(256, 3));
        let sizes = CacheSizes {
            num_slots: 3,
            num_pages: engine.plan().num_kv_pages,
            settled_rows,
        };
        let layers = layer_caches(engine.config());
        let recurrence = engine.plan().limits.recurrence();
        let caches = SequenceCaches::new(engine.device(), &layers, recurrence, None, sizes);
        engine.pair.caches = caches.unwrap();
        let is_right = texts(engine, false) == reference;
        assert_eq!(is_right, settled_rows == 192, "{settled_rows} rows");
    }
}

#[test]
fn windows_are_planned_to_the_byte() {
    // A window of 16 and passes of 64 rows: one page; and three beside the rows that passes of 192 settle.
    for (chunk_rows, ring_pages) in [(64, 1), (192, 3)] {
        for name in FAMILIES {
            for max_num_seqs in [1, 3] {
                let options = with_chunks(chunk_rows, max_num_seqs);
                let mut engine = Engine::open(&family(name), None, &options).unwrap();
                let expected = PerSpan {
                    whole: 8 * max_num_seqs,
                    window: ring_pages * max_num_seqs,
                };
                assert_eq!(engine.plan().num_kv_pages, expected);
                assert_as_planned(&engine);
                generate(&mut engine);
                assert_as_planned(&engine);
            }
        }
    }
}

#[test]
fn requests_take_what_they_need_of_a_window() {
    let options = with_chunks(64, 3);
    let dir = model("gemma4_unified", 129);
    let mut engine = open(&dir, &options);
    let caches = &mut engine.pair.caches;
    assert_eq!(caches.num_free_pages().window, 3 * 2);
    let slots = [64, 128, 400].map(|num_positions| caches.admit(num_positions).unwrap());
    assert_eq!(caches.num_free_pages().window, 1);
    assert_eq!(caches.pages(slots[2]).window, [3, 4, 3, 4, 3, 4, 3]);
    caches.release(slots[1]);
    assert_eq!(caches.num_free_pages().window, 3);
    let slot = caches.admit(65).unwrap();
    assert_eq!(caches.pages(slot).window.len(), 2);
    assert_eq!(caches.num_free_pages().window, 1);
}
