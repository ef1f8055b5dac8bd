//! Committed Gated-DeltaNet state of every layer and slot: anchor states, the log since, the convolution's inputs.
//!
//! Life of a slot: [`reset`](GdnCache::reset), then per pass [`prepare`](GdnCache::prepare) before the forward,
//! [`append`](GdnCache::append) of the accepted rows, [`advance`](GdnCache::advance). States exist for
//! the anchors `oldest..=newest`, at most [`STATE_RING`] of them; the log reaches from `newest` (and from every anchor
//! that a row may read) to the last committed token. All of it follows from the committed tokens alone.
//!
//! A prompt chunk longer than a path moves a slot on inside its pass: [`settle`](GdnCache::settle), layer by layer. A pass
//! that fails then leaves layers at different tokens, so its slots can only be handed to new requests.
//!
//! Where rows are run token by token ([`Recurrence::Token`]) one state is kept, which [`prepare`](GdnCache::prepare)
//! brings up to the last committed token.

use crate::device::{Buffer, Device};
use crate::error::{DeviceError, KernelError};
use crate::kernels::append_ring::{AppendRing, AppendRingArgs, Ring};
use crate::kernels::gdn_fold::{GdnFold, GdnFoldArgs, fold_heads};
use crate::kernels::gdn_recurrent::{AdvanceArgs, GdnRecurrent, GdnRecurrentArgs};
use crate::kernels::gdn_wy::{
    FOLD_INTERVAL, GdnLayerCache, GdnShape, GdnTail, LOG_POSITIONS, STATE_RING, SlotLog, anchor_of,
};
use crate::kernels::paths::{MAX_PATH_ROWS, Settled};
use crate::kernels::placed_rows::PlacedRows;
use crate::kernels::{Kernel, check_size, simd};

/// Which state the rows of a pass read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Recurrence {
    /// That of their position's anchor, for [`gdn_wy`](crate::kernels::gdn_wy).
    Anchored,
    /// That after all committed tokens, for [`gdn_recurrent`](crate::kernels::gdn_recurrent).
    Token,
}

/// Recurrent caches of all Gated-DeltaNet layers.
#[derive(Debug)]
pub struct GdnCache {
    recurrence: Recurrence,
    shape: GdnShape,
    layers: Vec<GdnLayerCache>,
    slots: Vec<SlotState>,
}

/// What one slot takes, by purpose.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct GdnSlotBytes {
    /// The ring of states.
    pub states: usize,
    /// Committed keys, updates and decays.
    pub log: usize,
    /// Inputs of the convolution.
    pub conv: usize,
}

impl GdnSlotBytes {
    /// All of it.
    pub fn total(&self) -> usize {
        self.states + self.log + self.conv
    }
}

/// How far a slot has come.
#[derive(Clone, Copy, Debug, Default)]
struct SlotState {
    committed_len: usize,
    /// Latest anchor whose state exists; earlier ones exist back to `anchor_of(committed_len)`. Token by token: how many
    /// tokens the state holds.
    newest: usize,
}

impl GdnCache {
    /// Caches for `num_layers` layers and `num_slots` requests.
    ///
    /// # Errors
    /// [`DeviceError::OutOfMemory`].
    pub fn new(
        device: &Device,
        recurrence: Recurrence,
        shape: GdnShape,
        num_layers: usize,
        num_slots: usize,
    ) -> Result<Self, DeviceError> {
        let layers = (0..num_layers)
            .map(|_| GdnLayerCache::new(device, &shape, num_slots))
            .collect::<Result<_, _>>()?;
        Ok(Self {
            recurrence,
            shape,
            layers,
            slots: vec![SlotState::default(); num_slots],
        })
    }

