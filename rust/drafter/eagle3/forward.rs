//! The forward of EAGLE-3's layer: features and tokens in, next features and hidden states out.

use super::weights::Eagle3Weights;
use crate::device::{Buffer, Device, Staged};
use crate::drafter::config::Eagle3Config;
use crate::drafter::weights::multiply_all;
use crate::error::Result;
use crate::kernels::Kernel;
use crate::kernels::bf16_matmul::{Epilogue, PackedBf16};
use crate::kernels::embed_rows::{EmbedRows, EmbedRowsArgs};
use crate::kernels::gather_taps::{GatherTaps, GatherTapsArgs};
use crate::kernels::kv_span::KvSpan;
use crate::kernels::matmul_rows::MatmulRows;
use crate::kernels::paths::RowPaths;
use crate::kernels::rms_norm::{NormOutput, RmsNorm, RmsNormArgs};
use crate::kernels::rope::{Rope, RopeArgs, RopeHeads, Rotation};
use crate::kernels::tree_attention::{TreeAttention, TreeAttentionArgs};
use crate::kernels::w12_matmul::WeightView;

/// What a forward reads and never changes.
#[derive(Clone, Copy)]
pub(super) struct Layer<'a> {
    pub(super) device: &'a Device,
    pub(super) config: &'a Eagle3Config,
    pub(super) weights: &'a Eagle3Weights,
    pub(super) inverse_frequencies: &'a Buffer<f32>,
}

/// What attention reads of a row: made of its token and its feature alone. `B` is a buffer; planning memory puts a
/// number in its place.
pub(super) struct Entry<B = Buffer<f32>> {
    embedded: B,
    /// Embedding and feature after their norms.
    normed: [B; 2],
    /// Both side by side.
    joined: B,
    /// Rotated keys.
    pub(super) k: B,
    pub(super) v: B,
    lists: Lists,
}

/// What the kernels of an entry read on both sides.
#[derive(Default)]
struct Lists {
    token_ids: Staged<u32>,
    positions: Staged<u32>,
    /// All rows in turn.
    rows: Staged<u32>,
}

impl<B> Entry<B> {
    /// What `rows` makes of each buffer's values per row.
    pub(super) fn with<E>(
        config: &Eagle3Config,
        mut rows: impl FnMut(usize) -> Result<B, E>,
    ) -> Result<Self, E> {
        let hidden = config.hidden_size;
        Ok(Self {
            embedded: rows(hidden)?,
            normed: [rows(hidden)?, rows(hidden)?],
            joined: rows(2 * hidden)?,
            k: rows(config.kv_dim())?,
            v: rows(config.kv_dim())?,
            lists: Lists::default(),
        })
    }
}

impl Entry {
    /// Writes down the rows of the next [`Layer::enter`].
    pub(super) fn look_at(
        &mut self,
        device: &Device,
        token_ids: &[u32],
        positions: &[u32],
    ) -> Result<()> {
        let lists = &mut self.lists;
        lists.token_ids.fill(device, token_ids.iter().copied())?;
        lists.positions.fill(device, positions.iter().copied())?;
        lists.rows.fill(device, 0..token_ids.len() as u32)?;
        Ok(())
    }

    /// Where the lists of [`look_at`](Self::look_at) lie.
    pub(super) fn lists(&self) -> [Option<u64>; 3] {
        let Lists {
            token_ids,
            positions,
            rows,
        } = &self.lists;
        [token_ids, positions, rows].map(Staged::cuda_address)
    }
}

/// Activations of one depth of a draft.
pub(super) struct Pass<B = Buffer<f32>> {
    /// Features of the rows.
    pub(super) features: B,
    entry: Entry<B>,
    q: B,
    attended: B,
    residual: B,
    /// Activations of the MLP.
    rows: MatmulRows<B>,
    gate: B,
    up: B,
    /// Final-norm outputs.
    pub(super) hidden: B,
    parent_rows: Staged<u32>,
}

