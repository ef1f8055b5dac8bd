//! Config of a parallel drafter: DFlash, DFlash2 or DSpark, in any of their packagings.
//!
//! Published files keep some keys at the top level and some nested, so both are read and must not disagree.

use serde_json::json;

use super::format::{MethodKind, Packaging};
use super::heads::{ConfidenceConfig, DSparkConfig, MarkovConfig, MarkovKind, SelectorConfig};
use super::keys::{Keys, OFFSETS};
use super::layer_body::LayerBody;
use crate::cache::pages::KvShape;
use crate::error::ConfigError;
use crate::kernels::draft_select::LogitShape;
use crate::kernels::paths::MAX_PATH_ROWS;

/// Largest block: its rows, anchor included, make one path of a pass.
const MAX_BLOCK_SIZE: usize = MAX_PATH_ROWS;
/// Most layers; published drafters have up to six.
const MAX_LAYERS: usize = 1_000;

/// A parallel drafter: one forward over a block of rows, the anchor token and masks.
#[derive(Clone, Debug, PartialEq)]
pub struct BlockConfig {
    /// Which drafter, with what only it has.
    pub method: BlockMethod,
    /// Whose conventions the files follow.
    pub packaging: Packaging,
    /// Width of the residual stream, the target's too.
    pub hidden_size: usize,
    /// Width of the MLP.
    pub intermediate_size: usize,
    /// One entry per layer, first to last.
    pub layers: Vec<DraftLayerConfig>,
    /// What all layers are made of.
    pub body: LayerBody,
    /// Epsilon of every RMS norm but those of `body.post_norms`.
    pub rms_norm_eps: f32,
    /// Rows of the block it was trained with.
    pub block_size: usize,
    /// First row that predicts. Row 0 holds the anchor token: from 1 on a row predicts the token in its own place, from
    /// 0 on the token after it.
    pub first_row: usize,
    /// Token whose embedding stands for a position to be drafted.
    pub mask_token_id: usize,
    /// Target layers whose outputs the drafter reads, 0-based, in the order of `fc`'s columns.
    pub target_layer_ids: Vec<i64>,
    /// Vocabulary of the target the drafter was made for, where the file says.
    pub vocab_size: Option<usize>,
    /// Tokens it can draft, when they are a part of the vocabulary: it then has its own LM head.
    pub draft_vocab_size: Option<usize>,
    /// Layers of the target the drafter was made for, where the file says.
    pub num_target_layers: Option<usize>,
    /// Factor on the embeddings of the block's rows; the target's own where the file does not say.
    pub input_embedding_scale: Option<f32>,
    /// What happens to the head's logits before probabilities are read off them; the target's own where the file's
    /// format does not say.
    pub logit_shape: Option<LogitShape>,
}

/// One layer of a drafter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DraftLayerConfig {
    /// Whether a row sees only the rows of its block up to itself.
    pub causal: bool,
    /// A row at position p sees context positions `> p - window`; all when `None`.
    pub window: Option<usize>,
}

/// A parallel drafter's method, with the sizes that only it has.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum BlockMethod {
    /// Marginals per position.
    DFlash,
    /// Convolution inside the block and scores conditional on the candidate before.
    DFlash2(SelectorConfig),
    /// Logits that a low-rank head corrects by the token before.
    DSpark(DSparkConfig),
}

