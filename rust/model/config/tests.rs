//! Configs of the fixtures and of published models, and what is refused.

use std::path::PathBuf;

use serde_json::{Value, json};
use tempfile::TempDir;

use super::*;
use crate::weights::raw_safetensors::{copy, demo_target, edit_json, family};

const SUPPORTED: [&str; 8] = [
    "qwen3_5_wrapper",
    "qwen3_5_text",
    "qwen3_5_fp8",
    "llama_rope_scaling",
    "llama_rope_parameters",
    "gemma4_unified",
    "muse_glimmer",
    "demo",
];

fn model_dir(case: &str) -> PathBuf {
    match case {
        "demo" => demo_target(),
        case => family(case),
    }
}

fn published(config: Value) -> TempDir {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("config.json"), config.to_string()).unwrap();
    dir
}

fn num_parameters(config: &ModelConfig) -> usize {
    let tensors = config.weight_names.tensors(config);
    tensors
        .iter()
        .map(|(_, s)| s.iter().product::<usize>())
        .sum()
}

fn qwen3_8_27b() -> Value {
    json!({
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "model_type": "qwen3_5",
        "tie_word_embeddings": false,
        "vision_config": {"hidden_size": 1152},
        "text_config": {
            "model_type": "qwen3_5_text", "hidden_size": 5120, "intermediate_size": 17408,
            "num_hidden_layers": 64, "full_attention_interval": 4, "num_attention_heads": 24,
            "num_key_value_heads": 4, "head_dim": 256, "linear_num_key_heads": 16,
            "linear_num_value_heads": 48, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
            "linear_conv_kernel_dim": 4, "vocab_size": 248320, "rms_norm_eps": 1e-6, "hidden_act": "silu",
            "max_position_embeddings": 262144, "attn_output_gate": true, "attention_bias": false,
            "output_gate_type": "swish", "bos_token_id": 248044, "eos_token_id": 248044,
            "rope_parameters": {
                "rope_type": "default", "rope_theta": 10000000, "partial_rotary_factor": 0.25,
                "mrope_section": [11, 11, 10], "mrope_interleaved": true
            }
        }
    })
}

fn llama_3_1_8b() -> Value {
    json!({
        "architectures": ["LlamaForCausalLM"], "hidden_size": 4096, "intermediate_size": 14336,
        "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256,
        "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "hidden_act": "silu", "attention_bias": false,
        "mlp_bias": false, "tie_word_embeddings": false, "max_position_embeddings": 131072,
        "eos_token_id": [128001, 128008, 128009],
        "rope_scaling": {
            "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192
        }
    })
}

#[test]
fn published_models_have_their_known_sizes() {
    let mut qwen_4b = qwen3_8_27b();
    qwen_4b["tie_word_embeddings"] = true.into();
    for (key, value) in [
        ("hidden_size", 2560),
        ("intermediate_size", 9216),
        ("num_hidden_layers", 32),
        ("num_attention_heads", 16),
        ("linear_num_value_heads", 32),
    ] {
        qwen_4b["text_config"][key] = value.into();
    }
    for (config, layers, num_tensors, millions) in [
        (qwen3_8_27b(), (16, 48), 851, 26_896),
        (qwen_4b, (8, 24), 426, 4_206),
        (llama_3_1_8b(), (32, 0), 291, 8_030),
    ] {
        let dir = published(config);
        let config = ModelConfig::read(dir.path()).unwrap();
        assert_eq!(
            (config.num_attention_layers(), config.num_gdn_layers()),
            layers
        );
        assert_eq!(config.weight_names.tensors(&config).len(), num_tensors);
        assert_eq!((num_parameters(&config) + 500_000) / 1_000_000, millions);
    }
}

