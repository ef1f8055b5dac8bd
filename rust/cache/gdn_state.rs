//! Committed Gated-DeltaNet state of every layer and slot: anchor states, the log since, the convolution's inputs.

use crate::device::{Buffer, Device};
use crate::error::KernelError;
use crate::kernels::gdn_wy::{GdnLayerCache, GdnShape, GdnTail};

/// Recurrent caches of all Gated-DeltaNet layers.
#[derive(Debug)]
pub struct GdnCache {
    shape: GdnShape,
    layers: Vec<GdnLayerCache>,
}

impl GdnCache {
    /// Caches for `num_layers` layers and `num_slots` requests.
    pub fn new(device: &Device, shape: GdnShape, num_layers: usize, num_slots: usize) -> Self {
        let layers = (0..num_layers)
            .map(|_| GdnLayerCache::new(device, &shape, num_slots))
            .collect();
        Self { shape, layers }
    }

    /// Head counts and sizes.
    pub fn shape(&self) -> &GdnShape {
        &self.shape
    }

    /// The cache of one layer (counting Gated-DeltaNet layers only).
    pub fn layer(&self, layer: usize) -> &GdnLayerCache {
        &self.layers[layer]
    }

    /// Prepares `slot` for a new request: zero state, nothing committed.
    pub fn reset(&mut self, _slot: usize) {
        unimplemented!("lands with the next commit")
    }

    /// Folds forward, in all layers, until the state of `anchor_of(p)` exists for every p from the committed length to
    /// `last_position`. Call before a pass.
    ///
    /// # Errors
    /// [`KernelError::PathTooLong`] when `last_position` lies more than a path beyond the committed tokens.
    pub fn prepare(
        &mut self,
        _device: &Device,
        _slot: usize,
        _last_position: usize,
    ) -> Result<(), KernelError> {
        unimplemented!("lands with the next commit")
    }

    /// Appends accepted rows of one layer to its log and convolution inputs; `rows[i]` takes position
    /// `committed_len + i`.
    ///
    /// # Errors
    /// When a row lies outside the pass's buffers.
    #[allow(clippy::too_many_arguments, reason = "one value per thing committed")]
    pub fn commit(
        &mut self,
        _device: &Device,
        _layer: usize,
        _slot: usize,
        _committed_len: usize,
        _rows: &[u32],
        _qkv: &Buffer<f32>,
        _tail: &GdnTail,
    ) -> Result<(), KernelError> {
        unimplemented!("lands with the next commit")
    }

    /// Declares `committed_len` tokens committed, after `commit` of every layer, and forgets states below
    /// `anchor_of(committed_len)`.
    pub fn advance(&mut self, _slot: usize, _committed_len: usize) {
        unimplemented!("lands with the next commit")
    }

    /// The state after all committed tokens, `[Hv, Dk, Dv]`, folded on a copy.
    pub fn final_state(&self, _layer: usize, _slot: usize, _committed_len: usize) -> Vec<f32> {
        unimplemented!("lands with the next commit")
    }
}