impl<B> Pass<B> {
    /// What `rows` makes of each buffer's values per row.
    pub(super) fn with<E>(
        config: &Eagle3Config,
        mut rows: impl FnMut(usize) -> Result<B, E>,
    ) -> Result<Self, E> {
        let hidden = config.hidden_size;
        Ok(Self {
            features: rows(hidden)?,
            entry: Entry::with(config, &mut rows)?,
            q: rows(config.q_dim())?,
            attended: rows(config.q_dim())?,
            residual: rows(hidden)?,
            rows: MatmulRows::with(hidden.max(config.intermediate_size), &mut rows)?,
            gate: rows(config.intermediate_size)?,
            up: rows(config.intermediate_size)?,
            hidden: rows(hidden)?,
            parent_rows: Staged::default(),
        })
    }
}

/// Keys and values of all rows of a draft.
pub(super) struct Tail {
    k: Buffer<f32>,
    v: Buffer<f32>,
}

impl Tail {
    pub(super) fn new(device: &Device, len: usize) -> Result<Self> {
        Ok(Self {
            k: device.try_alloc(len)?,
            v: device.try_alloc(len)?,
        })
    }
}

/// What the rows of one depth see.
pub(super) struct TreeContext<'a> {
    /// Through rows of the tail.
    pub(super) paths: &'a RowPaths,
    /// Keys and values of committed positions.
    pub(super) pages: (&'a Buffer<f32>, &'a Buffer<f32>),
    /// The first of this depth's rows of the tail.
    pub(super) first_tail_row: usize,
}

impl Layer<'_> {
    /// Fills `entry` for the rows that it was told of, with their `features`.
    pub(super) fn enter(
        &self,
        embed: &PackedBf16,
        features: &Buffer<f32>,
        entry: &mut Entry,
    ) -> Result<()> {
        let Self {
            device,
            config,
            weights,
            ..
        } = *self;
        let lists = &entry.lists;
        let num_rows = lists.token_ids.len();
        EmbedRows::run(
            device,
            EmbedRowsArgs {
                table: embed,
                token_ids: &lists.token_ids,
                scale: 1.0,
                y: &mut entry.embedded,
            },
        )?;
        let [normed_embedding, normed_feature] = &mut entry.normed;
        self.norm(
            &entry.embedded,
            &weights.input_norm,
            num_rows,
            normed_embedding,
        )?;
        self.norm(features, &weights.hidden_norm, num_rows, normed_feature)?;
        GatherTaps::run(
            device,
            GatherTapsArgs {
                taps: &entry.normed,
                rows: &entry.lists.rows,
                width: config.hidden_size,
                y: &mut entry.joined,
            },
        )?;
        let products = [
            (&weights.k_proj, &mut entry.k),
            (&weights.v_proj, &mut entry.v),
        ];
        multiply_all(device, &entry.joined, num_rows, products)?;
        self.rotate(&mut entry.k, config.num_kv_heads, &entry.lists.positions)
    }

    fn norm<'a>(
        &self,
        x: &Buffer<f32>,
        weight: &Buffer<f32>,
        num_rows: usize,
        y: impl Into<NormOutput<'a>>,
    ) -> Result<()> {
        RmsNorm::run(
            self.device,
            RmsNormArgs {
                x,
                x_offset: 0,
                x_stride: self.config.hidden_size,
                num_vectors: num_rows,
                width: self.config.hidden_size,
                weight: Some(weight),
                eps: self.config.rms_norm_eps,
                y: y.into(),
            },
        )?;
        Ok(())
    }

    fn rotate(&self, x: &mut Buffer<f32>, num_heads: usize, positions: &Staged<u32>) -> Result<()> {
        Rope::run(
            self.device,
            RopeArgs {
                heads: vec![RopeHeads {
                    norm: None,
                    num_heads,
                    y: x,
                }],
                head_dim: self.config.head_dim,
                positions,
                rotation: Some(Rotation {
                    inverse_frequencies: self.inverse_frequencies,
                    pair_offset: self.config.head_dim / 2,
                }),
            },
        )?;
        Ok(())
    }
}

