//! Copies accepted rows' keys and values from the pass's tail into the pages of their request.
//!
//! Row `rows[i]` of the tail goes to position `first_position + i`: page `page_table[p / 64]`, lane `p % 64`. Keys
//! were rotated for their true position when they were projected, so this is a plain copy and changes no bit.

use super::tree_attention::KV_BLOCK;
use super::{Kernel, check_len, check_size};
use crate::device::{Buffer, HostDevice};
use crate::error::KernelError;

/// Arguments of [`AppendKv`].
pub struct AppendKvArgs<'a> {
    /// Keys of the pass, `[rows, kv_heads, head_dim]`.
    pub k_tail: &'a Buffer<f32>,
    /// Values of the pass, `[rows, kv_heads, head_dim]`.
    pub v_tail: &'a Buffer<f32>,
    /// Accepted rows in position order.
    pub rows: &'a [u32],
    /// Position of the first of them.
    pub first_position: usize,
    /// Pages of the request, one per 64 positions.
    pub page_table: &'a [u32],
    /// Key/value heads.
    pub kv_heads: usize,
    /// Length of a head's key and value.
    pub head_dim: usize,
    /// Key pages `[page][kv_head][64][head_dim]`.
    pub k_pages: &'a mut Buffer<f32>,
    /// Value pages, laid out like the keys.
    pub v_pages: &'a mut Buffer<f32>,
}

/// The kernel; see the module's head for its contract.
pub struct AppendKv;

impl Kernel for AppendKv {
    const NAME: &'static str = "append_kv";
    type Args<'a> = AppendKvArgs<'a>;

    fn check(args: &AppendKvArgs<'_>) -> Result<(), KernelError> {
        check_size(Self::NAME, "kv_heads", args.kv_heads, args.kv_heads.max(1))?;
        check_size(Self::NAME, "head_dim", args.head_dim, args.head_dim.max(1))?;
        let row_len = args.kv_heads * args.head_dim;
        let num_rows = args.rows.iter().max().map_or(0, |&row| row as usize + 1);
        check_len(Self::NAME, "k_tail", args.k_tail.len(), num_rows * row_len)?;
        check_len(Self::NAME, "v_tail", args.v_tail.len(), num_rows * row_len)?;
        let end = args.first_position + args.rows.len();
        check_len(
            Self::NAME,
            "page_table",
            args.page_table.len(),
            end.div_ceil(KV_BLOCK),
        )?;
        if args.rows.is_empty() {
            return Ok(());
        }
        let num_pages = args.page_table[args.first_position / KV_BLOCK..end.div_ceil(KV_BLOCK)]
            .iter()
            .max()
            .map_or(0, |&page| page as usize + 1);
        let pool_len = num_pages * row_len * KV_BLOCK;
        check_len(Self::NAME, "k_pages", args.k_pages.len(), pool_len)?;
        check_len(Self::NAME, "v_pages", args.v_pages.len(), pool_len)
    }

    fn host(_device: &HostDevice, args: AppendKvArgs<'_>) {
        let (kv_heads, head_dim) = (args.kv_heads, args.head_dim);
        for (tail, pages) in [
            (args.k_tail.host(), args.k_pages.host_mut()),
            (args.v_tail.host(), args.v_pages.host_mut()),
        ] {
            for (position, &row) in (args.first_position..).zip(args.rows) {
                let page = args.page_table[position / KV_BLOCK] as usize;
                let row = &tail[row as usize * kv_heads * head_dim..][..kv_heads * head_dim];
                for (head, values) in row.chunks_exact(head_dim).enumerate() {
                    let lane = (page * kv_heads + head) * KV_BLOCK + position % KV_BLOCK;
                    pages[lane * head_dim..][..head_dim].copy_from_slice(values);
                }
            }
        }
    }
}
