//! Binding of [`multiply_together`].

use numpy::{IntoPyArray, PyArray2, PyReadonlyArray1, PyReadonlyArray2};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

use super::{array, array_on, buffer_on, device_named, nan_buffer_on, packed_on, refused, run};
use crate::device::Device;
use crate::error::Error;
use crate::kernels::bf16_matmul::{Epilogue, Product};
use crate::kernels::matmul_rows::{MatmulInput, MatmulRows};
use crate::kernels::rms_norm::{RmsNorm, RmsNormArgs};
use crate::kernels::w12_matmul::WeightView;
use crate::python::w12::encode_array;
use crate::weights::linear::{Linear, multiply_together as multiply};
use crate::weights::w12::Encoding;

/// `x @ weight.T` of matrices of one K, each `(weight, "w12" | "bf16")`; `q_view` reads the 8-bit view of those in W12.
/// With `norm`, a weight, and `eps`, `x` is normalised first, straight into rows for a matmul. Of all rows only the first
/// `num_rows` are multiplied, if that is given.
#[pyfunction]
#[pyo3(signature = (x, weights, q_view=false, norm=None, eps=0.0, num_rows=None, device="cpu"))]
#[expect(clippy::too_many_arguments, reason = "keywords of a Python function")]
pub(super) fn multiply_together<'py>(
    py: Python<'py>,
    x: PyReadonlyArray2<'py, f32>,
    weights: Vec<(PyReadonlyArray2<'py, u16>, String)>,
    q_view: bool,
    norm: Option<PyReadonlyArray1<'py, f32>>,
    eps: f32,
    num_rows: Option<usize>,
    device: &str,
) -> PyResult<Vec<Bound<'py, PyArray2<f32>>>> {
    let (all_rows, in_features) = x.as_array().dim();
    let num_rows = num_rows.unwrap_or(all_rows);
    let device = device_named(device)?;
    let mut matrices = Vec::new();
    let mut results = Vec::new();
    for (weight, format) in &weights {
        let matrix = linear_on(py, &device, weight, format)?;
        results.push(nan_buffer_on(&device, num_rows * matrix.out_features())?);
        matrices.push(matrix);
    }
    if let Some(matrix) = matrices.iter().find(|m| m.in_features() != in_features) {
        return Err(PyValueError::new_err(format!(
            "multiply_together: `x` must have {} columns, got {in_features}",
            matrix.in_features()
        )));
    }
    let x = buffer_on(&device, x.as_slice()?)?;
    let view = match q_view {
        true => WeightView::Q,
        false => WeightView::Exact,
    };
    let mut rows = MatmulRows::with(in_features, |words| {
        nan_buffer_on(&device, all_rows * words)
    })?;
    if let Some(norm) = &norm {
        let args = RmsNormArgs {
            x: &x,
            x_offset: 0,
            x_stride: in_features,
            num_vectors: all_rows,
            width: in_features,
            weight: Some(&array_on(&device, norm)?),
            eps,
            y: (&mut rows).into(),
        };
        run::<RmsNorm>(py, &device, args)?;
    }
    let x = match norm {
        Some(_) => MatmulInput::from(&rows),
        None => MatmulInput::from(&x),
    };
    let multiplied = || {
        let products = matrices.iter().zip(&mut results);
        let products = products.map(|(weight, y)| Product { weight, y });
        multiply(view, &device, x, num_rows, products, Epilogue::Store)
    };
    py.detach(multiplied).map_err(refused)?;
    let results = matrices.iter().zip(&results);
    results
        .map(|(matrix, y)| Ok(array(y, (num_rows, matrix.out_features()))?.into_pyarray(py)))
        .collect()
}

fn linear_on(
    py: Python<'_>,
    device: &Device,
    weight: &PyReadonlyArray2<'_, u16>,
    format: &str,
) -> PyResult<Linear> {
    match format {
        "bf16" => Ok(Linear::Bf16(packed_on(device, weight)?)),
        "w12" => match encode_array(py, weight)? {
            Encoding::W12(matrix) => Ok(Linear::W12(matrix.pack_on(device).map_err(Error::from)?)),
            Encoding::KeepBf16(reason) => Err(PyValueError::new_err(reason.to_string())),
        },
        _ => Err(PyValueError::new_err(format!(
            "a format is \"w12\" or \"bf16\", got \"{format}\""
        ))),
    }
}
