//! Weights that are a function of a seed, a row and a column: matrices of any size without a file.
//!
//! In: a [`Recipe`] and a shape. Out: BF16 bits row by row, or the matrix packed for the matmuls, written where it will
//! lie: a GPU's are made there. The function takes whole numbers and exactly rounded products alone, so every device
//! and every layout holds the same bits. Rows of layers are nearly Gaussian, their scales differ, and about 4e-4 of the
//! weights lie outside W12's window, below and above, as in trained models.

use half::bf16;
use rayon::prelude::*;

use super::launcher::Launcher;
use super::packed_bf16::PackedBf16;
use super::packed_fp8::{Fp8Scales, PackedFp8, code_of};
use super::packed_w12::PackedW12;
use super::skinny_weights::{CudaParts, SliceFormat, TILE_CHANNELS, TILE_COLUMNS, slice_starts};
use super::{Kernel, check_len, check_size};
use crate::device::cuda::{CudaDevice, Shape};
use crate::device::{Buffer, Device, HostDevice};
use crate::error::{DeviceError, KernelError};

/// Standard deviation of [`centred`]: of twice the sum of four even numbers of 16 bits.
const CENTRED_DEVIATION: f64 = 75_674.43;
const ROW_SALT: u64 = 0x9E37_79B9_7F4A_7C15;
/// Denominator of a row's shares.
const SHARES: f64 = 256.0;

/// What a matrix's weights are drawn from.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Recipe {
    /// Tells matrices apart.
    pub seed: u32,
    /// Standard deviation of the weights; of a layer's, before rows are scaled.
    pub deviation: f64,
    /// What they stand for.
    pub kind: RecipeKind,
}

impl Recipe {
    /// Share of a layer's weights that escape from W12's window, about.
    pub const ESCAPE_RATE: f64 = 4e-4;
}

/// The kinds of matrices.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum RecipeKind {
    /// A layer's: rows of different scales, and escapes.
    Layer,
    /// A table of rows, such as an embedding.
    Table,
    /// A head that, from row `t` of the embedding, finds token `t + strides[0]` (modulo its rows) first and, weaker by
    /// a quarter to two thirds, `t + strides[1]`.
    Successors {
        /// Seed of the embedding, a table of the same shape.
        table_seed: u32,
        /// Distances to the first and the second successor; below the number of rows.
        strides: [u32; 2],
        /// Correlation of a row with the row of the embedding that it follows, at most 0.75.
        correlation: f64,
    },
}

/// Arguments of [`PlantMatrix`].
pub struct PlantMatrixArgs<'a> {
    /// What is planted.
    pub recipe: Recipe,
    /// Output channels.
    pub out_features: usize,
    /// Columns.
    pub in_features: usize,
    /// Weights; the matrix, `[out_features, in_features]`, begins at element `first`.
    pub rows: &'a mut Buffer<bf16>,
    /// See `rows`.
    pub first: usize,
}

/// The kernel; see the module's head for its contract.
pub struct PlantMatrix;

impl Kernel for PlantMatrix {
    const NAME: &'static str = "plant_matrix";
    type Args<'a> = PlantMatrixArgs<'a>;

    fn check(args: &PlantMatrixArgs<'_>) -> Result<(), KernelError> {
        let (n, k) = (args.out_features, args.in_features);
        check_size(Self::NAME, "out_features", n, n.max(1))?;
        check_size(Self::NAME, "in_features", k, k.max(1))?;
        check_len(Self::NAME, "rows", args.rows.len(), args.first + n * k)
    }

    fn host(device: &HostDevice, args: PlantMatrixArgs<'_>) {
        let params = PlantMatrixParams::of(&args.recipe, args.out_features, args.in_features);
        let len = args.out_features * args.in_features;
        let rows = &mut args.rows.host_mut()[args.first..][..len];
        let rows = rows.par_chunks_exact_mut(args.in_features);
        device.install(|| {
            rows.enumerate().for_each(|(row, weights)| {
                for (column, weight) in weights.iter_mut().enumerate() {
                    let bits = params.weight_bits(row as u32, column as u32);
                    *weight = bf16::from_bits(bits);
                }
            });
        });
    }

    fn cuda(device: &CudaDevice, args: PlantMatrixArgs<'_>) -> Result<(), KernelError> {
        let launcher = Launcher::of::<Self>(device);
        let mut params = PlantMatrixParams::of(&args.recipe, args.out_features, args.in_features);
        let first = (args.first * size_of::<bf16>()) as u64;
        params.rows = launcher.buffer("rows", args.rows)? + first;
        // SAFETY: `params` mirrors the kernel's; `check` saw that `rows` holds the matrix.
        unsafe { launcher.run("plant_rows", WHOLE_GPU, &params) }
    }
}

