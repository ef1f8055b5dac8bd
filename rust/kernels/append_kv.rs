//! Copies rows' keys and values from a pass's tail into the pages of their requests, in any number of layers of one span.
//!
//! A row goes to its page, lane `position % 64`. Keys were rotated for their true position when they were projected, so
//! this is a plain copy and changes no bit.

use super::kv_span::KvSpan;
use super::launcher::Launcher;
use super::placed_rows::PlacedRows;
use super::tree_attention::KV_BLOCK;
use super::{Kernel, check_len, check_size};
use crate::device::cuda::{CudaDevice, Shape};
use crate::device::{Buffer, HostDevice};
use crate::error::KernelError;

/// Keys and values of one layer.
pub struct KvLayer<'a> {
    /// Keys of the pass, `[rows, kv_heads, head_dim]`.
    pub k_tail: &'a Buffer<f32>,
    /// Values of the pass, `[rows, kv_heads, head_dim]`.
    pub v_tail: &'a Buffer<f32>,
    /// Key/value heads.
    pub kv_heads: usize,
    /// Length of a head's key and value.
    pub head_dim: usize,
    /// Key pages `[page][kv_head][64][head_dim]`.
    pub k_pages: &'a mut Buffer<f32>,
    /// Value pages, laid out like the keys.
    pub v_pages: &'a mut Buffer<f32>,
}

/// Arguments of [`AppendKv`].
pub struct AppendKvArgs<'a> {
    /// The rows, with their pages.
    pub rows: &'a PlacedRows,
    /// Which of their pages.
    pub span: KvSpan,
    /// Where they are and go.
    pub layers: Vec<KvLayer<'a>>,
}

/// The kernel; see the module's head for its contract.
pub struct AppendKv;

impl Kernel for AppendKv {
    const NAME: &'static str = "append_kv";
    type Args<'a> = AppendKvArgs<'a>;

    fn check(args: &AppendKvArgs<'_>) -> Result<(), KernelError> {
        let num_rows = args.rows.iter_in(args.span).count();
        check_len(Self::NAME, "rows", num_rows, args.rows.len())?;
        for layer in &args.layers {
            let KvLayer {
                kv_heads, head_dim, ..
            } = *layer;
            check_size(Self::NAME, "kv_heads", kv_heads, kv_heads.max(1))?;
            check_size(Self::NAME, "head_dim", head_dim, head_dim.max(1))?;
            let row_len = kv_heads * head_dim;
            let tail_len = args.rows.tail_len(row_len);
            check_len(Self::NAME, "k_tail", layer.k_tail.len(), tail_len)?;
            check_len(Self::NAME, "v_tail", layer.v_tail.len(), tail_len)?;
            let pool_len = layer.k_pages.len().min(layer.v_pages.len());
            let num_pages = pool_len / (row_len * KV_BLOCK);
            for placed in args.rows.iter_in(args.span) {
                if placed.page as usize >= num_pages {
                    return Err(KernelError::OutOfRange {
                        kernel: Self::NAME,
                        argument: "pages",
                        bound: num_pages,
                        got: placed.page as usize,
                    });
                }
            }
        }
        Ok(())
    }

    fn host(_device: &HostDevice, args: AppendKvArgs<'_>) {
        for layer in args.layers {
            let (kv_heads, head_dim) = (layer.kv_heads, layer.head_dim);
            for (tail, pages) in [
                (layer.k_tail.host(), layer.k_pages.host_mut()),
                (layer.v_tail.host(), layer.v_pages.host_mut()),
            ] {
                for placed in args.rows.iter_in(args.span) {
                    let row_len = kv_heads * head_dim;
                    let row = &tail[placed.row as usize * row_len..][..row_len];
                    for (head, values) in row.chunks_exact(head_dim).enumerate() {
                        let (page, position) = (placed.page as usize, placed.position as usize);
                        let lane = (page * kv_heads + head) * KV_BLOCK + position % KV_BLOCK;
                        pages[lane * head_dim..][..head_dim].copy_from_slice(values);
                    }
                }
            }
        }
    }

    fn cuda(device: &CudaDevice, args: AppendKvArgs<'_>) -> Result<(), KernelError> {
        let launcher = Launcher::of::<Self>(device);
        let rows = args.rows.on_cuda(Self::NAME, args.span)?;
        for layers in args.layers.chunks(MAX_LAYERS) {
            let mut params = AppendKvParams {
                rows,
                num_rows: args.rows.len() as u32,
                num_layers: layers.len() as u32,
                layers: [KvLayerParams::default(); MAX_LAYERS],
            };
            for (layer, params) in layers.iter().zip(&mut params.layers) {
                *params = KvLayerParams {
                    k_tail: launcher.buffer("k_tail", layer.k_tail)?,
                    v_tail: launcher.buffer("v_tail", layer.v_tail)?,
                    k_pages: launcher.buffer("k_pages", layer.k_pages)?,
                    v_pages: launcher.buffer("v_pages", layer.v_pages)?,
                    kv_heads: layer.kv_heads as u32,
                    head_dim: layer.head_dim as u32,
                };
            }
            let num_blocks = args.rows.len() * layers.len();
            if num_blocks == 0 {
                continue;
            }
            let shape = Shape::of_blocks(num_blocks, BLOCK_THREADS);
            // SAFETY: `params` mirrors the kernel's; `check` saw that tails hold the rows and pools the pages.
            unsafe { launcher.run(Self::NAME, shape, &params)? };
        }
        Ok(())
    }
}

/// Layers of one launch.
const MAX_LAYERS: usize = 64;
const BLOCK_THREADS: usize = 256;

/// `KvLayer` of `append_kv.cu`.
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct KvLayerParams {
    k_tail: u64,
    v_tail: u64,
    k_pages: u64,
    v_pages: u64,
    kv_heads: u32,
    head_dim: u32,
}

/// `AppendKvParams` of `append_kv.cu`.
#[repr(C)]
#[derive(Clone, Copy)]
struct AppendKvParams {
    rows: u64,
    num_rows: u32,
    num_layers: u32,
    layers: [KvLayerParams; MAX_LAYERS],
}
