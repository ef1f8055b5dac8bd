//! The one decoder: token rows in, final hidden rows out, for every family that a [`ModelConfig`] can describe.
//!
//! A forward reads the caches. What a later commit needs of its rows (keys, values, recurrent log entries, convolution
//! inputs) stays in the [`PassTail`] until the next forward. It writes them only for a prompt chunk longer than a path:
//! rows that later segments of the same pass read go there layer by layer. If it fails then, the slot is good for nothing
//! but a new request.

use std::convert::Infallible;

use crate::cache::slots::SequenceCaches;
use crate::device::{Buffer, Device, Graphs, Staged};
use crate::error::{DeviceError, KernelError, Result};
use crate::kernels::Kernel;
use crate::kernels::bf16_matmul::{Epilogue, Product};
use crate::kernels::embed_rows::{EmbedRows, EmbedRowsArgs};
use crate::kernels::lm_head_screen::{HeadScores, ScreenedHead};
use crate::kernels::matmul_rows::MatmulInput;
use crate::kernels::paths::{LaunchKey, RowPaths};
use crate::kernels::placed_rows::PlacedRows;
use crate::kernels::rms_norm::{NormOutput, RmsNorm, RmsNormArgs};
use crate::kernels::sample_rows::RowSampler;
use crate::kernels::tree_attention;
use crate::kernels::w12_matmul::WeightView;
use crate::options::KernelSet;
use crate::weights::linear::{Linear, multiply_together};

use super::attention::AttentionLayer;
use super::config::{LayerConfig, ModelConfig};
use super::head::{Head, HeadPath, TokenChoices};
use super::lent::Lent;
use super::stock::{StockPass, StockWorkspace};
use super::tail::{AttentionTail, LayerTail, PassTail};
use super::weights::{DecoderWeights, LayerWeights, MixerWeights};
use super::workspace::Workspace;
use super::{attention, gdn};

/// What the buffers of a decoder's passes take, by purpose.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PassBytes {
    /// Activations, taps included.
    pub activations: usize,
    /// What rows leave behind for a commit.
    pub tail: usize,
    /// Fp32 logits of all rows.
    pub logits: usize,
}

impl PassBytes {
    /// All of it.
    pub fn total(&self) -> usize {
        self.activations + self.tail + self.logits
    }
}

/// Residual-stream values of one pass, for score records.
#[derive(Default)]
pub struct ResidualProbe {
    /// L2 norms entering layer 0 and after each layer, `[L + 1][rows]`.
    pub residual_l2: Vec<Vec<f32>>,
    /// Residual rows at the same points, `[L + 1][rows * H]`.
    pub residuals: Vec<Vec<f32>>,
    /// L2 norms after the final norm, `[rows]`.
    pub final_norm_l2: Vec<f32>,
}

/// A loaded target: config, weights and the buffers of one pass, which are allocated once for the largest.
pub struct Decoder {
    config: ModelConfig,
    weights: DecoderWeights,
    /// One per layer, where it rotates.
    inverse_frequencies: Vec<Option<Buffer<f32>>>,
    tap_layers: Vec<usize>,
    keeps_taps: bool,
    token_ids: Staged<u32>,
    workspace: Workspace,
    stock: Option<StockWorkspace>,
    tail: PassTail,
    head: Head,
    graphs: Graphs<PassKey>,
}

/// What the launches of a pass follow from: view, rows, address of the token ids, whether taps are kept.
type PassKey = (WeightView, LaunchKey, Option<u64>, bool);

