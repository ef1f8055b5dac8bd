//! Gemma 4, the unified (encoder-free) models: sliding windows with full attention in between, whose heads are fewer and
//! wider and take their values from the keys. Text only.

use half::bf16;
use serde_json::{Value, json};

use super::rotation::rope;
use super::{Result, Traits, attention, layer_types};
use crate::kernels::draft_select::LogitShape;
use crate::model::config::{
    AttentionConfig, LayerConfig, MlpActivation, PostNorms, QkNorm, RopeConfig, RopeScaling,
    ValueSource,
};
use crate::model::config_file::Section;

const SLIDING: &str = "sliding_attention";
const FULL: &str = "full_attention";

pub(super) fn traits(text: &Section<'_>) -> Result<Traits> {
    refuse_other_members(text)?;
    let types = layer_types(text, [SLIDING, FULL])?
        .ok_or_else(|| text.missing("layer_types", "an array with one name per layer"))?;
    let overrides = text.optional_section("per_layer_config")?;
    if let Some(overrides) = &overrides
        && let Some(key) = overrides
            .keys()
            .find(|key| !(0..types.len()).any(|i| i.to_string() == *key))
    {
        let expected = format!("left out; layers are 0 to {}", types.len() - 1);
        return Err(overrides.invalid(key, expected));
    }
    let layers = types.iter().enumerate().map(|(i, name)| {
        let overrides = match &overrides {
            Some(layers) => layers.optional_section(&i.to_string())?,
            None => None,
        };
        layer(text, *name == FULL, overrides.as_ref()).map(LayerConfig::Attention)
    });
    let softcap = text.optional_positive("final_logit_softcapping")?;
    let root_hidden = (text.size("hidden_size")? as f64).sqrt();
    Ok(Traits {
        // The published models were trained with the factor in bf16, where it is up to 0.4 % off.
        embedding_scale: bf16::from_f64(root_hidden).to_f32(),
        post_norms: Some(post_norms(text)?),
        mlp_activation: MlpActivation::GeluTanh,
        logit_shape: LogitShape {
            multiplier: 1.0,
            softcap: softcap.map(|cap| cap as f32),
        },
        ..Traits::of_layers(layers.collect::<Result<_>>()?)
    })
}

/// Refuses keys that ask for parts of other members of the family.
fn refuse_other_members(text: &Section<'_>) -> Result<()> {
    text.only("hidden_activation", &[json!("gelu_pytorch_tanh")])?;
    for (key, part) in [
        ("hidden_size_per_layer_input", "per-layer embeddings"),
        ("num_kv_shared_layers", "layers that share keys and values"),
    ] {
        if text.get(key).is_some_and(|value| *value != json!(0)) {
            return Err(text.invalid(key, format!("0, as {part} are not supported")));
        }
    }
    text.only("enable_moe_block", &[json!(false)])?;
    text.only("use_double_wide_mlp", &[json!(false)])?;
    // Of image blocks only; anything else would change text.
    text.only("use_bidirectional_attention", &[json!("vision")])?;
    if text.get("attn_logit_softcapping").is_some() {
        return Err(text.invalid("attn_logit_softcapping", "null"));
    }
    Ok(())
}

/// Norms behind both sublayers of every layer, and the factor that a layer ends in.
///
/// # Errors
/// [`ConfigError`](crate::error::ConfigError) for the epsilon.
pub(crate) fn post_norms(text: &Section<'_>) -> Result<PostNorms> {
    Ok(PostNorms {
        eps: text.positive("rms_norm_eps")? as f32,
        layer_scalar: true,
    })
}

/// A layer with full attention, as `text` describes it by keys of its own: what a drafter takes from its target's config.
///
/// # Errors
/// [`ConfigError`](crate::error::ConfigError) for a key that is missing or asks for what is not served.
pub(crate) fn full_layer(text: &Section<'_>) -> Result<AttentionConfig> {
    refuse_other_members(text)?;
    layer(text, true, None)
}

