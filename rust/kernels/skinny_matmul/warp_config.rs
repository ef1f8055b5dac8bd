//! How rows in registers are multiplied: `skinny_matmul.cuh`.

use super::{BARRIER_BYTES, MAX_ROWS, Stack, WARP_LANES, kernel_stem};
use crate::device::cuda::Limits;
use crate::kernels::skinny_weights::{OCTET, SliceFormat, SliceMap};
use crate::kernels::w12_matmul::WeightView;

/// Bytes between the rows of a slice sum.
const SUM_ROW_BYTES: usize = 80;
/// Units whose slice sums wait to be added.
const SUM_BUFFERS: usize = 2;
/// Slices of a ring beyond which nothing is gained.
const MAX_RING_SLOTS: usize = 16;

/// How `skinny_matmul.cuh` is spread over a GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct WarpConfig {
    /// Groups of eight rows.
    pub(super) row_groups: usize,
    /// Octets that a block holds.
    pub(super) block_octets: usize,
    /// Blocks that hold all octets of a tile between them and talk through shared memory; 1 without.
    pub(super) cluster_blocks: usize,
    pub(super) inbox_slots: usize,
    pub(super) ring_slots: usize,
    pub(super) shared_bytes: usize,
}

impl WarpConfig {
    /// Rows of the first of the launches that multiply `num_rows`: as many as leave shared memory for a ring. Slices, and
    /// so all sums, are the same whatever it is.
    pub(super) fn launch_rows(
        stack: Stack,
        view: WeightView,
        num_rows: usize,
        limits: Limits,
    ) -> usize {
        let fits = |rows: &usize| Self::choose(stack, view, *rows, limits).ring_slots > 0;
        let most = num_rows.min(MAX_ROWS);
        let fewer = (1..most.div_ceil(8)).rev().map(|groups| 8 * groups);
        std::iter::once(most)
            .chain(fewer)
            .find(fits)
            .unwrap_or(most.min(8))
    }

    pub(super) fn choose(stack: Stack, view: WeightView, num_rows: usize, limits: Limits) -> Self {
        // Activations of two octets fit in registers up to 16 rows.
        if num_rows <= 16 && SliceMap::of(stack.in_features).num_octets > 1 {
            let config = Self::with_octets(2, stack, view, num_rows, limits);
            if config.ring_slots > 0 {
                return config;
            }
        }
        Self::with_octets(1, stack, view, num_rows, limits)
    }

    fn with_octets(
        block_octets: usize,
        stack: Stack,
        view: WeightView,
        num_rows: usize,
        limits: Limits,
    ) -> Self {
        let map = SliceMap::of(stack.in_features);
        let row_groups = num_rows.div_ceil(8);
        let num_groups = map.num_octets / block_octets;
        // Measured on an H200: above 16 rows W12's warps have no time to spare for a cluster's exchange, unless the
        // matrix is so small that its end is most of it.
        let is_tight = stack.format == SliceFormat::W12 && row_groups > 2;
        let in_cluster = limits.has_clusters
            && (2..=8).contains(&num_groups)
            && (!is_tight || stack.num_tiles <= limits.num_multiprocessors);
        let cluster_blocks = if in_cluster { num_groups } else { 1 };
        let slot_bytes = stack.slot_bytes(view) + BARRIER_BYTES;
        let buffers = SUM_BUFFERS * block_octets;
        let fixed = |inbox_slots: usize| {
            let sums = buffers * (OCTET * row_groups * 8 * SUM_ROW_BYTES + 2 * BARRIER_BYTES);
            let octets = map.num_octets * row_groups * WARP_LANES * 16;
            let inbox = inbox_slots * (octets + BARRIER_BYTES * (1 + cluster_blocks));
            sums + if in_cluster { inbox } else { 0 }
        };
        let slots = |inbox_slots| {
            let room = limits.block_shared_bytes.saturating_sub(fixed(inbox_slots));
            (room / (OCTET * slot_bytes)).min(MAX_RING_SLOTS)
        };
        let inbox_slots = if in_cluster && slots(2) == slots(1) {
            2
        } else {
            1
        };
        let ring_slots = slots(inbox_slots);
        Self {
            row_groups,
            block_octets,
            cluster_blocks,
            inbox_slots,
            ring_slots,
            shared_bytes: fixed(inbox_slots) + ring_slots * OCTET * slot_bytes,
        }
    }

    /// The kernel of this shape.
    pub(super) fn kernel_name(&self, format: SliceFormat, view: WeightView) -> String {
        let stem = kernel_stem(format, view);
        let octets = if self.block_octets == 2 { "_2" } else { "" };
        format!("{stem}_{}{octets}", 8 * self.row_groups)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::Device;
    use crate::kernels::skinny_weights::SkinnyWeights;

    /// Shared memory of an H200, an A100 and a workstation card.
    const BLOCK_SHARED_BYTES: [(usize, bool); 3] =
        [(232_448, true), (166_912, false), (101_376, true)];

    #[test]
    fn every_shape_has_a_ring_that_fits() {
        let device = Device::host(Some(1)).unwrap();
        for in_features in [64, 1000, 2560, 5120, 6144, 17408] {
            let bf16 = SkinnyWeights::of_bf16(&device, 16, in_features, |_, _| {}).unwrap();
            let mut w12 = bf16.clone();
            w12.format = SliceFormat::W12;
            for (block_shared_bytes, has_clusters) in BLOCK_SHARED_BYTES {
                let limits = Limits {
                    num_multiprocessors: 132,
                    block_shared_bytes,
                    has_clusters,
                };
                for (weights, view) in [
                    (&bf16, WeightView::Exact),
                    (&w12, WeightView::Exact),
                    (&w12, WeightView::Q),
                ] {
                    let stack = Stack::of([weights, weights].into_iter());
                    for num_rows in 1..=MAX_ROWS {
                        let launch_rows = WarpConfig::launch_rows(stack, view, num_rows, limits);
                        assert!(launch_rows == num_rows || launch_rows.is_multiple_of(8));
                        let config = WarpConfig::choose(stack, view, launch_rows, limits);
                        assert!(config.shared_bytes <= block_shared_bytes, "{config:?}");
                        assert!(
                            config.ring_slots >= 1,
                            "{in_features} {num_rows} {config:?}"
                        );
                    }
                }
            }
        }
    }
}
