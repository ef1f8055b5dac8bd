//! What a drafter's layers are made of, by the decoder that its config describes: Qwen3's, whatever the target is, or
//! Gemma 4's with norms on both sides.
//!
//! In: a drafter's keys. Out: a [`LayerBody`] that names no family; everything above asks its data.

use serde_json::json;

use super::format::LayerKeys;
use super::keys::Keys;
use crate::error::ConfigError;
use crate::model::config::{MlpActivation, PostNorms, RopeConfig, ValueSource};
use crate::model::families::gemma4;

/// Sizes and options that all layers of a parallel drafter share.
#[derive(Clone, Debug, PartialEq)]
pub struct LayerBody {
    /// Query heads.
    pub num_heads: usize,
    /// Key and value heads; divides `num_heads`.
    pub num_kv_heads: usize,
    /// Width of a head.
    pub head_dim: usize,
    /// Rotary embedding with the drafter's own base.
    pub rope: RopeConfig,
    /// Factor on query-key products.
    pub score_scale: f32,
    /// What the values of attention are, those of the context too.
    pub values: ValueSource,
    /// The function in the gated MLP.
    pub mlp_activation: MlpActivation,
    /// Norms behind both sublayers; `None` when their outputs are added as they are.
    pub post_norms: Option<PostNorms>,
}

impl LayerBody {
    pub(super) fn read(keys: &Keys<'_>) -> Result<Self, ConfigError> {
        match keys.format.layers {
            LayerKeys::Qwen3 => Self::of_qwen3(keys),
            LayerKeys::Gemma4 => Self::of_gemma4(keys),
        }
    }

    fn of_qwen3(keys: &Keys<'_>) -> Result<Self, ConfigError> {
        keys.body.only("hidden_act", &[json!("silu")])?;
        let (num_heads, num_kv_heads, head_dim) = keys.heads()?;
        let rope = keys.rope(head_dim)?;
        Ok(Self {
            num_heads,
            num_kv_heads,
            head_dim,
            score_scale: (head_dim as f64).powf(-0.5) as f32 * rope.score_factor(),
            rope,
            values: ValueSource::Projection,
            mlp_activation: MlpActivation::Silu,
            post_norms: None,
        })
    }

    /// The keys of the target's own config, of whose layers a drafter's are those with full attention.
    fn of_gemma4(keys: &Keys<'_>) -> Result<Self, ConfigError> {
        let attention = gemma4::full_layer(&keys.body)?;
        let rope = attention.rope.ok_or_else(|| {
            keys.body
                .missing("rope_parameters", "the rotation of full attention")
        })?;
        Ok(Self {
            num_heads: attention.num_heads,
            num_kv_heads: attention.num_kv_heads,
            head_dim: attention.head_dim,
            rope,
            score_scale: attention.scale,
            values: attention.values,
            mlp_activation: MlpActivation::GeluTanh,
            post_norms: Some(gemma4::post_norms(&keys.body)?),
        })
    }

    /// Width of all query heads.
    pub fn q_dim(&self) -> usize {
        self.num_heads * self.head_dim
    }

    /// Width of all key (or value) heads.
    pub fn kv_dim(&self) -> usize {
        self.num_kv_heads * self.head_dim
    }

    /// Names within a layer and shapes of its tensors, for a residual stream and an MLP of these widths.
    pub(super) fn tensors(&self, hidden: usize, inter: usize) -> Vec<(&'static str, Vec<usize>)> {
        let (q_dim, kv_dim) = (self.q_dim(), self.kv_dim());
        let mut tensors = vec![
            ("input_layernorm.weight", vec![hidden]),
            ("post_attention_layernorm.weight", vec![hidden]),
            ("self_attn.q_proj.weight", vec![q_dim, hidden]),
            ("self_attn.k_proj.weight", vec![kv_dim, hidden]),
            ("self_attn.o_proj.weight", vec![hidden, q_dim]),
            ("self_attn.q_norm.weight", vec![self.head_dim]),
            ("self_attn.k_norm.weight", vec![self.head_dim]),
            ("mlp.gate_proj.weight", vec![inter, hidden]),
            ("mlp.up_proj.weight", vec![inter, hidden]),
            ("mlp.down_proj.weight", vec![hidden, inter]),
        ];
        if self.values != ValueSource::NormedKeys {
            tensors.push(("self_attn.v_proj.weight", vec![kv_dim, hidden]));
        }
        if let Some(post_norms) = self.post_norms {
            tensors.extend([
                ("pre_feedforward_layernorm.weight", vec![hidden]),
                ("post_feedforward_layernorm.weight", vec![hidden]),
            ]);
            tensors.extend(post_norms.layer_scalar.then(|| ("layer_scalar", vec![1])));
        }
        tensors
    }
}
