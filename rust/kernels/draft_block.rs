//! Attention of a drafter's block: every row over the request's paged context and over its own block.
//!
//! Rows are packed position-major, `row = i * num_blocks + b` for row i of block b, so that the rows which predict lie
//! together. Row i stands at position `context_len + i`. It sees the context keys of positions above its own minus the
//! window (all without one) and the keys of its block: all of them, or those up to itself when causal; the window never
//! hides a key of the block. Scores by the canonical `dot`, one maximum, exponentials and their lane-ordered sum over
//! the visible keys in position order, then values added in that order: a block's result depends on its own context and
//! rows only, never on the blocks beside it.

mod contexts;

use super::launcher::Launcher;
use super::paths::split_bucket;
use super::simd::{self, LANES, Lanes, Task};
use super::tree_attention::KV_BLOCK;
use super::{Kernel, check_len, check_size, for_each_task};
use crate::device::cuda::{CudaDevice, Shape};
use crate::device::{Buffer, HostDevice};
use crate::error::KernelError;

pub use contexts::{BlockContext, BlockContexts, ContextsKey};

/// Arguments of [`DraftBlock`].
pub struct DraftBlockArgs<'a> {
    /// Queries `[block_size, blocks, q_heads, head_dim]`.
    pub q: &'a Buffer<f32>,
    /// Keys of the blocks' rows, `[block_size, blocks, kv_heads, head_dim]`.
    pub k_block: &'a Buffer<f32>,
    /// Values of the blocks' rows, laid out like the keys.
    pub v_block: &'a Buffer<f32>,
    /// Context keys `[page][kv_head][64][head_dim]`.
    pub k_pages: &'a Buffer<f32>,
    /// Context values, laid out like the keys.
    pub v_pages: &'a Buffer<f32>,
    /// One per block.
    pub contexts: &'a BlockContexts,
    /// Rows of a block.
    pub block_size: usize,
    /// Query heads; query head h reads kv head `h / (q_heads / kv_heads)`.
    pub q_heads: usize,
    /// Key/value heads.
    pub kv_heads: usize,
    /// Length of a head.
    pub head_dim: usize,
    /// Factor on every score.
    pub scale: f32,
    /// A row at position p sees context positions `> p - window`; all when `None`.
    pub window: Option<usize>,
    /// Whether a row sees only the rows of its block up to itself.
    pub causal: bool,
    /// Result `[block_size, blocks, q_heads, head_dim]`.
    pub out: &'a mut Buffer<f32>,
}

/// The kernel; see the module's head for its contract.
pub struct DraftBlock;

impl Kernel for DraftBlock {
    const NAME: &'static str = "draft_block";
    type Args<'a> = DraftBlockArgs<'a>;

    fn check(args: &DraftBlockArgs<'_>) -> Result<(), KernelError> {
        let name = Self::NAME;
        for (argument, size) in [
            ("block_size", args.block_size),
            ("head_dim", args.head_dim),
            ("kv_heads", args.kv_heads),
            ("window", args.window.unwrap_or(1)),
        ] {
            check_size(name, argument, size, size.max(1))?;
        }
        let group = (args.q_heads / args.kv_heads).max(1);
        check_size(name, "q_heads", args.q_heads, group * args.kv_heads)?;
        let num_rows = args.block_size * args.contexts.len();
        let q_len = num_rows * args.q_heads * args.head_dim;
        let kv_len = num_rows * args.kv_heads * args.head_dim;
        check_len(name, "q", args.q.len(), q_len)?;
        check_len(name, "k_block", args.k_block.len(), kv_len)?;
        check_len(name, "v_block", args.v_block.len(), kv_len)?;
        check_len(name, "out", args.out.len(), q_len)?;
        let page_len = args.kv_heads * KV_BLOCK * args.head_dim;
        let num_pages = args.k_pages.len().min(args.v_pages.len()) / page_len;
        for context in args.contexts.iter() {
            let needed = context.context_len.div_ceil(KV_BLOCK);
            check_len(name, "page_table", context.page_table.len(), needed)?;
            if let Some(&page) = context.page_table[..needed]
                .iter()
                .find(|&&page| page as usize >= num_pages)
            {
                return Err(KernelError::OutOfRange {
                    kernel: name,
                    argument: "page_table",
                    bound: num_pages,
                    got: page as usize,
                });
            }
        }
        Ok(())
    }

