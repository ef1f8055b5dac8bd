//! A parallel drafter's context: keys and values of the positions before the anchor, in pages of its own.
//!
//! A position's taps go through `fc` and its norm once; every layer then projects keys (normalised, rotated for the
//! absolute position) and values from that one vector. Rows are taken in chunks of any size with the same result, as
//! all kernels are row-invariant. Layers that see everything share a pool of pages with all requests; layers with a
//! window keep, per slot, a ring of pages that holds the window and whatever scratch rows may follow it.

use std::convert::Infallible;

use super::config::BlockConfig;
use super::context_length::ContextLength;
use super::weights::{BlockWeights, multiply_all};
use super::{ContextRows, DraftAnchor};
use crate::cache::pages::{KvCache, KvShape, KvTail};
use crate::device::{Buffer, Device, Graphs, Staged};
use crate::error::Result;
use crate::kernels::bf16_matmul::Epilogue;
use crate::kernels::draft_block::{BlockContext, BlockContexts, ContextsKey};
use crate::kernels::gather_taps::{GatherTaps, GatherTapsArgs};
use crate::kernels::matmul_rows::MatmulRows;
use crate::kernels::paths::{MAX_PATH_ROWS, row_bucket};
use crate::kernels::placed_rows::PlacedRows;
use crate::kernels::rms_norm::{RmsNorm, RmsNormArgs};
use crate::kernels::rope::{HeadNorm, Rope, RopeArgs, RopeHeads, Rotation};
use crate::kernels::tree_attention::KV_BLOCK;
use crate::kernels::{Kernel, check_size};

/// Rows per forward of `fc` and the projections.
const CHUNK_ROWS: usize = 64;

/// Contexts of all slots.
pub(super) struct Contexts {
    whole: KvCache,
    windowed: KvCache,
    /// Where each layer's keys and values are.
    places: Vec<Place>,
    slots: Vec<Slot>,
    scratch: Scratch,
    /// A chunk's rows of the pass, and their positions.
    pass_rows: Staged<u32>,
    positions: Staged<u32>,
    /// Rows of a chunk in the pages of the layers without and with a window.
    chunk_rows: [PlacedRows; 2],
    /// Contexts of the blocks being drafted, in layers without and with a window.
    seen_whole: BlockContexts,
    seen_windowed: BlockContexts,
    graphs: Graphs<ExtensionKey>,
}

/// What the launches of an extension follow from.
#[derive(PartialEq, Eq, Hash)]
struct ExtensionKey {
    rows: Option<u64>,
    positions: Option<u64>,
    placed: [(Option<u64>, usize); 2],
}

/// The cache of a layer and its index among that cache's layers.
#[derive(Clone, Copy)]
struct Place {
    is_windowed: bool,
    index: usize,
}

struct Slot {
    /// Pages of the layers that see everything, as far as reserved.
    whole_pages: Vec<u32>,
    /// Pages of the layers with a window: the slot's ring, over and over.
    ring_pages: Vec<u32>,
    length: ContextLength,
}

impl Slot {
    /// The context as it lies in `pages`.
    fn context<'a>(&self, pages: &'a [u32]) -> BlockContext<'a> {
        let context_len = self.length.len();
        BlockContext {
            page_table: &pages[..pages.len().min(context_len.div_ceil(KV_BLOCK))],
            context_len,
        }
    }
}

/// Pages of a ring for layers that see `window` positions: those before the anchor, and the scratch rows of a path.
fn ring_len(window: usize, pages_per_sequence: usize) -> usize {
    (window + MAX_PATH_ROWS)
        .div_ceil(KV_BLOCK)
        .min(pages_per_sequence)
}

/// Shapes of the layers without and with a window, and the pages of the latter's ring.
fn groups(config: &BlockConfig, pages_per_sequence: usize) -> ([Vec<KvShape>; 2], usize) {
    let num_windowed = config
        .layers
        .iter()
        .filter(|layer| layer.window.is_some())
        .count();
    let shapes = [config.layers.len() - num_windowed, num_windowed]
        .map(|num_layers| vec![config.kv_shape(); num_layers]);
    let window = config.layers.iter().filter_map(|layer| layer.window).max();
    let ring = window.map_or(0, |window| ring_len(window, pages_per_sequence));
    (shapes, ring)
}

/// What a context's pages take.
pub(super) struct ContextBytes {
    /// One page of the layers that see everything.
    pub(super) page: usize,
    /// The rings of one slot.
    pub(super) slot: usize,
}

/// Activations of one chunk. `B` is a buffer; planning memory puts a number in its place.
struct Scratch<B = Buffer<f32>> {
    taps: B,
    fused: B,
    hidden: MatmulRows<B>,
    layers: Vec<LayerScratch<B>>,
}

