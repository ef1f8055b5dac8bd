//! The model families: per architecture name, how its `config.json` maps to a [`ModelConfig`] and how its checkpoints
//! name the tensors. Adding a family is adding an entry here; nothing above knows which one it runs.
//!
//! Keys with only one supported value are checked, not assumed, and a key whose absence would be filled with a wrong
//! default (rotary parameters above all) must be there.

pub(crate) mod gemma4;
mod llama;
mod muse_glimmer;
mod quantization;
mod qwen3_5;
pub(crate) mod rotation;

use std::path::Path;

use serde_json::{Value, json};

use super::config::{
    AttentionConfig, GdnConfig, LayerConfig, MlpActivation, ModelConfig, OutputGate, PostNorms,
    QkNorm, ValueSource,
};
use super::config_file::{ConfigFile, Section};
use super::tensor_role::WeightNames;
use crate::error::ConfigError;
use crate::kernels::draft_select::LogitShape;

type Result<T, E = ConfigError> = std::result::Result<T, E>;

/// Layers beyond this are a damaged file, not a model.
const MAX_LAYERS: usize = 10_000;

/// One architecture name.
struct Family {
    architecture: &'static str,
    /// Key of the object that describes the language model; `None` when that is the root.
    section: Option<&'static str>,
    names: WeightNames,
    traits: fn(&Section<'_>) -> Result<Traits>,
}

/// The norm before the MLP where sublayers have none behind them, and where they have.
const MLP_NORM: &str = "post_attention_layernorm.weight";
const SANDWICHED_MLP_NORM: &str = "pre_feedforward_layernorm.weight";

static FAMILIES: [Family; 6] = [
    Family {
        architecture: "Qwen3_5ForConditionalGeneration",
        section: Some("text_config"),
        names: WeightNames {
            prefix: "model.language_model.",
            mlp_norm: MLP_NORM,
            ignored_prefixes: &["model.visual.", "mtp."],
        },
        traits: qwen3_5::traits,
    },
    Family {
        architecture: "Qwen3_5ForCausalLM",
        section: None,
        names: WeightNames {
            prefix: "model.",
            mlp_norm: MLP_NORM,
            ignored_prefixes: &["mtp."],
        },
        traits: qwen3_5::traits,
    },
    Family {
        architecture: "LlamaForCausalLM",
        section: None,
        names: WeightNames {
            prefix: "model.",
            mlp_norm: MLP_NORM,
            ignored_prefixes: &[],
        },
        traits: llama::traits,
    },
    Family {
        architecture: "Gemma4UnifiedForConditionalGeneration",
        section: Some("text_config"),
        names: WeightNames {
            prefix: "model.language_model.",
            mlp_norm: SANDWICHED_MLP_NORM,
            ignored_prefixes: &[
                "model.vision_embedder.",
                "model.embed_vision.",
                "model.embed_audio.",
            ],
        },
        traits: gemma4::traits,
    },
    Family {
        architecture: "Gemma4UnifiedForCausalLM",
        section: None,
        names: WeightNames {
            prefix: "model.",
            mlp_norm: SANDWICHED_MLP_NORM,
            ignored_prefixes: &[],
        },
        traits: gemma4::traits,
    },
    Family {
        architecture: "MuseGlimmerForConditionalGeneration",
        section: Some("text_config"),
        names: WeightNames {
            prefix: "model.language_model.",
            mlp_norm: SANDWICHED_MLP_NORM,
            ignored_prefixes: &[
                "model.vision_tower.",
                "model.vision_adapter.",
                "model.vision_projection.",
            ],
        },
        traits: muse_glimmer::traits,
    },
];

/// The part of a [`ModelConfig`] that families express differently.
struct Traits {
    layers: Vec<LayerConfig>,
    gdn: Option<GdnConfig>,
    embedding_scale: f32,
    embedding_norm: bool,
    layer_norms_add_one: bool,
    final_norm_adds_one: bool,
    post_norms: Option<PostNorms>,
    mlp_activation: MlpActivation,
    logit_shape: LogitShape,
}

impl Traits {
    /// Layers without any of the options.
    fn of_layers(layers: Vec<LayerConfig>) -> Self {
        Self {
            layers,
            gdn: None,
            embedding_scale: 1.0,
            embedding_norm: false,
            layer_norms_add_one: false,
            final_norm_adds_one: false,
            post_norms: None,
            mlp_activation: MlpActivation::Silu,
            logit_shape: LogitShape::PLAIN,
        }
    }
}

/// All supported architectures by name, each with the prefixes of the tensors that belong to another model (a vision
/// tower) and are not read.
pub fn supported_architectures() -> impl Iterator<Item = (&'static str, &'static [&'static str])> {
    FAMILIES
        .iter()
        .map(|family| (family.architecture, family.names.ignored_prefixes))
}

/// Reads the config of the model in `dir`; see [`ModelConfig::read`].
pub(super) fn read_config(dir: &Path) -> Result<ModelConfig> {
    let file = ConfigFile::read(&dir.join("config.json"))?;
    let generation_path = dir.join("generation_config.json");
    let generation = match generation_path.exists() {
        true => Some(ConfigFile::read(&generation_path)?),
        false => None,
    };
    config_of(&file, generation.as_ref())
}

/// The config that `file` and perhaps a generation config tell of; see [`ModelConfig::read`].
///
/// # Errors
/// [`ConfigError`] naming file, key, expected and got.
pub fn config_of(file: &ConfigFile, generation: Option<&ConfigFile>) -> Result<ModelConfig> {
    let root = file.root();
    let family = find_family(file.path(), &root)?;
    let text = match family.section {
        Some(key) => root.section(key)?,
        None => root.clone(),
    };
    quantization::check(file.path(), &root)?;
    let traits = (family.traits)(&text)?;
    text.only("attention_bias", &[json!(false)])?;
    text.only("mlp_bias", &[json!(false)])?;

    let vocab_size = text.size("vocab_size")?;
    let mut eos_token_ids = text.token_ids("eos_token_id", vocab_size)?;
    eos_token_ids.extend(root.token_ids("eos_token_id", vocab_size)?);
    let mut suppress_tokens = Vec::new();
    if let Some(generation) = generation {
        eos_token_ids.extend(generation.root().token_ids("eos_token_id", vocab_size)?);
        suppress_tokens = generation.root().token_ids("suppress_tokens", vocab_size)?;
    }
    for ids in [&mut eos_token_ids, &mut suppress_tokens] {
        ids.sort_unstable();
        ids.dedup();
    }

    if suppress_tokens.len() >= vocab_size {
        return Err(ConfigError::Value {
            file: generation.map_or(file, |file| file).path().to_owned(),
            key: "suppress_tokens".to_owned(),
            expected: "ids that leave a token to be chosen".to_owned(),
            got: format!("all {vocab_size} of the vocabulary"),
        });
    }

    // A wrapper's own key decides for the whole model; its language part may repeat or omit it.
    let tied = match root.optional_flag("tie_word_embeddings")? {
        Some(tied) => tied,
        None => text.optional_flag("tie_word_embeddings")?.unwrap_or(false),
    };
    let config = ModelConfig {
        architecture: family.architecture.to_owned(),
        weight_names: family.names,
        vocab_size,
        hidden_size: text.size("hidden_size")?,
        intermediate_size: text.size("intermediate_size")?,
        max_position_embeddings: text.size("max_position_embeddings")?,
        rms_norm_eps: text.positive("rms_norm_eps")? as f32,
        tie_word_embeddings: tied,
        layers: traits.layers,
        embedding_scale: traits.embedding_scale,
        embedding_norm: traits.embedding_norm,
        layer_norms_add_one: traits.layer_norms_add_one,
        final_norm_adds_one: traits.final_norm_adds_one,
        post_norms: traits.post_norms,
        mlp_activation: traits.mlp_activation,
        logit_shape: traits.logit_shape,
        gdn: traits.gdn,
        eos_token_ids,
        suppress_tokens,
    };
    for (name, shape) in config.weight_names.tensors(&config) {
        file.check_shape(&name, &shape)?;
    }
    if let Some(gdn) = &config.gdn {
        let shape = [gdn.num_value_heads, gdn.key_dim, gdn.value_dim];
        file.check_shape("a recurrent state", &shape)?;
    }
    Ok(config)
}

fn find_family(path: &Path, root: &Section<'_>) -> Result<&'static Family> {
    let names = root
        .optional_array("architectures")?
        .ok_or_else(|| root.missing("architectures", "an array with the model's class name"))?;
    if let Some(family) = FAMILIES
        .iter()
        .find(|f| names.iter().any(|n| n == f.architecture))
    {
        return Ok(family);
    }
    let file = path.to_owned();
    let expected = FAMILIES.each_ref().map(|f| f.architecture).join(", ");
    let Some(Value::String(got)) = names.first() else {
        let expected = format!("an array with the model's class name, one of {expected}");
        return Err(root.invalid("architectures", expected));
    };
    let got = got.clone();
    Err(match is_drafter(&got, root) {
        true => ConfigError::DrafterAsTarget {
            file,
            expected,
            got,
        },
        false => ConfigError::Architecture {
            file,
            expected,
            got,
        },
    })
}

/// Whether a config that is no target's is some drafter's, served or not: by its class, or keys that only drafters have.
fn is_drafter(architecture: &str, root: &Section<'_>) -> bool {
    architecture.ends_with("DraftModel")
        || architecture.ends_with("DSparkModel")
        || architecture.ends_with("AssistantModel")
        || architecture.contains("Eagle")
        || [
            "dflash_config",
            "target_layer_ids",
            "speculators_model_type",
        ]
        .iter()
        .any(|key| root.get(key).is_some())
}

fn num_layers(text: &Section<'_>) -> Result<usize> {
    let num_layers = text.size("num_hidden_layers")?;
    if num_layers > MAX_LAYERS {
        return Err(text.invalid("num_hidden_layers", format!("at most {MAX_LAYERS}")));
    }
    Ok(num_layers)
}

/// The names of `layer_types`, one per layer, each of them one of `known`.
fn layer_types<'a>(text: &Section<'a>, known: [&str; 2]) -> Result<Option<Vec<&'a str>>> {
    let num_layers = num_layers(text)?;
    let Some(types) = text.optional_array("layer_types")? else {
        return Ok(None);
    };
    if types.len() != num_layers {
        return Err(text.invalid(
            "layer_types",
            format!("an array of num_hidden_layers {num_layers} names"),
        ));
    }
    let name = |name: &'a Value| {
        let name = name.as_str().filter(|name| known.contains(name));
        name.ok_or_else(|| {
            let [a, b] = known;
            text.invalid("layer_types", format!("an array of \"{a}\" and \"{b}\""))
        })
    };
    types.iter().map(name).collect::<Result<_>>().map(Some)
}

/// Heads of `head_dim` without any option: rotation is the family's to add.
fn attention(text: &Section<'_>, head_dim: usize) -> Result<AttentionConfig> {
    if !head_dim.is_multiple_of(2) {
        return Err(text.invalid("head_dim", "an even number of channels"));
    }
    let num_heads = text.size("num_attention_heads")?;
    let num_kv_heads = text
        .optional_size("num_key_value_heads")?
        .unwrap_or(num_heads);
    if !num_heads.is_multiple_of(num_kv_heads) {
        return Err(text.invalid(
            "num_key_value_heads",
            format!("a divisor of num_attention_heads {num_heads}"),
        ));
    }
    Ok(AttentionConfig {
        num_heads,
        num_kv_heads,
        head_dim,
        output_gate: OutputGate::None,
        qk_norm: QkNorm::None,
        values: ValueSource::Projection,
        rope: None,
        window: None,
        scale: (head_dim as f64).powf(-0.5) as f32,
    })
}

#[cfg(test)]
mod tests;
