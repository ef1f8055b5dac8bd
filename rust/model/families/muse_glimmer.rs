//! Muse Glimmer: sliding windows with rotation, full attention without, gated outputs, norms on both sides. Text only.

use serde_json::{Value, json};

use super::{Result, Traits, attention, layer_types};
use crate::kernels::draft_select::LogitShape;
use crate::model::config::{
    AttentionConfig, LayerConfig, OutputGate, PostNorms, QkNorm, RopeConfig, RopeScaling,
};
use crate::model::config_file::Section;

const SLIDING: &str = "sliding_attention";

pub(super) fn traits(text: &Section<'_>) -> Result<Traits> {
    text.only("hidden_activation", &[json!("silu")])?;
    text.only("rope_scaling", &[json!({})])?;
    let types = layer_types(text, [SLIDING, "full_attention"])?
        .ok_or_else(|| text.missing("layer_types", "an array with one name per layer"))?;
    let thetas = layer_thetas(text, types.len())?;
    let attention = attention(text, text.size("head_dim")?)?;
    let parameters = text.section("rope_parameters")?;
    parameters.only("rope_type", &[json!("default")])?;
    let scale = text.positive("qk_scale_factor")? * (attention.head_dim as f64).powf(-0.5);
    let layers = types.iter().zip(thetas).map(|(name, theta)| {
        let is_sliding = *name == SLIDING;
        let rope = (theta > 0.0).then_some(RopeConfig {
            theta,
            rotary_dim: attention.head_dim,
            num_pairs: attention.head_dim / 2,
            scaling: RopeScaling::None,
        });
        Ok(LayerConfig::Attention(AttentionConfig {
            output_gate: OutputGate::OwnProjection,
            qk_norm: QkNorm::Weightless,
            rope,
            window: match is_sliding {
                true => Some(text.size("sliding_window")?),
                false => None,
            },
            // The published model multiplies queries; the products come out the same.
            scale: scale as f32,
            ..attention.clone()
        }))
    });
    let softcap = text.optional_positive("final_logit_softcapping")?;
    Ok(Traits {
        embedding_norm: true,
        layer_norms_add_one: true,
        post_norms: Some(PostNorms {
            eps: text.positive("post_norm_eps")? as f32,
            layer_scalar: false,
        }),
        logit_shape: LogitShape {
            multiplier: text.positive("output_multiplier")? as f32,
            softcap: softcap.map(|cap| cap as f32),
        },
        ..Traits::of_layers(layers.collect::<Result<_>>()?)
    })
}

/// The rotary base of each layer; 0 where nothing turns.
fn layer_thetas(text: &Section<'_>, num_layers: usize) -> Result<Vec<f64>> {
    let key = "layer_rope_theta";
    let values = text
        .optional_array(key)?
        .ok_or_else(|| text.missing(key, "an array with one rotary base per layer"))?;
    let theta = |value: &Value| {
        let theta = value.as_f64()?;
        let is_number = (theta as f32).is_finite() && theta >= 0.0;
        (is_number && (theta == 0.0 || theta as f32 > 0.0)).then_some(theta)
    };
    let thetas: Option<Vec<f64>> = values.iter().map(theta).collect();
    thetas
        .filter(|thetas| thetas.len() == num_layers)
        .ok_or_else(|| {
            let expected = format!("{num_layers} numbers, 0 for a layer without rotation");
            text.invalid(key, expected)
        })
}
