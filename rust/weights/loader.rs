//! Tensors of a checkpoint in the memory of a device.
//!
//! In: an opened [`Checkpoint`] and a [`Device`]. Out: matrices in the layout that the device's kernels read, and fp32
//! vectors. For a GPU each is laid out on the host, one at a time on a thread, and copied; no copy stays behind.

use half::bf16;

use super::checkpoint::{Checkpoint, Fp8Matrix, Matrix};
use super::linear::Linear;
use super::w12::{Encoding, encode};
use crate::device::{Backend, Buffer, Device};
use crate::error::{OptionError, Result};
use crate::kernels::bf16_matmul::PackedBf16;
use crate::kernels::fp8_matmul::{Activations, PackedFp8};
use crate::options::WeightFormat;

/// Reads tensors of one checkpoint for one device.
#[derive(Clone, Copy)]
pub struct WeightLoader<'a> {
    /// What is read.
    pub checkpoint: &'a Checkpoint,
    /// Where it is put.
    pub device: &'a Device,
}

impl WeightLoader<'_> {
    /// Reads matrix `name` of `[out_features, in_features]` and holds it in `format`, if it allows.
    ///
    /// # Errors
    /// [`CheckpointError`](crate::error::CheckpointError) when the tensor is missing, damaged, or has another shape or
    /// dtype; [`DeviceError`](crate::error::DeviceError) when the device has no room.
    pub fn linear(&self, name: &str, shape: [usize; 2], format: WeightFormat) -> Result<Linear> {
        Ok(match self.checkpoint.matrix(name, shape, format)? {
            Matrix::Bf16(weights) => Linear::Bf16(self.pack(&weights, shape)?),
            Matrix::W12(weights) => Linear::W12(weights.pack_on(self.device)?),
            Matrix::Fp8(weights) => self.fp8(&weights, shape, format)?,
        })
    }

    /// Likewise, with a Q view for Q passes, which W12 has anyway; a matrix that W12 does not pay for has none,
    /// nor has FP8, which is as small.
    ///
    /// # Errors
    /// As for [`Self::linear`].
    pub fn linear_with_q_view(
        &self,
        name: &str,
        shape: [usize; 2],
        format: WeightFormat,
    ) -> Result<Linear> {
        let weights = match self.checkpoint.matrix(name, shape, format)? {
            Matrix::W12(weights) => return Ok(Linear::W12(weights.pack_on(self.device)?)),
            Matrix::Fp8(weights) => return self.fp8(&weights, shape, format),
            Matrix::Bf16(weights) => weights,
        };
        let exact = self.pack(&weights, shape)?;
        Ok(match encode(&weights, shape[0], shape[1]) {
            Encoding::W12(encoded) => Linear::Bf16WithQView {
                exact,
                q_view: encoded.pack_on(self.device)?.into_q_view(),
            },
            Encoding::KeepBf16(_) => Linear::Bf16(exact),
        })
    }

    /// Reads matrix `name` as BF16.
    ///
    /// # Errors
    /// As for [`Self::linear`].
    pub fn matrix_bf16(&self, name: &str, shape: [usize; 2]) -> Result<PackedBf16> {
        self.pack(&self.weights(name, shape)?, shape)
    }

    /// Reads matrix `name` of `out_features` rows, cut into BF16 matrices of `widths` columns.
    ///
    /// # Errors
    /// As for [`Self::linear`].
    pub fn columns_bf16<const N: usize>(
        &self,
        name: &str,
        out_features: usize,
        widths: [usize; N],
    ) -> Result<[PackedBf16; N]> {
        let in_features = widths.iter().sum();
        let weights = self.weights(name, [out_features, in_features])?;
        let mut first = 0;
        let mut parts = Vec::with_capacity(N);
        for width in widths {
            let columns = first..first + width;
            first += width;
            let part: Vec<bf16> = weights
                .chunks_exact(in_features)
                .flat_map(|row| &row[columns.clone()])
                .copied()
                .collect();
            parts.push(self.pack(&part, [out_features, width])?);
        }
        let Ok(parts) = parts.try_into() else {
            unreachable!("one part for every width")
        };
        Ok(parts)
    }

    /// Reads tensor `name` of any rank, row-major, widened to fp32.
    ///
    /// # Errors
    /// As for [`Self::linear`].
    pub fn tensor_f32(&self, name: &str, shape: &[usize]) -> Result<Buffer<f32>> {
        Ok(self
            .device
            .constants(&self.checkpoint.tensor_f32(name, shape)?)?)
    }

    fn weights(&self, name: &str, shape: [usize; 2]) -> Result<Vec<bf16>> {
        match self.checkpoint.matrix(name, shape, WeightFormat::Bf16)? {
            Matrix::Bf16(weights) => Ok(weights),
            Matrix::W12(_) | Matrix::Fp8(_) => unreachable!("BF16 was asked for"),
        }
    }

    fn fp8(
        &self,
        weights: &Fp8Matrix,
        [out_features, in_features]: [usize; 2],
        format: WeightFormat,
    ) -> Result<Linear> {
        if self.device.backend() == Backend::Cuda {
            return Err(OptionError::Value {
                option: "weight_format",
                expected: "bf16 or w12 for an FP8 checkpoint on CUDA, which decodes it as it loads"
                    .to_owned(),
                got: format!("\"{}\"", format.name()),
            }
            .into());
        }
        Ok(Linear::Fp8 {
            weight: PackedFp8::pack(&weights.codes, out_features, in_features, &weights.scales),
            activations: match format {
                WeightFormat::Fp8W8A8 => Activations::Quantised,
                _ => Activations::Whole,
            },
        })
    }

    fn pack(
        &self,
        weights: &[bf16],
        [out_features, in_features]: [usize; 2],
    ) -> Result<PackedBf16> {
        Ok(PackedBf16::pack_on(
            self.device,
            weights,
            out_features,
            in_features,
        )?)
    }
}
