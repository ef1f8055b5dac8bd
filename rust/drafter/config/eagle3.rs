//! EAGLE-3's config: EAGLE's own names (SpecForge keeps them) or those of speculators.

use serde_json::json;

use super::format::Packaging;
use super::keys::{Keys, OFFSETS};
use crate::cache::pages::{KvLayout, KvShape};
use crate::error::ConfigError;
use crate::model::config::RopeConfig;

/// Depth of a draft when nothing is said: that of EAGLE-2's trees, root level included.
pub(super) const USUAL_DRAFT_TOKENS: usize = 8;

/// Taps when the file lists none: early, middle and late layer.
const USUAL_NUM_TAPS: usize = 3;

/// An EAGLE-3 drafter: one decoder layer whose attention reads a token's embedding beside a feature.
#[derive(Clone, Debug, PartialEq)]
pub struct Eagle3Config {
    /// Whose conventions the files follow.
    pub packaging: Packaging,
    /// Width of features and of the residual stream, the target's too.
    pub hidden_size: usize,
    /// Width of the MLP.
    pub intermediate_size: usize,
    /// Query heads.
    pub num_heads: usize,
    /// Key and value heads; divides `num_heads`.
    pub num_kv_heads: usize,
    /// Width of a head.
    pub head_dim: usize,
    /// Epsilon of every RMS norm.
    pub rms_norm_eps: f32,
    /// Rotary embedding over the whole head.
    pub rope: RopeConfig,
    /// Vocabulary of the target the drafter was made for, where the file says.
    pub vocab_size: Option<usize>,
    /// Tokens that it can draft.
    pub draft_vocab_size: usize,
    /// Whether drafted ids are offset from the target's, by a table in the file.
    pub has_offsets: bool,
    /// Whether the file holds an embedding of its own, used in place of the target's.
    pub has_embedding: bool,
    /// Whether the residual stream starts from the normed feature rather than the feature.
    pub norm_before_residual: bool,
    /// Whether the feature handed to the next depth is the final norm's output rather than its input.
    pub norm_output: bool,
    /// Target layers whose outputs the drafter reads, 0-based; `None` = the usual three of a target.
    pub target_layer_ids: Option<Vec<i64>>,
    /// Layers of the target the drafter was made for, where the file says.
    pub num_target_layers: Option<usize>,
}

impl Eagle3Config {
    pub(super) fn from_keys(keys: &Keys<'_>) -> Result<Self, ConfigError> {
        let body = &keys.body;
        body.only("hidden_act", &[json!("silu")])?;
        body.only("attention_bias", &[json!(false)])?;
        body.only("mlp_bias", &[json!(false)])?;
        body.only("num_hidden_layers", &[json!(1)])?;
        for variant in ["norm_before_fc", "fc_norm"] {
            keys.refuse(variant)?;
        }
        let vocab_size = body.optional_size("vocab_size")?;
        let reduced = keys.draft_vocab_size(vocab_size)?;
        let (num_heads, num_kv_heads, head_dim) = keys.heads()?;
        let packaging = keys.format.packaging;
        let norm_before_residual = keys.flag("norm_before_residual")?;
        Ok(Self {
            packaging,
            hidden_size: body.size("hidden_size")?,
            intermediate_size: body.size("intermediate_size")?,
            num_heads,
            num_kv_heads,
            head_dim,
            rms_norm_eps: body.positive("rms_norm_eps")? as f32,
            rope: keys.rope(head_dim)?,
            vocab_size,
            draft_vocab_size: match reduced {
                Some(size) => size,
                None => body.size("vocab_size")?,
            },
            has_offsets: reduced.is_some() || keys.holds(OFFSETS),
            has_embedding: keys.holds("embed_tokens.weight"),
            norm_before_residual: match (norm_before_residual, packaging) {
                (Some(flag), _) => flag,
                // Readers of this format disagree on its default.
                (None, Packaging::Speculators) => {
                    let section = keys.at("norm_before_residual")?;
                    return Err(section.missing("norm_before_residual", "true or false"));
                }
                (None, _) => false,
            },
            norm_output: keys.flag("norm_output")?.unwrap_or(false),
            target_layer_ids: keys.layer_ids("eagle_aux_hidden_state_layer_ids", true)?,
            num_target_layers: body.optional_size("num_target_layers")?,
        })
    }

