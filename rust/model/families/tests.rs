//! The families whose layers differ among themselves: key by key, by published sizes, and what is refused.

use serde_json::{Value, json};

use super::*;
use crate::model::config::{RopeConfig, RopeScaling};
use crate::weights::raw_safetensors::{copy, edit_json, family};

/// `config.json` of `google/gemma-4-12B-it`.
fn gemma_4_12b() -> Value {
    let types = (1..=48).map(|i| match i % 6 {
        0 => "full_attention",
        _ => "sliding_attention",
    });
    json!({
        "architectures": ["Gemma4UnifiedForConditionalGeneration"], "model_type": "gemma4_unified",
        "tie_word_embeddings": true, "vision_config": {}, "audio_config": {},
        "text_config": {
            "hidden_size": 3840, "intermediate_size": 15360, "num_hidden_layers": 48,
            "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 256, "global_head_dim": 512,
            "num_global_key_value_heads": 1, "attention_k_eq_v": true, "vocab_size": 262144,
            "sliding_window": 1024, "layer_types": types.collect::<Vec<_>>(), "rms_norm_eps": 1e-6,
            "hidden_activation": "gelu_pytorch_tanh", "final_logit_softcapping": 30.0,
            "max_position_embeddings": 262144, "num_kv_shared_layers": 0, "use_double_wide_mlp": false,
            "hidden_size_per_layer_input": 0, "use_bidirectional_attention": "vision",
            "enable_moe_block": false, "attention_bias": false, "tie_word_embeddings": true,
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
                "full_attention": {
                    "rope_type": "proportional", "rope_theta": 1000000.0, "partial_rotary_factor": 0.25
                }
            }
        }
    })
}

/// `config.json` of `meta-models/Muse-Glimmer-30B`.
fn muse_glimmer_30b() -> Value {
    let of_four = |sliding: Value, full: Value| -> Vec<Value> {
        let layer = |i| {
            if i % 4 == 3 {
                full.clone()
            } else {
                sliding.clone()
            }
        };
        (0..52).map(layer).collect()
    };
    json!({
        "architectures": ["MuseGlimmerForConditionalGeneration"], "model_type": "muse_glimmer",
        "vision_config": {},
        "text_config": {
            "hidden_size": 6656, "intermediate_size": 19968, "num_hidden_layers": 52,
            "num_attention_heads": 32, "num_key_value_heads": 2, "head_dim": 128, "vocab_size": 202048,
            "hidden_activation": "silu", "rms_norm_eps": 1e-5, "post_norm_eps": 1e-8,
            "qk_scale_factor": 3.87, "output_multiplier": 0.19611613513818404,
            "final_logit_softcapping": 20.0, "sliding_window": 2048,
            "layer_types": of_four("sliding_attention".into(), "full_attention".into()),
            "layer_rope_theta": of_four(5e5.into(), 0.into()),
            "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
            "max_position_embeddings": 131072, "tie_word_embeddings": false, "attention_bias": false,
            "eos_token_id": 200001, "bos_token_id": 200000
        }
    })
}

fn read(config: &Value) -> Result<ModelConfig> {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("config.json"), config.to_string()).unwrap();
    read_config(dir.path())
}

fn attention_of(config: &ModelConfig, layer: usize) -> &AttentionConfig {
    match &config.layers[layer] {
        LayerConfig::Attention(attention) => attention,
        LayerConfig::GatedDelta => panic!("layer {layer} is recurrent"),
    }
}

#[test]
fn published_models_have_their_known_sizes() {
    // Tensors of the text decoder; the 12B's index has 11 more for other inputs and counts the tied head.
    for (config, num_tensors, millions) in [
        (gemma_4_12b(), 666, 11_907),
        (muse_glimmer_30b(), 627, 27_855),
    ] {
        let config = read(&config).unwrap();
        let tensors = config.weight_names.tensors(&config);
        let count = |(_, shape): &(String, Vec<usize>)| shape.iter().product::<usize>();
        let num_parameters: usize = tensors.iter().map(count).sum();
        assert_eq!(
            (tensors.len(), (num_parameters + 500_000) / 1_000_000),
            (num_tensors, millions),
            "{}",
            config.architecture
        );
    }
}