impl Decoder {
    /// A decoder for passes of up to `max_rows` rows that keeps the residual stream after each of `tap_layers` for a
    /// drafter.
    ///
    /// # Errors
    /// [`DeviceError`](crate::error::DeviceError) when the device has no room.
    pub fn new(
        config: ModelConfig,
        weights: DecoderWeights,
        tap_layers: &[usize],
        head: HeadPath,
        max_rows: usize,
        device: &Device,
    ) -> Result<Self> {
        let rows = |width| device.try_alloc(max_rows * width);
        let inverse_frequencies = |layer: &LayerConfig| match layer {
            LayerConfig::Attention(attention) => {
                let rope = attention.rope.as_ref();
                rope.map(|rope| device.constants(&rope.inverse_frequencies()))
                    .transpose()
            }
            LayerConfig::GatedDelta => Ok(None),
        };
        let layers = config.layers.iter();
        Ok(Self {
            inverse_frequencies: layers.map(inverse_frequencies).collect::<Result<_, _>>()?,
            workspace: Workspace::with(&config, tap_layers.len(), rows)?,
            stock: match weights.stock {
                Some(_) => Some(StockWorkspace::new(&config, max_rows, device)?),
                None => None,
            },
            tail: PassTail::new(&config, max_rows, device)?,
            tap_layers: tap_layers.to_vec(),
            keeps_taps: true,
            token_ids: Staged::with_capacity(device, max_rows)?,
            head: Head::new(device, &weights, head, config.logit_shape, max_rows)?,
            graphs: Graphs::default(),
            config,
            weights,
        })
    }

    /// Bytes of the buffers of a decoder before it exists, with activations of `activation_bytes` each.
    pub fn pass_bytes_of(
        config: &ModelConfig,
        kernels: KernelSet,
        num_taps: usize,
        max_rows: usize,
        activation_bytes: usize,
    ) -> PassBytes {
        let mut row_len = 0;
        let count = |width| {
            row_len += width;
            Ok::<_, Infallible>(width)
        };
        let Ok(_) = Workspace::with(config, num_taps, count);
        let stock = match kernels {
            KernelSet::Lossless => 0,
            KernelSet::Stock => StockWorkspace::row_bytes_of(config),
        };
        PassBytes {
            activations: max_rows * ((row_len + config.hidden_size) * activation_bytes + stock),
            tail: max_rows * PassTail::row_bytes_of(config, activation_bytes),
            logits: max_rows * config.vocab_size * size_of::<f32>(),
        }
    }

    /// The model's config.
    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    /// The model's weights.
    pub fn weights(&self) -> &DecoderWeights {
        &self.weights
    }

