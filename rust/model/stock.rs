//! The layers as stock engines run them, for `kernels="stock"`: cuBLASLt on merged matrices, activations rounded to BF16
//! by whatever kernel made them, Gated DeltaNet token by token. A baseline outside the lossless promise.
//!
//! Attention, norms of heads and RoPE are the decoder's own kernels. What a pass leaves behind for a commit is the same
//! too, so caches, scheduler and steps know nothing of it.

use half::bf16;

use super::attention::turn_heads;
use super::config::{AttentionConfig, GdnConfig, LayerConfig, ModelConfig, QkNorm};
use super::decoder::LayerContext;
use super::tail::{AttentionTail, GatedDeltaTail, LayerTail};
use super::workspace::Workspace;
use crate::device::{Buffer, Device};
use crate::error::{DeviceError, KernelError};
use crate::kernels::Kernel;
use crate::kernels::bf16_matmul::Epilogue;
use crate::kernels::gate::GateKind;
use crate::kernels::gdn_recurrent::{
    ChainArgs, GdnRecurrent, GdnRecurrentArgs, GdnRecurrentWeights, projected_len,
};
use crate::kernels::gdn_wy::GdnShape;
use crate::kernels::paths::Wave;
use crate::kernels::round_rows::{GatedBy, Norm, RoundRows, RoundRowsArgs, RowSource, Vectors};
use crate::kernels::stock_matmul::{self, StockMatrix};
use crate::kernels::tree_attention::{TreeAttention, TreeAttentionArgs};

/// All layers and the LM head.
#[derive(Debug)]
pub struct StockWeights {
    /// First to last layer.
    pub layers: Vec<StockLayer>,
    /// LM head `[vocab_size, hidden_size]`, a copy of the embedding where they are tied.
    pub head: StockMatrix,
    /// Whether it is.
    pub head_is_copy: bool,
}

/// One layer.
#[derive(Debug)]
pub struct StockLayer {
    /// Weight of the norm before the mixer.
    pub input_norm: Buffer<f32>,
    /// Weight of the norm before the MLP.
    pub post_attention_norm: Buffer<f32>,
    /// What mixes token positions.
    pub mixer: StockMixer,
    /// Gate, then up: `[2 * intermediate_size, hidden_size]`.
    pub gate_up: StockMatrix,
    /// `[hidden_size, intermediate_size]`.
    pub down: StockMatrix,
}

/// A layer's mixer.
#[derive(Debug)]
pub enum StockMixer {
    /// Softmax attention.
    Attention(StockAttention),
    /// Gated DeltaNet.
    GatedDelta(StockGatedDelta),
}

/// Weights of softmax attention. Keys and values are matrices of their own: their results go to different places.
#[derive(Debug)]
pub struct StockAttention {
    /// Queries; per head followed by its gate where the config has an output gate.
    pub q_proj: StockMatrix,
    /// Keys.
    pub k_proj: StockMatrix,
    /// Values.
    pub v_proj: StockMatrix,
    /// `[hidden_size, num_heads * head_dim]`.
    pub o_proj: StockMatrix,
    /// Weight `[head_dim]` of the queries' norm, if there is one.
    pub q_norm: Option<Buffer<f32>>,
    /// Weight `[head_dim]` of the keys' norm, if there is one.
    pub k_norm: Option<Buffer<f32>>,
}

/// Weights of Gated DeltaNet.
#[derive(Debug)]
pub struct StockGatedDelta {
    /// Queries, keys, values, output gate, a, b: `[projected_len, hidden_size]`.
    pub in_proj: StockMatrix,
    /// `[hidden_size, num_value_heads * value_dim]`.
    pub out_proj: StockMatrix,
    /// Depthwise convolution `[conv_channels, conv_kernel]`.
    pub conv: Buffer<f32>,
    /// Logarithm of the decay rate `[num_value_heads]`.
    pub a_log: Buffer<f32>,
    /// Added to the decay input `[num_value_heads]`.
    pub dt_bias: Buffer<f32>,
    /// Weight `[value_dim]` of the output norm.
    pub norm: Buffer<f32>,
}

impl StockWeights {
    /// All matrices.
    pub fn matrices(&self) -> impl Iterator<Item = &StockMatrix> {
        let layers = self.layers.iter().flat_map(|layer| {
            let mut matrices = vec![&layer.gate_up, &layer.down];
            match &layer.mixer {
                StockMixer::Attention(w) => {
                    matrices.extend([&w.q_proj, &w.k_proj, &w.v_proj, &w.o_proj]);
                }
                StockMixer::GatedDelta(w) => matrices.extend([&w.in_proj, &w.out_proj]),
            }
            matrices
        });
        std::iter::once(&self.head).chain(layers)
    }

    /// All vectors.
    pub fn vectors(&self) -> impl Iterator<Item = &Buffer<f32>> {
        self.layers.iter().flat_map(|layer| {
            let mut vectors = vec![&layer.input_norm, &layer.post_attention_norm];
            match &layer.mixer {
                StockMixer::Attention(w) => vectors.extend(w.q_norm.iter().chain(&w.k_norm)),
                StockMixer::GatedDelta(w) => {
                    vectors.extend([&w.conv, &w.a_log, &w.dt_bias, &w.norm]);
                }
            }
            vectors
        })
    }
}

