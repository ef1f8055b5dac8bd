//! Tensors of a checkpoint, or planted ones, in the memory of a device.
//!
//! In: an opened [`Checkpoint`] or [`PlantedWeights`], and a [`Device`]. Out: matrices in the layout that the device's
//! kernels read, and fp32 vectors. For a GPU a checkpoint's are laid out on the host, one at a time on a thread, and
//! copied; no copy stays behind. NaN and infinity are refused where every forward would read them. In a matrix with a row
//! for each token they harm the requests that meet this token, which end with an error, and no others.

use half::bf16;

use super::checkpoint::{Checkpoint, Fp8Matrix, Matrix, Verification};
use super::linear::Linear;
use super::planted::PlantedWeights;
use super::w12::{Encoding, encode};
use crate::device::{Buffer, Device};
use crate::error::{CheckpointError, Result};
use crate::kernels::bf16_matmul::PackedBf16;
use crate::kernels::fp8_matmul::{Activations, PackedFp8};
use crate::options::WeightFormat;

/// Where tensors come from.
#[derive(Clone, Copy)]
pub enum WeightSource<'a> {
    /// A directory.
    Checkpoint(&'a Checkpoint),
    /// Recipes.
    Planted(&'a PlantedWeights),
}

impl<'a> From<&'a Checkpoint> for WeightSource<'a> {
    fn from(checkpoint: &'a Checkpoint) -> Self {
        Self::Checkpoint(checkpoint)
    }
}

impl<'a> From<&'a PlantedWeights> for WeightSource<'a> {
    fn from(weights: &'a PlantedWeights) -> Self {
        Self::Planted(weights)
    }
}

impl<'a> WeightSource<'a> {
    /// The checkpoint, if it is one.
    pub fn checkpoint(self) -> Option<&'a Checkpoint> {
        match self {
            Self::Checkpoint(checkpoint) => Some(checkpoint),
            Self::Planted(_) => None,
        }
    }

    /// Checks the presence and shape of all tensors before any is read; planted ones have whatever shape is wanted.
    ///
    /// # Errors
    /// As for [`Checkpoint::check`].
    pub fn check(self, expected: &[(String, Vec<usize>)]) -> Result<(), CheckpointError> {
        self.checkpoint().map_or(Ok(()), |c| c.check(expected))
    }

    /// Ends loading; see [`Checkpoint::finish`].
    ///
    /// # Errors
    /// [`CheckpointError::UnusedTensors`].
    pub fn finish(self, ignored: &[&str]) -> Result<(), CheckpointError> {
        let checkpoint = self.checkpoint();
        checkpoint.map_or(Ok(()), |c| c.finish(ignored))
    }

    /// What has been proved so far; of planted weights nothing is.
    pub fn verification(self) -> Verification {
        let checkpoint = self.checkpoint();
        checkpoint.map_or_else(Verification::default, Checkpoint::verification)
    }

    /// Reads tensor `name` of any rank, row-major, widened to fp32.
    ///
    /// # Errors
    /// As for [`Checkpoint::tensor_f32`]; [`CheckpointError::NotFinite`].
    pub fn tensor_f32(self, name: &str, shape: &[usize]) -> Result<Vec<f32>, CheckpointError> {
        match self {
            Self::Checkpoint(checkpoint) => checkpoint.finite_f32(name, shape),
            Self::Planted(weights) => Ok(weights.values(name, shape.iter().product())),
        }
    }
}

/// A way to read a matrix.
type ReadMatrix =
    fn(&Checkpoint, &str, [usize; 2], WeightFormat) -> std::result::Result<Matrix, CheckpointError>;

/// Reads tensors from one source for one device.
#[derive(Clone, Copy)]
pub struct WeightLoader<'a> {
    /// What is read.
    pub source: WeightSource<'a>,
    /// Where it is put.
    pub device: &'a Device,
}

