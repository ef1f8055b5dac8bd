//! Weights of every fixture against the raw bytes, and checkpoints that do not fit their config.

use std::path::{Path, PathBuf};

use half::bf16;
use serde_json::Value;

use super::*;
use crate::error::Error;
use crate::weights::Checkpoint;
use crate::weights::raw_safetensors::{
    RawTensor, copy, demo_target, edit_json, edit_tensors, family, read_dir,
};

const CASES: [&str; 7] = [
    "qwen3_5_wrapper",
    "qwen3_5_text",
    "llama_rope_scaling",
    "llama_rope_parameters",
    "gemma4_unified",
    "muse_glimmer",
    "demo",
];
const FILE: &str = "model.safetensors";

fn model_dir(case: &str) -> PathBuf {
    match case {
        "demo" => demo_target(),
        case => family(case),
    }
}

fn load(dir: &Path) -> Result<(ModelConfig, DecoderWeights)> {
    let config = ModelConfig::read(dir)?;
    let (device, checkpoint) = (Device::host(Some(1))?, Checkpoint::open(dir)?);
    let weights = DecoderWeights::load(&device, &checkpoint, &config, WeightFormat::Auto, false)?;
    Ok((config, weights))
}

/// Values of the tensor whose name ends in `suffix`, read without this crate.
fn raw(tensors: &[RawTensor], suffix: &str) -> Vec<f32> {
    let mut found = tensors.iter().filter(|t| t.name.ends_with(suffix));
    let tensor = found.next().unwrap_or_else(|| panic!("no {suffix}"));
    assert!(found.next().is_none(), "{suffix} is not unique");
    tensor.values()
}

fn rows(matrix: &Linear) -> Vec<f32> {
    let Linear::Bf16(packed) = matrix else {
        panic!("the fixtures hold BF16");
    };
    let mut values = vec![0.0; packed.out_features() * packed.in_features()];
    for (channel, row) in values.chunks_mut(packed.in_features()).enumerate() {
        packed.unpack_row(channel, row);
    }
    values
}

