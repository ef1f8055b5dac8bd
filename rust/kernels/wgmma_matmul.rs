//! Launching `cuda/include/wgmma_matmul.cuh`: matmuls of more than a few rows on Hopper, with the bits of all others.
//!
//! [`WgmmaConfig`] says which rows go there and what a launch takes. None of it changes a sum.

use super::matmul_rows::{ArrangedRows, GROUP_ROWS, MAX_PLAIN_ROWS};
use super::skinny_matmul::{MatmulParams, Stack};
use super::skinny_weights::{OCTET, SliceFormat, SliceMap, TILE_CHANNELS, TILE_COLUMNS};
use super::w12_matmul::WeightView;
use crate::device::cuda::{CudaDevice, KernelSource, Launch, Limits, Shape};
use crate::error::DeviceError;

/// Warps of a block that multiply no tile: a warpgroup of its own, three of which bring weights and rows and signal to others.
const OTHER_WARPS: usize = 4;
/// Blocks of a cluster: they share the activations that they bring.
const CLUSTER_BLOCKS: usize = 2;
/// Bytes of eight rows of a super-tile of columns.
const ROW_GROUP_BYTES: usize = GROUP_ROWS * TILE_COLUMNS * 2;
/// Bytes of a warp's sums of one row.
const ROW_SUM_BYTES: usize = TILE_CHANNELS * size_of::<f32>();
/// Bytes of the barriers of as many slots as there may be, and of what a block's warps tell each other.
const BARRIER_BYTES: usize = 1152;
/// Shared memory that is left free beside a block of no more than [`HALF_TILE_ROWS`], for one of the small kernel between two
/// matmuls: 1 KB that the system takes for any block and 1 KB for itself. `NEIGHBOUR_THREADS` of `wgmma_matmul.cuh` are its
/// registers.
const NEIGHBOUR_BYTES: usize = 2048;
const WARP_LANES: usize = 32;
/// Columns with which every slice has a super-tile, as the kernel takes for granted.
const MIN_COLUMNS: usize = OCTET * TILE_COLUMNS;
/// Slots of a warp's ring beyond which nothing is gained.
const MAX_RING_SLOTS: usize = 3;
/// Super-tiles of activations without which the multiplying warps wait for them, and with which they never do.
const ROW_SLOTS: [usize; 2] = [4, 12];
/// Rows of a tile, for which there are kernels; of those for up to 32 rows W12's alone.
const TILE_ROWS: [usize; 5] = [16, 32, 48, 64, MAX_TILE_ROWS];
const MAX_TILE_ROWS: usize = 128;
/// A rest of no more than these gets a launch of its own, with a smaller tile.
const HALF_TILE_ROWS: usize = MAX_TILE_ROWS / 2;

/// How a launch with wgmma is laid out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct WgmmaConfig {
    /// Rows that one instruction multiplies, of [`TILE_ROWS`].
    tile_rows: usize,
    /// Tiles of a unit that a block multiplies: one a warp.
    block_tiles: usize,
    /// Slices of a warp's ring.
    ring_slots: usize,
    /// Super-tiles of columns in the ring of activations.
    row_slots: usize,
    shared_bytes: usize,
}

impl WgmmaConfig {
    /// How many of `num_rows`, from the first on, are to be multiplied with wgmma where there is that: not a rest that one
    /// launch of mma.sync takes.
    pub(super) fn first_rows(num_rows: usize, in_features: usize, format: SliceFormat) -> usize {
        if in_features < MIN_COLUMNS {
            return 0;
        }
        let rest = num_rows % MAX_TILE_ROWS;
        if rest <= mma_rows(format) {
            num_rows - rest
        } else {
            num_rows
        }
    }

    /// Rows of the first of the launches that multiply `num_rows` with wgmma.
    pub(super) fn launch_rows(num_rows: usize) -> usize {
        match num_rows % MAX_TILE_ROWS {
            1..=HALF_TILE_ROWS if num_rows > MAX_TILE_ROWS => {
                num_rows / MAX_TILE_ROWS * MAX_TILE_ROWS
            }
            _ => num_rows,
        }
    }

