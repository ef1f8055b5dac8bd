//! Gated DeltaNet token by token along chains, from the state of all committed tokens: as stock engines run it.
//!
//! `S_t = e^(g_t) S_(t-1) + k_t d_t^T` with `d_t = beta_t (v_t - (e^(g_t) S_(t-1))^T k_t)`, output `S_t^T q_t`, before
//! the gated norm. Unlike [`gdn_wy`](super::gdn_wy) the state read lies right before the rows, so it moves with every
//! commit: [`GdnRecurrentArgs::Advance`] brings it forward over logged tokens, which is cheaper than keeping a state for
//! every row. Trees would need that and are refused. The state is the first of a slot's ring.

use std::ops::Range;

use super::gdn_fold::fold_heads;
use super::gdn_wy::{
    GdnLayerCache, GdnShape, GdnTail, LOG_POSITIONS, STATE_RING, SlotLog, check_cache, check_shape,
};
use super::launcher::Launcher;
use super::paths::{CudaPaths, RowPaths, Segment};
use super::simd;
use super::{Kernel, check_len, check_size, for_each_task};
use crate::device::cuda::{CudaDevice, Shape};
use crate::device::{Buffer, HostDevice};
use crate::error::KernelError;

/// Weights of the recurrence before its output norm.
#[derive(Clone, Copy, Debug)]
pub struct GdnRecurrentWeights<'a> {
    /// Convolution `[C][conv_kernel]`; the last tap multiplies the current token.
    pub conv: &'a Buffer<f32>,
    /// `A_log` `[Hv]`.
    pub a_log: &'a Buffer<f32>,
    /// `dt_bias` `[Hv]`.
    pub dt_bias: &'a Buffer<f32>,
}

/// Rows of a pass.
pub struct ChainArgs<'a> {
    /// Head counts and sizes.
    pub shape: &'a GdnShape,
    /// Weights of the layer.
    pub weights: GdnRecurrentWeights<'a>,
    /// One merged projection `[rows, projected_len]`: q, k and v before the convolution, gates of the output, a, b.
    pub projected: &'a Buffer<f32>,
    /// The rows of the pass, chains.
    pub paths: &'a RowPaths,
    /// Those of its segments that run, one after another; rows of others stay as they are.
    pub segments: Range<usize>,
    /// The layer's committed state.
    pub cache: &'a GdnLayerCache,
    /// Receives the inputs of the convolution `[rows, C]`.
    pub tail_qkv: &'a mut Buffer<f32>,
    /// Receives what the log takes of the rows.
    pub tail: &'a mut GdnTail,
    /// Result `[rows, Hv*Dv]`.
    pub y: &'a mut Buffer<f32>,
}

/// Logged tokens that a slot's states take up.
pub struct AdvanceArgs<'a> {
    /// Head counts and sizes.
    pub shape: &'a GdnShape,
    /// Every layer.
    pub layers: &'a mut [GdnLayerCache],
    /// The request's slot.
    pub slot: usize,
    /// Positions to take up; the states hold all before.
    pub positions: Range<usize>,
}

