//! Plans of published models from their configs alone, against sizes worked out by hand; pools against memories.

use std::ops::ControlFlow;
use std::path::{Path, PathBuf};

use proptest::prelude::*;

use super::budget::Budget;
use super::deployment::{DeploymentPlan, Setting};
use super::footprint::{Footprint, Holdings};
use super::weight_bytes::{SizeBasis, WeightBytes, num_parameters};
use super::*;
use crate::convert::convert_model;
use crate::error::{ConfigError, DrafterError, Error};
use crate::options::{DeviceChoice, PromptLookup, WeightFormat};
use crate::weights::Checkpoint;
use crate::weights::inspect::inspect;
use crate::weights::raw_safetensors::demo_target;

const GIB: u64 = 1 << 30;

pub(crate) fn published(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("tests/fixtures/configs")
        .join(name)
}

fn config_of(name: &str) -> ModelConfig {
    ModelConfig::read(&published(name)).unwrap()
}

pub(crate) fn options(max_num_seqs: usize) -> EngineOptions {
    EngineOptions {
        dtype: "auto".into(),
        device: "auto".into(),
        weight_format: "auto".into(),
        kernels: "lossless".into(),
        head: "auto".into(),
        max_model_len: None,
        max_num_seqs,
        max_num_batched_tokens: None,
        gpu_memory_utilization: 0.9,
        seed: 0,
        num_threads: None,
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

fn setting<'a>(model: &'a Path, memory_bytes: u64) -> Setting<'a> {
    Setting {
        model,
        drafter: None,
        device: DeviceChoice::Cuda(0),
        memory_bytes: Some(memory_bytes),
    }
}

#[test]
fn a_prompts_rows_of_a_pass_follow_from_the_option_or_the_device() {
    let config = config_of("qwen3.8-27b");
    for (asked, on_host, on_cuda) in [(None, 256, 64), (Some(96), 96, 96)] {
        let options = EngineOptions {
            max_num_batched_tokens: asked,
            ..options(2)
        };
        for (backend, rows) in [(Backend::Host, on_host), (Backend::Cuda, on_cuda)] {
            let limits = Limits::resolve(&options, &config, None, backend).unwrap();
            assert_eq!(limits.max_chunk_rows, rows, "{asked:?} {backend:?}");
            assert_eq!(limits.max_step_rows, asked.unwrap_or(256));
        }
    }
}

/// The plan, or why nothing fits.
fn fitting(options: &EngineOptions, setting: Setting<'_>) -> Result<DeploymentPlan> {
    let mut plan = DeploymentPlan::new(options, setting)?;
    match plan.shortfall.take() {
        None => Ok(plan),
        Some(error) => Err(error.into()),
    }
}

#[test]
fn parameters_are_those_published() {
    for (name, expected) in [
        ("qwen3.8-27b", 26.896),
        ("qwen3.5-4b", 4.206),
        ("llama-3.1-8b", 8.030),
    ] {
        let billions = num_parameters(&config_of(name)) as f64 / 1e9;
        assert!((billions - expected).abs() < 5e-4, "{name}: {billions}");
    }
}

#[test]
fn sequence_memory_is_that_worked_out_by_hand() {
    // Per token: layers x (keys + values) x heads x head size x 4 bytes. Per state: layers x heads x 128 x 128 fp32;
    // three columns of the convolution are the history, our ring keeps the current one too.
    for (name, kv_per_token, state_mib, history_bytes) in [
        (
            "qwen3.8-27b",
            16 * 2 * 4 * 256 * 4,
            144,
            48 * 3 * 10_240 * 4,
        ),
        ("qwen3.5-4b", 8 * 2 * 4 * 256 * 4, 48, 24 * 3 * 8_192 * 4),
        ("llama-3.1-8b", 32 * 2 * 8 * 128 * 4, 0, 0),
    ] {
        let config = config_of(name);
        let limits = Limits::resolve(&options(2), &config, None, Backend::Cuda).unwrap();
        let footprint = |backend| {
            Footprint::of(&Holdings {
                config: &config,
                headers: None,
                drafter: None,
                drafter_headers: None,
                drafter_format: WeightFormat::Auto,
                limits: &limits,
                format: WeightFormat::Bf16,
                backend,
            })
        };
        let (cuda, host) = (footprint(Backend::Cuda), footprint(Backend::Host));
        let kv_page = PerSpan::whole_only(64 * kv_per_token);
        assert_eq!(cuda.kv_page, kv_page, "{name}");
        assert_eq!(host.kv_page, cuda.kv_page);
        assert_eq!(cuda.gdn_slot.states, (3 * state_mib) << 20);
        assert_eq!(host.gdn_slot, cuda.gdn_slot);
        assert_eq!(cuda.gdn_slot.conv, history_bytes / 3 * 4);
        assert_eq!(host.pass, cuda.pass);
        assert_eq!(cuda.num_slots, 2);
    }
    let log = 128 * (16 * 128 + 48 * 128 + 48) * 4 * 48;
    let qwen = DeploymentPlan::new(
        &options(1),
        setting(&published("qwen3.8-27b"), 80_000_000_000),
    )
    .unwrap();
    assert_eq!(qwen.bf16.footprint.gdn_slot.log, log);
}

