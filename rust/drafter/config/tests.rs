//! Demo and published configs, both key layouts, and what is refused: always by file, key or tensor, expected and got.

use serde_json::{Map, Value, json};

use super::format::{Format, LayerKeys, MethodKind, Packaging};
use super::keys::Keys;
use super::*;
use crate::drafter::tests::{demo, dflash_copy, dflash2_copy};
use crate::error::{CheckpointError, ConfigError, DrafterError};
use crate::kernels::draft_select::LogitShape;
use crate::model::config::RopeScaling;
use crate::weights::raw_safetensors::{RawTensor, copy, edit_json, edit_tensors};

pub(super) const WEIGHTS: &str = "model.safetensors";

pub(super) fn refused(dir: &Path) -> Error {
    DrafterConfig::read(dir).expect_err("should be refused")
}

#[track_caller]
pub(super) fn assert_says(error: &Error, parts: &[&str]) {
    let message = error.to_string();
    for part in parts {
        assert!(message.contains(part), "`{part}` not in: {message}");
    }
}

/// Reads a z-lab config without tensors.
fn from_json(kind: MethodKind, config: &Value) -> Result<BlockConfig, ConfigError> {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("config.json");
    std::fs::write(&path, config.to_string()).unwrap();
    let file = ConfigFile::read(&path)?;
    let packaging = Packaging::ZLab;
    let layers = LayerKeys::Qwen3;
    let format = Format {
        kind,
        packaging,
        layers,
    };
    BlockConfig::from_keys(&Keys::new(file.root(), format, None)?)
}

/// Reads any config without tensors, as for planning.
pub(super) fn planned(config: &Value) -> Result<DrafterConfig, Error> {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("config.json"), config.to_string()).unwrap();
    DrafterConfig::read_for_planning(dir.path())
}

pub(super) fn planned_block(config: &Value) -> BlockConfig {
    match planned(config).unwrap() {
        DrafterConfig::Block(config) => config,
        other => panic!("no block in {other:?}"),
    }
}

pub(super) fn read_block(dir: &Path) -> BlockConfig {
    match DrafterConfig::read(dir).unwrap() {
        DrafterConfig::Block(config) => config,
        other => panic!("no block in {other:?}"),
    }
}

pub(super) fn read_eagle3(dir: &Path) -> Eagle3Config {
    match DrafterConfig::read(dir).unwrap() {
        DrafterConfig::Eagle3(config) => config,
        other => panic!("not EAGLE-3: {other:?}"),
    }
}

fn demo_json() -> Value {
    let path = demo("dflash").join("config.json");
    serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap()
}

pub(super) fn section<'a>(config: &'a mut Value, key: &str) -> &'a mut Map<String, Value> {
    config[key].as_object_mut().unwrap()
}

#[test]
fn the_demo_drafters_are_read() {
    let dflash = read_block(&demo("dflash"));
    assert_eq!(dflash.method, BlockMethod::DFlash);
    assert_eq!(dflash.first_row, 1);
    assert_eq!(dflash.target_layer_ids, [1, 4, 6]);
    assert_eq!((dflash.block_size, dflash.mask_token_id), (16, 3));
    assert_eq!(
        (dflash.body.rope.theta, dflash.body.rope.rotary_dim),
        (1e4, 64)
    );
    let bidirectional = DraftLayerConfig {
        causal: false,
        window: None,
    };
    assert_eq!(dflash.layers, [bidirectional; 2]);
    let dflash2 = read_block(&demo("dflash2"));
    let selector = SelectorConfig {
        conv_kernel_size: 2,
        conv_group_size: 16,
        rank: 64,
        top_k: 16,
        vocab_size: 8192,
    };
    assert_eq!(dflash2.method, BlockMethod::DFlash2(selector));
    let dspark = read_block(&demo("dspark"));
    let markov = MarkovConfig {
        rank: 64,
        vocab_size: 8192,
        kind: MarkovKind::Vanilla,
    };
    let heads = DSparkConfig {
        markov: Some(markov),
        confidence: Some(ConfidenceConfig { with_markov: true }),
    };
    assert_eq!(dspark.method, BlockMethod::DSpark(heads));
    assert_eq!(
        (dspark.first_row, dspark.packaging),
        (0, Packaging::SpecForge)
    );
    let eagle3 = read_eagle3(&demo("eagle3"));
    assert_eq!(eagle3.target_layer_ids, Some(vec![1, 4, 6]));
    assert_eq!((eagle3.draft_vocab_size, eagle3.has_offsets), (4096, true));
    assert!(!eagle3.norm_before_residual && !eagle3.norm_output && !eagle3.has_embedding);
}

