//! Softmax attention of every row over its committed keys (paged) and the uncommitted rows of its path.
//!
//! A row at position t sees positions `first..=t`, where `first` is 0 or the window's edge. They are cut at absolute
//! multiples: blocks of [`KV_BLOCK`], splits of [`KV_SPLIT`]. The key of position p sits in lane `p % KV_BLOCK`
//! whether it comes from a page or from the tail; lanes out of sight score minus infinity, and what no row of a request
//! sees is not read: such lanes of a ring may hold newer positions. In a block: scores by the canonical `dot`, one maximum, exponentials, their lane-ordered sum, values added
//! in position order. Inside a split blocks follow each other by the online softmax; splits are merged in order.
//! All of it is a function of t and of the row's own keys, so a token path gives the same bits as a chain, as a branch
//! of a tree and as one row after commits. On CUDA q, k and v are rounded to BF16, as the matmuls round their rows, and
//! a split merges blocks that were each computed alone; the order of all that is as fixed.

mod launch;

pub use launch::scratch_bytes;

use std::ops::Range;

use super::kv_span::KvSpan;
use super::paths::RowPaths;
use super::simd::{self, LANES, Lanes, Task};
use super::{Kernel, check_len, check_size, for_each_task};
use crate::device::cuda::CudaDevice;
use crate::device::{Buffer, HostDevice};
use crate::error::KernelError;

/// Absolute positions per block, and per page: the key of position p sits in lane `p % KV_BLOCK`.
pub const KV_BLOCK: usize = 64;

/// Absolute positions per split.
pub const KV_SPLIT: usize = 256;

/// Arguments of [`TreeAttention`].
pub struct TreeAttentionArgs<'a> {
    /// Queries `[rows, q_heads, head_dim]`.
    pub q: &'a Buffer<f32>,
    /// Keys of this pass's uncommitted rows, `[rows, kv_heads, head_dim]`.
    pub k_tail: &'a Buffer<f32>,
    /// Values of this pass's uncommitted rows, `[rows, kv_heads, head_dim]`.
    pub v_tail: &'a Buffer<f32>,
    /// Committed keys `[page][kv_head][64][head_dim]`.
    pub k_pages: &'a Buffer<f32>,
    /// Committed values, laid out like the keys.
    pub v_pages: &'a Buffer<f32>,
    /// The rows of the pass, with the pages of what is committed before them.
    pub paths: &'a RowPaths,
    /// Which of these pages.
    pub span: KvSpan,
    /// Query heads; query head h reads kv head `h / (q_heads / kv_heads)`.
    pub q_heads: usize,
    /// Key/value heads.
    pub kv_heads: usize,
    /// Length of a head.
    pub head_dim: usize,
    /// Factor on every score.
    pub scale: f32,
    /// A row at position p sees positions `> p - window`; all when `None`.
    pub window: Option<usize>,
    /// Result `[rows, q_heads, head_dim]`.
    pub out: &'a mut Buffer<f32>,
}

/// The kernel; see the module's head for its contract.
pub struct TreeAttention;

impl Kernel for TreeAttention {
    const NAME: &'static str = "tree_attention";
    type Args<'a> = TreeAttentionArgs<'a>;

    fn check(args: &TreeAttentionArgs<'_>) -> Result<(), KernelError> {
        let name = Self::NAME;
        let segments = args.paths.segments();
        check_size(name, "head_dim", args.head_dim, args.head_dim.max(1))?;
        check_size(name, "kv_heads", args.kv_heads, args.kv_heads.max(1))?;
        let group = (args.q_heads / args.kv_heads).max(1);
        check_size(name, "q_heads", args.q_heads, group * args.kv_heads)?;
        let window = args.window.unwrap_or(1);
        check_size(name, "window", window, window.max(1))?;
        let num_rows = args.paths.num_rows();
        let q_len = num_rows * args.q_heads * args.head_dim;
        let kv_len = num_rows * args.kv_heads * args.head_dim;
        check_len(name, "q", args.q.len(), q_len)?;
        check_len(name, "k_tail", args.k_tail.len(), kv_len)?;
        check_len(name, "v_tail", args.v_tail.len(), kv_len)?;
        let page_len = args.kv_heads * KV_BLOCK * args.head_dim;
        let num_pages = args.k_pages.len().min(args.v_pages.len()) / page_len;
        for segment in segments {
            let table = args.paths.pages(segment, args.span);
            let needed = segment.committed_len.div_ceil(KV_BLOCK);
            check_len(name, "pages", table.len(), needed)?;
            if let Some(&page) = table[..needed].iter().find(|&&p| p as usize >= num_pages) {
                return Err(KernelError::OutOfRange {
                    kernel: name,
                    argument: "pages",
                    bound: num_pages,
                    got: page as usize,
                });
            }
        }
        check_len(name, "out", args.out.len(), q_len)
    }