    fn host(device: &HostDevice, args: DraftBlockArgs<'_>) {
        let num_blocks = args.contexts.len();
        let num_rows = args.block_size * num_blocks;
        let (kv_heads, head_dim) = (args.kv_heads, args.head_dim);
        let group_len = args.q_heads / kv_heads * head_dim;
        let mut num_keys = 0;
        let tasks: Vec<_> = args.out.host_mut()[..num_rows * kv_heads * group_len]
            .chunks_exact_mut(group_len)
            .enumerate()
            .map(|(i, out)| {
                let (row, head) = (i / kv_heads, i % kv_heads);
                let (in_block, block) = (row / num_blocks, row % num_blocks);
                let context = args.contexts.of_block(block);
                let first = args.window.map_or(0, |window| {
                    (context.context_len + in_block + 1).saturating_sub(window)
                });
                let keys = VisibleKeys {
                    context,
                    first: first.min(context.context_len),
                    num_block_rows: match args.causal {
                        true => in_block + 1,
                        false => args.block_size,
                    },
                    block,
                    num_blocks,
                    kv_heads,
                    head,
                    head_dim,
                };
                num_keys += keys.len();
                RowHead {
                    q: &args.q.host()[i * group_len..][..group_len],
                    keys,
                    k: [args.k_pages.host(), args.k_block.host()],
                    v: [args.v_pages.host(), args.v_block.host()],
                    scale: args.scale,
                    out,
                }
            })
            .collect();
        for_each_task(device, 2 * num_keys * group_len, tasks, simd::dispatch);
    }

    fn cuda(device: &CudaDevice, args: DraftBlockArgs<'_>) -> Result<(), KernelError> {
        let launcher = Launcher::of::<Self>(device);
        let (num_blocks, head_dim) = (args.contexts.len(), args.head_dim);
        if num_blocks == 0 {
            return Ok(());
        }
        let (entry, warp_queries) = match head_dim {
            0..=128 => ("draft_block_part_128", 8),
            129..=256 => ("draft_block_part_256", 2),
            got => {
                return Err(KernelError::OutOfRange {
                    kernel: Self::NAME,
                    argument: "head_dim",
                    bound: 257,
                    got,
                });
            }
        };
        let num_queries = args.block_size * args.q_heads / args.kv_heads;
        let num_parts = most_parts(args.contexts, args.block_size, args.window);
        let num_vectors = num_parts * num_blocks * args.kv_heads * num_queries;
        // A pair of floats wants 8 bytes.
        let weights_at = (num_vectors * head_dim * size_of::<f32>()).next_multiple_of(8);
        let scratch = launcher.scratch(weights_at + num_vectors * 2 * size_of::<f32>())?;
        let params = DraftBlockParams {
            q: launcher.buffer("q", args.q)?,
            k_block: launcher.buffer("k_block", args.k_block)?,
            v_block: launcher.buffer("v_block", args.v_block)?,
            k_pages: launcher.buffer("k_pages", args.k_pages)?,
            v_pages: launcher.buffer("v_pages", args.v_pages)?,
            contexts: launcher.list("contexts", args.contexts.places())?,
            pages: launcher.list("contexts", args.contexts.pages())?,
            values: scratch,
            weights: scratch + weights_at as u64,
            out: launcher.buffer("out", args.out)?,
            block_size: args.block_size as u32,
            num_blocks: num_blocks as u32,
            q_heads: args.q_heads as u32,
            kv_heads: args.kv_heads as u32,
            head_dim: head_dim as u32,
            max_context_parts: MAX_CONTEXT_PARTS as u32,
            num_parts: num_parts as u32,
            window: args.window.unwrap_or(0) as u32,
            is_causal: u32::from(args.causal),
            scale: args.scale,
        };
        let tile_queries = BLOCK_WARPS * warp_queries;
        let row_len = head_dim.next_multiple_of(4) + 4;
        let shared_len = (tile_queries + KV_BLOCK) * row_len + tile_queries * KV_BLOCK;
        let num_tiles = num_queries.div_ceil(tile_queries);
        let parts = Shape {
            shared_bytes: (shared_len * size_of::<f32>()) as u32,
            ..Shape::of_blocks(
                num_parts * num_blocks * args.kv_heads * num_tiles,
                BLOCK_WARPS * 32,
            )
        };
        let num_outputs = num_blocks * args.kv_heads * num_queries;
        let join = Shape::of_blocks(num_outputs.div_ceil(BLOCK_WARPS), BLOCK_WARPS * 32);
        // SAFETY: `params` mirrors the kernels'; `check` saw that all buffers are as long as the shape asks and every page is
        // there, and the scratch holds the parts.
        unsafe {
            launcher.run(entry, parts, &params)?;
            launcher.run("draft_block_join", join, &params)
        }
    }
}

