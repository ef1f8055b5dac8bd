//! A parallel drafter's context: keys and values of the positions before the anchor, in pages of its own.
//!
//! A position's taps go through `fc` and its norm once; every layer then projects keys (normalised, rotated for the
//! absolute position) and values from that one vector. Rows are taken in chunks of any size with the same result, as
//! all kernels are row-invariant. Layers with a window keep a ring of pages that holds the window and whatever scratch
//! rows may follow it, as the target's do.

use std::convert::Infallible;

use super::config::BlockConfig;
use super::context_length::ContextLength;
use super::heads_of_rows::{KeysValues, turn};
use super::weights::{BlockWeights, multiply_all};
use super::{ContextRows, DraftAnchor};
use crate::cache::pages::{KvCache, KvLayout, KvTail};
use crate::device::{Buffer, Device, Graphs, Staged};
use crate::error::Result;
use crate::kernels::bf16_matmul::Epilogue;
use crate::kernels::draft_block::{BlockContext, BlockContexts, ContextsKey};
use crate::kernels::gather_taps::{GatherTaps, GatherTapsArgs};
use crate::kernels::kv_span::{KvSpan, PerSpan};
use crate::kernels::matmul_rows::MatmulRows;
use crate::kernels::paths::{MAX_PATH_ROWS, row_bucket};
use crate::kernels::placed_rows::PlacedRows;
use crate::kernels::rms_norm::{RmsNorm, RmsNormArgs};
use crate::kernels::tree_attention::KV_BLOCK;
use crate::kernels::{Kernel, check_size};

/// Rows per forward of `fc` and the projections.
const CHUNK_ROWS: usize = 64;

/// Contexts of all slots.
pub(super) struct Contexts {
    cache: KvCache,
    slots: Vec<Slot>,
    scratch: Scratch,
    /// A chunk's rows of the pass, and their positions.
    pass_rows: Staged<u32>,
    positions: Staged<u32>,
    /// Rows of a chunk in the slot's pages.
    chunk_rows: PlacedRows,
    /// Contexts of the blocks being drafted.
    seen: PerSpan<BlockContexts>,
    graphs: Graphs<ExtensionKey>,
}

/// What the launches of an extension follow from.
#[derive(PartialEq, Eq, Hash)]
struct ExtensionKey {
    rows: Option<u64>,
    positions: Option<u64>,
    placed: ([Option<u64>; 2], usize),
}

#[derive(Default)]
struct Slot {
    /// Page tables, as far as reserved.
    tables: PerSpan<Vec<u32>>,
    length: ContextLength,
}

impl Slot {
    /// The context as it lies in layers of `span`.
    fn context(&self, span: KvSpan) -> BlockContext<'_> {
        let pages = self.tables.of(span);
        let context_len = self.length.len();
        BlockContext {
            page_table: &pages[..pages.len().min(context_len.div_ceil(KV_BLOCK))],
            context_len,
        }
    }
}

/// What the layers keep: behind the anchor's window come the scratch rows of a path.
fn layout(config: &BlockConfig) -> KvLayout {
    let layers = config.layers.iter();
    let layers = layers.map(|layer| (config.kv_shape(), layer.window));
    KvLayout::new(layers, MAX_PATH_ROWS)
}

/// Pages of layers with a window that `num_slots` slots use at most.
fn window_pages(layout: &KvLayout, num_slots: usize, pages_per_sequence: usize) -> usize {
    num_slots * layout.ring_pages().min(pages_per_sequence)
}

/// What a context's pages take.
pub(super) struct ContextBytes {
    /// One page of the layers that see everything.
    pub(super) page: usize,
    /// The ring of one slot.
    pub(super) slot: usize,
}

/// Activations of one chunk. `B` is a buffer; planning memory puts a number in its place.
struct Scratch<B = Buffer<f32>> {
    taps: B,
    fused: B,
    hidden: MatmulRows<B>,
    layers: Vec<KeysValues<B>>,
}

