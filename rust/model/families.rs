//! The model families: per architecture name, how its `config.json` maps to a [`ModelConfig`] and how its checkpoints
//! name the tensors. Adding a family is adding an entry here; nothing above knows which one it runs.
//!
//! Keys with only one supported value are checked, not assumed, and a key whose absence would be filled with a wrong
//! default (rotary parameters above all) must be there.

use std::path::Path;

use serde_json::{Value, json};

use super::config::{
    AttentionConfig, GdnConfig, LayerConfig, MixerKind, ModelConfig, RopeConfig, RopeScaling,
};
use super::config_file::{ConfigFile, Section};
use super::tensor_role::WeightNames;
use crate::error::ConfigError;

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

static FAMILIES: [Family; 3] = [
    Family {
        architecture: "Qwen3_5ForConditionalGeneration",
        section: Some("text_config"),
        names: WeightNames {
            prefix: "model.language_model.",
            ignored_prefixes: &["model.visual.", "mtp."],
        },
        traits: qwen3_5,
    },
    Family {
        architecture: "Qwen3_5ForCausalLM",
        section: None,
        names: WeightNames {
            prefix: "model.",
            ignored_prefixes: &["mtp."],
        },
        traits: qwen3_5,
    },
    Family {
        architecture: "LlamaForCausalLM",
        section: None,
        names: WeightNames {
            prefix: "model.",
            ignored_prefixes: &[],
        },
        traits: llama,
    },
];

/// The part of a [`ModelConfig`] that families express differently.
struct Traits {
    layers: Vec<LayerConfig>,
    rope: RopeConfig,
    norms_add_one: bool,
    attention: AttentionConfig,
    gdn: Option<GdnConfig>,
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
    let traits = (family.traits)(&text)?;
    text.only("hidden_act", &[json!("silu")])?;
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
        rope: traits.rope,
        norms_add_one: traits.norms_add_one,
        attention: traits.attention,
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
    let got = match names.first() {
        Some(Value::String(name)) => name.clone(),
        other => other.unwrap_or(&Value::Null).to_string(),
    };
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
        || architecture.contains("Eagle")
        || [
            "dflash_config",
            "target_layer_ids",
            "speculators_model_type",
        ]
        .iter()
        .any(|key| root.get(key).is_some())
}

/// Qwen3.5 and its successors of the same class: Gated DeltaNet with full attention in between.
fn qwen3_5(text: &Section<'_>) -> Result<Traits> {
    text.only("output_gate_type", &[json!("swish"), json!("silu")])?;
    let layers = qwen3_5_layers(text)?;
    let attention = attention(text, true, text.size("head_dim")?)?;
    let has_gdn = layers.iter().any(|l| l.mixer == MixerKind::GatedDelta);

    // Re-exports without this object exist; the class's default theta is wrong for every published model.
    let parameters = text.optional_section("rope_parameters")?.ok_or_else(|| {
        text.missing("rope_parameters", "an object with rope_theta and rope_type")
    })?;
    parameters.only("mrope_interleaved", &[json!(true)])?;
    let source = match parameters.get("partial_rotary_factor") {
        Some(_) => &parameters,
        None => text,
    };
    let fraction = source.positive("partial_rotary_factor")?;
    let rotary_dim = (attention.head_dim as f64 * fraction) as usize;
    if fraction > 1.0 || rotary_dim == 0 || !rotary_dim.is_multiple_of(2) {
        return Err(source.invalid(
            "partial_rotary_factor",
            format!(
                "a fraction of head_dim {} that is an even number of channels",
                attention.head_dim
            ),
        ));
    }
    Ok(Traits {
        rope: rope(&parameters, Some(&parameters), rotary_dim)?,
        norms_add_one: true,
        attention: AttentionConfig {
            output_gate: text.optional_flag("attn_output_gate")?.unwrap_or(true),
            ..attention
        },
        gdn: if has_gdn { Some(gdn(text)?) } else { None },
        layers,
    })
}

fn qwen3_5_layers(text: &Section<'_>) -> Result<Vec<LayerConfig>> {
    let num_layers = num_layers(text)?;
    let Some(types) = text.optional_array("layer_types")? else {
        let interval = text
            .optional_size("full_attention_interval")?
            .ok_or_else(|| text.missing("layer_types", "an array with one name per layer"))?;
        return Ok((1..=num_layers)
            .map(|i| match i % interval {
                0 => MixerKind::Attention,
                _ => MixerKind::GatedDelta,
            })
            .map(|mixer| LayerConfig { mixer })
            .collect());
    };
    if types.len() != num_layers {
        return Err(text.invalid(
            "layer_types",
            format!("an array of num_hidden_layers {num_layers} names"),
        ));
    }
    types
        .iter()
        .map(|name| match name.as_str() {
            Some("full_attention") => Ok(MixerKind::Attention),
            Some("linear_attention") => Ok(MixerKind::GatedDelta),
            _ => Err(text.invalid(
                "layer_types",
                "an array of \"full_attention\" and \"linear_attention\"",
            )),
        })
        .map(|mixer| Ok(LayerConfig { mixer: mixer? }))
        .collect()
}