#[test]
fn beams_widen_with_the_tree() {
    let widths = |name: &str| {
        let config = DrafterConfig::read(&demo(name)).unwrap();
        [2, 16, 32, 48, 64].map(|tree_nodes| config.usual_width(tree_nodes))
    };
    assert_eq!(widths("dspark"), [8, 8, 8, 12, 16]);
    assert_eq!(widths("eagle3"), [4, 4, 4, 6, 8]);
}

/// Sizes and number of tensors of a published DFlash2 drafter whose file header is known.
#[test]
fn a_published_config_gives_the_published_tensors() {
    let config = json!({
        "hidden_size": 6656, "intermediate_size": 19968, "num_hidden_layers": 5, "num_attention_heads": 32,
        "num_key_value_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-5, "vocab_size": 202048,
        "layer_types": ["sliding_attention", "sliding_attention", "sliding_attention", "sliding_attention",
                        "sliding_attention"],
        "sliding_window": 2048, "is_causal": false, "num_target_layers": 52,
        "rope_parameters": {"rope_theta": 5e5, "rope_type": "default"},
        "dflash_config": {
            "block_size": 16, "mask_token_id": 201818, "target_layer_ids": [1, 13, 25, 37, 49],
            "conv_kernel_size": 2, "conv_group_size": 16, "selector_rank": 256, "selector_top_k": 16,
            "final_logit_softcapping": 20.0, "output_multiplier": 0.19611613513818404
        }
    });
    let config = from_json(MethodKind::DFlash2, &config).unwrap();
    let tensors = config.tensors();
    assert_eq!(tensors.len(), 81);
    let shape = |name: &str| &tensors.iter().find(|(n, _)| n == name).unwrap().1[..];
    assert_eq!(shape("fc.weight"), [6656, 33280]);
    assert_eq!(shape("layers.4.attention_conv.base_kernel"), [2, 2, 6656]);
    assert_eq!(
        shape("layers.0.mlp_conv.kernel_projection.weight"),
        [1664, 6656]
    );
    assert_eq!(
        shape("candidate_selector.successor_codebook"),
        [202048, 256]
    );
    let sliding = DraftLayerConfig {
        causal: false,
        window: Some(2048),
    };
    assert_eq!(config.layers, [sliding; 5]);
    let logit_shape = LogitShape {
        multiplier: 0.196_116_13,
        softcap: Some(20.0),
    };
    assert_eq!(config.logit_shape, Some(logit_shape));
}

#[test]
fn older_files_keep_keys_at_the_top() {
    let mut config = demo_json();
    let nested = section(&mut config, "dflash_config").clone();
    let root = config.as_object_mut().unwrap();
    root.remove("dflash_config");
    root.remove("rope_parameters");
    root.extend(nested);
    root.insert("rope_theta".into(), json!(1e6));
    root.insert("final_logit_softcapping".into(), json!(30.0));
    let read = from_json(MethodKind::DFlash, &config).unwrap();
    assert_eq!((read.block_size, read.mask_token_id), (16, 3));
    assert_eq!(read.target_layer_ids, [1, 4, 6]);
    assert_eq!(
        (read.body.rope.theta, &read.body.rope.scaling),
        (1e6, &RopeScaling::None)
    );
    assert_eq!(read.logit_shape.unwrap().softcap, Some(30.0));
}