#[test]
fn every_tensor_of_every_fixture_lands_where_it_belongs() {
    for case in CASES {
        let (config, weights) = load(&model_dir(case)).unwrap();
        let mut tensors = read_dir(&model_dir(case));
        let others = [
            "model.vis",
            "model.embed_audio",
            "model.embed_vision",
            "mtp.",
        ];
        tensors.retain(|t| !others.iter().any(|prefix| t.name.starts_with(prefix)));
        let num_parameters: usize = tensors
            .iter()
            .map(|t| t.shape.iter().product::<usize>())
            .sum();
        assert_eq!(weights.num_parameters(), num_parameters, "{case}");
        assert!(weights.num_bytes() >= 2 * num_parameters, "{case}");

        let effective = |suffix: &str, adds_one: bool| -> Vec<f32> {
            let one = if adds_one { 1.0 } else { 0.0 };
            raw(&tensors, suffix).iter().map(|w| one + w).collect()
        };
        let same = |got: &Buffer<f32>, expected: Vec<f32>, name: &str| {
            assert_eq!(got.host(), expected, "{case} {name}");
        };
        let same_matrix = |got: &Linear, name: &str| {
            assert_eq!(rows(got), raw(&tensors, name), "{case} {name}");
        };
        same_matrix(&Linear::Bf16(weights.embed.clone()), "embed_tokens.weight");
        assert_eq!(weights.lm_head.is_none(), config.tie_word_embeddings);
        if let Some(head) = &weights.lm_head {
            same_matrix(head, "lm_head.weight");
        }
        let final_norm = effective("l.norm.weight", case.starts_with("qwen") || case == "demo");
        same(&weights.final_norm, final_norm, "norm");
        for (i, layer) in weights.layers.iter().enumerate() {
            let name = |suffix: &str| format!("layers.{i}.{suffix}");
            let norm = |got, suffix: &str| {
                same(
                    got,
                    effective(&name(suffix), config.layer_norms_add_one),
                    suffix,
                )
            };
            let plain = |got, suffix: &str| same(got, raw(&tensors, &name(suffix)), suffix);
            let matrix = |got, suffix: &str| same_matrix(got, &name(suffix));
            norm(&layer.input_norm, "input_layernorm.weight");
            match &layer.post_norms {
                None => norm(&layer.mlp_norm, "post_attention_layernorm.weight"),
                Some(norms) => {
                    norm(&norms.mixer, "post_attention_layernorm.weight");
                    norm(&layer.mlp_norm, "pre_feedforward_layernorm.weight");
                    norm(&norms.mlp, "post_feedforward_layernorm.weight");
                    if let Some(scalar) = norms.layer_scalar {
                        assert_eq!([scalar], *raw(&tensors, &name("layer_scalar")));
                    }
                }
            }
            matrix(&layer.mlp.gate_proj, "mlp.gate_proj.weight");
            matrix(&layer.mlp.up_proj, "mlp.up_proj.weight");
            matrix(&layer.mlp.down_proj, "mlp.down_proj.weight");
            match &layer.mixer {
                MixerWeights::Attention(w) => {
                    matrix(&w.q_proj, "self_attn.q_proj.weight");
                    matrix(&w.k_proj, "self_attn.k_proj.weight");
                    if let Some(v_proj) = &w.v_proj {
                        matrix(v_proj, "self_attn.v_proj.weight");
                    }
                    if let Some(gate_proj) = &w.output_gate_proj {
                        matrix(gate_proj, "self_attn.gate_proj.weight");
                    }
                    matrix(&w.o_proj, "self_attn.o_proj.weight");
                    // What a layer has follows from the config; what the file has must be the same.
                    for (is_read, suffix) in [
                        (w.v_proj.is_some(), "self_attn.v_proj.weight"),
                        (w.output_gate_proj.is_some(), "self_attn.gate_proj.weight"),
                        (w.q_norm.is_some(), "self_attn.q_norm.weight"),
                        (w.k_norm.is_some(), "self_attn.k_norm.weight"),
                    ] {
                        let own = format!(".{}", name(suffix));
                        let is_stored = tensors.iter().any(|t| t.name.ends_with(&own));
                        assert_eq!(is_read, is_stored, "{case}: {own}");
                    }
                    if let (Some(q), Some(k)) = (&w.q_norm, &w.k_norm) {
                        norm(q, "self_attn.q_norm.weight");
                        norm(k, "self_attn.k_norm.weight");
                    }
                }
                MixerWeights::GatedDelta(w) => {
                    matrix(&w.in_proj_qkv, "linear_attn.in_proj_qkv.weight");
                    matrix(&w.in_proj_z, "linear_attn.in_proj_z.weight");
                    matrix(&w.in_proj_a, "linear_attn.in_proj_a.weight");
                    matrix(&w.in_proj_b, "linear_attn.in_proj_b.weight");
                    matrix(&w.out_proj, "linear_attn.out_proj.weight");
                    plain(&w.conv, "linear_attn.conv1d.weight");
                    plain(&w.a_log, "linear_attn.A_log");
                    plain(&w.dt_bias, "linear_attn.dt_bias");
                    plain(&w.norm, "linear_attn.norm.weight");
                }
            }
        }
    }
}

#[test]
fn embedding_rows_have_the_reference_norms() {
    for case in &CASES[..6] {
        let (config, weights) = load(&family(case)).unwrap();
        let golden: Value =
            serde_json::from_slice(&std::fs::read(family(case).join("golden.json")).unwrap())
                .unwrap();
        let tolerance = golden["tolerance"]["residual_l2_rel"].as_f64().unwrap();
        let mut row = vec![0.0; weights.embed.in_features()];
        for sequence in golden["sequences"].as_array().unwrap() {
            let norms = sequence["fp32"]["residual_l2"][0].as_array().unwrap();
            let ids = sequence["input_ids"].as_array().unwrap();
            assert_eq!(ids.len(), norms.len());
            for (id, norm) in ids.iter().zip(norms) {
                let norm = norm.as_f64().unwrap();
                weights
                    .embed
                    .unpack_row(id.as_u64().unwrap() as usize, &mut row);
                let squares: f64 = row.iter().map(|&x| f64::from(x).powi(2)).sum();
                let mean = squares / row.len() as f64;
                let got = f64::from(config.embedding_scale)
                    * match config.embedding_norm {
                        true => (squares / (mean + f64::from(config.rms_norm_eps))).sqrt(),
                        false => squares.sqrt(),
                    };
                assert!(
                    (got - norm).abs() <= tolerance * norm,
                    "{case}: {got} {norm}"
                );
            }
        }
    }
}

