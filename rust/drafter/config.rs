//! What a drafter checkpoint is: read off its `config.json` and checked against its tensors.
//!
//! In: a directory in z-lab's DFlash or DFlash2 format. Out: a [`DrafterConfig`] that is consistent in itself; whether
//! it fits a target is `pairing`'s business. Published files keep some keys at the top level and some inside
//! `dflash_config`, so both are read and must not disagree. The architecture's name and the tensors must tell of the
//! same method and every tensor must be used: a drafter run without one of its parts drafts badly and says nothing.

use std::collections::BTreeSet;
use std::path::Path;

use serde_json::{Value, json};

use super::method::{Method, SelectorConfig};
use crate::cache::pages::KvShape;
use crate::error::{ConfigError, Error};
use crate::kernels::draft_select::LogitShape;
use crate::kernels::paths::MAX_PATH_ROWS;
use crate::model::config::RopeConfig;
use crate::model::config_file::{ConfigFile, Section};
use crate::model::families;
use crate::weights::Checkpoint;

/// Largest block: its rows, anchor included, make one path of a pass.
const MAX_BLOCK_SIZE: usize = MAX_PATH_ROWS;
/// Most layers; published drafters have up to six.
const MAX_LAYERS: usize = 1_000;

/// A drafter's config.
#[derive(Clone, Debug, PartialEq)]
pub struct DrafterConfig {
    /// Which drafter, with what only it has.
    pub method: Method,
    /// Width of the residual stream, the target's too.
    pub hidden_size: usize,
    /// Width of the MLP.
    pub intermediate_size: usize,
    /// One entry per layer, first to last.
    pub layers: Vec<DraftLayerConfig>,
    /// Query heads.
    pub num_heads: usize,
    /// Key and value heads; divides `num_heads`.
    pub num_kv_heads: usize,
    /// Width of a head.
    pub head_dim: usize,
    /// Epsilon of every RMS norm.
    pub rms_norm_eps: f32,
    /// Rotary embedding over the whole head, with the drafter's own base.
    pub rope: RopeConfig,
    /// Rows fed per draft: the anchor token and `block_size - 1` masks, each of which predicts the token in its place.
    pub block_size: usize,
    /// Token whose embedding stands for a position to be drafted.
    pub mask_token_id: usize,
    /// Target layers whose outputs the drafter reads, 0-based, in the order of `fc`'s columns; as in the file.
    pub target_layer_ids: Vec<i64>,
    /// Vocabulary of the target the drafter was made for, where the file says.
    pub vocab_size: Option<usize>,
    /// Layers of the target the drafter was made for, where the file says.
    pub num_target_layers: Option<usize>,
    /// Factor on the embeddings of the block's rows.
    pub input_embedding_scale: f32,
    /// What happens to the head's logits before probabilities are read off them.
    pub logit_shape: LogitShape,
}

/// One layer of a drafter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DraftLayerConfig {
    /// Whether a row sees only the rows of its block up to itself.
    pub causal: bool,
    /// A row at position p sees context positions `> p - window`; all when `None`.
    pub window: Option<usize>,
}

impl DrafterConfig {
    /// Reads the drafter in `dir` and checks its tensors' names and shapes, without reading their values.
    ///
    /// # Errors
    /// [`crate::error::DrafterError`] when the kind of drafter is not served or name and tensors disagree,
    /// [`ConfigError`] for a key, [`crate::error::CheckpointError`] for a tensor that is missing, extra or of another
    /// shape.
    pub fn read(dir: &Path) -> Result<Self, Error> {
        let file = ConfigFile::read(&dir.join("config.json"))?;
        let keys = Keys::new(file.root())?;
        let checkpoint = Checkpoint::open(dir)?;
        let kind = super::method::detect(dir, &keys.root, &checkpoint)?;
        let config = Self::from_keys(&keys, kind)?;
        let tensors = config.tensors();
        checkpoint.check(&tensors)?;
        for (name, _) in &tensors {
            checkpoint.skip(name);
        }
        checkpoint.finish(&[])?;
        Ok(config)
    }