impl BlockConfig {
    pub(super) fn from_keys(keys: &Keys<'_>) -> Result<Self, ConfigError> {
        let body = &keys.body;
        body.only("attention_bias", &[json!(false)])?;
        for key in ["is_neox_style", "rope_is_neox_style"] {
            keys.at(key)?.only(key, &[json!(true)])?;
        }
        for key in ["attention_value_scale", "logit_scale"] {
            keys.at(key)?.only(key, &[json!(1), json!(1.0)])?;
        }
        keys.at("causal_head")?
            .only("causal_head", &[json!(false)])?;
        let vocab_size = body.optional_size("vocab_size")?;
        let hidden_size = body.size("hidden_size")?;
        let block_size = keys.size("block_size")?;
        if !(2..=MAX_BLOCK_SIZE).contains(&block_size) {
            return Err(keys.at("block_size")?.invalid(
                "block_size",
                "2..=64: the anchor and at least one draft, within one path",
            ));
        }
        let first_row = first_row(keys, block_size)?;
        let draft_vocab_size = keys.draft_vocab_size(vocab_size)?;
        if draft_vocab_size.is_some() && keys.format.packaging != Packaging::Speculators {
            return Err(keys.at("draft_vocab_size")?.invalid(
                "draft_vocab_size",
                format!("vocab_size {}", vocab_size.unwrap_or_default()),
            ));
        }
        let logit_shape = LogitShape {
            multiplier: keys.positive_or("output_multiplier", 1.0)?,
            softcap: keys
                .at("final_logit_softcapping")?
                .optional_positive("final_logit_softcapping")?
                .map(|cap| cap as f32),
        };
        Ok(Self {
            method: BlockMethod::read(keys, hidden_size, draft_vocab_size)?,
            packaging: keys.format.packaging,
            hidden_size,
            intermediate_size: body.size("intermediate_size")?,
            layers: layers(keys)?,
            body: LayerBody::read(keys)?,
            rms_norm_eps: body.positive("rms_norm_eps")? as f32,
            block_size,
            first_row,
            mask_token_id: mask_token_id(keys)?,
            target_layer_ids: target_layer_ids(keys)?,
            vocab_size,
            draft_vocab_size,
            num_target_layers: body.optional_size("num_target_layers")?,
            input_embedding_scale: keys
                .at("input_embedding_scale")?
                .optional_positive("input_embedding_scale")?
                .map(|scale| scale as f32),
            // The assistant has no keys for it, and its target's head.
            logit_shape: (keys.format.packaging != Packaging::MuseAssistant
                || logit_shape != LogitShape::PLAIN)
                .then_some(logit_shape),
        })
    }

    /// What was found, for a reader.
    pub(super) fn description(&self) -> String {
        let heads = match &self.method {
            BlockMethod::DFlash => String::new(),
            BlockMethod::DFlash2(selector) => format!(", selector of rank {}", selector.rank),
            BlockMethod::DSpark(dspark) => {
                let markov = match dspark.markov.map(|markov| (markov.kind, markov.rank)) {
                    None => "no Markov head".to_owned(),
                    Some((MarkovKind::Vanilla, rank)) => format!("Markov head of rank {rank}"),
                    Some((MarkovKind::Gated, rank)) => format!("gated Markov head of rank {rank}"),
                    Some((MarkovKind::Rnn { .. }, rank)) => {
                        format!("recurrent Markov head of rank {rank}")
                    }
                };
                let confidence = match dspark.confidence {
                    Some(_) => "confidence head",
                    None => "no confidence head",
                };
                format!(", {markov}, {confidence}")
            }
        };
        format!(
            "{} in {} format, block {}, first draft from row {}{heads}",
            self.method.title(),
            self.packaging.name(),
            self.block_size,
            self.first_row,
        )
    }

    /// Rows of a block that drafts `num_draft_tokens` tokens.
    pub fn num_rows(&self, num_draft_tokens: usize) -> usize {
        self.first_row + num_draft_tokens
    }

    /// Tokens that can be drafted, of a target with `vocab_size`.
    pub fn num_drafted_ids(&self, vocab_size: usize) -> usize {
        self.draft_vocab_size.unwrap_or(vocab_size)
    }

