//! What an engine holds is what its plan says: predicted bytes against the lengths of the buffers.

use std::ops::ControlFlow;

use super::*;
use crate::convert::convert_model;
use crate::plan::footprint::Footprint;
use crate::weights::raw_safetensors::{demo_target, family};

fn options(max_num_seqs: usize) -> EngineOptions {
    EngineOptions {
        dtype: "auto".into(),
        device: "cpu".into(),
        weight_format: "auto".into(),
        head: "auto".into(),
        max_model_len: Some(200),
        max_num_seqs,
        gpu_memory_utilization: 0.9,
        num_threads: Some(1),
        extra_eos_token_ids: vec![],
        method: None,
        num_speculative_tokens: None,
        tree: None,
        tree_nodes: None,
    }
}

/// Bytes of the plan that `Device::alloc` gives: all but weights and their copies.
fn planned_buffers(footprint: &Footprint, num_pages: usize) -> u64 {
    let weights =
        footprint.weights.total() + footprint.drafter.weights as u64 + footprint.head_copy;
    footprint.fixed_bytes() - weights + num_pages as u64 * footprint.page_bytes()
}

fn assert_as_planned(engine: &Engine) {
    let EnginePlan {
        footprint,
        num_kv_pages,
        ..
    } = engine.plan();
    let weights = engine.target().weights();
    assert_eq!(footprint.weights.total(), weights.num_bytes() as u64);
    assert_eq!(footprint.head_copy, engine.target().num_copy_bytes() as u64);
    let drafter_bytes = engine.pair.drafter.as_ref().map(|d| d.weight_bytes());
    assert_eq!(footprint.drafter.weights, drafter_bytes.unwrap_or(0));
    assert_eq!(
        engine.device().bytes_allocated(),
        planned_buffers(footprint, *num_kv_pages)
    );
    let caches = &engine.pair.caches;
    assert_eq!(caches.num_free_pages(), *num_kv_pages);
    assert_eq!(caches.kv().page_bytes() as u64, footprint.kv_page);
}

fn generate(engine: &mut Engine) {
    for prompt_len in [70, 3] {
        let params = SamplingParams {
            max_tokens: Some(40),
            min_tokens: 0,
            ignore_eos: true,
            stop_token_ids: vec![],
        };
        engine
            .add_request(vec![5; prompt_len], &params, Record::default())
            .unwrap();
    }
    while engine.has_unfinished() {
        engine.step().unwrap();
    }
}

#[test]
fn every_byte_is_planned_and_none_comes_later() {
    let dflash2 = demo_target().with_file_name("dflash2");
    let dflash = family("").join("../demo/dflash");
    let cases = [
        (demo_target(), None),
        (demo_target(), Some(dflash2)),
        (demo_target(), Some(dflash)),
        (family("qwen3_5_text"), None),
        (family("llama_rope_scaling"), None),
    ];
    for (model, drafter) in cases {
        for (max_num_seqs, head) in [(1, "screened"), (3, "dense")] {
            let options = EngineOptions {
                head: head.into(),
                ..options(max_num_seqs)
            };
            let mut engine = Engine::open(&model, drafter.as_deref(), &options).unwrap();
            assert_eq!(engine.target().head_path().name(), head);
            assert_as_planned(&engine);
            assert_eq!(engine.plan().num_kv_pages, 4 * max_num_seqs);
            generate(&mut engine);
            assert_as_planned(&engine);
        }
    }
}

#[test]
fn a_w12_engine_holds_what_its_plan_says() {
    let dir = tempfile::tempdir().unwrap();
    let converted = dir.path().join("w12");
    convert_model(&demo_target(), &converted, &mut |_| {
        ControlFlow::Continue(())
    })
    .unwrap();
    // Converted on disk the sizes are known before; in memory the plan settles once it is done.
    for (model, weight_format) in [
        (&converted, "auto"),
        (&converted, "w12"),
        (&demo_target(), "w12"),
    ] {
        let options = EngineOptions {
            weight_format: weight_format.into(),
            ..options(2)
        };
        let mut engine = Engine::open(model, None, &options).unwrap();
        assert_eq!(engine.target().weights().num_w12_matrices(), 50);
        assert_as_planned(&engine);
        generate(&mut engine);
        assert_as_planned(&engine);
    }
}

#[test]
fn the_drafters_context_serves_what_the_pool_admits() {
    let drafter = demo_target().with_file_name("dflash2");
    let mut engine = Engine::open(&demo_target(), Some(&drafter), &options(2)).unwrap();
    let params = SamplingParams {
        max_tokens: Some(30),
        min_tokens: 0,
        ignore_eos: true,
        stop_token_ids: vec![],
    };
    let ids: Vec<_> = (0..4)
        .map(|_| {
            let prompt = vec![5; 170];
            engine
                .add_request(prompt, &params, Record::default())
                .unwrap()
        })
        .collect();
    while engine.has_unfinished() {
        engine.step().unwrap();
    }
    for id in ids {
        assert_eq!(engine.take_output(id).unwrap().request.output().len(), 30);
    }
    assert_eq!(engine.num_free_kv_pages(), engine.plan().num_kv_pages);
}