/// Of one layer.
struct LayerScratch<B = Buffer<f32>> {
    k_raw: B,
    k: B,
    v: B,
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
                .map(|_| {
                    Ok(LayerScratch {
                        k_raw: rows(config.kv_dim())?,
                        k: rows(config.kv_dim())?,
                        v: rows(config.kv_dim())?,
                    })
                })
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
        let ([whole, windowed], ring) = groups(config, pages_per_sequence);
        let mut counts = [0; 2];
        let place = |window: Option<usize>| {
            let count = &mut counts[usize::from(window.is_some())];
            *count += 1;
            Place {
                is_windowed: window.is_some(),
                index: *count - 1,
            }
        };
        let slot = |slot: usize| Slot {
            whole_pages: Vec::new(),
            ring_pages: match ring {
                0 => Vec::new(),
                _ => (0..pages_per_sequence)
                    .map(|page| (slot * ring + page % ring) as u32)
                    .collect(),
            },
            length: ContextLength::default(),
        };
        Ok(Self {
            whole: KvCache::new(device, &whole, num_pages)?,
            windowed: KvCache::new(device, &windowed, num_slots * ring)?,
            places: config
                .layers
                .iter()
                .map(|layer| layer.window)
                .map(place)
                .collect(),
            slots: (0..num_slots).map(slot).collect(),
            scratch: Scratch::with(config, |width| device.try_alloc(CHUNK_ROWS * width))?,
            pass_rows: Staged::with_capacity(device, CHUNK_ROWS)?,
            positions: Staged::with_capacity(device, CHUNK_ROWS)?,
            chunk_rows: [
                PlacedRows::with_capacity(device, CHUNK_ROWS)?,
                PlacedRows::with_capacity(device, CHUNK_ROWS)?,
            ],
            seen_whole: BlockContexts::default(),
            seen_windowed: BlockContexts::default(),
            graphs: Graphs::default(),
        })
    }

    /// Bytes of the pages, with elements of `activation_bytes`.
    pub(super) fn bytes_of(
        config: &BlockConfig,
        pages_per_sequence: usize,
        activation_bytes: usize,
    ) -> ContextBytes {
        let ([whole, windowed], ring) = groups(config, pages_per_sequence);
        ContextBytes {
            page: KvCache::page_bytes_of(&whole, activation_bytes),
            slot: ring * KvCache::page_bytes_of(&windowed, activation_bytes),
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
        let held = &mut self.slots[slot].whole_pages;
        let missing = num_tokens.div_ceil(KV_BLOCK).saturating_sub(held.len());
        match self.whole.allocate(missing) {
            Some(pages) => {
                held.extend(pages);
                true
            }
            None => false,
        }
    }

    pub(super) fn release(&mut self, slot: usize) {
        let slot = &mut self.slots[slot];
        slot.length = ContextLength::default();
        self.whole.release(&std::mem::take(&mut slot.whole_pages));
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
        let whole = slots.clone().map(|slot| slot.context(&slot.whole_pages));
        self.seen_whole.fill(device, whole)?;
        let windowed = slots.map(|slot| slot.context(&slot.ring_pages));
        self.seen_windowed.fill(device, windowed)?;
        Ok(())
    }

    /// What the blocks of the last [`look_from`](Self::look_from) see in `layer`.
    pub(super) fn seen_in(&self, layer: usize) -> &BlockContexts {
        match self.places[layer].is_windowed {
            true => &self.seen_windowed,
            false => &self.seen_whole,
        }
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
        let Place { is_windowed, index } = self.places[layer];
        let cache = if is_windowed {
            &self.windowed
        } else {
            &self.whole
        };
        (cache.k(index), cache.v(index))
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
        let [whole_rows, ring_rows] = &mut self.chunk_rows;
        for (placed, pages) in [
            (&mut *whole_rows, &state.whole_pages),
            (&mut *ring_rows, &state.ring_pages),
        ] {
            placed.clear();
            placed.push(slot, first_position, pages, 0..rows.len() as u32)?;
            placed.repeat_last(num_rows);
            placed.finish(device)?;
        }
        let key = ExtensionKey {
            rows: self.pass_rows.cuda_address(),
            positions: self.positions.cuda_address(),
            placed: [whole_rows.launch_key(), ring_rows.launch_key()],
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
            config,
            weights,
            inverse_frequencies,
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
        let products = products.flat_map(|(layer, rows)| {
            [
                (&layer.k_proj, &mut rows.k_raw),
                (&layer.v_proj, &mut rows.v),
            ]
        });
        multiply_all(device, &s.hidden, num_rows, products)?;
        let heads = weights.layers.iter().zip(&mut s.layers);
        let heads = heads.map(|(layer, rows)| RopeHeads {
            norm: Some(HeadNorm {
                x: &rows.k_raw,
                x_stride: config.head_dim,
                weight: Some(&layer.k_norm),
                eps: config.rms_norm_eps,
            }),
            num_heads: config.num_kv_heads,
            y: &mut rows.k,
        });
        Rope::run(
            device,
            RopeArgs {
                heads: heads.collect(),
                head_dim: config.head_dim,
                positions: &self.positions,
                rotation: Some(Rotation {
                    inverse_frequencies,
                    pair_offset: config.head_dim / 2,
                }),
            },
        )?;
        let [whole_rows, ring_rows] = &self.chunk_rows;
        for (cache, placed, is_windowed) in [
            (&mut self.whole, whole_rows, false),
            (&mut self.windowed, ring_rows, true),
        ] {
            let places = self.places.iter().zip(&s.layers);
            let tails = places.filter(|(place, _)| place.is_windowed == is_windowed);
            let tails: Vec<KvTail<'_>> = tails
                .map(|(place, rows)| KvTail {
                    layer: place.index,
                    k: &rows.k,
                    v: &rows.v,
                })
                .collect();
            if !tails.is_empty() {
                cache.append(device, placed, &tails)?;
            }
        }
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
