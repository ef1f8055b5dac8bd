//! All sequence memory of the target: KV pages, recurrent states, and which slot holds what.
//!
//! A slot is reserved for a request's whole length at admission, so that a running request never waits for memory, and
//! given back when it ends. Of layers with a window that is a ring of pages, which serves the request over and over.

use crate::device::{Buffer, Device};
use crate::error::{DeviceError, KernelError};
use crate::kernels::gdn_wy::{GdnShape, GdnTail};
use crate::kernels::kv_span::{PageTables, PerSpan};
use crate::kernels::paths::{RowPaths, Settled};
use crate::kernels::placed_rows::PlacedRows;

use super::gdn_state::{GdnCache, Recurrence};
use super::pages::{KvCache, KvLayout, KvShape, KvTail};

/// Which cache a layer of the model uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LayerCache {
    /// Paged keys and values.
    Attention {
        /// Their heads.
        shape: KvShape,
        /// A row at position p sees positions `> p - window`; all when `None`.
        window: Option<usize>,
    },
    /// Recurrent state and log.
    GatedDelta,
}

/// How much the caches hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CacheSizes {
    /// Sequences at once.
    pub num_slots: usize,
    /// Pages that they share.
    pub num_pages: PerSpan<usize>,
    /// Most rows of a sequence that a pass settles.
    pub settled_rows: usize,
}

/// What the attention layers among `layers` keep, where a pass settles up to `settled_rows` rows of a sequence.
pub fn kv_layout(layers: &[LayerCache], settled_rows: usize) -> KvLayout {
    let attention = layers.iter().filter_map(|layer| match *layer {
        LayerCache::Attention { shape, window } => Some((shape, window)),
        LayerCache::GatedDelta => None,
    });
    KvLayout::new(attention, settled_rows)
}

/// The target's caches for a fixed number of slots.
pub struct SequenceCaches {
    kv: KvCache,
    gdn: Option<GdnCache>,
    /// Index of each model layer within the cache of its kind.
    index_in_kind: Vec<usize>,
    page_tables: Vec<Option<PerSpan<Vec<u32>>>>,
}

impl SequenceCaches {
    /// Caches of `sizes` for a model's `layers`.
    ///
    /// # Errors
    /// [`DeviceError::OutOfMemory`].
    pub fn new(
        device: &Device,
        layers: &[LayerCache],
        recurrence: Recurrence,
        gdn_shape: Option<GdnShape>,
        sizes: CacheSizes,
    ) -> Result<Self, DeviceError> {
        let (mut num_attention_layers, mut num_gdn_layers) = (0, 0);
        let index_in_kind = layers
            .iter()
            .map(|layer| {
                let count = match layer {
                    LayerCache::Attention { .. } => &mut num_attention_layers,
                    LayerCache::GatedDelta => &mut num_gdn_layers,
                };
                *count += 1;
                *count - 1
            })
            .collect();
        let gdn = |shape| GdnCache::new(device, recurrence, shape, num_gdn_layers, sizes.num_slots);
        let layout = kv_layout(layers, sizes.settled_rows);
        Ok(Self {
            kv: KvCache::new(device, layout, sizes.num_pages)?,
            gdn: gdn_shape.map(gdn).transpose()?,
            index_in_kind,
            page_tables: vec![None; sizes.num_slots],
        })
    }

    /// Takes a free slot with room for `num_positions` tokens; `None` when slots or pages are short.
    pub fn admit(&mut self, num_positions: usize) -> Option<usize> {
        let slot = self.page_tables.iter().position(Option::is_none)?;
        let mut tables = PerSpan::default();
        if !self.kv.reserve(&mut tables, num_positions) {
            return None;
        }
        self.page_tables[slot] = Some(tables);
        if let Some(gdn) = &mut self.gdn {
            gdn.reset(slot);
        }
        Some(slot)
    }

    /// Gives a slot and its pages back.
    pub fn release(&mut self, slot: usize) {
        if let Some(mut tables) = self.page_tables[slot].take() {
            self.kv.release(&mut tables);
        }
    }

