//! Launches on CUDA that every call starts with: rows to codes, then the head's codes past them.

use super::LmHeadScreen;
use super::head::ScreenedHead;
use super::head_codes::{CHUNK_COLUMNS, HeadCodes};
use super::scan_config::{ScanConfig, ScanKind};
use crate::device::Buffer;
use crate::device::cuda::{CudaDevice, Limits, Shape};
use crate::error::KernelError;
use crate::kernels::Kernel;
use crate::kernels::launcher::Launcher;
use crate::kernels::skinny_weights::TILE_COLUMNS;

pub(super) const BLOCK_THREADS: usize = 256;
/// Threads that code a row.
const ROW_THREADS: usize = 1024;
/// Two warpgroups and a warp that asks for codes.
const WGMMA_THREADS: usize = 2 * 128 + 32;
/// Blocks a multiprocessor for kernels that take work in turn.
const TURN_BLOCKS: usize = 4;

/// `ScreenParams` of `screen.cuh`; null what a call has no use for.
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub(super) struct ScreenParams {
    pub(super) codes: u64,
    pub(super) bounds: u64,
    pub(super) exact: u64,
    pub(super) x: u64,
    pub(super) mask_starts: u64,
    pub(super) masked: u64,
    pub(super) row_codes: u64,
    pub(super) rounded: u64,
    pub(super) row_bounds: u64,
    pub(super) mask_bits: u64,
    pub(super) upper: u64,
    pub(super) group_upper: u64,
    pub(super) thresholds: u64,
    pub(super) survivors: u64,
    pub(super) counts: u64,
    pub(super) best: u64,
    pub(super) estimates: u64,
    pub(super) order: f64,
    pub(super) largest_norm: f64,
    pub(super) num_rows: u32,
    pub(super) vocab_size: u32,
    pub(super) in_features: u32,
    pub(super) num_tiles: u32,
    pub(super) num_chunks: u32,
    pub(super) max_survivors: u32,
    pub(super) num_octets: u32,
    pub(super) log2_slices: u32,
    pub(super) ring_slots: u32,
    pub(super) cluster_blocks: u32,
}

/// Hands out scratch.
#[derive(Default)]
pub(super) struct Scratch {
    pub(super) end: usize,
}

impl Scratch {
    /// Bytes from the start of `num_bytes`, on a line of their own.
    pub(super) fn take(&mut self, num_bytes: usize) -> usize {
        let start = self.end;
        self.end += num_bytes.next_multiple_of(256);
        start
    }
}

/// What a scan is for; `ScanGoal` of `screen.cuh`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ScanGoal {
    /// Which channels could hold a row's largest logit.
    Bounds,
    /// What the codes say that every logit is.
    Estimates,
}

/// Where a group of rows lies in scratch, in bytes from its start.
pub(super) struct CodedRows {
    codes: usize,
    rounded: usize,
    bounds: usize,
    thresholds: usize,
}

/// The scans of a call.
pub(super) struct Scans<'a> {
    pub(super) launcher: Launcher<'a>,
    pub(super) limits: Limits,
    pub(super) codes: &'a HeadCodes,
    head: &'a ScreenedHead,
    config: ScanConfig,
}

impl<'a> Scans<'a> {
    /// Chooses how `num_rows` rows pass `head`.
    ///
    /// # Errors
    /// [`KernelError::WrongDevice`] when the head was coded on the host.
    pub(super) fn new(
        device: &'a CudaDevice,
        head: &'a ScreenedHead,
        num_rows: usize,
    ) -> Result<Self, KernelError> {
        let codes = head.on_cuda().ok_or(KernelError::WrongDevice {
            kernel: LmHeadScreen::NAME,
            argument: "head",
            expected: "cuda",
        })?;
        let limits = device.limits();
        Ok(Self {
            launcher: Launcher::of::<LmHeadScreen>(device),
            limits,
            codes,
            head,
            config: ScanConfig::choose(codes.scan, limits, codes.num_chunks(), num_rows),
        })
    }

    /// Rows of one scan at most.
    pub(super) fn rows(&self) -> usize {
        self.config.rows
    }

    /// Blocks of a kernel that takes work in turn.
    pub(super) fn turns(&self) -> Shape {
        Shape::of_blocks(TURN_BLOCKS * self.limits.num_multiprocessors, BLOCK_THREADS)
    }