    /// What was found, for a reader.
    pub(super) fn description(&self) -> String {
        let (packaging, size) = (self.packaging.name(), self.draft_vocab_size);
        format!("EAGLE-3 in {packaging} format, drafting {size} tokens of the vocabulary")
    }

    /// Layers of a target of `num_layers` whose outputs are tapped.
    pub(in crate::drafter) fn layer_ids_of(&self, num_layers: usize) -> Vec<i64> {
        let num_layers = num_layers as i64;
        match &self.target_layer_ids {
            Some(ids) => ids.clone(),
            // Published as the streams that enter layers 2, L/2 and L - 3.
            None => vec![1, num_layers / 2 - 1, num_layers - 4],
        }
    }

    /// Number of taps.
    pub fn num_taps(&self) -> usize {
        self.target_layer_ids
            .as_ref()
            .map_or(USUAL_NUM_TAPS, Vec::len)
    }

    /// Width of the concatenated taps.
    pub fn taps_dim(&self) -> usize {
        self.num_taps() * self.hidden_size
    }

    /// Width of all query heads.
    pub fn q_dim(&self) -> usize {
        self.num_heads * self.head_dim
    }

    /// Width of all key (or value) heads.
    pub fn kv_dim(&self) -> usize {
        self.num_kv_heads * self.head_dim
    }

    /// Keys and values of its layer, which sees everything.
    pub fn kv_layout(&self) -> KvLayout {
        let shape = KvShape {
            num_kv_heads: self.num_kv_heads,
            head_dim: self.head_dim,
        };
        KvLayout::new([(shape, None)], 0)
    }

    /// Where the layer's tensors are named.
    pub(in crate::drafter) fn layer_prefix(&self) -> &'static str {
        match self.packaging {
            Packaging::Speculators => "layers.0",
            _ => "midlayer",
        }
    }

    pub(super) fn tensors(&self) -> Vec<(String, Vec<usize>)> {
        let (hidden, inter) = (self.hidden_size, self.intermediate_size);
        let (q_dim, kv_dim) = (self.q_dim(), self.kv_dim());
        let prefix = self.layer_prefix();
        let mut tensors: Vec<(String, Vec<usize>)> = [
            ("hidden_norm.weight", vec![hidden]),
            ("input_layernorm.weight", vec![hidden]),
            ("post_attention_layernorm.weight", vec![hidden]),
            ("self_attn.q_proj.weight", vec![q_dim, 2 * hidden]),
            ("self_attn.k_proj.weight", vec![kv_dim, 2 * hidden]),
            ("self_attn.v_proj.weight", vec![kv_dim, 2 * hidden]),
            ("self_attn.o_proj.weight", vec![hidden, q_dim]),
            ("mlp.gate_proj.weight", vec![inter, hidden]),
            ("mlp.up_proj.weight", vec![inter, hidden]),
            ("mlp.down_proj.weight", vec![hidden, inter]),
        ]
        .into_iter()
        .map(|(name, shape)| (format!("{prefix}.{name}"), shape))
        .collect();
        tensors.extend([
            ("fc.weight".to_owned(), vec![hidden, self.taps_dim()]),
            ("norm.weight".to_owned(), vec![hidden]),
            (
                "lm_head.weight".to_owned(),
                vec![self.draft_vocab_size, hidden],
            ),
        ]);
        if self.has_offsets {
            tensors.push((OFFSETS.to_owned(), vec![self.draft_vocab_size]));
        }
        if let Some(vocab_size) = self.vocab_size.filter(|_| self.has_embedding) {
            tensors.push(("embed_tokens.weight".to_owned(), vec![vocab_size, hidden]));
        }
        tensors
    }

    pub(in crate::drafter) fn copies(&self) -> &'static [&'static str] {
        // Which target ids are covered: only training asks.
        &["t2d"]
    }
}