/// Sizes of a layer's recurrence.
fn gdn_shape(gdn: &GdnConfig) -> GdnShape {
    GdnShape {
        num_key_heads: gdn.num_key_heads,
        num_value_heads: gdn.num_value_heads,
        key_dim: gdn.key_dim,
        value_dim: gdn.value_dim,
        conv_kernel: gdn.conv_kernel,
    }
}

/// What a stock pass needs beside the decoder's workspace.
pub(super) struct StockWorkspace {
    /// Activations of the next matmul.
    rounded: Buffer<bf16>,
    /// What a merged matrix gives.
    merged: Buffer<f32>,
}

impl StockWorkspace {
    /// Room for `max_rows` rows.
    ///
    /// # Errors
    /// [`DeviceError::OutOfMemory`].
    pub(super) fn new(
        config: &ModelConfig,
        max_rows: usize,
        device: &Device,
    ) -> Result<Self, DeviceError> {
        let [rounded, merged] = Self::row_lens(config);
        Ok(Self {
            rounded: device.try_alloc(max_rows * rounded)?,
            merged: device.try_alloc(max_rows * merged)?,
        })
    }

    /// Bytes of one row.
    pub(super) fn row_bytes_of(config: &ModelConfig) -> usize {
        let [rounded, merged] = Self::row_lens(config);
        rounded * size_of::<bf16>() + merged * size_of::<f32>()
    }

    fn row_lens(config: &ModelConfig) -> [usize; 2] {
        let gdn = config.gdn.as_ref().map(gdn_shape);
        let rounded = config
            .hidden_size
            .max(config.intermediate_size)
            .max(config.widest_attention(AttentionConfig::q_dim))
            .max(gdn.as_ref().map_or(0, GdnShape::values_len));
        let merged = gdn.as_ref().map_or(0, projected_len);
        [rounded, merged.max(2 * config.intermediate_size)]
    }
}

/// One layer over the rows of a pass.
pub(super) struct StockPass<'a, 'b> {
    pub(super) context: &'a mut LayerContext<'b>,
    pub(super) workspace: &'a mut Workspace,
    pub(super) stock: &'a mut StockWorkspace,
}

impl StockPass<'_, '_> {
    /// Adds the sublayers of layer number `index` to `workspace.residual`, its attention turned by
    /// `inverse_frequencies`.
    ///
    /// # Errors
    /// [`KernelError`] when a kernel refuses its arguments.
    pub(super) fn forward(
        &mut self,
        index: usize,
        layer: &StockLayer,
        inverse_frequencies: Option<&Buffer<f32>>,
        tail: &mut LayerTail,
    ) -> Result<(), KernelError> {
        self.round_normed(&layer.input_norm)?;
        match (&self.context.config.layers[index], &layer.mixer, tail) {
            (
                LayerConfig::Attention(config),
                StockMixer::Attention(weights),
                LayerTail::Attention(tail),
            ) => {
                self.attend(index, config, weights, inverse_frequencies, tail)?;
            }
            (_, StockMixer::GatedDelta(weights), LayerTail::GatedDelta(tail)) => {
                self.recur(index, weights, tail)?;
            }
            _ => unreachable!("tails are built from the config that the weights were loaded by"),
        }
        self.round_normed(&layer.post_attention_norm)?;
        self.multiply_merged(&layer.gate_up)?;
        let (width, merged) = (layer.down.in_features(), &self.stock.merged);
        let gates = Vectors::columns(merged, 0, 2 * width);
        RoundRows::run(
            self.context.device,
            RoundRowsArgs {
                source: RowSource::Gated(GatedBy {
                    kind: self.context.config.mlp_activation.gate_kind(),
                    gates,
                }),
                x: Vectors::columns(merged, width, 2 * width),
                num_vectors: self.context.num_rows,
                width,
                y: &mut self.stock.rounded,
            },
        )?;
        self.add_product(&layer.down)
    }

    /// The norm of the residual stream, as activations.
    fn round_normed(&mut self, weight: &Buffer<f32>) -> Result<(), KernelError> {
        let width = self.context.config.hidden_size;
        let eps = self.context.config.rms_norm_eps;
        RoundRows::run(
            self.context.device,
            RoundRowsArgs {
                source: RowSource::Normed(Norm { weight, eps }),
                x: Vectors::rows(&self.workspace.residual, width),
                num_vectors: self.context.num_rows,
                width,
                y: &mut self.stock.rounded,
            },
        )
    }

    fn multiply_merged(&mut self, weight: &StockMatrix) -> Result<(), KernelError> {
        let StockWorkspace { rounded, merged } = &mut *self.stock;
        let (device, num_rows) = (self.context.device, self.context.num_rows);
        stock_matmul::multiply(device, rounded, num_rows, weight, merged, Epilogue::Store)
    }

