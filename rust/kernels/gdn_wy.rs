//! Gated DeltaNet over rows of trees, chains and single tokens, without a state per row.
//!
//! In: projections before the convolution, gates, the slot's committed state. Out: gated-norm outputs `y`, and the rows'
//! `(k, d, g)` in `tail`. The row at position t reads the state S before anchor A = [`anchor_of`]`(t)` and the entries
//! `(k, d, g)_j`, A <= j < t, of its own path: from the log when committed, from the tail when not. With
//! `E_j = g_t + g_(t-1) + .. + g_(j+1)`, added in that order, and `w_j = exp(E_j)`, `e0 = exp(E_(A-1))`:
//! ```text
//! d_t = beta (v_t - (e0 S^T k_t + sum_j (w_j k_t.k_j) d_j))
//! o_t = e0 S^T q_t + sum_j (w_j q_t.k_j) d_j + (q_t.k_t) d_t          y = norm_weight rms(o) silu(z)
//! ```
//! Every value lane sums alone, one fused multiply-add chain over ascending state rows, times e0, then over ascending
//! j; products of keys are canonical `dot`s. Taps of the convolution run from the oldest to the current token, tokens
//! before the first are left out. So a token path gives the same bits in every packing and however it was committed.
//!
//! The log keeps d, and nothing of it is solved twice: d_t follows from t, the state before A(t) and the entries since, all
//! of them of its own path, so it has one value, whether its row was a prompt's, a tree's or plain decoding's. Folding
//! changes no logged d: a row further on reads it as it is, beside the state of its own anchor.
//!
//! On CUDA the order of sums is another, as fixed. Positions are cut in stretches of 32 at absolute multiples. Products
//! with the state, with keys and with the two whole stretches before t's own are matrix instructions on factors split in
//! two TF32 parts, where the column is the position; the own stretch follows entry by entry. A stretch that is not
//! wholly committed takes the same instructions on each path's own d. Decays are sums of g within stretches, then of
//! stretches.

mod heads;
mod launch;

use std::ops::Range;

use heads::{KeyHead, Pass, ValueHead};