#[test]
fn weights_add_up() {
    let config = config_of("qwen3.8-27b");
    let bf16 = WeightBytes::of(&config, WeightFormat::Bf16, false, None, Backend::Cuda);
    let table = 248_320 * 5_120 * 2;
    let linear_weights: u64 = 64 * 3 * 5_120 * 17_408
        + 16 * 5_120 * (12_288 + 2 * 1_024 + 6_144)
        + 48 * 5_120 * (10_240 + 2 * 6_144 + 2 * 48);
    // Each matrix has four more bytes, where W12 would say where escapes begin.
    assert_eq!((bf16.embedding, bf16.lm_head), (table + 4, table + 4));
    assert_eq!(bf16.num_linear_weights, linear_weights);
    let num_matrices = 64 * 3 + 16 * 4 + 48 * 5;
    assert_eq!(
        (bf16.linear, bf16.basis),
        (2 * linear_weights + 4 * num_matrices, SizeBasis::Exact)
    );
    // What is neither table nor layer is fp32: norms, convolutions, decays.
    let vectors = num_parameters(&config) - linear_weights - table;
    assert_eq!(bf16.vectors, 4 * vectors);

    let w12 = WeightBytes::of(&config, WeightFormat::W12, false, None, Backend::Cuda);
    assert_eq!(w12.basis, SizeBasis::Estimate);
    assert_eq!(w12.num_w12_matrices, 64 * 3 + 16 * 4 + 48 * 5);
    assert_eq!(
        (w12.embedding, w12.lm_head, w12.vectors),
        (bf16.embedding, bf16.lm_head, bf16.vectors)
    );
    // A GPU's slices carry notes on their escapes and room for them.
    for (backend, expected, most_bits) in
        [(Backend::Host, 0.752, 12.05), (Backend::Cuda, 0.76, 12.16)]
    {
        let bytes = |format| WeightBytes::of(&config, format, false, None, backend);
        let (bf16, w12) = (bytes(WeightFormat::Bf16), bytes(WeightFormat::W12));
        let share = w12.linear as f64 / bf16.linear as f64;
        assert!((share - expected).abs() < 2e-3, "{share}");
        let bits = w12.linear_bits_per_weight();
        assert!(bits < most_bits, "{bits}");
    }
}

#[test]
fn a_tied_head_is_held_once_and_copied() {
    let dir = published("qwen3.5-4b");
    let plan = DeploymentPlan::new(&options(1), setting(&dir, 24 * GIB)).unwrap();
    let footprint = &plan.bf16.footprint;
    assert_eq!(footprint.weights.lm_head, 0);
    assert_eq!(footprint.head_copy, 248_320 * (2_560 + 16));
    let dense = EngineOptions {
        head: "dense".into(),
        ..options(1)
    };
    let plan = DeploymentPlan::new(&dense, setting(&dir, 24 * GIB)).unwrap();
    assert_eq!(plan.w12.footprint.head_copy, 0);
}

#[test]
fn layers_that_padding_eats_stay_bf16() {
    // Six layers have decays and strengths of two rows each, where a tile has sixteen.
    let config = ModelConfig::read(&demo_target()).unwrap();
    let w12 = WeightBytes::of(&config, WeightFormat::W12, false, None, Backend::Host);
    assert_eq!(w12.num_w12_matrices, 8 * 3 + 2 * 4 + 6 * 3);
    let bf16 = WeightBytes::of(&config, WeightFormat::Bf16, false, None, Backend::Host);
    let narrow = 12 * 16 * 256 * 2;
    let share = (w12.linear - narrow) as f64 / (bf16.linear - narrow) as f64;
    assert!((0.75..0.755).contains(&share), "{share}");
}