/// Plants a matrix as BF16, packed for `device`.
///
/// # Errors
/// [`KernelError`] for an empty shape or a device without room.
pub fn plant_bf16(
    device: &Device,
    recipe: Recipe,
    [out_features, in_features]: [usize; 2],
) -> Result<PackedBf16, KernelError> {
    let (n, k) = (out_features, in_features);
    let Device::Cuda(cuda) = device else {
        let bits = plant_on_host(device, recipe, [n, k])?;
        return Ok(PackedBf16::pack(&bits, n, k));
    };
    let launcher = Launcher::of::<PlantMatrix>(cuda);
    let mut params = PlantMatrixParams::of(&recipe, n, k);
    let num_tiles = n.div_ceil(TILE_CHANNELS);
    let len = num_tiles * k.div_ceil(TILE_COLUMNS) * SliceFormat::Bf16.tile_bytes();
    let slices = device.try_alloc::<u8>(len).map_err(no_room)?;
    params.slices = launcher.buffer("slices", &slices)?;
    // SAFETY: `params` mirrors the kernel's; `slices` holds all super-tiles of the shape.
    unsafe { launcher.run("plant_bf16", WHOLE_GPU, &params)? };
    let parts = CudaParts {
        slices,
        escape_starts: device.buffer_of(&[0]).map_err(no_room)?,
        escapes: device.try_alloc(0).map_err(no_room)?,
    };
    Ok(PackedBf16::from_cuda_parts(n, k, parts))
}

/// Plants a layer's matrix as W12 in the memory of a GPU: the same numbers as [`plant_bf16`].
///
/// # Errors
/// As for [`plant_bf16`], and [`KernelError::WrongDevice`] on the host, where weights are encoded.
///
/// # Panics
/// For a recipe other than a layer's, whose rows have no window.
pub fn plant_w12(
    device: &Device,
    recipe: Recipe,
    [out_features, in_features]: [usize; 2],
) -> Result<PackedW12, KernelError> {
    assert_eq!(recipe.kind, RecipeKind::Layer, "only layers are W12");
    let (n, k) = (out_features, in_features);
    let Device::Cuda(cuda) = device else {
        return Err(KernelError::WrongDevice {
            kernel: PlantMatrix::NAME,
            argument: "slices",
            expected: "cuda",
        });
    };
    let launcher = Launcher::of::<PlantMatrix>(cuda);
    let mut params = PlantMatrixParams::of(&recipe, n, k);
    let (num_tiles, k_tiles) = (n.div_ceil(TILE_CHANNELS), k.div_ceil(TILE_COLUMNS));
    let starts: Vec<u32> = slice_starts(k).iter().map(|&start| start as u32).collect();
    params.num_slices = starts.len() as u32 - 1;
    let starts = device.buffer_of(&starts).map_err(no_room)?;
    params.slice_starts = launcher.buffer("slice_starts", &starts)?;
    let num_super_tiles = num_tiles * k_tiles;
    let mut escape_starts = device
        .try_alloc::<u32>(num_super_tiles + 1)
        .map_err(no_room)?;
    params.escape_starts = launcher.buffer("escape_starts", &escape_starts)?;
    // SAFETY: `params` mirrors the kernel's; `escape_starts` holds a count for every super-tile.
    unsafe { launcher.run("count_escapes", WHOLE_GPU, &params)? };
    let mut counts = escape_starts
        .read_back(num_super_tiles + 1)
        .map_err(no_room)?;
    let mut num_escapes = 0;
    for count in &mut counts {
        (*count, num_escapes) = (num_escapes, num_escapes + *count);
    }
    escape_starts.upload(&counts).map_err(no_room)?;
    let escapes = device
        .try_alloc::<u32>(num_escapes as usize)
        .map_err(no_room)?;
    let num_bytes = num_super_tiles * SliceFormat::W12.tile_bytes()
        + num_tiles * params.num_slices as usize * SliceFormat::W12.note_bytes();
    let slices = device.try_alloc::<u8>(num_bytes).map_err(no_room)?;
    params.slices = launcher.buffer("slices", &slices)?;
    // Without escapes nothing is written there.
    params.escapes = escapes.cuda_address().unwrap_or(0);
    // SAFETY: `params` mirrors the kernel's; `slices` holds the shape's slices and `escapes` as many as were counted.
    unsafe { launcher.run("plant_w12", WHOLE_GPU, &params)? };
    cuda.synchronize().map_err(no_room)?;
    let parts = CudaParts {
        slices,
        escape_starts,
        escapes,
    };
    Ok(PackedW12::from_cuda_parts(n, k, parts))
}