    /// Folds recurrent states forward for a pass over `paths`.
    ///
    /// # Errors
    /// [`KernelError`] when the fold refuses its arguments.
    pub fn prepare(&mut self, device: &Device, paths: &RowPaths) -> Result<(), KernelError> {
        let Some(gdn) = &mut self.gdn else {
            return Ok(());
        };
        for (i, segment) in paths.segments().iter().enumerate() {
            // Segments that continue another are prepared for on the way.
            if !paths.continues(i) {
                let positions = segment.rows.clone().map(|row| paths.position(row));
                let last_position = positions.max().unwrap_or_default();
                gdn.prepare(device, segment.slot, last_position)?;
            }
        }
        Ok(())
    }

    /// Takes keys and values of rows that later segments of the pass read for committed, in the model's layer `layer`.
    ///
    /// # Errors
    /// [`KernelError`] when a row lies outside a tail or has no page.
    pub fn settle_kv(
        &mut self,
        device: &Device,
        layer: usize,
        settled: Settled<'_>,
        k: &Buffer<f32>,
        v: &Buffer<f32>,
    ) -> Result<(), KernelError> {
        let layer = self.attention_index(layer);
        let tails = [KvTail { layer, k, v }];
        self.kv.append(device, settled.rows, &tails)
    }

    /// Takes inputs of the convolution and log entries of rows that the next wave of the pass reads for committed, in the
    /// model's layer `layer`.
    ///
    /// # Errors
    /// [`KernelError`] when a row lies outside a tail, or the fold refuses its arguments.
    pub fn settle_gdn(
        &mut self,
        device: &Device,
        layer: usize,
        settled: Settled<'_>,
        tail: (&Buffer<f32>, &GdnTail),
    ) -> Result<(), KernelError> {
        let layer = self.gdn_index(layer);
        match &mut self.gdn {
            Some(gdn) => gdn.settle(device, layer, settled, tail),
            None => Ok(()),
        }
    }

    /// Commits `rows` of a pass: copies what it left behind of them in the attention layers (`kv_tails`) and the
    /// gated-delta layers (`gdn_tails`: inputs of the convolution and log entries), all of either in order.
    ///
    /// # Errors
    /// [`KernelError`] when a row lies outside a tail or has no page.
    pub fn commit(
        &mut self,
        device: &Device,
        rows: &PlacedRows,
        kv_tails: &[KvTail<'_>],
        gdn_tails: &[(&Buffer<f32>, &GdnTail)],
    ) -> Result<(), KernelError> {
        self.kv.append(device, rows, kv_tails)?;
        if let Some(gdn) = &mut self.gdn {
            gdn.append(device, rows, gdn_tails)?;
            for &(slot, committed_len) in rows.ends() {
                gdn.advance(slot, committed_len);
            }
        }
        Ok(())
    }

    /// Recurrent state of `slot` after its `committed_len` tokens, `[GDN layers, Hv, Dk, Dv]`; `None` for a model
    /// without recurrent layers.
    ///
    /// # Errors
    /// [`DeviceError::Driver`].
    pub fn gdn_state(
        &self,
        slot: usize,
        committed_len: usize,
    ) -> Result<Option<Vec<f32>>, DeviceError> {
        let Some(gdn) = &self.gdn else {
            return Ok(None);
        };
        let mut states = Vec::new();
        for layer in 0..gdn.num_layers() {
            states.extend(gdn.final_state(layer, slot, committed_len)?);
        }
        Ok(Some(states))
    }

    /// Number of free pages.
    pub fn num_free_pages(&self) -> PerSpan<usize> {
        self.kv.num_free_pages()
    }

    /// The paged cache.
    pub fn kv(&self) -> &KvCache {
        &self.kv
    }

    /// The recurrent cache. Panics for a model without recurrent layers.
    pub fn gdn(&self) -> &GdnCache {
        self.gdn
            .as_ref()
            .expect("a gated-delta layer implies a recurrent cache")
    }

    /// Index of an attention layer among the attention layers.
    pub fn attention_index(&self, layer: usize) -> usize {
        self.index_in_kind[layer]
    }

    /// Index of a gated-delta layer among the gated-delta layers.
    pub fn gdn_index(&self, layer: usize) -> usize {
        self.index_in_kind[layer]
    }

    /// Pages of `slot`, one per 64 positions; none while it is free.
    pub fn pages(&self, slot: usize) -> PageTables<'_> {
        let tables = self.page_tables[slot].as_ref();
        tables.map_or_else(PerSpan::default, PerSpan::tables)
    }
}

#[cfg(test)]
mod tests;