    /// Reads the drafter in `dir`, from its config alone when its weights are not there: enough to plan its memory.
    ///
    /// # Errors
    /// As for [`Self::read`].
    pub fn read_for_planning(dir: &Path) -> Result<Self, Error> {
        if Checkpoint::is_in(dir) {
            return Self::read(dir);
        }
        let file = ConfigFile::read(&dir.join("config.json"))?;
        let keys = Keys::new(file.root())?;
        let kind = super::method::by_name(dir, &keys.root)?;
        Ok(Self::from_keys(&keys, kind)?)
    }

    fn from_keys(keys: &Keys<'_>, kind: super::method::MethodKind) -> Result<Self, ConfigError> {
        let root = &keys.root;
        root.only("hidden_act", &[json!("silu")])?;
        root.only("attention_bias", &[json!(false)])?;
        for key in ["is_neox_style", "rope_is_neox_style"] {
            keys.at(key)?.only(key, &[json!(true)])?;
        }
        keys.at("attention_value_scale")?
            .only("attention_value_scale", &[json!(1), json!(1.0)])?;
        let vocab_size = root.optional_size("vocab_size")?;
        if let Some(vocab_size) = vocab_size {
            keys.at("draft_vocab_size")?
                .only("draft_vocab_size", &[json!(vocab_size)])?;
        }
        let (num_heads, head_dim) = (root.size("num_attention_heads")?, root.size("head_dim")?);
        let num_kv_heads = root.size("num_key_value_heads")?;
        if !num_heads.is_multiple_of(num_kv_heads) {
            return Err(root.invalid(
                "num_key_value_heads",
                format!("a divisor of num_attention_heads {num_heads}"),
            ));
        }
        if !head_dim.is_multiple_of(2) {
            return Err(root.invalid("head_dim", "an even number of channels"));
        }
        let hidden_size = root.size("hidden_size")?;
        let block_size = keys.size("block_size")?;
        if !(2..=MAX_BLOCK_SIZE).contains(&block_size) {
            return Err(keys.at("block_size")?.invalid(
                "block_size",
                "2..=64: the anchor and at least one draft, within one path",
            ));
        }
        Ok(Self {
            method: Method::read(keys, kind, hidden_size)?,
            hidden_size,
            intermediate_size: root.size("intermediate_size")?,
            layers: layers(keys)?,
            num_heads,
            num_kv_heads,
            head_dim,
            rms_norm_eps: root.positive("rms_norm_eps")? as f32,
            rope: rope(root, head_dim)?,
            block_size,
            mask_token_id: mask_token_id(keys)?,
            target_layer_ids: target_layer_ids(keys)?,
            vocab_size,
            num_target_layers: root.optional_size("num_target_layers")?,
            input_embedding_scale: keys.positive_or("input_embedding_scale", 1.0)?,
            logit_shape: LogitShape {
                multiplier: keys.positive_or("output_multiplier", 1.0)?,
                softcap: keys
                    .at("final_logit_softcapping")?
                    .optional_positive("final_logit_softcapping")?
                    .map(|cap| cap as f32),
            },
        })
    }

    /// Draft tokens that one block gives.
    pub fn max_draft_tokens(&self) -> usize {
        self.block_size - 1
    }

    /// Width of all query heads.
    pub fn q_dim(&self) -> usize {
        self.num_heads * self.head_dim
    }

    /// Width of all key (or value) heads.
    pub fn kv_dim(&self) -> usize {
        self.num_kv_heads * self.head_dim
    }

    /// Width of the concatenated taps.
    pub fn taps_dim(&self) -> usize {
        self.target_layer_ids.len() * self.hidden_size
    }

    /// Context keys and values of every layer, for sizing the cache.
    pub fn kv_shapes(&self) -> Vec<KvShape> {
        let shape = KvShape {
            num_kv_heads: self.num_kv_heads,
            head_dim: self.head_dim,
        };
        vec![shape; self.layers.len()]
    }

    /// Names of the matrices that layers multiply by: what a compressed checkpoint compresses. Codebooks are read row by
    /// row and stay as they are.
    pub fn linear_layers(&self) -> BTreeSet<String> {
        let matrices = self
            .tensors()
            .into_iter()
            .filter(|(name, shape)| shape.len() == 2 && name.ends_with(".weight"));
        matrices.map(|(name, _)| name).collect()
    }

