//! Matrices of real shapes, made on the device.

use half::bf16;
use specpilot_rs::device::cuda::{CudaDevice, KernelSource, Launch, Shape};
use specpilot_rs::device::{Buffer, Device};
use specpilot_rs::error::{DeviceError, KernelError};
use specpilot_rs::kernels::Kernel;
use specpilot_rs::kernels::bf16_matmul::PackedBf16;
use specpilot_rs::kernels::plant_matrix::{
    PlantMatrix, PlantMatrixArgs, Recipe, RecipeKind, plant_bf16, plant_w12,
};
use specpilot_rs::kernels::rounded_matmul::RoundedRows;
use specpilot_rs::kernels::w12_matmul::PackedW12;

static SUMS: KernelSource = KernelSource {
    stem: "sum_in_float64",
    text: include_str!("sum_in_float64.cu"),
    is_hot: false,
};

/// `SumParams` of `sum_in_float64.cu`.
#[repr(C)]
#[derive(Clone, Copy)]
struct SumParams {
    rows: u64,
    x: u64,
    reference: u64,
    magnitude: u64,
    num_rows: u32,
    out_features: u32,
    in_features: u32,
    x_stride: u32,
}

/// One matrix in the three layouts.
pub struct Planted {
    pub w12: PackedW12,
    pub bf16: PackedBf16,
    /// Row-major, for cuBLASLt.
    pub rows: Buffer<bf16>,
    pub num_escapes: usize,
}

fn cuda(device: &Device) -> &CudaDevice {
    match device {
        Device::Cuda(cuda) => cuda,
        Device::Host(_) => unreachable!("the bench opens a GPU"),
    }
}

/// Where a buffer lies on the GPU.
pub fn address<T: specpilot_rs::device::Element>(buffer: &Buffer<T>) -> u64 {
    buffer.cuda_address().expect("a buffer on the GPU")
}

/// A layer's matrix as the engine plants it.
fn layer(seed: u32) -> Recipe {
    Recipe {
        seed,
        deviation: 0.02,
        kind: RecipeKind::Layer,
    }
}

/// The row-major matrix of `seed` alone.
pub fn rows_bf16(device: &Device, n: usize, k: usize, seed: u32) -> Buffer<bf16> {
    let mut rows = device.try_alloc::<bf16>(n * k).expect("room for a matrix");
    let args = PlantMatrixArgs {
        recipe: layer(seed),
        out_features: n,
        in_features: k,
        rows: &mut rows,
        first: 0,
    };
    PlantMatrix::run(device, args).expect("a launch");
    rows
}

impl Planted {
    /// The matrix of `seed`.
    pub fn new(device: &Device, n: usize, k: usize, seed: u32) -> Result<Self, KernelError> {
        let recipe = layer(seed);
        let no_room = |source| KernelError::Device {
            kernel: PlantMatrix::NAME,
            source,
        };
        let rows = rows_bf16(device, n, k, seed);
        let w12 = plant_w12(device, recipe, [n, k])?;
        let num_escapes = (w12.num_bytes() - PackedW12::num_bytes_of(device.backend(), n, k, 0))
            / size_of::<u32>();
        cuda(device).synchronize().map_err(no_room)?;
        Ok(Self {
            w12,
            bf16: plant_bf16(device, recipe, [n, k])?,
            rows,
            num_escapes,
        })
    }

    /// Products of the first `num_rows` of `x` and the sums of their terms' magnitudes, in float64.
    pub fn reference(
        &self,
        device: &Device,
        x: &RoundedRows,
        num_rows: usize,
    ) -> Result<[Vec<f64>; 2], DeviceError> {
        let (n, k) = (self.w12.out_features(), self.w12.in_features());
        // Float64 is no element of buffers: two words each.
        let sums = [(); 2].map(|()| device.try_alloc::<u64>(num_rows * n));
        let [reference, magnitude] = sums;
        let (reference, magnitude) = (reference?, magnitude?);
        let params = SumParams {
            rows: address(&self.rows),
            x: x.cuda_address().expect("rows on the GPU"),
            reference: address(&reference),
            magnitude: address(&magnitude),
            num_rows: num_rows as u32,
            out_features: n as u32,
            in_features: k as u32,
            x_stride: k.next_multiple_of(64) as u32,
        };
        let function = cuda(device).function(&SUMS, SUMS.stem)?;
        let shape = Shape::of_blocks(132 * 8, 256);
        // SAFETY: `params` mirrors the kernel's, and its buffers have the lengths that the shape gives.
        unsafe { Launch::new(&function, shape, false).run(cuda(device), &params)? };
        let read = |buffer: &Buffer<u64>| -> Result<Vec<f64>, DeviceError> {
            let bits = buffer.read_back(num_rows * n)?;
            Ok(bits.into_iter().map(f64::from_bits).collect())
        };
        Ok([read(&reference)?, read(&magnitude)?])
    }
}

/// Gaussian activations, rounded for a matmul.
pub fn activations(device: &Device, num_rows: usize, k: usize) -> Result<RoundedRows, DeviceError> {
    RoundedRows::new(device, &gaussian(num_rows * k), k)
}

/// Gaussian values that BF16 holds.
pub fn gaussian(len: usize) -> Vec<f32> {
    let mut state = 0x1234_5678_9ABC_DEF1_u64;
    let mut uniform = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        ((state >> 40) as f32 + 0.5) / (1 << 24) as f32
    };
    (0..len)
        .map(|_| (-2.0 * uniform().ln()).sqrt() * (std::f32::consts::TAU * uniform()).cos())
        .map(|x| bf16::from_f32(x).to_f32())
        .collect()
}