#[test]
fn the_wrapper_maps_key_by_key() {
    let config = ModelConfig::read(&family("qwen3_5_wrapper")).unwrap();
    use LayerConfig::{Attention, GatedDelta};
    let [GatedDelta, GatedDelta, GatedDelta, Attention(attention)] = &config.layers[..] else {
        panic!("{:?}", config.layers);
    };
    assert_eq!(config.architecture, "Qwen3_5ForConditionalGeneration");
    assert_eq!(config.weight_names.prefix, "model.language_model.");
    assert_eq!(
        (
            config.vocab_size,
            config.hidden_size,
            config.intermediate_size
        ),
        (192, 64, 80)
    );
    assert_eq!(config.max_position_embeddings, 1024);
    assert_eq!(config.rms_norm_eps, 1e-6);
    assert!(!config.tie_word_embeddings);
    assert!(config.layer_norms_add_one && config.final_norm_adds_one);
    assert_eq!(
        *attention,
        AttentionConfig {
            num_heads: 4,
            num_kv_heads: 2,
            head_dim: 32,
            output_gate: OutputGate::InQueryProjection,
            qk_norm: QkNorm::Weighted,
            values: ValueSource::Projection,
            rope: Some(RopeConfig {
                theta: 10000.0,
                rotary_dim: 8,
                num_pairs: 4,
                scaling: RopeScaling::None,
            }),
            window: None,
            scale: 0.176_776_69,
        }
    );
    assert_eq!(
        config.gdn,
        Some(GdnConfig {
            num_key_heads: 2,
            num_value_heads: 6,
            key_dim: 16,
            value_dim: 16,
            conv_kernel: 4,
        })
    );
    assert_eq!(config.eos_token_ids, [121, 189]);
    assert_eq!(config.suppress_tokens, [0; 0]);
}

/// The attention layers of a config, first to last.
fn attention(config: &ModelConfig) -> Vec<&AttentionConfig> {
    config.attention_layers().collect()
}

fn rope(config: &ModelConfig) -> &RopeConfig {
    attention(config)[0].rope.as_ref().unwrap()
}

#[test]
fn llama_reads_both_rope_layouts_alike() {
    let new = ModelConfig::read(&family("llama_rope_parameters")).unwrap();
    assert!(new.tie_word_embeddings && !new.layer_norms_add_one && new.gdn.is_none());
    let layer = attention(&new)[0];
    assert_eq!((layer.head_dim, layer.qk_norm), (32, QkNorm::None));
    assert_eq!(new.eos_token_ids, [314, 316, 319]);
    let old = ModelConfig::read(&family("llama_rope_scaling")).unwrap();
    assert!(!old.tie_word_embeddings);
    assert_eq!(
        (attention(&old)[0].head_dim, rope(&old).rotary_dim),
        (16, 16),
        "without a head_dim key"
    );
    assert_eq!(
        rope(&old).scaling,
        RopeScaling::Llama3 {
            factor: 8.0,
            low_freq_factor: 1.0,
            high_freq_factor: 4.0,
            original_max_position_embeddings: 64,
        }
    );

    let dir = copy(&family("llama_rope_scaling"));
    edit_json(dir.path(), "config.json", |config| {
        let mut parameters = config["rope_scaling"].take();
        parameters["rope_theta"] = config["rope_theta"].take();
        config["rope_parameters"] = parameters;
    });
    assert_eq!(ModelConfig::read(dir.path()).unwrap(), old);
}

#[test]
fn frequencies_match_values_computed_in_double_precision() {
    let read = |case| rope(&ModelConfig::read(&model_dir(case)).unwrap()).clone();
    // theta^(-2j/d), and for llama3 the ramp of section 2.2; computed apart from this crate.
    for (case, expected) in EXPECTED_FREQUENCIES {
        let got = read(case).inverse_frequencies();
        assert_eq!(got.len(), expected.len(), "{case}");
        for (got, expected) in got.iter().zip(expected) {
            let relative = (f64::from(*got) - expected).abs() / expected;
            assert!(relative < 5e-7, "{case}: {got} {expected}");
        }
    }
}