    /// Name and shape of every tensor of this drafter.
    pub(super) fn tensors(&self) -> Vec<(String, Vec<usize>)> {
        let (hidden, inter) = (self.hidden_size, self.intermediate_size);
        let (q_dim, kv_dim) = (self.q_dim(), self.kv_dim());
        let mut tensors = vec![
            ("fc.weight".to_owned(), vec![hidden, self.taps_dim()]),
            ("hidden_norm.weight".to_owned(), vec![hidden]),
            ("norm.weight".to_owned(), vec![hidden]),
        ];
        let in_layer = [
            ("input_layernorm.weight", vec![hidden]),
            ("post_attention_layernorm.weight", vec![hidden]),
            ("self_attn.q_proj.weight", vec![q_dim, hidden]),
            ("self_attn.k_proj.weight", vec![kv_dim, hidden]),
            ("self_attn.v_proj.weight", vec![kv_dim, hidden]),
            ("self_attn.o_proj.weight", vec![hidden, q_dim]),
            ("self_attn.q_norm.weight", vec![self.head_dim]),
            ("self_attn.k_norm.weight", vec![self.head_dim]),
            ("mlp.gate_proj.weight", vec![inter, hidden]),
            ("mlp.up_proj.weight", vec![inter, hidden]),
            ("mlp.down_proj.weight", vec![hidden, inter]),
        ];
        let selector = self.method.selector();
        for i in 0..self.layers.len() {
            let place =
                |(name, shape): &(&str, Vec<usize>)| (format!("layers.{i}.{name}"), shape.clone());
            tensors.extend(in_layer.iter().map(place));
            tensors.extend(
                selector
                    .iter()
                    .flat_map(|s| s.layer_tensors(hidden))
                    .map(|t| place(&t)),
            );
        }
        if let Some(selector) = selector {
            tensors.extend(selector.tensors(hidden));
        }
        tensors
    }
}

/// A config's two nesting levels.
pub(super) struct Keys<'a> {
    pub(super) root: Section<'a>,
    nested: Option<Section<'a>>,
}

impl<'a> Keys<'a> {
    fn new(root: Section<'a>) -> Result<Self, ConfigError> {
        Ok(Self {
            nested: root.optional_section("dflash_config")?,
            root,
        })
    }

    /// The level that holds `key`; the nested one, where newer files keep such keys, when neither does.
    pub(super) fn at(&self, key: &str) -> Result<&Section<'a>, ConfigError> {
        let Some(nested) = &self.nested else {
            return Ok(&self.root);
        };
        match (self.root.get(key), nested.get(key)) {
            (Some(_), None) => Ok(&self.root),
            (Some(outer), Some(inner)) if outer != inner => {
                Err(nested.invalid(key, format!("what the top level says, {outer}")))
            }
            _ => Ok(nested),
        }
    }

    pub(super) fn size(&self, key: &str) -> Result<usize, ConfigError> {
        self.at(key)?.size(key)
    }

    fn positive_or(&self, key: &str, default: f32) -> Result<f32, ConfigError> {
        let value = self.at(key)?.optional_positive(key)?;
        Ok(value.map_or(default, |value| value as f32))
    }
}

fn mask_token_id(keys: &Keys<'_>) -> Result<usize, ConfigError> {
    let section = keys.at("mask_token_id")?;
    let value = section.get("mask_token_id").ok_or_else(|| {
        section.missing("mask_token_id", "the id that stands for a token to draft")
    })?;
    value
        .as_u64()
        .and_then(|id| u32::try_from(id).ok())
        .map(|id| id as usize)
        .ok_or_else(|| section.invalid("mask_token_id", "a token id"))
}