    /// Bytes that one slot takes in `num_layers` layers, for sizing a cache before it exists. States and log are fp32
    /// on every device; inputs of the convolution are activations of `activation_bytes` each.
    pub fn slot_bytes_of(
        shape: &GdnShape,
        num_layers: usize,
        activation_bytes: usize,
    ) -> GdnSlotBytes {
        let log_len = shape.keys_len() + shape.values_len() + shape.num_value_heads;
        let conv_len = shape.conv_kernel * shape.conv_channels();
        GdnSlotBytes {
            states: num_layers * STATE_RING * shape.state_len() * size_of::<f32>(),
            log: num_layers * LOG_POSITIONS * log_len * size_of::<f32>(),
            conv: num_layers * conv_len * activation_bytes,
        }
    }

    /// Head counts and sizes.
    pub fn shape(&self) -> &GdnShape {
        &self.shape
    }

    /// Number of Gated-DeltaNet layers.
    pub fn num_layers(&self) -> usize {
        self.layers.len()
    }

    /// The cache of one layer (counting Gated-DeltaNet layers only).
    pub fn layer(&self, layer: usize) -> &GdnLayerCache {
        &self.layers[layer]
    }

    /// Hands `slot` to a new request: nothing is committed.
    pub fn reset(&mut self, slot: usize) {
        self.slots[slot] = SlotState::default();
    }

    /// Folds forward, in all layers, until the state of `anchor_of(p)` exists for every p from the committed length to
    /// `last_position`; before the first token it is zero. Call before a pass.
    ///
    /// # Errors
    /// [`KernelError::PathTooLong`] when `last_position` lies more than a path beyond the committed tokens,
    /// [`KernelError::Device`].
    pub fn prepare(
        &mut self,
        device: &Device,
        slot: usize,
        last_position: usize,
    ) -> Result<(), KernelError> {
        let state = &mut self.slots[slot];
        let path_len = (last_position + 1).saturating_sub(state.committed_len);
        if path_len > MAX_PATH_ROWS {
            return Err(KernelError::PathTooLong {
                expected: MAX_PATH_ROWS,
                got: path_len,
            });
        }
        if state.committed_len == 0 {
            // Logs, inputs and the other states are written before they are read.
            let len = self.shape.state_len();
            let first = slot * STATE_RING * len;
            for layer in &mut self.layers {
                let cleared = layer.states.clear(first..first + len);
                cleared.map_err(|source| KernelError::Device {
                    kernel: "gdn_state",
                    source,
                })?;
            }
        }
        if self.recurrence == Recurrence::Token {
            let positions = state.newest..state.committed_len;
            state.newest = positions.end;
            let advance = AdvanceArgs {
                shape: &self.shape,
                layers: &mut self.layers,
                slot,
                positions,
            };
            return GdnRecurrent::run(device, GdnRecurrentArgs::Advance(advance));
        }
        while state.newest < anchor_of(last_position) {
            for cache in &mut self.layers {
                let args = GdnFoldArgs {
                    shape: &self.shape,
                    cache,
                    slot,
                    anchor: state.newest,
                };
                GdnFold::run(device, args)?;
            }
            state.newest += FOLD_INTERVAL;
        }
        Ok(())
    }

    /// Appends accepted rows to the logs and convolution inputs of all layers; `tails` holds what the pass left behind in
    /// each: inputs of the convolution and log entries.
    ///
    /// # Errors
    /// [`KernelError::BufferTooShort`] when a row lies outside the pass's buffers, [`KernelError::Size`] when there are
    /// more or fewer layers.
    pub fn append(
        &mut self,
        device: &Device,
        rows: &PlacedRows,
        tails: &[(&Buffer<f32>, &GdnTail)],
    ) -> Result<(), KernelError> {
        check_size("gdn_state", "tails", tails.len(), self.layers.len())?;
        let shape = &self.shape;
        let layers = self.layers.iter_mut().zip(tails);
        let rings = layers.flat_map(|(cache, &tail)| rings_of(shape, cache, tail));
        let rings = rings.collect();
        AppendRing::run(device, AppendRingArgs { rows, rings })
    }