    fn add_product(&mut self, weight: &StockMatrix) -> Result<(), KernelError> {
        stock_matmul::multiply(
            self.context.device,
            &self.stock.rounded,
            self.context.num_rows,
            weight,
            &mut self.workspace.residual,
            Epilogue::AddToOutput,
        )
    }

    fn recur(
        &mut self,
        index: usize,
        weights: &StockGatedDelta,
        tail: &mut GatedDeltaTail,
    ) -> Result<(), KernelError> {
        self.multiply_merged(&weights.in_proj)?;
        let context = &mut *self.context;
        for Wave { segments, settled } in context.paths.waves() {
            let gdn = context.caches.gdn();
            GdnRecurrent::run(
                context.device,
                GdnRecurrentArgs::Chain(ChainArgs {
                    shape: gdn.shape(),
                    weights: GdnRecurrentWeights {
                        conv: &weights.conv,
                        a_log: &weights.a_log,
                        dt_bias: &weights.dt_bias,
                    },
                    projected: &self.stock.merged,
                    paths: context.paths,
                    segments,
                    cache: gdn.layer(context.caches.gdn_index(index)),
                    tail_qkv: &mut tail.qkv,
                    tail: &mut tail.log,
                    y: &mut self.workspace.mixed,
                }),
            )?;
            if let Some(settled) = settled {
                let kept = (&tail.qkv, &tail.log);
                context
                    .caches
                    .settle_gdn(context.device, index, settled, kept)?;
            }
        }
        let shape = context.caches.gdn().shape();
        let (heads, width) = (shape.num_value_heads, shape.value_dim);
        let heads_of = |values, offset, row_stride| Vectors {
            values,
            offset,
            per_row: heads,
            stride: width,
            row_stride,
        };
        let norm = Norm {
            weight: &weights.norm,
            eps: context.config.rms_norm_eps,
        };
        let gate = GatedBy {
            kind: GateKind::SiluMultiply,
            gates: heads_of(
                &self.stock.merged,
                shape.conv_channels(),
                projected_len(shape),
            ),
        };
        RoundRows::run(
            context.device,
            RoundRowsArgs {
                source: RowSource::NormedAndGated(norm, gate),
                x: heads_of(&self.workspace.mixed, 0, heads * width),
                num_vectors: context.num_rows * heads,
                width,
                y: &mut self.stock.rounded,
            },
        )?;
        self.add_product(&weights.out_proj)
    }

    fn attend(
        &mut self,
        index: usize,
        attention: &AttentionConfig,
        weights: &StockAttention,
        inverse_frequencies: Option<&Buffer<f32>>,
        tail: &mut AttentionTail,
    ) -> Result<(), KernelError> {
        let context = &mut *self.context;
        let (device, n) = (context.device, context.num_rows);
        let head_dim = attention.head_dim;
        let q_parts = attention.q_proj_parts();
        let q_stride = head_dim * q_parts;
        let Workspace {
            q_projected,
            k_projected,
            q,
            ..
        } = &mut *self.workspace;
        let x = &self.stock.rounded;
        let multiply = |weight, y: &mut Buffer<f32>| {
            stock_matmul::multiply(device, x, n, weight, y, Epilogue::Store)
        };
        multiply(&weights.v_proj, &mut tail.v)?;
        if attention.qk_norm != QkNorm::None {
            multiply(&weights.q_proj, q_projected)?;
            multiply(&weights.k_proj, k_projected)?;
        } else {
            multiply(&weights.q_proj, q)?;
            multiply(&weights.k_proj, &mut tail.k)?;
        }
        let norms = [&weights.q_norm, &weights.k_norm].map(Option::as_ref);
        turn_heads(
            context,
            attention,
            norms,
            inverse_frequencies,
            self.workspace,
            &mut tail.k,
        )?;
        context.settle_kv(index, tail)?;
        let Workspace {
            q_projected,
            q,
            mixed,
            ..
        } = &mut *self.workspace;
        let kv_layer = context.caches.attention_index(index);
        TreeAttention::run(
            device,
            TreeAttentionArgs {
                q,
                k_tail: &tail.k,
                v_tail: &tail.v,
                k_pages: context.caches.kv().k(kv_layer),
                v_pages: context.caches.kv().v(kv_layer),
                paths: context.paths,
                span: context.caches.kv().span(kv_layer),
                q_heads: attention.num_heads,
                kv_heads: attention.num_kv_heads,
                head_dim,
                scale: attention.scale,
                window: attention.window,
                out: mixed,
            },
        )?;
        let source = match q_parts > 1 {
            true => RowSource::Gated(GatedBy {
                kind: GateKind::SigmoidMultiply,
                gates: Vectors::columns(q_projected, head_dim, q_stride),
            }),
            false => RowSource::Plain,
        };
        RoundRows::run(
            device,
            RoundRowsArgs {
                source,
                x: Vectors::rows(mixed, head_dim),
                num_vectors: n * attention.num_heads,
                width: head_dim,
                y: &mut self.stock.rounded,
            },
        )?;
        self.add_product(&weights.o_proj)
    }
}
