//! Weights that a later launch reads, for a kernel that leaves the memory idle: it brings some of them into the L2 cache.
//!
//! Only a hint: nothing computed depends on it.

/// Bytes that a kernel brings nearer at most: what lasts in the L2 cache beside what else a layer reads.
const MAX_BYTES: usize = 16 << 20;

/// Evenly spread parts of a matrix on a GPU, so that all who read it find their share; mirrors `UpcomingWeights` of
/// `loads.cuh`. None by default.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct UpcomingWeights {
    /// Of the first part; a multiple of 16.
    address: u64,
    num_parts: u32,
    /// Bytes of a part that are read, a multiple of 16.
    part_bytes: u32,
    /// Bytes from one part to the next, a multiple of 16.
    stride: u32,
    unused: u32,
}

impl UpcomingWeights {
    /// Of `num_bytes` at `address`, which consist of `num_slices` much alike, whose first `read_bytes` are read, every so
    /// many slices that [`MAX_BYTES`] suffice.
    pub(super) fn spread(
        address: u64,
        num_bytes: usize,
        num_slices: usize,
        read_bytes: usize,
    ) -> Self {
        let slice_bytes = num_bytes / num_slices.max(1) / 16 * 16;
        let part_bytes = read_bytes.min(slice_bytes) / 16 * 16;
        if part_bytes == 0 {
            return Self::default();
        }
        let apart = (num_slices * part_bytes).div_ceil(MAX_BYTES);
        Self {
            address,
            num_parts: num_slices.div_ceil(apart) as u32,
            part_bytes: part_bytes as u32,
            stride: (apart * slice_bytes) as u32,
            unused: 0,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_are_spread_and_end_inside() {
        for (num_slices, slice_bytes, read_bytes) in [
            (10_240, 4672, 4672),
            (10_240, 4672, 3136),
            (8, 64, 64),
            (7, 100, 96),
        ] {
            let num_bytes = num_slices * slice_bytes;
            let upcoming = UpcomingWeights::spread(4096, num_bytes, num_slices, read_bytes);
            let (parts, stride) = (upcoming.num_parts as usize, upcoming.stride as usize);
            assert!(parts * upcoming.part_bytes as usize <= MAX_BYTES);
            assert!((parts - 1) * stride + upcoming.part_bytes as usize <= num_bytes);
            assert!(parts * stride >= num_bytes * 9 / 10, "{upcoming:?}");
            assert!(stride.is_multiple_of(16) && upcoming.part_bytes.is_multiple_of(16));
        }
    }

    #[test]
    fn nothing_is_brought_of_nothing() {
        assert_eq!(
            UpcomingWeights::spread(0, 0, 0, 0),
            UpcomingWeights::default()
        );
    }
}