#[test]
fn gemma_maps_key_by_key() {
    let config = read(&gemma_4_12b()).unwrap();
    assert_eq!(config.embedding_scale, 62.0);
    assert!(!config.embedding_norm && !config.layer_norms_add_one && !config.final_norm_adds_one);
    assert_eq!(config.mlp_activation, MlpActivation::GeluTanh);
    let post_norms = config.post_norms.unwrap();
    assert_eq!((post_norms.eps, post_norms.layer_scalar), (1e-6, true));
    assert_eq!(config.logit_shape.multiplier, 1.0);
    assert_eq!(config.logit_shape.softcap, Some(30.0));
    let full: Vec<usize> = (0..48)
        .filter(|&i| attention_of(&config, i).window.is_none())
        .collect();
    assert_eq!(full, [5, 11, 17, 23, 29, 35, 41, 47]);
    let rope = |theta, rotary_dim, num_pairs| {
        Some(RopeConfig {
            theta,
            rotary_dim,
            num_pairs,
            scaling: RopeScaling::None,
        })
    };
    let sliding = AttentionConfig {
        num_heads: 16,
        num_kv_heads: 8,
        head_dim: 256,
        output_gate: OutputGate::None,
        qk_norm: QkNorm::Weighted,
        values: ValueSource::NormedProjection,
        rope: rope(1e4, 256, 128),
        window: Some(1024),
        scale: 1.0,
    };
    assert_eq!(*attention_of(&config, 4), sliding);
    let full = AttentionConfig {
        num_kv_heads: 1,
        head_dim: 512,
        values: ValueSource::NormedKeys,
        rope: rope(1e6, 512, 64),
        window: None,
        ..sliding
    };
    assert_eq!(*attention_of(&config, 5), full);
    // 64 frequencies over a head of 512, the fastest ones: 1e6^(-2j / 512).
    let rope = full.rope.unwrap();
    assert_eq!(rope.pair_offset(), 256);
    let frequencies = rope.inverse_frequencies();
    assert_eq!(frequencies.len(), 64);
    for (j, expected) in [(0, 1.0), (1, 0.947_463_5), (63, 0.033_376_247)] {
        assert!(
            (frequencies[j] - expected).abs() < 1e-6 * expected,
            "{}",
            frequencies[j]
        );
    }
}

#[test]
fn both_spellings_of_a_layers_sizes_are_one_model() {
    let released = read_config(&family("gemma4_unified")).unwrap();
    let dir = copy(&family("gemma4_unified"));
    let resaved = dir.path().join("config_resaved.json");
    std::fs::rename(resaved, dir.path().join("config.json")).unwrap();
    assert_eq!(read_config(dir.path()).unwrap(), released);
    // Text alone, as it is saved.
    edit_json(dir.path(), "config.json", |config| {
        let mut text = config["text_config"].take();
        text["architectures"] = json!(["Gemma4UnifiedForCausalLM"]);
        *config = text;
    });
    let text = read_config(dir.path()).unwrap();
    assert_eq!(
        (text.layers, text.weight_names.prefix),
        (released.layers, "model.")
    );
}

#[test]
fn muse_maps_key_by_key() {
    let config = read(&muse_glimmer_30b()).unwrap();
    assert!(config.embedding_norm && config.layer_norms_add_one && !config.final_norm_adds_one);
    assert_eq!(config.embedding_scale, 1.0);
    let post_norms = config.post_norms.unwrap();
    assert_eq!((post_norms.eps, post_norms.layer_scalar), (1e-8, false));
    assert_eq!(config.logit_shape.multiplier, 0.196_116_14);
    assert_eq!(config.logit_shape.softcap, Some(20.0));
    let sliding = AttentionConfig {
        num_heads: 32,
        num_kv_heads: 2,
        head_dim: 128,
        output_gate: OutputGate::OwnProjection,
        qk_norm: QkNorm::Weightless,
        values: ValueSource::Projection,
        rope: Some(RopeConfig {
            theta: 5e5,
            rotary_dim: 128,
            num_pairs: 64,
            scaling: RopeScaling::None,
        }),
        window: Some(2048),
        scale: 0.342_062_9,
    };
    assert_eq!(*attention_of(&config, 2), sliding);
    let full = AttentionConfig {
        rope: None,
        window: None,
        ..sliding
    };
    assert_eq!(*attention_of(&config, 51), full);
}

/// The message with which `config`, changed at a JSON pointer, is refused.
fn refusal(mut config: Value, pointer: &str, value: Option<Value>) -> String {
    let (parent, key) = pointer.rsplit_once('/').unwrap();
    let parent = config.pointer_mut(parent).unwrap().as_object_mut().unwrap();
    match &value {
        Some(value) => parent.insert(key.to_owned(), value.clone()),
        None => parent.remove(key),
    };
    match read(&config) {
        Ok(_) => panic!("{pointer} = {value:?} was accepted"),
        Err(error) => error.to_string(),
    }
}

/// A config, a key of its text part, the value it is given, and what the refusal says.
type Refused = (fn() -> Value, &'static str, Option<Value>, &'static str);

