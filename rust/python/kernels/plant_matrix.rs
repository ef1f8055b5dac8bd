//! Binding of [`PlantMatrix`].

use half::bf16;
use half::slice::HalfFloatSliceExt as _;
use numpy::ndarray::Array;
use numpy::{IntoPyArray, PyArray2, PyReadonlyArray2};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

use super::{array, array_on, device_named, nan_buffer_on, refused};
use crate::error::Error;
use crate::kernels::bf16_matmul::Epilogue;
use crate::kernels::plant_matrix::{Recipe, RecipeKind, plant_on_host};
use crate::kernels::w12_matmul::WeightView;
use crate::options::WeightFormat;
use crate::weights::WeightLoader;
use crate::weights::planted::{PlantedTensor, PlantedWeights};

/// A matrix's recipe as Python says it: the kind is "layer", "table", or the seed of the table, the strides and the
/// correlation of a head.
#[derive(FromPyObject)]
pub(super) enum Kind {
    Named(String),
    Successors(u32, [u32; 2], f64),
}

fn recipe(seed: u32, deviation: f64, kind: Kind) -> PyResult<Recipe> {
    let kind = match kind {
        Kind::Named(name) if name == "layer" => RecipeKind::Layer,
        Kind::Named(name) if name == "table" => RecipeKind::Table,
        Kind::Named(name) => return Err(PyValueError::new_err(format!("no kind {name:?}"))),
        Kind::Successors(table_seed, strides, correlation) => RecipeKind::Successors {
            table_seed,
            strides,
            correlation,
        },
    };
    Ok(Recipe {
        seed,
        deviation,
        kind,
    })
}

/// BF16 bits `[out_features, in_features]`, written on `device`.
#[pyfunction]
#[pyo3(signature = (seed, shape, deviation, kind, device="cpu"))]
pub(super) fn plant_matrix<'py>(
    py: Python<'py>,
    seed: u32,
    shape: [usize; 2],
    deviation: f64,
    kind: Kind,
    device: &str,
) -> PyResult<Bound<'py, PyArray2<u16>>> {
    let device = device_named(device)?;
    let recipe = recipe(seed, deviation, kind)?;
    let weights = py.detach(|| plant_on_host(&device, recipe, shape));
    let weights: Vec<bf16> = weights.map_err(refused)?;
    let bits: &[u16] = weights.reinterpret_cast();
    let bits = Array::from_shape_vec(shape, bits.to_vec())
        .map_err(|e| PyValueError::new_err(e.to_string()))?;
    Ok(bits.into_pyarray(py))
}

/// `x @ weight.T` of a layer's matrix that was planted in `format` ("bf16" or "w12") on `device`, all of it or its 8-bit view.
#[pyfunction]
#[pyo3(signature = (x, seed, out_features, deviation, format, q_view=false, device="cpu"))]
#[expect(clippy::too_many_arguments, reason = "keywords in Python")]
pub(super) fn planted_matmul<'py>(
    py: Python<'py>,
    x: PyReadonlyArray2<'py, f32>,
    seed: u32,
    out_features: usize,
    deviation: f64,
    format: &str,
    q_view: bool,
    device: &str,
) -> PyResult<Bound<'py, PyArray2<f32>>> {
    let (num_rows, in_features) = x.as_array().dim();
    let device = device_named(device)?;
    let recipe = recipe(seed, deviation, Kind::Named("layer".to_owned()))?;
    let weights = PlantedWeights::from_iter([("w".to_owned(), PlantedTensor::Matrix(recipe))]);
    let loader = WeightLoader::of(&weights, &device);
    let format = WeightFormat::named(format).map_err(Error::from)?;
    let matrix = loader.linear("w", [out_features, in_features], format)?;
    let x = array_on(&device, &x)?;
    let mut y = nan_buffer_on(&device, num_rows * out_features)?;
    let view = match q_view {
        true => WeightView::Q,
        false => WeightView::Exact,
    };
    let store = Epilogue::Store;
    py.detach(|| matrix.forward_through(view, &device, &x, num_rows, &mut y, store))
        .map_err(refused)?;
    Ok(array(&y, (num_rows, out_features))?.into_pyarray(py))
}
