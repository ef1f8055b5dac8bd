//! The forward of a drafter's block: anchor and masks in, hidden states of the drafted positions out.
//!
//! A decoder over a block of rows per request, whose attention also reads the request's context. A block
//! has as many rows as the draft needs, more or fewer than in training; rows see each other, so another number of them
//! is another draft. Rows of several requests are packed position-major (`row = i * num_blocks + b`), which keeps the
//! rows that predict together. DFlash2 wraps both sublayers in a convolution over the block.

use std::convert::Infallible;

use super::DraftAnchor;
use super::config::BlockConfig;
use super::context::{Contexts, Model};
use super::heads_of_rows::{KeysValues, heads_of, turn};
use super::weights::{ConvWeights, LayerWeights, multiply_all};
use crate::device::{Buffer, Device, Staged};
use crate::error::Result;
use crate::kernels::Kernel;
use crate::kernels::bf16_matmul::{Epilogue, PackedBf16};
use crate::kernels::block_conv::{BlockConv, BlockConvArgs, ConvOutput, ConvSide};
use crate::kernels::draft_block::{DraftBlock, DraftBlockArgs};
use crate::kernels::embed_rows::{EmbedRows, EmbedRowsArgs};
use crate::kernels::matmul_rows::{MatmulInput, MatmulRows};
use crate::kernels::rms_norm::{NormOutput, RmsNorm, RmsNormArgs};
use crate::kernels::w12_matmul::WeightView;
use crate::weights::Linear;

/// Activations of a block forward, allocated once. `B` is a buffer; planning memory puts a number in its place.
pub(super) struct Block<B = Buffer<f32>> {
    /// Residual stream.
    residual: B,
    /// A sublayer's input, after its norm and convolution; activations of the MLP's last matmul.
    rows: MatmulRows<B>,
    /// A sublayer's input before the convolution, and its output before the convolution or the norm behind it.
    sublayer: B,
    /// Predicted convolution kernels.
    conv_delta: B,
    q_raw: B,
    q: B,
    keys_values: KeysValues<B>,
    attended: B,
    gate: B,
    up: B,
    /// Final-norm outputs.
    hidden: B,
    lists: Lists,
}

/// What a call's kernels read on both sides: filled once for all layers.
#[derive(Default)]
struct Lists {
    token_ids: Staged<u32>,
    positions: Staged<u32>,
}

/// One call's rows.
struct Rows<'a> {
    num_rows: usize,
    block_size: usize,
    anchors: &'a [DraftAnchor],
}

impl Lists {
    /// For a block of `block_size` rows after each anchor: the anchor, then masks.
    fn fill(
        &mut self,
        device: &Device,
        config: &BlockConfig,
        anchors: &[DraftAnchor],
        block_size: usize,
    ) -> Result<()> {
        let masks = (block_size - 1) * anchors.len();
        let anchor_ids = anchors.iter().map(|anchor| anchor.token_id);
        let token_ids = anchor_ids.chain(std::iter::repeat_n(config.mask_token_id as u32, masks));
        self.token_ids.fill(device, token_ids)?;
        let positions = (0..block_size).flat_map(|i| {
            let position = move |anchor: &DraftAnchor| (anchor.position + i) as u32;
            anchors.iter().map(position)
        });
        self.positions.fill(device, positions)?;
        Ok(())
    }
}

impl<B> Block<B> {
    /// What `rows` makes of each buffer's values per row.
    fn with<E>(
        config: &BlockConfig,
        mut rows: impl FnMut(usize) -> Result<B, E>,
    ) -> Result<Self, E> {
        let hidden = config.hidden_size;
        let delta = config
            .method
            .selector()
            .map_or(0, |selector| selector.conv_delta_dim(hidden));
        Ok(Self {
            residual: rows(hidden)?,
            rows: MatmulRows::with(hidden.max(config.intermediate_size), &mut rows)?,
            sublayer: rows(hidden)?,
            conv_delta: rows(delta)?,
            q_raw: rows(config.body.q_dim())?,
            q: rows(config.body.q_dim())?,
            keys_values: KeysValues::with(config, &mut rows)?,
            attended: rows(config.body.q_dim())?,
            gate: rows(config.intermediate_size)?,
            up: rows(config.intermediate_size)?,
            hidden: rows(hidden)?,
            lists: Lists::default(),
        })
    }
}

impl Block {
    /// Buffers for `num_rows` rows of all requests.
    ///
    /// # Errors
    /// [`DeviceError`](crate::error::DeviceError) when the device has no room.
    pub(super) fn new(device: &Device, config: &BlockConfig, num_rows: usize) -> Result<Self> {
        Ok(Self::with(config, |width| {
            device.try_alloc(num_rows * width)
        })?)
    }

    /// Values in all buffers for `num_rows` rows.
    pub(super) fn len_of(config: &BlockConfig, num_rows: usize) -> usize {
        let mut row_len = 0;
        let count = |width| {
            row_len += width;
            Ok::<_, Infallible>(width)
        };
        let Ok(_) = Block::with(config, count);
        num_rows * row_len
    }

