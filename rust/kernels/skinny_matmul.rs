//! Launching the CUDA matmuls of `cuda/include/{skinny,wgmma}_matmul.cuh`: what `bf16_matmul` and `w12_matmul` share.
//!
//! [`WarpConfig`] and [`GroupConfig`] are the one home of tile and ring sizes. They may depend on the number of rows and of
//! matrices: how slices are shared out among blocks changes no sum, only [`SliceMap`] does, and that follows from K alone.

mod group_config;
mod warp_config;

use group_config::GroupConfig;
use warp_config::WarpConfig;

use half::bf16;

use super::bf16_matmul::{Epilogue, PackedBf16};
use super::skinny_weights::{
    OCTET, SkinnyWeights, SliceFormat, SliceMap, TILE_CHANNELS, TILE_COLUMNS,
};
use super::w12_matmul::{PackedW12, WeightView};
use super::{check_len, check_size};
use crate::device::cuda::{Arch, CudaDevice, KernelSource, Launch, Shape};
use crate::device::{Buffer, Device};
use crate::error::{DeviceError, KernelError};

/// Matrices of one launch; `MAX_PARTS` of `slice_sums.cuh`.
const MAX_PARTS: usize = 4;
/// Rows that one launch multiplies at most, with activations in registers.
const MAX_ROWS: usize = 32;
/// Rows that activations in groups are padded to.
const ROUNDED_ROWS: usize = 64;
const WARP_LANES: usize = 32;
const BLOCK_THREADS: usize = OCTET * WARP_LANES;
const BARRIER_BYTES: usize = 8;

/// What the matrices of a launch have in common, and their tiles.
#[derive(Clone, Copy, Debug)]
struct Stack {
    format: SliceFormat,
    in_features: usize,
    num_tiles: usize,
}

impl Stack {
    fn of<'a>(matrices: impl Iterator<Item = &'a SkinnyWeights>) -> Self {
        let mut stack = Self {
            format: SliceFormat::Bf16,
            in_features: 0,
            num_tiles: 0,
        };
        for matrix in matrices {
            stack.format = matrix.format;
            stack.in_features = matrix.in_features;
            stack.num_tiles += matrix.out_features.div_ceil(TILE_CHANNELS);
        }
        stack
    }
}

impl Stack {
    /// Bytes of a slot of a warp's ring: the longest slice.
    fn slot_bytes(self, view: WeightView) -> usize {
        let tile_bytes = match view {
            WeightView::Exact => self.format.tile_bytes(),
            WeightView::Q => TILE_CHANNELS * TILE_COLUMNS,
        };
        self.format.note_bytes() + SliceMap::of(self.in_features).slice_tiles() * tile_bytes
    }
}

/// What the names of a format's kernels begin with.
fn kernel_stem(format: SliceFormat, view: WeightView) -> &'static str {
    match (format, view) {
        (SliceFormat::Bf16, _) => "bf16_matmul",
        (SliceFormat::W12, WeightView::Exact) => "w12_matmul",
        (SliceFormat::W12, WeightView::Q) => "w12_matmul_q",
    }
}