impl<'a> WeightLoader<'a> {
    /// A loader from `source` to `device`.
    pub fn of(source: impl Into<WeightSource<'a>>, device: &'a Device) -> Self {
        Self {
            source: source.into(),
            device,
        }
    }

    /// Reads matrix `name` of `[out_features, in_features]` and holds it in `format`, if it allows.
    ///
    /// # Errors
    /// [`CheckpointError`](crate::error::CheckpointError) when the tensor is missing, damaged, holds NaN or infinity, or
    /// has another shape or dtype; [`DeviceError`](crate::error::DeviceError) when the device has no room.
    pub fn linear(&self, name: &str, shape: [usize; 2], format: WeightFormat) -> Result<Linear> {
        let checkpoint = match self.source {
            WeightSource::Checkpoint(checkpoint) => checkpoint,
            WeightSource::Planted(weights) => {
                return weights.linear(self.device, name, shape, format, false);
            }
        };
        Ok(match checkpoint.finite_matrix(name, shape, format)? {
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
        let checkpoint = match self.source {
            WeightSource::Checkpoint(checkpoint) => checkpoint,
            WeightSource::Planted(weights) => {
                return weights.linear(self.device, name, shape, format, true);
            }
        };
        let weights = match checkpoint.finite_matrix(name, shape, format)? {
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

    /// Reads matrix `name`, which has a row for each token, as BF16.
    ///
    /// # Errors
    /// As for [`Self::linear`], but any bits will do.
    pub fn token_rows_bf16(&self, name: &str, shape: [usize; 2]) -> Result<PackedBf16> {
        match self.source {
            WeightSource::Checkpoint(_) => {
                let rows = self.rows_bf16(name, shape, Checkpoint::matrix)?;
                self.pack(&rows, shape)
            }
            WeightSource::Planted(weights) => weights.matrix_bf16(self.device, name, shape),
        }
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
        let shape = [out_features, in_features];
        let weights = self.rows_bf16(name, shape, Checkpoint::finite_matrix)?;
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
            .constants(&self.source.tensor_f32(name, shape)?)?)
    }

    /// Reads matrices of `in_features` columns, each by name and rows, one after another and row-major, into the memory
    /// of the device.
    ///
    /// # Errors
    /// As for [`Self::linear`].
    pub fn rows_together(
        &self,
        parts: &[(String, usize)],
        in_features: usize,
    ) -> Result<Buffer<bf16>> {
        let num_rows: usize = parts.iter().map(|(_, num_rows)| num_rows).sum();
        let mut rows = self.device.try_alloc(num_rows * in_features)?;
        let mut first = 0;
        for (name, num_rows) in parts {
            let shape = [*num_rows, in_features];
            match self.source {
                WeightSource::Planted(weights) => {
                    weights.rows_into(self.device, name, shape, &mut rows, first)?;
                }
                WeightSource::Checkpoint(_) => {
                    let part = self.device.buffer_of(&self.rows_bf16(
                        name,
                        shape,
                        Checkpoint::finite_matrix,
                    )?)?;
                    rows.copy_range(first, &part, 0..part.len())?;
                }
            }
            first += num_rows * in_features;
        }
        Ok(rows)
    }

    /// Reads matrix `name` as BF16, row-major, on the host; by `read`, which says what its bits may be.
    fn rows_bf16(&self, name: &str, shape: [usize; 2], read: ReadMatrix) -> Result<Vec<bf16>> {
        let checkpoint = match self.source {
            WeightSource::Checkpoint(checkpoint) => checkpoint,
            WeightSource::Planted(weights) => return weights.rows(self.device, name, shape),
        };
        match read(checkpoint, name, shape, WeightFormat::Bf16)? {
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
        Ok(Linear::Fp8 {
            weight: PackedFp8::pack_on(
                self.device,
                &weights.codes,
                out_features,
                in_features,
                &weights.scales,
            )?,
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