const EXPECTED_FREQUENCIES: [(&str, &[f64]); 3] = [
    (
        "qwen3_5_wrapper",
        &[
            1.000000000e+00,
            1.000000000e-01,
            1.000000000e-02,
            1.000000000e-03,
        ],
    ),
    (
        "llama_rope_scaling",
        &[
            1.000000000e+00,
            7.940300918e-02,
            4.700753866e-03,
            9.115830922e-04,
            1.767766953e-04,
            3.428102196e-05,
            6.647869871e-06,
            1.289173172e-06,
        ],
    ),
    (
        "llama_rope_parameters",
        &[
            1.000000000e+00,
            4.403666027e-01,
            6.713303751e-02,
            2.668659384e-03,
            1.175188467e-03,
            5.175137525e-04,
            2.278957730e-04,
            1.003576873e-04,
            4.419417382e-05,
            1.946163818e-05,
            8.570255490e-06,
            3.774054294e-06,
            1.661967468e-06,
            7.318749675e-07,
            3.222932930e-07,
            1.419272025e-07,
        ],
    ),
];

#[test]
fn stop_ids_are_the_union_of_all_files() {
    let dir = copy(&family("qwen3_5_wrapper"));
    edit_json(dir.path(), "config.json", |config| {
        config["eos_token_id"] = json!([7, 121]);
    });
    edit_json(dir.path(), "generation_config.json", |config| {
        config["suppress_tokens"] = json!([12, 3]);
    });
    let config = ModelConfig::read(dir.path()).unwrap();
    assert_eq!(config.eos_token_ids, [7, 121, 189]);
    assert_eq!(config.suppress_tokens, [3, 12]);
    std::fs::remove_file(dir.path().join("generation_config.json")).unwrap();
    let config = ModelConfig::read(dir.path()).unwrap();
    assert_eq!(config.eos_token_ids, [7, 121, 189]);
}

#[test]
fn defaults_hold_only_where_the_reference_has_them() {
    let dir = copy(&family("qwen3_5_wrapper"));
    let expected = ModelConfig::read(dir.path()).unwrap();
    edit_json(dir.path(), "config.json", |config| {
        let text = config["text_config"].as_object_mut().unwrap();
        // Re-exports leave these out, or put the fraction beside the rotary parameters.
        text.remove("layer_types");
        text.remove("attn_output_gate");
        let parameters = text["rope_parameters"].as_object_mut().unwrap();
        let fraction = parameters.remove("partial_rotary_factor").unwrap();
        text.insert("partial_rotary_factor".to_owned(), fraction);
        config
            .as_object_mut()
            .unwrap()
            .remove("tie_word_embeddings");
    });
    assert_eq!(ModelConfig::read(dir.path()).unwrap(), expected);
}

/// Sets (or with `None` removes) the key at a JSON pointer.
fn set(config: &mut Value, pointer: &str, value: Option<Value>) {
    let (parent, key) = pointer.rsplit_once('/').unwrap();
    let parent = config.pointer_mut(parent).unwrap().as_object_mut().unwrap();
    match value {
        Some(value) => parent.insert(key.to_owned(), value),
        None => parent.remove(key),
    };
}

