//! Weights without a file: every tensor is a function of a seed, so a model of any shape opens in seconds.
//!
//! In: a recipe per tensor, from whoever knows what tensors are for. Out: the tensors, matrices in either format with
//! the same numbers. On a GPU they are written there; on the host they are made and packed like a checkpoint's.

use std::collections::BTreeMap;

use super::linear::Linear;
use super::w12::{Encoding, W12Matrix, encode};
use crate::device::{Backend, Buffer, Device};
use crate::error::Result;
use crate::kernels::Kernel;
use crate::kernels::bf16_matmul::PackedBf16;
use crate::kernels::fp8_matmul::{Activations, GROUP_COLUMNS};
use crate::kernels::plant_matrix::{
    PlantMatrix, PlantMatrixArgs, Recipe, normal, plant_bf16, plant_fp8, plant_on_host, plant_w12,
    uniform,
};
use crate::kernels::w12_matmul::PackedW12;
use crate::options::WeightFormat;

/// What a tensor's values are drawn from.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum PlantedTensor {
    /// A matrix.
    Matrix(Recipe),
    /// A vector, or whatever is read as one.
    Vector {
        /// Tells vectors apart.
        seed: u32,
        /// Their values.
        values: PlantedValues,
    },
}

/// Values of vectors.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum PlantedValues {
    /// Nearly normal ones.
    Near {
        /// Their mean.
        mean: f64,
        /// Their standard deviation.
        deviation: f64,
    },
    /// Logarithms of values between two limits.
    Logarithms {
        /// The lower one.
        low: f64,
        /// The upper one.
        high: f64,
    },
    /// What the function `ln(1 + exp(x))` takes to values between two limits, evenly by their logarithms.
    SoftplusInverses {
        /// The lower one.
        low: f64,
        /// The upper one.
        high: f64,
    },
}

/// The recipes of a model's tensors by name.
#[derive(Clone, Debug, Default)]
pub struct PlantedWeights {
    tensors: BTreeMap<String, PlantedTensor>,
}

impl FromIterator<(String, PlantedTensor)> for PlantedWeights {
    fn from_iter<T: IntoIterator<Item = (String, PlantedTensor)>>(tensors: T) -> Self {
        Self {
            tensors: tensors.into_iter().collect(),
        }
    }
}

impl PlantedWeights {
    fn recipe(&self, name: &str) -> Recipe {
        match self.tensors.get(name) {
            Some(PlantedTensor::Matrix(recipe)) => *recipe,
            other => panic!("{name} should be a planted matrix, got {other:?}"),
        }
    }

    /// Plants matrix `name` in `format`, with a Q view if wanted; BF16 unless W12 is asked for and pays, or FP8 and the
    /// shape is one of whole blocks, as of matrices that publishers convert.
    pub(super) fn linear(
        &self,
        device: &Device,
        name: &str,
        shape: [usize; 2],
        format: WeightFormat,
        with_q_view: bool,
    ) -> Result<Linear> {
        let recipe = self.recipe(name);
        if format == WeightFormat::W12 {
            return Ok(match w12(device, recipe, shape)? {
                Some(weights) => Linear::W12(weights),
                None => Linear::Bf16(plant_bf16(device, recipe, shape)?),
            });
        }
        let activations = match format {
            WeightFormat::Fp8 => Some(Activations::Whole),
            WeightFormat::Fp8W8A8 => Some(Activations::Quantised),
            _ => None,
        };
        let has_blocks = shape.iter().all(|len| len.is_multiple_of(GROUP_COLUMNS));
        if let (Some(activations), true) = (activations, has_blocks) {
            return Ok(Linear::Fp8 {
                weight: plant_fp8(device, recipe, shape)?,
                activations,
            });
        }
        let exact = plant_bf16(device, recipe, shape)?;
        let q_view = match with_q_view {
            true => w12(device, recipe, shape)?.map(PackedW12::into_q_view),
            false => None,
        };
        Ok(match q_view {
            Some(q_view) => Linear::Bf16WithQView { exact, q_view },
            None => Linear::Bf16(exact),
        })
    }

    /// Plants matrix `name` as BF16.
    pub(super) fn matrix_bf16(
        &self,
        device: &Device,
        name: &str,
        shape: [usize; 2],
    ) -> Result<PackedBf16> {
        Ok(plant_bf16(device, self.recipe(name), shape)?)
    }

    /// The weights of matrix `name`, row-major.
    pub(super) fn rows(
        &self,
        device: &Device,
        name: &str,
        shape: [usize; 2],
    ) -> Result<Vec<half::bf16>> {
        Ok(plant_on_host(device, self.recipe(name), shape)?)
    }

    /// Plants matrix `name`, row-major, from element `first` of `rows` on.
    pub(super) fn rows_into(
        &self,
        device: &Device,
        name: &str,
        [out_features, in_features]: [usize; 2],
        rows: &mut Buffer<half::bf16>,
        first: usize,
    ) -> Result<()> {
        let args = PlantMatrixArgs {
            recipe: self.recipe(name),
            out_features,
            in_features,
            rows,
            first,
        };
        Ok(PlantMatrix::run(device, args)?)
    }

    /// The `len` values of vector `name`.
    pub(super) fn values(&self, name: &str, len: usize) -> Vec<f32> {
        let Some(PlantedTensor::Vector { seed, values }) = self.tensors.get(name) else {
            panic!("{name} should be a planted vector");
        };
        let value = |i| match *values {
            PlantedValues::Near { mean, deviation } => mean + deviation * normal(*seed, i),
            PlantedValues::Logarithms { low, high } => {
                (low + (high - low) * uniform(*seed, i)).ln()
            }
            PlantedValues::SoftplusInverses { low, high } => {
                let y = low * (high / low).powf(uniform(*seed, i));
                y + (-(-y).exp_m1()).ln()
            }
        };
        (0..len).map(|i| value(i) as f32).collect()
    }
}

/// A layer's matrix as W12, if that pays.
fn w12(
    device: &Device,
    recipe: Recipe,
    shape @ [out_features, in_features]: [usize; 2],
) -> Result<Option<PackedW12>> {
    if device.backend() == Backend::Host {
        let weights = plant_on_host(device, recipe, shape)?;
        return Ok(match encode(&weights, out_features, in_features) {
            Encoding::W12(encoded) => Some(encoded.pack_on(device)?),
            Encoding::KeepBf16(_) => None,
        });
    }
    let num_escapes = (out_features * in_features) as f64 * Recipe::ESCAPE_RATE;
    match W12Matrix::pays(out_features, in_features, num_escapes.ceil() as usize) {
        true => Ok(Some(plant_w12(device, recipe, shape)?)),
        false => Ok(None),
    }
}
