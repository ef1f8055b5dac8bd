//! Where the published formats keep their keys, and the keys that several drafters share.

use serde_json::Value;

use super::format::{Format, Packaging};
use crate::error::ConfigError;
use crate::model::config::RopeConfig;
use crate::model::config_file::{Section, shown};
use crate::model::families::rotation::{OF_DRAFTERS, rope, rope_scaling, rope_sections};
use crate::weights::Checkpoint;

/// Offsets from ids of a reduced vocabulary to the target's.
pub(in crate::drafter) const OFFSETS: &str = "d2t";

/// A config's nesting levels, and the tensors beside it.
pub(super) struct Keys<'a> {
    pub(super) format: Format,
    /// The level with the decoder's sizes.
    pub(super) body: Section<'a>,
    /// Levels that may hold all other keys, outermost first.
    levels: Vec<Section<'a>>,
    /// `None` when a memory is planned without weights.
    tensors: Option<&'a Checkpoint>,
}

impl<'a> Keys<'a> {
    pub(super) fn new(
        root: Section<'a>,
        format: Format,
        tensors: Option<&'a Checkpoint>,
    ) -> Result<Self, ConfigError> {
        let mut levels = vec![root.clone()];
        for nested in ["dflash_config", "eagle_config"] {
            levels.extend(root.optional_section(nested)?);
        }
        let body = match format.packaging {
            Packaging::Speculators => root.section("transformer_layer_config")?,
            _ => root,
        };
        Ok(Self {
            format,
            body,
            levels,
            tensors,
        })
    }

    /// The level that holds `key`; the innermost, where newer files keep such keys, when none does. Levels that both
    /// hold it must agree.
    pub(super) fn at(&self, key: &str) -> Result<&Section<'a>, ConfigError> {
        let mut found: Option<&Section<'a>> = None;
        for level in &self.levels {
            match (found.and_then(|outer| outer.get(key)), level.get(key)) {
                (Some(outer), Some(inner)) if outer != inner => {
                    return Err(
                        level.invalid(key, format!("what the top level says, {}", shown(outer)))
                    );
                }
                (_, Some(_)) => found = Some(level),
                (_, None) => {}
            }
        }
        let innermost = self.levels.last().unwrap_or(&self.body);
        Ok(found.unwrap_or(innermost))
    }

    pub(super) fn size(&self, key: &str) -> Result<usize, ConfigError> {
        self.at(key)?.size(key)
    }

    pub(super) fn flag(&self, key: &str) -> Result<Option<bool>, ConfigError> {
        self.at(key)?.optional_flag(key)
    }

    pub(super) fn positive_or(&self, key: &str, default: f32) -> Result<f32, ConfigError> {
        let value = self.at(key)?.optional_positive(key)?;
        Ok(value.map_or(default, |value| value as f32))
    }

    /// Whether the checkpoint holds tensor `name`.
    pub(super) fn holds(&self, name: &str) -> bool {
        self.tensors.is_some_and(|tensors| tensors.contains(name))
    }

    /// Refuses a flag that is set.
    pub(super) fn refuse(&self, key: &str) -> Result<(), ConfigError> {
        self.at(key)?.only(key, &[Value::Bool(false)])
    }

    /// Query heads, key and value heads, width of a head.
    pub(super) fn heads(&self) -> Result<(usize, usize, usize), ConfigError> {
        let body = &self.body;
        let num_heads = body.size("num_attention_heads")?;
        let head_dim = match body.optional_size("head_dim")? {
            Some(head_dim) => head_dim,
            None => body.size("hidden_size")? / num_heads,
        };
        let num_kv_heads = body
            .optional_size("num_key_value_heads")?
            .unwrap_or(num_heads);
        if !num_heads.is_multiple_of(num_kv_heads) {
            return Err(body.invalid(
                "num_key_value_heads",
                format!("a divisor of num_attention_heads {num_heads}"),
            ));
        }
        if head_dim == 0 || !head_dim.is_multiple_of(2) {
            return Err(body.invalid("head_dim", "an even number of channels"));
        }
        Ok((num_heads, num_kv_heads, head_dim))
    }

    /// The drafter's own rotary embedding over the whole head; a partial rotary factor copied over from the target's
    /// config does not apply.
    pub(super) fn rope(&self, head_dim: usize) -> Result<RopeConfig, ConfigError> {
        let (base, scaling) = rope_sections(&self.body)?;
        let scaling = rope_scaling(scaling.as_ref(), &OF_DRAFTERS)?;
        rope(&base, scaling, head_dim)
    }

    /// Ids of a reduced vocabulary, when it is one.
    pub(super) fn draft_vocab_size(
        &self,
        vocab_size: Option<usize>,
    ) -> Result<Option<usize>, ConfigError> {
        let size = self
            .at("draft_vocab_size")?
            .optional_size("draft_vocab_size")?;
        Ok(size.filter(|&size| Some(size) != vocab_size))
    }

    /// The 0-based target layers at `key`, which counts the embedding's output first where `counts_embedding`.
    pub(super) fn layer_ids(
        &self,
        key: &str,
        counts_embedding: bool,
    ) -> Result<Option<Vec<i64>>, ConfigError> {
        let section = self.at(key)?;
        let Some(values) = section.optional_array(key)? else {
            return Ok(None);
        };
        let ids: Option<Vec<i64>> = values.iter().map(Value::as_i64).collect();
        let ids = ids
            .filter(|ids| !ids.is_empty())
            .ok_or_else(|| section.invalid(key, "an array of at least one layer index"))?;
        let first = i64::from(counts_embedding);
        Ok(Some(
            ids.into_iter().map(|id| id.saturating_sub(first)).collect(),
        ))
    }
}
