//! How the codes of a head are scanned on a GPU: rows at a time, which instruction, and what a block keeps in shared memory.

use super::head_codes::{CHUNK_COLUMNS, HeadCodes, ScreenScan};
use crate::device::cuda::Limits;

/// Rows of one scan, at most.
const MAX_ROWS: usize = 32;
/// Columns of a stage of the wgmma scan's ring, in chunks, and its bytes.
const STAGE_CHUNKS: usize = 8;
const STAGE_BYTES: usize = STAGE_CHUNKS * HeadCodes::TILE_CHANNELS * CHUNK_COLUMNS;
/// Stages below which too little is under way, and beyond which nothing is gained.
const RING_SLOTS: std::ops::RangeInclusive<usize> = 4..=16;

/// How the codes of one group of rows are scanned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ScanConfig {
    /// Rows that the kernel takes, 8, 16 or 32.
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
        let rows = num_rows.clamp(8, MAX_ROWS).next_power_of_two();
        let kinds = [32, 16, 8].into_iter().filter(|&fewer| fewer <= rows);
        let wgmma =
            kinds
                .flat_map(|rows| [(rows, 1), (rows, 2)])
                .find_map(|(rows, cluster_blocks)| {
                    let kind = Self::wgmma(limits, num_chunks, rows, cluster_blocks)?;
                    Some(Self { rows, kind })
                });
        let mma = Self {
            rows,
            kind: ScanKind::Mma,
        };
        match scan {
            ScreenScan::Mma => mma,
            ScreenScan::Wgmma => wgmma.unwrap_or(mma),
        }
    }

    /// `ScanLayout` of `screen_scan_wgmma.cuh`; `None` if it leaves no room for a ring.
    fn wgmma(
        limits: Limits,
        num_chunks: usize,
        rows: usize,
        cluster_blocks: usize,
    ) -> Option<ScanKind> {
        let row_groups = rows / 8;
        // Blocks decide every other group of eight rows.
        if cluster_blocks > 1 && row_groups < 2 {
            return None;
        }
        let row_codes = num_chunks / cluster_blocks * 2 * rows * CHUNK_COLUMNS;
        let inboxes = match cluster_blocks {
            1 => 0,
            _ => 2 * row_groups * 128 * 16,
        };
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
            (5120, 17, 32, 2),
            (5120, 33, 32, 2),
            (3072, 32, 32, 1),
            (4096, 32, 32, 2),
            (8192, 32, 16, 2),
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