/// A layer, whose sizes `overrides` may give; a released file gives those of full layers by keys of their own instead.
fn layer(
    text: &Section<'_>,
    is_full: bool,
    overrides: Option<&Section<'_>>,
) -> Result<AttentionConfig> {
    let known = ["head_dim", "num_key_value_heads"];
    if let Some(overrides) = overrides
        && let Some(key) = overrides.keys().find(|key| !known.contains(key))
    {
        return Err(overrides.invalid(
            key,
            "left out; a layer may change head_dim and num_key_value_heads",
        ));
    }
    let own = |key: &str| match overrides {
        Some(overrides) => overrides.optional_size(key),
        None => Ok(None),
    };
    let shares_keys = is_full && text.optional_flag("attention_k_eq_v")?.unwrap_or(false);
    // Errors name the key that a size was read from.
    let (head_dim, section, key) = match (own("head_dim")?, overrides, is_full) {
        (Some(size), Some(overrides), _) => (size, overrides, "head_dim"),
        (_, _, true) => (text.size("global_head_dim")?, text, "global_head_dim"),
        (_, _, false) => (text.size("head_dim")?, text, "head_dim"),
    };
    if !head_dim.is_multiple_of(2) {
        return Err(section.invalid(key, "an even number of channels"));
    }
    let attention = attention(text, head_dim)?;
    let num_global = match shares_keys {
        true => text.optional_size("num_global_key_value_heads")?,
        false => None,
    };
    let (num_kv_heads, section, key) = match (own("num_key_value_heads")?, overrides, num_global) {
        (Some(heads), Some(overrides), _) => (heads, overrides, "num_key_value_heads"),
        (_, _, Some(heads)) => (heads, text, "num_global_key_value_heads"),
        (_, _, None) => (attention.num_kv_heads, text, "num_key_value_heads"),
    };
    if !attention.num_heads.is_multiple_of(num_kv_heads) {
        let expected = format!("a divisor of num_attention_heads {}", attention.num_heads);
        return Err(section.invalid(key, expected));
    }
    Ok(AttentionConfig {
        num_kv_heads,
        qk_norm: QkNorm::Weighted,
        values: match shares_keys {
            true => ValueSource::NormedKeys,
            false => ValueSource::NormedProjection,
        },
        rope: Some(rotation(
            text,
            if is_full { FULL } else { SLIDING },
            head_dim,
        )?),
        window: match is_full {
            true => None,
            false => Some(text.size("sliding_window")?),
        },
        // Norms of queries and keys take its place.
        scale: 1.0,
        ..attention
    })
}

/// The rotation of one kind of layer. "Proportional" spreads its frequencies over the whole head and leaves the slowest
/// pairs as they are.
fn rotation(text: &Section<'_>, kind: &str, head_dim: usize) -> Result<RopeConfig> {
    text.only("rope_scaling", &[json!({})])?;
    let parameters = text.section("rope_parameters")?.section(kind)?;
    match parameters.get("rope_type").and_then(Value::as_str) {
        Some("default") => {
            parameters.only("partial_rotary_factor", &[json!(1), json!(1.0)])?;
            rope(&parameters, RopeScaling::None, head_dim)
        }
        Some("proportional") => {
            parameters.only("factor", &[json!(1), json!(1.0)])?;
            let fraction = parameters.positive("partial_rotary_factor")?;
            let num_pairs = (head_dim as f64 * fraction / 2.0) as usize;
            if fraction > 1.0 || num_pairs == 0 {
                let expected = format!("a fraction of head_dim {head_dim} of at least one pair");
                return Err(parameters.invalid("partial_rotary_factor", expected));
            }
            Ok(RopeConfig {
                num_pairs,
                ..rope(&parameters, RopeScaling::None, head_dim)?
            })
        }
        Some(_) => Err(parameters.invalid("rope_type", "\"default\" or \"proportional\"")),
        None => Err(parameters.missing("rope_type", "\"default\" or \"proportional\"")),
    }
}
