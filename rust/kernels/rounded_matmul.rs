//! The CUDA matmuls alone, for rows that are rounded already: what benches time.

use super::bf16_matmul::{Epilogue, PackedBf16};
use super::matmul_rows::{MatmulInput, MatmulRows};
use super::packed_fp8::PackedFp8;
use super::row_format::RowFormat;
use super::skinny_matmul::{SkinnyMatmul, SkinnyProduct};
use super::w12_matmul::{PackedW12, WeightView};
use super::{check_len, check_size};
use crate::device::cuda::CudaDevice;
use crate::device::{Buffer, Device};
use crate::error::{DeviceError, KernelError};

/// Activations on a GPU as its matmuls take them: rounded, each row padded with zeros to whole super-tiles.
#[derive(Clone, Debug)]
pub struct RoundedRows {
    rows: MatmulRows,
    num_rows: usize,
    in_features: usize,
}

impl RoundedRows {
    /// Rounds `[num_rows, in_features]` values and moves them to `device`.
    ///
    /// # Errors
    /// [`DeviceError`] when the GPU has no room.
    pub fn new(device: &Device, x: &[f32], in_features: usize) -> Result<Self, DeviceError> {
        Ok(Self {
            rows: MatmulRows::of(device, x, in_features)?,
            num_rows: x.len() / in_features,
            in_features,
        })
    }

    /// Where the rows begin on a GPU: BF16, padded.
    pub fn cuda_address(&self) -> Option<u64> {
        MatmulInput::from(&self.rows).cuda_address()
    }
}

/// Weights of any format, for [`multiply_rounded`].
#[derive(Clone, Copy, Debug)]
pub enum RoundedWeights<'a> {
    /// BF16.
    Bf16(&'a PackedBf16),
    /// W12, all of it or its 8-bit view.
    W12(&'a PackedW12, WeightView),
    /// FP8, multiplied by rows as they are.
    Fp8(&'a PackedFp8),
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
        RoundedWeights::Fp8(weights) => ("fp8_matmul", &weights.cuda, WeightView::Exact),
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
    let product = SkinnyProduct {
        weights,
        y: y.cuda_address().ok_or(on_cuda("y"))?,
    };
    let matmul = SkinnyMatmul {
        kernel,
        products: &[product],
        view,
        rows: RowFormat::Bf16,
        num_rows,
        epilogue,
    };
    matmul.run(device, MatmulInput::from(&x.rows))
}
