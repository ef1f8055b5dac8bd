//! The paged key/value cache of all softmax-attention layers, its free lists and the page tables of requests.
//!
//! A page holds 64 positions of one request in every layer of its span, `[page][kv_head][64][head_dim]` per layer for
//! keys and for values. Layers that keep everything share one pool, layers with a window another, of which a request
//! takes a ring at most: where its table leads from position p on the lanes of position p - ring are written over.
//! A ring holds what any row in flight sees: the window before a pass's first row, and the rows that the pass settles
//! before attention of that row. Nothing is written earlier than that, for what is not committed lies in tails, and
//! committed rows are never taken back. Lanes out of sight may hold newer positions; kernels do not read them.
//! Pages are handed out whole; a pool is reserved but not touched before tokens are written.

use crate::device::{Buffer, Device};
use crate::error::{DeviceError, KernelError};
use crate::kernels::Kernel;
use crate::kernels::append_kv::{AppendKv, AppendKvArgs, KvLayer};
use crate::kernels::kv_span::{KvSpan, PerSpan};
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

/// What a cache's layers keep.
#[derive(Clone, Debug)]
pub struct KvLayout {
    layers: Vec<(KvShape, KvSpan)>,
    ring_pages: usize,
}

impl KvLayout {
    /// Layers with their windows. Of a request up to `rows_ahead` rows are written before a row reads its window: those
    /// that a pass settles on its way, or scratch rows that are dropped again.
    pub fn new(
        layers: impl IntoIterator<Item = (KvShape, Option<usize>)>,
        rows_ahead: usize,
    ) -> Self {
        let mut widest = None;
        let layer = |(shape, window): (KvShape, Option<usize>)| {
            widest = widest.max(window);
            match window {
                Some(_) => (shape, KvSpan::Window),
                None => (shape, KvSpan::Whole),
            }
        };
        let layers = layers.into_iter().map(layer).collect();
        // A row sees its window less itself of what is committed.
        let ring_pages = |window: usize| {
            let num_positions = (window.max(1) - 1).saturating_add(rows_ahead);
            num_positions.div_ceil(KV_BLOCK).max(1)
        };
        Self {
            layers,
            ring_pages: widest.map_or(0, ring_pages),
        }
    }

    /// Most pages that layers with a window keep of a request; 0 without such layers.
    pub fn ring_pages(&self) -> usize {
        self.ring_pages
    }

    /// Pages that a request of `num_positions` takes.
    pub fn num_pages(&self, num_positions: usize) -> PerSpan<usize> {
        pages_of(num_positions, self.ring_pages)
    }

    /// Bytes that one page takes in all layers of its span with elements of `element_bytes`, for sizing a pool before it
    /// exists.
    pub fn page_bytes(&self, element_bytes: usize) -> PerSpan<usize> {
        let mut bytes = PerSpan::default();
        for (shape, span) in &self.layers {
            *bytes.of_mut(*span) += 2 * shape.page_len() * element_bytes;
        }
        bytes
    }
}

/// Pages that a request of `num_positions` takes, where layers with a window keep up to `ring_pages`.
pub fn pages_of(num_positions: usize, ring_pages: usize) -> PerSpan<usize> {
    let whole = num_positions.div_ceil(KV_BLOCK);
    PerSpan {
        whole,
        window: whole.min(ring_pages),
    }
}

/// Pages of every attention layer.
#[derive(Debug)]
pub struct KvCache {
    layers: Vec<LayerPages>,
    layout: KvLayout,
    pools: PerSpan<PagePool>,
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
    span: KvSpan,
    k: Buffer<f32>,
    v: Buffer<f32>,
}

/// Which pages of a pool nobody holds.
#[derive(Debug)]
struct PagePool {
    /// Free pages; the last one is handed out next.
    free: Vec<u32>,
    is_free: Vec<bool>,
}

impl PagePool {
    fn new(num_pages: usize) -> Self {
        Self {
            free: (0..num_pages as u32).rev().collect(),
            is_free: vec![true; num_pages],
        }
    }

    /// Moves `num_pages` pages, which must be free, to the end of `to`.
    fn hand_out(&mut self, num_pages: usize, to: &mut Vec<u32>) {
        let first = self.free.len() - num_pages;
        for page in self.free.drain(first..).rev() {
            self.is_free[page as usize] = false;
            to.push(page);
        }
    }

