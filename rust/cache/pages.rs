//! The paged key/value cache of all full-attention layers, and its free list.
//!
//! A page holds 64 positions of one request in every layer, `[page][kv_head][64][head_dim]` per layer for keys and for
//! values. Pages are handed out whole; a pool is reserved but not touched before tokens are written.

use crate::device::{Buffer, Device};
use crate::error::{DeviceError, KernelError};
use crate::kernels::Kernel;
use crate::kernels::append_kv::{AppendKv, AppendKvArgs, KvLayer};
use crate::kernels::placed_rows::PlacedRows;
use crate::kernels::tree_attention::KV_BLOCK;

/// Key/value heads of one layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KvShape {
    /// Key/value heads.
    pub num_kv_heads: usize,
    /// Length of a head's key and value.
    pub head_dim: usize,
}

impl KvShape {
    /// Elements of one page of keys (or of values).
    pub fn page_len(&self) -> usize {
        self.num_kv_heads * KV_BLOCK * self.head_dim
    }
}

/// Pages of every attention layer.
#[derive(Debug)]
pub struct KvCache {
    layers: Vec<LayerPages>,
    /// Free pages; the last one is handed out next.
    free: Vec<u32>,
    is_free: Vec<bool>,
    page_bytes: usize,
}

/// Keys and values that a pass left behind in one layer.
pub struct KvTail<'a> {
    /// The layer, counting attention layers only.
    pub layer: usize,
    /// Keys `[rows, kv_heads, head_dim]`.
    pub k: &'a Buffer<f32>,
    /// Values, laid out like the keys.
    pub v: &'a Buffer<f32>,
}

#[derive(Debug)]
struct LayerPages {
    shape: KvShape,
    k: Buffer<f32>,
    v: Buffer<f32>,
}

impl KvCache {
    /// A pool of `num_pages` pages for the given layers. On the host memory is reserved, not touched.
    ///
    /// # Errors
    /// [`DeviceError::OutOfMemory`].
    pub fn new(device: &Device, layers: &[KvShape], num_pages: usize) -> Result<Self, DeviceError> {
        let pages = |shape: &KvShape| {
            Ok(LayerPages {
                shape: *shape,
                k: device.try_alloc(num_pages * shape.page_len())?,
                v: device.try_alloc(num_pages * shape.page_len())?,
            })
        };
        Ok(Self {
            layers: layers.iter().map(pages).collect::<Result<_, _>>()?,
            free: (0..num_pages as u32).rev().collect(),
            is_free: vec![true; num_pages],
            page_bytes: Self::page_bytes_of(layers, size_of::<f32>()),
        })
    }

    /// Bytes that one page takes in all `layers` with elements of `element_bytes`, for sizing a pool before it exists.
    pub fn page_bytes_of(layers: &[KvShape], element_bytes: usize) -> usize {
        layers
            .iter()
            .map(|shape| 2 * shape.page_len() * element_bytes)
            .sum()
    }

    /// Key pages of attention layer `layer` (counting attention layers only).
    pub fn k(&self, layer: usize) -> &Buffer<f32> {
        &self.layers[layer].k
    }

    /// Value pages of attention layer `layer`.
    pub fn v(&self, layer: usize) -> &Buffer<f32> {
        &self.layers[layer].v
    }

    /// Key and value pages of attention layer `layer` for writing.
    pub fn k_v_mut(&mut self, layer: usize) -> (&mut Buffer<f32>, &mut Buffer<f32>) {
        let pages = &mut self.layers[layer];
        (&mut pages.k, &mut pages.v)
    }

    /// Copies `rows` of the tails of some layers, in ascending order, to their pages.
    ///
    /// # Errors
    /// [`KernelError`] when a row lies outside its tail or has no page.
    pub fn append(
        &mut self,
        device: &Device,
        rows: &PlacedRows,
        tails: &[KvTail<'_>],
    ) -> Result<(), KernelError> {
        let mut tails = tails.iter().peekable();
        let layers = self.layers.iter_mut().enumerate();
        let layers = layers.filter_map(|(layer, pages)| {
            let tail = tails.next_if(|tail| tail.layer == layer)?;
            Some(KvLayer {
                k_tail: tail.k,
                v_tail: tail.v,
                kv_heads: pages.shape.num_kv_heads,
                head_dim: pages.shape.head_dim,
                k_pages: &mut pages.k,
                v_pages: &mut pages.v,
            })
        });
        let layers = layers.collect();
        AppendKv::run(device, AppendKvArgs { rows, layers })
    }

    /// Takes `num_pages` pages, or none when fewer are free.
    pub fn allocate(&mut self, num_pages: usize) -> Option<Vec<u32>> {
        let first = self.free.len().checked_sub(num_pages)?;
        let pages: Vec<u32> = self.free.drain(first..).rev().collect();
        for &page in &pages {
            self.is_free[page as usize] = false;
        }
        Some(pages)
    }

    /// Gives pages back.
    ///
    /// # Panics
    /// When a page is free already: two requests would come to share it.
    pub fn release(&mut self, pages: &[u32]) {
        for &page in pages {
            let is_free = &mut self.is_free[page as usize];
            assert!(!*is_free, "page {page} is released twice");
            *is_free = true;
        }
        self.free.extend(pages.iter().rev());
    }

    /// Pages that [`allocate`](Self::allocate) can still hand out.
    pub fn num_free_pages(&self) -> usize {
        self.free.len()
    }

    /// Bytes of one page over all layers, keys and values.
    pub fn page_bytes(&self) -> usize {
        self.page_bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SHAPES: [KvShape; 2] = [
        KvShape {
            num_kv_heads: 1,
            head_dim: 128,
        },
        KvShape {
            num_kv_heads: 2,
            head_dim: 16,
        },
    ];

    fn cache(num_pages: usize) -> KvCache {
        KvCache::new(&Device::host(Some(1)).unwrap(), &SHAPES, num_pages).unwrap()
    }

    #[test]
    fn allocation_is_all_or_nothing_and_pages_are_distinct() {
        let mut cache = cache(5);
        let first = cache.allocate(3).unwrap();
        assert_eq!(first, [0, 1, 2]);
        assert_eq!(cache.allocate(3), None);
        assert_eq!(cache.num_free_pages(), 2);
        let second = cache.allocate(2).unwrap();
        assert!(second.iter().all(|page| !first.contains(page)));
        cache.release(&first);
        assert_eq!(cache.allocate(3).unwrap(), first);
        assert_eq!(cache.allocate(0), Some(vec![]));
    }

    #[test]
    #[should_panic(expected = "page 1 is released twice")]
    fn a_double_release_panics() {
        let mut cache = cache(4);
        cache.allocate(2).unwrap();
        cache.release(&[1]);
        cache.release(&[1]);
    }

    #[test]
    fn pools_hold_every_page_of_every_layer() {
        let mut cache = cache(3);
        assert_eq!(cache.page_bytes(), 2 * 4 * 64 * (128 + 32));
        assert_eq!(cache.k(0).len(), 3 * 64 * 128);
        assert_eq!(cache.v(1).len(), 3 * 64 * 32);
        let (k, v) = cache.k_v_mut(1);
        k.upload(&[1.0]).unwrap();
        v.upload(&[2.0]).unwrap();
        let first = |pages: &Buffer<f32>| pages.read_back(1).unwrap()[0];
        assert_eq!((first(cache.k(1)), first(cache.v(1))), (1.0, 2.0));
    }
}
