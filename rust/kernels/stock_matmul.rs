//! `y = x wᵀ` by cuBLASLt, as stock engines multiply: not row-invariant, so only `kernels="stock"` takes it.
//!
//! It has no host implementation: there is nothing that it would have to agree with.

use half::bf16;

use super::bf16_matmul::Epilogue;
use super::check_len;
use super::round_rows::{Launched, RowSource, Vectors};
use crate::device::cuda::{CudaDevice, LtOperands, LtShape, LtValues};
use crate::device::{Buffer, Device};
use crate::error::{DeviceError, KernelError};

const NAME: &str = "stock_matmul";

/// A BF16 matrix `[out_features, in_features]` on a GPU, row-major.
#[derive(Clone, Debug)]
pub struct StockMatrix {
    rows: Buffer<bf16>,
    out_features: usize,
    in_features: usize,
}

impl StockMatrix {
    /// A matrix that was written on the device.
    ///
    /// # Panics
    /// Panics unless `rows` holds whole rows.
    pub fn from_rows(rows: Buffer<bf16>, in_features: usize) -> Self {
        assert!(
            in_features > 0 && rows.len().is_multiple_of(in_features),
            "rows of a matrix"
        );
        Self {
            out_features: rows.len() / in_features,
            in_features,
            rows,
        }
    }

    /// Number of output channels.
    pub fn out_features(&self) -> usize {
        self.out_features
    }

    /// Length of a row.
    pub fn in_features(&self) -> usize {
        self.in_features
    }

    /// Bytes in memory.
    pub fn num_bytes(&self) -> usize {
        self.rows.len() * size_of::<bf16>()
    }
}

/// Multiplies the first `num_rows` rows of `x` `[_, in_features]` into `y` `[_, out_features]`.
///
/// # Errors
/// [`KernelError::BufferTooShort`], [`KernelError::WrongDevice`] on the host, [`KernelError::Device`].
pub fn multiply(
    device: &Device,
    x: &Buffer<bf16>,
    num_rows: usize,
    weight: &StockMatrix,
    y: &mut Buffer<f32>,
    epilogue: Epilogue,
) -> Result<(), KernelError> {
    check_len(NAME, "x", x.len(), num_rows * weight.in_features)?;
    check_len(NAME, "y", y.len(), num_rows * weight.out_features)?;
    let at = x.cuda_address().ok_or(on_cuda("x"))?;
    multiply_at(gpu_of(device)?, at, num_rows, weight, y, epilogue)
}

/// [`multiply`] for fp32 rows, which are rounded on the way.
///
/// # Errors
/// As for [`multiply`].
pub fn round_and_multiply(
    device: &Device,
    x: &Buffer<f32>,
    num_rows: usize,
    weight: &StockMatrix,
    y: &mut Buffer<f32>,
) -> Result<(), KernelError> {
    let width = weight.in_features;
    check_len(NAME, "x", x.len(), num_rows * width)?;
    check_len(NAME, "y", y.len(), num_rows * weight.out_features)?;
    let cuda = gpu_of(device)?;
    let scratch = cuda.scratch(num_rows * width * size_of::<bf16>());
    let rounded = scratch.map_err(failed)?;
    let launched = Launched {
        source: RowSource::Plain,
        x: Vectors::rows(x, width),
        num_vectors: num_rows,
        width,
    };
    launched.run(cuda, rounded)?;
    multiply_at(cuda, rounded, num_rows, weight, y, Epilogue::Store)
}

fn gpu_of(device: &Device) -> Result<&CudaDevice, KernelError> {
    match device {
        Device::Cuda(cuda) => Ok(cuda),
        Device::Host(_) => Err(on_cuda("device")),
    }
}

fn on_cuda(argument: &'static str) -> KernelError {
    KernelError::WrongDevice {
        kernel: NAME,
        argument,
        expected: "cuda",
    }
}

fn failed(source: DeviceError) -> KernelError {
    KernelError::Device {
        kernel: NAME,
        source,
    }
}

/// The product of rows at `x`; lengths have been checked.
fn multiply_at(
    cuda: &CudaDevice,
    x: u64,
    num_rows: usize,
    weight: &StockMatrix,
    y: &Buffer<f32>,
    epilogue: Epilogue,
) -> Result<(), KernelError> {
    if num_rows == 0 {
        return Ok(());
    }
    let operands = LtOperands {
        weights: weight.rows.cuda_address().ok_or(on_cuda("weight"))?,
        x,
        y: y.cuda_address().ok_or(on_cuda("y"))?,
    };
    let shape = LtShape {
        values: LtValues::Bf16,
        out_features: weight.out_features,
        in_features: weight.in_features,
        num_rows,
        rounds: false,
        adds_to_output: epilogue == Epilogue::AddToOutput,
    };
    let multiplied = cuda.cublaslt().and_then(|lt| {
        // SAFETY: all three lie on the GPU and are as long as the shape says, which the callers have seen.
        unsafe { lt.multiply(cuda, shape, operands) }
    });
    multiplied.map_err(failed)
}
