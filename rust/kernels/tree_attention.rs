//! Softmax attention of every row over its committed keys (paged) and the uncommitted rows of its path.

use super::paths::RowPaths;
use super::{Kernel, check_len, check_size};
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
    /// Pages of each segment of `paths`, one per 64 committed positions.
    pub page_tables: &'a [&'a [u32]],
    /// The rows of the pass.
    pub paths: &'a RowPaths,
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
        check_size(Self::NAME, "head_dim", args.head_dim, args.head_dim.max(1))?;
        check_len(Self::NAME, "q", args.q.len(), args.paths.num_rows())
    }

    fn host(_device: &HostDevice, _args: TreeAttentionArgs<'_>) {
        unimplemented!("lands with the next commit")
    }
}
