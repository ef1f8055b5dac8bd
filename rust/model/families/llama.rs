//! Llama 3.x, and older ones that state their rotary base.

use serde_json::json;

use super::rotation::{OF_TARGETS, rope, rope_scaling, rope_sections};
use super::{Result, Traits, attention, num_layers};
use crate::model::config::{AttentionConfig, LayerConfig};
use crate::model::config_file::Section;

pub(super) fn traits(text: &Section<'_>) -> Result<Traits> {
    text.only("hidden_act", &[json!("silu")])?;
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
    let attention = attention(text, head_dim)?;
    // Newer files hold everything in one object; older ones keep the base apart from the scaling, which may be null.
    let (base, scaling) = rope_sections(text)?;
    let scaling = rope_scaling(scaling.as_ref(), &OF_TARGETS)?;
    let rope = rope(&base, scaling, head_dim)?;
    let layer = LayerConfig::Attention(AttentionConfig {
        rope: Some(rope),
        ..attention
    });
    Ok(Traits::of_layers(vec![layer; num_layers(text)?]))
}
