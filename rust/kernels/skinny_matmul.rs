//! Launching the CUDA matmuls of `cuda/include/skinny_matmul.cuh`: what `bf16_matmul`, `w12_matmul` and
//! `fp8_matmul` share.
//!
//! [`SkinnyConfig`] is the one home of tile and ring sizes. It may depend on the number of rows and of matrices: how
//! slices are shared out among blocks changes no sum, only [`SliceMap`] does, and that follows from K alone.

use super::bf16_matmul::Epilogue;
use super::matmul_rows::{ArrangedRows, GROUP_ROWS, MatmulInput};
use super::row_format::RowFormat;
use super::skinny_weights::{OCTET, SkinnyWeights, SliceFormat, SliceMap, TILE_CHANNELS};
use super::w12_matmul::WeightView;
use super::wgmma_matmul::{WgmmaConfig, WgmmaMatmul};
use crate::device::Buffer;
use crate::device::cuda::{Arch, CudaDevice, KernelSource, Launch, Limits, Shape};
use crate::error::{DeviceError, KernelError};

/// Matrices of one launch; `MAX_PARTS` of `slice_sums.cuh`.
const MAX_PARTS: usize = 4;
/// Rows that one launch multiplies at most.
const MAX_ROWS: usize = 32;
const WARP_LANES: usize = 32;
const BLOCK_THREADS: usize = OCTET * WARP_LANES;
/// Bytes between the rows of a slice sum.
const SUM_ROW_BYTES: usize = 80;
/// Units whose slice sums wait to be added.
const SUM_BUFFERS: usize = 2;
/// Slices of a ring beyond which nothing is gained.
const MAX_RING_SLOTS: usize = 16;
const BARRIER_BYTES: usize = 8;

/// What the matrices of a launch have in common, and their tiles.
#[derive(Clone, Copy, Debug)]
pub(super) struct Stack {
    pub(super) format: SliceFormat,
    pub(super) in_features: usize,
    pub(super) num_tiles: usize,
}

impl Stack {
    fn of<'a>(matrices: impl Iterator<Item = &'a SkinnyWeights>) -> Self {
        let mut stack = Self {
            format: SliceFormat::Bf16,
            in_features: 0,
            num_tiles: 0,
        };
        for matrix in matrices {
            stack.format = match (stack.format, matrix.format) {
                (
                    SliceFormat::Fp8 {
                        has_short_scales: all,
                    },
                    SliceFormat::Fp8 { has_short_scales },
                ) => SliceFormat::Fp8 {
                    has_short_scales: all && has_short_scales,
                },
                (_, format) => format,
            };
            stack.in_features = matrix.in_features;
            stack.num_tiles += matrix.out_features.div_ceil(TILE_CHANNELS);
        }
        stack
    }
}

/// How one multiplication is spread over a GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct SkinnyConfig {
    /// Groups of eight rows.
    row_groups: usize,
    /// Octets that a block holds.
    block_octets: usize,
    /// Blocks that hold all octets of a tile between them and talk through shared memory; 1 without.
    cluster_blocks: usize,
    inbox_slots: usize,
    ring_slots: usize,
    shared_bytes: usize,
}

impl SkinnyConfig {
    /// Rows of the first of the launches that multiply `num_rows`: as many as leave shared memory for a ring. Slices, and
    /// so all sums, are the same whatever it is.
    fn launch_rows(stack: Stack, view: WeightView, num_rows: usize, limits: Limits) -> usize {
        let fits = |rows: &usize| Self::choose(stack, view, *rows, limits).ring_slots > 0;
        let most = num_rows.min(MAX_ROWS);
        let fewer = (1..most.div_ceil(8)).rev().map(|groups| 8 * groups);
        std::iter::once(most)
            .chain(fewer)
            .find(fits)
            .unwrap_or(most.min(8))
    }

