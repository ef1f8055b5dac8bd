//! The weights of a decoder, read once from a checkpoint, or planted.
//!
//! In: a [`WeightSource`] and the [`ModelConfig`] that says which tensors it must hold. Out: matrices packed for
//! the kernels and fp32 vectors. Norm weights are stored as they multiply (`1 + w` where the config says so), so no
//! layer asks. Every tensor's presence and shape is checked before the first is read, and tensors nobody read are
//! refused at the end.

mod headers;
mod stock_weights;

pub use headers::{check_dtypes, check_format, check_headers, no_q_view};

use rayon::prelude::*;

use super::config::{
    AttentionConfig, LayerConfig, ModelConfig, OutputGate, PostNorms, QkNorm, ValueSource,
};
use super::stock::StockWeights;
use super::tensor_role::TensorRole as Role;
use crate::device::{Buffer, Device};
use crate::error::{CheckpointError, KernelError, Result};
use crate::kernels::Kernel;
use crate::kernels::bf16_matmul::{Bf16Matmul, Bf16MatmulArgs, Epilogue, PackedBf16, Product};
use crate::kernels::fp8_matmul::Activations;
use crate::kernels::stock_matmul::{self, StockMatrix};
use crate::options::WeightFormat;
use crate::weights::{GatedMlp, Linear, WeightLoader, WeightSource};

/// All weights of a decoder.
#[derive(Debug)]
pub struct DecoderWeights {
    /// Token embedding `[vocab_size, hidden_size]`.
    pub embed: PackedBf16,
    /// LM head `[vocab_size, hidden_size]`; `None` when it is the embedding.
    pub lm_head: Option<Linear>,
    /// Weight of the norm before the LM head.
    pub final_norm: Buffer<f32>,
    /// First to last layer; none with `stock`.
    pub layers: Vec<LayerWeights>,
    /// Layers and LM head of `kernels="stock"`.
    pub stock: Option<StockWeights>,
}

/// Weights of one layer.
#[derive(Debug)]
pub struct LayerWeights {
    /// Weight of the norm before the mixer.
    pub input_norm: Buffer<f32>,
    /// Weight of the norm before the MLP.
    pub mlp_norm: Buffer<f32>,
    /// Weights behind the sublayers, where there are norms.
    pub post_norms: Option<PostNormWeights>,
    /// What mixes token positions.
    pub mixer: MixerWeights,
    /// The MLP.
    pub mlp: GatedMlp,
}

/// Weights of the norms behind a layer's sublayers.
#[derive(Debug)]
pub struct PostNormWeights {
    /// Behind the mixer.
    pub mixer: Buffer<f32>,
    /// Behind the MLP.
    pub mlp: Buffer<f32>,
    /// Factor on the residual stream at the layer's end.
    pub layer_scalar: Option<f32>,
}

/// Weights of a layer's mixer.
#[derive(Debug)]
pub enum MixerWeights {
    /// Softmax attention.
    Attention(AttentionWeights),
    /// Gated DeltaNet.
    GatedDelta(GatedDeltaWeights),
}

/// Weights of softmax attention.
#[derive(Debug)]
pub struct AttentionWeights {
    /// Queries; per head followed by its gate where the config has an output gate.
    pub q_proj: Linear,
    /// Keys.
    pub k_proj: Linear,
    /// Values; `None` where they are the keys.
    pub v_proj: Option<Linear>,
    /// `[hidden_size, num_heads * head_dim]`.
    pub o_proj: Linear,
    /// Gates of the heads' outputs, where they have a projection of their own.
    pub output_gate_proj: Option<Linear>,
    /// Weight `[head_dim]` of the queries' norm, if there is one.
    pub q_norm: Option<Buffer<f32>>,
    /// Weight `[head_dim]` of the keys' norm, if there is one.
    pub k_norm: Option<Buffer<f32>>,
}

/// Weights of Gated DeltaNet.
#[derive(Debug)]
pub struct GatedDeltaWeights {
    /// All queries, all keys, all values: `[conv_channels, hidden_size]`.
    pub in_proj_qkv: Linear,
    /// Output gate `[num_value_heads * value_dim, hidden_size]`.
    pub in_proj_z: Linear,
    /// Decay input `[num_value_heads, hidden_size]`.
    pub in_proj_a: Linear,
    /// Write strength `[num_value_heads, hidden_size]`.
    pub in_proj_b: Linear,
    /// `[hidden_size, num_value_heads * value_dim]`.
    pub out_proj: Linear,
    /// Depthwise convolution `[conv_channels, conv_kernel]`; the last column multiplies the current token.
    pub conv: Buffer<f32>,
    /// Logarithm of the decay rate `[num_value_heads]`.
    pub a_log: Buffer<f32>,
    /// Added to the decay input `[num_value_heads]`.
    pub dt_bias: Buffer<f32>,
    /// Weight `[value_dim]` of the output norm, shared by all heads; never stored as a difference from one.
    pub norm: Buffer<f32>,
}