#[test]
fn levels_that_disagree_are_refused() {
    let mut config = demo_json();
    config["block_size"] = json!(8);
    let error = from_json(MethodKind::DFlash, &config).unwrap_err().into();
    assert_says(&error, &["dflash_config.block_size", "8", "16"]);
    config["block_size"] = json!(16);
    from_json(MethodKind::DFlash, &config).unwrap();
}

#[test]
fn causality_and_windows_follow_the_order_of_precedence() {
    let sliding = ["sliding_attention", "full_attention"];
    let layers = |edit: &dyn Fn(&mut Value)| {
        let mut config = demo_json();
        config.as_object_mut().unwrap().remove("is_causal");
        config["layer_types"] = json!(sliding);
        config["sliding_window"] = json!(128);
        edit(&mut config);
        from_json(MethodKind::DFlash, &config).map(|c| {
            c.layers
                .iter()
                .map(|l| (l.causal, l.window))
                .collect::<Vec<_>>()
        })
    };
    let by_type = layers(&|_| {}).unwrap();
    assert_eq!(by_type, [(true, Some(128)), (false, None)]);
    let nested = layers(&|c| c["dflash_config"]["causal"] = json!(true)).unwrap();
    assert_eq!(nested, [(true, Some(128)), (true, None)]);
    let top = layers(&|c| {
        c["dflash_config"]["causal"] = json!(true);
        c["is_causal"] = json!(false);
    });
    assert_eq!(top.unwrap(), [(false, Some(128)), (false, None)]);
    let swa = layers(&|c| {
        c.as_object_mut().unwrap().remove("layer_types");
        c["dflash_config"]["use_swa"] = json!(true);
        c["dflash_config"]["swa_window_size"] = json!(64);
    });
    assert_eq!(swa.unwrap(), [(false, Some(64)); 2]);
    let no_window = layers(&|c| c["sliding_window"] = Value::Null).unwrap_err();
    assert_says(&no_window.into(), &["sliding_window"]);
    let short = layers(&|c| c["layer_types"] = json!(["full_attention"])).unwrap_err();
    assert_says(&short.into(), &["layer_types", "num_hidden_layers 2"]);
}

#[test]
fn unusable_keys_are_refused_by_name() {
    let cases: [(&str, &str, Value); 11] = [
        ("", "num_key_value_heads", json!(3)),
        ("", "head_dim", json!(63)),
        ("", "attention_bias", json!(true)),
        ("", "hidden_act", json!("gelu")),
        ("", "hidden_size", json!(-1)),
        ("dflash_config", "block_size", json!(1)),
        ("dflash_config", "mask_token_id", json!(-4)),
        ("dflash_config", "target_layer_ids", json!([])),
        ("dflash_config", "draft_vocab_size", json!(4096)),
        ("dflash_config", "causal_head", json!(true)),
        ("", "logit_scale", json!(0.5)),
    ];
    for (level, key, value) in cases {
        let mut config = demo_json();
        let place = match level {
            "" => config.as_object_mut().unwrap(),
            level => section(&mut config, level),
        };
        place.insert(key.to_owned(), value.clone());
        let error = from_json(MethodKind::DFlash, &config)
            .expect_err(key)
            .into();
        assert_says(&error, &[key, &value.to_string()]);
    }
    let mut config = demo_json();
    config["rope_parameters"] = json!({"rope_type": "longrope", "rope_theta": 1e6, "factor": 32.0});
    let error = from_json(MethodKind::DFlash, &config).unwrap_err().into();
    assert_says(
        &error,
        &[
            "rope_parameters.rope_type` should be \"default\" or \"llama3\" or \"yarn\", got \"longrope\"",
        ],
    );
    config["rope_parameters"] = json!({"rope_theta": 1e6});
    let error = from_json(MethodKind::DFlash, &config).unwrap_err().into();
    assert_says(
        &error,
        &["rope_type` is missing (\"default\" or \"llama3\" or \"yarn\")"],
    );
    config["rope_parameters"] = json!({"rope_type": "yarn", "rope_theta": 1e6, "factor": 32.0});
    let error = from_json(MethodKind::DFlash, &config).unwrap_err().into();
    assert_says(&error, &["original_max_position_embeddings"]);
}