    fn choose(stack: Stack, view: WeightView, num_rows: usize, limits: Limits) -> Self {
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
        // matrix is so small that its end is most of it. FP8 decodes with as many instructions.
        let is_tight = stack.format != SliceFormat::Bf16 && row_groups > 2;
        let in_cluster = limits.has_clusters
            && (2..=8).contains(&num_groups)
            && (!is_tight || stack.num_tiles <= limits.num_multiprocessors);
        let cluster_blocks = if in_cluster { num_groups } else { 1 };
        let tile_bytes = stack.format.read_bytes(view);
        let slot_bytes = stack.format.note_bytes() + map.slice_tiles() * tile_bytes + BARRIER_BYTES;
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
    fn kernel_name(&self, format: SliceFormat, view: WeightView, rows: RowFormat) -> String {
        let stem = match (format, view, rows) {
            (SliceFormat::Bf16, ..) => "bf16_matmul",
            (SliceFormat::W12, WeightView::Exact, _) => "w12_matmul",
            (SliceFormat::W12, WeightView::Q, _) => "w12_matmul_q",
            (SliceFormat::Fp8 { .. }, _, RowFormat::E4m3) => "fp8_w8a8_matmul",
            (
                SliceFormat::Fp8 {
                    has_short_scales: true,
                },
                ..,
            ) => "fp8_matmul_short",
            (SliceFormat::Fp8 { .. }, ..) => "fp8_matmul",
        };
        let octets = if self.block_octets == 2 { "_2" } else { "" };
        format!("{stem}_{}{octets}", 8 * self.row_groups)
    }
}

/// `MatmulPart` of `slice_sums.cuh`.
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub(super) struct MatmulPart {
    weights: u64,
    escape_starts: u64,
    escapes: u64,
    y: u64,
    out_features: u32,
    end_tile: u32,
}

/// `MatmulParams` of `slice_sums.cuh`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct MatmulParams {
    pub(super) parts: [MatmulPart; MAX_PARTS],
    pub(super) x: u64,
    pub(super) octet_sums: u64,
    pub(super) grid_barrier: u64,
    pub(super) num_rows: u32,
    pub(super) num_tiles: u32,
    pub(super) in_features: u32,
    pub(super) num_octets: u32,
    pub(super) log2_slices: u32,
    pub(super) slice_tiles: u32,
    pub(super) ring_slots: u32,
    pub(super) cluster_blocks: u32,
    pub(super) inbox_slots: u32,
    pub(super) adds_to_output: u32,
    pub(super) run_len: u32,
    pub(super) longer_runs: u32,
}

/// `RoundRowsParams` of `skinny_matmul.cuh`.
#[repr(C)]
#[derive(Clone, Copy)]
struct RoundRowsParams {
    x: u64,
    rounded: u64,
    arranged: ArrangedRows,
    num_rows: u32,
    in_features: u32,
}

/// One matrix and where its products go.
#[derive(Clone, Copy)]
pub(super) struct SkinnyProduct<'a> {
    pub(super) weights: &'a SkinnyWeights,
    pub(super) y: u64,
}

impl<'a> SkinnyProduct<'a> {
    /// `weights` with the address of `y`.
    ///
    /// # Errors
    /// [`KernelError::WrongDevice`] when one of them is not on a GPU.
    pub(super) fn new(
        kernel: &'static str,
        weights: Option<&'a SkinnyWeights>,
        y: &Buffer<f32>,
    ) -> Result<Self, KernelError> {
        let on_cuda = |argument| KernelError::WrongDevice {
            kernel,
            argument,
            expected: "cuda",
        };
        Ok(Self {
            weights: weights.ok_or(on_cuda("weight"))?,
            y: y.cuda_address().ok_or(on_cuda("y"))?,
        })
    }
}

/// Rows times matrices of one K and format.
pub(super) struct SkinnyMatmul<'a> {
    pub(super) kernel: &'static str,
    pub(super) products: &'a [SkinnyProduct<'a>],
    pub(super) view: WeightView,
    pub(super) rows: RowFormat,
    pub(super) num_rows: usize,
    pub(super) epilogue: Epilogue,
}