    /// Tensor that reads the taps.
    pub(in crate::drafter) fn fc_name(&self) -> &'static str {
        match self.packaging {
            Packaging::MuseAssistant => "encoder.fc.weight",
            _ => "fc.weight",
        }
    }

    /// Weight of the norm behind it.
    pub(in crate::drafter) fn hidden_norm_name(&self) -> &'static str {
        match self.packaging {
            Packaging::MuseAssistant => "encoder.output_norm_enc.weight",
            _ => "hidden_norm.weight",
        }
    }

    /// Width of the concatenated taps.
    pub fn taps_dim(&self) -> usize {
        self.target_layer_ids.len() * self.hidden_size
    }

    /// Context keys and values of a layer.
    pub fn kv_shape(&self) -> KvShape {
        KvShape {
            num_kv_heads: self.body.num_kv_heads,
            head_dim: self.body.head_dim,
        }
    }

    /// Name and shape of every tensor that is read.
    pub(super) fn tensors(&self) -> Vec<(String, Vec<usize>)> {
        let (hidden, inter) = (self.hidden_size, self.intermediate_size);
        let mut tensors = vec![
            (self.fc_name().to_owned(), vec![hidden, self.taps_dim()]),
            (self.hidden_norm_name().to_owned(), vec![hidden]),
            ("norm.weight".to_owned(), vec![hidden]),
        ];
        let in_layer = self.body.tensors(hidden, inter);
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
        match &self.method {
            BlockMethod::DFlash => {}
            BlockMethod::DFlash2(selector) => tensors.extend(selector.tensors(hidden)),
            BlockMethod::DSpark(dspark) => {
                tensors.extend(dspark.tensors(hidden, self.draft_vocab_size));
            }
        }
        if let Some(size) = self.draft_vocab_size {
            tensors.push(("lm_head.weight".to_owned(), vec![size, hidden]));
            tensors.push((OFFSETS.to_owned(), vec![size]));
        }
        tensors
    }

    /// Tensors that may be there and are not read: frozen copies of the target's, and what only training needs.
    pub(in crate::drafter) fn copies(&self) -> &'static [&'static str] {
        match (self.packaging, self.draft_vocab_size) {
            (Packaging::DeepSpec, _) => &["embed_tokens.weight", "lm_head.weight"],
            (Packaging::Speculators, None) => {
                &["embed_tokens.weight", "lm_head.weight", "t2d", OFFSETS]
            }
            (Packaging::Speculators, Some(_)) => &["embed_tokens.weight", "t2d"],
            _ => &[],
        }
    }
}

impl BlockMethod {
    /// The value of `method` in `speculative_config`.
    pub fn name(&self) -> &'static str {
        match self {
            Self::DFlash => "dflash",
            Self::DFlash2(_) => "dflash2",
            Self::DSpark(_) => "dspark",
        }
    }

    fn title(&self) -> &'static str {
        match self {
            Self::DFlash => "DFlash",
            Self::DFlash2(_) => "DFlash2",
            Self::DSpark(_) => "DSpark",
        }
    }

    /// Sizes of convolution and selector, where there are any.
    pub fn selector(&self) -> Option<&SelectorConfig> {
        match self {
            Self::DFlash2(selector) => Some(selector),
            _ => None,
        }
    }

    /// Sizes of the Markov head, where there is one.
    pub fn markov(&self) -> Option<&MarkovConfig> {
        match self {
            Self::DSpark(dspark) => dspark.markov.as_ref(),
            _ => None,
        }
    }

    /// What the confidence head reads, where there is one.
    pub fn confidence(&self) -> Option<ConfidenceConfig> {
        match self {
            Self::DSpark(dspark) => dspark.confidence,
            _ => None,
        }
    }

    /// Whether candidates can be scored given the one before them.
    pub fn has_conditional_scores(&self) -> bool {
        self.selector().is_some() || self.markov().is_some()
    }

    fn read(
        keys: &Keys<'_>,
        hidden_size: usize,
        draft_vocab_size: Option<usize>,
    ) -> Result<Self, ConfigError> {
        match keys.format.kind {
            MethodKind::DFlash2 => {
                if draft_vocab_size.is_some() {
                    let section = keys.at("draft_vocab_size")?;
                    return Err(section.invalid("draft_vocab_size", "the whole vocabulary"));
                }
                SelectorConfig::read(keys, hidden_size).map(Self::DFlash2)
            }
            MethodKind::DSpark => DSparkConfig::read(keys).map(Self::DSpark),
            _ => Ok(Self::DFlash),
        }
    }
}

