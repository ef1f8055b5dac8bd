//! The launches of `tree_attention` on a GPU: blocks and splits, then their merge.
//!
//! How rows are cut in tiles and launches changes no sum: blocks and splits are cut at absolute positions.

use super::{KV_BLOCK, KV_SPLIT, TreeAttention, TreeAttentionArgs};
use crate::device::cuda::{CudaDevice, Shape};
use crate::error::KernelError;
use crate::kernels::launcher::Launcher;
use crate::kernels::paths::{CudaPaths, split_bucket};
use crate::kernels::{Kernel, check_size};

const BLOCK_THREADS: usize = 256;
/// Queries that one matrix instruction serves.
const TILE_QUERIES: usize = 16;
/// Head lengths of the entries of `tree_attention.cu`, and tiles of queries besides one.
const ENTRIES: [(usize, usize); 4] = [(64, 4), (128, 4), (256, 4), (512, 2)];
/// Blocks of a row that are not wholly committed.
const GATHERED_BLOCKS: usize = 2;
/// Scratch beyond which a launch takes fewer rows.
const MAX_SCRATCH_BYTES: usize = 128 << 20;

/// `TreeAttentionParams` of `tree_attention.cu`.
#[repr(C)]
#[derive(Clone, Copy)]
struct TreeAttentionParams {
    paths: CudaPaths,
    q: u64,
    k_tail: u64,
    v_tail: u64,
    k_pages: u64,
    v_pages: u64,
    out: u64,
    partials: u64,
    softmaxes: u64,
    first_row: u32,
    num_rows: u32,
    q_heads: u32,
    kv_heads: u32,
    head_dim: u32,
    window: u32,
    scale: f32,
    tile_rows: u32,
    num_splits: u32,
}

/// Which entry runs, and on what memory.
struct Config {
    head_dim: usize,
    tiles: usize,
    shared_bytes: usize,
}

impl Config {
    /// The configuration for `tiles` of queries, if a block has room for it.
    fn with_tiles(head_dim: usize, tiles: usize, limit: usize) -> Option<Self> {
        // `AttentionMemory` of `attention_parts.cuh`.
        let queries = tiles * TILE_QUERIES;
        let row_bytes = (head_dim + 8) * size_of::<u16>();
        let score_bytes = (KV_BLOCK + 4) * size_of::<f32>() + 2 * (KV_BLOCK + 8) * size_of::<u16>();
        let query_bytes = score_bytes + 5 * size_of::<f32>();
        let source_bytes = 2 * KV_SPLIT * size_of::<u64>();
        let shared_bytes = (queries + KV_BLOCK) * row_bytes + queries * query_bytes + source_bytes;
        (shared_bytes <= limit).then_some(Self {
            head_dim,
            tiles,
            shared_bytes,
        })
    }

    /// For heads of `head_dim` and tiles of up to `num_queries`.
    fn choose(head_dim: usize, num_queries: usize, limit: usize) -> Result<Self, KernelError> {
        let refused = |expected| KernelError::Size {
            kernel: TreeAttention::NAME,
            argument: "head_dim",
            expected,
            got: head_dim,
        };
        let (entry, most_tiles) = ENTRIES
            .into_iter()
            .find(|(entry, _)| *entry >= head_dim)
            .ok_or(refused(ENTRIES[ENTRIES.len() - 1].0))?;
        let wide = (num_queries > TILE_QUERIES)
            .then(|| Self::with_tiles(entry, most_tiles, limit))
            .flatten();
        wide.or_else(|| Self::with_tiles(entry, 1, limit))
            .ok_or(refused(entry / 2))
    }

    fn num_queries(&self) -> usize {
        self.tiles * TILE_QUERIES
    }
}

/// Rows that one launch takes.
fn launch_rows(row_bytes: usize, num_rows: usize) -> usize {
    (MAX_SCRATCH_BYTES / row_bytes).clamp(1, num_rows)
}

/// Bytes of scratch that `num_rows` rows take at most, behind up to `num_positions` committed ones.
pub fn scratch_bytes(
    num_rows: usize,
    num_positions: usize,
    q_heads: usize,
    head_dim: usize,
) -> usize {
    let num_splits = split_bucket(num_positions.div_ceil(KV_SPLIT));
    let row_bytes = (GATHERED_BLOCKS + num_splits) * q_heads * (head_dim + 2) * size_of::<f32>();
    launch_rows(row_bytes, num_rows) * row_bytes
}

