//! Addresses of the memories that are not global: shared, shared of a cluster's other blocks, local.
//!
//! A shared address has 32 bits: an offset from [`SHARED_BASE`] in its own block, or, with [`cluster_address`]'s rank in
//! the top byte, in a block of the cluster. Generic addresses put [`SHARED_WINDOW`] or [`LOCAL_WINDOW`] before one;
//! both lie where no host address does.

/// The address of a block's first byte of shared memory: not zero, so that a null address is out of bounds.
pub const SHARED_BASE: u32 = 1024;

/// Set in generic addresses of shared memory.
pub const SHARED_WINDOW: u64 = 1 << 62;

/// Set in generic addresses of local memory.
pub const LOCAL_WINDOW: u64 = 1 << 61;

/// Bits of a shared address that are the offset; those above are the rank in the cluster, plus one.
const OFFSET_BITS: u32 = 24;

/// The address in block `rank` of the cluster of what lies at `address` in the own block.
#[inline(always)]
pub fn cluster_address(address: u32, rank: u32) -> u32 {
    (address & ((1 << OFFSET_BITS) - 1)) | (rank.min(254) + 1) << OFFSET_BITS
}

/// Rank in the cluster, none for the own block, and offset from the start of shared memory (huge for addresses below).
#[inline(always)]
pub fn split_shared(address: u32) -> (Option<u32>, u32) {
    let offset = (address & ((1 << OFFSET_BITS) - 1)).wrapping_sub(SHARED_BASE);
    ((address >> OFFSET_BITS).checked_sub(1), offset)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cluster_address_keeps_its_offset_and_names_its_block() {
        let own = SHARED_BASE + 4096;
        assert_eq!(split_shared(own), (None, 4096));
        for rank in [0, 3, 15] {
            let there = cluster_address(own, rank);
            assert_eq!(split_shared(there + 8), (Some(rank), 4104));
            assert_eq!(split_shared(cluster_address(there, 1)), (Some(1), 4096));
        }
        assert!(split_shared(0).1 > 1 << 24);
    }
}
