//! What a decoder is, as data: sizes, layer kinds, rotary frequencies, stop ids.
//!
//! In: `config.json` and `generation_config.json` of a model directory. Out: a [`ModelConfig`] that names no family;
//! everything above this module asks the data (`output_gate`, `norms_add_one`, ...), never an architecture name. Sizes
//! are checked here once (positive, dividing each other where heads share), so layers may rely on them.

use std::path::Path;

use super::families;
use super::tensor_role::WeightNames;
use crate::error::ConfigError;

/// A decoder's config.
#[derive(Clone, Debug, PartialEq)]
pub struct ModelConfig {
    /// Architecture name in `config.json`, for reports.
    pub architecture: String,
    /// How checkpoints of this architecture name their tensors.
    pub weight_names: WeightNames,
    /// Rows of the embedding, padding included.
    pub vocab_size: usize,
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// Width of the MLP.
    pub intermediate_size: usize,
    /// Longest context the model was made for.
    pub max_position_embeddings: usize,
    /// Epsilon of every RMS norm.
    pub rms_norm_eps: f32,
    /// Whether the LM head is the embedding.
    pub tie_word_embeddings: bool,
    /// One entry per layer, first to last.
    pub layers: Vec<LayerConfig>,
    /// Rotary embedding of attention layers.
    pub rope: RopeConfig,
    /// Whether norm weights are stored as the difference from one (the Gated-DeltaNet output norm never is).
    pub norms_add_one: bool,
    /// Sizes of attention layers.
    pub attention: AttentionConfig,
    /// Sizes of Gated-DeltaNet layers; `None` when there are none.
    pub gdn: Option<GdnConfig>,
    /// Ids that end a turn: the union of both files, sorted.
    pub eos_token_ids: Vec<u32>,
    /// Ids that may never be emitted, sorted.
    pub suppress_tokens: Vec<u32>,
}

/// One decoder layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LayerConfig {
    /// What mixes token positions.
    pub mixer: MixerKind,
}

/// The part of a layer that mixes token positions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MixerKind {
    /// Softmax attention over all earlier positions.
    Attention,
    /// Gated DeltaNet: a recurrent state.
    GatedDelta,
}

/// Sizes of softmax attention.
#[derive(Clone, Debug, PartialEq)]
pub struct AttentionConfig {
    /// Query heads.
    pub num_heads: usize,
    /// Key and value heads; divides `num_heads`.
    pub num_kv_heads: usize,
    /// Width of a head.
    pub head_dim: usize,
    /// Whether `q_proj` holds, per head, a query and then a gate whose sigmoid multiplies the head's output.
    pub output_gate: bool,
    /// Whether queries and keys pass an RMS norm before rotation.
    pub qk_norm: bool,
    /// Factor on query-key products.
    pub scale: f32,
}

impl AttentionConfig {
    /// Rows of `q_proj`: queries, and gates where there are any.
    pub fn q_proj_rows(&self) -> usize {
        self.num_heads * self.head_dim * if self.output_gate { 2 } else { 1 }
    }

    /// Width of all query heads.
    pub fn q_dim(&self) -> usize {
        self.num_heads * self.head_dim
    }

    /// Width of all key (or value) heads.
    pub fn kv_dim(&self) -> usize {
        self.num_kv_heads * self.head_dim
    }
}

/// Sizes of Gated DeltaNet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GdnConfig {
    /// Query and key heads; divides `num_value_heads`.
    pub num_key_heads: usize,
    /// Value heads, each with a state of `key_dim` x `value_dim`.
    pub num_value_heads: usize,
    /// Width of a key head.
    pub key_dim: usize,
    /// Width of a value head.
    pub value_dim: usize,
    /// Tokens the causal convolution sees, the current one included.
    pub conv_kernel: usize,
}

impl GdnConfig {
    /// Channels of the convolution: all queries, all keys, all values.
    pub fn conv_channels(&self) -> usize {
        2 * self.num_key_heads * self.key_dim + self.num_value_heads * self.value_dim
    }

    /// Width of all value heads.
    pub fn value_width(&self) -> usize {
        self.num_value_heads * self.value_dim
    }
}

/// Rotary embedding.
#[derive(Clone, Debug, PartialEq)]
pub struct RopeConfig {
    /// Base of the frequencies.
    pub theta: f64,
    /// Leading channels of a head that are rotated, in pairs `(j, j + rotary_dim / 2)`.
    pub rotary_dim: usize,
    /// Change of the frequencies for long contexts.
    pub scaling: RopeScaling,
}

