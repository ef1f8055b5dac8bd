//! One drafter in every packaging, and what the packagings' own keys and tensors say.

use serde_json::{Value, json};

use super::super::tests::{
    WEIGHTS, assert_says, planned, planned_block, read_block, read_eagle3, refused, section,
};
use super::super::*;
use super::*;
use crate::drafter::tests::demo;
use crate::error::CheckpointError;
use crate::weights::raw_safetensors::{RawTensor, copy, edit_json, edit_tensors};

/// Writes the tensors of `dir` again under the names that `rename` gives; `None` drops one.
fn rename_tensors(dir: &Path, rename: impl Fn(&str) -> Option<String>) {
    edit_tensors(dir, WEIGHTS, |tensors| {
        let kept = std::mem::take(tensors)
            .into_iter()
            .filter_map(|mut tensor| {
                tensor.name = rename(&tensor.name)?;
                Some(tensor)
            });
        *tensors = kept.collect();
    });
}

/// A tensor of zeros.
fn zeros(name: &str, shape: &[usize]) -> RawTensor {
    RawTensor {
        name: name.to_owned(),
        dtype: "BF16".to_owned(),
        shape: shape.to_vec(),
        bytes: vec![0; 2 * shape.iter().product::<usize>()],
    }
}

/// The demo DSpark as DeepSpec packs it: all keys at the top level beside the target's own, copies of embedding and
/// head in the file.
pub(in crate::drafter) fn deepspec_copy() -> tempfile::TempDir {
    let dir = copy(&demo("dspark"));
    edit_json(dir.path(), "config.json", |config| {
        let nested = section(config, "dflash_config").clone();
        let root = config.as_object_mut().unwrap();
        root.remove("dflash_config");
        root.extend(nested);
        root.remove("projector_type");
        root.insert("architectures".into(), json!(["Qwen3DSparkModel"]));
        root.insert("partial_rotary_factor".into(), json!(0.25));
    });
    edit_tensors(dir.path(), WEIGHTS, |tensors| {
        tensors.push(zeros("embed_tokens.weight", &[8192, 256]));
        tensors.push(zeros("lm_head.weight", &[8192, 256]));
    });
    dir
}

/// The demo DSpark as speculators packs it: nested decoder, layers counted from the embedding.
pub(in crate::drafter) fn speculators_dspark_copy(num_drafts: usize) -> tempfile::TempDir {
    let dir = copy(&demo("dspark"));
    edit_json(dir.path(), "config.json", |config| {
        let mut body = config.take();
        let method = section(&mut body, "dflash_config").clone();
        body.as_object_mut().unwrap().remove("dflash_config");
        let method_keys = method
            .into_iter()
            .filter(|(key, _)| key != "target_layer_ids");
        *config = json!({
            "speculators_model_type": "dspark",
            "architectures": ["Qwen3DSparkModel"],
            "transformer_layer_config": body,
            "aux_hidden_state_layer_ids": [2, 5, 7],
            "draft_vocab_size": 8192,
            "speculators_config": {"proposal_methods": [
                {"proposal_type": "greedy", "speculative_tokens": num_drafts}
            ]},
        });
        config.as_object_mut().unwrap().extend(method_keys);
    });
    edit_tensors(dir.path(), WEIGHTS, |tensors| {
        tensors.push(zeros("embed_tokens.weight", &[8192, 256]));
        tensors.push(zeros("lm_head.weight", &[8192, 256]));
    });
    dir
}

/// The demo EAGLE-3 as speculators packs it.
pub(in crate::drafter) fn speculators_eagle3_copy() -> tempfile::TempDir {
    let dir = copy(&demo("eagle3"));
    edit_json(dir.path(), "config.json", |config| {
        let mut body = config.take();
        let keys = body.as_object_mut().unwrap();
        let ids = keys.remove("eagle_aux_hidden_state_layer_ids");
        let draft_vocab_size = keys.remove("draft_vocab_size");
        keys.remove("norm_before_residual");
        *config = json!({
            "speculators_model_type": "eagle3",
            "architectures": ["Eagle3Speculator"],
            "transformer_layer_config": body,
            "eagle_aux_hidden_state_layer_ids": ids,
            "draft_vocab_size": draft_vocab_size,
            "norm_before_residual": false,
        });
    });
    rename_tensors(dir.path(), |name| {
        Some(name.replace("midlayer.", "layers.0."))
    });
    dir
}