#[test]
fn a_converted_checkpoint_is_planned_to_the_byte() {
    let source = demo_target();
    let config = ModelConfig::read(&source).unwrap();
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("w12");
    convert_model(&source, &out, &mut |_| ControlFlow::Continue(())).unwrap();
    let headers = Checkpoint::open(&out).unwrap();
    let w12 = |format| WeightBytes::of(&config, format, false, Some(&headers), Backend::Cuda);
    let linear: u64 = inspect(&out)
        .unwrap()
        .iter()
        .filter(|tensor| tensor.name.contains("_proj"))
        .map(|tensor| {
            // Of a tile of 16 x 64 weights: 1.5 bytes each and where its escapes begin; and of every eighth of a row of
            // tiles a note of 64 bytes.
            let shape = headers.shape(&tensor.name).unwrap();
            let (rows, columns) = (shape[0].div_ceil(16), shape[1].div_ceil(64));
            let num_bytes = match &tensor.format[..] {
                "w12" => {
                    let notes = rows * 8 * 64;
                    rows * columns * (1536 + 4) + notes + 4 * (1 + tensor.num_escapes)
                }
                // Decays and strengths stay BF16: two channels of a tile of 16.
                _ => rows * columns * 2048 + 4,
            };
            num_bytes as u64
        })
        .sum();
    assert_eq!(
        (w12(WeightFormat::W12).linear, w12(WeightFormat::W12).basis),
        (linear, SizeBasis::Exact)
    );
    assert_eq!(w12(WeightFormat::Auto), w12(WeightFormat::W12));
    let plain = WeightBytes::of(&config, WeightFormat::Bf16, false, None, Backend::Cuda);
    assert_eq!(w12(WeightFormat::Bf16), plain);
    // Headers of the BF16 checkpoint tell nothing of W12.
    let headers = Checkpoint::open(&source).unwrap();
    let of = |format| WeightBytes::of(&config, format, false, Some(&headers), Backend::Cuda);
    assert_eq!(of(WeightFormat::W12).basis, SizeBasis::Estimate);
    assert_eq!(of(WeightFormat::Auto), plain);
}

#[test]
fn a_drafter_is_planned_from_its_config() {
    let (target, drafter) = (published("qwen3.8-27b"), published("qwen3.8-27b-dflash2"));
    let plan = DeploymentPlan::new(
        &options(4),
        Setting {
            drafter: Some(&drafter),
            ..setting(&target, 80_000_000_000)
        },
    )
    .unwrap();
    let config = plan.drafter.as_ref().unwrap();
    let billions = config.num_parameters() as f64 / 1e9;
    assert!((billions - 1.9).abs() < 0.05, "{billions}");
    let bytes = plan.bf16.footprint.drafter;
    // All layers see 2048 positions, so that a context takes nothing per token: a slot holds the window and the rows of
    // one path, of five layers of eight heads of 128, keys and values, four bytes each; and logits of seven drafts.
    let window = (2048 + 64) * 5 * 2 * 8 * 128 * 4;
    assert_eq!(bytes.page, 0);
    assert!(bytes.weights > 2 * config.num_parameters());
    let slot = window + 7 * 248_320 * 4;
    assert!(
        (slot..slot + (1 << 22)).contains(&bytes.slot),
        "{}",
        bytes.slot
    );
    let page = plan.bf16.footprint.page_bytes();
    assert_eq!(page, PerSpan::whole_only(64 * 131_072));
    assert_eq!(plan.limits.speculation.trees[0].tree_nodes, 32);
    let demo = demo_target();
    let other = Setting {
        drafter: Some(&drafter),
        ..setting(&demo, 80_000_000_000)
    };
    assert!(matches!(
        DeploymentPlan::new(&options(4), other),
        Err(Error::Drafter(DrafterError::Pairing { .. }))
    ));
}

