//! Tensors of a checkpoint in the memory of a device.
//!
//! In: an opened [`Checkpoint`] and a [`Device`]. Out: matrices in the layout that the device's kernels read, and fp32
//! vectors. For a GPU each is laid out on the host, one at a time on a thread, and copied; no copy stays behind.

use half::bf16;

use super::checkpoint::{Checkpoint, Matrix};
use super::linear::Linear;
use super::w12::{Encoding, encode};
use crate::device::{Buffer, Device};
use crate::error::Result;
use crate::kernels::bf16_matmul::PackedBf16;
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
        })
    }

    /// Likewise, with a Q view for Q passes, which W12 has anyway; a matrix that W12 does not pay for has none.
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
        self.pack(&self.rows_bf16(name, shape)?, shape)
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
        let weights = self.rows_bf16(name, [out_features, in_features])?;
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

    /// Reads matrix `name` as BF16, row-major, on the host.
    ///
    /// # Errors
    /// As for [`Self::linear`].
    pub fn rows_bf16(&self, name: &str, shape: [usize; 2]) -> Result<Vec<bf16>> {
        match self.checkpoint.matrix(name, shape, WeightFormat::Bf16)? {
            Matrix::Bf16(weights) => Ok(weights),
            Matrix::W12(_) => unreachable!("BF16 was asked for"),
        }
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