/// YaRN of a published drafter (factor 32 over 8192 positions), against the formula worked out apart from the code:
/// pairs up to 14 turn 32 times and more, pairs from 29 at most once.
#[test]
fn a_drafters_own_yarn_is_applied() {
    let mut config = demo_json();
    config["head_dim"] = json!(128);
    config["rope_parameters"] = json!({
        "rope_type": "yarn", "rope_theta": 1e7, "factor": 32.0, "original_max_position_embeddings": 8192
    });
    let rope = from_json(MethodKind::DFlash, &config).unwrap().body.rope;
    let frequencies = rope.inverse_frequencies();
    let plain = |j: usize| 1e7_f64.powf(-(j as f64) / 64.0);
    for (j, frequency) in frequencies.iter().enumerate() {
        let divided = ((j as f64 - 14.0) / 15.0).clamp(0.0, 1.0);
        let expected = plain(j) * (1.0 - divided + divided / 32.0);
        assert!((f64::from(*frequency) / expected - 1.0).abs() < 1e-5, "{j}");
    }
    let attention_factor = 0.1 * 32_f32.ln() + 1.0;
    assert!((rope.score_factor() / attention_factor.powi(2) - 1.0).abs() < 1e-6);
    assert_eq!(read_block(&demo("dflash")).body.rope.score_factor(), 1.0);
}

/// As transformers reads files that hold both: the older key's object alone counts, its base beside it.
#[test]
fn a_rope_scaling_stands_in_the_place_of_rope_parameters() {
    let mut config = demo_json();
    config["rope_parameters"] = json!({"rope_type": "default", "rope_theta": 777.0});
    config["rope_theta"] = json!(5e5);
    config["rope_scaling"] = json!({
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192
    });
    let rope = |config: &Value| from_json(MethodKind::DFlash, config).map(|read| read.body.rope);
    let scaled = rope(&config).unwrap();
    assert_eq!(scaled.theta, 5e5);
    assert!(matches!(
        scaled.scaling,
        RopeScaling::Llama3 { factor: 8.0, .. }
    ));
    config["rope_theta"] = Value::Null;
    assert_says(
        &rope(&config).unwrap_err().into(),
        &["rope_theta", "missing"],
    );
    config["rope_scaling"]["rope_theta"] = json!(1e6);
    assert_eq!(rope(&config).unwrap().theta, 1e6);
    for nothing in [Value::Null, json!({})] {
        config["rope_scaling"] = nothing;
        let plain = rope(&config).unwrap();
        assert_eq!((plain.theta, plain.scaling), (777.0, RopeScaling::None));
    }
}

#[test]
fn an_empty_list_of_architectures_is_told_what_is_known() {
    for given in [json!([]), json!([7])] {
        let dir = dflash_copy();
        edit_json(dir.path(), "config.json", |config| {
            config["architectures"] = given.clone();
        });
        let start = "`architectures` should be an array with the drafter's class name, one of DFlashDraftModel, Muse";
        assert_says(&refused(dir.path()), &[start, &format!(", got {given}")]);
    }
}

#[test]
fn long_lists_are_shown_by_their_start() {
    let mut config = demo_json();
    section(&mut config, "dflash_config")["target_layer_ids"] = json!(vec!["one"; 5000]);
    let error: Error = from_json(MethodKind::DFlash, &config).unwrap_err().into();
    let got = "got [\"one\",\"one\",\"one\",\"one\",... 5000 items]";
    assert_says(&error, &["dflash_config.target_layer_ids", got]);
    assert!(error.to_string().len() < 300, "{error}");
}

#[test]
fn target_layer_ids_have_no_default() {
    let dir = dflash_copy();
    edit_json(dir.path(), "config.json", |config| {
        section(config, "dflash_config").remove("target_layer_ids");
    });
    let error = refused(dir.path());
    assert!(matches!(
        &error,
        Error::Config(ConfigError::MissingKey { key, .. }) if key == "dflash_config.target_layer_ids"
    ));
    assert_says(&error, &["config.json", "target_layer_ids"]);
}

