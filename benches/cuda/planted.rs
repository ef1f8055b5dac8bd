//! Matrices of real shapes, made on the device.

use half::bf16;
use specpilot_rs::device::cuda::{CudaDevice, KernelSource, Launch, Shape};
use specpilot_rs::device::{Buffer, Device};
use specpilot_rs::error::DeviceError;
use specpilot_rs::kernels::bf16_matmul::PackedBf16;
use specpilot_rs::kernels::skinny_matmul::RoundedRows;
use specpilot_rs::kernels::skinny_weights::{CudaParts, slice_starts};
use specpilot_rs::kernels::w12_matmul::PackedW12;

static PLANT: KernelSource = KernelSource {
    stem: "plant",
    text: include_str!("plant.cu"),
    is_hot: false,
};

/// `PlantParams` of `plant.cu`.
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct PlantParams {
    slices: u64,
    slice_starts: u64,
    escape_starts: u64,
    escapes: u64,
    rows: u64,
    x: u64,
    reference: u64,
    magnitude: u64,
    seed: u32,
    num_rows: u32,
    out_features: u32,
    in_features: u32,
    k_tiles: u32,
    num_slices: u32,
}

/// One matrix in the three layouts.
pub struct Planted {
    pub w12: PackedW12,
    pub bf16: PackedBf16,
    /// Row-major, for cuBLASLt.
    pub rows: Buffer<u16>,
    pub num_escapes: usize,
    seed: u32,
}

fn cuda(device: &Device) -> &CudaDevice {
    match device {
        Device::Cuda(cuda) => cuda,
        Device::Host(_) => unreachable!("the bench opens a GPU"),
    }
}

fn address<T: specpilot_rs::device::Element>(buffer: &Buffer<T>) -> u64 {
    buffer.cuda_address().expect("a buffer on the GPU")
}

fn launch(device: &Device, name: &str, params: &PlantParams) -> Result<(), DeviceError> {
    let device = cuda(device);
    let function = device.function(&PLANT, name)?;
    let shape = Shape {
        num_blocks: 132 * 8,
        block_threads: 256,
        shared_bytes: 0,
        cluster_blocks: 1,
    };
    // SAFETY: `params` mirrors the kernel's, and its buffers have the lengths that the shape gives.
    unsafe { Launch::new(&function, shape, false).run(device, params) }
}

impl Planted {
    /// The matrix of `seed`.
    pub fn new(device: &Device, n: usize, k: usize, seed: u32) -> Result<Self, DeviceError> {
        let starts = slice_starts(k);
        let (num_tiles, k_tiles, num_slices) = (n.div_ceil(16), k.div_ceil(64), starts.len() - 1);
        let starts: Vec<u32> = starts.iter().map(|&start| start as u32).collect();
        let starts = device.buffer_of(&starts)?;
        let mut escape_starts = device.try_alloc::<u32>(num_tiles * k_tiles + 1)?;
        let mut params = PlantParams {
            slice_starts: address(&starts),
            escape_starts: address(&escape_starts),
            seed,
            out_features: n as u32,
            in_features: k as u32,
            k_tiles: k_tiles as u32,
            num_slices: num_slices as u32,
            ..PlantParams::default()
        };
        launch(device, "count_escapes", &params)?;
        let mut counts = escape_starts.read_back(num_tiles * k_tiles + 1)?;
        let mut num_escapes = 0;
        for count in &mut counts {
            (*count, num_escapes) = (num_escapes, num_escapes + *count);
        }
        escape_starts.upload(&counts)?;
        let escapes = device.try_alloc::<u32>(num_escapes as usize)?;
        let w12 = device.try_alloc::<u8>(num_tiles * (k_tiles * 1536 + num_slices * 64))?;
        params.escapes = address(&escapes);
        params.slices = address(&w12);
        launch(device, "plant_w12", &params)?;
        let bf16 = device.try_alloc::<u8>(num_tiles * k_tiles * 2048)?;
        params.slices = address(&bf16);
        launch(device, "plant_bf16", &params)?;
        let rows = device.try_alloc::<u16>(n * k)?;
        params.rows = address(&rows);
        launch(device, "plant_rows", &params)?;
        cuda(device).synchronize()?;
        let w12 = CudaParts {
            slices: w12,
            escape_starts,
            escapes,
        };
        let bf16 = CudaParts {
            slices: bf16,
            escape_starts: device.buffer_of(&[0])?,
            escapes: device.try_alloc(0)?,
        };
        Ok(Self {
            w12: PackedW12::from_cuda_parts(n, k, w12),
            bf16: PackedBf16::from_cuda_parts(n, k, bf16),
            rows,
            num_escapes: num_escapes as usize,
            seed,
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
        let params = PlantParams {
            x: address(x.values()),
            reference: address(&reference),
            magnitude: address(&magnitude),
            seed: self.seed,
            num_rows: num_rows as u32,
            out_features: n as u32,
            in_features: k as u32,
            k_tiles: k.div_ceil(64) as u32,
            ..PlantParams::default()
        };
        launch(device, "sum_in_float64", &params)?;
        let read = |buffer: &Buffer<u64>| -> Result<Vec<f64>, DeviceError> {
            let bits = buffer.read_back(num_rows * n)?;
            Ok(bits.into_iter().map(f64::from_bits).collect())
        };
        Ok([read(&reference)?, read(&magnitude)?])
    }
}

/// The row-major matrix of `seed` alone.
pub fn rows_bf16(device: &Device, n: usize, k: usize, seed: u32) -> Buffer<bf16> {
    let rows = device.try_alloc::<bf16>(n * k).expect("room for a matrix");
    let params = PlantParams {
        rows: address(&rows),
        seed,
        out_features: n as u32,
        in_features: k as u32,
        ..PlantParams::default()
    };
    launch(device, "plant_rows", &params).expect("a launch");
    rows
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