impl<B> Scratch<B> {
    /// What `rows` makes of each buffer's values per row.
    fn with<E>(
        config: &BlockConfig,
        mut rows: impl FnMut(usize) -> Result<B, E>,
    ) -> Result<Self, E> {
        Ok(Self {
            taps: rows(config.taps_dim())?,
            fused: rows(config.hidden_size)?,
            hidden: MatmulRows::with(config.hidden_size, &mut rows)?,
            layers: (config.layers.iter())
                .map(|_| KeysValues::with(config, &mut rows))
                .collect::<Result<_, E>>()?,
        })
    }
}

impl Contexts {
    pub(super) fn new(
        device: &Device,
        config: &BlockConfig,
        num_slots: usize,
        num_pages: usize,
        pages_per_sequence: usize,
    ) -> Result<Self> {
        let layout = layout(config);
        let num_pages = PerSpan {
            whole: num_pages,
            window: window_pages(&layout, num_slots, pages_per_sequence),
        };
        Ok(Self {
            cache: KvCache::new(device, layout, num_pages)?,
            slots: (0..num_slots).map(|_| Slot::default()).collect(),
            scratch: Scratch::with(config, |width| device.try_alloc(CHUNK_ROWS * width))?,
            pass_rows: Staged::with_capacity(device, CHUNK_ROWS)?,
            positions: Staged::with_capacity(device, CHUNK_ROWS)?,
            chunk_rows: PlacedRows::with_capacity(device, CHUNK_ROWS)?,
            seen: PerSpan::default(),
            graphs: Graphs::default(),
        })
    }

    /// Bytes of the pages, with elements of `activation_bytes`.
    pub(super) fn bytes_of(
        config: &BlockConfig,
        pages_per_sequence: usize,
        activation_bytes: usize,
    ) -> ContextBytes {
        let layout = layout(config);
        let page = layout.page_bytes(activation_bytes);
        ContextBytes {
            page: page.whole,
            slot: window_pages(&layout, 1, pages_per_sequence) * page.window,
        }
    }

    /// Values of the buffers besides the pages.
    pub(super) fn scratch_len_of(config: &BlockConfig) -> usize {
        let mut row_len = 0;
        let count = |width| {
            row_len += width;
            Ok::<_, Infallible>(width)
        };
        let Ok(_) = Scratch::with(config, count);
        CHUNK_ROWS * row_len
    }

    pub(super) fn reserve(&mut self, slot: usize, num_tokens: usize) -> bool {
        let tables = &mut self.slots[slot].tables;
        self.cache.reserve(tables, num_tokens)
    }

    pub(super) fn release(&mut self, slot: usize) {
        let slot = &mut self.slots[slot];
        slot.length = ContextLength::default();
        self.cache.release(&mut slot.tables);
    }

    pub(super) fn rollback(&mut self, slot: usize) {
        self.slots[slot].length.rollback();
    }

    /// Writes down what the blocks after `anchors` see; refuses an anchor whose context does not hold exactly the
    /// positions before it.
    pub(super) fn look_from(&mut self, device: &Device, anchors: &[DraftAnchor]) -> Result<()> {
        for anchor in anchors {
            self.slots[anchor.slot].length.check_ends_before(anchor)?;
        }
        let slots = anchors.iter().map(|anchor| &self.slots[anchor.slot]);
        for span in KvSpan::ALL {
            let contexts = slots.clone().map(|slot| slot.context(span));
            self.seen.of_mut(span).fill(device, contexts)?;
        }
        Ok(())
    }

    /// What the blocks of the last [`look_from`](Self::look_from) see in `layer`.
    pub(super) fn seen_in(&self, layer: usize) -> &BlockContexts {
        self.seen.of(self.cache.span(layer))
    }

    /// What the launches of blocks of `block_size` rows follow from, layer by layer.
    pub(super) fn launch_keys(&self, config: &BlockConfig, block_size: usize) -> Vec<ContextsKey> {
        let layers = config.layers.iter().enumerate();
        layers
            .map(|(i, layer)| self.seen_in(i).launch_key(block_size, layer.window))
            .collect()
    }

    /// Key and value pages of `layer`.
    pub(super) fn k_v(&self, layer: usize) -> (&Buffer<f32>, &Buffer<f32>) {
        (self.cache.k(layer), self.cache.v(layer))
    }