/// No default: the formula of early code is wrong for most published drafters, which all list their layers.
fn target_layer_ids(keys: &Keys<'_>) -> Result<Vec<i64>, ConfigError> {
    const KEY: &str = "target_layer_ids";
    let section = keys.at(KEY)?;
    let values = section.optional_array(KEY)?.ok_or_else(|| {
        section.missing(
            KEY,
            "the 0-based target layers whose outputs the drafter reads",
        )
    })?;
    let ids: Option<Vec<i64>> = values.iter().map(Value::as_i64).collect();
    ids.filter(|ids| !ids.is_empty())
        .ok_or_else(|| section.invalid(KEY, "an array of at least one layer index"))
}

/// The drafter's own rotary embedding; a partial rotary factor copied over from the target's config does not apply.
fn rope(root: &Section<'_>, head_dim: usize) -> Result<RopeConfig, ConfigError> {
    match root.optional_section("rope_parameters")? {
        Some(parameters) => {
            let base = match parameters.get("rope_theta") {
                Some(_) => &parameters,
                None => root,
            };
            families::rope(base, Some(&parameters), head_dim)
        }
        None => families::rope(
            root,
            root.optional_section("rope_scaling")?.as_ref(),
            head_dim,
        ),
    }
}

/// Causality and windows, by the order of precedence that serving engines agree on: an explicit flag, else full
/// attention sees its whole block and sliding attention is causal in it.
fn layers(keys: &Keys<'_>) -> Result<Vec<DraftLayerConfig>, ConfigError> {
    let root = &keys.root;
    let num_layers = root.size("num_hidden_layers")?;
    if num_layers > MAX_LAYERS {
        return Err(root.invalid("num_hidden_layers", format!("at most {MAX_LAYERS}")));
    }
    let causal = match root.optional_flag("is_causal")? {
        Some(causal) => Some(causal),
        None => keys.at("causal")?.optional_flag("causal")?,
    };
    let Some(types) = root.optional_array("layer_types")? else {
        let swa = keys.at("use_swa")?;
        if swa.optional_flag("use_swa")? == Some(true) {
            let layer = DraftLayerConfig {
                causal: causal.unwrap_or(false),
                window: Some(keys.size("swa_window_size")?),
            };
            return Ok(vec![layer; num_layers]);
        }
        if root.optional_flag("use_sliding_window")? == Some(true) {
            return Err(root.missing("layer_types", "one name per layer, as windows are in use"));
        }
        let layer = DraftLayerConfig {
            causal: causal.unwrap_or(false),
            window: None,
        };
        return Ok(vec![layer; num_layers]);
    };
    if types.len() != num_layers {
        return Err(root.invalid(
            "layer_types",
            format!("an array of num_hidden_layers {num_layers} names"),
        ));
    }
    types
        .iter()
        .map(|name| match name.as_str() {
            Some("full_attention") => Ok(DraftLayerConfig {
                causal: causal.unwrap_or(false),
                window: None,
            }),
            Some("sliding_attention") => Ok(DraftLayerConfig {
                causal: causal.unwrap_or(true),
                window: Some(root.size("sliding_window")?),
            }),
            _ => Err(root.invalid(
                "layer_types",
                "an array of \"full_attention\" and \"sliding_attention\"",
            )),
        })
        .collect()
}

impl SelectorConfig {
    /// Tensors of one layer, named within it.
    fn layer_tensors(&self, hidden: usize) -> Vec<(&'static str, Vec<usize>)> {
        let base = vec![2, self.conv_kernel_size, hidden];
        let projection = vec![self.conv_delta_dim(hidden), hidden];
        vec![
            ("attention_conv.base_kernel", base.clone()),
            (
                "attention_conv.kernel_projection.weight",
                projection.clone(),
            ),
            ("mlp_conv.base_kernel", base),
            ("mlp_conv.kernel_projection.weight", projection),
        ]
    }

    fn tensors(&self, hidden: usize) -> Vec<(String, Vec<usize>)> {
        [
            ("hidden_projection.weight", vec![self.rank, hidden]),
            ("predecessor_codebook", vec![self.vocab_size, self.rank]),
            ("successor_codebook", vec![self.vocab_size, self.rank]),
        ]
        .map(|(name, shape)| (format!("candidate_selector.{name}"), shape))
        .into()
    }
}

#[cfg(test)]
mod tests;
