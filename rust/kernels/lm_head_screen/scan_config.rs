//! How the codes of a head are scanned on a GPU: rows at a time, which instruction, and what a block keeps in shared memory.

use super::head_codes::{CHUNK_COLUMNS, HeadCodes, ScreenScan};
use crate::device::cuda::Limits;

/// Rows that kernels take: those of `mma` all but the last.
const KERNEL_ROWS: [usize; 4] = [8, 16, 32, 48];
const MAX_MMA_ROWS: usize = 32;
const MAX_WGMMA_ROWS: usize = 48;
/// Columns of a stage of the wgmma scan's ring, in chunks, and its bytes.
const STAGE_CHUNKS: usize = 8;
const STAGE_BYTES: usize = STAGE_CHUNKS * HeadCodes::TILE_CHANNELS * CHUNK_COLUMNS;
/// Stages below which too little is under way, and beyond which nothing is gained.
const RING_SLOTS: std::ops::RangeInclusive<usize> = 4..=16;
/// Stages for which a cluster of more blocks is not worth its exchanges: 32 rows of 5120 columns took 454 us with six of
/// them and two blocks, 474 with fifteen and four (both before the compiler knew how many blocks there are; two take 433 now).
const ENOUGH_SLOTS: usize = 6;

/// How the codes of one group of rows are scanned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ScanConfig {
    /// Rows that the kernel takes, one of [`KERNEL_ROWS`].
    pub(super) rows: usize,
    pub(super) kind: ScanKind,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ScanKind {
    /// `screen_scan.cuh`.
    Mma,
    /// `screen_scan_wgmma.cuh`.
    Wgmma {
        /// Blocks that share K.
        cluster_blocks: usize,
        ring_slots: usize,
        shared_bytes: usize,
    },
}

impl ScanConfig {
    /// The scan of `num_rows` rows, or of the first that one scan takes.
    pub(super) fn choose(
        scan: ScreenScan,
        limits: Limits,
        num_chunks: usize,
        num_rows: usize,
    ) -> Self {
        let mma = Self {
            rows: kernel_rows(num_rows, MAX_MMA_ROWS),
            kind: ScanKind::Mma,
        };
        if scan == ScreenScan::Mma {
            return mma;
        }
        let most = kernel_rows(num_rows, MAX_WGMMA_ROWS);
        let sizes = KERNEL_ROWS.into_iter().rev().filter(|&rows| rows <= most);
        let wgmma = sizes.filter_map(|rows| {
            let kind = Self::wgmma(limits, num_chunks, rows)?;
            Some(Self { rows, kind })
        });
        wgmma.into_iter().next().unwrap_or(mma)
    }

    /// By the fewest blocks that leave room for enough stages, or else for most.
    fn wgmma(limits: Limits, num_chunks: usize, rows: usize) -> Option<ScanKind> {
        let mut best = None;
        for cluster_blocks in [1, 2, 4] {
            let kind = Self::wgmma_of(limits, num_chunks, rows, cluster_blocks);
            let slots = |kind: Option<ScanKind>| match kind {
                Some(ScanKind::Wgmma { ring_slots, .. }) => ring_slots.min(ENOUGH_SLOTS),
                _ => 0,
            };
            if slots(kind) > slots(best) {
                best = kind;
            }
        }
        best
    }

    /// `ScanLayout` of `screen_scan_wgmma.cuh`; `None` if it leaves no room for a ring.
    fn wgmma_of(
        limits: Limits,
        num_chunks: usize,
        rows: usize,
        cluster_blocks: usize,
    ) -> Option<ScanKind> {
        let row_groups = rows / 8;
        // Blocks share out groups of eight rows, and stages of K.
        let is_shared = num_chunks.is_multiple_of(cluster_blocks * STAGE_CHUNKS);
        if cluster_blocks > row_groups || !is_shared {
            return None;
        }
        let row_codes = num_chunks / cluster_blocks * 2 * rows * CHUNK_COLUMNS;
        // Of two consumers: from every other block two float4 a thread and group of rows.
        let decided = row_groups.div_ceil(cluster_blocks);
        let inboxes = 2 * (cluster_blocks - 1) * decided * 2 * 128 * 16;
        let barriers = 8 * (1 + 2 * RING_SLOTS.end() + 2 * 3);
        let fixed = row_codes + inboxes + rows * 16 + barriers;
        let room = limits.block_shared_bytes.checked_sub(fixed)?;
        let ring_slots = (room / STAGE_BYTES).min(*RING_SLOTS.end());
        RING_SLOTS.contains(&ring_slots).then_some(ScanKind::Wgmma {
            cluster_blocks,
            ring_slots,
            shared_bytes: fixed + ring_slots * STAGE_BYTES,
        })
    }
}

/// The kernel for `num_rows` rows, or for an equal share of them where one scan takes `most`.
fn kernel_rows(num_rows: usize, most: usize) -> usize {
    let share = num_rows.div_ceil(num_rows.div_ceil(most).max(1));
    let fits = KERNEL_ROWS.into_iter().find(|&rows| rows >= share);
    fits.unwrap_or(most)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scans_fit_the_gpus_they_run_on() {
        let hopper = Limits {
            num_multiprocessors: 132,
            block_shared_bytes: 232_448,
            has_clusters: true,
        };
        let choose = |width: usize, num_rows| {
            let num_chunks = width.next_multiple_of(256) / CHUNK_COLUMNS;
            ScanConfig::choose(ScreenScan::Wgmma, hopper, num_chunks, num_rows)
        };
        for (width, num_rows, rows, blocks) in [
            (256, 1, 8, 1),
            (5120, 8, 8, 1),
            (5120, 9, 16, 1),
            (5120, 16, 16, 1),
            (5120, 17, 32, 2),
            (5120, 33, 48, 4),
            (5120, 48, 48, 4),
            (5120, 64, 32, 2),
            (5120, 65, 48, 4),
            (3072, 32, 32, 2),
            (4096, 32, 32, 2),
            (8192, 32, 32, 4),
            (4352, 32, 32, 2),
            (10_240, 5, 8, 1),
        ] {
            let config = choose(width, num_rows);
            let ScanKind::Wgmma {
                cluster_blocks,
                ring_slots,
                shared_bytes,
            } = config.kind
            else {
                panic!("{width} columns fit shared memory")
            };
            assert_eq!(
                (config.rows, cluster_blocks),
                (rows, blocks),
                "{width} {num_rows}"
            );
            assert!(RING_SLOTS.contains(&ring_slots) && shared_bytes <= 232_448);
        }
        assert_eq!(choose(1 << 16, 4).kind, ScanKind::Mma);
    }
}