    /// Takes prompt rows that a wave of the pass left behind in one layer for committed, and brings the layer's state to
    /// where the next segment of their slot reads it. Layers come in ascending order.
    ///
    /// # Errors
    /// [`KernelError::BufferTooShort`] when a row lies outside the pass's buffers, [`KernelError::Device`].
    pub fn settle(
        &mut self,
        device: &Device,
        layer: usize,
        settled: Settled<'_>,
        tail: (&Buffer<f32>, &GdnTail),
    ) -> Result<(), KernelError> {
        let Settled {
            rows,
            slot,
            end,
            last_position,
        } = settled;
        let (shape, cache) = (&self.shape, &mut self.layers[layer]);
        let rings = rings_of(shape, cache, tail).into();
        AppendRing::run(device, AppendRingArgs { rows, rings })?;
        let newest = match self.recurrence {
            Recurrence::Token => {
                let advance = AdvanceArgs {
                    shape,
                    layers: std::slice::from_mut(cache),
                    slot,
                    positions: end - rows.len()..end,
                };
                GdnRecurrent::run(device, GdnRecurrentArgs::Advance(advance))?;
                end
            }
            Recurrence::Anchored => {
                let newest = anchor_of(last_position);
                for anchor in (anchor_of(end - 1)..newest).step_by(FOLD_INTERVAL) {
                    let args = GdnFoldArgs {
                        shape,
                        cache: &mut *cache,
                        slot,
                        anchor,
                    };
                    GdnFold::run(device, args)?;
                }
                newest
            }
        };
        if layer + 1 == self.layers.len() {
            self.slots[slot].newest = newest;
        }
        Ok(())
    }

    /// Declares `committed_len` tokens committed, after `append`, and forgets states below
    /// `anchor_of(committed_len)`.
    pub fn advance(&mut self, slot: usize, committed_len: usize) {
        self.slots[slot].committed_len = committed_len;
    }

    /// The state after all committed tokens, `[Hv, Dk, Dv]`, folded on the host from a copy.
    ///
    /// # Errors
    /// [`DeviceError::Driver`].
    pub fn final_state(
        &self,
        layer: usize,
        slot: usize,
        committed_len: usize,
    ) -> Result<Vec<f32>, DeviceError> {
        let (shape, cache) = (&self.shape, &self.layers[layer]);
        let newest = self.slots[slot].newest;
        let ring = match self.recurrence {
            Recurrence::Anchored => slot * STATE_RING + newest / FOLD_INTERVAL % STATE_RING,
            Recurrence::Token => slot * STATE_RING,
        };
        let entry = |index: usize, len: usize| index * len..(index + 1) * len;
        let mut state = cache.states.read_range(entry(ring, shape.state_len()))?;
        let own_log = |log: &Buffer<f32>, row_len: usize| {
            let values = log.read_range(entry(slot, LOG_POSITIONS * row_len))?;
            Ok::<_, DeviceError>(Buffer::from_slice(&values))
        };
        let k = own_log(&cache.log_k, shape.keys_len())?;
        let d = own_log(&cache.log_d, shape.values_len())?;
        let g = own_log(&cache.log_g, shape.num_value_heads)?;
        let log = SlotLog::new(shape, (&k, &d, &g), 0);
        fold_heads(shape, log, newest..committed_len, &mut state).for_each(simd::dispatch);
        Ok(state)
    }
}

/// What one layer keeps of rows, and where.
fn rings_of<'a>(
    shape: &GdnShape,
    cache: &'a mut GdnLayerCache,
    (qkv, tail): (&'a Buffer<f32>, &'a GdnTail),
) -> [Ring<'a>; 4] {
    let (keys_len, values_len) = (shape.keys_len(), shape.values_len());
    let (heads, channels) = (shape.num_value_heads, shape.conv_channels());
    [
        (&tail.k, &mut cache.log_k, keys_len, LOG_POSITIONS),
        (&tail.d, &mut cache.log_d, values_len, LOG_POSITIONS),
        (&tail.g, &mut cache.log_g, heads, LOG_POSITIONS),
        (qkv, &mut cache.conv, channels, shape.conv_kernel),
    ]
    .map(|(tail, rings, row_len, ring_len)| Ring {
        tail,
        row_len,
        ring_len,
        rings,
    })
}

#[cfg(test)]
mod tests;