impl DecoderWeights {
    /// Reads all weights of `config` from `source` to `device`, the linear layers in `format` and, when `with_q_views`,
    /// so that Q passes can run; many layers at once. Embedding and LM head are held as BF16.
    ///
    /// # Errors
    /// [`CheckpointError`] when a tensor is missing, extra, damaged, or of another shape or dtype;
    /// [`DeviceError`](crate::error::DeviceError) when the device has no room.
    pub fn load<'a>(
        device: &Device,
        source: impl Into<WeightSource<'a>>,
        config: &ModelConfig,
        format: WeightFormat,
        with_q_views: bool,
    ) -> Result<Self> {
        let source = source.into();
        headers::check_source(source, config)?;
        let loader = Loader {
            tensors: WeightLoader { source, device },
            config,
            format,
            with_q_views,
        };
        // Checking a tensor's checksum is one long chain, so threads pay off across tensors.
        let head = || match config.tie_word_embeddings {
            true => Ok(None),
            false => loader.matrix(Role::LmHead, 0).map(Linear::Bf16).map(Some),
        };
        let ((embed, lm_head), layers) = rayon::join(
            || rayon::join(|| loader.matrix(Role::Embed, 0), head),
            || loader.layers(),
        );
        let weights = Self {
            embed: embed?,
            lm_head: lm_head?,
            final_norm: loader.norm(Role::FinalNorm, 0)?,
            layers: layers?,
            stock: None,
        };
        source.finish(config.weight_names.ignored_prefixes)?;
        let wants_fp8 = matches!(format, WeightFormat::Fp8 | WeightFormat::Fp8W8A8);
        if wants_fp8 && weights.num_fp8_matrices() == 0 {
            return Err(headers::no_fp8(format).into());
        }
        Ok(weights)
    }

    /// Logits `[num_rows, vocab_size]` of final-norm outputs `hidden` `[num_rows, hidden_size]`, through the LM head or
    /// the embedding it is tied to: the same kernel, and so the same order of sums.
    ///
    /// # Errors
    /// [`KernelError`] when a buffer is too short.
    pub fn logits(
        &self,
        device: &Device,
        hidden: &Buffer<f32>,
        num_rows: usize,
        logits: &mut Buffer<f32>,
    ) -> Result<(), KernelError> {
        if let Some(stock) = &self.stock {
            let head = &stock.head;
            return stock_matmul::round_and_multiply(device, hidden, num_rows, head, logits);
        }
        match &self.lm_head {
            Some(head) => head.forward(device, hidden, num_rows, logits, Epilogue::Store),
            None => Bf16Matmul::run(
                device,
                Bf16MatmulArgs {
                    x: hidden.into(),
                    num_rows,
                    products: vec![Product {
                        weight: &self.embed,
                        y: logits,
                    }],
                    epilogue: Epilogue::Store,
                },
            ),
        }
    }

    /// The BF16 weights behind [`Self::logits`], where they are held as such.
    pub fn head_bf16(&self) -> Option<&PackedBf16> {
        match (&self.stock, &self.lm_head) {
            (Some(_), _) => None,
            (None, Some(head)) => head.as_bf16(),
            (None, None) => Some(&self.embed),
        }
    }

    /// Bytes of all weights in memory.
    pub fn num_bytes(&self) -> usize {
        let matrices: usize = self.matrices().map(Linear::num_bytes).sum();
        let vectors: usize = self.vectors().map(|v| v.len() * size_of::<f32>()).sum();
        let stock: usize = self.stock_matrices().map(StockMatrix::num_bytes).sum();
        let scalars = self.num_scalars() * size_of::<f32>();
        self.embed.num_bytes() + matrices + stock + vectors + scalars
    }

    /// Bytes that only Q passes read.
    pub fn q_view_bytes(&self) -> usize {
        self.matrices().map(Linear::q_view_bytes).sum()
    }

    /// Number of matrices held as W12.
    pub fn num_w12_matrices(&self) -> usize {
        self.matrices()
            .filter(|m| matches!(m, Linear::W12(_)))
            .count()
    }

    /// Number of matrices held as FP8.
    pub fn num_fp8_matrices(&self) -> usize {
        self.matrices()
            .filter(|m| matches!(m, Linear::Fp8 { .. }))
            .count()
    }

    /// The format of matrices held as FP8, if there are any.
    pub fn fp8_format(&self) -> WeightFormat {
        let is_quantised = |matrix: &Linear| {
            matches!(
                matrix,
                Linear::Fp8 {
                    activations: Activations::Quantised,
                    ..
                }
            )
        };
        match self.matrices().any(is_quantised) {
            true => WeightFormat::Fp8W8A8,
            false => WeightFormat::Fp8,
        }
    }

    /// Number of parameters; an embedding that is also the LM head counts once.
    pub fn num_parameters(&self) -> usize {
        let size = |m: &Linear| m.out_features() * m.in_features();
        let embed = self.embed.out_features() * self.embed.in_features();
        let stock = |m: &StockMatrix| m.out_features() * m.in_features();
        // A stock head that is a copy of the embedding counts with it.
        let copied = match &self.stock {
            Some(weights) if weights.head_is_copy => stock(&weights.head),
            _ => 0,
        };
        embed
            + self.matrices().map(size).sum::<usize>()
            + self.stock_matrices().map(stock).sum::<usize>()
            + self.vectors().map(Buffer::len).sum::<usize>()
            + self.num_scalars()
            - copied
    }

    fn num_scalars(&self) -> usize {
        let post_norms = self.layers.iter().filter_map(|l| l.post_norms.as_ref());
        post_norms
            .filter(|norms| norms.layer_scalar.is_some())
            .count()
    }

    fn stock_matrices(&self) -> impl Iterator<Item = &StockMatrix> {
        self.stock.iter().flat_map(StockWeights::matrices)
    }

    fn matrices(&self) -> impl Iterator<Item = &Linear> {
        let layers = self.layers.iter().flat_map(LayerWeights::matrices);
        self.lm_head.iter().chain(layers)
    }

    fn vectors(&self) -> impl Iterator<Item = &Buffer<f32>> {
        let layers = self.layers.iter().flat_map(LayerWeights::vectors);
        let stock = self.stock.iter().flat_map(StockWeights::vectors);
        std::iter::once(&self.final_norm).chain(layers).chain(stock)
    }
}