/// Plants a layer's matrix as FP8: the numbers of [`plant_bf16`], rounded, with a scale for each row.
///
/// # Errors
/// As for [`plant_bf16`].
///
/// # Panics
/// For a recipe other than a layer's, whose rows have no scale.
pub fn plant_fp8(
    device: &Device,
    recipe: Recipe,
    [out_features, in_features]: [usize; 2],
) -> Result<PackedFp8, KernelError> {
    assert_eq!(recipe.kind, RecipeKind::Layer, "only layers are FP8");
    let (n, k) = (out_features, in_features);
    let mut params = PlantMatrixParams::of(&recipe, n, k);
    let Device::Cuda(cuda) = device else {
        let weights = plant_on_host(device, recipe, [n, k])?;
        let scales: Vec<f32> = (0..n as u32).map(|row| params.fp8_scale(row)).collect();
        let rows = weights.par_chunks_exact(k).zip(&scales);
        let codes: Vec<u8> = rows
            .flat_map_iter(|(row, scale)| row.iter().map(move |w| code_of(w.to_f32() / scale)))
            .collect();
        let scales = Fp8Scales {
            values: scales,
            block_rows: 1,
            block_columns: k,
        };
        return Ok(PackedFp8::pack(&codes, n, k, &scales));
    };
    let launcher = Launcher::of::<PlantMatrix>(cuda);
    let format = SliceFormat::Fp8 {
        has_short_scales: true,
    };
    let starts: Vec<u32> = slice_starts(k).iter().map(|&start| start as u32).collect();
    params.num_slices = starts.len() as u32 - 1;
    let starts = device.buffer_of(&starts).map_err(no_room)?;
    params.slice_starts = launcher.buffer("slice_starts", &starts)?;
    let num_tiles = n.div_ceil(TILE_CHANNELS);
    let num_bytes = num_tiles
        * (k.div_ceil(TILE_COLUMNS) * format.tile_bytes()
            + params.num_slices as usize * format.note_bytes());
    let slices = device.try_alloc::<u8>(num_bytes).map_err(no_room)?;
    params.slices = launcher.buffer("slices", &slices)?;
    // SAFETY: `params` mirrors the kernel's; `slices` holds the shape's slices.
    unsafe { launcher.run("plant_fp8", WHOLE_GPU, &params)? };
    cuda.synchronize().map_err(no_room)?;
    let parts = CudaParts {
        slices,
        escape_starts: device.buffer_of(&[0]).map_err(no_room)?,
        escapes: device.try_alloc(0).map_err(no_room)?,
    };
    Ok(PackedFp8::from_cuda_parts(n, k, parts))
}

/// The weights of a matrix, row by row, for those who pack or encode them on the host.
///
/// # Errors
/// [`KernelError`] for an empty shape.
pub fn plant_on_host(
    device: &Device,
    recipe: Recipe,
    [out_features, in_features]: [usize; 2],
) -> Result<Vec<bf16>, KernelError> {
    let len = out_features * in_features;
    let mut rows = device.try_alloc::<bf16>(len).map_err(no_room)?;
    let args = PlantMatrixArgs {
        recipe,
        out_features,
        in_features,
        rows: &mut rows,
        first: 0,
    };
    PlantMatrix::run(device, args)?;
    rows.read_back(len).map_err(no_room)
}

fn no_room(source: DeviceError) -> KernelError {
    KernelError::Device {
        kernel: PlantMatrix::NAME,
        source,
    }
}

/// Blocks that keep any GPU busy; each takes weights in turn.
const WHOLE_GPU: Shape = Shape {
    num_blocks: 1056,
    block_threads: 256,
    shared_bytes: 0,
    cluster_blocks: 1,
};

/// `PlantMatrixParams` of `plant_matrix.cu`.
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct PlantMatrixParams {
    slices: u64,
    slice_starts: u64,
    escape_starts: u64,
    escapes: u64,
    rows: u64,
    out_features: u32,
    in_features: u32,
    k_tiles: u32,
    num_slices: u32,
    seed: u32,
    kind: u32,
    unit: f32,
    table_seed: u32,
    strides: [u32; 2],
    strength: u32,
    noise: u32,
}