#[test]
fn other_kinds_are_refused_by_their_name() {
    let cases = [
        (
            "architectures",
            json!(["Gemma3DSparkModel"]),
            "Gemma3DSparkModel",
        ),
        (
            "speculators_model_type",
            json!("peagle"),
            "speculators peagle",
        ),
        ("dspark_block_size", json!(5), "dspark_block_size"),
    ];
    for (key, value, name) in cases {
        let dir = dflash_copy();
        edit_json(dir.path(), "config.json", |config| config[key] = value);
        let error = refused(dir.path());
        assert!(
            matches!(&error, Error::Drafter(DrafterError::Unsupported { got, .. }) if got.contains(name)),
            "{error}"
        );
        assert_says(
            &error,
            &[
                "DFlashDraftModel, MuseGlimmerAssistantModel, DFlash2DraftModel",
                "config.json",
            ],
        );
    }
}

#[test]
fn a_name_against_the_tensors_is_refused_naming_both() {
    let rename = |name: &str| {
        let name = name.to_owned();
        move |config: &mut Value| config["architectures"] = json!([name])
    };
    let as_dflash = dflash2_copy();
    edit_json(as_dflash.path(), "config.json", rename("DFlashDraftModel"));
    let as_dflash2 = dflash_copy();
    edit_json(
        as_dflash2.path(),
        "config.json",
        rename("DFlash2DraftModel"),
    );
    let dspark = copy(&demo("dspark"));
    edit_json(dspark.path(), "config.json", rename("DFlash2DraftModel"));
    let eagle3 = copy(&demo("eagle3"));
    edit_json(eagle3.path(), "config.json", rename("DFlash2DraftModel"));
    for (dir, config, tensors, evidence) in [
        (
            &as_dflash,
            "DFlash",
            "DFlash2",
            "candidate_selector.hidden_projection.weight",
        ),
        (&as_dflash2, "DFlash2", "DFlash", "no candidate_selector"),
        (&dspark, "DFlash2", "DSpark", "confidence_head.proj.bias"),
        (&eagle3, "DFlash2", "EAGLE-3", "midlayer.hidden_norm.weight"),
    ] {
        let error = refused(dir.path());
        assert_says(
            &error,
            &[
                &format!("config says {config} but the tensors are those of {tensors}"),
                evidence,
                WEIGHTS,
            ],
        );
    }
}

#[test]
fn every_tensor_must_be_there_and_be_used() {
    let damage = |edit: &dyn Fn(&mut Vec<RawTensor>)| {
        let dir = dflash2_copy();
        edit_tensors(dir.path(), WEIGHTS, edit);
        refused(dir.path())
    };
    let position =
        |tensors: &[RawTensor], name: &str| tensors.iter().position(|t| t.name == name).unwrap();
    let codebook = "candidate_selector.successor_codebook";

    let dropped = damage(&|tensors| {
        tensors.remove(position(tensors, codebook));
    });
    assert!(
        matches!(&dropped, Error::Checkpoint(CheckpointError::MissingTensor { tensor, .. }) if tensor == codebook)
    );

    let renamed = damage(&|tensors| {
        let i = position(tensors, "layers.1.mlp_conv.base_kernel");
        tensors[i].name = "layers.1.mlp_conv.base_kernels".to_owned();
    });
    assert_says(
        &renamed,
        &[
            "layers.1.mlp_conv.base_kernel",
            "layers.1.mlp_conv.base_kernels",
            "[2, 2, 256]",
        ],
    );

    let extra = damage(&|tensors| {
        let mut copy = tensors[position(tensors, "norm.weight")].clone();
        copy.name = "mask_embedding".to_owned();
        tensors.push(copy);
    });
    assert!(matches!(
        &extra,
        Error::Checkpoint(CheckpointError::UnusedTensors { tensors, .. }) if tensors == &["mask_embedding"]
    ));

    let reshaped = damage(&|tensors| {
        let i = position(tensors, "fc.weight");
        tensors[i].shape = vec![768, 256];
    });
    assert_says(&reshaped, &["fc.weight", "[256, 768]", "[768, 256]"]);
}