impl LayerWeights {
    fn matrices(&self) -> Vec<&Linear> {
        let mut matrices = self.mlp.matrices().to_vec();
        match &self.mixer {
            MixerWeights::Attention(w) => {
                matrices.extend([&w.q_proj, &w.k_proj, &w.o_proj]);
                matrices.extend(w.v_proj.iter().chain(&w.output_gate_proj));
            }
            MixerWeights::GatedDelta(w) => matrices.extend([
                &w.in_proj_qkv,
                &w.in_proj_z,
                &w.in_proj_a,
                &w.in_proj_b,
                &w.out_proj,
            ]),
        }
        matrices
    }

    fn vectors(&self) -> Vec<&Buffer<f32>> {
        let mut vectors = vec![&self.input_norm, &self.mlp_norm];
        if let Some(norms) = &self.post_norms {
            vectors.extend([&norms.mixer, &norms.mlp]);
        }
        match &self.mixer {
            MixerWeights::Attention(w) => vectors.extend(w.q_norm.iter().chain(&w.k_norm)),
            MixerWeights::GatedDelta(w) => {
                vectors.extend([&w.conv, &w.a_log, &w.dt_bias, &w.norm]);
            }
        }
        vectors
    }
}

/// Reads tensors by role, with the name and the shape that the config gives them.
struct Loader<'a> {
    tensors: WeightLoader<'a>,
    config: &'a ModelConfig,
    format: WeightFormat,
    with_q_views: bool,
}

