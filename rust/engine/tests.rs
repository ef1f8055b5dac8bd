//! What an engine holds is what its plan says: predicted bytes against the lengths of the buffers.

use std::ops::ControlFlow;

use super::opening::with_plan;
use super::*;
use crate::convert::convert_model;
use crate::device::Backend;
use crate::drafter::proposal::Proposal;
use crate::drafter::{ContextRows, DraftAnchor, DraftRequest, Drafter};
use crate::error::{DeviceError, DrafterError, Error, KernelError};
use crate::kernels::kv_span::PerSpan;
use crate::model::Lent;
use crate::options::speculation::HeadPrecision;
use crate::options::{EngineOptions, PromptLookup, WeightFormat};
use crate::plan::footprint::{Footprint, Holdings};
use crate::planted::PlantedPair;
use crate::weights::raw_safetensors::{demo_target, family};

mod windows;

fn options(max_num_seqs: usize) -> EngineOptions {
    EngineOptions {
        dtype: "auto".into(),
        device: "cpu".into(),
        weight_format: "auto".into(),
        kernels: "lossless".into(),
        head: "auto".into(),
        max_model_len: Some(200),
        max_num_seqs,
        max_num_batched_tokens: None,
        gpu_memory_utilization: 0.9,
        seed: 0,
        num_threads: Some(1),
        extra_eos_token_ids: vec![],
        method: None,
        num_speculative_tokens: Vec::new(),
        tree: None,
        tree_nodes: Vec::new(),
        q_passes: 0,
        q_head: "auto".into(),
        verify_costs: None,
        min_confidence: 0.0,
        prompt_lookup: PromptLookup::default(),
    }
}

/// Bytes of the plan that `Device::alloc` gives: all but weights and their copies.
fn planned_buffers(footprint: &Footprint, num_pages: PerSpan<usize>) -> u64 {
    let weights =
        footprint.weights.total() + footprint.drafter.weights as u64 + footprint.head_copy;
    footprint.fixed_bytes() - weights + footprint.pool_bytes(num_pages)
}

fn assert_as_planned(engine: &Engine) {
    let EnginePlan {
        footprint,
        num_kv_pages,
        ..
    } = engine.plan();
    let weights = engine.target().weights();
    let held = weights.num_bytes() + weights.q_view_bytes();
    assert_eq!(footprint.weights.total(), held as u64);
    assert_eq!(footprint.head_copy, engine.target().num_copy_bytes() as u64);
    let drafter_bytes = engine.pair.drafter.as_ref().map(|d| d.weight_bytes());
    assert_eq!(footprint.drafter.weights, drafter_bytes.unwrap_or(0));
    assert_eq!(
        engine.device().bytes_allocated(),
        planned_buffers(footprint, *num_kv_pages)
    );
    let caches = &engine.pair.caches;
    assert_eq!(caches.num_free_pages(), *num_kv_pages);
    let page = caches.kv().layout().page_bytes(size_of::<f32>());
    assert_eq!(page.whole as u64, footprint.kv_page.whole);
    assert_eq!(page.window as u64, footprint.kv_page.window);
}

