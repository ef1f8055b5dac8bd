//! Binding of [`Bf16Matmul`].

use numpy::{IntoPyArray, PyArray2, PyReadonlyArray2};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

use super::{array, buffer, nan_buffer, packed, run};
use crate::kernels::bf16_matmul::{Bf16Matmul, Bf16MatmulArgs, Epilogue};

/// `x @ weight.T`, added to `residual` where there is one.
#[pyfunction]
#[pyo3(signature = (x, weight, residual=None))]
pub(super) fn bf16_matmul<'py>(
    py: Python<'py>,
    x: PyReadonlyArray2<'py, f32>,
    weight: PyReadonlyArray2<'py, u16>,
    residual: Option<PyReadonlyArray2<'py, f32>>,
) -> PyResult<Bound<'py, PyArray2<f32>>> {
    let (num_rows, x_features) = x.as_array().dim();
    let weight = packed(&weight)?;
    if x_features != weight.in_features() {
        return Err(PyValueError::new_err(format!(
            "bf16_matmul: `x` must have {} columns, got {x_features}",
            weight.in_features()
        )));
    }
    let (mut y, epilogue) = match residual {
        Some(residual) => (buffer(&residual)?, Epilogue::AddToOutput),
        None => (
            nan_buffer(num_rows * weight.out_features()),
            Epilogue::Store,
        ),
    };
    run::<Bf16Matmul>(
        py,
        Bf16MatmulArgs {
            x: &buffer(&x)?,
            num_rows,
            weight: &weight,
            y: &mut y,
            epilogue,
        },
    )?;
    Ok(array(&y, (num_rows, weight.out_features()))?.into_pyarray(py))
}
