//! A drafter's weights, read once from its checkpoint. Embedding and LM head are the target's and not among them.

use std::path::Path;

use super::config::DrafterConfig;
use super::method::SelectorConfig;
use crate::device::Buffer;
use crate::error::CheckpointError;
use crate::kernels::bf16_matmul::PackedBf16;
use crate::options::WeightFormat;
use crate::weights::{Checkpoint, Linear};

type Result<T, E = CheckpointError> = std::result::Result<T, E>;

/// All weights of a drafter.
pub(super) struct DrafterWeights {
    /// `[hidden_size, num_taps * hidden_size]`.
    pub(super) fc: Linear,
    /// Weight of the norm after `fc`.
    pub(super) hidden_norm: Buffer<f32>,
    /// First to last layer.
    pub(super) layers: Vec<LayerWeights>,
    /// Weight of the norm before the target's LM head.
    pub(super) final_norm: Buffer<f32>,
    /// DFlash2's selector.
    pub(super) selector: Option<SelectorWeights>,
}

/// Weights of one layer.
pub(super) struct LayerWeights {
    pub(super) input_norm: Buffer<f32>,
    pub(super) q_proj: Linear,
    pub(super) k_proj: Linear,
    pub(super) v_proj: Linear,
    pub(super) o_proj: Linear,
    pub(super) q_norm: Buffer<f32>,
    pub(super) k_norm: Buffer<f32>,
    /// DFlash2's convolution around attention.
    pub(super) attention_conv: Option<ConvWeights>,
    pub(super) post_attention_norm: Buffer<f32>,
    pub(super) gate_proj: Linear,
    pub(super) up_proj: Linear,
    pub(super) down_proj: Linear,
    /// DFlash2's convolution around the MLP.
    pub(super) mlp_conv: Option<ConvWeights>,
}

/// Weights of the two convolutions around a sublayer.
pub(super) struct ConvWeights {
    /// `[2 sides, kernel_size, hidden_size]`.
    pub(super) base: Buffer<f32>,
    /// Predicts what is added to `base`, per row and group.
    pub(super) projection: Linear,
    pub(super) kernel_size: usize,
    pub(super) group_size: usize,
}

/// Weights of the candidate selector. Codebooks are read one row at a time, which a tile keeps within 16 rows.
pub(super) struct SelectorWeights {
    /// `[rank, hidden_size]`.
    pub(super) hidden_projection: Linear,
    /// `[vocab_size, rank]`.
    pub(super) predecessor: PackedBf16,
    /// `[vocab_size, rank]`.
    pub(super) successor: PackedBf16,
    pub(super) top_k: usize,
}

impl DrafterWeights {
    /// Reads the weights of `config` from `dir`.
    ///
    /// # Errors
    /// [`CheckpointError`] when a tensor is missing, extra, or of another shape or dtype.
    pub(super) fn load(dir: &Path, config: &DrafterConfig) -> Result<Self> {
        let checkpoint = Checkpoint::open(dir)?;
        let loader = Loader {
            checkpoint: &checkpoint,
            config,
        };
        let weights = Self {
            fc: loader.linear("fc", config.hidden_size, config.taps_dim())?,
            hidden_norm: loader.norm("hidden_norm", config.hidden_size)?,
            layers: (0..config.layers.len())
                .map(|i| loader.layer(i))
                .collect::<Result<_>>()?,
            final_norm: loader.norm("norm", config.hidden_size)?,
            selector: config
                .method
                .selector()
                .map(|selector| loader.selector(selector))
                .transpose()?,
        };
        checkpoint.finish(&[])?;
        Ok(weights)
    }

    /// Bytes of all weights in memory.
    pub(super) fn num_bytes(&self) -> usize {
        let vector = |v: &Buffer<f32>| v.len() * size_of::<f32>();
        let selector = self.selector.as_ref().map_or(0, |s| {
            s.hidden_projection.num_bytes() + s.predecessor.num_bytes() + s.successor.num_bytes()
        });
        let layers: usize = self.layers.iter().map(LayerWeights::num_bytes).sum();
        self.fc.num_bytes()
            + vector(&self.hidden_norm)
            + vector(&self.final_norm)
            + layers
            + selector
    }
}