fn generate(engine: &mut Engine) {
    for prompt_len in [70, 3] {
        let params = SamplingParams {
            max_tokens: Some(40),
            min_tokens: 0,
            ignore_eos: true,
            stop_token_ids: vec![],
            sampling: None,
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
    let demo = |name: &str| family("").join("../demo").join(name);
    let cases = [
        (demo_target(), None, None),
        (demo_target(), Some(dflash2.clone()), None),
        (demo_target(), Some(dflash2), Some("chain")),
        (demo_target(), Some(demo("dflash")), None),
        (demo_target(), Some(demo("dspark")), None),
        (demo_target(), Some(demo("dspark")), Some("ddtree")),
        (demo_target(), Some(demo("eagle3")), None),
        (demo_target(), Some(demo("eagle3")), Some("chain")),
        (family("qwen3_5_text"), None, None),
        (family("llama_rope_scaling"), None, None),
    ];
    for (model, drafter, tree) in cases {
        for (max_num_seqs, head) in [(1, "screened"), (3, "dense")] {
            let options = EngineOptions {
                tree: tree.map(str::to_owned),
                head: head.into(),
                ..options(max_num_seqs)
            };
            let mut engine = Engine::open(&model, drafter.as_deref(), &options).unwrap();
            assert_eq!(engine.target().head_path().name(), head);
            assert_as_planned(&engine);
            let expected = PerSpan::whole_only(4 * max_num_seqs);
            assert_eq!(engine.plan().num_kv_pages, expected);
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
fn a_w12_drafter_is_planned_as_it_is_stored() {
    let dir = tempfile::tempdir().unwrap();
    for name in ["dflash2", "dspark", "eagle3"] {
        let source = match name {
            "dflash2" => demo_target().with_file_name(name),
            _ => family("").join("../demo").join(name),
        };
        let converted = dir.path().join(name);
        convert_model(&source, &converted, &mut |_| ControlFlow::Continue(())).unwrap();
        let options = options(2);
        let bf16 = Engine::open(&demo_target(), Some(&source), &options).unwrap();
        let mut w12 = Engine::open(&demo_target(), Some(&converted), &options).unwrap();
        assert_as_planned(&w12);
        generate(&mut w12);
        assert_as_planned(&w12);
        let bytes = |engine: &Engine| engine.plan().footprint.drafter.weights;
        assert!(bytes(&w12) * 10 < bytes(&bf16) * 9, "{name}");
    }
}

#[test]
fn a_planted_drafter_is_held_and_planned_as_its_target() {
    for name in ["tiny", "tiny-gemma"] {
        let pair = PlantedPair::named(name).unwrap();
        let [bf16, w12] = ["bf16", "w12"].map(|weight_format| {
            let options = EngineOptions {
                weight_format: weight_format.into(),
                ..options(2)
            };
            let engine = Engine::open_planted(&pair, true, &options).unwrap();
            let limits = &engine.plan().limits;
            let format = WeightFormat::named(weight_format).unwrap();
            let planned = Footprint::of(&Holdings {
                config: &pair.target,
                headers: None,
                drafter: Some(&pair.drafter),
                drafter_headers: None,
                drafter_format: format,
                limits,
                format,
                backend: Backend::Host,
            });
            let held = engine.pair.drafter.as_ref().unwrap().weight_bytes();
            assert_eq!(engine.plan().footprint.drafter.weights, held);
            let planned = planned.drafter.weights;
            // More escapes are assumed than there are.
            assert!(
                planned.abs_diff(held) * 200 < held,
                "{name}: {planned}, {held}"
            );
            held
        });
        println!("{name}: {bf16} bytes as BF16, {w12} as W12");
        assert!(w12 < bf16, "{name}");
    }
}

#[test]
fn drafts_go_by_the_head_that_the_plan_names() {
    let dflash2 = demo_target().with_file_name("dflash2");
    for (drafter, is_lent) in [(dflash2, true), (family("").join("../demo/eagle3"), false)] {
        for (head, expected) in [
            ("dense", HeadPrecision::Exact),
            ("screened", HeadPrecision::Int8),
        ] {
            let options = EngineOptions {
                head: head.into(),
                ..options(1)
            };
            let engine = Engine::open(&demo_target(), Some(&drafter), &options).unwrap();
            assert_eq!(engine.pair.target.lent().head(), expected);
            let planned = engine.plan().limits.speculation.draft_head;
            assert_eq!(planned, is_lent.then_some(expected), "{drafter:?}, {head}");
        }
    }
}

#[test]
fn views_for_q_passes_are_planned() {
    let drafter = demo_target().with_file_name("dflash2");
    for (weight_format, has_views) in [("bf16", true), ("w12", false)] {
        let options = EngineOptions {
            weight_format: weight_format.into(),
            q_passes: 1,
            ..options(2)
        };
        let mut engine = Engine::open(&demo_target(), Some(&drafter), &options).unwrap();
        assert_eq!(engine.plan().footprint.weights.q_views > 0, has_views);
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
        sampling: None,
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

#[test]
fn a_full_gpu_is_told_what_was_to_be_held() {
    let full = || DeviceError::OutOfMemory {
        num_bytes: 3 << 30,
        free_bytes: 1 << 30,
        total_bytes: 80 << 30,
    };
    let in_a_kernel = KernelError::Device {
        kernel: "gdn_wy",
        source: full(),
    };
    for error in [Error::Device(full()), Error::Kernel(in_a_kernel)] {
        let told = with_plan(error, "logits 2.00 GB, KV pool 9.00 GB").to_string();
        assert!(
            told.contains("out of GPU memory: 3.22 GB asked for")
                && told.contains("planned to fit (logits 2.00 GB, KV pool 9.00 GB)"),
            "{told}"
        );
    }
    let other = DeviceError::NoCompiler;
    let told = with_plan(Error::Device(other), "KV pool 9.00 GB").to_string();
    assert!(!told.contains("KV pool"), "{told}");
}

/// A drafter whose context cannot be extended `num_extensions` times.
struct Failing {
    drafter: Box<dyn Drafter>,
    num_extensions: usize,
}

impl Drafter for Failing {
    fn weight_bytes(&self) -> usize {
        self.drafter.weight_bytes()
    }

    fn taps(&self) -> &[usize] {
        self.drafter.taps()
    }

    fn reserve(&mut self, slot: usize, num_tokens: usize) -> bool {
        self.drafter.reserve(slot, num_tokens)
    }

    fn release(&mut self, slot: usize) {
        self.drafter.release(slot);
    }

    fn extend(&mut self, device: &Device, target: Lent<'_>, rows: ContextRows<'_>) -> Result<()> {
        if self.num_extensions == 0 {
            return Err(DrafterError::ContextGap {
                slot: rows.slot,
                expected: 0,
                got: rows.first_position,
            }
            .into());
        }
        self.num_extensions -= 1;
        self.drafter.extend(device, target, rows)
    }

    fn rollback(&mut self, slot: usize) {
        self.drafter.rollback(slot);
    }

    fn propose(
        &mut self,
        device: &Device,
        target: Lent<'_>,
        anchors: &[DraftAnchor],
        wanted: DraftRequest,
        proposals: &mut [Proposal],
    ) -> Result<()> {
        self.drafter
            .propose(device, target, anchors, wanted, proposals)
    }
}

#[test]
fn a_step_that_fails_behind_a_request_that_ended_gives_its_room_back() {
    let options = EngineOptions {
        method: Some("ngram".into()),
        ..options(2)
    };
    let mut engine = Engine::open(&demo_target(), None, &options).unwrap();
    // Both prompts, and then the second request's rows, which come after the first has ended.
    let drafter = engine.pair.drafter.take().unwrap();
    engine.pair.drafter = Some(Box::new(Failing {
        drafter,
        num_extensions: 2,
    }));
    let params = |max_tokens| SamplingParams {
        max_tokens: Some(max_tokens),
        min_tokens: 0,
        ignore_eos: true,
        stop_token_ids: vec![],
        sampling: None,
    };
    let add = |engine: &mut Engine, max_tokens| {
        let params = params(max_tokens);
        engine.add_request(vec![5, 6, 7], &params, Record::default())
    };
    let short = add(&mut engine, 2).unwrap();
    let long = add(&mut engine, 40).unwrap();
    engine.step().unwrap();
    let error = engine.step().unwrap_err();
    assert!(
        matches!(error, Error::Drafter(DrafterError::ContextGap { .. })),
        "{error}"
    );
    assert!(!engine.has_unfinished());
    assert_eq!(engine.num_free_kv_pages(), engine.plan().num_kv_pages);
    let ended = engine.take_output(short).unwrap();
    assert_eq!(ended.finish_reason, FinishReason::Length);
    assert_eq!(
        engine.take_output(long).unwrap().finish_reason,
        FinishReason::Abort
    );
    // A single token needs no context, and every slot is free.
    for _ in 0..3 {
        let next = add(&mut engine, 1).unwrap();
        while engine.has_unfinished() {
            engine.step().unwrap();
        }
        assert_eq!(
            engine.take_output(next).unwrap().finish_reason,
            FinishReason::Length
        );
    }
}

#[test]
fn plain_decoding_on_an_engine_with_a_drafter_keeps_no_taps() {
    let drafter = demo_target().with_file_name("dflash2");
    let mut engine = Engine::open(&demo_target(), Some(&drafter), &options(1)).unwrap();
    let run = |engine: &mut Engine, prompt: Vec<u32>| {
        let params = SamplingParams {
            max_tokens: Some(3),
            min_tokens: 0,
            ignore_eos: true,
            stop_token_ids: vec![],
            sampling: None,
        };
        engine
            .add_request(prompt, &params, Record::default())
            .unwrap();
        while engine.has_unfinished() {
            engine.step().unwrap();
        }
        let first_tap = &engine.target().taps()[0];
        first_tap.read_back(engine.config().hidden_size).unwrap()
    };
    let kept = run(&mut engine, vec![5, 6, 7]);
    assert!(kept.iter().any(|&value| value != 0.0));
    engine.switch_to(false, &options(1)).unwrap();
    assert!(engine.drafter_config().is_none());
    assert_eq!(run(&mut engine, vec![8, 9]), kept);
    engine.switch_to(true, &options(1)).unwrap();
    assert!(engine.drafter_config().is_some());
    assert_ne!(run(&mut engine, vec![8, 9]), kept);
}