#[test]
fn parts_that_are_not_supported_are_refused() {
    let (gemma, muse) = (gemma_4_12b, muse_glimmer_30b);
    let cases: [Refused; 18] = [
        (
            gemma,
            "hidden_size_per_layer_input",
            Some(json!(256)),
            "should be 0, as per-layer embeddings are not supported, got 256",
        ),
        (
            gemma,
            "num_kv_shared_layers",
            Some(json!(20)),
            "should be 0, as layers that share keys and values are not supported, got 20",
        ),
        (
            gemma,
            "enable_moe_block",
            Some(json!(true)),
            "should be false, got true",
        ),
        (
            gemma,
            "use_double_wide_mlp",
            Some(json!(true)),
            "should be false, got true",
        ),
        (
            gemma,
            "use_bidirectional_attention",
            Some(json!("all")),
            "should be \"vision\", got \"all\"",
        ),
        (
            gemma,
            "hidden_activation",
            Some(json!("gelu")),
            "\"gelu_pytorch_tanh\", got \"gelu\"",
        ),
        (
            gemma,
            "attn_logit_softcapping",
            Some(json!(50.0)),
            "should be null, got 50.0",
        ),
        (gemma, "global_head_dim", None, "is missing"),
        (gemma, "sliding_window", None, "is missing"),
        (
            gemma,
            "num_global_key_value_heads",
            Some(json!(3)),
            "a divisor of num_attention_heads 16",
        ),
        (
            gemma,
            "per_layer_config",
            Some(json!({"7": {"head_dim": 256, "sliding_window": 8}})),
            "per_layer_config.7.sliding_window` should be left out",
        ),
        (
            gemma,
            "rope_parameters",
            Some(json!({"sliding_attention": {"rope_type": "linear"}})),
            "rope_parameters.sliding_attention.rope_type` should be \"default\" or \"proportional\"",
        ),
        (
            gemma,
            "rope_scaling",
            Some(json!({"rope_type": "yarn", "factor": 4.0})),
            "should be {}, got",
        ),
        (
            muse,
            "rope_scaling",
            Some(json!({"rope_type": "yarn", "factor": 4.0})),
            "should be {}, got",
        ),
        (muse, "post_norm_eps", None, "is missing"),
        (muse, "qk_scale_factor", None, "is missing"),
        (
            muse,
            "layer_rope_theta",
            Some(json!([5e5])),
            "should be 52 numbers, 0 for a layer",
        ),
        (muse, "layer_types", None, "is missing"),
    ];
    for (config, key, value, part) in cases {
        let message = refusal(config(), &format!("/text_config/{key}"), value);
        assert!(
            message.contains(key) && message.contains(part),
            "{key}: {message}"
        );
    }
}

/// As transformers reads files that hold both.
#[test]
fn a_rope_scaling_stands_in_the_place_of_rope_parameters() {
    let dir = copy(&family("llama_rope_scaling"));
    let old = read_config(dir.path()).unwrap();
    edit_json(dir.path(), "config.json", |config| {
        config["rope_parameters"] = json!({"rope_type": "default", "rope_theta": 777.0});
    });
    assert_eq!(read_config(dir.path()).unwrap(), old);
    edit_json(dir.path(), "config.json", |config| {
        config["rope_scaling"] = json!({})
    });
    let new = read_config(dir.path()).unwrap();
    let rope = attention_of(&new, 0).rope.as_ref().unwrap();
    assert_eq!((rope.theta, &rope.scaling), (777.0, &RopeScaling::None));
}

#[test]
fn an_unknown_architecture_is_told_what_is_known() {
    let names: Vec<&str> = supported_architectures().map(|(name, _)| name).collect();
    let an_array = "`architectures` should be an array with the model's class name, one of Qwen3_5";
    for (given, says) in [
        (
            json!(["Gemma3ForCausalLM"]),
            ["`Gemma3ForCausalLM` is not supported", "supported: Qwen3_5"],
        ),
        (json!([]), [an_array, ", got []"]),
        (json!([null]), [an_array, ", got [null]"]),
    ] {
        let message = refusal(gemma_4_12b(), "/architectures", Some(given));
        let parts = says.iter().chain(&names);
        for part in parts {
            assert!(message.contains(part), "`{part}` not in: {message}");
        }
    }
}

/// FP8 weights are read, scales of a quantised cache are not: the key says so before their tensors do.
#[test]
fn quantised_keys_and_values_are_refused_by_their_key() {
    let fp8 = |scheme: Option<Value>| {
        let mut fp8 = json!({"quant_method": "compressed-tensors", "format": "float-quantized"});
        if let Some(scheme) = scheme {
            fp8["kv_cache_scheme"] = scheme;
        }
        Some(fp8)
    };
    for scheme in [None, Some(Value::Null)] {
        let mut config = gemma_4_12b();
        config["quantization_config"] = fp8(scheme).unwrap();
        assert_eq!(read(&config).unwrap(), read(&gemma_4_12b()).unwrap());
    }
    let scheme = json!({"dynamic": false, "num_bits": 8, "strategy": "tensor", "type": "float"});
    let message = refusal(
        gemma_4_12b(),
        "/quantization_config",
        fp8(Some(scheme.clone())),
    );
    let says = format!(
        "config.json: `quantization_config.kv_cache_scheme` should be null or left out: keys and values are held as \
         they are computed, in fp32, got {scheme}"
    );
    assert!(message.ends_with(&says), "{message}");
}