impl LayerWeights {
    fn num_bytes(&self) -> usize {
        let matrices = [
            &self.q_proj,
            &self.k_proj,
            &self.v_proj,
            &self.o_proj,
            &self.gate_proj,
            &self.up_proj,
            &self.down_proj,
        ];
        let norms = [
            &self.input_norm,
            &self.post_attention_norm,
            &self.q_norm,
            &self.k_norm,
        ];
        let convs = self.attention_conv.iter().chain(&self.mlp_conv);
        let vectors = norms
            .into_iter()
            .chain(convs.clone().map(|conv| &conv.base));
        matrices.map(Linear::num_bytes).iter().sum::<usize>()
            + convs.map(|conv| conv.projection.num_bytes()).sum::<usize>()
            + vectors.map(|v| v.len() * size_of::<f32>()).sum::<usize>()
    }
}

struct Loader<'a> {
    checkpoint: &'a Checkpoint,
    config: &'a DrafterConfig,
}

impl Loader<'_> {
    fn layer(&self, i: usize) -> Result<LayerWeights> {
        let config = self.config;
        let (hidden, inter) = (config.hidden_size, config.intermediate_size);
        let (q_dim, kv_dim) = (config.q_dim(), config.kv_dim());
        let name = |part: &str| format!("layers.{i}.{part}");
        let conv = |part: &str| {
            config
                .method
                .selector()
                .map(|selector| self.conv(&name(part), selector))
                .transpose()
        };
        Ok(LayerWeights {
            input_norm: self.norm(&name("input_layernorm"), hidden)?,
            q_proj: self.linear(&name("self_attn.q_proj"), q_dim, hidden)?,
            k_proj: self.linear(&name("self_attn.k_proj"), kv_dim, hidden)?,
            v_proj: self.linear(&name("self_attn.v_proj"), kv_dim, hidden)?,
            o_proj: self.linear(&name("self_attn.o_proj"), hidden, q_dim)?,
            q_norm: self.norm(&name("self_attn.q_norm"), config.head_dim)?,
            k_norm: self.norm(&name("self_attn.k_norm"), config.head_dim)?,
            attention_conv: conv("attention_conv")?,
            post_attention_norm: self.norm(&name("post_attention_layernorm"), hidden)?,
            gate_proj: self.linear(&name("mlp.gate_proj"), inter, hidden)?,
            up_proj: self.linear(&name("mlp.up_proj"), inter, hidden)?,
            down_proj: self.linear(&name("mlp.down_proj"), hidden, inter)?,
            mlp_conv: conv("mlp_conv")?,
        })
    }

    fn conv(&self, name: &str, selector: &SelectorConfig) -> Result<ConvWeights> {
        let hidden = self.config.hidden_size;
        Ok(ConvWeights {
            base: self.checkpoint.tensor_f32(
                &format!("{name}.base_kernel"),
                &[2, selector.conv_kernel_size, hidden],
            )?,
            projection: self.linear(
                &format!("{name}.kernel_projection"),
                selector.conv_delta_dim(hidden),
                hidden,
            )?,
            kernel_size: selector.conv_kernel_size,
            group_size: selector.conv_group_size,
        })
    }

    fn selector(&self, selector: &SelectorConfig) -> Result<SelectorWeights> {
        let projection = "candidate_selector.hidden_projection";
        let hidden_projection = self.linear(projection, selector.rank, self.config.hidden_size)?;
        let codebook = |side: &str| {
            let name = format!("candidate_selector.{side}_codebook");
            self.checkpoint
                .matrix_bf16(&name, [selector.vocab_size, selector.rank])
        };
        Ok(SelectorWeights {
            hidden_projection,
            predecessor: codebook("predecessor")?,
            successor: codebook("successor")?,
            top_k: selector.top_k,
        })
    }

    fn linear(&self, name: &str, out_features: usize, in_features: usize) -> Result<Linear> {
        let name = format!("{name}.weight");
        let format = WeightFormat::Auto;
        Linear::load(self.checkpoint, &name, out_features, in_features, format)
    }

    fn norm(&self, name: &str, width: usize) -> Result<Buffer<f32>> {
        self.checkpoint.vector_f32(&format!("{name}.weight"), width)
    }
}
