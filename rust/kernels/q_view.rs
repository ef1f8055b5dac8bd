//! Launching the 8-bit view of W12 weights on Hopper: `cuda/include/q_view.cuh`, which says how it multiplies.
//!
//! Other GPUs multiply the view as they do exact weights. Both are within rounding of activations to E4M3 of each other,
//! and a Q pass only marks a path.

use super::skinny_matmul::{MAX_PARTS, MatmulPart};
use super::skinny_weights::{NOTE_BYTES, SliceMap, TILE_CHANNELS, TILE_COLUMNS};
use crate::device::cuda::{Arch, CudaDevice, KernelSource, Launch, Limits, Shape};
use crate::error::DeviceError;

/// Tiles that a warpgroup multiplies at a time.
const UNIT_TILES: usize = 4;
/// Warpgroups of a block.
const BLOCK_GROUPS: usize = 2;
const GROUP_THREADS: usize = 128;
/// Slices of a warp's ring below which reading stops while a warp multiplies, and beyond which nothing is gained.
const RING_SLOTS: std::ops::RangeInclusive<usize> = 2..=8;
/// Bytes of a row's 64 activations.
const ROW_TILE_BYTES: usize = TILE_COLUMNS;
const BARRIER_BYTES: usize = 8;
const QUANTISE_THREADS: u32 = 320;

/// How the view of some matrices is spread over a GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct QView {
    map: SliceMap,
    num_tiles: usize,
    /// Runs of whole slices that K is cut into; follows from K alone.
    num_shares: usize,
    /// Blocks, a multiple of `num_shares`.
    num_blocks: usize,
    block_shared_bytes: usize,
}

/// Rows of one launch.
pub(super) struct QViewRows {
    /// BF16, padded to whole super-tiles.
    pub(super) rounded: u64,
    pub(super) num_rows: usize,
    /// At least [`QView::scratch_bytes`].
    pub(super) scratch: u64,
    pub(super) adds_to_output: bool,
}

/// `QViewParams` of `q_view.cuh`.
#[repr(C)]
#[derive(Clone, Copy)]
struct QViewParams {
    parts: [MatmulPart; MAX_PARTS],
    x: u64,
    scales: u64,
    partial_sums: u64,
    arrivals: u64,
    num_rows: u32,
    num_tiles: u32,
    k_tiles: u32,
    log2_slices: u32,
    log2_shares: u32,
    share_tiles: u32,
    slice_tiles: u32,
    ring_slots: u32,
    max_units: u32,
    adds_to_output: u32,
}

/// `QuantiseRowsParams` of `q_view.cuh`.
#[repr(C)]
#[derive(Clone, Copy)]
struct QuantiseRowsParams {
    rounded: u64,
    x: u64,
    scales: u64,
    num_rows: u32,
    padded_rows: u32,
    k_tiles: u32,
}

impl QView {
    /// Rows that one launch multiplies at most.
    pub(super) const MAX_ROWS: usize = 32;

    /// `None` where the GPU has no such instruction, or its memory no room for a share of `MAX_ROWS` rows.
    pub(super) fn choose(
        device: &CudaDevice,
        in_features: usize,
        num_tiles: usize,
    ) -> Option<Self> {
        match device.arch() {
            Arch::Sm90a => Self::of(in_features, num_tiles, device.limits()),
            Arch::Sm80 | Arch::Sm120 => None,
        }
        .filter(|view| view.num_units() <= CudaDevice::NUM_ARRIVALS)
    }

    fn of(in_features: usize, num_tiles: usize, limits: Limits) -> Option<Self> {
        let map = SliceMap::of(in_features);
        let shares = (0..=map.num_slices().ilog2()).map(|log2| 1 << log2);
        let mut views = shares.map(|num_shares| Self {
            map,
            num_tiles,
            num_shares,
            num_blocks: limits.num_multiprocessors / num_shares * num_shares,
            block_shared_bytes: limits.block_shared_bytes,
        });
        views.find(|view| view.num_blocks > 0 && view.ring_slots(Self::MAX_ROWS).is_some())
    }

    /// Super-tiles of the longest share.
    fn share_tiles(&self) -> usize {
        let slices = self.map.num_slices() / self.num_shares;
        let start = |share: usize| self.map.span(share * slices).start;
        let end = |share: usize| self.map.span((share + 1) * slices - 1).end;
        let lengths = (0..self.num_shares).map(|share| end(share) - start(share));
        lengths.max().unwrap_or(0)
    }

    fn slot_bytes(&self) -> usize {
        NOTE_BYTES + self.map.slice_tiles() * TILE_CHANNELS * TILE_COLUMNS
    }

    /// Slices of a warp's ring beside `padded_rows` rows, if there is room for some.
    fn ring_slots(&self, padded_rows: usize) -> Option<usize> {
        let rows = self.share_tiles() * ROW_TILE_BYTES * padded_rows + BARRIER_BYTES;
        let room = self.block_shared_bytes.checked_sub(rows)?;
        let slots = room / (BLOCK_GROUPS * UNIT_TILES * (self.slot_bytes() + BARRIER_BYTES));
        (slots >= *RING_SLOTS.start()).then(|| slots.min(*RING_SLOTS.end()))
    }