    fn host(device: &HostDevice, args: TreeAttentionArgs<'_>) {
        let (kv_heads, head_dim) = (args.kv_heads, args.head_dim);
        let group_len = args.q_heads / kv_heads * head_dim;
        let mut segment_of_row = vec![0; args.paths.num_rows()];
        for (i, segment) in args.paths.segments().iter().enumerate() {
            segment_of_row[segment.rows.clone()].fill(i);
        }
        let mut num_keys = 0;
        let tasks: Vec<_> = args.out.host_mut()[..segment_of_row.len() * kv_heads * group_len]
            .chunks_exact_mut(group_len)
            .enumerate()
            .map(|(i, out)| {
                let (row, head) = (i / kv_heads, i % kv_heads);
                let end = args.paths.position(row) + 1;
                let first = args.window.map_or(0, |window| end.saturating_sub(window));
                num_keys += end - first;
                let segment = &args.paths.segments()[segment_of_row[row]];
                RowHead {
                    q: &args.q.host()[i * group_len..][..group_len],
                    keys: Positions {
                        pages: args.k_pages.host(),
                        tail: args.k_tail.host(),
                        page_table: args.paths.pages(segment, args.span),
                        committed_len: segment.committed_len,
                        path: args.paths.path(row),
                        kv_heads,
                        head,
                        head_dim,
                    },
                    v_pages: args.v_pages.host(),
                    v_tail: args.v_tail.host(),
                    visible: first..end,
                    scale: args.scale,
                    out,
                }
            })
            .collect();
        for_each_task(device, 2 * num_keys * group_len, tasks, simd::dispatch);
    }

    fn cuda(device: &CudaDevice, args: TreeAttentionArgs<'_>) -> Result<(), KernelError> {
        launch::run(device, &args)
    }
}

/// Where the vectors of one kv head lie for the positions of one path.
#[derive(Clone, Copy)]
struct Positions<'a> {
    pages: &'a [f32],
    tail: &'a [f32],
    page_table: &'a [u32],
    committed_len: usize,
    path: &'a [u32],
    kv_heads: usize,
    head: usize,
    head_dim: usize,
}

impl<'a> Positions<'a> {
    #[inline(always)]
    fn at(&self, position: usize) -> &'a [f32] {
        if position < self.committed_len {
            let page = self.page_table[position / KV_BLOCK] as usize;
            let lane = (page * self.kv_heads + self.head) * KV_BLOCK + position % KV_BLOCK;
            &self.pages[lane * self.head_dim..][..self.head_dim]
        } else {
            let row = self.path[position - self.committed_len] as usize;
            &self.tail[(row * self.kv_heads + self.head) * self.head_dim..][..self.head_dim]
        }
    }
}

/// One row and the query heads that share one kv head.
struct RowHead<'a> {
    q: &'a [f32],
    keys: Positions<'a>,
    v_pages: &'a [f32],
    v_tail: &'a [f32],
    visible: Range<usize>,
    scale: f32,
    out: &'a mut [f32],
}

/// Running maximum and sum of exponentials relative to it.
#[derive(Clone, Copy)]
struct Softmax {
    max: f32,
    sum: f32,
}

impl Softmax {
    const EMPTY: Self = Self {
        max: f32::NEG_INFINITY,
        sum: 0.0,
    };
}

impl Task for RowHead<'_> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(self) {
        let head_dim = self.keys.head_dim;
        let values = Positions {
            pages: self.v_pages,
            tail: self.v_tail,
            ..self.keys
        };
        let num_heads = self.q.len() / head_dim;
        let mut totals = vec![Softmax::EMPTY; num_heads];
        let mut splits = vec![Softmax::EMPTY; num_heads];
        let mut split_out = vec![0.0; self.q.len()];
        self.out.fill(0.0);
        for split in self.visible.start / KV_SPLIT..self.visible.end.div_ceil(KV_SPLIT) {
            let in_split = overlap(&self.visible, split * KV_SPLIT, KV_SPLIT);
            splits.fill(Softmax::EMPTY);
            split_out.fill(0.0);
            for block in in_split.start / KV_BLOCK..in_split.end.div_ceil(KV_BLOCK) {
                let start = block * KV_BLOCK;
                let in_block = overlap(&in_split, start, KV_BLOCK);
                let lanes = in_block.start - start..in_block.end - start;
                let mut k: [&[f32]; KV_BLOCK] = [&[]; KV_BLOCK];
                let mut v: [&[f32]; KV_BLOCK] = [&[]; KV_BLOCK];
                for lane in lanes.clone() {
                    k[lane] = self.keys.at(start + lane);
                    v[lane] = values.at(start + lane);
                }
                for ((q, softmax), out) in self
                    .q
                    .chunks_exact(head_dim)
                    .zip(&mut splits)
                    .zip(split_out.chunks_exact_mut(head_dim))
                {
                    let mut weights = [f32::NEG_INFINITY; KV_BLOCK];
                    let seen = &mut weights[lanes.clone()];
                    score::<L>(self.scale, q, &k[lanes.clone()], seen);
                    let decay = weigh::<L>(&mut weights, softmax);
                    add_values::<L>(decay, &weights[lanes.clone()], &v[lanes.clone()], out);
                }
            }
            for (((total, split), part), out) in totals
                .iter_mut()
                .zip(&splits)
                .zip(split_out.chunks_exact(head_dim))
                .zip(self.out.chunks_exact_mut(head_dim))
            {
                let max = total.max.max(split.max);
                let old = exp::<L>(total.max - max);
                let new = exp::<L>(split.max - max);
                total.sum = split.sum.mul_add(new, total.sum * old);
                total.max = max;
                let (old, new) = (L::splat(old), L::splat(new));
                simd::map2::<L>(part, out, |part, out| part.mul_add(new, out.mul(old)));
            }
        }
        for (total, out) in totals.iter().zip(self.out.chunks_exact_mut(head_dim)) {
            let sum = L::splat(total.sum);
            simd::map1::<L>(out, |out| out.div(sum));
        }
    }
}