#[test]
fn unusable_values_are_refused_with_key_expected_and_got() {
    const QWEN: &str = "qwen3_5_wrapper";
    const LLAMA: &str = "llama_rope_scaling";
    let layers = |names: &[&str]| Some(json!(names));
    let cases: &[(&str, &str, Option<Value>, &[&str])] = &[
        (
            QWEN,
            "/architectures",
            None,
            &["`architectures` is missing"],
        ),
        (
            QWEN,
            "/architectures",
            Some(json!(["MambaForCausalLM"])),
            &[
                "`MambaForCausalLM` is not supported",
                "Qwen3_5ForCausalLM, LlamaForCausalLM, Gemma4Unified",
                "MuseGlimmerForConditionalGeneration",
            ],
        ),
        (QWEN, "/architectures", Some(json!([])), &["got []"]),
        (QWEN, "/text_config", None, &["`text_config` is missing"]),
        (
            QWEN,
            "/text_config",
            Some(json!(3)),
            &["`text_config` should be an object, got 3"],
        ),
        (
            QWEN,
            "/text_config/rope_parameters",
            None,
            &["`text_config.rope_parameters` is missing"],
        ),
        (
            QWEN,
            "/text_config/rope_parameters/rope_theta",
            None,
            &["`text_config.rope_parameters.rope_theta` is missing"],
        ),
        (
            QWEN,
            "/text_config/rope_parameters/rope_type",
            Some(json!("yarn")),
            &[
                "rope_parameters.rope_type` should be \"default\" or \"llama3\"",
                "got \"yarn\"",
            ],
        ),
        (
            QWEN,
            "/text_config/rope_parameters/rope_type",
            None,
            &["rope_parameters.rope_type` is missing"],
        ),
        (
            QWEN,
            "/text_config/rope_parameters/mrope_interleaved",
            Some(json!(false)),
            &["mrope_interleaved` should be true, got false"],
        ),
        (
            QWEN,
            "/text_config/rope_parameters/partial_rotary_factor",
            Some(json!(0.1)),
            &[
                "partial_rotary_factor` should be a fraction of head_dim 32",
                "got 0.1",
            ],
        ),
        (
            QWEN,
            "/text_config/rope_parameters/partial_rotary_factor",
            None,
            &["`text_config.partial_rotary_factor` is missing"],
        ),
        (
            QWEN,
            "/text_config/output_gate_type",
            Some(json!("tanh")),
            &["output_gate_type` should be \"swish\" or \"silu\", got \"tanh\""],
        ),
        (
            QWEN,
            "/text_config/attention_bias",
            Some(json!(true)),
            &["attention_bias` should be false, got true"],
        ),
        (
            QWEN,
            "/text_config/hidden_act",
            Some(json!("gelu")),
            &["hidden_act` should be \"silu\", got \"gelu\""],
        ),
        (
            QWEN,
            "/text_config/layer_types",
            layers(&["full_attention"]),
            &["layer_types` should be an array of num_hidden_layers 4"],
        ),
        (
            QWEN,
            "/text_config/layer_types",
            layers(&[
                "full_attention",
                "full_attention",
                "sliding_attention",
                "full_attention",
            ]),
            &[
                "layer_types` should be",
                "\"linear_attention\"",
                "sliding_attention",
            ],
        ),
        (
            QWEN,
            "/text_config/linear_num_value_heads",
            Some(json!(5)),
            &["linear_num_value_heads` should be a multiple of linear_num_key_heads 2, got 5"],
        ),
        (
            QWEN,
            "/text_config/head_dim",
            None,
            &["`text_config.head_dim` is missing"],
        ),
        (
            QWEN,
            "/text_config/eos_token_id",
            Some(json!(192)),
            &["`text_config.eos_token_id` should be token ids below 192, got 192"],
        ),
        (
            LLAMA,
            "/hidden_size",
            Some(json!(0)),
            &["`hidden_size` should be a positive", "got 0"],
        ),
        (LLAMA, "/hidden_size", Some(json!("96")), &["got \"96\""]),
        (
            LLAMA,
            "/hidden_size",
            Some(json!(4_294_967_296_u64)),
            &["got 4294967296"],
        ),
        (LLAMA, "/vocab_size", None, &["`vocab_size` is missing"]),
        (
            LLAMA,
            "/num_hidden_layers",
            Some(json!(20_000)),
            &["at most 10000, got 20000"],
        ),
        (
            LLAMA,
            "/num_key_value_heads",
            Some(json!(4)),
            &["a divisor of num_attention_heads 6"],
        ),
        (
            LLAMA,
            "/num_attention_heads",
            Some(json!(7)),
            &["a divisor of hidden_size 96"],
        ),
        (
            LLAMA,
            "/head_dim",
            Some(json!(15)),
            &["`head_dim` should be an even number"],
        ),
        (
            LLAMA,
            "/mlp_bias",
            Some(json!(true)),
            &["`mlp_bias` should be false"],
        ),
        (LLAMA, "/rope_theta", None, &["`rope_theta` is missing"]),
        (
            LLAMA,
            "/rope_theta",
            Some(json!(-1.0)),
            &["`rope_theta` should be a positive number"],
        ),
        (
            LLAMA,
            "/rope_scaling",
            Some(json!({"type": "linear", "factor": 2.0})),
            &["`rope_scaling.type` should be \"default\" or \"llama3\", got \"linear\""],
        ),
        (
            LLAMA,
            "/rope_scaling/high_freq_factor",
            Some(json!(1.0)),
            &["`rope_scaling.high_freq_factor` should be more than low_freq_factor 1"],
        ),
        (
            LLAMA,
            "/rms_norm_eps",
            Some(json!(null)),
            &["`rms_norm_eps` is missing"],
        ),
    ];
    for (case, pointer, value, parts) in cases {
        let dir = copy(&family(case));
        edit_json(dir.path(), "config.json", |config| {
            set(config, pointer, value.clone());
        });
        let message = match ModelConfig::read(dir.path()) {
            Err(error) => error.to_string(),
            Ok(_) => panic!("{pointer} = {value:?} was accepted"),
        };
        let file = dir.path().join("config.json");
        for part in [&[file.to_str().unwrap()], *parts].concat() {
            assert!(message.contains(part), "`{part}` not in: {message}");
        }
    }
}