    /// What a drafter reads of them.
    pub fn lent(&self) -> Lent<'_> {
        Lent::new(&self.weights, self.head.screened())
    }

    /// Whether forwards keep taps, as they do at first: plain decoding on an engine with a drafter reads none.
    pub fn keep_taps(&mut self, keeps_taps: bool) {
        self.keeps_taps = keeps_taps;
    }

    /// Residual stream after each tapped layer, `[rows, H]` each, of the last forward that kept taps.
    pub fn taps(&self) -> &[Buffer<f32>] {
        &self.workspace.taps
    }

    /// Runs all layers over the rows of `paths`, through `view` of their weights; `probe` collects residual-stream values
    /// when given. `caches` are prepared for them, and take the rows that `paths` settles.
    ///
    /// # Errors
    /// [`KernelError`] when a kernel refuses its arguments.
    pub fn forward(
        &mut self,
        device: &Device,
        view: WeightView,
        token_ids: &[u32],
        paths: &RowPaths,
        caches: &mut SequenceCaches,
        probe: Option<&mut ResidualProbe>,
    ) -> Result<()> {
        self.token_ids.fill(device, token_ids.iter().copied())?;
        let mut context = PassContext {
            device,
            paths,
            caches,
            view,
        };
        if probe.is_some() || !paths.is_one_wave() {
            // Values are read on the way; folds go by positions, which no key holds.
            return self.run_layers(&mut context, probe);
        }
        let token_ids = self.token_ids.cuda_address();
        let key = (view, paths.launch_key(), token_ids, self.keeps_taps);
        let mut graphs = std::mem::take(&mut self.graphs);
        let outcome = graphs.run(device, key, || self.run_layers(&mut context, None));
        self.graphs = graphs;
        outcome
    }

    fn run_layers(
        &mut self,
        pass: &mut PassContext<'_>,
        mut probe: Option<&mut ResidualProbe>,
    ) -> Result<()> {
        let PassContext {
            device,
            paths,
            ref mut caches,
            view,
        } = *pass;
        let (num_rows, width) = (paths.num_rows(), self.config.hidden_size);
        self.embed(device, num_rows)?;
        if let Some(probe) = probe.as_deref_mut() {
            probe.observe(&self.workspace.residual, num_rows, width)?;
        }
        let mut context = LayerContext {
            device,
            config: &self.config,
            paths,
            caches,
            num_rows,
            view,
        };
        for (layer, tail) in self.tail.layers.iter_mut().enumerate() {
            let frequencies = self.inverse_frequencies[layer].as_ref();
            match (&self.weights.stock, &mut self.stock) {
                (Some(weights), Some(stock)) => StockPass {
                    context: &mut context,
                    workspace: &mut self.workspace,
                    stock,
                }
                .forward(layer, &weights.layers[layer], frequencies, tail)?,
                _ => {
                    let weights = &self.weights.layers[layer];
                    context.forward(layer, weights, frequencies, &mut self.workspace, tail)?;
                }
            }
            for (tap, buffer) in self.tap_layers.iter().zip(&mut self.workspace.taps) {
                if self.keeps_taps && *tap == layer {
                    buffer.copy_from(&self.workspace.residual, num_rows * width)?;
                }
            }
            if let Some(probe) = probe.as_deref_mut() {
                probe.observe(&self.workspace.residual, num_rows, width)?;
            }
        }
        let workspace = &mut self.workspace;
        context.norm(
            &workspace.residual,
            &self.weights.final_norm,
            &mut workspace.hidden,
        )?;
        if let Some(probe) = probe {
            let hidden = workspace.hidden.read_back(num_rows * width)?;
            probe.final_norm_l2 = row_norms(&hidden, width);
        }
        Ok(())
    }

    /// Starts the residual stream of the rows in `self.token_ids`.
    fn embed(&mut self, device: &Device, num_rows: usize) -> Result<(), KernelError> {
        let workspace = &mut self.workspace;
        let embedded = match self.config.embedding_norm {
            // Free until the pass ends.
            true => &mut workspace.hidden,
            false => &mut workspace.residual,
        };
        EmbedRows::run(
            device,
            EmbedRowsArgs {
                table: &self.weights.embed,
                token_ids: &self.token_ids,
                scale: self.config.embedding_scale,
                y: embedded,
            },
        )?;
        if !self.config.embedding_norm {
            return Ok(());
        }
        RmsNorm::run(
            device,
            RmsNormArgs {
                x: &workspace.hidden,
                x_offset: 0,
                x_stride: self.config.hidden_size,
                num_vectors: num_rows,
                width: self.config.hidden_size,
                weight: None,
                eps: self.config.rms_norm_eps,
                y: (&mut workspace.residual).into(),
            },
        )
    }

    /// Fp32 logits `[rows.len(), V]` of chosen rows of the last forward.
    ///
    /// # Errors
    /// [`KernelError`] when a kernel refuses its arguments.
    pub fn logits(&mut self, device: &Device, rows: &[u32]) -> Result<&Buffer<f32>> {
        let hidden = &self.workspace.hidden;
        self.head.logits(device, &self.weights, hidden, rows)
    }

    /// What the last call of [`Self::logits`] or [`Self::choose_with_logits`] computed.
    pub fn last_logits(&self) -> &Buffer<f32> {
        self.head.last_logits()
    }

    /// Greedy tokens by `scores` of chosen rows of the last forward, `masked` listing the ids that each may not choose;
    /// by the INT8 copy where the engine has one.
    ///
    /// # Errors
    /// [`KernelError`] when a kernel refuses its arguments.
    pub fn choose(
        &mut self,
        device: &Device,
        rows: &[u32],
        masked: &[&[u32]],
        scores: HeadScores,
    ) -> Result<TokenChoices> {
        let hidden = &self.workspace.hidden;
        self.head
            .choose(device, &self.weights, hidden, rows, masked, scores)
    }

    /// Tokens after chosen rows by all logits, which [`Self::last_logits`] then gives: the greedy ones, or as each row's
    /// sampler draws.
    ///
    /// # Errors
    /// [`KernelError`] when a kernel refuses its arguments.
    pub fn choose_with_logits(
        &mut self,
        device: &Device,
        rows: &[u32],
        masked: &[&[u32]],
        samplers: &[RowSampler],
    ) -> Result<TokenChoices> {
        let hidden = &self.workspace.hidden;
        self.head
            .choose_densely(device, &self.weights, hidden, rows, masked, samplers)
    }

    /// How greedy tokens are found.
    pub fn head_path(&self) -> HeadPath {
        match self.head.screened() {
            Some(_) => HeadPath::Screened,
            None => HeadPath::Dense,
        }
    }

    /// Finds greedy tokens by `path` from now on; by all logits where there is no INT8 copy.
    pub fn set_head_path(&mut self, path: HeadPath) {
        self.head.set_path(path);
    }

    /// Bytes of scratch that attention of `num_rows` rows takes on a GPU at most, behind `num_positions` committed ones.
    pub fn scratch_bytes(&self, num_rows: usize, num_positions: usize) -> usize {
        self.config.widest_attention(|attention| {
            let (num_heads, head_dim) = (attention.num_heads, attention.head_dim);
            tree_attention::scratch_bytes(num_rows, num_positions, num_heads, head_dim)
        })
    }

    /// Bytes of copies made of the weights: the screened head.
    pub fn num_copy_bytes(&self) -> usize {
        self.head.screened().map_or(0, ScreenedHead::num_bytes)
    }

    /// Commits rows of the last forward to the caches.
    ///
    /// # Errors
    /// [`KernelError`] when a kernel refuses its arguments.
    pub fn commit(
        &self,
        device: &Device,
        caches: &mut SequenceCaches,
        rows: &PlacedRows,
    ) -> Result<(), KernelError> {
        self.tail.commit(device, caches, rows)
    }
}