    /// Takes scratch for a group of rows.
    pub(super) fn take(&self, scratch: &mut Scratch) -> CodedRows {
        let rows = self.rows();
        let padded = self.head.in_features().next_multiple_of(TILE_COLUMNS);
        CodedRows {
            codes: scratch.take(self.codes.num_chunks() * CHUNK_COLUMNS * 2 * rows),
            rounded: scratch.take(rows * padded * size_of::<u16>()),
            bounds: scratch.take(rows * 16),
            thresholds: scratch.take(rows * size_of::<u32>()),
        }
    }

    /// What the launches of either goal are told about `x` and the head; `start` is that of the scratch.
    ///
    /// # Errors
    /// [`KernelError::WrongDevice`] when something lies on the host.
    pub(super) fn params(
        &self,
        x: &Buffer<f32>,
        coded: &CodedRows,
        start: u64,
    ) -> Result<ScreenParams, KernelError> {
        let (head, codes, launcher) = (self.head, self.codes, &self.launcher);
        let at = |offset: usize| start + offset as u64;
        Ok(ScreenParams {
            codes: launcher.buffer("head", &codes.codes)?,
            bounds: launcher.buffer("head", &codes.bounds)?,
            x: launcher.buffer("x", x)?,
            row_codes: at(coded.codes),
            rounded: at(coded.rounded),
            row_bounds: at(coded.bounds),
            thresholds: at(coded.thresholds),
            largest_norm: head.largest_norm(),
            vocab_size: head.out_features() as u32,
            in_features: head.in_features() as u32,
            num_tiles: (codes.num_channels() / HeadCodes::TILE_CHANNELS) as u32,
            num_chunks: codes.num_chunks() as u32,
            cluster_blocks: 1,
            ..ScreenParams::default()
        })
    }

    /// `params` of each group of rows: where its `x` begins and how many there are.
    pub(super) fn groups(
        &self,
        params: ScreenParams,
        num_rows: usize,
    ) -> impl Iterator<Item = (usize, ScreenParams)> + use<> {
        let rows = self.rows();
        (0..num_rows).step_by(rows).map(move |first| {
            let values = first * params.in_features as usize;
            let of_group = ScreenParams {
                x: params.x + (values * size_of::<f32>()) as u64,
                num_rows: rows.min(num_rows - first) as u32,
                ..params
            };
            (first, of_group)
        })
    }

    /// Launches the coding of a group of rows and their scan.
    ///
    /// # Safety
    /// The fields of `params` that code_rows and a scan for `goal` use must hold: `x` and the masks the group's rows,
    /// everything else room for them.
    ///
    /// # Errors
    /// [`KernelError::Device`].
    pub(super) unsafe fn launch(
        &self,
        goal: ScanGoal,
        mut params: ScreenParams,
    ) -> Result<(), KernelError> {
        let Self {
            launcher, config, ..
        } = self;
        let rows = config.rows;
        let of_rows = Shape::of_blocks(params.num_rows as usize, ROW_THREADS);
        // SAFETY: `params` mirrors the kernel's; the caller's promise.
        unsafe { launcher.run(&format!("code_rows_{rows}"), of_rows, &params)? };
        let stem = match goal {
            ScanGoal::Bounds => "screen_scan",
            ScanGoal::Estimates => "estimate_scan",
        };
        let num_tiles = params.num_tiles as usize;
        let (entry, shape) = match config.kind {
            ScanKind::Mma => {
                let num_blocks = num_tiles.min(self.turns().num_blocks as usize);
                let shape = Shape::of_blocks(num_blocks, BLOCK_THREADS);
                (format!("{stem}_{rows}"), shape)
            }
            ScanKind::Wgmma {
                cluster_blocks,
                ring_slots,
                shared_bytes,
            } => {
                params.ring_slots = ring_slots as u32;
                params.cluster_blocks = cluster_blocks as u32;
                let entry = format!("{stem}_wgmma_{rows}");
                let mut shape = Shape {
                    shared_bytes: shared_bytes as u32,
                    cluster_blocks: cluster_blocks as u32,
                    ..Shape::of_blocks(cluster_blocks, WGMMA_THREADS)
                };
                let num_clusters = match cluster_blocks {
                    1 => self.limits.num_multiprocessors,
                    _ => launcher.max_clusters(&entry, shape)?,
                };
                shape.num_blocks = (num_clusters.min(num_tiles) * cluster_blocks) as u32;
                (entry, shape)
            }
        };
        // SAFETY: as above; the ring and the codes of the rows fit a block, and no more clusters run than the GPU holds at a
        // time.
        unsafe { launcher.run(&entry, shape, &params) }
    }
}