const LAYER: u32 = 0;
const TABLE: u32 = 1;
const SUCCESSORS: u32 = 2;

impl PlantMatrixParams {
    fn of(recipe: &Recipe, out_features: usize, in_features: usize) -> Self {
        let unit = recipe.deviation / CENTRED_DEVIATION;
        let params = Self {
            out_features: out_features as u32,
            in_features: in_features as u32,
            k_tiles: in_features.div_ceil(TILE_COLUMNS) as u32,
            seed: recipe.seed,
            unit: unit as f32,
            ..Self::default()
        };
        match recipe.kind {
            RecipeKind::Layer => Self {
                kind: LAYER,
                ..params
            },
            RecipeKind::Table => Self {
                kind: TABLE,
                ..params
            },
            RecipeKind::Successors {
                table_seed,
                strides,
                correlation,
            } => {
                // Of the second successor about half.
                let noise = (1.0 - 1.3 * correlation * correlation).max(0.0).sqrt();
                Self {
                    kind: SUCCESSORS,
                    unit: (unit / SHARES) as f32,
                    table_seed,
                    strides,
                    strength: (SHARES * correlation).round() as u32,
                    noise: (SHARES * noise).round() as u32,
                    ..params
                }
            }
        }
    }

    fn row_unit(&self, row: u32) -> f32 {
        if self.kind != LAYER {
            return self.unit;
        }
        let bits = mix(row_key(self.seed, row) ^ ROW_SALT);
        let spread = 65_536 + (bits & 0xFFFF) as u32 + (bits >> 16 & 0xFFFF) as u32;
        self.unit * (spread as f32 / 131_072.0)
    }

    /// `fp8_scale` of `plant_matrix.cu`.
    fn fp8_scale(&self, row: u32) -> f32 {
        f32::from_bits(u32::from(round_to_bf16(self.row_unit(row) * 585.125)) << 16)
    }

    /// `weight_bits` of `plant_matrix.cu`.
    fn weight_bits(&self, row: u32, column: u32) -> u16 {
        let bits = mix(row_key(self.seed, row) ^ u64::from(column));
        if self.kind == SUCCESSORS {
            let n = self.out_features;
            let follows = |stride: u32| (row + n - stride) % n;
            let of_table = |row| centred(mix(row_key(self.table_seed, row) ^ u64::from(column)));
            let lot = mix(row_key(self.seed, row) ^ ROW_SALT) % 103;
            let rival = u64::from(self.strength) * (90 + lot) / 256;
            let sum = self.strength as i32 * of_table(follows(self.strides[0]))
                + rival as i32 * of_table(follows(self.strides[1]))
                + self.noise as i32 * centred(bits);
            return round_to_bf16(sum as f32 * self.unit);
        }
        let mut weight = centred(bits) as f32 * self.row_unit(row);
        if self.kind == LAYER {
            match mix(bits) & 0xF_FFFF {
                0..300 => weight *= 0.5_f32.powi(14),
                300..320 => weight *= 64.0,
                _ => {}
            }
        }
        round_to_bf16(weight)
    }
}

/// The finalizer of SplitMix64.
fn mix(z: u64) -> u64 {
    let z = (z ^ z >> 30).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let z = (z ^ z >> 27).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ z >> 31
}

fn row_key(seed: u32, row: u32) -> u64 {
    mix(u64::from(seed) << 32 ^ u64::from(row))
}

/// Nearly Gaussian: the sum of four even numbers of 16 bits about zero, never zero itself.
fn centred(bits: u64) -> i32 {
    let sum = (bits & 0xFFFF) + (bits >> 16 & 0xFFFF) + (bits >> 32 & 0xFFFF) + (bits >> 48);
    2 * sum as i32 - 262_139
}

fn round_to_bf16(weight: f32) -> u16 {
    let bits = weight.to_bits();
    ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16) as u16
}

/// A value of a standard distribution, nearly normal, for vectors, which only the host makes.
pub fn normal(seed: u32, index: usize) -> f64 {
    f64::from(centred(mix(row_key(seed, index as u32)))) / CENTRED_DEVIATION
}

/// A value from 0 up to 1.
pub fn uniform(seed: u32, index: usize) -> f64 {
    (mix(row_key(seed, index as u32)) >> 11) as f64 / (1_u64 << 53) as f64
}