fn gdn(text: &Section<'_>) -> Result<GdnConfig> {
    let gdn = GdnConfig {
        num_key_heads: text.size("linear_num_key_heads")?,
        num_value_heads: text.size("linear_num_value_heads")?,
        key_dim: text.size("linear_key_head_dim")?,
        value_dim: text.size("linear_value_head_dim")?,
        conv_kernel: text.size("linear_conv_kernel_dim")?,
    };
    if !gdn.num_value_heads.is_multiple_of(gdn.num_key_heads) {
        return Err(text.invalid(
            "linear_num_value_heads",
            format!("a multiple of linear_num_key_heads {}", gdn.num_key_heads),
        ));
    }
    Ok(gdn)
}

/// Llama 3.x, and older ones that state their rotary base.
fn llama(text: &Section<'_>) -> Result<Traits> {
    let (hidden_size, num_heads) = (text.size("hidden_size")?, text.size("num_attention_heads")?);
    let head_dim = match text.optional_size("head_dim")? {
        Some(head_dim) => head_dim,
        None if hidden_size.is_multiple_of(num_heads) => hidden_size / num_heads,
        None => {
            return Err(text.invalid(
                "num_attention_heads",
                format!("a divisor of hidden_size {hidden_size}, as head_dim is not given"),
            ));
        }
    };
    if !head_dim.is_multiple_of(2) {
        return Err(text.invalid("head_dim", "an even number of channels"));
    }
    // Newer files hold everything in one object; older ones keep the base apart from the scaling, which may be null.
    let rope = match text.optional_section("rope_parameters")? {
        Some(parameters) => rope(&parameters, Some(&parameters), head_dim)?,
        None => rope(
            text,
            text.optional_section("rope_scaling")?.as_ref(),
            head_dim,
        )?,
    };
    let mixer = MixerKind::Attention;
    Ok(Traits {
        layers: vec![LayerConfig { mixer }; num_layers(text)?],
        rope,
        norms_add_one: false,
        attention: attention(text, false, head_dim)?,
        gdn: None,
    })
}

fn num_layers(text: &Section<'_>) -> Result<usize> {
    let num_layers = text.size("num_hidden_layers")?;
    if num_layers > MAX_LAYERS {
        return Err(text.invalid("num_hidden_layers", format!("at most {MAX_LAYERS}")));
    }
    Ok(num_layers)
}

fn attention(text: &Section<'_>, qk_norm: bool, head_dim: usize) -> Result<AttentionConfig> {
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
        output_gate: false,
        qk_norm,
        scale: (head_dim as f64).powf(-0.5) as f32,
    })
}

/// The rotary embedding: `rope_theta` of `base`, the change of frequencies from `scaling`.
pub(crate) fn rope(
    base: &Section<'_>,
    scaling: Option<&Section<'_>>,
    rotary_dim: usize,
) -> Result<RopeConfig> {
    let theta = base.optional_positive("rope_theta")?.ok_or_else(|| {
        base.missing(
            "rope_theta",
            "the rotary base; 10000 for models older than the key",
        )
    })?;
    let scaling = scaling.map_or(Ok(RopeScaling::None), rope_scaling)?;
    Ok(RopeConfig {
        theta,
        rotary_dim,
        scaling,
    })
}

fn rope_scaling(section: &Section<'_>) -> Result<RopeScaling> {
    // `type` is how files before transformers 4.43 spell it.
    let key = match section.get("rope_type") {
        Some(_) => "rope_type",
        None => "type",
    };
    match section.optional_text(key)? {
        Some("default") => Ok(RopeScaling::None),
        Some("llama3") => llama3_scaling(section),
        Some(_) => Err(section.invalid(key, "\"default\" or \"llama3\"")),
        None => Err(section.missing("rope_type", "\"default\" or \"llama3\"")),
    }
}

fn llama3_scaling(section: &Section<'_>) -> Result<RopeScaling> {
    let low_freq_factor = section.positive("low_freq_factor")?;
    let high_freq_factor = section.positive("high_freq_factor")?;
    if high_freq_factor <= low_freq_factor {
        return Err(section.invalid(
            "high_freq_factor",
            format!("more than low_freq_factor {low_freq_factor}"),
        ));
    }
    Ok(RopeScaling::Llama3 {
        factor: section.positive("factor")? as f32,
        low_freq_factor: low_freq_factor as f32,
        high_freq_factor: high_freq_factor as f32,
        original_max_position_embeddings: section.size("original_max_position_embeddings")?,
    })
}
