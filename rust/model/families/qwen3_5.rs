//! Qwen3.5 and its successors of the same class: Gated DeltaNet with full attention in between.

use serde_json::json;

use super::rotation::{OF_TARGETS, rope, rope_scaling};
use super::{Result, Traits, attention, layer_types, num_layers};
use crate::model::config::{AttentionConfig, GdnConfig, LayerConfig, OutputGate, QkNorm};
use crate::model::config_file::Section;

pub(super) fn traits(text: &Section<'_>) -> Result<Traits> {
    text.only("hidden_act", &[json!("silu")])?;
    text.only("rope_scaling", &[json!({})])?;
    text.only("output_gate_type", &[json!("swish"), json!("silu")])?;
    let is_attention = attention_layers(text)?;
    let attention = attention(text, text.size("head_dim")?)?;

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
    let attention = AttentionConfig {
        output_gate: match text.optional_flag("attn_output_gate")? {
            Some(true) | None => OutputGate::InQueryProjection,
            Some(false) => OutputGate::None,
        },
        qk_norm: QkNorm::Weighted,
        rope: Some(rope(
            &parameters,
            rope_scaling(Some(&parameters), &OF_TARGETS)?,
            rotary_dim,
        )?),
        ..attention
    };
    let has_gdn = is_attention.contains(&false);
    let layer = |is_attention| match is_attention {
        true => LayerConfig::Attention(attention.clone()),
        false => LayerConfig::GatedDelta,
    };
    Ok(Traits {
        gdn: if has_gdn { Some(gdn(text)?) } else { None },
        layer_norms_add_one: true,
        final_norm_adds_one: true,
        ..Traits::of_layers(is_attention.into_iter().map(layer).collect())
    })
}

/// Which layers are attention, the others being recurrent.
fn attention_layers(text: &Section<'_>) -> Result<Vec<bool>> {
    const FULL: &str = "full_attention";
    if let Some(types) = layer_types(text, [FULL, "linear_attention"])? {
        return Ok(types.into_iter().map(|name| name == FULL).collect());
    }
    let interval = text
        .optional_size("full_attention_interval")?
        .ok_or_else(|| text.missing("layer_types", "an array with one name per layer"))?;
    Ok((1..=num_layers(text)?).map(|i| i % interval == 0).collect())
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
