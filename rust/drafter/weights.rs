//! A parallel drafter's weights, read once from its checkpoint. Its embedding is the target's, and so is its LM head
//! unless it drafts a part of the vocabulary only.

use super::config::{BlockConfig, MarkovConfig, MarkovKind, SelectorConfig};
use super::draft_head::OwnHead;
use crate::device::{Buffer, Device};
use crate::error::{Error, Result};
use crate::kernels::bf16_matmul::{Epilogue, PackedBf16, Product};
use crate::kernels::matmul_rows::MatmulInput;
use crate::kernels::w12_matmul::WeightView;
use crate::model::config::{PostNorms, ValueSource};
use crate::options::WeightFormat;
use crate::weights::checkpoint::Verification;
use crate::weights::linear::multiply_together;
use crate::weights::{GatedMlp, Linear, WeightLoader, WeightSource};

/// All weights of a drafter.
pub(super) struct BlockWeights {
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
    /// DSpark's Markov head.
    pub(super) markov: Option<MarkovWeights>,
    /// DSpark's confidence head.
    pub(super) confidence: Option<ConfidenceWeights>,
    /// Head of a drafter with a vocabulary of its own.
    pub(super) head: Option<OwnHead>,
    /// What proving them took.
    pub(super) verification: Verification,
}

/// Weights of one layer.
pub(super) struct LayerWeights {
    pub(super) input_norm: Buffer<f32>,
    pub(super) q_proj: Linear,
    pub(super) k_proj: Linear,
    /// `None` where values are made of keys.
    pub(super) v_proj: Option<Linear>,
    pub(super) o_proj: Linear,
    pub(super) q_norm: Buffer<f32>,
    pub(super) k_norm: Buffer<f32>,
    /// DFlash2's convolution around attention.
    pub(super) attention_conv: Option<ConvWeights>,
    /// Behind both sublayers, where there are any.
    pub(super) post_norms: Option<PostNormWeights>,
    pub(super) mlp_norm: Buffer<f32>,
    pub(super) mlp: GatedMlp,
    /// DFlash2's convolution around the MLP.
    pub(super) mlp_conv: Option<ConvWeights>,
}

/// Weights of the norms behind a layer's sublayers.
pub(super) struct PostNormWeights {
    pub(super) attention: Buffer<f32>,
    pub(super) mlp: Buffer<f32>,
    /// Factor on the residual stream where the layer ends.
    pub(super) layer_scalar: Option<f32>,
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

/// Weights of a Markov head. `joint` and `gate` projections are cut by what they multiply, so that the part of the
/// hidden state is computed once for all parents of a position.
pub(super) struct MarkovWeights {
    /// Codes of tokens, `[vocab_size, rank]`.
    pub(super) codes: PackedBf16,
    /// From a code to a correction, `[drafted ids, rank]`.
    pub(super) correction: Linear,
    pub(super) mixing: MarkovMixing,
}

/// What happens to a code before it corrects.
#[expect(
    clippy::large_enum_variant,
    reason = "one a drafter, and never moved after loading"
)]
pub(super) enum MarkovMixing {
    /// Nothing.
    Vanilla,
    /// Scaled by a gate.
    Gated {
        hidden: Linear,
        code: Linear,
        bias: Buffer<f32>,
    },
    /// Fed to a recurrent state.
    Rnn {
        state: Linear,
        code: Linear,
        hidden: Linear,
        bias: Option<Buffer<f32>>,
    },
}

/// Weights of the confidence head, which is so small that the host computes it.
pub(super) struct ConfidenceWeights {
    /// For the hidden state and, where it is read, the code of the token before.
    pub(super) weight: Vec<f32>,
    pub(super) bias: f32,
}

impl ConfidenceWeights {
    /// Logarithm of the probability that a position's draft is accepted, given the position's hidden state and the
    /// code of the token before.
    pub(super) fn log_probability(&self, hidden: &[f32], code: &[f32]) -> f32 {
        let products = self
            .weight
            .iter()
            .zip(hidden.iter().chain(code))
            .map(|(w, x)| w * x);
        let logit = self.bias + products.sum::<f32>();
        // ln(sigmoid(x)), without cancellation on either side.
        logit.min(0.0) - (-logit.abs()).exp().ln_1p()
    }
}

/// `y = x Wᵀ` of several matrices of one K.
pub(super) fn multiply_all<'a>(
    device: &Device,
    x: impl Into<MatmulInput<'a>>,
    num_rows: usize,
    products: impl IntoIterator<Item = (&'a Linear, &'a mut Buffer<f32>)>,
) -> Result<()> {
    let product = |(weight, y)| Product { weight, y };
    let products = products.into_iter().map(product);
    let (view, store) = (WeightView::Exact, Epilogue::Store);
    Ok(multiply_together(
        view, device, x, num_rows, products, store,
    )?)
}

