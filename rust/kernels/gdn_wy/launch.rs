//! The launches of `gdn_wy` on a GPU: one where a key head's blocks are a cluster, else a second one for the norm.
//!
//! How lanes, rows and states are spread over blocks, chunks and stages changes no sum.

use super::{FOLD_INTERVAL, GdnWy, GdnWyArgs, MAX_ENTRIES};
use crate::device::cuda::{CudaDevice, Shape};
use crate::error::KernelError;
use crate::kernels::launcher::Launcher;
use crate::kernels::matmul_rows::CudaRows;
use crate::kernels::paths::CudaPaths;
use crate::kernels::{Kernel, check_size};

const NORM_THREADS: usize = 256;
const WARP_LANES: usize = 32;
/// Rows of a tile.
const TILE_ROWS: usize = 8;
/// Tiles that a chunk of rows may have; the entries of `gdn_wy.cu`.
const CHUNK_TILES: [usize; 3] = [4, 2, 1];
/// Length of a key in shared memory; shorter ones are padded.
const KEY_LEN: usize = 128;
/// Value lanes of a matrix instruction.
const TILE_VALUES: usize = 8;
/// Value lanes of a warp of the largest chunks, which all belong to one head.
const MOST_WARP_VALUES: usize = 16;
/// Value lanes that a block may have.
const BLOCK_LANES: [usize; 4] = [16, 32, 48, MAX_LANES];
const MAX_LANES: usize = 64;
/// Most blocks of a key head: what a cluster holds on every GPU.
const MAX_SLICES: usize = 8;
const MAX_SEGMENT_ROWS: usize = 64;
/// Most value heads of a block's lanes.
const MAX_PLANES: usize = 4;
const MAX_TAPS: usize = 4;
/// Logged keys that a block copies ahead.
const STAGED_KEYS: usize = 16;
/// Floats of a row of staged keys, and of a row's updates.
const KEY_ROW: usize = KEY_LEN + 16;
const UPDATE_ROW: usize = MAX_LANES + 8;
/// What `Rows` of the device code takes, rounded up.
const STATIC_SHARED_BYTES: usize = 12 * 1024;

/// `SharedLayout` of `gdn_block.cuh`, in floats.
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct SharedLayout {
    states: u32,
    log_d: u32,
    log_k: u32,
    keys: u32,
    products: u32,
    weighed: u32,
    own: u32,
    updates: u32,
    squares: u32,
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
    y: CudaRows,
    outputs: u64,
    squares: u64,
    shared: SharedLayout,
    num_key_heads: u32,
    num_value_heads: u32,
    heads_per_key: u32,
    key_dim: u32,
    value_dim: u32,
    num_taps: u32,
    num_channels: u32,
    num_slices: u32,
    lanes: u32,
    num_states: u32,
    max_entries: u32,
    norm_eps: f32,
    first_row: u32,
    end_row: u32,
}

/// How a pass is spread over blocks.
struct Split {
    /// Value lanes of a block.
    lanes: usize,
    /// Blocks of a key head.
    num_slices: usize,
    /// Value heads that one block's lanes belong to at most.
    num_planes: usize,
    /// Most rows of a segment.
    max_rows: usize,
    /// Most tiles of a chunk.
    max_tiles: usize,
}

impl Split {
    fn of(args: &GdnWyArgs<'_>) -> Result<Self, KernelError> {
        let (name, shape) = (GdnWy::NAME, args.shape);
        let (key_dim, value_dim, taps) = (shape.key_dim, shape.value_dim, shape.conv_kernel);
        let segments = args.paths.segments()[args.segments.clone()].iter();
        let longest = segments.map(|segment| segment.rows.len()).max();
        let longest = longest.unwrap_or(0);
        for (argument, got, expected) in [
            (
                "value_dim",
                value_dim,
                value_dim.next_multiple_of(TILE_VALUES),
            ),
            ("key_dim", key_dim, key_dim.next_multiple_of(4).min(KEY_LEN)),
            ("conv_kernel", taps, taps.min(MAX_TAPS)),
            ("rows of a segment", longest, longest.min(MAX_SEGMENT_ROWS)),
        ] {
            check_size(name, argument, got, expected)?;
        }
        let all_lanes = shape.num_value_heads / shape.num_key_heads * value_dim;
        // Blocks whose lanes all belong to one head weigh products once.
        let is_even = |lanes: usize| value_dim.is_multiple_of(lanes);
        let lanes = BLOCK_LANES
            .into_iter()
            .filter(|lanes| lanes * MAX_SLICES >= all_lanes)
            .min_by_key(|&lanes| (!is_even(lanes), lanes))
            .ok_or_else(|| {
                let most = MAX_LANES * MAX_SLICES / value_dim;
                KernelError::Size {
                    kernel: name,
                    argument: "num_value_heads",
                    expected: most * shape.num_key_heads,
                    got: shape.num_value_heads,
                }
            })?;
        let num_slices = all_lanes.div_ceil(lanes);
        let num_planes = (0..num_slices)
            .map(|slice| {
                let last = ((slice + 1) * lanes).min(all_lanes) - 1;
                last / value_dim - slice * lanes / value_dim + 1
            })
            .max()
            .unwrap_or(1);
        check_size(
            name,
            "value_dim",
            value_dim,
            value_dim.max(MAX_LANES / MAX_PLANES),
        )?;
        Ok(Self {
            lanes,
            num_slices,
            num_planes,
            max_rows: args.paths.longest_of(args.segments.clone()),
            max_tiles: Self::max_tiles(value_dim),
        })
    }

