//! What a decoder is, as data: sizes, layer kinds, rotary frequencies, stop ids.
//!
//! In: `config.json` and `generation_config.json` of a model directory. Out: a [`ModelConfig`] that names no family;
//! everything above this module asks the data (`output_gate`, `post_norms`, ...), never an architecture name. Sizes
//! are checked here once (positive, dividing each other where heads share), so layers may rely on them.

use std::path::Path;

use super::families;
use super::tensor_role::WeightNames;
use crate::error::ConfigError;
use crate::kernels::draft_select::LogitShape;
use crate::kernels::gate::GateKind;

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
    /// Epsilon of every RMS norm but those of `post_norms`.
    pub rms_norm_eps: f32,
    /// Whether the LM head is the embedding.
    pub tie_word_embeddings: bool,
    /// One entry per layer, first to last.
    pub layers: Vec<LayerConfig>,
    /// Factor on embedding rows where they enter the first layer; a drafter's block takes it too.
    pub embedding_scale: f32,
    /// Whether embedding rows pass an RMS norm without weight before the first layer; a drafter takes them raw.
    pub embedding_norm: bool,
    /// Whether norm weights inside layers are stored as the difference from one (the Gated-DeltaNet output norm never is).
    pub layer_norms_add_one: bool,
    /// Likewise the weight of the norm before the LM head.
    pub final_norm_adds_one: bool,
    /// Norms behind the sublayers; `None` when their outputs are added as they are.
    pub post_norms: Option<PostNorms>,
    /// The function in the gated MLP.
    pub mlp_activation: MlpActivation,
    /// What becomes of the LM head's logits before they are probabilities; it keeps their order.
    pub logit_shape: LogitShape,
    /// Sizes of Gated-DeltaNet layers; `None` when there are none.
    pub gdn: Option<GdnConfig>,
    /// Ids that end a turn: the union of both files, sorted.
    pub eos_token_ids: Vec<u32>,
    /// Ids that may never be emitted, sorted.
    pub suppress_tokens: Vec<u32>,
}

/// The part of a decoder layer that mixes token positions.
#[derive(Clone, Debug, PartialEq)]
pub enum LayerConfig {
    /// Softmax attention over earlier positions.
    Attention(AttentionConfig),
    /// Gated DeltaNet: a recurrent state, of the sizes in [`ModelConfig::gdn`].
    GatedDelta,
}

/// Norms behind both sublayers: their outputs are normalised before they are added to the residual stream.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PostNorms {
    /// Epsilon of these norms.
    pub eps: f32,
    /// Whether a layer ends in a product of the residual stream with a scalar of its own.
    pub layer_scalar: bool,
}

/// The function in the gated MLP.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MlpActivation {
    /// `x * sigmoid(x)`.
    Silu,
    /// The Gaussian error linear unit with its tanh.
    GeluTanh,
}

impl MlpActivation {
    /// The kernel's function.
    pub fn gate_kind(self) -> GateKind {
        match self {
            Self::Silu => GateKind::SiluMultiply,
            Self::GeluTanh => GateKind::GeluTanhMultiply,
        }
    }
}

/// Softmax attention of one layer.
#[derive(Clone, Debug, PartialEq)]
pub struct AttentionConfig {
    /// Query heads.
    pub num_heads: usize,
    /// Key and value heads; divides `num_heads`.
    pub num_kv_heads: usize,
    /// Width of a head.
    pub head_dim: usize,
    /// Where the gate comes from whose sigmoid multiplies the heads' outputs.
    pub output_gate: OutputGate,
    /// RMS norm of queries and keys before rotation.
    pub qk_norm: QkNorm,
    /// What the values are.
    pub values: ValueSource,
    /// Rotary embedding; `None` leaves queries and keys as they are.
    pub rope: Option<RopeConfig>,
    /// A row at position p sees positions `> p - window`; all when `None`.
    pub window: Option<usize>,
    /// Factor on query-key products.
    pub scale: f32,
}

/// Where an output gate comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OutputGate {
    /// There is none.
    None,
    /// `q_proj` holds, per head, a query and then the gate.
    InQueryProjection,
    /// A projection of its own, `gate_proj`.
    OwnProjection,
}

/// RMS norm of each query and key head.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum QkNorm {
    /// There is none.
    None,
    /// Without weights.
    Weightless,
    /// With one weight for all query heads and one for all key heads.
    Weighted,
}

/// What the values of attention are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ValueSource {
    /// What `v_proj` gives.
    Projection,
    /// The same, each head normalised without a weight.
    NormedProjection,
    /// What `k_proj` gives, before the keys' own norm and rotation, each head normalised without a weight.
    NormedKeys,
}

impl AttentionConfig {
    /// Rows of `q_proj`: queries, and gates where there are any.
    pub fn q_proj_rows(&self) -> usize {
        self.num_heads * self.head_dim * self.q_proj_parts()
    }

    /// Vectors of a head in a row of `q_proj`: the query, and the gate where it is there too.
    pub fn q_proj_parts(&self) -> usize {
        match self.output_gate {
            OutputGate::InQueryProjection => 2,
            OutputGate::None | OutputGate::OwnProjection => 1,
        }
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
    /// Leading channels of a head over which frequencies are spread and pairs lie: `(j, j + rotary_dim / 2)`.
    pub rotary_dim: usize,
    /// Pairs that turn, from the first on; the others stay as they are.
    pub num_pairs: usize,
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
    /// Distance between the channels of a pair.
    pub fn pair_offset(&self) -> usize {
        self.rotary_dim / 2
    }

    /// Angle per position of each pair that turns, computed in fp32 throughout as the reference
    /// implementation does: other precisions shift angles visibly at large positions.
    pub fn inverse_frequencies(&self) -> Vec<f32> {
        let theta = self.theta as f32;
        (0..self.num_pairs)
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

    /// The layers with a KV cache, first to last.
    pub fn attention_layers(&self) -> impl Iterator<Item = &AttentionConfig> {
        self.layers.iter().filter_map(|layer| match layer {
            LayerConfig::Attention(attention) => Some(attention),
            LayerConfig::GatedDelta => None,
        })
    }

    /// Number of layers with a KV cache.
    pub fn num_attention_layers(&self) -> usize {
        self.attention_layers().count()
    }

    /// Number of layers with a recurrent state.
    pub fn num_gdn_layers(&self) -> usize {
        self.layers.len() - self.num_attention_layers()
    }

    /// The most that `width` is of any attention layer; 0 without one.
    pub fn widest_attention(&self, width: impl Fn(&AttentionConfig) -> usize) -> usize {
        self.attention_layers().map(width).max().unwrap_or(0)
    }
}

#[cfg(test)]
mod tests;