#[test]
fn what_is_missing_is_said_with_what_to_change() {
    let dir = published("qwen3.8-27b");
    let plan = |options: &EngineOptions, bytes| fitting(options, setting(&dir, bytes));
    let error = |options: &EngineOptions, bytes| plan(options, bytes).unwrap_err().to_string();
    // What follows `text` in an error.
    let value = |error: &str, text: &str| -> f64 {
        let rest = error
            .split(text)
            .nth(1)
            .unwrap_or_else(|| panic!("{error}"));
        rest.split([' ', ',']).next().unwrap().parse().unwrap()
    };
    let long = EngineOptions {
        max_model_len: Some(200_000),
        ..options(4)
    };
    let message = error(&long, 64_000_000_000);
    assert!(
        message.contains("one request of 200000 tokens"),
        "{message}"
    );
    assert!(message.contains("GB are missing; "), "{message}");
    let lowered = |max_model_len: f64| EngineOptions {
        max_model_len: Some(max_model_len as usize),
        ..long.clone()
    };
    let fitting = value(&message, "lower max_model_len to ");
    assert!(plan(&lowered(fitting), 64_000_000_000).is_ok());
    assert!(plan(&lowered(fitting + 1.0), 64_000_000_000).is_err());

    let many = EngineOptions {
        max_model_len: Some(40_000),
        ..options(40)
    };
    let message = error(&many, 68_000_000_000);
    let fitting = value(&message, "lower max_num_seqs to ");
    let fewer = |max_num_seqs: f64| EngineOptions {
        max_num_seqs: max_num_seqs as usize,
        ..many.clone()
    };
    assert!(plan(&fewer(fitting), 68_000_000_000).is_ok());
    assert!(plan(&fewer(fitting + 1.0), 68_000_000_000).is_err());

    let shy = EngineOptions {
        gpu_memory_utilization: 0.4,
        ..options(1)
    };
    let message = error(&shy, 80_000_000_000);
    let share = value(&message, "raise gpu_memory_utilization to ");
    let bolder = |gpu_memory_utilization| EngineOptions {
        gpu_memory_utilization,
        ..shy.clone()
    };
    assert!(plan(&bolder(share), 80_000_000_000).is_ok());
    assert!(plan(&bolder(share - 0.001), 80_000_000_000).is_err());

    let message = error(&options(64), 36_000_000_000);
    assert!(
        message.contains("lower max_model_len and max_num_seqs and raise"),
        "{message}"
    );
    let message = error(&options(64), 30_000_000_000);
    assert!(
        message.ends_with("a larger memory or a smaller model is needed"),
        "{message}"
    );
}

#[test]
fn an_index_without_its_shards_is_no_checkpoint() {
    let source = demo_target();
    let dir = tempfile::tempdir().unwrap();
    for name in ["config.json", "model.safetensors.index.json"] {
        std::fs::copy(source.join(name), dir.path().join(name)).unwrap();
    }
    assert!(Checkpoint::is_in(&source) && !Checkpoint::is_in(dir.path()));
    let plan = |dir: &Path| DeploymentPlan::new(&options(1), setting(dir, GIB)).unwrap();
    assert_eq!(
        plan(dir.path()).bf16.footprint,
        plan(&source).bf16.footprint
    );
    let index = dir.path().join("model.safetensors.index.json");
    std::fs::write(index, "{").unwrap();
    assert!(matches!(
        DeploymentPlan::new(&options(1), setting(dir.path(), GIB)),
        Err(Error::Checkpoint(_))
    ));
}

/// Writes the config in `published(name)` to `dir`, with `edit` made to the object that holds its sizes.
fn write_config(dir: &Path, name: &str, edit: impl FnOnce(&mut serde_json::Value)) {
    let text = std::fs::read(published(name).join("config.json")).unwrap();
    let mut config: serde_json::Value = serde_json::from_slice(&text).unwrap();
    match config.get_mut("text_config") {
        Some(section) => edit(section),
        None => edit(&mut config),
    }
    std::fs::write(dir.join("config.json"), config.to_string()).unwrap();
}

#[test]
fn sizes_whose_products_wrap_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let huge: [(&str, &[&str]); 5] = [
        ("llama-3.1-8b", &["num_attention_heads", "head_dim"]),
        ("llama-3.1-8b", &["vocab_size", "hidden_size"]),
        ("llama-3.1-8b", &["intermediate_size"]),
        (
            "qwen3.5-4b",
            &["linear_key_head_dim", "linear_value_head_dim"],
        ),
        ("qwen3.5-4b", &["linear_conv_kernel_dim"]),
    ];
    for (name, keys) in huge {
        write_config(dir.path(), name, |config| {
            for key in keys {
                config[*key] = (1 << 30).into();
            }
        });
        assert!(
            matches!(
                DeploymentPlan::new(&options(1), setting(dir.path(), GIB)),
                Err(Error::Config(ConfigError::Oversized { .. }))
            ),
            "{name} {keys:?}"
        );
    }
    let target = published("qwen3.8-27b");
    write_config(dir.path(), "qwen3.8-27b-dflash2", |config| {
        config["head_dim"] = (1 << 30).into();
    });
    let with_drafter = Setting {
        drafter: Some(dir.path()),
        ..setting(&target, GIB)
    };
    assert!(matches!(
        DeploymentPlan::new(&options(1), with_drafter),
        Err(Error::Config(ConfigError::Oversized { .. }))
    ));
}