/// What a pass is run on.
struct PassContext<'a> {
    device: &'a Device,
    paths: &'a RowPaths,
    caches: &'a mut SequenceCaches,
    view: WeightView,
}

/// What the layers of one pass share.
pub(super) struct LayerContext<'a> {
    pub(super) device: &'a Device,
    pub(super) config: &'a ModelConfig,
    pub(super) paths: &'a RowPaths,
    pub(super) caches: &'a mut SequenceCaches,
    pub(super) num_rows: usize,
    /// What linear layers read of their weights.
    pub(super) view: WeightView,
}

/// The norm behind a sublayer, and what the residual stream is multiplied by once it is added.
#[derive(Clone, Copy)]
pub(super) struct PostNorm<'a> {
    weight: &'a Buffer<f32>,
    eps: f32,
    factor: f32,
}

impl LayerContext<'_> {
    /// Gives keys and values of rows that later segments of the pass read to the caches, before attention of `layer`.
    pub(super) fn settle_kv(
        &mut self,
        layer: usize,
        tail: &AttentionTail,
    ) -> Result<(), KernelError> {
        for settled in self.paths.waves().filter_map(|wave| wave.settled) {
            let (k, v) = (&tail.k, &tail.v);
            self.caches.settle_kv(self.device, layer, settled, k, v)?;
        }
        Ok(())
    }

    /// `y = x Wᵀ` or `y += x Wᵀ` for all rows.
    pub(super) fn multiply<'a>(
        &self,
        weight: &Linear,
        x: impl Into<MatmulInput<'a>>,
        y: &mut Buffer<f32>,
        epilogue: Epilogue,
    ) -> Result<(), KernelError> {
        weight.forward_through(self.view, self.device, x, self.num_rows, y, epilogue)
    }

    /// `y = x Wᵀ` of several matrices of one K, for all rows.
    pub(super) fn multiply_together<'a>(
        &self,
        x: impl Into<MatmulInput<'a>>,
        products: impl IntoIterator<Item = (&'a Linear, &'a mut Buffer<f32>)>,
    ) -> Result<(), KernelError> {
        let products = products
            .into_iter()
            .map(|(weight, y)| Product { weight, y });
        let store = Epilogue::Store;
        multiply_together(self.view, self.device, x, self.num_rows, products, store)
    }

    /// Ends a sublayer: adds `x Wᵀ`, through `post_norm` where there is one, to `residual`. `sublayer` is scratch.
    pub(super) fn add_to_residual<'a>(
        &self,
        weight: &Linear,
        x: impl Into<MatmulInput<'a>>,
        post_norm: Option<PostNorm<'_>>,
        sublayer: &mut Buffer<f32>,
        residual: &mut Buffer<f32>,
    ) -> Result<(), KernelError> {
        let Some(PostNorm {
            weight: norm,
            eps,
            factor,
        }) = post_norm
        else {
            return self.multiply(weight, x, residual, Epilogue::AddToOutput);
        };
        self.multiply(weight, x, sublayer, Epilogue::Store)?;
        RmsNorm::run(
            self.device,
            RmsNormArgs {
                x: sublayer,
                x_offset: 0,
                x_stride: self.config.hidden_size,
                num_vectors: self.num_rows,
                width: self.config.hidden_size,
                weight: Some(norm),
                eps,
                y: NormOutput::AddTo {
                    y: residual,
                    factor,
                },
            },
        )
    }

    fn forward(
        &mut self,
        layer: usize,
        weights: &LayerWeights,
        inverse_frequencies: Option<&Buffer<f32>>,
        workspace: &mut Workspace,
        tail: &mut LayerTail,
    ) -> Result<(), KernelError> {
        let post_norms = self.config.post_norms.zip(weights.post_norms.as_ref());
        let behind_mixer = post_norms.map(|(config, weights)| PostNorm {
            weight: &weights.mixer,
            eps: config.eps,
            factor: 1.0,
        });
        let behind_mlp = post_norms.map(|(config, weights)| PostNorm {
            weight: &weights.mlp,
            eps: config.eps,
            factor: weights.layer_scalar.unwrap_or(1.0),
        });
        self.norm(
            &workspace.residual,
            &weights.input_norm,
            &mut workspace.rows,
        )?;
        match (&weights.mixer, &self.config.layers[layer], tail) {
            (
                MixerWeights::Attention(weights),
                LayerConfig::Attention(config),
                LayerTail::Attention(tail),
            ) => {
                let layer = AttentionLayer {
                    index: layer,
                    config,
                    weights,
                    inverse_frequencies,
                    post_norm: behind_mixer,
                };
                attention::forward(self, layer, workspace, tail)?;
            }
            (MixerWeights::GatedDelta(weights), _, LayerTail::GatedDelta(tail)) => {
                gdn::forward(self, layer, weights, behind_mixer, workspace, tail)?;
            }
            _ => unreachable!("tails are built from the config that the weights were loaded by"),
        }
        self.norm(&workspace.residual, &weights.mlp_norm, &mut workspace.rows)?;
        weights.mlp.activate(
            self.view,
            self.device,
            &mut workspace.rows,
            self.num_rows,
            &mut workspace.gate,
            &mut workspace.up,
        )?;
        self.add_to_residual(
            &weights.mlp.down_proj,
            &workspace.rows,
            behind_mlp,
            &mut workspace.sublayer,
            &mut workspace.residual,
        )
    }

    fn norm<'a>(
        &self,
        x: &'a Buffer<f32>,
        weight: &'a Buffer<f32>,
        y: impl Into<NormOutput<'a>>,
    ) -> Result<(), KernelError> {
        RmsNorm::run(
            self.device,
            RmsNormArgs {
                x,
                x_offset: 0,
                x_stride: self.config.hidden_size,
                num_vectors: self.num_rows,
                width: self.config.hidden_size,
                weight: Some(weight),
                eps: self.config.rms_norm_eps,
                y: y.into(),
            },
        )
    }
}

impl ResidualProbe {
    fn observe(
        &mut self,
        residual: &Buffer<f32>,
        num_rows: usize,
        width: usize,
    ) -> Result<(), DeviceError> {
        let rows = residual.read_back(num_rows * width)?;
        self.residual_l2.push(row_norms(&rows, width));
        self.residuals.push(rows);
        Ok(())
    }
}

fn row_norms(rows: &[f32], width: usize) -> Vec<f32> {
    let square = |&x: &f32| f64::from(x) * f64::from(x);
    let norm = |row: &[f32]| row.iter().map(square).sum::<f64>().sqrt() as f32;
    rows.chunks_exact(width).map(norm).collect()
}