use super::matmul_rows::RowsOutput;
use super::paths::{MAX_PATH_ROWS, RowPaths, Segment};
use super::simd;
use super::{Kernel, check_len, check_size, for_each_task};
use crate::device::cuda::CudaDevice;
use crate::device::{Buffer, Device, HostDevice};
use crate::error::{DeviceError, KernelError};

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
    ///
    /// # Errors
    /// [`DeviceError::OutOfMemory`].
    pub fn new(device: &Device, shape: &GdnShape, num_slots: usize) -> Result<Self, DeviceError> {
        let log = num_slots * LOG_POSITIONS;
        Ok(Self {
            states: device.try_alloc(num_slots * STATE_RING * shape.state_len())?,
            log_k: device.try_alloc(log * shape.keys_len())?,
            log_d: device.try_alloc(log * shape.values_len())?,
            log_g: device.try_alloc(log * shape.num_value_heads)?,
            conv: device.try_alloc(num_slots * shape.conv_kernel * shape.conv_channels())?,
        })
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
    ///
    /// # Errors
    /// [`DeviceError::OutOfMemory`].
    pub fn new(device: &Device, shape: &GdnShape, num_rows: usize) -> Result<Self, DeviceError> {
        Ok(Self {
            k: device.try_alloc(num_rows * shape.keys_len())?,
            d: device.try_alloc(num_rows * shape.values_len())?,
            g: device.try_alloc(num_rows * shape.num_value_heads)?,
        })
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
    /// Those of its segments that run, one after another; rows of others stay as they are.
    pub segments: Range<usize>,
    /// The layer's committed state; holds the state of every anchor that their rows need.
    pub cache: &'a GdnLayerCache,
    /// Receives this pass's rows.
    pub tail: &'a mut GdnTail,
    /// Result `[rows, Hv*Dv]`, after the gated norm.
    pub y: RowsOutput<'a>,
}

/// The kernel; see the module's head for its contract.
pub struct GdnWy;

/// Most entries `A(t)..t` of one row.
const MAX_ENTRIES: usize = ANCHOR_DELAY + FOLD_INTERVAL;

const _: () = {
    assert!(
        MAX_PATH_ROWS <= ANCHOR_DELAY,
        "anchors lie in committed ground"
    );
    assert!(
        MAX_ENTRIES <= LOG_POSITIONS,
        "the log reaches back to the anchor"
    );
    assert!(
        MAX_PATH_ROWS.div_ceil(FOLD_INTERVAL) < STATE_RING,
        "a pass finds all its anchors' states"
    );
};

impl Kernel for GdnWy {
    const NAME: &'static str = "gdn_wy";
    type Args<'a> = GdnWyArgs<'a>;

    fn check(args: &GdnWyArgs<'_>) -> Result<(), KernelError> {
        let (name, shape, weights) = (Self::NAME, args.shape, &args.weights);
        check_shape(name, shape)?;
        let num_rows = args.paths.num_rows();
        let (channels, heads) = (shape.conv_channels(), shape.num_value_heads);
        for (argument, got, expected) in [
            ("conv", weights.conv.len(), channels * shape.conv_kernel),
            ("a_log", weights.a_log.len(), heads),
            ("dt_bias", weights.dt_bias.len(), heads),
            ("norm", weights.norm.len(), shape.value_dim),
            ("qkv", args.qkv.len(), num_rows * channels),
            ("z", args.z.len(), num_rows * shape.values_len()),
            ("a", args.a.len(), num_rows * heads),
            ("b", args.b.len(), num_rows * heads),
            ("tail.k", args.tail.k.len(), num_rows * shape.keys_len()),
            ("tail.d", args.tail.d.len(), num_rows * shape.values_len()),
            ("tail.g", args.tail.g.len(), num_rows * heads),
        ] {
            check_len(name, argument, got, expected)?;
        }
        args.y.check(name, num_rows, shape.values_len())?;
        check_len(
            name,
            "segments",
            args.paths.segments().len(),
            args.segments.end,
        )?;
        let segments = args.paths.segments()[args.segments.clone()].iter();
        let slots = segments.map(|segment| segment.slot + 1);
        check_cache(name, shape, args.cache, slots.max().unwrap_or(0))
    }

    fn host(device: &HostDevice, mut args: GdnWyArgs<'_>) {
        let shape = args.shape;
        let num_rows = args.paths.rows_of(&args.segments).len();
        let pass = Pass::new(&args);
        let segments = &args.paths.segments()[args.segments.clone()];
        let (keys_stride, values_stride) = (KeyHead::row_len(shape), ValueHead::row_len(shape));
        let mut keys = vec![0.0; num_rows * shape.num_key_heads * keys_stride];
        let mut values = vec![0.0; num_rows * shape.num_value_heads * values_stride];

        let tasks = per_head(segments, shape.num_key_heads, keys_stride, &mut keys)
            .map(|(segment, head, scratch)| KeyHead::new(pass, segment, head, scratch))
            .collect();
        let num_fma = num_rows * shape.keys_len() * 2 * MAX_ENTRIES;
        for_each_task(device, num_fma, tasks, simd::dispatch);

        let tasks = per_head(segments, shape.num_value_heads, values_stride, &mut values)
            .map(|(segment, head, scratch)| ValueHead::new(pass, segment, head, &keys, scratch))
            .collect();
        let num_fma = num_rows * shape.values_len() * 2 * (shape.key_dim + MAX_ENTRIES);
        for_each_task(device, num_fma, tasks, simd::dispatch);

        for (segment, head, scratch) in
            per_head(segments, shape.num_key_heads, keys_stride, &mut keys)
        {
            let k = KeyHead::keys(shape, segment, scratch);
            let place = (head, shape.num_key_heads);
            scatter(k, segment, place, args.tail.k.host_mut());
        }
        for (segment, head, scratch) in
            per_head(segments, shape.num_value_heads, values_stride, &mut values)
        {
            let [d, y, g] = ValueHead::results(shape, segment, scratch);
            let place = (head, shape.num_value_heads);
            scatter(d, segment, place, args.tail.d.host_mut());
            scatter(y, segment, place, args.y.host_mut());
            scatter(g, segment, place, args.tail.g.host_mut());
        }
    }

    fn cuda(device: &CudaDevice, args: GdnWyArgs<'_>) -> Result<(), KernelError> {
        launch::run(device, &args)
    }
}

/// Cuts `scratch` into one piece per segment and head: tasks write there, head by head, because their places in a
/// row-major result interleave.
fn per_head<'a>(
    segments: &'a [Segment],
    num_heads: usize,
    row_len: usize,
    mut scratch: &'a mut [f32],
) -> impl Iterator<Item = (&'a Segment, usize, &'a mut [f32])> {
    segments
        .iter()
        .flat_map(move |segment| (0..num_heads).map(move |head| (segment, head)))
        .map(move |(segment, head)| {
            let piece = scratch
                .split_off_mut(..segment.rows.len() * row_len)
                .expect("scratch is num_rows * num_heads * row_len long");
            (segment, head, piece)
        })
}