/// Arguments of [`GdnRecurrent`].
pub enum GdnRecurrentArgs<'a> {
    /// Outputs of rows; states stay.
    Chain(ChainArgs<'a>),
    /// States brought forward.
    Advance(AdvanceArgs<'a>),
}

/// The kernel; see the module's head for its contract.
pub struct GdnRecurrent;

/// Length of a row of the merged projection.
pub fn projected_len(shape: &GdnShape) -> usize {
    shape.conv_channels() + shape.values_len() + 2 * shape.num_value_heads
}

impl Kernel for GdnRecurrent {
    const NAME: &'static str = "gdn_recurrent";
    type Args<'a> = GdnRecurrentArgs<'a>;

    fn check(args: &GdnRecurrentArgs<'_>) -> Result<(), KernelError> {
        match args {
            GdnRecurrentArgs::Chain(args) => check_chain(args),
            GdnRecurrentArgs::Advance(args) => {
                check_shape(Self::NAME, args.shape)?;
                let len = args.positions.len();
                check_len(Self::NAME, "log", LOG_POSITIONS, len)?;
                let mut layers = args.layers.iter();
                layers.try_for_each(|l| check_cache(Self::NAME, args.shape, l, args.slot + 1))
            }
        }
    }

    fn host(device: &HostDevice, args: GdnRecurrentArgs<'_>) {
        match args {
            GdnRecurrentArgs::Chain(mut args) => {
                let segments = &args.paths.segments()[args.segments.clone()];
                segments
                    .iter()
                    .for_each(|segment| run_chain(&mut args, segment));
            }
            GdnRecurrentArgs::Advance(args) => {
                let shape = args.shape;
                for layer in args.layers {
                    let log =
                        SlotLog::new(shape, (&layer.log_k, &layer.log_d, &layer.log_g), args.slot);
                    let first = args.slot * STATE_RING * shape.state_len();
                    let state = &mut layer.states.host_mut()[first..][..shape.state_len()];
                    let tasks = fold_heads(shape, log, args.positions.clone(), state).collect();
                    let num_fma = 2 * args.positions.len() * shape.state_len();
                    for_each_task(device, num_fma, tasks, simd::dispatch);
                }
            }
        }
    }

    fn cuda(device: &CudaDevice, args: GdnRecurrentArgs<'_>) -> Result<(), KernelError> {
        match args {
            GdnRecurrentArgs::Chain(args) => launch_chain(device, &args),
            GdnRecurrentArgs::Advance(args) => launch_advance(device, &args),
        }
    }
}

fn check_chain(args: &ChainArgs<'_>) -> Result<(), KernelError> {
    let (name, shape, weights) = (GdnRecurrent::NAME, args.shape, &args.weights);
    check_shape(name, shape)?;
    let num_rows = args.paths.num_rows();
    let (channels, heads) = (shape.conv_channels(), shape.num_value_heads);
    for (argument, got, expected) in [
        ("conv", weights.conv.len(), channels * shape.conv_kernel),
        ("a_log", weights.a_log.len(), heads),
        ("dt_bias", weights.dt_bias.len(), heads),
        (
            "projected",
            args.projected.len(),
            num_rows * projected_len(shape),
        ),
        ("tail.qkv", args.tail_qkv.len(), num_rows * channels),
        ("tail.k", args.tail.k.len(), num_rows * shape.keys_len()),
        ("tail.d", args.tail.d.len(), num_rows * shape.values_len()),
        ("tail.g", args.tail.g.len(), num_rows * heads),
        ("y", args.y.len(), num_rows * shape.values_len()),
    ] {
        check_len(name, argument, got, expected)?;
    }
    let segments = args.paths.segments();
    check_len(name, "segments", segments.len(), args.segments.end)?;
    for segment in segments {
        let is_next = |row: &usize| args.paths.path(*row).len() == row - segment.rows.start + 1;
        if let Some(row) = segment.rows.clone().find(|row| !is_next(row)) {
            return Err(KernelError::NotAChain { kernel: name, row });
        }
    }
    let slots = segments.iter().map(|segment| segment.slot + 1);
    check_cache(name, shape, args.cache, slots.max().unwrap_or(0))
}

/// Added to the sum of squares of q and of k.
const KEY_NORM_EPS: f32 = 1e-6;

/// The rows of one segment on the host, one after another and head by head.
fn run_chain(args: &mut ChainArgs<'_>, segment: &Segment) {
    let shape = args.shape;
    let (keys_len, values_len) = (shape.keys_len(), shape.values_len());
    let (key_dim, value_dim) = (shape.key_dim, shape.value_dim);
    let channels = shape.conv_channels();
    let first = segment.slot * STATE_RING * shape.state_len();
    let mut states = args.cache.states.host()[first..][..shape.state_len()].to_vec();
    for row in segment.rows.clone() {
        let projected =
            &args.projected.host()[row * projected_len(shape)..][..projected_len(shape)];
        args.tail_qkv.host_mut()[row * channels..][..channels]
            .copy_from_slice(&projected[..channels]);
        let mut inputs = convolved(args, segment, row);
        for (i, key) in inputs[..2 * keys_len].chunks_exact_mut(key_dim).enumerate() {
            let norm = (key.iter().map(|x| x * x).sum::<f32>() + KEY_NORM_EPS).sqrt();
            let is_query = i < shape.num_key_heads;
            let scale = if is_query {
                (key_dim as f32).sqrt()
            } else {
                1.0
            };
            key.iter_mut().for_each(|x| *x /= norm * scale);
        }
        let (q, rest) = inputs.split_at(keys_len);
        let (k, v) = rest.split_at(keys_len);
        args.tail.k.host_mut()[row * keys_len..][..keys_len].copy_from_slice(k);
        for (head, state) in states.chunks_exact_mut(key_dim * value_dim).enumerate() {
            let gates = &projected[channels + values_len..];
            let x = f64::from(gates[head] + args.weights.dt_bias.host()[head]);
            let softplus = x.max(0.0) + (-x.abs()).exp().ln_1p();
            let g = (-f64::from(args.weights.a_log.host()[head]).exp() * softplus) as f32;
            let beta = 1.0 / (1.0 + (-gates[shape.num_value_heads + head]).exp());
            let key_head = head / (shape.num_value_heads / shape.num_key_heads);
            let own_key = key_head * key_dim..(key_head + 1) * key_dim;
            let (q, k) = (&q[own_key.clone()], &k[own_key]);
            state.iter_mut().for_each(|s| *s *= g.exp());
            let mut d = v[head * value_dim..][..value_dim].to_vec();
            for (state, k) in state.chunks_exact(value_dim).zip(k) {
                d.iter_mut().zip(state).for_each(|(d, s)| *d -= s * k);
            }
            d.iter_mut().for_each(|d| *d *= beta);
            let mut y = vec![0.0; value_dim];
            for ((state, k), q) in state.chunks_exact_mut(value_dim).zip(k).zip(q) {
                for ((s, d), y) in state.iter_mut().zip(&d).zip(&mut y) {
                    *s += k * d;
                    *y += *s * q;
                }
            }
            let place = row * values_len + head * value_dim;
            args.tail.d.host_mut()[place..][..value_dim].copy_from_slice(&d);
            args.y.host_mut()[place..][..value_dim].copy_from_slice(&y);
            args.tail.g.host_mut()[row * shape.num_value_heads + head] = g;
        }
    }
}

/// `silu(conv(qkv))` of one row; taps from the oldest to the current token, those before the first left out.
fn convolved(args: &ChainArgs<'_>, segment: &Segment, row: usize) -> Vec<f32> {
    let shape = args.shape;
    let (channels, taps) = (shape.conv_channels(), shape.conv_kernel);
    let position = args.paths.position(row);
    let mut sums = vec![0.0_f32; channels];
    for tap in 0..taps {
        let back = taps - 1 - tap;
        let Some(at) = position.checked_sub(back) else {
            continue;
        };
        let inputs = if at < segment.committed_len {
            &args.cache.conv.host()[(segment.slot * taps + at % taps) * channels..][..channels]
        } else {
            &args.projected.host()[(row - back) * projected_len(shape)..][..channels]
        };
        let weights = args.weights.conv.host().chunks_exact(taps);
        for ((sum, input), weights) in sums.iter_mut().zip(inputs).zip(weights) {
            *sum += weights[tap] * input;
        }
    }
    sums.iter_mut().for_each(|x| *x /= 1.0 + (-*x).exp());
    sums
}

/// Columns of a state that a block of `gdn_recurrent.cu` has.
const BLOCK_COLUMNS: usize = 16;
const CHAIN_THREADS: usize = 64;
const INPUT_WARPS: usize = 8;
/// Channels of values that a warp makes.
const WARP_CHANNELS: usize = 128;
/// Longest key that a thread's registers hold their part of.
const MAX_KEY_DIM: usize = 128;
const MAX_TAPS: usize = 4;
/// Layers of one launch.
const MAX_LAYERS: usize = 64;

/// `GdnSizes` of `gdn_recurrent.cu`.
#[repr(C)]
#[derive(Clone, Copy)]
struct GdnSizes {
    num_key_heads: u32,
    num_value_heads: u32,
    key_dim: u32,
    value_dim: u32,
}

impl GdnSizes {
    /// The sizes that a launch takes.
    ///
    /// # Errors
    /// [`KernelError::Size`] for keys or taps that the device code does not serve.
    fn of(shape: &GdnShape) -> Result<Self, KernelError> {
        let served = shape.key_dim.next_multiple_of(4).min(MAX_KEY_DIM);
        check_size(GdnRecurrent::NAME, "key_dim", shape.key_dim, served)?;
        let taps = shape.conv_kernel;
        check_size(GdnRecurrent::NAME, "conv_kernel", taps, taps.min(MAX_TAPS))?;
        Ok(Self {
            num_key_heads: shape.num_key_heads as u32,
            num_value_heads: shape.num_value_heads as u32,
            key_dim: shape.key_dim as u32,
            value_dim: shape.value_dim as u32,
        })
    }
}

/// Blocks that hold one layer's state.
fn num_parts(shape: &GdnShape) -> usize {
    shape.num_value_heads * shape.value_dim.div_ceil(BLOCK_COLUMNS)
}

/// `GdnRecurrentParams` of `gdn_recurrent.cu`.
#[repr(C)]
#[derive(Clone, Copy)]
struct GdnRecurrentParams {
    paths: CudaPaths,
    projected: u64,
    conv_weights: u64,
    conv_inputs: u64,
    a_log: u64,
    dt_bias: u64,
    states: u64,
    tail_qkv: u64,
    tail_k: u64,
    tail_d: u64,
    tail_g: u64,
    q: u64,
    v: u64,
    beta: u64,
    y: u64,
    sizes: GdnSizes,
    num_taps: u32,
    row_len: u32,
    first_row: u32,
    first_segment: u32,
}

fn launch_chain(device: &CudaDevice, args: &ChainArgs<'_>) -> Result<(), KernelError> {
    let launcher = Launcher::of::<GdnRecurrent>(device);
    let (shape, num_rows) = (args.shape, args.paths.num_rows());
    let sizes = GdnSizes::of(shape)?;
    let rows = args.paths.rows_of(&args.segments);
    if rows.is_empty() {
        return Ok(());
    }
    let (q_len, v_len) = (num_rows * shape.keys_len(), num_rows * shape.values_len());
    let scratch_len = q_len + v_len + num_rows * shape.num_value_heads;
    let scratch = launcher.scratch(scratch_len * size_of::<f32>())?;
    let after = |len: usize| scratch + (len * size_of::<f32>()) as u64;
    let params = GdnRecurrentParams {
        paths: args.paths.on_cuda(GdnRecurrent::NAME)?,
        projected: launcher.buffer("projected", args.projected)?,
        conv_weights: launcher.buffer("conv", args.weights.conv)?,
        conv_inputs: launcher.buffer("cache.conv", &args.cache.conv)?,
        a_log: launcher.buffer("a_log", args.weights.a_log)?,
        dt_bias: launcher.buffer("dt_bias", args.weights.dt_bias)?,
        states: launcher.buffer("cache.states", &args.cache.states)?,
        tail_qkv: launcher.buffer("tail.qkv", &*args.tail_qkv)?,
        tail_k: launcher.buffer("tail.k", &args.tail.k)?,
        tail_d: launcher.buffer("tail.d", &args.tail.d)?,
        tail_g: launcher.buffer("tail.g", &args.tail.g)?,
        q: scratch,
        v: after(q_len),
        beta: after(q_len + v_len),
        y: launcher.buffer("y", &*args.y)?,
        sizes,
        num_taps: shape.conv_kernel as u32,
        row_len: projected_len(shape) as u32,
        first_row: rows.start as u32,
        first_segment: args.segments.start as u32,
    };
    let num_vectors = 2 * shape.num_key_heads + shape.values_len().div_ceil(WARP_CHANNELS);
    let input_blocks = rows.len() * num_vectors.div_ceil(INPUT_WARPS);
    let chain_blocks = args.segments.len() * num_parts(shape);
    for (entry, blocks) in [
        (
            "gdn_recurrent_inputs",
            Shape::of_blocks(input_blocks, INPUT_WARPS * 32),
        ),
        (
            "gdn_recurrent",
            Shape::of_blocks(chain_blocks, CHAIN_THREADS),
        ),
    ] {
        // SAFETY: `params` mirrors the kernels'; `check` saw that all buffers are as long as the shape asks, and the
        // scratch was sized above.
        unsafe { launcher.run(entry, blocks, &params) }?;
    }
    Ok(())
}

/// `LayerLog` of `gdn_recurrent.cu`.
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct LayerLog {
    states: u64,
    log_k: u64,
    log_d: u64,
    log_g: u64,
}

/// `GdnAdvanceParams` of `gdn_recurrent.cu`.
#[repr(C)]
#[derive(Clone, Copy)]
struct GdnAdvanceParams {
    layers: [LayerLog; MAX_LAYERS],
    sizes: GdnSizes,
    slot: u32,
    first: u32,
    end: u32,
}

fn launch_advance(device: &CudaDevice, args: &AdvanceArgs<'_>) -> Result<(), KernelError> {
    let launcher = Launcher::of::<GdnRecurrent>(device);
    let mut params = GdnAdvanceParams {
        layers: [LayerLog::default(); MAX_LAYERS],
        sizes: GdnSizes::of(args.shape)?,
        slot: args.slot as u32,
        first: args.positions.start as u32,
        end: args.positions.end as u32,
    };
    if args.positions.is_empty() {
        return Ok(());
    }
    for layers in args.layers.chunks(MAX_LAYERS) {
        for (to, layer) in params.layers.iter_mut().zip(layers) {
            *to = LayerLog {
                states: launcher.buffer("cache.states", &layer.states)?,
                log_k: launcher.buffer("cache.log_k", &layer.log_k)?,
                log_d: launcher.buffer("cache.log_d", &layer.log_d)?,
                log_g: launcher.buffer("cache.log_g", &layer.log_g)?,
            };
        }
        let blocks = Shape::of_blocks(layers.len() * num_parts(args.shape), CHAIN_THREADS);
        // SAFETY: `params` mirrors the kernel's; `check` saw that every cache has the slot.
        unsafe { launcher.run("gdn_recurrent_advance", blocks, &params) }?;
    }
    Ok(())
}
