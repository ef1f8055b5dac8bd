//! Device memory: heap blocks with known bounds.
//!
//! A device address is the host address of the byte, so that copies of the driver are plain copies. Blocks are zeroed
//! and aligned to [`ALIGNMENT`]; an unowned gap follows each, so that running past an end never hits a neighbour.
//! One kernel or copy runs at a time; the driver's lock sees to that, not this module.

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::cell::RefCell;
use std::collections::BTreeMap;

use crate::fault::{Fault, Space};

/// What every address of an allocation start is a multiple of, in bytes.
pub const ALIGNMENT: u64 = 256;

/// Bytes after each allocation that belong to nobody.
const GAP_BYTES: u64 = 4096;

/// One allocation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Extent {
    /// First byte.
    pub start: u64,
    /// First byte behind it.
    pub end: u64,
}

/// All device memory of a process.
#[derive(Debug)]
pub struct GlobalMemory {
    capacity_bytes: u64,
    state: RefCell<State>,
}

#[derive(Debug, Default)]
struct State {
    /// End and block of each allocation, by its start.
    extents: BTreeMap<u64, (u64, Block)>,
    used_bytes: u64,
}

impl GlobalMemory {
    /// Memory that holds at most `capacity_bytes` bytes of allocations.
    pub fn new(capacity_bytes: u64) -> Self {
        GlobalMemory {
            capacity_bytes,
            state: RefCell::default(),
        }
    }

    /// The most bytes that allocations may hold together.
    pub fn capacity_bytes(&self) -> u64 {
        self.capacity_bytes
    }

    /// Bytes that allocations hold now, each rounded up to [`ALIGNMENT`].
    pub fn used_bytes(&self) -> u64 {
        self.state.borrow().used_bytes
    }

    /// Zeroed memory, or none if the capacity is exhausted or nothing was asked for.
    pub fn allocate(&self, num_bytes: u64) -> Option<u64> {
        let mut state = self.state.borrow_mut();
        let rounded = num_bytes.checked_next_multiple_of(ALIGNMENT)?;
        if num_bytes == 0 || rounded > self.capacity_bytes - state.used_bytes {
            return None;
        }
        let block = Block::new(rounded)?;
        let start = (block.base as u64).next_multiple_of(ALIGNMENT);
        state.extents.insert(start, (start + num_bytes, block));
        state.used_bytes += rounded;
        Some(start)
    }

    /// Gives an allocation back; false if none starts at `address`.
    pub fn free(&self, address: u64) -> bool {
        let mut state = self.state.borrow_mut();
        let Some((end, block)) = state.extents.remove(&address) else {
            return false;
        };
        state.used_bytes -= (end - address).next_multiple_of(ALIGNMENT);
        drop(block);
        true
    }

    /// The allocation that `address` lies in.
    pub fn extent(&self, address: u64) -> Option<Extent> {
        let state = self.state.borrow();
        let (&start, &(end, _)) = state.extents.range(..=address).next_back()?;
        (address < end).then_some(Extent { start, end })
    }

    /// Holds that all `num_bytes` bytes at `address` lie in one allocation.
    pub fn check(&self, address: u64, num_bytes: u64) -> Result<(), Fault> {
        match self.extent(address) {
            Some(extent) if num_bytes <= extent.end - address => Ok(()),
            _ => Err(Fault::OutOfBounds {
                space: Space::Global,
                address,
                num_bytes,
                near: self.near(address),
                place: None,
            }),
        }
    }

    /// Words for the allocation in or below `address`.
    fn near(&self, address: u64) -> String {
        let state = self.state.borrow();
        match state.extents.range(..=address).next_back() {
            Some((start, (end, _))) => {
                let size = end - start;
                format!(
                    "the allocation below holds {size} bytes, offset {}",
                    address - start
                )
            }
            None => "no allocation below".to_owned(),
        }
    }
}

/// A block of the heap. The host hands out zeroed memory without touching it only where no more than its usual
/// alignment is asked for, and caches take gigabytes, so the start is rounded up by the owner instead.
#[derive(Debug)]
struct Block {
    base: *mut u8,
    layout: Layout,
}

// SAFETY: a block owns its memory.
unsafe impl Send for Block {}

impl Block {
    /// Room for `num_bytes` bytes from the first multiple of [`ALIGNMENT`] on, and the gap.
    fn new(num_bytes: u64) -> Option<Self> {
        let size = num_bytes.checked_add(ALIGNMENT + GAP_BYTES)?;
        let layout = Layout::from_size_align(usize::try_from(size).ok()?, 16).ok()?;
        // SAFETY: the layout's size is not zero.
        let base = unsafe { alloc_zeroed(layout) };
        (!base.is_null()).then_some(Block { base, layout })
    }
}

impl Drop for Block {
    fn drop(&mut self) {
        // SAFETY: `new` got this memory with this layout.
        unsafe { dealloc(self.base, self.layout) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bounds_are_exact_to_the_byte() {
        let memory = GlobalMemory::new(1 << 20);
        let address = memory.allocate(1000).expect("fits");
        assert_eq!(address % ALIGNMENT, 0);
        assert_eq!(memory.check(address, 1000), Ok(()));
        assert_eq!(memory.check(address + 996, 4), Ok(()));
        assert!(matches!(
            memory.check(address + 997, 4),
            Err(Fault::OutOfBounds { num_bytes: 4, .. })
        ));
        assert!(memory.check(address - 1, 1).is_err());
        assert!(memory.check(address + 1000, 1).is_err());
        assert!(memory.free(address));
        assert!(!memory.free(address));
        assert!(memory.check(address, 1).is_err());
    }

    #[test]
    fn capacity_counts_whole_allocation_units() {
        let memory = GlobalMemory::new(1024);
        let first = memory.allocate(513).expect("fits");
        assert_eq!(memory.used_bytes(), 768);
        assert_eq!(memory.allocate(257), None);
        assert!(memory.allocate(256).is_some());
        assert!(memory.free(first));
        assert_eq!(memory.used_bytes(), 256);
        assert_eq!(memory.allocate(0), None);
    }
}