#[test]
fn the_largest_sizes_let_in_fit_no_memory() {
    // Every factor at its bound: pages, slots and tokens multiply to far more than 2^64 bytes.
    let dir = tempfile::tempdir().unwrap();
    write_config(dir.path(), "qwen3.5-4b", |config| {
        for (key, size) in [
            ("hidden_size", 64),
            ("num_attention_heads", 1 << 14),
            ("num_key_value_heads", 1 << 14),
            ("head_dim", 1 << 14),
            ("linear_num_key_heads", 1 << 10),
            ("linear_num_value_heads", 1 << 10),
            ("linear_key_head_dim", 1 << 13),
            ("linear_value_head_dim", 1 << 13),
            ("num_hidden_layers", 10_000),
            ("max_position_embeddings", i32::MAX),
        ] {
            config[key] = size.into();
        }
        config["full_attention_interval"] = 2.into();
        config["layer_types"] = serde_json::Value::Null;
    });
    let memory_bytes = 1 << 59;
    let error = fitting(&options(1024), setting(dir.path(), memory_bytes)).unwrap_err();
    match error {
        Error::Option(OptionError::Memory { needed_bytes, .. }) => {
            assert!(needed_bytes > memory_bytes);
        }
        other => panic!("{other}"),
    }
}

#[test]
fn other_mistakes_are_typed() {
    let empty = tempfile::tempdir().unwrap();
    assert!(matches!(
        DeploymentPlan::new(&options(1), setting(empty.path(), GIB)),
        Err(Error::Config(ConfigError::Io { .. }))
    ));
    let dir = published("llama-3.1-8b");
    let unknown = Setting {
        memory_bytes: None,
        ..setting(&dir, GIB)
    };
    let error = DeploymentPlan::new(&options(1), unknown)
        .unwrap_err()
        .to_string();
    assert!(error.contains("memory of device `cuda`"), "{error}");
}

proptest! {
    #[test]
    fn a_pool_never_exceeds_its_memory_and_holds_every_request_that_is_let_in(
        memory_bytes in 1_u64..200_000_000_000,
        utilization in 0.01_f64..=1.0,
        max_num_seqs in 1_usize..40,
        max_model_len in 2_usize..131_072,
        name in proptest::sample::select(vec!["llama-3.1-8b", "gemma-4-12b", "muse-glimmer-30b"]),
    ) {
        let config = config_of(name);
        let options = EngineOptions { max_model_len: Some(max_model_len), ..options(max_num_seqs) };
        let limits = Limits::resolve(&options, &config, None, Backend::Cuda).unwrap();
        let footprint = Footprint::of(&Holdings {
            config: &config,
            headers: None,
            drafter: None,
            drafter_headers: None,
            drafter_format: WeightFormat::Auto,
            limits: &limits,
            format: WeightFormat::W12,
            backend: Backend::Cuda,
        });
        let budget = Budget { memory_bytes, utilization };
        let held = |num_pages| footprint.fixed_bytes() + footprint.pool_bytes(num_pages);
        let longest = footprint.pages_of(max_model_len);
        match EnginePlan::resolve(limits.clone(), footprint, Some(budget)) {
            Ok(plan) => {
                prop_assert!(held(plan.num_kv_pages) <= budget.bytes());
                prop_assert!(budget.bytes() <= memory_bytes);
                for span in KvSpan::ALL {
                    let (pages, longest) = (plan.num_kv_pages.of(span), longest.of(span));
                    prop_assert!((*longest..=longest * max_num_seqs).contains(pages));
                }
            }
            Err(OptionError::Memory { needed_bytes, budget_bytes, .. }) => {
                prop_assert!(needed_bytes > budget_bytes);
                prop_assert_eq!(needed_bytes, held(longest));
            }
            Err(other) => prop_assert!(false, "{}", other),
        }
    }
}

#[test]
fn fp8_is_planned_from_headers_or_from_a_config_alone() {
    let fp8 = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/families/qwen3_5_fp8");
    let stored = DeploymentPlan::new(&options(1), setting(&fp8, GIB)).unwrap();
    let weights = stored.fp8.footprint.weights;
    assert_eq!(weights.basis, SizeBasis::Exact);
    assert!(weights.num_fp8_matrices > 0 && weights.linear < stored.bf16.footprint.weights.linear);
    // Before its weights are there, what a published checkpoint would convert.
    let dir = tempfile::tempdir().unwrap();
    std::fs::copy(fp8.join("config.json"), dir.path().join("config.json")).unwrap();
    let planned = DeploymentPlan::new(&options(1), setting(dir.path(), GIB)).unwrap();
    let weights = planned.fp8.footprint.weights;
    assert_eq!(weights.basis, SizeBasis::Estimate);
    assert_eq!(planned.bf16.footprint, stored.bf16.footprint);
    assert_eq!(
        weights.num_fp8_matrices,
        stored.fp8.footprint.weights.num_fp8_matrices
    );
}