/// Most parts that the context of one block is cut into: enough thread blocks for one request, and few parts to join.
const MAX_CONTEXT_PARTS: usize = 16;
const BLOCK_WARPS: usize = 8;

/// Parts of the keys of one block, as `Sight` of `draft_block.cu` counts them.
fn num_parts(context: BlockContext<'_>, block_size: usize, window: Option<usize>) -> usize {
    let window_start = |window| (context.context_len + 1).saturating_sub(window);
    let first = window.map_or(0, window_start).min(context.context_len);
    let num_pages = context.context_len.div_ceil(KV_BLOCK) - first / KV_BLOCK;
    let part_pages = num_pages.div_ceil(MAX_CONTEXT_PARTS).max(1);
    num_pages.div_ceil(part_pages) + block_size.div_ceil(KV_BLOCK)
}

/// At least the parts of the keys of any block: few numbers, as launches follow from it.
fn most_parts(contexts: &BlockContexts, block_size: usize, window: Option<usize>) -> usize {
    let of_block = block_size.div_ceil(KV_BLOCK);
    let parts = contexts
        .iter()
        .map(|context| num_parts(context, block_size, window) - of_block)
        .map(split_bucket);
    parts.max().map_or(0, |of_context| of_context + of_block)
}

/// Bytes of scratch that `num_blocks` blocks take at most, whatever their contexts.
pub fn scratch_bytes(
    num_blocks: usize,
    block_size: usize,
    q_heads: usize,
    head_dim: usize,
) -> usize {
    let num_parts = MAX_CONTEXT_PARTS + block_size.div_ceil(KV_BLOCK);
    let num_vectors = num_parts * num_blocks * block_size * q_heads;
    num_vectors * (head_dim + 2) * size_of::<f32>() + size_of::<u64>()
}

/// `DraftBlockParams` of `draft_block.cu`.
#[repr(C)]
#[derive(Clone, Copy)]
struct DraftBlockParams {
    q: u64,
    k_block: u64,
    v_block: u64,
    k_pages: u64,
    v_pages: u64,
    contexts: u64,
    pages: u64,
    values: u64,
    weights: u64,
    out: u64,
    block_size: u32,
    num_blocks: u32,
    q_heads: u32,
    kv_heads: u32,
    head_dim: u32,
    max_context_parts: u32,
    num_parts: u32,
    window: u32,
    is_causal: u32,
    scale: f32,
}

/// Where the keys (or values) of one kv head lie that one row sees, in position order.
#[derive(Clone, Copy)]
struct VisibleKeys<'a> {
    context: BlockContext<'a>,
    /// First context position in sight.
    first: usize,
    num_block_rows: usize,
    block: usize,
    num_blocks: usize,
    kv_heads: usize,
    head: usize,
    head_dim: usize,
}