    /// Panics when a page is free already: two requests would come to share it.
    fn take_back(&mut self, pages: &[u32]) {
        for &page in pages {
            let is_free = &mut self.is_free[page as usize];
            assert!(!*is_free, "page {page} is released twice");
            *is_free = true;
        }
        self.free.extend(pages.iter().rev());
    }
}

impl KvCache {
    /// Pools of `num_pages` pages for the layers of `layout`. On the host memory is reserved, not touched.
    ///
    /// # Errors
    /// [`DeviceError::OutOfMemory`].
    pub fn new(
        device: &Device,
        layout: KvLayout,
        num_pages: PerSpan<usize>,
    ) -> Result<Self, DeviceError> {
        let pages = |&(shape, span): &(KvShape, KvSpan)| {
            let len = num_pages.of(span) * shape.page_len();
            Ok(LayerPages {
                shape,
                span,
                k: device.try_alloc(len)?,
                v: device.try_alloc(len)?,
            })
        };
        Ok(Self {
            layers: layout.layers.iter().map(pages).collect::<Result<_, _>>()?,
            layout,
            pools: PerSpan {
                whole: PagePool::new(num_pages.whole),
                window: PagePool::new(num_pages.window),
            },
        })
    }

    /// What the layers keep.
    pub fn layout(&self) -> &KvLayout {
        &self.layout
    }

    /// How much attention layer `layer` keeps (counting attention layers only).
    pub fn span(&self, layer: usize) -> KvSpan {
        self.layers[layer].span
    }

    /// Key pages of attention layer `layer`.
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
        let mut layers = PerSpan::<Vec<KvLayer<'_>>>::default();
        for (layer, pages) in self.layers.iter_mut().enumerate() {
            let Some(tail) = tails.next_if(|tail| tail.layer == layer) else {
                continue;
            };
            layers.of_mut(pages.span).push(KvLayer {
                k_tail: tail.k,
                v_tail: tail.v,
                kv_heads: pages.shape.num_kv_heads,
                head_dim: pages.shape.head_dim,
                k_pages: &mut pages.k,
                v_pages: &mut pages.v,
            });
        }
        for span in KvSpan::ALL {
            let layers = std::mem::take(layers.of_mut(span));
            if !layers.is_empty() {
                AppendKv::run(device, AppendKvArgs { rows, span, layers })?;
            }
        }
        Ok(())
    }

    /// Lengthens the tables of a request to `num_positions`; `false`, and nothing changed, when pages run out.
    pub fn reserve(&mut self, tables: &mut PerSpan<Vec<u32>>, num_positions: usize) -> bool {
        let wanted = self.layout.num_pages(num_positions);
        let missing = PerSpan {
            whole: wanted.whole.saturating_sub(tables.whole.len()),
            window: wanted.window.saturating_sub(tables.window.len()),
        };
        let free = self.num_free_pages();
        if missing.whole > free.whole || missing.window > free.window {
            return false;
        }
        for span in KvSpan::ALL {
            let pool = self.pools.of_mut(span);
            pool.hand_out(*missing.of(span), tables.of_mut(span));
        }
        if wanted.window > 0 {
            for entry in tables.window.len()..wanted.whole {
                tables.window.push(tables.window[entry - wanted.window]);
            }
        }
        true
    }

    /// Takes the pages of a request back and empties its tables.
    ///
    /// # Panics
    /// When a page is free already: two requests would come to share it.
    pub fn release(&mut self, tables: &mut PerSpan<Vec<u32>>) {
        let PerSpan { whole, window } = std::mem::take(tables);
        self.pools.whole.take_back(&whole);
        let ring = window.len().min(self.layout.ring_pages);
        self.pools.window.take_back(&window[..ring]);
    }

    /// Pages that [`reserve`](Self::reserve) can still hand out.
    pub fn num_free_pages(&self) -> PerSpan<usize> {
        PerSpan {
            whole: self.pools.whole.free.len(),
            window: self.pools.window.free.len(),
        }
    }
}

#[cfg(test)]
pub(crate) mod tests;