/// `MatmulPart` of `slice_sums.cuh`.
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct MatmulPart {
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
struct MatmulParams {
    parts: [MatmulPart; MAX_PARTS],
    x: u64,
    octet_sums: u64,
    grid_barrier: u64,
    num_rows: u32,
    num_tiles: u32,
    in_features: u32,
    num_octets: u32,
    log2_slices: u32,
    slice_tiles: u32,
    ring_slots: u32,
    cluster_blocks: u32,
    inbox_slots: u32,
    block_tiles: u32,
    adds_to_output: u32,
}

/// `RoundRowsParams` of `skinny_matmul.cuh`.
#[repr(C)]
#[derive(Clone, Copy)]
struct RoundRowsParams {
    x: u64,
    rounded: u64,
    num_rows: u32,
    in_features: u32,
    row_groups: u32,
}

/// Activations as a kernel takes them.
#[derive(Clone, Copy)]
enum Activations {
    /// Row by row, padded with zeros to whole super-tiles.
    Rows(u64),
    /// In groups of eight rows, as `round_groups` writes them, padded with zeros to whole launches.
    Groups(u64),
}

/// Activations on a GPU as its matmuls take them: BF16, each row padded with zeros to whole super-tiles.
#[derive(Clone, Debug)]
pub struct RoundedRows {
    values: Buffer<bf16>,
    groups: Buffer<bf16>,
    num_rows: usize,
    in_features: usize,
}

impl RoundedRows {
    /// Rounds `[num_rows, in_features]` values and moves them to `device`.
    ///
    /// # Errors
    /// [`DeviceError`] when the GPU has no room.
    pub fn new(device: &Device, x: &[f32], in_features: usize) -> Result<Self, DeviceError> {
        let padded = in_features.next_multiple_of(TILE_COLUMNS);
        let mut values = vec![bf16::ZERO; x.len() / in_features * padded];
        for (to, from) in values
            .chunks_exact_mut(padded)
            .zip(x.chunks_exact(in_features))
        {
            for (to, from) in to.iter_mut().zip(from) {
                *to = bf16::from_f32(*from);
            }
        }
        Ok(Self {
            values: device.buffer_of(&values)?,
            groups: device.buffer_of(&grouped(&values, padded))?,
            num_rows: x.len() / in_features,
            in_features,
        })
    }

    /// The rows, padded.
    pub fn values(&self) -> &Buffer<bf16> {
        &self.values
    }
}

/// Padded rows in the order of `round_groups`.
fn grouped(rows: &[bf16], padded: usize) -> Vec<bf16> {
    let num_rows = (rows.len() / padded).next_multiple_of(ROUNDED_ROWS);
    let mut groups = vec![bf16::ZERO; num_rows * padded];
    for (row, values) in rows.chunks_exact(padded).enumerate() {
        for (column, &value) in values.iter().enumerate() {
            let (tile, lane, within) = (
                column / TILE_COLUMNS,
                column % TILE_COLUMNS / 16,
                column % 16,
            );
            let core = tile * 8 + within / 4 * 2 + within % 4 / 2;
            let group = row / 8 * padded / 8 + core;
            groups[(group * 8 + row % 8) * 8 + lane * 2 + column % 2] = value;
        }
    }
    groups
}

/// Weights of either format, for [`multiply_rounded`].
#[derive(Clone, Copy, Debug)]
pub enum RoundedWeights<'a> {
    /// BF16.
    Bf16(&'a PackedBf16),
    /// W12, all of it or its 8-bit view.
    W12(&'a PackedW12, WeightView),
}

/// `y = x wᵀ`, or `y += x wᵀ`, for the first `num_rows` of `x`: the matmul alone, without rounding on the way.
///
/// # Errors
/// [`KernelError::BufferTooShort`], [`KernelError::Size`], [`KernelError::WrongDevice`], [`KernelError::Device`].
pub fn multiply_rounded(
    device: &CudaDevice,
    x: &RoundedRows,
    num_rows: usize,
    weights: RoundedWeights<'_>,
    y: &mut Buffer<f32>,
    epilogue: Epilogue,
) -> Result<(), KernelError> {
    let (kernel, weights, view) = match weights {
        RoundedWeights::Bf16(weights) => ("bf16_matmul", &weights.cuda, WeightView::Exact),
        RoundedWeights::W12(weights, view) => ("w12_matmul", &weights.cuda, view),
    };
    let on_cuda = |argument| KernelError::WrongDevice {
        kernel,
        argument,
        expected: "cuda",
    };
    let weights = weights.as_ref().ok_or(on_cuda("weight"))?;
    check_size(kernel, "in_features", x.in_features, weights.in_features)?;
    check_len(kernel, "x", x.num_rows, num_rows)?;
    check_len(kernel, "y", y.len(), num_rows * weights.out_features)?;
    let rows = x.values.cuda_address().ok_or(on_cuda("x"))?;
    let groups = x.groups.cuda_address().ok_or(on_cuda("x"))?;
    let product = SkinnyProduct {
        weights,
        y: y.cuda_address().ok_or(on_cuda("y"))?,
    };
    let matmul = SkinnyMatmul {
        kernel,
        products: &[product],
        view,
        num_rows,
        epilogue,
    };
    let activations = match matmul.takes_groups(device) {
        true => Activations::Groups(groups),
        false => Activations::Rows(rows),
    };
    matmul
        .launch_rounded(device, activations)
        .map_err(|source| KernelError::Device { kernel, source })
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
    pub(super) num_rows: usize,
    pub(super) epilogue: Epilogue,
}

impl SkinnyMatmul<'_> {
    /// Multiplies fp32 rows, rounded to BF16 on the way.
    ///
    /// # Errors
    /// [`KernelError::WrongDevice`], [`KernelError::Device`].
    pub(super) fn run(&self, device: &CudaDevice, x: &Buffer<f32>) -> Result<(), KernelError> {
        let x = x.cuda_address().ok_or(KernelError::WrongDevice {
            kernel: self.kernel,
            argument: "x",
            expected: "cuda",
        })?;
        if self.num_rows == 0 || self.products.is_empty() {
            return Ok(());
        }
        self.launch_all(device, x)
            .map_err(|source| KernelError::Device {
                kernel: self.kernel,
                source,
            })
    }

    fn launch_all(&self, device: &CudaDevice, x: u64) -> Result<(), DeviceError> {
        let takes_groups = self.takes_groups(device);
        let padded_rows = match takes_groups {
            true => self.num_rows.next_multiple_of(ROUNDED_ROWS),
            false => self.num_rows,
        };
        let sums_bytes = self.sums_bytes();
        let scratch = device.scratch(sums_bytes + padded_rows * self.rounded_row_bytes())?;
        let rounded = scratch + sums_bytes as u64;
        self.round_rows(device, x, rounded, takes_groups)?;
        let activations = match takes_groups {
            true => Activations::Groups(rounded),
            false => Activations::Rows(rounded),
        };
        self.launch_rounded(device, activations)
    }

    /// Whether rows go to shared memory for `wgmma`, with the same sums: where one launch then takes what would be two.
    fn takes_groups(&self, device: &CudaDevice) -> bool {
        let stack = Stack::of(self.products.iter().map(|product| product.weights));
        let fits =
            || GroupConfig::with_rows(stack, self.view, ROUNDED_ROWS, device.limits()).is_some();
        self.num_rows > MAX_ROWS && device.arch() == Arch::Sm90a && fits()
    }

    fn in_features(&self) -> usize {
        self.products[0].weights.in_features
    }

    /// Bytes of a row of activations as the matmul takes it.
    fn rounded_row_bytes(&self) -> usize {
        self.in_features().next_multiple_of(TILE_COLUMNS) * size_of::<bf16>()
    }

    /// Scratch for the octet sums of one launch.
    fn sums_bytes(&self) -> usize {
        let launches = self.products.chunks(MAX_PARTS);
        let num_tiles = launches.map(|parts| Stack::of(parts.iter().map(|p| p.weights)).num_tiles);
        let num_channels = num_tiles.max().unwrap_or(0) * TILE_CHANNELS;
        let num_octets = SliceMap::of(self.in_features()).num_octets;
        num_channels * num_octets * MAX_ROWS * size_of::<f32>()
    }

    fn launch_rounded(&self, device: &CudaDevice, x: Activations) -> Result<(), DeviceError> {
        let (limits, view) = (device.limits(), self.view);
        for products in self.products.chunks(MAX_PARTS) {
            let stack = Stack::of(products.iter().map(|product| product.weights));
            let mut first = 0;
            while first < self.num_rows {
                let left = self.num_rows - first;
                let skipped = (first * self.rounded_row_bytes()) as u64;
                first += match x {
                    Activations::Rows(rows) => {
                        let num_rows = WarpConfig::launch_rows(stack, view, left, limits);
                        let params = MatmulParams {
                            x: rows + skipped,
                            octet_sums: device.scratch(self.sums_bytes())?,
                            grid_barrier: device.grid_barrier(),
                            ..self.params(products, first, num_rows)
                        };
                        self.launch_warps(device, stack, params)?;
                        num_rows
                    }
                    Activations::Groups(groups) => {
                        let config = GroupConfig::choose(stack, view, left, limits)
                            .expect("`takes_groups` found room");
                        let num_rows = left.min(config.rows);
                        let params = MatmulParams {
                            x: groups + skipped,
                            ..self.params(products, first, num_rows)
                        };
                        self.launch_groups(device, stack, config, params)?;
                        num_rows
                    }
                };
            }
        }
        Ok(())
    }

    fn round_rows(
        &self,
        device: &CudaDevice,
        x: u64,
        rounded: u64,
        takes_groups: bool,
    ) -> Result<(), DeviceError> {
        let name = match takes_groups {
            true => "round_groups",
            false => "round_rows",
        };
        let function = device.function(self.source(), name)?;
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
            num_rows: self.num_rows as u32,
            in_features: self.in_features() as u32,
            row_groups: (self.num_rows.next_multiple_of(ROUNDED_ROWS) / 8) as u32,
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
            block_tiles: 0,
            adds_to_output: u32::from(self.epilogue == Epilogue::AddToOutput),
        }
    }

    /// Launches one multiplication of up to 32 rows in registers.
    fn launch_warps(
        &self,
        device: &CudaDevice,
        stack: Stack,
        params: MatmulParams,
    ) -> Result<(), DeviceError> {
        let limits = device.limits();
        let config = WarpConfig::choose(stack, self.view, params.num_rows as usize, limits);
        let name = config.kernel_name(stack.format, self.view);
        let function = device.function(self.source(), &name)?;
        device.allow_shared_bytes(&function, config.shared_bytes)?;
        let mut shape = Shape {
            num_blocks: 0,
            block_threads: BLOCK_THREADS as u32,
            shared_bytes: config.shared_bytes as u32,
            cluster_blocks: config.cluster_blocks as u32,
        };
        let num_blocks = if config.cluster_blocks > 1 {
            shape.num_blocks = shape.cluster_blocks;
            let max_clusters = Launch::new(&function, shape, false).max_clusters(device)?;
            max_clusters.min(stack.num_tiles) * config.cluster_blocks
        } else {
            let num_units = stack.num_tiles * params.num_octets as usize / config.block_octets;
            limits.num_multiprocessors.min(num_units)
        };
        shape.num_blocks = num_blocks as u32;
        let params = MatmulParams {
            ring_slots: config.ring_slots as u32,
            cluster_blocks: config.cluster_blocks as u32,
            inbox_slots: config.inbox_slots as u32,
            ..params
        };
        let launch = Launch::new(&function, shape, limits.has_clusters);
        // SAFETY: `params` mirrors the kernel's. Weights, results and scratch are as long as the shapes ask: the packer,
        // `check` and `launch_all` saw to that. No more blocks than the GPU holds at a time, so they may wait for each
        // other.
        unsafe { launch.run(device, &params) }
    }

    /// Launches one multiplication of rows in shared memory.
    fn launch_groups(
        &self,
        device: &CudaDevice,
        stack: Stack,
        config: GroupConfig,
        params: MatmulParams,
    ) -> Result<(), DeviceError> {
        let name = config.kernel_name(stack.format, self.view);
        let function = device.function(self.source(), &name)?;
        device.allow_shared_bytes(&function, config.shared_bytes)?;
        let cluster = Shape {
            num_blocks: config.cluster_blocks as u32,
            block_threads: BLOCK_THREADS as u32,
            shared_bytes: config.shared_bytes as u32,
            cluster_blocks: config.cluster_blocks as u32,
        };
        let num_clusters = match config.cluster_blocks {
            1 => device.limits().num_multiprocessors,
            _ => Launch::new(&function, cluster, false).max_clusters(device)?,
        };
        let num_units = stack.num_tiles.div_ceil(group_config::UNIT_TILES);
        let shape = Shape {
            num_blocks: (num_clusters.min(num_units) * config.cluster_blocks) as u32,
            ..cluster
        };
        let params = MatmulParams {
            ring_slots: config.ring_slots as u32,
            cluster_blocks: config.cluster_blocks as u32,
            inbox_slots: config.inbox_slots as u32,
            block_tiles: config.block_tiles as u32,
            ..params
        };
        let launch = Launch::new(&function, shape, true);
        // SAFETY: `params` mirrors the kernel's. Weights, results and activations are as long as the shapes ask: the packer,
        // `check` and `launch_all` saw to that. No more clusters than the GPU holds at a time.
        unsafe { launch.run(device, &params) }
    }
}