    fn choose(stack: Stack, view: WeightView, num_rows: usize, limits: Limits) -> Self {
        let tile_rows = tile_rows(num_rows);
        let tile_bytes = stack.format.read_bytes(view);
        let map = SliceMap::of(stack.in_features);
        let slot_bytes = stack.format.note_bytes() + map.slice_tiles() * tile_bytes;
        let block_tiles = block_tiles(stack.format, tile_rows);
        let step_bytes = block_tiles * slot_bytes;
        let row_slot_bytes = tile_rows / GROUP_ROWS * ROW_GROUP_BYTES;
        let [few, many] = ROW_SLOTS;
        let all = limits.block_shared_bytes.saturating_sub(BARRIER_BYTES);
        let slots_in = |room: usize| {
            (room.saturating_sub(few * row_slot_bytes) / step_bytes).clamp(1, MAX_RING_SLOTS)
        };
        let ring_slots = slots_in(all);
        let beside_neighbour = all.saturating_sub(NEIGHBOUR_BYTES);
        // A slot of the ring is worth more.
        let has_neighbour = tile_rows <= HALF_TILE_ROWS && slots_in(beside_neighbour) == ring_slots;
        let room = if has_neighbour { beside_neighbour } else { all };
        let row_slots = (room.saturating_sub(ring_slots * step_bytes) / row_slot_bytes).min(many);
        Self {
            tile_rows,
            block_tiles,
            ring_slots,
            row_slots,
            shared_bytes: BARRIER_BYTES + ring_slots * step_bytes + row_slots * row_slot_bytes,
        }
    }
}

/// With no more rows than these, mma.sync is faster; at most what one of its launches multiplies, and no fewer than are
/// never arranged.
fn mma_rows(format: SliceFormat) -> usize {
    match format {
        SliceFormat::W12 => MAX_PLAIN_ROWS,
        _ => 32,
    }
}

fn tile_rows(num_rows: usize) -> usize {
    let fits = |rows: &usize| num_rows <= *rows;
    TILE_ROWS.into_iter().find(fits).unwrap_or(MAX_TILE_ROWS)
}

/// Tiles that a block multiplies; `BLOCK_TILES` of `wgmma_matmul.cuh`.
fn block_tiles(format: SliceFormat, tile_rows: usize) -> usize {
    match format {
        SliceFormat::W12 if tile_rows <= 64 => 12,
        _ => 8,
    }
}

/// Units of a cluster's channels.
fn num_units(stack: Stack, tile_rows: usize) -> usize {
    let unit_tiles = block_tiles(stack.format, tile_rows) * CLUSTER_BLOCKS;
    stack.num_tiles.div_ceil(unit_tiles)
}

/// Runs of slices, one for each of up to `max_clusters` clusters: their number, their slices, and how many have one more. A
/// run is an octet at least: the kernel takes for granted that no octet is cut twice.
fn equal_runs(num_octets: usize, max_clusters: usize) -> (usize, usize, usize) {
    let num_runs = max_clusters.min(num_octets).max(1);
    let num_slices = num_octets * OCTET;
    (num_runs, num_slices / num_runs, num_slices % num_runs)
}

/// `WgmmaParams` of `cluster_run.cuh`.
#[repr(C)]
#[derive(Clone, Copy)]
struct WgmmaParams {
    matmul: MatmulParams,
    totals: u64,
    cut_sums: u64,
    cut_flags: u64,
    octet_counts: u64,
    row_groups: u32,
    row_stride: u32,
    row_tiles: u32,
    num_units: u32,
    row_slots: u32,
    is_strided: u32,
}

/// The first rows of a multiplication, which wgmma takes.
pub(super) struct WgmmaMatmul {
    pub(super) source: &'static KernelSource,
    pub(super) stem: &'static str,
    pub(super) view: WeightView,
    pub(super) num_rows: usize,
}