#[test]
fn packagings_are_told_by_keys_and_tensors() {
    let own = read_block(&demo("dspark"));
    let same_but = |packaging: Packaging| BlockConfig {
        packaging,
        ..own.clone()
    };
    let deepspec = read_block(deepspec_copy().path());
    assert_eq!(deepspec, same_but(Packaging::DeepSpec));
    let speculators = read_block(speculators_dspark_copy(16).path());
    assert_eq!(speculators, same_but(Packaging::Speculators));
    let shifted = read_block(speculators_dspark_copy(15).path());
    assert_eq!(shifted.first_row, 1);
    let error = refused(speculators_dspark_copy(9).path());
    assert_says(&error, &["speculators_config", "speculative_tokens 16"]);

    let eagle3 = read_eagle3(speculators_eagle3_copy().path());
    let packaging = Packaging::Speculators;
    assert_eq!(
        eagle3,
        Eagle3Config {
            packaging,
            ..read_eagle3(&demo("eagle3"))
        }
    );
    let dir = speculators_eagle3_copy();
    edit_json(dir.path(), "config.json", |config| {
        config["norm_before_residual"] = Value::Null;
    });
    assert_says(&refused(dir.path()), &["norm_before_residual", "missing"]);
}

/// Copies are known in the formats that hold them, and nowhere else.
#[test]
fn copies_of_the_targets_tensors_are_no_part_of_other_formats() {
    let dir = copy(&demo("dspark"));
    edit_tensors(dir.path(), WEIGHTS, |tensors| {
        tensors.push(zeros("lm_head.weight", &[8192, 256]));
    });
    assert!(matches!(
        refused(dir.path()),
        Error::Checkpoint(CheckpointError::UnusedTensors { .. })
    ));
}

#[test]
fn speculators_files_of_other_drafters_are_read() {
    let body = json!({
        "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 16, "rms_norm_eps": 1e-6, "vocab_size": 1000,
        "rope_theta": 1e6, "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 128,
    });
    let config = |kind: &str| {
        json!({
            "speculators_model_type": kind, "transformer_layer_config": body, "block_size": 8,
            "mask_token_id": 5, "aux_hidden_state_layer_ids": [2, 9], "draft_vocab_size": 1000,
            "conv_kernel_size": 2, "conv_group_size": 16, "selector_rank": 8, "selector_top_k": 4,
        })
    };
    let dflash = planned_block(&config("dflash"));
    assert_eq!(dflash.target_layer_ids, [1, 8]);
    assert_eq!((dflash.first_row, dflash.draft_vocab_size), (1, None));
    let layers = |config: &BlockConfig| {
        config
            .layers
            .iter()
            .map(|layer| (layer.causal, layer.window))
            .collect::<Vec<_>>()
    };
    assert_eq!(layers(&dflash), [(true, Some(128)), (false, None)]);
    let dflash2 = planned_block(&config("dflash2"));
    assert_eq!(layers(&dflash2), [(false, Some(128)), (false, None)]);

    let mut reduced = config("dflash");
    reduced["draft_vocab_size"] = json!(300);
    reduced["sample_from_anchor"] = json!(true);
    reduced["sliding_window_non_causal"] = json!(true);
    let reduced = planned_block(&reduced);
    assert_eq!(
        (reduced.first_row, reduced.draft_vocab_size),
        (0, Some(300))
    );
    assert_eq!(layers(&reduced), [(false, Some(128)), (false, None)]);
    let tensors = reduced.tensors();
    for (name, shape) in [("lm_head.weight", vec![300, 64]), ("d2t", vec![300])] {
        assert!(tensors.contains(&(name.to_owned(), shape)), "{name}");
    }
    let mut selector = config("dflash2");
    selector["draft_vocab_size"] = json!(300);
    assert_says(
        &planned(&selector).unwrap_err(),
        &["draft_vocab_size", "whole vocabulary"],
    );
}