impl Pass {
    /// Writes down the rows of a depth: their tokens, positions and rows of the depth before, none for the first.
    pub(super) fn look_at(
        &mut self,
        device: &Device,
        token_ids: &[u32],
        positions: &[u32],
        parent_rows: impl Iterator<Item = u32>,
    ) -> Result<()> {
        self.parent_rows.fill(device, parent_rows)?;
        self.entry.look_at(device, token_ids, positions)
    }

    /// Where the lists of [`look_at`](Self::look_at) lie.
    pub(super) fn lists(&self) -> [Option<u64>; 4] {
        let [token_ids, positions, rows] = self.entry.lists();
        [token_ids, positions, rows, self.parent_rows.cuda_address()]
    }

    /// Takes as features those that the last forward drafted for the parents.
    pub(super) fn follow(&mut self, layer: &Layer<'_>) -> Result<()> {
        let drafted = match layer.config.norm_output {
            true => &self.hidden,
            false => &self.residual,
        };
        GatherTaps::run(
            layer.device,
            GatherTapsArgs {
                taps: std::slice::from_ref(drafted),
                rows: &self.parent_rows,
                width: layer.config.hidden_size,
                y: &mut self.features,
            },
        )?;
        Ok(())
    }

    /// Runs the layer over the rows of one depth, one per path; keys and values join the tail.
    pub(super) fn forward(
        &mut self,
        layer: &Layer<'_>,
        embed: &PackedBf16,
        context: &TreeContext<'_>,
        tail: &mut Tail,
    ) -> Result<()> {
        let Layer {
            device,
            config,
            weights,
            ..
        } = *layer;
        let num_rows = context.paths.num_rows();
        layer.enter(embed, &self.features, &mut self.entry)?;
        for (from, to) in [(&self.entry.k, &mut tail.k), (&self.entry.v, &mut tail.v)] {
            let first = context.first_tail_row * config.kv_dim();
            to.copy_range(first, from, 0..num_rows * config.kv_dim())?;
        }
        let store = Epilogue::Store;
        weights
            .q_proj
            .forward(device, &self.entry.joined, num_rows, &mut self.q, store)?;
        layer.rotate(&mut self.q, config.num_heads, &self.entry.lists.positions)?;
        TreeAttention::run(
            device,
            TreeAttentionArgs {
                q: &self.q,
                k_tail: &tail.k,
                v_tail: &tail.v,
                k_pages: context.pages.0,
                v_pages: context.pages.1,
                paths: context.paths,
                span: KvSpan::Whole,
                q_heads: config.num_heads,
                kv_heads: config.num_kv_heads,
                head_dim: config.head_dim,
                scale: (config.head_dim as f64).powf(-0.5) as f32 * config.rope.score_factor(),
                window: None,
                out: &mut self.attended,
            },
        )?;
        let start = match config.norm_before_residual {
            true => &self.entry.normed[1],
            false => &self.features,
        };
        self.residual
            .copy_from(start, num_rows * config.hidden_size)?;
        let add = Epilogue::AddToOutput;
        weights
            .o_proj
            .forward(device, &self.attended, num_rows, &mut self.residual, add)?;
        layer.norm(
            &self.residual,
            &weights.post_attention_norm,
            num_rows,
            &mut self.rows,
        )?;
        let (rows, gate, up) = (&mut self.rows, &mut self.gate, &mut self.up);
        weights
            .mlp
            .activate(WeightView::Exact, device, rows, num_rows, gate, up)?;
        weights
            .mlp
            .down_proj
            .forward(device, &self.rows, num_rows, &mut self.residual, add)?;
        layer.norm(
            &self.residual,
            &weights.final_norm,
            num_rows,
            &mut self.hidden,
        )
    }
}