/// The part of `range` inside `start..start + len`.
fn overlap(range: &Range<usize>, start: usize, len: usize) -> Range<usize> {
    range.start.max(start)..range.end.min(start + len)
}

#[inline(always)]
fn exp<L: Lanes>(x: f32) -> f32 {
    let mut lanes = [0.0; LANES];
    L::splat(x).exp().store(&mut lanes);
    lanes[0]
}

/// `scores[j] = scale * dot(q, k[j])`.
#[inline(always)]
fn score<L: Lanes>(scale: f32, q: &[f32], k: &[&[f32]], scores: &mut [f32]) {
    const N: usize = 4;
    let (mut keys, mut scores) = (k.chunks_exact(N), scores.chunks_exact_mut(N));
    for (k, scores) in (&mut keys).zip(&mut scores) {
        let products = simd::dots::<L, N>(q, [k[0], k[1], k[2], k[3]]);
        for (score, product) in scores.iter_mut().zip(products) {
            *score = scale * product;
        }
    }
    for (k, score) in keys.remainder().iter().zip(scores.into_remainder()) {
        *score = scale * simd::dot::<L>(q, k);
    }
}

/// Turns a block's scores into weights relative to the running maximum, which may rise; returns the factor that takes
/// what was summed before to the new maximum.
#[inline(always)]
fn weigh<L: Lanes>(scores: &mut [f32; KV_BLOCK], softmax: &mut Softmax) -> f32 {
    let mut lanes = [0.0; LANES];
    scores
        .chunks_exact(LANES)
        .fold(L::splat(softmax.max), |max, s| max.max(L::load(s)))
        .store(&mut lanes);
    let max = lanes.into_iter().fold(softmax.max, f32::max);
    let decay = exp::<L>(softmax.max - max);
    let mut sum = L::splat(0.0);
    for scores in scores.chunks_exact_mut(LANES) {
        let weights = L::load(scores).sub(L::splat(max)).exp();
        weights.store(scores);
        sum = sum.add(weights);
    }
    *softmax = Softmax {
        max,
        sum: softmax.sum.mul_add(decay, sum.sum()),
    };
    decay
}

/// `out = out * decay + sum_j weights[j] * v[j]`, positions in order.
#[inline(always)]
fn add_values<L: Lanes>(decay: f32, weights: &[f32], v: &[&[f32]], out: &mut [f32]) {
    const WIDE: usize = 4 * LANES;
    let mut wide = out.chunks_exact_mut(WIDE);
    for (i, out) in (&mut wide).enumerate() {
        let mut acc: [L; 4] =
            std::array::from_fn(|n| L::load(&out[n * LANES..]).mul(L::splat(decay)));
        for (&weight, v) in weights.iter().zip(v) {
            let v = &v[i * WIDE..][..WIDE];
            for (n, acc) in acc.iter_mut().enumerate() {
                *acc = L::splat(weight).mul_add(L::load(&v[n * LANES..]), *acc);
            }
        }
        for (n, acc) in acc.into_iter().enumerate() {
            acc.store(&mut out[n * LANES..]);
        }
    }
    let out = wide.into_remainder();
    if out.is_empty() {
        return;
    }
    let from = v[0].len() - out.len();
    simd::map1::<L>(out, |out| out.mul(L::splat(decay)));
    for (&weight, v) in weights.iter().zip(v) {
        simd::axpy::<L>(weight, &v[from..], out);
    }
}

#[cfg(test)]
mod tests;
