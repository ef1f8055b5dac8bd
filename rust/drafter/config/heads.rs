//! Sizes of what parallel drafters put on their backbone: DFlash2's convolution and selector, DSpark's heads.

use serde_json::json;

use super::keys::Keys;
use crate::error::ConfigError;

/// A dot product per row, which the host computes.
pub(super) const CONFIDENCE_WEIGHT: &str = "confidence_head.proj.weight";

/// Sizes of DFlash2's in-block convolution and candidate selector.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SelectorConfig {
    /// Taps of the convolution, the row's own included.
    pub conv_kernel_size: usize,
    /// Channels that share a predicted kernel; divides the hidden size.
    pub conv_group_size: usize,
    /// Width of the codebooks.
    pub rank: usize,
    /// Candidates per position.
    pub top_k: usize,
    /// Rows of the codebooks.
    pub vocab_size: usize,
}

/// DSpark's heads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DSparkConfig {
    /// Correction by the token before; `None` in checkpoints that were trained without.
    pub markov: Option<MarkovConfig>,
    /// Estimates how likely a position's draft is accepted.
    pub confidence: Option<ConfidenceConfig>,
}

/// Sizes of a Markov head.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MarkovConfig {
    /// Width of the token's code.
    pub rank: usize,
    /// Rows of the code table.
    pub vocab_size: usize,
    /// How the code becomes a correction.
    pub kind: MarkovKind,
}

/// How a Markov head makes a correction of the code of the token before.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MarkovKind {
    /// The code itself.
    Vanilla,
    /// The code, gated by hidden state and code.
    Gated,
    /// A recurrent state over the path, fed with hidden state and code.
    Rnn {
        /// Whether its projection has a bias.
        has_bias: bool,
    },
}

/// What the confidence head reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ConfidenceConfig {
    /// Whether it reads the code of the token before beside the hidden state.
    pub with_markov: bool,
}

impl SelectorConfig {
    pub(super) fn read(keys: &Keys<'_>, hidden_size: usize) -> Result<Self, ConfigError> {
        let selector = Self {
            conv_kernel_size: keys.size("conv_kernel_size")?,
            conv_group_size: keys.size("conv_group_size")?,
            rank: keys.size("selector_rank")?,
            top_k: keys.size("selector_top_k")?,
            vocab_size: keys.body.size("vocab_size")?,
        };
        if !hidden_size.is_multiple_of(selector.conv_group_size) {
            return Err(keys.at("conv_group_size")?.invalid(
                "conv_group_size",
                format!("a divisor of hidden_size {hidden_size}"),
            ));
        }
        if selector.top_k > selector.vocab_size {
            return Err(keys.at("selector_top_k")?.invalid(
                "selector_top_k",
                format!("at most vocab_size {}", selector.vocab_size),
            ));
        }
        Ok(selector)
    }

    /// Values of a row's predicted kernels: two sides, all taps, all groups.
    pub fn conv_delta_dim(&self, hidden_size: usize) -> usize {
        2 * self.conv_kernel_size * hidden_size / self.conv_group_size
    }

    /// Tensors of one layer, named within it.
    pub(super) fn layer_tensors(&self, hidden: usize) -> Vec<(&'static str, Vec<usize>)> {
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

    pub(super) fn tensors(&self, hidden: usize) -> Vec<(String, Vec<usize>)> {
        [
            ("hidden_projection.weight", vec![self.rank, hidden]),
            ("predecessor_codebook", vec![self.vocab_size, self.rank]),
            ("successor_codebook", vec![self.vocab_size, self.rank]),
        ]
        .map(|(name, shape)| (format!("candidate_selector.{name}"), shape))
        .into()
    }
}

impl DSparkConfig {
    pub(super) fn read(keys: &Keys<'_>) -> Result<Self, ConfigError> {
        // A rank of 0 is how checkpoints say that they were trained without.
        let rank = match keys.at("markov_rank")?.get("markov_rank") {
            Some(rank) if *rank == json!(0) => None,
            _ => Some(keys.size("markov_rank")?),
        };
        let section = keys.at("markov_head_type")?;
        let kind = match section.optional_text("markov_head_type")? {
            Some("vanilla") | None => MarkovKind::Vanilla,
            Some("gated") => MarkovKind::Gated,
            Some("rnn") => MarkovKind::Rnn {
                has_bias: keys.holds("markov_head.joint_proj.bias"),
            },
            Some(_) => {
                let expected = "\"vanilla\", \"gated\" or \"rnn\"";
                return Err(section.invalid("markov_head_type", expected));
            }
        };
        let has_confidence = match keys.flag("enable_confidence_head")? {
            Some(flag) => flag,
            None => keys.holds("confidence_head.proj.weight"),
        };
        let with_markov = keys.flag("confidence_head_with_markov")?.unwrap_or(true);
        Ok(Self {
            markov: rank
                .map(|rank| {
                    let vocab_size = keys.body.size("vocab_size")?;
                    Ok(MarkovConfig {
                        rank,
                        vocab_size,
                        kind,
                    })
                })
                .transpose()?,
            confidence: has_confidence.then_some(ConfidenceConfig {
                with_markov: with_markov && rank.is_some(),
            }),
        })
    }

    pub(super) fn tensors(
        &self,
        hidden: usize,
        draft_vocab_size: Option<usize>,
    ) -> Vec<(String, Vec<usize>)> {
        let mut tensors = Vec::new();
        if let Some(MarkovConfig {
            rank,
            vocab_size,
            kind,
        }) = self.markov
        {
            let num_drafted_ids = draft_vocab_size.unwrap_or(vocab_size);
            tensors.extend([
                ("markov_head.markov_w1.weight", vec![vocab_size, rank]),
                ("markov_head.markov_w2.weight", vec![num_drafted_ids, rank]),
            ]);
            match kind {
                MarkovKind::Vanilla => {}
                MarkovKind::Gated => tensors.extend([
                    ("markov_head.gate_proj.weight", vec![rank, hidden + rank]),
                    ("markov_head.gate_proj.bias", vec![rank]),
                ]),
                MarkovKind::Rnn { has_bias } => {
                    let shape = vec![3 * rank, 2 * rank + hidden];
                    tensors.push(("markov_head.joint_proj.weight", shape));
                    if has_bias {
                        tensors.push(("markov_head.joint_proj.bias", vec![3 * rank]));
                    }
                }
            }
        }
        if let Some(confidence) = self.confidence {
            let code = match (confidence.with_markov, self.markov) {
                (true, Some(markov)) => markov.rank,
                _ => 0,
            };
            tensors.extend([
                (CONFIDENCE_WEIGHT, vec![1, hidden + code]),
                ("confidence_head.proj.bias", vec![1]),
            ]);
        }
        let named = |(name, shape): (&str, Vec<usize>)| (name.to_owned(), shape);
        tensors.into_iter().map(named).collect()
    }
}
