//! How rows in shared memory are multiplied: `wgmma_matmul.cuh`.

use super::{BARRIER_BYTES, Stack, WARP_LANES, kernel_stem};
use crate::device::cuda::Limits;
use crate::kernels::skinny_weights::{OCTET, SliceFormat, SliceMap, TILE_COLUMNS};
use crate::kernels::w12_matmul::WeightView;

/// Rows that kernels are made for.
const KERNEL_ROWS: [usize; 4] = [64, 32, 16, 8];
/// Blocks of a cluster.
const CLUSTERS: [usize; 4] = [1, 2, 4, 8];
/// Warpgroups of a block.
const BLOCK_GROUPS: usize = 2;
/// Slices that a warpgroup adds up in registers, at most.
const MAX_SHARE_SLICES: usize = 4;
const MAX_RING_SLOTS: usize = 4;
/// Tiles that a warpgroup multiplies at a time.
pub(super) const UNIT_TILES: usize = 4;

/// How `wgmma_matmul.cuh` is spread over a GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct GroupConfig {
    /// Rows that the kernel takes.
    pub(super) rows: usize,
    /// Blocks that hold K between them.
    pub(super) cluster_blocks: usize,
    pub(super) inbox_slots: usize,
    pub(super) ring_slots: usize,
    /// Super-tiles along K of which a block holds the rows, at most.
    pub(super) block_tiles: usize,
    pub(super) shared_bytes: usize,
}

impl GroupConfig {
    /// The launch of `num_rows`, or of the first of them; `None` where shared memory has no room.
    pub(super) fn choose(
        stack: Stack,
        view: WeightView,
        num_rows: usize,
        limits: Limits,
    ) -> Option<Self> {
        let most = num_rows.clamp(8, KERNEL_ROWS[0]).next_power_of_two();
        // Where fewer rows do not fill a cluster, more do: rows are padded.
        let fewer = KERNEL_ROWS.into_iter().filter(|&rows| rows <= most);
        let more = KERNEL_ROWS.into_iter().rev().filter(|&rows| rows > most);
        fewer
            .chain(more)
            .find_map(|rows| Self::with_rows(stack, view, rows, limits))
    }

    /// The fastest launch of a kernel of `rows` rows.
    pub(super) fn with_rows(
        stack: Stack,
        view: WeightView,
        rows: usize,
        limits: Limits,
    ) -> Option<Self> {
        CLUSTERS
            .into_iter()
            .filter_map(|blocks| Self::with_cluster(stack, view, rows, blocks, limits))
            .max_by(|a, b| a.rate(stack, limits).total_cmp(&b.rate(stack, limits)))
    }

    /// Share of a GPU that a launch keeps busy, about.
    fn rate(&self, stack: Stack, limits: Limits) -> f64 {
        let num_units = stack.num_tiles.div_ceil(UNIT_TILES);
        let num_clusters = limits.num_multiprocessors / self.cluster_blocks;
        let num_blocks = (num_clusters * self.cluster_blocks) as f64;
        let turns = (num_units.div_ceil(num_clusters) * num_clusters) as f64;
        let all_blocks = limits.num_multiprocessors as f64;
        // One slot: the memory waits while a warp decodes. A larger cluster has more to exchange.
        let slots = if self.ring_slots == 1 { 0.85 } else { 1.0 };
        let exchange = 1.0 - 0.005 * self.cluster_blocks as f64;
        num_units as f64 / turns * num_blocks / all_blocks * slots * exchange
    }

    fn with_cluster(
        stack: Stack,
        view: WeightView,
        rows: usize,
        cluster_blocks: usize,
        limits: Limits,
    ) -> Option<Self> {
        let map = SliceMap::of(stack.in_features);
        let num_shares = BLOCK_GROUPS * cluster_blocks;
        let share_slices = map.num_slices() / num_shares;
        // An octet is added up from one to eight shares; every block owns whole groups of eight rows of a tile.
        if !(1..=MAX_SHARE_SLICES).contains(&share_slices)
            || num_shares > OCTET * map.num_octets
            || rows / 8 * UNIT_TILES < cluster_blocks
        {
            return None;
        }
        let block_slices = BLOCK_GROUPS * share_slices;
        let block_tiles = (0..cluster_blocks)
            .map(|block| {
                let (first, last) = (block * block_slices, (block + 1) * block_slices - 1);
                map.span(last).end - map.span(first).start
            })
            .max()?;
        let row_bytes = block_tiles * TILE_COLUMNS * 2 * rows;
        let inbox_bytes =
            BLOCK_GROUPS * UNIT_TILES * rows / 8 * WARP_LANES * 16 + 2 * BARRIER_BYTES;
        let slot_bytes = OCTET * (stack.slot_bytes(view) + BARRIER_BYTES);
        let slots = |inbox_slots: usize| {
            let fixed = row_bytes + BARRIER_BYTES + inbox_slots * inbox_bytes;
            let room = limits.block_shared_bytes.checked_sub(fixed)?;
            Some((room / slot_bytes).min(MAX_RING_SLOTS)).filter(|&slots| slots > 0)
        };
        let inbox_slots = if slots(2) == slots(1) { 2 } else { 1 };
        let ring_slots = slots(inbox_slots)?;
        Some(Self {
            rows,
            cluster_blocks,
            inbox_slots,
            ring_slots,
            block_tiles,
            shared_bytes: row_bytes
                + BARRIER_BYTES
                + inbox_slots * inbox_bytes
                + ring_slots * slot_bytes,
        })
    }

    /// The kernel of this shape.
    pub(super) fn kernel_name(&self, format: SliceFormat, view: WeightView) -> String {
        format!("{}_wgmma_{}", kernel_stem(format, view), self.rows)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shapes_of_a_27b_model_fit_a_hopper_block() {
        let limits = Limits {
            num_multiprocessors: 132,
            block_shared_bytes: 232_448,
            has_clusters: true,
        };
        for (out_features, in_features) in [
            (34816, 5120),
            (5120, 17408),
            (2048, 5120),
            (5120, 6144),
            (16, 64),
        ] {
            for format in [SliceFormat::W12, SliceFormat::Bf16] {
                let stack = Stack {
                    format,
                    in_features,
                    num_tiles: out_features / 16,
                };
                for num_rows in 1..=64 {
                    let config = GroupConfig::choose(stack, WeightView::Exact, num_rows, limits);
                    let config = config.expect("room");
                    assert!(config.rows >= num_rows.min(16), "{num_rows} {config:?}");
                    assert!(
                        config.shared_bytes <= limits.block_shared_bytes,
                        "{config:?}"
                    );
                    let num_slices = SliceMap::of(in_features).num_slices();
                    assert_eq!(num_slices % (2 * config.cluster_blocks), 0);
                }
            }
        }
    }
}