/// Change of rotary frequencies for contexts longer than those of pre-training.
#[derive(Clone, Debug, PartialEq)]
pub enum RopeScaling {
    /// None.
    None,
    /// Llama 3.1: low frequencies divided by `factor`, high ones kept, a ramp between.
    Llama3 {
        /// Divisor of low frequencies.
        factor: f32,
        /// Turns over the original context below which a frequency is low.
        low_freq_factor: f32,
        /// Turns over the original context above which a frequency is high.
        high_freq_factor: f32,
        /// Context of pre-training.
        original_max_position_embeddings: usize,
    },
    /// YaRN: frequencies of few turns over the original context divided by `factor`, those of many kept, a ramp over
    /// the pairs between.
    Yarn {
        /// Divisor of low frequencies.
        factor: f32,
        /// Turns from which a frequency is kept.
        beta_fast: f32,
        /// Turns down to which it is divided.
        beta_slow: f32,
        /// Context of pre-training.
        original_max_position_embeddings: usize,
        /// Factor on rotated queries and keys each.
        attention_factor: f32,
    },
}

impl RopeConfig {
    /// Angle per position of each rotated pair, `rotary_dim / 2` of them, computed in fp32 throughout as the reference
    /// implementation does: other precisions shift angles visibly at large positions.
    pub fn inverse_frequencies(&self) -> Vec<f32> {
        let theta = self.theta as f32;
        (0..self.rotary_dim / 2)
            .map(|j| {
                let exponent = (2 * j) as f32 / self.rotary_dim as f32;
                let frequency = 1.0 / theta.powf(exponent);
                match self.scaling {
                    RopeScaling::Yarn { .. } => self.yarn(j, frequency),
                    _ => self.scaling.apply(frequency),
                }
            })
            .collect()
    }

    /// Factor on the products of rotated queries and keys when all channels of a head are rotated.
    pub fn score_factor(&self) -> f32 {
        match self.scaling {
            RopeScaling::Yarn {
                attention_factor, ..
            } => attention_factor * attention_factor,
            _ => 1.0,
        }
    }

    /// YaRN's frequency of pair `j`.
    fn yarn(&self, j: usize, frequency: f32) -> f32 {
        let RopeScaling::Yarn {
            factor,
            beta_fast,
            beta_slow,
            original_max_position_embeddings,
            ..
        } = self.scaling
        else {
            return frequency;
        };
        // The pair that makes so many turns over the original context.
        let pair = |num_turns: f32| {
            let wavelength = original_max_position_embeddings as f64 / f64::from(num_turns);
            let dim = self.rotary_dim as f64;
            dim * (wavelength / std::f64::consts::TAU).ln() / (2.0 * self.theta.ln())
        };
        let low = pair(beta_fast).floor().max(0.0) as f32;
        let high = pair(beta_slow).ceil().min(self.rotary_dim as f64 - 1.0) as f32;
        let width = if high == low { 1e-3 } else { high - low };
        let divided = ((j as f32 - low) / width).clamp(0.0, 1.0);
        frequency / factor * divided + frequency * (1.0 - divided)
    }
}

impl RopeScaling {
    fn apply(&self, frequency: f32) -> f32 {
        match *self {
            // YaRN goes by the pair, not by its frequency.
            Self::None | Self::Yarn { .. } => frequency,
            Self::Llama3 {
                factor,
                low_freq_factor,
                high_freq_factor,
                original_max_position_embeddings,
            } => {
                let context = original_max_position_embeddings as f32;
                let wavelength = std::f32::consts::TAU / frequency;
                if wavelength > context / low_freq_factor {
                    frequency / factor
                } else if wavelength < context / high_freq_factor {
                    frequency
                } else {
                    let smooth = (context / wavelength - low_freq_factor)
                        / (high_freq_factor - low_freq_factor);
                    (1.0 - smooth) * frequency / factor + smooth * frequency
                }
            }
        }
    }
}

impl ModelConfig {
    /// Reads `config.json` and, if there, `generation_config.json` of `dir`.
    ///
    /// # Errors
    /// [`ConfigError`] naming file, key, expected and got.
    pub fn read(dir: &Path) -> Result<Self, ConfigError> {
        families::read_config(dir)
    }

    /// Number of layers with a KV cache.
    pub fn num_attention_layers(&self) -> usize {
        self.num_layers_of(MixerKind::Attention)
    }

    /// Number of layers with a recurrent state.
    pub fn num_gdn_layers(&self) -> usize {
        self.num_layers_of(MixerKind::GatedDelta)
    }

    fn num_layers_of(&self, mixer: MixerKind) -> usize {
        self.layers.iter().filter(|l| l.mixer == mixer).count()
    }
}

#[cfg(test)]
mod tests;