    /// Writes down the rows of blocks after `anchors` that draft `num_levels` positions.
    pub(super) fn look_from(
        &mut self,
        device: &Device,
        config: &BlockConfig,
        anchors: &[DraftAnchor],
        num_levels: usize,
    ) -> Result<()> {
        let block_size = config.num_rows(num_levels);
        self.lists.fill(device, config, anchors, block_size)
    }

    /// Where the lists of [`look_from`](Self::look_from) lie.
    pub(super) fn lists(&self) -> [Option<u64>; 2] {
        [&self.lists.token_ids, &self.lists.positions].map(Staged::cuda_address)
    }

    /// Final-norm outputs of the last [`forward`](Self::forward).
    pub(super) fn hidden(&self) -> &Buffer<f32> {
        &self.hidden
    }

    /// Computes [`hidden`](Self::hidden) `[num_levels, anchors, hidden_size]` of the blocks of the last
    /// [`look_from`](Self::look_from).
    pub(super) fn forward(
        &mut self,
        device: &Device,
        model: Model<'_>,
        contexts: &Contexts,
        embed: &PackedBf16,
        anchors: &[DraftAnchor],
        num_levels: usize,
    ) -> Result<()> {
        let config = model.config;
        let num_blocks = anchors.len();
        let block_size = config.num_rows(num_levels);
        let rows = Rows {
            num_rows: block_size * num_blocks,
            block_size,
            anchors,
        };
        EmbedRows::run(
            device,
            EmbedRowsArgs {
                table: embed,
                token_ids: &self.lists.token_ids,
                scale: config.input_embedding_scale.unwrap_or(1.0),
                y: &mut self.residual,
            },
        )?;
        for (i, layer) in model.weights.layers.iter().enumerate() {
            self.attend(device, model, contexts, i, &rows)?;
            self.transform(device, config, layer, &rows)?;
        }
        // Position-major, anchor rows come first: they are skipped where they predict nothing.
        RmsNorm::run(
            device,
            RmsNormArgs {
                x: &self.residual,
                x_offset: config.first_row * num_blocks * config.hidden_size,
                x_stride: config.hidden_size,
                num_vectors: num_levels * num_blocks,
                width: config.hidden_size,
                weight: Some(&model.weights.final_norm),
                eps: config.rms_norm_eps,
                y: (&mut self.hidden).into(),
            },
        )?;
        Ok(())
    }

    fn attend(
        &mut self,
        device: &Device,
        model: Model<'_>,
        contexts: &Contexts,
        layer_index: usize,
        rows: &Rows<'_>,
    ) -> Result<()> {
        let (config, num_rows) = (model.config, rows.num_rows);
        let layer = &model.weights.layers[layer_index];
        let conv = layer.attention_conv.as_ref();
        self.enter(device, config, &layer.input_norm, conv, rows)?;
        let keys_values = self.keys_values.products(layer, config.body.values);
        let products = std::iter::once((&layer.q_proj, &mut self.q_raw)).chain(keys_values);
        multiply_all(device, &self.rows, num_rows, products)?;
        self.keys_values.finish_values(device, config, num_rows)?;
        let (raw, norm, num_heads) = (&self.q_raw, &layer.q_norm, config.body.num_heads);
        let queries = heads_of(config, raw, norm, num_heads, &mut self.q);
        let keys = self.keys_values.key_heads(config, layer);
        turn(device, model, &self.lists.positions, vec![queries, keys])?;
        let (k_pages, v_pages) = contexts.k_v(layer_index);
        let sight = config.layers[layer_index];
        DraftBlock::run(
            device,
            DraftBlockArgs {
                q: &self.q,
                k_block: &self.keys_values.k,
                v_block: &self.keys_values.v,
                k_pages,
                v_pages,
                contexts: contexts.seen_in(layer_index),
                block_size: rows.block_size,
                q_heads: config.body.num_heads,
                kv_heads: config.body.num_kv_heads,
                head_dim: config.body.head_dim,
                scale: config.body.score_scale,
                window: sight.window,
                causal: sight.causal,
                out: &mut self.attended,
            },
        )?;
        let out = Output {
            linear: &layer.o_proj,
            x: (&self.attended).into(),
            end: End::behind(conv, layer.post_norm(config, Sublayer::Attention)),
        };
        out.add_to(
            device,
            &mut self.residual,
            &mut self.sublayer,
            &self.conv_delta,
            rows,
        )
    }

    /// The MLP sublayer.
    fn transform(
        &mut self,
        device: &Device,
        config: &BlockConfig,
        layer: &LayerWeights,
        rows: &Rows<'_>,
    ) -> Result<()> {
        let num_rows = rows.num_rows;
        let conv = layer.mlp_conv.as_ref();
        self.enter(device, config, &layer.mlp_norm, conv, rows)?;
        let (x, gate, up) = (&mut self.rows, &mut self.gate, &mut self.up);
        layer
            .mlp
            .activate(WeightView::Exact, device, x, num_rows, gate, up)?;
        let out = Output {
            linear: &layer.mlp.down_proj,
            x: (&self.rows).into(),
            end: End::behind(conv, layer.post_norm(config, Sublayer::Mlp)),
        };
        out.add_to(
            device,
            &mut self.residual,
            &mut self.sublayer,
            &self.conv_delta,
            rows,
        )
    }