impl WgmmaMatmul {
    /// What the names of a format's kernels begin with, if there are some.
    pub(super) fn stem_of(format: SliceFormat, view: WeightView) -> Option<&'static str> {
        match (format, view) {
            (SliceFormat::Bf16, _) => Some("bf16_matmul"),
            (SliceFormat::W12, WeightView::Exact) => Some("w12_matmul"),
            (SliceFormat::W12, WeightView::Q) => Some("w12_matmul_q"),
            (SliceFormat::Fp8 { .. }, _) => None,
        }
    }

    /// Whether half of the clusters that a GPU holds find something to do: a run is an octet at least. For matrices with
    /// less, mma.sync is faster with the rows of one of its launches: it shares out single tiles.
    pub(super) fn has_work(&self, stack: Stack, limits: Limits) -> bool {
        let num_units = num_units(stack, tile_rows(self.num_rows));
        let num_runs = num_units * SliceMap::of(stack.in_features).num_octets;
        2 * num_runs >= limits.num_multiprocessors / CLUSTER_BLOCKS
    }

    /// Bytes of `num_rows` arranged rows in as few groups as there may be.
    pub(super) fn row_bytes(num_rows: usize, in_features: usize) -> usize {
        num_rows.div_ceil(GROUP_ROWS) * in_features.div_ceil(TILE_COLUMNS) * ROW_GROUP_BYTES
    }

    /// Scratch that multiplying takes.
    pub(super) fn scratch_bytes(&self, stack: Stack, num_multiprocessors: usize) -> usize {
        let tile_rows = tile_rows(self.num_rows);
        self.places(stack, self.num_rows, tile_rows, num_multiprocessors)[3]
    }

    /// Where, in scratch, a block's own totals, sums of cut octets and sums of shared units begin, and all ends.
    fn places(
        &self,
        stack: Stack,
        num_rows: usize,
        tile_rows: usize,
        num_blocks: usize,
    ) -> [usize; 4] {
        let units = num_units(stack, tile_rows) * num_rows.div_ceil(tile_rows);
        let own = block_tiles(stack.format, tile_rows) * tile_rows * ROW_SUM_BYTES;
        let num_octets = SliceMap::of(stack.in_features).num_octets;
        let shared = num_blocks.min(units * CLUSTER_BLOCKS) * num_octets * own;
        let own = num_blocks * own;
        [0, own, 2 * own, 2 * own + shared]
    }

    /// Multiplies `params.num_rows` of `rows` from `first_row`, a multiple of eight, on; `params` are those of mma.sync.
    ///
    /// # Errors
    /// [`DeviceError`].
    pub(super) fn launch(
        &self,
        device: &CudaDevice,
        stack: Stack,
        params: MatmulParams,
        rows: ArrangedRows,
        first_row: usize,
    ) -> Result<(), DeviceError> {
        let limits = device.limits();
        let num_rows = params.num_rows as usize;
        let config = WgmmaConfig::choose(stack, self.view, num_rows, limits);
        let name = format!("{}_wgmma_{}", self.stem, config.tile_rows);
        let function = device.function(self.source, &name)?;
        device.allow_shared_bytes(&function, config.shared_bytes)?;
        let mut shape = Shape {
            num_blocks: CLUSTER_BLOCKS as u32,
            block_threads: ((config.block_tiles + OTHER_WARPS) * WARP_LANES) as u32,
            shared_bytes: config.shared_bytes as u32,
            cluster_blocks: CLUSTER_BLOCKS as u32,
        };
        let max_clusters = Launch::new(&function, shape, false)
            .max_clusters(device)?
            .min(limits.num_multiprocessors / CLUSTER_BLOCKS)
            // Where not even one fits, launching says so.
            .max(1);
        let row_tiles = num_rows.div_ceil(config.tile_rows);
        let num_units = num_units(stack, config.tile_rows) * row_tiles;
        // With several tiles of rows, and units that fill the GPU evenly, those that run at a time share weights.
        let num_turns = num_units.div_ceil(max_clusters);
        let is_strided = row_tiles > 1 && num_units * 10 >= num_turns * max_clusters * 9;
        let num_octets = num_units * params.num_octets as usize;
        let (num_clusters, run_len, longer_runs) = if is_strided {
            (max_clusters.min(num_units), 0, 0)
        } else {
            equal_runs(num_octets, max_clusters)
        };
        let num_blocks = num_clusters * CLUSTER_BLOCKS;
        shape.num_blocks = num_blocks as u32;
        let [totals, cut_sums, octet_sums, end] =
            self.places(stack, num_rows, config.tile_rows, num_blocks);
        let scratch = device.scratch(end)?;
        let flags = device.block_flags();
        let num_flags = num_blocks * config.block_tiles;
        let params = WgmmaParams {
            matmul: MatmulParams {
                x: rows.address + (first_row / GROUP_ROWS * ROW_GROUP_BYTES) as u64,
                octet_sums: scratch + octet_sums as u64,
                ring_slots: config.ring_slots as u32,
                run_len: run_len as u32,
                longer_runs: longer_runs as u32,
                ..params
            },
            totals: scratch + totals as u64,
            cut_sums: scratch + cut_sums as u64,
            cut_flags: flags,
            octet_counts: flags + (num_flags * size_of::<u32>()) as u64,
            row_groups: num_rows.div_ceil(GROUP_ROWS) as u32,
            row_stride: rows.row_groups,
            row_tiles: row_tiles as u32,
            num_units: num_units as u32,
            row_slots: config.row_slots as u32,
            is_strided: u32::from(is_strided),
        };
        let launch = Launch::new(&function, shape, true);
        // SAFETY: `params` mirrors the kernel's. Weights, rows and results are as long as the shapes ask, which the packer
        // and the caller saw to; the scratch was asked for just now, and there are flags for every block that the GPU
        // holds. No more blocks than it holds at a time, so they may wait for each other.
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

    fn stack(format: SliceFormat, out_features: usize, in_features: usize) -> Stack {
        Stack {
            format,
            in_features,
            num_tiles: out_features.div_ceil(TILE_CHANNELS),
        }
    }

    #[test]
    fn every_shape_has_both_rings() {
        for in_features in [512, 1000, 2560, 5120, 6144, 17408] {
            for (format, view) in [
                (SliceFormat::Bf16, WeightView::Exact),
                (SliceFormat::W12, WeightView::Exact),
                (SliceFormat::W12, WeightView::Q),
            ] {
                for num_rows in [1, 9, 17, 33, 64, 65, 300] {
                    let config =
                        WgmmaConfig::choose(stack(format, 4096, in_features), view, num_rows, H200);
                    assert!(config.shared_bytes <= H200.block_shared_bytes, "{config:?}");
                    assert!(config.ring_slots >= 2, "{in_features} {config:?}");
                    assert!(config.row_slots >= 4, "{in_features} {config:?}");
                }
            }
        }
    }

    #[test]
    fn room_beside_a_block_costs_no_slot_of_its_ring() {
        for (format, in_features, num_rows, ring_slots, has_neighbour) in [
            (SliceFormat::W12, 5120, 32, 2, true),
            (SliceFormat::W12, 6144, 32, 3, true),
            (SliceFormat::Bf16, 5120, 64, 2, true),
            (SliceFormat::Bf16, 4096, 64, 3, false),
            (SliceFormat::Bf16, 5120, 128, 2, false),
        ] {
            let stack = stack(format, 4096, in_features);
            let config = WgmmaConfig::choose(stack, WeightView::Exact, num_rows, H200);
            let left = H200.block_shared_bytes - config.shared_bytes;
            assert_eq!(config.ring_slots, ring_slots, "{config:?}");
            assert_eq!(left >= NEIGHBOUR_BYTES, has_neighbour, "{config:?}");
        }
    }

    #[test]
    fn runs_share_all_slices_and_are_an_octet_at_least() {
        for max_clusters in [1, 2, 5, 60, 66] {
            for num_octets in 1..300 {
                let (num_runs, len, longer) = equal_runs(num_octets, max_clusters);
                assert!(num_runs <= max_clusters && longer < num_runs && len >= OCTET);
                assert_eq!(num_runs * len + longer, num_octets * OCTET);
            }
        }
    }

    #[test]
    fn small_matrices_are_left_to_mma_sync() {
        for (out_features, in_features, has_work) in [
            (5120, 6144, true),
            (16384, 5120, true),
            (2048, 5120, false),
            // A 4B's: all but gate and up together.
            (12288, 2560, false),
            (2560, 9216, false),
            (18432, 2560, true),
        ] {
            let wgmma = WgmmaMatmul {
                source: KernelSource::of("w12_matmul"),
                stem: "w12_matmul",
                view: WeightView::Exact,
                num_rows: 32,
            };
            let stack = stack(SliceFormat::W12, out_features, in_features);
            assert_eq!(
                wgmma.has_work(stack, H200),
                has_work,
                "{out_features} x {in_features}"
            );
        }
    }

    #[test]
    fn rows_that_nobody_arranges_are_left_to_mma_sync() {
        for format in [SliceFormat::W12, SliceFormat::Bf16] {
            for num_rows in 0..=MAX_PLAIN_ROWS {
                assert_eq!(WgmmaConfig::first_rows(num_rows, 5120, format), 0);
            }
        }
    }

    #[test]
    fn rows_are_shared_out_between_instructions() {
        for (num_rows, wgmma, launches) in [
            (8, 0, vec![]),
            (9, 9, vec![9]),
            (33, 33, vec![33]),
            (100, 100, vec![100]),
            (136, 128, vec![128]),
            (144, 144, vec![128, 16]),
            (300, 300, vec![256, 44]),
            (360, 360, vec![360]),
        ] {
            assert_eq!(
                WgmmaConfig::first_rows(num_rows, 512, SliceFormat::W12),
                wgmma,
                "{num_rows}"
            );
            assert_eq!(WgmmaConfig::first_rows(num_rows, 448, SliceFormat::W12), 0);
            let mut left = wgmma;
            let mut got = Vec::new();
            while left > 0 {
                got.push(WgmmaConfig::launch_rows(left));
                left -= got[got.len() - 1];
            }
            assert_eq!(got, launches, "{num_rows}");
        }
    }
}