/// Copies `[rows, len]` of head `head` to its place in `to`, `[rows, num_heads, len]`.
fn scatter(from: &[f32], segment: &Segment, (head, num_heads): (usize, usize), to: &mut [f32]) {
    let len = from.len() / segment.rows.len().max(1);
    if len == 0 {
        return;
    }
    for (row, values) in segment.rows.clone().zip(from.chunks_exact(len)) {
        to[(row * num_heads + head) * len..][..len].copy_from_slice(values);
    }
}

/// Refuses sizes that are zero and value heads that do not share key heads evenly.
pub(super) fn check_shape(kernel: &'static str, shape: &GdnShape) -> Result<(), KernelError> {
    for (argument, size) in [
        ("num_key_heads", shape.num_key_heads),
        ("key_dim", shape.key_dim),
        ("value_dim", shape.value_dim),
        ("conv_kernel", shape.conv_kernel),
    ] {
        check_size(kernel, argument, size, size.max(1))?;
    }
    let even = shape
        .num_value_heads
        .max(1)
        .next_multiple_of(shape.num_key_heads);
    check_size(kernel, "num_value_heads", shape.num_value_heads, even)
}

/// Refuses a cache with fewer than `num_slots` slots.
pub(super) fn check_cache(
    kernel: &'static str,
    shape: &GdnShape,
    cache: &GdnLayerCache,
    num_slots: usize,
) -> Result<(), KernelError> {
    let log = num_slots * LOG_POSITIONS;
    let conv = num_slots * shape.conv_kernel * shape.conv_channels();
    for (argument, got, expected) in [
        (
            "cache.states",
            cache.states.len(),
            num_slots * STATE_RING * shape.state_len(),
        ),
        ("cache.log_k", cache.log_k.len(), log * shape.keys_len()),
        ("cache.log_d", cache.log_d.len(), log * shape.values_len()),
        (
            "cache.log_g",
            cache.log_g.len(),
            log * shape.num_value_heads,
        ),
        ("cache.conv", cache.conv.len(), conv),
    ] {
        check_len(kernel, argument, got, expected)?;
    }
    Ok(())
}

/// The logged `(k, d, g)` of one slot.
#[derive(Clone, Copy)]
pub(crate) struct SlotLog<'a> {
    k: &'a [f32],
    d: &'a [f32],
    g: &'a [f32],
}

impl<'a> SlotLog<'a> {
    /// The log of `slot`, from a layer's three log buffers.
    pub(crate) fn new(
        shape: &GdnShape,
        (k, d, g): (&'a Buffer<f32>, &'a Buffer<f32>, &'a Buffer<f32>),
        slot: usize,
    ) -> Self {
        let slot_of = |buffer: &'a Buffer<f32>, row_len: usize| {
            &buffer.host()[slot * LOG_POSITIONS * row_len..][..LOG_POSITIONS * row_len]
        };
        Self {
            k: slot_of(k, shape.keys_len()),
            d: slot_of(d, shape.values_len()),
            g: slot_of(g, shape.num_value_heads),
        }
    }

    /// Key of `position` in key head `head`.
    #[inline(always)]
    pub(super) fn k(&self, shape: &GdnShape, position: usize, head: usize) -> &'a [f32] {
        let at = position % LOG_POSITIONS * shape.num_key_heads + head;
        &self.k[at * shape.key_dim..][..shape.key_dim]
    }

    /// Update d of `position` in value head `head`.
    #[inline(always)]
    pub(super) fn d(&self, shape: &GdnShape, position: usize, head: usize) -> &'a [f32] {
        let at = position % LOG_POSITIONS * shape.num_value_heads + head;
        &self.d[at * shape.value_dim..][..shape.value_dim]
    }

    /// Log decay of `position` in value head `head`.
    #[inline(always)]
    pub(super) fn g(&self, shape: &GdnShape, position: usize, head: usize) -> f32 {
        self.g[position % LOG_POSITIONS * shape.num_value_heads + head]
    }
}
