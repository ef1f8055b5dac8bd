//! Page-locked host memory: ordinary blocks whose addresses are remembered, as copies to and from them may be late.

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::collections::BTreeMap;

const PAGE_BYTES: usize = 4096;

/// All page-locked blocks.
#[derive(Default)]
pub(super) struct HostMemory {
    blocks: BTreeMap<usize, Layout>,
}

impl HostMemory {
    /// A block, or none if the system has no memory or nothing was asked for.
    pub(super) fn allocate(&mut self, num_bytes: usize) -> Option<*mut u8> {
        let layout = Layout::from_size_align(num_bytes, PAGE_BYTES).ok()?;
        if num_bytes == 0 {
            return None;
        }
        // SAFETY: the layout's size is not zero.
        let start = unsafe { alloc_zeroed(layout) };
        if start.is_null() {
            return None;
        }
        self.blocks.insert(start.addr(), layout);
        Some(start)
    }

    /// Gives a block back; false if none starts there.
    pub(super) fn free(&mut self, start: *mut u8) -> bool {
        let Some(layout) = self.blocks.remove(&start.addr()) else {
            return false;
        };
        // SAFETY: `allocate` got this block with this layout, and it is forgotten now.
        unsafe { dealloc(start, layout) };
        true
    }

    /// Whether `num_bytes` from `start` on lie in one block.
    pub(super) fn holds(&self, start: *const u8, num_bytes: usize) -> bool {
        let before = self.blocks.range(..=start.addr()).next_back();
        before.is_some_and(|(at, layout)| start.addr() - at + num_bytes <= layout.size())
    }
}

impl Drop for HostMemory {
    fn drop(&mut self) {
        for (&start, &layout) in &self.blocks {
            // SAFETY: as in `free`; nothing is looked up any more.
            unsafe { dealloc(std::ptr::with_exposed_provenance_mut(start), layout) };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_are_known_by_every_byte() {
        let mut memory = HostMemory::default();
        let start = memory.allocate(100).unwrap();
        assert!(memory.holds(start, 100) && memory.holds(start.wrapping_add(99), 1));
        assert!(!memory.holds(start, 101) && !memory.holds(start.wrapping_sub(1), 1));
        assert!(!memory.free(start.wrapping_add(1)));
        assert!(memory.free(start) && !memory.free(start));
        assert!(memory.allocate(0).is_none());
    }
}