/// DSpark's anchor row predicts, the others' does not, unless the file says otherwise: by a flag, or by counting fewer
/// drafts than the block has rows.
fn first_row(keys: &Keys<'_>, block_size: usize) -> Result<usize, ConfigError> {
    if let Some(from_anchor) = keys.flag("sample_from_anchor")? {
        return Ok(usize::from(!from_anchor));
    }
    if keys.format.kind != MethodKind::DSpark {
        return Ok(1);
    }
    let Some(num_drafts) = num_speculative_tokens(keys)? else {
        return Ok(0);
    };
    match block_size.checked_sub(num_drafts) {
        Some(first_row @ (0 | 1)) => Ok(first_row),
        _ => Err(keys.at("speculators_config")?.invalid(
            "speculators_config",
            format!("one with speculative_tokens {block_size}, as block_size, or one less"),
        )),
    }
}

/// Drafts per round that a speculators file states.
fn num_speculative_tokens(keys: &Keys<'_>) -> Result<Option<usize>, ConfigError> {
    let Some(config) = keys
        .at("speculators_config")?
        .optional_section("speculators_config")?
    else {
        return Ok(None);
    };
    let methods = config.optional_array("proposal_methods")?;
    let stated = methods.and_then(|methods| methods.first()?.get("speculative_tokens")?.as_u64());
    Ok(stated.map(|num_tokens| num_tokens as usize))
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
    let (key, counts_embedding) = match keys.format.packaging {
        Packaging::Speculators => ("aux_hidden_state_layer_ids", true),
        _ => ("target_layer_ids", false),
    };
    match keys.layer_ids(key, counts_embedding)? {
        Some(ids) => Ok(ids),
        None => Err(keys
            .at(key)?
            .missing(key, "the target layers whose outputs the drafter reads")),
    }
}

/// Causality and windows, by the order of precedence that serving engines agree on: an explicit flag, else full
/// attention sees its whole block and sliding attention is causal in it.
fn layers(keys: &Keys<'_>) -> Result<Vec<DraftLayerConfig>, ConfigError> {
    let body = &keys.body;
    let num_layers = body.size("num_hidden_layers")?;
    if num_layers > MAX_LAYERS {
        return Err(body.invalid("num_hidden_layers", format!("at most {MAX_LAYERS}")));
    }
    let causal = match body.optional_flag("is_causal")? {
        Some(causal) => Some(causal),
        None => keys.flag("causal")?,
    };
    let Some(types) = body.optional_array("layer_types")? else {
        if keys.flag("use_swa")? == Some(true) {
            let layer = DraftLayerConfig {
                causal: causal.unwrap_or(false),
                window: Some(keys.size("swa_window_size")?),
            };
            return Ok(vec![layer; num_layers]);
        }
        if body.optional_flag("use_sliding_window")? == Some(true) {
            return Err(body.missing("layer_types", "one name per layer, as windows are in use"));
        }
        let layer = DraftLayerConfig {
            causal: causal.unwrap_or(false),
            window: None,
        };
        return Ok(vec![layer; num_layers]);
    };
    if types.len() != num_layers {
        return Err(body.invalid(
            "layer_types",
            format!("an array of num_hidden_layers {num_layers} names"),
        ));
    }
    let sliding_causal = match (causal, keys.flag("sliding_window_non_causal")?) {
        (Some(causal), _) => causal,
        (None, Some(non_causal)) => !non_causal,
        // DFlash2 is bidirectional, whoever packed it.
        (None, None) => keys.format.kind != MethodKind::DFlash2,
    };
    types
        .iter()
        .map(|name| match name.as_str() {
            Some("full_attention") => Ok(DraftLayerConfig {
                causal: causal.unwrap_or(false),
                window: None,
            }),
            Some("sliding_attention") => Ok(DraftLayerConfig {
                causal: sliding_causal,
                window: Some(body.size("sliding_window")?),
            }),
            _ => Err(body.invalid(
                "layer_types",
                "an array of \"full_attention\" and \"sliding_attention\"",
            )),
        })
        .collect()
}