    /// See [`Drafter::extend`](super::Drafter::extend).
    pub(super) fn extend(
        &mut self,
        device: &Device,
        model: Model<'_>,
        rows: ContextRows<'_>,
    ) -> Result<()> {
        self.slots[rows.slot].length.check_extends(&rows)?;
        let expected = model.config.target_layer_ids.len();
        check_size(GatherTaps::NAME, "taps", rows.taps.len(), expected)?;
        for chunk in rows.rows.chunks(CHUNK_ROWS) {
            self.extend_chunk(device, model, rows.slot, rows.taps, chunk)?;
            self.slots[rows.slot]
                .length
                .grow(chunk.len(), rows.standing);
        }
        Ok(())
    }

    fn extend_chunk(
        &mut self,
        device: &Device,
        model: Model<'_>,
        slot: usize,
        taps: &[Buffer<f32>],
        rows: &[u32],
    ) -> Result<()> {
        // A GPU's chunks are padded by their last row, over and over, so that few sequences of launches serve all.
        let num_rows = match device {
            Device::Host(_) => rows.len(),
            Device::Cuda(_) => row_bucket(rows.len()).min(CHUNK_ROWS),
        };
        let state = &self.slots[slot];
        let first_position = state.length.len();
        let padded = |i: usize| i.min(rows.len() - 1);
        self.pass_rows
            .fill(device, (0..num_rows).map(|i| rows[padded(i)]))?;
        let positions = (0..num_rows).map(|i| (first_position + padded(i)) as u32);
        self.positions.fill(device, positions)?;
        let (placed, tables) = (&mut self.chunk_rows, state.tables.tables());
        placed.clear();
        placed.push(slot, first_position, tables, 0..rows.len() as u32)?;
        placed.repeat_last(num_rows);
        placed.finish(device)?;
        let key = ExtensionKey {
            rows: self.pass_rows.cuda_address(),
            positions: self.positions.cuda_address(),
            placed: placed.launch_key(),
        };
        let mut graphs = std::mem::take(&mut self.graphs);
        let outcome = graphs.run(device, key, || {
            self.append_rows(device, model, taps, num_rows)
        });
        self.graphs = graphs;
        outcome
    }

    /// Keys and values of the chunk that the lists tell of.
    fn append_rows(
        &mut self,
        device: &Device,
        model: Model<'_>,
        taps: &[Buffer<f32>],
        num_rows: usize,
    ) -> Result<()> {
        let Model {
            config, weights, ..
        } = model;
        let s = &mut self.scratch;
        GatherTaps::run(
            device,
            GatherTapsArgs {
                taps,
                rows: &self.pass_rows,
                width: config.hidden_size,
                y: &mut s.taps,
            },
        )?;
        let fc = &weights.fc;
        fc.forward(device, &s.taps, num_rows, &mut s.fused, Epilogue::Store)?;
        RmsNorm::run(
            device,
            RmsNormArgs {
                x: &s.fused,
                x_offset: 0,
                x_stride: config.hidden_size,
                num_vectors: num_rows,
                width: config.hidden_size,
                weight: Some(&weights.hidden_norm),
                eps: config.rms_norm_eps,
                y: (&mut s.hidden).into(),
            },
        )?;
        // All layers read the same rows: one launch for as many of them as it takes.
        let products = weights.layers.iter().zip(&mut s.layers);
        let values = config.body.values;
        let products = products.flat_map(|(layer, rows)| rows.products(layer, values));
        multiply_all(device, &s.hidden, num_rows, products)?;
        for rows in &mut s.layers {
            rows.finish_values(device, config, num_rows)?;
        }
        let keys = weights.layers.iter().zip(&mut s.layers);
        let keys = keys.map(|(layer, rows)| rows.key_heads(config, layer));
        turn(device, model, &self.positions, keys.collect())?;
        let tails = s.layers.iter().enumerate();
        let tails = tails.map(|(layer, KeysValues { k, v, .. })| KvTail { layer, k, v });
        let tails: Vec<_> = tails.collect();
        self.cache.append(device, &self.chunk_rows, &tails)?;
        Ok(())
    }
}

/// What a forward reads and never changes.
#[derive(Clone, Copy)]
pub(super) struct Model<'a> {
    pub(super) config: &'a BlockConfig,
    pub(super) weights: &'a BlockWeights,
    pub(super) inverse_frequencies: &'a Buffer<f32>,
}

#[cfg(test)]
mod tests;
