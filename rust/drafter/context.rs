//! A drafter's context: keys and values of verified positions, in pages of its own.
//!
//! A position's taps go through `fc` and its norm once; every layer then projects keys (normalised, rotated for the
//! absolute position) and values from that one vector. Rows are taken in chunks of any size with the same result, as
//! all kernels are row-invariant.

use super::config::DrafterConfig;
use super::weights::DrafterWeights;
use crate::cache::pages::KvCache;
use crate::device::{Buffer, Device};
use crate::error::{DrafterError, Result};
use crate::kernels::append_kv::{AppendKv, AppendKvArgs};
use crate::kernels::bf16_matmul::Epilogue;
use crate::kernels::draft_block::BlockContext;
use crate::kernels::gather_taps::{GatherTaps, GatherTapsArgs};
use crate::kernels::rms_norm::{RmsNorm, RmsNormArgs};
use crate::kernels::rope::{Rope, RopeArgs};
use crate::kernels::tree_attention::KV_BLOCK;
use crate::kernels::{Kernel, check_size};

/// Rows per forward of `fc` and the projections.
const CHUNK_ROWS: usize = 64;

/// Contexts of all slots.
pub(super) struct Contexts {
    cache: KvCache,
    slots: Vec<Slot>,
    scratch: Scratch,
}

#[derive(Clone, Default)]
struct Slot {
    page_table: Vec<u32>,
    len: usize,
}

/// Activations of one chunk. `B` is a buffer; planning memory puts a number in its place.
struct Scratch<B = Buffer<f32>> {
    taps: B,
    fused: B,
    hidden: B,
    k_raw: B,
    k: B,
    v: B,
}

impl<B> Scratch<B> {
    /// What `rows` makes of each buffer's values per row.
    fn with(config: &DrafterConfig, mut rows: impl FnMut(usize) -> B) -> Self {
        Self {
            taps: rows(config.taps_dim()),
            fused: rows(config.hidden_size),
            hidden: rows(config.hidden_size),
            k_raw: rows(config.kv_dim()),
            k: rows(config.kv_dim()),
            v: rows(config.kv_dim()),
        }
    }
}

impl Contexts {
    pub(super) fn new(
        device: &Device,
        config: &DrafterConfig,
        num_slots: usize,
        num_pages: usize,
    ) -> Self {
        Self {
            cache: KvCache::new(device, &config.kv_shapes(), num_pages),
            slots: vec![Slot::default(); num_slots],
            scratch: Scratch::with(config, |width| device.alloc(CHUNK_ROWS * width)),
        }
    }

    /// Values of the buffers besides the pages.
    pub(super) fn scratch_len_of(config: &DrafterConfig) -> usize {
        let mut row_len = 0;
        Scratch::with(config, |width| row_len += width);
        CHUNK_ROWS * row_len
    }

    pub(super) fn reserve(&mut self, slot: usize, num_tokens: usize) -> bool {
        let held = &mut self.slots[slot].page_table;
        let missing = num_tokens.div_ceil(KV_BLOCK).saturating_sub(held.len());
        match self.cache.allocate(missing) {
            Some(pages) => {
                held.extend(pages);
                true
            }
            None => false,
        }
    }

    pub(super) fn release(&mut self, slot: usize) {
        let slot = std::mem::take(&mut self.slots[slot]);
        self.cache.release(&slot.page_table);
    }

    /// The context of `slot`, which must hold exactly the positions before `position`.
    pub(super) fn before(&self, slot: usize, position: usize) -> Result<BlockContext<'_>> {
        let held = &self.slots[slot];
        if held.len != position {
            return Err(gap(slot, held.len, position));
        }
        Ok(BlockContext {
            page_table: &held.page_table,
            context_len: held.len,
        })
    }

    /// Key and value pages of `layer`.
    pub(super) fn k_v(&self, layer: usize) -> (&Buffer<f32>, &Buffer<f32>) {
        (self.cache.k(layer), self.cache.v(layer))
    }

    /// See [`Drafter::extend_context`](super::Drafter::extend_context).
    pub(super) fn extend(
        &mut self,
        device: &Device,
        model: Model<'_>,
        slot: usize,
        first_position: usize,
        taps: &[Buffer<f32>],
        rows: &[u32],
    ) -> Result<()> {
        let held = self.slots[slot].len;
        if held != first_position {
            return Err(gap(slot, held, first_position));
        }
        let expected = model.config.target_layer_ids.len();
        check_size(GatherTaps::NAME, "taps", taps.len(), expected)?;
        for rows in rows.chunks(CHUNK_ROWS) {
            self.extend_chunk(device, model, slot, taps, rows)?;
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
        let Model {
            config,
            weights,
            inverse_frequencies,
        } = model;
        let (num_rows, s) = (rows.len(), &mut self.scratch);
        let slot = &mut self.slots[slot];
        GatherTaps::run(
            device,
            GatherTapsArgs {
                taps,
                rows,
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
                y: &mut s.hidden,
            },
        )?;
        let positions: Vec<u32> = (slot.len as u32..).take(num_rows).collect();
        let chunk_rows: Vec<u32> = (0..num_rows as u32).collect();
        for (i, layer) in weights.layers.iter().enumerate() {
            let hidden = &s.hidden;
            let (k_proj, v_proj) = (&layer.k_proj, &layer.v_proj);
            k_proj.forward(device, hidden, num_rows, &mut s.k_raw, Epilogue::Store)?;
            v_proj.forward(device, hidden, num_rows, &mut s.v, Epilogue::Store)?;
            RmsNorm::run(
                device,
                RmsNormArgs {
                    x: &s.k_raw,
                    x_offset: 0,
                    x_stride: config.head_dim,
                    num_vectors: num_rows * config.num_kv_heads,
                    width: config.head_dim,
                    weight: Some(&layer.k_norm),
                    eps: config.rms_norm_eps,
                    y: &mut s.k,
                },
            )?;
            Rope::run(
                device,
                RopeArgs {
                    x: &mut s.k,
                    num_heads: config.num_kv_heads,
                    head_dim: config.head_dim,
                    positions: &positions,
                    inverse_frequencies,
                    pair_offset: config.head_dim / 2,
                },
            )?;
            let (k_pages, v_pages) = self.cache.k_v_mut(i);
            AppendKv::run(
                device,
                AppendKvArgs {
                    k_tail: &s.k,
                    v_tail: &s.v,
                    rows: &chunk_rows,
                    first_position: slot.len,
                    page_table: &slot.page_table,
                    kv_heads: config.num_kv_heads,
                    head_dim: config.head_dim,
                    k_pages,
                    v_pages,
                },
            )?;
        }
        slot.len += num_rows;
        Ok(())
    }
}

/// What a forward reads and never changes.
#[derive(Clone, Copy)]
pub(super) struct Model<'a> {
    pub(super) config: &'a DrafterConfig,
    pub(super) weights: &'a DrafterWeights,
    pub(super) inverse_frequencies: &'a Buffer<f32>,
}

fn gap(slot: usize, expected: usize, got: usize) -> crate::error::Error {
    DrafterError::ContextGap {
        slot,
        expected,
        got,
    }
    .into()
}