#[test]
fn files_that_are_no_configs_are_refused() {
    let dir = copy(&family("llama_rope_scaling"));
    for (name, text, part) in [
        ("generation_config.json", "{", "not valid JSON"),
        (
            "generation_config.json",
            "[1]",
            "should be an object, got [1]",
        ),
        (
            "generation_config.json",
            "{\"suppress_tokens\": [256]}",
            "`suppress_tokens` should be token ids below 256, got [256]",
        ),
        ("config.json", "\u{0}\u{1}", "not valid JSON"),
        ("config.json", "\"text\"", "should be an object"),
    ] {
        std::fs::write(dir.path().join(name), text).unwrap();
        let message = ModelConfig::read(dir.path()).unwrap_err().to_string();
        assert!(
            message.contains(name) && message.contains(part),
            "{message}"
        );
        let original = std::fs::read(family("llama_rope_scaling").join(name)).unwrap();
        std::fs::write(dir.path().join(name), original).unwrap();
    }
    std::fs::remove_file(dir.path().join("config.json")).unwrap();
    let error = ModelConfig::read(dir.path()).unwrap_err();
    assert!(matches!(error, ConfigError::Io { .. }), "{error}");
}

#[test]
fn a_model_that_may_choose_no_token_is_refused() {
    let dir = copy(&family("llama_rope_scaling"));
    let path = dir.path().join("generation_config.json");
    let mut ids: Vec<u32> = (0..256).collect();
    std::fs::write(&path, json!({"suppress_tokens": ids}).to_string()).unwrap();
    let message = ModelConfig::read(dir.path()).unwrap_err().to_string();
    let expected = "generation_config.json: `suppress_tokens` should be ids that leave a token";
    assert!(message.contains(expected), "{message}");
    assert!(message.contains("got all 256 of"), "{message}");
    ids.pop();
    std::fs::write(&path, json!({"suppress_tokens": ids}).to_string()).unwrap();
    assert_eq!(ModelConfig::read(dir.path()).unwrap().suppress_tokens, ids);
}

#[test]
fn every_supported_fixture_reads() {
    for case in SUPPORTED {
        let config = ModelConfig::read(&model_dir(case)).unwrap();
        let expected = usize::from(config.gdn.is_some());
        assert_eq!(usize::from(config.num_gdn_layers() > 0), expected, "{case}");
    }
}
