//! The launches of `gdn_wy` on a GPU: one where blocks come in clusters, else four per chunk of rows.
//!
//! Which lanes share a block follows from the shape alone and with it every sum; chunks and launches change none.

use super::{GdnWy, GdnWyArgs, MAX_ENTRIES};
use crate::device::cuda::{CudaDevice, Shape};
use crate::error::KernelError;
use crate::kernels::launcher::Launcher;
use crate::kernels::paths::{CudaPaths, MAX_PATH_ROWS};
use crate::kernels::{Kernel, check_size};

const BLOCK_THREADS: usize = 256;
/// Rows of a chunk at most: one per lane of a warp.
const CHUNK_ROWS: usize = 32;
/// Rows of a tile.
const TILE_ROWS: usize = 8;
/// Columns of a key that one fragment holds.
const KEY_STEP: usize = 16;
/// Values of a fragment of k and q.
const FRAGMENT_LEN: usize = 256;
/// Value lanes that a block may have; the entries of `gdn_wy.cu`.
const BLOCK_LANES: [usize; 4] = [16, 32, 48, 64];
/// Most blocks of a key head: what a cluster holds on every GPU.
const MAX_SLICES: usize = 8;
const MAX_KEY_DIM: usize = 128;
const MAX_TAPS: usize = 4;
/// What `Nodes` and `Gates` of the device code take, rounded up.
const STATIC_SHARED_BYTES: usize = 20 * 1024;

/// `SharedLayout` of `gdn_block.cuh`, in floats.
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct SharedLayout {
    keys: u32,
    exponents: u32,
    factors: u32,
    log_d: u32,
    values: u32,
    outputs: u32,
}

/// `GdnWyParams` of `gdn_block.cuh`.
#[repr(C)]
#[derive(Clone, Copy)]
struct GdnWyParams {
    paths: CudaPaths,
    qkv: u64,
    z: u64,
    a: u64,
    b: u64,
    conv_weights: u64,
    a_log: u64,
    dt_bias: u64,
    norm_weight: u64,
    states: u64,
    log_k: u64,
    log_d: u64,
    log_g: u64,
    conv_inputs: u64,
    tail_k: u64,
    tail_d: u64,
    tail_g: u64,
    y: u64,
    keys: u64,
    products: u64,
    squares: u64,
    shared: SharedLayout,
    num_key_heads: u32,
    num_value_heads: u32,
    key_dim: u32,
    value_dim: u32,
    num_taps: u32,
    num_slices: u32,
    num_planes: u32,
    chunk_rows: u32,
    max_entries: u32,
    chunk: u32,
    norm_eps: f32,
}

/// How a pass is spread over blocks.
struct Split {
    /// Value lanes of a block.
    lanes: usize,
    /// Blocks of a key head.
    num_slices: usize,
    /// Value heads that one block's lanes belong to at most.
    num_planes: usize,
    /// Entries that a row may have.
    max_entries: usize,
    /// Most rows of a segment.
    max_rows: usize,
}

impl Split {
    fn of(args: &GdnWyArgs<'_>) -> Result<Self, KernelError> {
        let shape = args.shape;
        let refuse = |argument, expected, got| KernelError::Size {
            kernel: GdnWy::NAME,
            argument,
            expected,
            got,
        };
        check_size(
            GdnWy::NAME,
            "value_dim",
            shape.value_dim,
            shape.value_dim.next_multiple_of(8),
        )?;
        check_size(
            GdnWy::NAME,
            "key_dim",
            shape.key_dim,
            shape.key_dim.next_multiple_of(4).min(MAX_KEY_DIM),
        )?;
        let taps = shape.conv_kernel;
        check_size(GdnWy::NAME, "conv_kernel", taps, taps.min(MAX_TAPS))?;
        let all_lanes = shape.num_value_heads / shape.num_key_heads * shape.value_dim;
        let lanes = BLOCK_LANES
            .into_iter()
            .find(|lanes| lanes * MAX_SLICES >= all_lanes)
            .ok_or_else(|| {
                let most = BLOCK_LANES[BLOCK_LANES.len() - 1] * MAX_SLICES / shape.value_dim;
                refuse(
                    "num_value_heads",
                    most * shape.num_key_heads,
                    shape.num_value_heads,
                )
            })?;
        let num_slices = all_lanes.div_ceil(lanes);
        let num_planes = (0..num_slices)
            .map(|slice| {
                let last = ((slice + 1) * lanes).min(all_lanes) - 1;
                last / shape.value_dim - slice * lanes / shape.value_dim + 1
            })
            .max()
            .unwrap_or(1);
        let max_rows = args.paths.longest_segment();
        Ok(Self {
            lanes,
            num_slices,
            num_planes,
            max_entries: MAX_ENTRIES + max_rows.min(MAX_PATH_ROWS),
            max_rows,
        })
    }

    /// Places in shared memory for chunks of `chunk_rows`, and the bytes of all.
    fn layout(&self, key_steps: usize, chunk_rows: usize) -> (SharedLayout, usize) {
        let mut end = 0;
        let mut take = |len: usize| {
            let start = end;
            end += len.next_multiple_of(4);
            start as u32
        };
        let pairs = self.num_planes * self.max_entries * chunk_rows;
        let partial_sums = 4 * chunk_rows * (2 * self.lanes + 4);
        let rows = chunk_rows * (self.lanes + 4);
        let layout = SharedLayout {
            keys: take(chunk_rows / TILE_ROWS * key_steps * FRAGMENT_LEN),
            exponents: take(pairs),
            factors: take((2 * pairs).max(partial_sums)),
            log_d: take(MAX_ENTRIES * self.lanes),
            values: take(rows),
            outputs: take(rows),
        };
        (layout, end * size_of::<f32>())
    }
}