#[test]
fn markov_heads_are_read_by_their_type() {
    let mut config: Value =
        serde_json::from_slice(&std::fs::read(demo("dspark").join("config.json")).unwrap())
            .unwrap();
    let mut kind_of = |kind: Value, rank: usize| {
        let nested = section(&mut config, "dflash_config");
        nested.insert("markov_head_type".into(), kind);
        nested.insert("markov_rank".into(), rank.into());
        planned(&config)
    };
    let tensors = |config: Result<DrafterConfig, Error>| {
        let named = |(name, shape): (String, Vec<usize>)| {
            let name = name.strip_prefix("markov_head.").map(str::to_owned);
            name.map(|name| (name, shape))
        };
        config
            .unwrap()
            .tensors()
            .into_iter()
            .filter_map(named)
            .collect::<Vec<_>>()
    };
    let codes = [
        ("markov_w1.weight", vec![8192, 8]),
        ("markov_w2.weight", vec![8192, 8]),
    ];
    let with = |more: &[(&str, Vec<usize>)]| -> Vec<(String, Vec<usize>)> {
        let all = codes.iter().chain(more);
        all.map(|(name, shape)| ((*name).to_owned(), shape.clone()))
            .collect()
    };
    assert_eq!(tensors(kind_of(json!("vanilla"), 8)), with(&[]));
    let gate = [
        ("gate_proj.weight", vec![8, 264]),
        ("gate_proj.bias", vec![8]),
    ];
    assert_eq!(tensors(kind_of(json!("gated"), 8)), with(&gate));
    let joint = [("joint_proj.weight", vec![24, 272])];
    assert_eq!(tensors(kind_of(json!("rnn"), 8)), with(&joint));
    assert_says(
        &kind_of(json!("lstm"), 8).unwrap_err(),
        &["markov_head_type", "lstm"],
    );
    // Trained without: position-wise scores only, and the anchor's row predicts all the same.
    let without = kind_of(json!("vanilla"), 0).unwrap();
    assert!(!without.has_conditional_scores() && without.has_marginal_scores());
    assert!(
        without
            .description()
            .contains("first draft from row 0, no Markov head")
    );
}

#[test]
fn eagle_variants_that_are_not_served_are_refused_by_name() {
    for (key, value) in [
        ("norm_before_fc", json!(true)),
        ("fc_norm", json!(true)),
        ("num_hidden_layers", json!(2)),
        ("attention_bias", json!(true)),
    ] {
        let dir = copy(&demo("eagle3"));
        edit_json(dir.path(), "config.json", |config| {
            config[key] = value.clone()
        });
        assert_says(&refused(dir.path()), &[key, &value.to_string()]);
    }
}

#[test]
fn methods_are_found_with_and_without_files() {
    let find = |method: Option<&str>, dir: Option<&Path>| {
        let options = EngineOptions {
            method: method.map(str::to_owned),
            ..crate::plan::tests::options(1)
        };
        DrafterConfig::find(dir, &options, DrafterConfig::read)
    };
    let dir = demo("dspark");
    assert_eq!(find(None, None).unwrap(), None);
    assert_eq!(find(None, Some(&dir)).unwrap().unwrap().method(), "dspark");
    assert_eq!(
        find(Some("ngram"), None).unwrap().unwrap().method(),
        "ngram"
    );
    assert_says(
        &find(Some("eagle3"), Some(&dir)).unwrap_err(),
        &["eagle3", "dspark"],
    );
    assert!(matches!(
        find(Some("ngram"), Some(&dir)),
        Err(Error::Drafter(DrafterError::NoFiles { .. }))
    ));
}