    fn max_tiles(value_dim: usize) -> usize {
        if value_dim.is_multiple_of(MOST_WARP_VALUES) {
            CHUNK_TILES[0]
        } else {
            CHUNK_TILES[1]
        }
    }

    /// Threads of a block that takes chunks of `tiles`; `BLOCK_THREADS` of `gdn_block.cuh`.
    fn block_threads(tiles: usize) -> usize {
        WARP_LANES * if tiles == 1 { 8 } else { 16 }
    }

    /// Places for factors of a row: logged entries, its path, itself.
    fn max_entries(&self) -> usize {
        MAX_ENTRIES + self.max_rows + 1
    }

    /// Places in shared memory for chunks of `tiles` and stages for `num_states`, and the bytes of all.
    fn layout(&self, tiles: usize, num_states: usize) -> (SharedLayout, usize) {
        let mut end = 0;
        let mut take = |len: usize| {
            let start = end;
            end += len.next_multiple_of(4);
            start as u32
        };
        let nodes = tiles * TILE_ROWS;
        let pairs = nodes + 1;
        let mut layout = SharedLayout {
            states: take(num_states * KEY_LEN * MAX_LANES),
            log_d: take(MAX_ENTRIES * MAX_LANES),
            keys: take(nodes * 2 * KEY_LEN),
            products: take(self.max_entries() * pairs * 2),
            updates: take(self.max_rows * UPDATE_ROW),
            squares: take(nodes * (self.num_slices * self.lanes / TILE_VALUES + 1)),
            weighed: take(self.num_planes * nodes * 2 * 2 * FOLD_INTERVAL),
            own: take(self.num_planes * FOLD_INTERVAL * pairs * 2),
            ..SharedLayout::default()
        };
        // Logged keys are used up when products are weighed.
        layout.log_k = layout.weighed;
        end = end.max(layout.log_k as usize + STAGED_KEYS * KEY_ROW);
        (layout, end * size_of::<f32>())
    }

    /// Anchors that rows of a segment may have.
    fn num_anchors(&self) -> usize {
        1 + (self.max_rows - 1).div_ceil(FOLD_INTERVAL)
    }

    /// Whether rows of a segment are one small chunk. Two such blocks share a multiprocessor, so that a launch starts while
    /// the one before it ends.
    fn is_small(&self) -> bool {
        self.max_rows <= TILE_ROWS
    }

    /// Stages for states that pay: few rows seldom have two anchors, and then one state follows the other.
    fn most_states(&self) -> usize {
        if self.is_small() {
            1
        } else {
            self.num_anchors()
        }
    }

    /// Tiles of a chunk and stages for states: as many as the rows ask for and `limit` bytes hold.
    fn chunk(&self, limit: usize) -> Option<(usize, usize)> {
        let wanted = self.max_rows.div_ceil(TILE_ROWS);
        let most = CHUNK_TILES.into_iter().rev().find(|&tiles| tiles >= wanted);
        let most = most.unwrap_or(CHUNK_TILES[0]).min(self.max_tiles);
        let sizes = CHUNK_TILES.into_iter().filter(|&tiles| tiles <= most);
        sizes
            .flat_map(|tiles| {
                (0..=self.most_states())
                    .rev()
                    .map(move |states| (tiles, states))
            })
            .find(|&(tiles, states)| self.layout(tiles, states).1 <= limit)
    }

    /// The entry that serves chunks of `tiles` with `num_states` staged.
    fn entry(&self, tiles: usize, num_states: usize, in_clusters: bool) -> String {
        match (in_clusters, self.is_small() && num_states > 0) {
            (true, true) => "gdn_wy_single".to_owned(),
            (true, false) => format!("gdn_wy_{tiles}"),
            (false, _) => format!("gdn_wy_alone_{tiles}"),
        }
    }
}