impl BlockWeights {
    /// Reads the weights of `config` from `source` to `device`, linear layers in `format`.
    ///
    /// # Errors
    /// [`CheckpointError`](crate::error::CheckpointError) when a tensor is missing, extra, or of another shape or dtype;
    /// [`DeviceError`](crate::error::DeviceError) when the device has no room.
    pub(super) fn load(
        device: &Device,
        source: WeightSource<'_>,
        config: &BlockConfig,
        format: WeightFormat,
        vocab_size: usize,
    ) -> Result<Self> {
        let tensors = WeightLoader { source, device };
        let loader = Loader {
            tensors,
            config,
            format,
        };
        let mut weights = Self {
            verification: Verification::default(),
            fc: tensors.linear(
                config.fc_name(),
                [config.hidden_size, config.taps_dim()],
                format,
            )?,
            hidden_norm: tensors.tensor_f32(config.hidden_norm_name(), &[config.hidden_size])?,
            layers: (0..config.layers.len())
                .map(|i| loader.layer(i))
                .collect::<Result<_>>()?,
            final_norm: loader.norm("norm", config.hidden_size)?,
            selector: config
                .method
                .selector()
                .map(|selector| loader.selector(selector))
                .transpose()?,
            markov: config
                .method
                .markov()
                .map(|markov| loader.markov(markov))
                .transpose()?,
            confidence: loader.confidence()?,
            head: config
                .draft_vocab_size
                .map(|size| OwnHead::load(tensors, [size, config.hidden_size], Some(vocab_size)))
                .transpose()?,
        };
        source.finish(config.copies())?;
        weights.verification = source.verification();
        Ok(weights)
    }

    /// Bytes of all weights in memory.
    pub(super) fn num_bytes(&self) -> usize {
        let vector = |v: &Buffer<f32>| v.len() * size_of::<f32>();
        let selector = self.selector.as_ref().map_or(0, |s| {
            s.hidden_projection.num_bytes() + s.predecessor.num_bytes() + s.successor.num_bytes()
        });
        let markov = self.markov.as_ref().map_or(0, MarkovWeights::num_bytes);
        let confidence = self.confidence.as_ref();
        let head = self.head.as_ref().map_or(0, OwnHead::num_bytes);
        let layers: usize = self.layers.iter().map(LayerWeights::num_bytes).sum();
        self.fc.num_bytes()
            + vector(&self.hidden_norm)
            + vector(&self.final_norm)
            + layers
            + selector
            + markov
            + confidence.map_or(0, |c| (c.weight.len() + 1) * size_of::<f32>())
            + head
    }
}

impl MarkovWeights {
    fn num_bytes(&self) -> usize {
        let vector = |v: &Buffer<f32>| v.len() * size_of::<f32>();
        let mixing = match &self.mixing {
            MarkovMixing::Vanilla => 0,
            MarkovMixing::Gated { hidden, code, bias } => {
                hidden.num_bytes() + code.num_bytes() + vector(bias)
            }
            MarkovMixing::Rnn {
                state,
                code,
                hidden,
                bias,
            } => {
                state.num_bytes()
                    + code.num_bytes()
                    + hidden.num_bytes()
                    + bias.as_ref().map_or(0, vector)
            }
        };
        self.codes.num_bytes() + self.correction.num_bytes() + mixing
    }
}

impl LayerWeights {
    fn num_bytes(&self) -> usize {
        let matrices = [&self.q_proj, &self.k_proj, &self.o_proj];
        let matrices = matrices.into_iter().chain(&self.v_proj);
        let norms = [&self.input_norm, &self.mlp_norm, &self.q_norm, &self.k_norm];
        let post_norms = self.post_norms.iter();
        let scalars = post_norms.clone().filter_map(|norms| norms.layer_scalar);
        let convs = self.attention_conv.iter().chain(&self.mlp_conv);
        let vectors = norms
            .into_iter()
            .chain(post_norms.flat_map(|norms| [&norms.attention, &norms.mlp]))
            .chain(convs.clone().map(|conv| &conv.base));
        let matrices = matrices.chain(self.mlp.matrices());
        matrices.map(Linear::num_bytes).sum::<usize>()
            + convs.map(|conv| conv.projection.num_bytes()).sum::<usize>()
            + vectors.map(|v| v.len() * size_of::<f32>()).sum::<usize>()
            + scalars.count() * size_of::<f32>()
    }
}

struct Loader<'a> {
    tensors: WeightLoader<'a>,
    config: &'a BlockConfig,
    format: WeightFormat,
}