#[test]
fn logits_go_through_the_head_or_the_tied_embedding() {
    let device = Device::host(Some(1)).unwrap();
    for case in CASES {
        let (config, weights) = load(&model_dir(case)).unwrap();
        let head = match config.tie_word_embeddings {
            true => "embed_tokens.weight",
            false => "lm_head.weight",
        };
        let head = raw(&read_dir(&model_dir(case)), head);
        let hidden: Vec<f32> = (0..2 * config.hidden_size)
            .map(|i| (i as f32 * 0.37).sin())
            .collect();
        let mut logits = device.try_alloc(2 * config.vocab_size).unwrap();
        weights
            .logits(&device, &Buffer::from_slice(&hidden), 2, &mut logits)
            .unwrap();
        for (x, logits) in hidden
            .chunks(config.hidden_size)
            .zip(logits.host().chunks(config.vocab_size))
        {
            for (w, logit) in head.chunks(config.hidden_size).zip(logits) {
                let terms = w.iter().zip(x).map(|(&w, &x)| f64::from(w) * f64::from(x));
                let (sum, size) = terms.fold((0.0, 0.0), |(s, a), t| (s + t, a + t.abs()));
                assert!((sum - f64::from(*logit)).abs() <= 1e-5 * size, "{case}");
            }
        }
    }
}

#[test]
fn a_tied_head_stored_twice_must_be_equal() {
    let dir = copy(&family("llama_rope_parameters"));
    edit_tensors(dir.path(), FILE, |tensors| {
        let mut head = tensors
            .iter()
            .find(|t| t.name == "model.embed_tokens.weight")
            .unwrap()
            .clone();
        head.name = "lm_head.weight".to_owned();
        tensors.push(head);
    });
    assert!(load(dir.path()).unwrap().1.lm_head.is_none());
    edit_tensors(dir.path(), FILE, |tensors| {
        let head = tensors.iter_mut().find(|t| t.name == "lm_head.weight");
        head.unwrap().bytes[0] ^= 1;
    });
    let message = load(dir.path()).unwrap_err().to_string();
    for part in [FILE, "lm_head.weight", "model.embed_tokens.weight"] {
        assert!(message.contains(part), "{message}");
    }
}

#[test]
fn stored_rotary_frequencies_of_old_llama_files_are_skipped() {
    let dir = copy(&family("llama_rope_scaling"));
    edit_tensors(dir.path(), FILE, |tensors| {
        for i in 0..3 {
            tensors.push(RawTensor {
                name: format!("model.layers.{i}.self_attn.rotary_emb.inv_freq"),
                dtype: "F32".to_owned(),
                shape: vec![8],
                bytes: vec![0; 32],
            });
        }
    });
    load(dir.path()).unwrap();
}

type Damage = fn(&mut Vec<RawTensor>);

fn find<'a>(tensors: &'a mut [RawTensor], name: &str) -> &'a mut RawTensor {
    let found = tensors.iter_mut().find(|t| t.name == name);
    found.unwrap_or_else(|| panic!("no {name}"))
}