    /// A sublayer's input: norm of the residual stream and, in DFlash2, the convolution whose kernels it predicts.
    fn enter(
        &mut self,
        device: &Device,
        config: &BlockConfig,
        norm: &Buffer<f32>,
        conv: Option<&ConvWeights>,
        rows: &Rows<'_>,
    ) -> Result<()> {
        let normed = match conv {
            Some(_) => NormOutput::from(&mut self.sublayer),
            None => NormOutput::from(&mut self.rows),
        };
        RmsNorm::run(
            device,
            RmsNormArgs {
                x: &self.residual,
                x_offset: 0,
                x_stride: config.hidden_size,
                num_vectors: rows.num_rows,
                width: config.hidden_size,
                weight: Some(norm),
                eps: config.rms_norm_eps,
                y: normed,
            },
        )?;
        let Some(conv) = conv else {
            return Ok(());
        };
        conv.projection.forward(
            device,
            &self.sublayer,
            rows.num_rows,
            &mut self.conv_delta,
            Epilogue::Store,
        )?;
        let (x, y) = (&self.sublayer, (&mut self.rows).into());
        conv.run(device, ConvSide::Input, x, &self.conv_delta, rows, y)
    }
}

/// The end of a sublayer: its last projection, and what its product goes through before it is added.
struct Output<'a> {
    linear: &'a Linear,
    x: MatmulInput<'a>,
    end: End<'a>,
}

/// What lies between a sublayer's last projection and the residual stream.
#[derive(Clone, Copy)]
enum End<'a> {
    Nothing,
    /// DFlash2's second convolution.
    Conv(&'a ConvWeights),
    /// A norm.
    Norm(PostNorm<'a>),
}

/// The norm behind a sublayer, and what the residual stream is multiplied by once it is added.
#[derive(Clone, Copy)]
struct PostNorm<'a> {
    weight: &'a Buffer<f32>,
    eps: f32,
    factor: f32,
}

enum Sublayer {
    Attention,
    Mlp,
}

impl<'a> End<'a> {
    /// No format has both.
    fn behind(conv: Option<&'a ConvWeights>, norm: Option<PostNorm<'a>>) -> Self {
        match (conv, norm) {
            (Some(conv), _) => Self::Conv(conv),
            (None, Some(norm)) => Self::Norm(norm),
            (None, None) => Self::Nothing,
        }
    }
}

impl LayerWeights {
    fn post_norm(&self, config: &BlockConfig, sublayer: Sublayer) -> Option<PostNorm<'_>> {
        let (weights, config) = self.post_norms.as_ref().zip(config.body.post_norms)?;
        let (weight, factor) = match sublayer {
            Sublayer::Attention => (&weights.attention, 1.0),
            Sublayer::Mlp => (&weights.mlp, weights.layer_scalar.unwrap_or(1.0)),
        };
        Some(PostNorm {
            weight,
            eps: config.eps,
            factor,
        })
    }
}

impl Output<'_> {
    fn add_to(
        &self,
        device: &Device,
        residual: &mut Buffer<f32>,
        sublayer: &mut Buffer<f32>,
        conv_delta: &Buffer<f32>,
        rows: &Rows<'_>,
    ) -> Result<()> {
        let (linear, x, num_rows) = (self.linear, self.x, rows.num_rows);
        let add = Epilogue::AddToOutput;
        match self.end {
            End::Nothing => linear.forward(device, x, num_rows, residual, add)?,
            End::Conv(conv) => {
                linear.forward(device, x, num_rows, &mut *sublayer, Epilogue::Store)?;
                let (side, y) = (ConvSide::Output, ConvOutput::AddTo(residual));
                conv.run(device, side, sublayer, conv_delta, rows, y)?;
            }
            End::Norm(PostNorm {
                weight,
                eps,
                factor,
            }) => {
                linear.forward(device, x, num_rows, &mut *sublayer, Epilogue::Store)?;
                let width = linear.out_features();
                RmsNorm::run(
                    device,
                    RmsNormArgs {
                        x: sublayer,
                        x_offset: 0,
                        x_stride: width,
                        num_vectors: num_rows,
                        width,
                        weight: Some(weight),
                        eps,
                        y: NormOutput::AddTo {
                            y: residual,
                            factor,
                        },
                    },
                )?;
            }
        }
        Ok(())
    }
}

impl ConvWeights {
    fn run(
        &self,
        device: &Device,
        side: ConvSide,
        x: &Buffer<f32>,
        delta: &Buffer<f32>,
        rows: &Rows<'_>,
        y: ConvOutput<'_>,
    ) -> Result<()> {
        BlockConv::run(
            device,
            BlockConvArgs {
                x,
                delta,
                base: &self.base,
                side,
                num_rows: rows.num_rows,
                num_blocks: rows.anchors.len(),
                width: self.projection.in_features(),
                kernel_size: self.kernel_size,
                group_size: self.group_size,
                y,
            },
        )?;
        Ok(())
    }
}