/// Runs the kernel; `args` passed `check`.
///
/// # Errors
/// [`KernelError::Size`] for shapes that the device code does not serve, [`KernelError::WrongDevice`],
/// [`KernelError::Device`].
pub(super) fn run(device: &CudaDevice, args: &GdnWyArgs<'_>) -> Result<(), KernelError> {
    let split = Split::of(args)?;
    if args.paths.num_rows() == 0 {
        return Ok(());
    }
    let launcher = Launcher::of::<GdnWy>(device);
    let shape = args.shape;
    let key_steps = shape.key_dim.div_ceil(KEY_STEP);
    let limit = device.limits().block_shared_bytes - STATIC_SHARED_BYTES;
    let most = split.max_rows.next_multiple_of(TILE_ROWS).min(CHUNK_ROWS);
    let (chunk_rows, (layout, shared_bytes)) = (1..=most / TILE_ROWS)
        .rev()
        .map(|tiles| tiles * TILE_ROWS)
        .map(|rows| (rows, split.layout(key_steps, rows)))
        .find(|(rows, (_, bytes))| *bytes <= limit || *rows == TILE_ROWS)
        .expect("a chunk has one tile at least");

    let num_parts = args.paths.segments().len() * shape.num_key_heads;
    let keys_len = num_parts * CHUNK_ROWS / TILE_ROWS * key_steps * FRAGMENT_LEN;
    let products_len = num_parts * (split.max_entries + 1) * CHUNK_ROWS * 2;
    let squares_len = num_parts * split.num_slices * split.num_planes * CHUNK_ROWS;
    let scratch = launcher.scratch((keys_len + products_len + squares_len) * size_of::<f32>())?;
    let after = |len: usize| scratch + (len * size_of::<f32>()) as u64;

    let (weights, cache, tail) = (&args.weights, args.cache, &*args.tail);
    let mut params = GdnWyParams {
        paths: args.paths.on_cuda(GdnWy::NAME)?,
        qkv: launcher.buffer("qkv", args.qkv)?,
        z: launcher.buffer("z", args.z)?,
        a: launcher.buffer("a", args.a)?,
        b: launcher.buffer("b", args.b)?,
        conv_weights: launcher.buffer("conv", weights.conv)?,
        a_log: launcher.buffer("a_log", weights.a_log)?,
        dt_bias: launcher.buffer("dt_bias", weights.dt_bias)?,
        norm_weight: launcher.buffer("norm", weights.norm)?,
        states: launcher.buffer("cache.states", &cache.states)?,
        log_k: launcher.buffer("cache.log_k", &cache.log_k)?,
        log_d: launcher.buffer("cache.log_d", &cache.log_d)?,
        log_g: launcher.buffer("cache.log_g", &cache.log_g)?,
        conv_inputs: launcher.buffer("cache.conv", &cache.conv)?,
        tail_k: launcher.buffer("tail.k", &tail.k)?,
        tail_d: launcher.buffer("tail.d", &tail.d)?,
        tail_g: launcher.buffer("tail.g", &tail.g)?,
        y: launcher.buffer("y", args.y)?,
        keys: scratch,
        products: after(keys_len),
        squares: after(keys_len + products_len),
        shared: layout,
        num_key_heads: shape.num_key_heads as u32,
        num_value_heads: shape.num_value_heads as u32,
        key_dim: shape.key_dim as u32,
        value_dim: shape.value_dim as u32,
        num_taps: shape.conv_kernel as u32,
        num_slices: split.num_slices as u32,
        num_planes: split.num_planes as u32,
        chunk_rows: chunk_rows as u32,
        max_entries: split.max_entries as u32,
        chunk: 0,
        norm_eps: weights.norm_eps,
    };
    let blocks = |shared_bytes: usize, cluster_blocks: usize| Shape {
        shared_bytes: shared_bytes as u32,
        cluster_blocks: cluster_blocks as u32,
        ..Shape::of_blocks(num_parts * split.num_slices, BLOCK_THREADS)
    };
    let launch = |entry: &str, shape: Shape, params: &GdnWyParams| {
        // SAFETY: `params` mirrors the kernel's; `check` saw that all buffers are as long as the shape asks, the scratch
        // and the shared memory were sized above.
        unsafe { launcher.run(entry, shape, params) }
    };
    let lanes = split.lanes;
    if device.limits().has_clusters {
        let shape = blocks(shared_bytes, split.num_slices);
        return launch(&format!("gdn_wy_{lanes}"), shape, &params);
    }
    for chunk in 0..split.max_rows.div_ceil(chunk_rows) {
        params.chunk = chunk as u32;
        launch("gdn_wy_keys", blocks(0, 1), &params)?;
        launch("gdn_wy_products", blocks(shared_bytes, 1), &params)?;
        launch(
            &format!("gdn_wy_values_{lanes}"),
            blocks(shared_bytes, 1),
            &params,
        )?;
        launch(&format!("gdn_wy_norm_{lanes}"), blocks(0, 1), &params)?;
    }
    Ok(())
}