#[test]
fn checkpoints_that_do_not_fit_are_refused_by_name() {
    let cases: [(&str, Damage, &[&str]); 10] = [
        (
            "renamed",
            |t| {
                find(t, "model.layers.1.mlp.up_proj.weight").name =
                    "model.layers.1.mlp.up_prj.weight".into()
            },
            &[
                "`model.layers.1.mlp.up_proj.weight` with shape [160, 96] is missing",
                "the checkpoint has `model.layers.1.mlp.up_prj.weight`",
            ],
        ),
        (
            "dropped",
            |t| t.retain(|t| t.name != "model.layers.2.self_attn.q_proj.weight"),
            &["`model.layers.2.self_attn.q_proj.weight` with shape [96, 96] is missing"],
        ),
        (
            "head dropped",
            |t| t.retain(|t| t.name != "lm_head.weight"),
            &["`lm_head.weight` with shape [256, 96] is missing"],
        ),
        (
            "transposed",
            |t| {
                find(t, "model.layers.0.mlp.down_proj.weight")
                    .shape
                    .reverse()
            },
            &[
                "model.safetensors",
                "`model.layers.0.mlp.down_proj.weight`",
                "shape [96, 160], got [160, 96]",
            ],
        ),
        (
            "rank",
            |t| find(t, "model.norm.weight").shape.insert(0, 1),
            &[
                "model.safetensors",
                "`model.norm.weight`",
                "shape [96], got [1, 96]",
            ],
        ),
        (
            "half matrix",
            |t| find(t, "model.layers.0.mlp.down_proj.weight").dtype = "F16".into(),
            &[
                "model.safetensors",
                "`model.layers.0.mlp.down_proj.weight`",
                "dtype BF16, W12 or F8_E4M3, got F16",
            ],
        ),
        (
            "float matrix",
            |t| {
                let tensor = find(t, "model.layers.0.mlp.down_proj.weight");
                tensor.bytes = tensor
                    .values()
                    .iter()
                    .flat_map(|x| x.to_le_bytes())
                    .collect();
                tensor.dtype = "F32".into();
            },
            &[
                "`model.layers.0.mlp.down_proj.weight`",
                "dtype BF16, W12 or F8_E4M3, got F32",
            ],
        ),
        (
            "half vector",
            |t| find(t, "model.layers.1.input_layernorm.weight").dtype = "F16".into(),
            &[
                "`model.layers.1.input_layernorm.weight`",
                "dtype BF16 or F32, got F16",
            ],
        ),
        (
            "extra",
            |t| {
                let mut extra = find(t, "model.norm.weight").clone();
                extra.name = "model.layers.1.self_attn.q_proj.bias".into();
                t.push(extra);
            },
            &[
                "model.safetensors",
                "1 tensor(s)",
                "first `model.layers.1.self_attn.q_proj.bias`",
            ],
        ),
        (
            "one layer more",
            |t| {
                let mut extra: Vec<_> = t
                    .iter()
                    .filter(|t| t.name.contains("layers.2."))
                    .cloned()
                    .collect();
                extra
                    .iter_mut()
                    .for_each(|t| t.name = t.name.replace("layers.2.", "layers.3."));
                t.extend(extra);
            },
            &[
                "9 tensor(s)",
                "first `model.layers.3.input_layernorm.weight`",
            ],
        ),
    ];
    for (what, damage, parts) in cases {
        let dir = copy(&family("llama_rope_scaling"));
        edit_tensors(dir.path(), FILE, damage);
        let error = load(dir.path()).unwrap_err();
        assert!(matches!(error, Error::Checkpoint(_)), "{what}: {error}");
        let message = error.to_string();
        for part in [&[dir.path().to_str().unwrap()], parts].concat() {
            assert!(message.contains(part), "{what}: `{part}` not in: {message}");
        }
    }
}

#[test]
fn a_dropped_tensor_gets_no_misleading_hint() {
    let dir = copy(&family("llama_rope_scaling"));
    edit_tensors(dir.path(), FILE, |tensors| {
        tensors.retain(|t| t.name != "model.layers.2.self_attn.q_proj.weight");
    });
    let Err(Error::Checkpoint(CheckpointError::MissingTensor { near, .. })) = load(dir.path())
    else {
        panic!("a dropped tensor was not missed");
    };
    assert_eq!(near, None, "k_proj is a tensor of its own");
}

#[test]
fn a_config_that_ties_what_the_checkpoint_does_not_is_refused() {
    let dir = copy(&family("qwen3_5_wrapper"));
    edit_json(dir.path(), "config.json", |config| {
        config["tie_word_embeddings"] = true.into();
    });
    let error = load(dir.path()).unwrap_err();
    assert!(
        matches!(error, Error::Checkpoint(CheckpointError::TiedTensor { .. })),
        "{error}"
    );
}

#[test]
fn float_vectors_are_used_unrounded() {
    let (_, weights) = load(&family("qwen3_5_wrapper")).unwrap();
    let MixerWeights::GatedDelta(mixer) = &weights.layers[0].mixer else {
        panic!("layer 0 is Gated DeltaNet");
    };
    let rounded = |x: &f32| bf16::from_f32(*x).to_f32();
    assert!(mixer.a_log.host().iter().any(|x| rounded(x) != *x));
}