impl Loader<'_> {
    fn layer(&self, i: usize) -> Result<LayerWeights> {
        let config = self.config;
        let (hidden, inter) = (config.hidden_size, config.intermediate_size);
        let (q_dim, kv_dim) = (config.body.q_dim(), config.body.kv_dim());
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
            v_proj: match config.body.values {
                ValueSource::NormedKeys => None,
                ValueSource::Projection | ValueSource::NormedProjection => {
                    Some(self.linear(&name("self_attn.v_proj"), kv_dim, hidden)?)
                }
            },
            o_proj: self.linear(&name("self_attn.o_proj"), hidden, q_dim)?,
            q_norm: self.norm(&name("self_attn.q_norm"), config.body.head_dim)?,
            k_norm: self.norm(&name("self_attn.k_norm"), config.body.head_dim)?,
            attention_conv: conv("attention_conv")?,
            mlp_norm: self.norm(
                &name(match config.body.post_norms {
                    None => "post_attention_layernorm",
                    Some(_) => "pre_feedforward_layernorm",
                }),
                hidden,
            )?,
            post_norms: config
                .body
                .post_norms
                .map(|norms| self.post_norms(norms, i))
                .transpose()?,
            mlp: GatedMlp {
                gate_proj: self.linear(&name("mlp.gate_proj"), inter, hidden)?,
                up_proj: self.linear(&name("mlp.up_proj"), inter, hidden)?,
                down_proj: self.linear(&name("mlp.down_proj"), hidden, inter)?,
                activation: config.body.mlp_activation.gate_kind(),
            },
            mlp_conv: conv("mlp_conv")?,
        })
    }

    fn post_norms(&self, norms: PostNorms, i: usize) -> Result<PostNormWeights> {
        let hidden = self.config.hidden_size;
        let scalar = || {
            let name = format!("layers.{i}.layer_scalar");
            let values = self.tensors.source.tensor_f32(&name, &[1])?;
            Ok::<_, Error>(values[0])
        };
        Ok(PostNormWeights {
            attention: self.norm(&format!("layers.{i}.post_attention_layernorm"), hidden)?,
            mlp: self.norm(&format!("layers.{i}.post_feedforward_layernorm"), hidden)?,
            layer_scalar: norms.layer_scalar.then(scalar).transpose()?,
        })
    }

    fn conv(&self, name: &str, selector: &SelectorConfig) -> Result<ConvWeights> {
        let hidden = self.config.hidden_size;
        Ok(ConvWeights {
            base: self.tensors.tensor_f32(
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
            self.tensors
                .token_rows_bf16(&name, [selector.vocab_size, selector.rank])
        };
        Ok(SelectorWeights {
            hidden_projection,
            predecessor: codebook("predecessor")?,
            successor: codebook("successor")?,
            top_k: selector.top_k,
        })
    }

    fn markov(&self, markov: &MarkovConfig) -> Result<MarkovWeights> {
        let (rank, hidden) = (markov.rank, self.config.hidden_size);
        let name = |part: &str| format!("markov_head.{part}");
        let num_drafted_ids = self.config.num_drafted_ids(markov.vocab_size);
        let mixing = match markov.kind {
            MarkovKind::Vanilla => MarkovMixing::Vanilla,
            MarkovKind::Gated => {
                let [hidden, code] =
                    self.columns(&name("gate_proj.weight"), rank, [hidden, rank])?;
                let bias = self.tensors.tensor_f32(&name("gate_proj.bias"), &[rank])?;
                MarkovMixing::Gated { hidden, code, bias }
            }
            MarkovKind::Rnn { has_bias } => {
                let joint = name("joint_proj.weight");
                let [state, code, hidden] = self.columns(&joint, 3 * rank, [rank, rank, hidden])?;
                let bias = || {
                    self.tensors
                        .tensor_f32(&name("joint_proj.bias"), &[3 * rank])
                };
                let bias = has_bias.then(bias).transpose()?;
                MarkovMixing::Rnn {
                    state,
                    code,
                    hidden,
                    bias,
                }
            }
        };
        Ok(MarkovWeights {
            codes: self
                .tensors
                .token_rows_bf16(&name("markov_w1.weight"), [markov.vocab_size, rank])?,
            correction: self.linear(&name("markov_w2"), num_drafted_ids, rank)?,
            mixing,
        })
    }

    fn confidence(&self) -> Result<Option<ConfidenceWeights>> {
        let method = &self.config.method;
        let Some(confidence) = method.confidence() else {
            return Ok(None);
        };
        let code = method.markov().filter(|_| confidence.with_markov);
        let width = self.config.hidden_size + code.map_or(0, |markov| markov.rank);
        Ok(Some(ConfidenceWeights {
            weight: self
                .tensors
                .source
                .tensor_f32("confidence_head.proj.weight", &[1, width])?,
            bias: self
                .tensors
                .source
                .tensor_f32("confidence_head.proj.bias", &[1])?[0],
        }))
    }

    /// A matrix cut into groups of columns.
    fn columns<const N: usize>(
        &self,
        name: &str,
        out_features: usize,
        widths: [usize; N],
    ) -> Result<[Linear; N]> {
        let parts = self.tensors.columns_bf16(name, out_features, widths)?;
        Ok(parts.map(Linear::Bf16))
    }

    fn linear(&self, name: &str, out_features: usize, in_features: usize) -> Result<Linear> {
        let name = format!("{name}.weight");
        self.tensors
            .linear(&name, [out_features, in_features], self.format)
    }

    fn norm(&self, name: &str, width: usize) -> Result<Buffer<f32>> {
        self.tensors.tensor_f32(&format!("{name}.weight"), &[width])
    }
}