/// Runs the kernel; `args` passed `check`.
///
/// # Errors
/// [`KernelError::Size`] for heads that the device code does not serve, [`KernelError::WrongDevice`],
/// [`KernelError::Device`].
pub(super) fn run(device: &CudaDevice, args: &TreeAttentionArgs<'_>) -> Result<(), KernelError> {
    let (name, paths) = (TreeAttention::NAME, args.paths);
    let (q_heads, kv_heads, head_dim) = (args.q_heads, args.kv_heads, args.head_dim);
    check_size(name, "head_dim", head_dim, head_dim.next_multiple_of(4))?;
    if paths.num_rows() == 0 {
        return Ok(());
    }
    let group = q_heads / kv_heads;
    let num_queries = paths.longest_segment() * group;
    let config = Config::choose(head_dim, num_queries, device.limits().block_shared_bytes)?;
    check_size(
        name,
        "q_heads",
        q_heads,
        q_heads.min(config.num_queries() * kv_heads),
    )?;
    let tile_rows = (config.num_queries().min(num_queries) / group).max(1);
    let num_splits = paths.num_splits();

    let launcher = Launcher::of::<TreeAttention>(device);
    let row_partials = (GATHERED_BLOCKS + num_splits) * q_heads;
    let row_bytes = row_partials * (head_dim + 2) * size_of::<f32>();
    let launch_rows = launch_rows(row_bytes, paths.num_rows());
    let partials = launcher.scratch(launch_rows * row_bytes)?;
    let softmaxes = partials + (launch_rows * row_partials * head_dim * size_of::<f32>()) as u64;
    let mut params = TreeAttentionParams {
        paths: paths.span_on_cuda(name, args.span)?,
        q: launcher.buffer("q", args.q)?,
        k_tail: launcher.buffer("k_tail", args.k_tail)?,
        v_tail: launcher.buffer("v_tail", args.v_tail)?,
        k_pages: launcher.buffer("k_pages", args.k_pages)?,
        v_pages: launcher.buffer("v_pages", args.v_pages)?,
        out: launcher.buffer("out", args.out)?,
        partials,
        softmaxes,
        first_row: 0,
        num_rows: 0,
        q_heads: q_heads as u32,
        kv_heads: kv_heads as u32,
        head_dim: head_dim as u32,
        window: args
            .window
            .map_or(0, |window| u32::try_from(window).unwrap_or(0)),
        scale: args.scale * std::f32::consts::LOG2_E,
        tile_rows: tile_rows as u32,
        num_splits: num_splits as u32,
    };
    let entry = format!("{name}_{}_{}", config.head_dim, config.tiles);
    for first_row in (0..paths.num_rows()).step_by(launch_rows) {
        let num_rows = launch_rows.min(paths.num_rows() - first_row);
        params.first_row = first_row as u32;
        params.num_rows = num_rows as u32;
        let num_items = num_rows * kv_heads + num_rows.div_ceil(tile_rows) * kv_heads * num_splits;
        let items = Shape {
            shared_bytes: config.shared_bytes as u32,
            ..Shape::of_blocks(num_items, BLOCK_THREADS)
        };
        let merges = Shape::of_blocks(num_rows * q_heads, head_dim.div_ceil(128) * 32);
        // SAFETY: `params` mirrors the kernel's; `check` saw that all buffers are as long as the shape asks and all pages
        // are there; the scratch holds the partials of `launch_rows` rows.
        unsafe {
            launcher.run(&entry, items, &params)?;
            launcher.run("tree_attention_merge", merges, &params)?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Shared memory of an H200, an A100 and a workstation card.
    const BLOCK_SHARED_BYTES: [usize; 3] = [232_448, 166_912, 101_376];

    #[test]
    fn configurations_fit_and_heads_of_256_run_everywhere() {
        for limit in BLOCK_SHARED_BYTES {
            for head_dim in [16, 64, 72, 128, 256] {
                for num_queries in [1, 6, 16, 17, 64, 300] {
                    let config = Config::choose(head_dim, num_queries, limit).unwrap();
                    assert!(config.shared_bytes <= limit && config.head_dim >= head_dim);
                }
            }
        }
        assert!(
            Config::choose(512, 17, BLOCK_SHARED_BYTES[0])
                .unwrap()
                .tiles
                == 2
        );
        assert!(matches!(
            Config::choose(513, 1, BLOCK_SHARED_BYTES[0]),
            Err(KernelError::Size {
                expected: 512,
                got: 513,
                ..
            })
        ));
    }
}