    fn num_workers(&self) -> usize {
        self.num_blocks / self.num_shares * BLOCK_GROUPS
    }

    /// Units of the worker with most tiles.
    fn max_units(&self) -> usize {
        let tiles = self.num_tiles.div_ceil(self.num_workers());
        tiles.div_ceil(UNIT_TILES)
    }

    /// Units of all workers, if each had as many.
    fn num_units(&self) -> usize {
        self.num_workers() * self.max_units()
    }

    fn partial_bytes(&self) -> usize {
        let bytes = self.num_units() * self.num_shares * GROUP_THREADS * Self::MAX_ROWS / 2 * 4;
        if self.num_shares > 1 { bytes } else { 0 }
    }

    fn x_bytes(&self) -> usize {
        self.map.k_tiles * ROW_TILE_BYTES * Self::MAX_ROWS
    }

    /// Scratch of a launch.
    pub(super) fn scratch_bytes(&self) -> usize {
        self.partial_bytes() + self.x_bytes() + Self::MAX_ROWS * size_of::<f32>()
    }

    /// Multiplies up to [`QView::MAX_ROWS`] rows: rounds them to E4M3, then reads the weights.
    ///
    /// # Errors
    /// [`DeviceError`] of the launches.
    pub(super) fn launch(
        &self,
        device: &CudaDevice,
        parts: [MatmulPart; MAX_PARTS],
        rows: QViewRows,
    ) -> Result<(), DeviceError> {
        let padded_rows = rows.num_rows.next_multiple_of(8);
        let x = rows.scratch + self.partial_bytes() as u64;
        let scales = x + self.x_bytes() as u64;
        let source = KernelSource::of("w12_matmul");
        let quantise = QuantiseRowsParams {
            rounded: rows.rounded,
            x,
            scales,
            num_rows: rows.num_rows as u32,
            padded_rows: padded_rows as u32,
            k_tiles: self.map.k_tiles as u32,
        };
        let function = device.function(source, "quantise_rows")?;
        let shape = Shape::of_blocks(rows.num_rows, QUANTISE_THREADS as usize);
        let launch = Launch::new(&function, shape, true);
        // SAFETY: `quantise` mirrors the kernel's parameters; `rounded` holds the rows, and the scratch has room.
        unsafe { launch.run(device, &quantise)? };
        let ring_slots = self.ring_slots(padded_rows).unwrap_or(*RING_SLOTS.start());
        let params = QViewParams {
            parts,
            x,
            scales,
            partial_sums: rows.scratch,
            arrivals: device.arrivals(),
            num_rows: rows.num_rows as u32,
            num_tiles: self.num_tiles as u32,
            k_tiles: self.map.k_tiles as u32,
            log2_slices: self.map.num_slices().ilog2(),
            log2_shares: self.num_shares.ilog2(),
            share_tiles: self.share_tiles() as u32,
            slice_tiles: self.map.slice_tiles() as u32,
            ring_slots: ring_slots as u32,
            max_units: self.max_units() as u32,
            adds_to_output: u32::from(rows.adds_to_output),
        };
        let rings = BLOCK_GROUPS * UNIT_TILES * ring_slots * (self.slot_bytes() + BARRIER_BYTES);
        let shared_bytes =
            self.share_tiles() * ROW_TILE_BYTES * padded_rows + rings + BARRIER_BYTES;
        let function = device.function(source, &format!("q_view_{padded_rows}"))?;
        device.allow_shared_bytes(&function, shared_bytes)?;
        let shape = Shape {
            shared_bytes: shared_bytes as u32,
            ..Shape::of_blocks(self.num_blocks, BLOCK_GROUPS * GROUP_THREADS)
        };
        let launch = Launch::new(&function, shape, true);
        // SAFETY: `params` mirrors the kernel's. Weights, results and scratch are as long as the shapes ask. There are no
        // more blocks than multiprocessors, so they may wait for each other.
        unsafe { launch.run(device, &params) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const H200: Limits = Limits {
        num_multiprocessors: 132,
        block_shared_bytes: 232_448,
        has_clusters: true,
    };

    #[test]
    fn shares_follow_from_k_and_every_row_count_has_a_ring() {
        for (in_features, num_shares) in [
            (64, 1),
            (250, 1),
            (2560, 1),
            (5120, 2),
            (6144, 2),
            (17408, 4),
        ] {
            for num_tiles in [1, 3, 320, 2176] {
                let view = QView::of(in_features, num_tiles, H200).unwrap();
                assert_eq!(view.num_shares, num_shares, "{in_features}");
                for padded_rows in [8, 16, 24, 32] {
                    assert!(view.ring_slots(padded_rows).unwrap() >= 2);
                }
                assert!(view.num_units() <= CudaDevice::NUM_ARRIVALS);
            }
        }
    }

    #[test]
    fn shares_cover_all_slices() {
        let view = QView::of(17408, 320, H200).unwrap();
        assert_eq!(view.map.k_tiles, 272);
        assert_eq!(view.share_tiles() * view.num_shares, 272);
    }
}