impl VisibleKeys<'_> {
    fn len(&self) -> usize {
        self.context.context_len - self.first + self.num_block_rows
    }

    /// The vectors in sight, from `[pages, block rows]`.
    #[inline(always)]
    fn vectors(self, [pages, block]: [&[f32]; 2]) -> impl Iterator<Item = &[f32]> {
        let from_context = (self.first..self.context.context_len).map(move |position| {
            let page = self.context.page_table[position / KV_BLOCK] as usize;
            let lane = (page * self.kv_heads + self.head) * KV_BLOCK + position % KV_BLOCK;
            &pages[lane * self.head_dim..][..self.head_dim]
        });
        let from_block = (0..self.num_block_rows).map(move |in_block| {
            let row = in_block * self.num_blocks + self.block;
            &block[(row * self.kv_heads + self.head) * self.head_dim..][..self.head_dim]
        });
        from_context.chain(from_block)
    }
}

/// One row and the query heads that share one kv head.
struct RowHead<'a> {
    q: &'a [f32],
    keys: VisibleKeys<'a>,
    k: [&'a [f32]; 2],
    v: [&'a [f32]; 2],
    scale: f32,
    out: &'a mut [f32],
}

impl Task for RowHead<'_> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(self) {
        let head_dim = self.keys.head_dim;
        // Looked up once for all heads of the group.
        let k: Vec<&[f32]> = self.keys.vectors(self.k).collect();
        let v: Vec<&[f32]> = self.keys.vectors(self.v).collect();
        let mut weights = vec![0.0; k.len()];
        for (q, out) in self
            .q
            .chunks_exact(head_dim)
            .zip(self.out.chunks_exact_mut(head_dim))
        {
            for (weight, k) in weights.iter_mut().zip(&k) {
                *weight = self.scale * simd::dot::<L>(q, k);
            }
            let sum = exponentiate::<L>(&mut weights);
            average::<L>(&weights, &v, sum, out);
        }
    }
}

/// Turns scores into exponentials relative to their maximum and returns their sum.
#[inline(always)]
fn exponentiate<L: Lanes>(scores: &mut [f32]) -> f32 {
    let max = scores.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let max = L::splat(max);
    let mut sum = L::splat(0.0);
    let mut parts = scores.chunks_exact_mut(LANES);
    for part in &mut parts {
        let weights = L::load(part).sub(max).exp();
        weights.store(part);
        sum = sum.add(weights);
    }
    let rest = parts.into_remainder();
    if !rest.is_empty() {
        L::load_partial(rest).sub(max).exp().store_partial(rest);
        sum = sum.add(L::load_partial(rest));
    }
    sum.sum()
}

/// `out = sum_j weights[j] * v[j] / sum`, keys in order; four vectors of channels at a time stay in registers.
#[inline(always)]
fn average<L: Lanes>(weights: &[f32], v: &[&[f32]], sum: f32, out: &mut [f32]) {
    const WIDE: usize = 4 * LANES;
    let sum = L::splat(sum);
    let mut wide = out.chunks_exact_mut(WIDE);
    for (i, out) in (&mut wide).enumerate() {
        let mut acc = [L::splat(0.0); 4];
        for (&weight, v) in weights.iter().zip(v) {
            let v = &v[i * WIDE..][..WIDE];
            for (n, acc) in acc.iter_mut().enumerate() {
                *acc = L::splat(weight).mul_add(L::load(&v[n * LANES..]), *acc);
            }
        }
        for (n, acc) in acc.into_iter().enumerate() {
            acc.div(sum).store(&mut out[n * LANES..]);
        }
    }
    let out = wide.into_remainder();
    let from = v[0].len() - out.len();
    out.fill(0.0);
    for (&weight, v) in weights.iter().zip(v) {
        simd::axpy::<L>(weight, &v[from..], out);
    }
    simd::map1::<L>(out, |out| out.div(sum));
}