/// Runs the kernel; `args` passed `check`.
///
/// # Errors
/// [`KernelError::Size`] for shapes that the device code does not serve, [`KernelError::SharedMemory`] for those that
/// this GPU does not, [`KernelError::WrongDevice`], [`KernelError::Device`].
pub(super) fn run(device: &CudaDevice, args: &GdnWyArgs<'_>) -> Result<(), KernelError> {
    let split = Split::of(args)?;
    let rows = args.paths.rows_of(&args.segments);
    if rows.is_empty() {
        return Ok(());
    }
    let launcher = Launcher::of::<GdnWy>(device);
    let shape = args.shape;
    let limits = device.limits();
    let chunk = split.chunk(limits.block_shared_bytes - STATIC_SHARED_BYTES);
    let (tiles, num_states) = chunk.unwrap_or((1, 0));
    let (layout, shared_bytes) = split.layout(tiles, num_states);
    launcher.check_shared_bytes("value_dim", shared_bytes + STATIC_SHARED_BYTES)?;
    let in_clusters = limits.has_clusters && split.num_slices > 1;
    let outputs_bytes = rows.end * shape.values_len() * size_of::<f32>();
    let outputs = if in_clusters {
        0
    } else {
        launcher.scratch(outputs_bytes + outputs_bytes / TILE_VALUES)?
    };
    let (weights, cache, tail) = (&args.weights, args.cache, &*args.tail);
    let params = GdnWyParams {
        paths: args.paths.segments_on_cuda(GdnWy::NAME, &args.segments)?,
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
        y: args
            .y
            .on_cuda(&launcher, args.paths.num_rows(), shape.values_len())?,
        outputs,
        squares: outputs + outputs_bytes as u64,
        shared: layout,
        num_key_heads: shape.num_key_heads as u32,
        num_value_heads: shape.num_value_heads as u32,
        heads_per_key: (shape.num_value_heads / shape.num_key_heads) as u32,
        key_dim: shape.key_dim as u32,
        value_dim: shape.value_dim as u32,
        num_taps: shape.conv_kernel as u32,
        num_channels: shape.conv_channels() as u32,
        num_slices: split.num_slices as u32,
        lanes: split.lanes as u32,
        num_states: num_states as u32,
        max_entries: split.max_entries() as u32,
        norm_eps: weights.norm_eps,
        first_row: rows.start as u32,
        end_row: rows.end as u32,
    };
    let num_blocks = args.segments.len() * shape.num_key_heads * split.num_slices;
    let blocks = Shape {
        shared_bytes: shared_bytes as u32,
        cluster_blocks: if limits.has_clusters {
            split.num_slices as u32
        } else {
            1
        },
        ..Shape::of_blocks(num_blocks, Split::block_threads(tiles))
    };
    // SAFETY: `params` mirrors the kernel's; `check` saw that all buffers are as long as the shape asks, the scratch and
    // the shared memory were sized above.
    unsafe {
        launcher.run(
            &split.entry(tiles, num_states, in_clusters),
            blocks,
            &params,
        )?;
        if in_clusters {
            return Ok(());
        }
        let num_groups = rows.len() * shape.values_len() / TILE_VALUES;
        let norms = Shape::of_blocks(num_groups.div_ceil(NORM_THREADS), NORM_THREADS);
        launcher.run("gdn_wy_norm", norms, &params)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Shared memory of an H200, an A100 and a workstation card.
    const BLOCK_SHARED_BYTES: [usize; 3] = [232_448, 166_912, 101_376];
    /// What a multiprocessor of an H200 has for its blocks, and takes for itself of each.
    const ALL_SHARED_BYTES: usize = 233_472;
    const RESERVED_BYTES: usize = 1024;

    #[test]
    fn chunks_fit_everywhere() {
        for limit in BLOCK_SHARED_BYTES {
            for max_rows in [1, 8, 9, 32, 33, 64] {
                let split = Split {
                    lanes: 64,
                    num_slices: 6,
                    num_planes: 1,
                    max_rows,
                    max_tiles: CHUNK_TILES[0],
                };
                let (tiles, num_states) = split.chunk(limit - STATIC_SHARED_BYTES).unwrap();
                let (_, bytes) = split.layout(tiles, num_states);
                assert!(bytes + STATIC_SHARED_BYTES <= limit);
                if limit == BLOCK_SHARED_BYTES[0] {
                    assert_eq!(tiles * TILE_ROWS, max_rows.clamp(8, 32).next_power_of_two());
                    assert!(num_states >= split.most_states().min(2));
                    let block_bytes = bytes + STATIC_SHARED_BYTES + RESERVED_BYTES;
                    assert!(max_rows > TILE_ROWS || 2 * block_bytes <= ALL_SHARED_BYTES);
                }
            }
        }
    }
}
