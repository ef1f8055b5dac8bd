//! Gated DeltaNet over rows of trees, chains and single tokens, without a state per row.

use super::Kernel;
use super::paths::RowPaths;
use crate::device::{Buffer, Device, HostDevice};
use crate::error::KernelError;

/// Positions folded into the state at once (F).
pub const FOLD_INTERVAL: usize = 32;

/// Least distance of a row from the state it reads (D).
pub const ANCHOR_DELAY: usize = 64;

/// Positions the ring of committed `(k, d, g)` holds.
pub const LOG_POSITIONS: usize = 128;

/// States kept per slot: a pass of 64 positions spans three anchors.
pub const STATE_RING: usize = 3;

/// The anchor of `position`: its row reads the state before this token. Depends on the position alone.
pub fn anchor_of(position: usize) -> usize {
    position.saturating_sub(ANCHOR_DELAY) / FOLD_INTERVAL * FOLD_INTERVAL
}

/// Head counts and sizes of a Gated-DeltaNet layer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GdnShape {
    /// Key (and query) heads, Hk.
    pub num_key_heads: usize,
    /// Value heads, Hv; value head h reads key head `h / (Hv / Hk)`.
    pub num_value_heads: usize,
    /// Length of a key, Dk.
    pub key_dim: usize,
    /// Length of a value, Dv.
    pub value_dim: usize,
    /// Taps of the causal convolution.
    pub conv_kernel: usize,
}

impl GdnShape {
    /// Channels through the convolution: all q, all k, all v.
    pub fn conv_channels(&self) -> usize {
        2 * self.keys_len() + self.values_len()
    }

    /// Length of one row's keys, Hk * Dk.
    pub fn keys_len(&self) -> usize {
        self.num_key_heads * self.key_dim
    }

    /// Length of one row's values, Hv * Dv.
    pub fn values_len(&self) -> usize {
        self.num_value_heads * self.value_dim
    }

    /// Length of one state, Hv * Dk * Dv.
    pub fn state_len(&self) -> usize {
        self.values_len() * self.key_dim
    }
}

/// What one layer remembers of the committed tokens of every slot.
#[derive(Debug)]
pub struct GdnLayerCache {
    /// `[slot][STATE_RING][Hv][Dk][Dv]`; the state before anchor a is ring entry `(a / F) % STATE_RING`.
    pub states: Buffer<f32>,
    /// Normalised keys `[slot][LOG_POSITIONS][Hk*Dk]`, position p at `p % LOG_POSITIONS`.
    pub log_k: Buffer<f32>,
    /// Updates d `[slot][LOG_POSITIONS][Hv*Dv]`.
    pub log_d: Buffer<f32>,
    /// Log decays g `[slot][LOG_POSITIONS][Hv]`.
    pub log_g: Buffer<f32>,
    /// Inputs of the convolution `[slot][conv_kernel][C]`, position p at `p % conv_kernel`.
    pub conv: Buffer<f32>,
}

impl GdnLayerCache {
    /// An empty cache for `num_slots` requests.
    pub fn new(device: &Device, shape: &GdnShape, num_slots: usize) -> Self {
        Self {
            states: device.alloc(num_slots * STATE_RING * shape.state_len()),
            log_k: device.alloc(num_slots * LOG_POSITIONS * shape.keys_len()),
            log_d: device.alloc(num_slots * LOG_POSITIONS * shape.values_len()),
            log_g: device.alloc(num_slots * LOG_POSITIONS * shape.num_value_heads),
            conv: device.alloc(num_slots * shape.conv_kernel * shape.conv_channels()),
        }
    }
}

/// What the rows of one pass would add to the log if they were accepted.
#[derive(Debug)]
pub struct GdnTail {
    /// Normalised keys `[rows, Hk*Dk]`.
    pub k: Buffer<f32>,
    /// Updates d `[rows, Hv*Dv]`.
    pub d: Buffer<f32>,
    /// Log decays g `[rows, Hv]`.
    pub g: Buffer<f32>,
}

impl GdnTail {
    /// Room for `num_rows` rows.
    pub fn new(device: &Device, shape: &GdnShape, num_rows: usize) -> Self {
        Self {
            k: device.alloc(num_rows * shape.keys_len()),
            d: device.alloc(num_rows * shape.values_len()),
            g: device.alloc(num_rows * shape.num_value_heads),
        }
    }
}

/// Weights of the recurrence (projections are matmuls and live elsewhere).
#[derive(Clone, Copy, Debug)]
pub struct GdnWeights<'a> {
    /// Convolution `[C][conv_kernel]`; the last tap multiplies the current token.
    pub conv: &'a Buffer<f32>,
    /// `A_log` `[Hv]`.
    pub a_log: &'a Buffer<f32>,
    /// `dt_bias` `[Hv]`.
    pub dt_bias: &'a Buffer<f32>,
    /// Weight of the output norm `[Dv]`, used as it is.
    pub norm: &'a Buffer<f32>,
    /// Epsilon of the output norm.
    pub norm_eps: f32,
}

/// Arguments of [`GdnWy`].
pub struct GdnWyArgs<'a> {
    /// Head counts and sizes.
    pub shape: &'a GdnShape,
    /// Weights of the layer.
    pub weights: GdnWeights<'a>,
    /// Projections before the convolution `[rows, C]`: all q, all k, all v.
    pub qkv: &'a Buffer<f32>,
    /// Output gate `[rows, Hv*Dv]`.
    pub z: &'a Buffer<f32>,
    /// Decay projection `[rows, Hv]`.
    pub a: &'a Buffer<f32>,
    /// Update-strength projection `[rows, Hv]`.
    pub b: &'a Buffer<f32>,
    /// The rows of the pass.
    pub paths: &'a RowPaths,
    /// The layer's committed state; holds the state of every anchor that a row of `paths` needs.
    pub cache: &'a GdnLayerCache,
    /// Receives this pass's rows.
    pub tail: &'a mut GdnTail,
    /// Result `[rows, Hv*Dv]`, after the gated norm.
    pub y: &'a mut Buffer<f32>,
}

/// The kernel; see the module's head for its contract.
pub struct GdnWy;

impl Kernel for GdnWy {
    const NAME: &'static str = "gdn_wy";
    type Args<'a> = GdnWyArgs<'a>;

    fn check(_args: &GdnWyArgs<'_>) -> Result<(), KernelError> {
        Ok(())
    }

    fn host(_device: &HostDevice, _args: GdnWyArgs<'_>) {
        unimplemented!("lands with the next commit")
    }
}