impl Loader<'_> {
    fn layers(&self) -> Result<Vec<LayerWeights>> {
        self.each_layer(|i| self.layer(i))
    }

    /// Many layers at once.
    fn each_layer<T: Send>(
        &self,
        read: impl Fn(usize) -> Result<T> + Send + Sync,
    ) -> Result<Vec<T>> {
        let layers: Vec<_> = (0..self.config.layers.len())
            .into_par_iter()
            .map(read)
            .collect();
        // Of several errors the first layer's is told, whichever thread came first.
        layers.into_iter().collect()
    }

    fn layer(&self, i: usize) -> Result<LayerWeights> {
        Ok(LayerWeights {
            input_norm: self.norm(Role::InputNorm, i)?,
            mlp_norm: self.norm(Role::MlpNorm, i)?,
            post_norms: match self.config.post_norms {
                Some(norms) => Some(self.post_norms(norms, i)?),
                None => None,
            },
            mixer: match &self.config.layers[i] {
                LayerConfig::Attention(attention) => {
                    MixerWeights::Attention(self.attention(attention, i)?)
                }
                LayerConfig::GatedDelta => MixerWeights::GatedDelta(self.gated_delta(i)?),
            },
            mlp: GatedMlp {
                gate_proj: self.linear(Role::GateProj, i)?,
                up_proj: self.linear(Role::UpProj, i)?,
                down_proj: self.linear(Role::DownProj, i)?,
                activation: self.config.mlp_activation.gate_kind(),
            },
        })
    }

    fn post_norms(&self, norms: PostNorms, i: usize) -> Result<PostNormWeights> {
        let scalar = || {
            let name = self.name(Role::LayerScalar, i);
            let values = self.tensors.source.tensor_f32(&name, &[1])?;
            Ok::<_, CheckpointError>(values[0])
        };
        Ok(PostNormWeights {
            mixer: self.norm(Role::PostMixerNorm, i)?,
            mlp: self.norm(Role::PostMlpNorm, i)?,
            layer_scalar: norms.layer_scalar.then(scalar).transpose()?,
        })
    }

    fn attention(&self, config: &AttentionConfig, i: usize) -> Result<AttentionWeights> {
        self.skip_rotary_frequencies(i);
        let v_proj = || self.linear(Role::VProj, i);
        let gate_proj = || self.linear(Role::OutputGateProj, i);
        Ok(AttentionWeights {
            q_proj: self.linear(Role::QProj, i)?,
            k_proj: self.linear(Role::KProj, i)?,
            v_proj: (config.values != ValueSource::NormedKeys)
                .then(v_proj)
                .transpose()?,
            o_proj: self.linear(Role::OProj, i)?,
            output_gate_proj: (config.output_gate == OutputGate::OwnProjection)
                .then(gate_proj)
                .transpose()?,
            q_norm: self.head_norm(config, Role::QNorm, i)?,
            k_norm: self.head_norm(config, Role::KNorm, i)?,
        })
    }

    fn gated_delta(&self, i: usize) -> Result<GatedDeltaWeights> {
        Ok(GatedDeltaWeights {
            in_proj_qkv: self.linear(Role::GdnInProjQkv, i)?,
            in_proj_z: self.linear(Role::GdnInProjZ, i)?,
            in_proj_a: self.linear(Role::GdnInProjA, i)?,
            in_proj_b: self.linear(Role::GdnInProjB, i)?,
            out_proj: self.linear(Role::GdnOutProj, i)?,
            conv: self.vector(Role::GdnConv, i)?,
            a_log: self.vector(Role::GdnALog, i)?,
            dt_bias: self.vector(Role::GdnDtBias, i)?,
            norm: self.vector(Role::GdnNorm, i)?,
        })
    }

    /// Llama files of before transformers 4.32 carry the frequencies, which the config gives exactly.
    fn skip_rotary_frequencies(&self, i: usize) {
        if let Some(checkpoint) = self.tensors.source.checkpoint() {
            checkpoint.skip(&self.config.weight_names.rotary_frequencies(i));
        }
    }

    /// The norm of query or key heads, if the model has it.
    fn head_norm(
        &self,
        config: &AttentionConfig,
        role: Role,
        layer: usize,
    ) -> Result<Option<Buffer<f32>>> {
        match config.qk_norm {
            QkNorm::Weighted => self.norm(role, layer).map(Some),
            QkNorm::None | QkNorm::Weightless => Ok(None),
        }
    }

    fn linear(&self, role: Role, layer: usize) -> Result<Linear> {
        let shape = role.shape(self.config, layer);
        let name = self.name(role, layer);
        let shape = [shape[0], shape[1]];
        match self.with_q_views {
            true => self.tensors.linear_with_q_view(&name, shape, self.format),
            false => self.tensors.linear(&name, shape, self.format),
        }
    }

    fn matrix(&self, role: Role, layer: usize) -> Result<PackedBf16> {
        let shape = role.shape(self.config, layer);
        self.tensors
            .token_rows_bf16(&self.name(role, layer), [shape[0], shape[1]])
    }

    fn vector(&self, role: Role, layer: usize) -> Result<Buffer<f32>> {
        self.tensors
            .tensor_f32(&self.name(role, layer), &role.shape(self.config, layer))
    }

    /// A norm's weight as it multiplies.
    fn norm(&self, role: Role, layer: usize) -> Result<Buffer<f32>> {
        let (name, shape) = (self.name(role, layer), role.shape(self.config, layer));
        let mut weight = self.tensors.source.tensor_f32(&name, &shape)?;
        let adds_one = match role {
            Role::FinalNorm => self.config.final_norm_adds_one,
            _ => self.config.layer_norms_add_one,
        };
        if adds_one {
            weight.iter_mut().for_each(|w| *w += 1.0);
        }
        Ok(self.tensors.device.constants(&weight)?)
    }

    fn name(&self, role: Role, layer: usize) -> String {
        self.config.weight_names.name(role, layer)
    }
}

#[cfg(test)]
mod tests;
