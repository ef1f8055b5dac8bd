//! One weight matrix in whichever format it is held, behind one call.
//!
//! In: a checkpoint tensor or packed weights. Out: `y = x Wᵀ` (or `y += x Wᵀ`) for any number of rows. Layers hold
//! `Linear`s and know no format; a new format is a variant here and a kernel, and nothing above changes.

use super::checkpoint::Checkpoint;
use crate::device::{Buffer, Device};
use crate::error::{CheckpointError, KernelError};
use crate::kernels::Kernel;
use crate::kernels::bf16_matmul::{Bf16Matmul, Bf16MatmulArgs, Epilogue, PackedBf16};

/// A weight matrix `[out_features, in_features]`.
#[derive(Clone, Debug)]
pub enum Linear {
    /// The checkpoint's BF16 values, packed for the kernel.
    Bf16(PackedBf16),
}

impl Linear {
    /// Reads tensor `name` of `checkpoint`.
    ///
    /// # Errors
    /// [`CheckpointError`] when the tensor is missing or has another shape or dtype.
    pub fn load(
        checkpoint: &Checkpoint,
        name: &str,
        out_features: usize,
        in_features: usize,
    ) -> Result<Self, CheckpointError> {
        checkpoint
            .matrix_bf16(name, [out_features, in_features])
            .map(Self::Bf16)
    }

    /// Wraps weights that are packed already.
    pub fn from_packed(weights: PackedBf16) -> Self {
        Self::Bf16(weights)
    }

    /// Multiplies the first `num_rows` rows of `x` `[_, in_features]` into `y` `[_, out_features]`.
    ///
    /// # Errors
    /// [`KernelError`] when a buffer is too short.
    pub fn forward(
        &self,
        device: &Device,
        x: &Buffer<f32>,
        num_rows: usize,
        y: &mut Buffer<f32>,
        epilogue: Epilogue,
    ) -> Result<(), KernelError> {
        match self {
            Self::Bf16(weight) => Bf16Matmul::run(
                device,
                Bf16MatmulArgs {
                    x,
                    num_rows,
                    weight,
                    y,
                    epilogue,
                },
            ),
        }
    }

    /// The packed BF16 weights, where that is the format.
    pub fn as_bf16(&self) -> Option<&PackedBf16> {
        match self {
            Self::Bf16(weight) => Some(weight),
        }
    }

    /// Number of output channels.
    pub fn out_features(&self) -> usize {
        match self {
            Self::Bf16(weight) => weight.out_features(),
        }
    }

    /// Length of an input row.
    pub fn in_features(&self) -> usize {
        match self {
            Self::Bf16(weight) => weight.in_features(),
        }
    }

    /// Bytes that one multiplication reads.
    pub fn num_bytes(&self) -> usize {
        match self {
            Self::Bf16(weight) => weight.num_bytes(),
        }
    }
}
