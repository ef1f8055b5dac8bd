//! The contexts of a call's blocks, in lists that kernels read on either side.

use super::most_parts;
use crate::device::{Device, Staged};
use crate::error::DeviceError;

/// The committed context of one block.
#[derive(Clone, Copy, Debug)]
pub struct BlockContext<'a> {
    /// Pages of the request, one per 64 context positions.
    pub page_table: &'a [u32],
    /// Context positions `0..context_len`; the block's row 0 stands at `context_len`.
    pub context_len: usize,
}

/// Everything that launches over some contexts follow from besides what lies in the lists.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ContextsKey {
    lists: [Option<u64>; 2],
    num_blocks: usize,
    num_parts: usize,
}

/// One context per block.
#[derive(Debug, Default)]
pub struct BlockContexts {
    /// Of each block: length of its context, first of its pages.
    places: Staged<u32>,
    /// All pages, block by block.
    pages: Staged<u32>,
}

impl BlockContexts {
    /// The contexts of `blocks` for `device`.
    ///
    /// # Errors
    /// [`DeviceError`] when a GPU has no room for them.
    pub fn of(device: &Device, blocks: &[BlockContext<'_>]) -> Result<Self, DeviceError> {
        let mut contexts = Self::default();
        contexts.fill(device, blocks.iter().copied())?;
        Ok(contexts)
    }

    /// Replaces the contexts.
    ///
    /// # Errors
    /// As for [`of`](Self::of).
    pub fn fill<'a>(
        &mut self,
        device: &Device,
        blocks: impl Iterator<Item = BlockContext<'a>>,
    ) -> Result<(), DeviceError> {
        let (places, pages) = (self.places.values_mut(), self.pages.values_mut());
        places.clear();
        pages.clear();
        for block in blocks {
            places.extend([block.context_len as u32, pages.len() as u32]);
            pages.extend_from_slice(block.page_table);
        }
        self.places.send(device)?;
        self.pages.send(device)
    }

    /// Number of blocks.
    pub fn len(&self) -> usize {
        self.places.len() / 2
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.places.is_empty()
    }

    /// The context of block `block`.
    pub fn of_block(&self, block: usize) -> BlockContext<'_> {
        let places = self.places.values();
        let start = places[2 * block + 1] as usize;
        let end = places.get(2 * block + 3).map(|&end| end as usize);
        BlockContext {
            page_table: &self.pages.values()[start..end.unwrap_or(self.pages.len())],
            context_len: places[2 * block] as usize,
        }
    }

    /// All contexts in turn.
    pub fn iter(&self) -> impl Iterator<Item = BlockContext<'_>> {
        (0..self.len()).map(|block| self.of_block(block))
    }

    /// The key of launches for blocks of `block_size` rows that see a `window`.
    pub fn launch_key(&self, block_size: usize, window: Option<usize>) -> ContextsKey {
        ContextsKey {
            lists: [&self.places, &self.pages].map(Staged::cuda_address),
            num_blocks: self.len(),
            num_parts: most_parts(self, block_size, window),
        }
    }

    /// Of each block: length of its context, first of its pages.
    pub(super) fn places(&self) -> &Staged<u32> {
        &self.places
    }

    /// All pages, block by block.
    pub(super) fn pages(&self) -> &Staged<u32> {
        &self.pages
    }
}