impl SkinnyMatmul<'_> {
    /// Multiplies rows, made as [`RowFormat`] says on the way where they are not.
    ///
    /// # Errors
    /// [`KernelError::WrongDevice`], [`KernelError::Device`].
    pub(super) fn run(&self, device: &CudaDevice, x: MatmulInput<'_>) -> Result<(), KernelError> {
        let at = x.cuda_address().ok_or(KernelError::WrongDevice {
            kernel: self.kernel,
            argument: "x",
            expected: "cuda",
        })?;
        if self.num_rows == 0 || self.products.is_empty() {
            return Ok(());
        }
        match (self.rows.entry(&x), x.arranged(self.in_features())) {
            (Some(entry), _) => self.launch_all(device, at, entry),
            (None, arranged) => self.launch_rounded(device, at, arranged.unwrap_or_default()),
        }
        .map_err(|source| KernelError::Device {
            kernel: self.kernel,
            source,
        })
    }

    fn launch_all(&self, device: &CudaDevice, x: u64, entry: &str) -> Result<(), DeviceError> {
        let rounded_bytes = self.num_rows * self.rounded_row_bytes();
        let arranged_bytes = self.wgmma(device).map_or(0, |_| {
            WgmmaMatmul::row_bytes(self.num_rows, self.in_features())
        });
        let sums_bytes = self.scratch_bytes(device);
        let scratch = device.scratch(sums_bytes + arranged_bytes + rounded_bytes)?;
        let end = |num_bytes: usize| scratch + num_bytes as u64;
        let rounded = end(sums_bytes + arranged_bytes);
        let mut arranged = ArrangedRows::default();
        if arranged_bytes > 0 {
            arranged = ArrangedRows {
                address: end(sums_bytes),
                row_groups: self.num_rows.div_ceil(GROUP_ROWS) as u32,
            };
        }
        self.round_rows(device, entry, x, rounded, arranged)?;
        self.launch_rounded(device, rounded, arranged)
    }

    fn in_features(&self) -> usize {
        self.products[0].weights.in_features
    }

    /// Bytes of a row of activations as the matmul takes it.
    fn rounded_row_bytes(&self) -> usize {
        self.rows.row_bytes(self.in_features())
    }

    /// How the first rows are multiplied with wgmma, if any are.
    fn wgmma(&self, device: &CudaDevice) -> Option<WgmmaMatmul> {
        if device.arch() != Arch::Sm90a {
            return None;
        }
        let format = self.products[0].weights.format;
        let num_rows = WgmmaConfig::first_rows(self.num_rows, self.in_features(), format);
        let stem = WgmmaMatmul::stem_of(format, self.view)?;
        (num_rows > 0).then(|| WgmmaMatmul {
            source: self.source(),
            stem,
            view: self.view,
            num_rows,
        })
    }

    /// Scratch of the launches, besides rows.
    fn scratch_bytes(&self, device: &CudaDevice) -> usize {
        let launches = self.products.chunks(MAX_PARTS);
        let stacks = launches.map(|parts| Stack::of(parts.iter().map(|p| p.weights)));
        let Some(wgmma) = self.wgmma(device) else {
            return self.sums_bytes();
        };
        let num_blocks = device.limits().num_multiprocessors;
        let bytes = stacks.map(|stack| wgmma.scratch_bytes(stack, num_blocks));
        bytes.max().unwrap_or(0).max(self.sums_bytes())
    }

    /// Scratch for the octet sums of one launch of mma.sync.
    fn sums_bytes(&self) -> usize {
        let launches = self.products.chunks(MAX_PARTS);
        let num_tiles = launches.map(|parts| Stack::of(parts.iter().map(|p| p.weights)).num_tiles);
        let num_channels = num_tiles.max().unwrap_or(0) * TILE_CHANNELS;
        let num_octets = SliceMap::of(self.in_features()).num_octets;
        num_channels * num_octets * MAX_ROWS * size_of::<f32>()
    }

    /// Multiplies rows that lie at `rounded` as [`RowFormat`] says, those for wgmma from where they are arranged.
    fn launch_rounded(
        &self,
        device: &CudaDevice,
        rounded: u64,
        arranged: ArrangedRows,
    ) -> Result<(), DeviceError> {
        let octet_sums = device.scratch(self.scratch_bytes(device))?;
        let wgmma = self.wgmma(device);
        for products in self.products.chunks(MAX_PARTS) {
            let stack = Stack::of(products.iter().map(|product| product.weights));
            let mut first = 0;
            let has_work = |wgmma: &&WgmmaMatmul| {
                self.num_rows > MAX_ROWS || wgmma.has_work(stack, device.limits())
            };
            if let Some(wgmma) = wgmma.as_ref().filter(has_work) {
                while first < wgmma.num_rows {
                    let num_rows = WgmmaConfig::launch_rows(wgmma.num_rows - first);
                    let params = self.params(products, first, num_rows);
                    wgmma.launch(device, stack, params, arranged, first)?;
                    first += num_rows;
                }
            }
            while first < self.num_rows {
                let left = self.num_rows - first;
                let num_rows = SkinnyConfig::launch_rows(stack, self.view, left, device.limits());
                let params = MatmulParams {
                    x: rounded + (first * self.rounded_row_bytes()) as u64,
                    octet_sums,
                    grid_barrier: device.grid_barrier(),
                    ..self.params(products, first, num_rows)
                };
                self.launch(device, stack, params)?;
                first += num_rows;
            }
        }
        Ok(())
    }

    fn round_rows(
        &self,
        device: &CudaDevice,
        entry: &str,
        x: u64,
        rounded: u64,
        arranged: ArrangedRows,
    ) -> Result<(), DeviceError> {
        let function = device.function(self.source(), entry)?;
        let num_values = self.num_rows * self.in_features();
        let shape = Shape {
            num_blocks: num_values.div_ceil(512).min(1024) as u32,
            block_threads: 256,
            shared_bytes: 0,
            cluster_blocks: 1,
        };
        let params = RoundRowsParams {
            x,
            rounded,
            arranged,
            num_rows: self.num_rows as u32,
            in_features: self.in_features() as u32,
        };
        let launch = Launch::new(&function, shape, device.limits().has_clusters);
        // SAFETY: `params` mirrors the kernel's; `check` saw that `x` holds the rows, and the scratch has room.
        unsafe { launch.run(device, &params) }
    }

    fn source(&self) -> &'static KernelSource {
        KernelSource::of(self.kernel)
    }

    /// All but addresses of the activations and the scratch, for rows from `first` on.
    fn params(
        &self,
        products: &[SkinnyProduct<'_>],
        first: usize,
        num_rows: usize,
    ) -> MatmulParams {
        let at = |address: Option<u64>| address.unwrap_or(0);
        let map = SliceMap::of(self.in_features());
        let mut parts = [MatmulPart::default(); MAX_PARTS];
        let mut num_tiles = 0;
        for (part, product) in parts.iter_mut().zip(products) {
            let weights = product.weights;
            num_tiles += weights.out_features.div_ceil(TILE_CHANNELS);
            let row_bytes = weights.out_features * size_of::<f32>();
            *part = MatmulPart {
                weights: at(weights.slices.cuda_address()),
                escape_starts: at(weights.escape_starts.cuda_address()),
                escapes: at(weights.escapes.cuda_address()),
                y: product.y + (first * row_bytes) as u64,
                out_features: weights.out_features as u32,
                end_tile: num_tiles as u32,
            };
        }
        MatmulParams {
            parts,
            x: 0,
            octet_sums: 0,
            grid_barrier: 0,
            num_rows: num_rows as u32,
            num_tiles: num_tiles as u32,
            in_features: self.in_features() as u32,
            num_octets: map.num_octets as u32,
            log2_slices: map.num_slices().ilog2(),
            slice_tiles: map.slice_tiles() as u32,
            ring_slots: 0,
            cluster_blocks: 1,
            inbox_slots: 1,
            adds_to_output: u32::from(self.epilogue == Epilogue::AddToOutput),
            run_len: 0,
            longer_runs: 0,
        }
    }

    /// Launches one multiplication of up to 32 rows.
    fn launch(
        &self,
        device: &CudaDevice,
        stack: Stack,
        params: MatmulParams,
    ) -> Result<(), DeviceError> {
        let limits = device.limits();
        let config = SkinnyConfig::choose(stack, self.view, params.num_rows as usize, limits);
        let name = config.kernel_name(stack.format, self.view, self.rows);
        let function = device.function(self.source(), &name)?;
        device.allow_shared_bytes(&function, config.shared_bytes)?;
        let mut shape = Shape {
            num_blocks: 0,
            block_threads: BLOCK_THREADS as u32,
            shared_bytes: config.shared_bytes as u32,
            cluster_blocks: config.cluster_blocks as u32,
        };
        let (max_runs, num_units) = if config.cluster_blocks > 1 {
            shape.num_blocks = shape.cluster_blocks;
            let max_clusters = Launch::new(&function, shape, false).max_clusters(device)?;
            (max_clusters, stack.num_tiles)
        } else {
            let num_groups = params.num_octets as usize / config.block_octets;
            (limits.num_multiprocessors, stack.num_tiles * num_groups)
        };
        // Where not even one fits, launching says so.
        let num_runs = max_runs.min(num_units).max(1);
        shape.num_blocks = (num_runs * config.cluster_blocks) as u32;
        let params = MatmulParams {
            ring_slots: config.ring_slots as u32,
            cluster_blocks: config.cluster_blocks as u32,
            inbox_slots: config.inbox_slots as u32,
            run_len: (num_units / num_runs) as u32,
            longer_runs: (num_units % num_runs) as u32,
            ..params
        };
        let launch = Launch::new(&function, shape, limits.has_clusters);
        // SAFETY: `params` mirrors the kernel's. Weights, results and scratch are as long as the shapes ask: the packer,
        // `check` and `launch_all` saw to that. No more blocks than the GPU holds at a time, so they may wait for each
        // other.
        unsafe { launch.run(device, &params) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::Device;

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
            let mut fp8 = bf16.clone();
            fp8.format = SliceFormat::Fp8 {
                has_short_scales: false,
            };
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
                    (&fp8, WeightView::Exact),
                ] {
                    let stack = Stack::of([weights, weights].into_iter());
                    for num_rows in 1..=MAX_ROWS {
                        let launch_rows = SkinnyConfig::launch_rows(stack, view, num_rows, limits);
                        assert!(launch_rows == num_rows || launch_rows.is_multiple_of(8));
                        let config = SkinnyConfig::choose(stack, view, launch_rows, limits);
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
