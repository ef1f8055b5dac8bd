//! Binding of [`W12Matmul`].

use numpy::{IntoPyArray, PyArray2, PyReadonlyArray2};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

use super::{array, buffer, nan_buffer, run};
use crate::kernels::bf16_matmul::Epilogue;
use crate::kernels::w12_matmul::{W12Matmul, W12MatmulArgs, WeightView};
use crate::python::w12::encode_array;
use crate::weights::w12::Encoding;

/// `x @ weight.T` through W12, added to `residual` where there is one; `q_view` reads the 8-bit view only.
#[pyfunction]
#[pyo3(signature = (x, weight, residual=None, q_view=false))]
pub(super) fn w12_matmul<'py>(
    py: Python<'py>,
    x: PyReadonlyArray2<'py, f32>,
    weight: PyReadonlyArray2<'py, u16>,
    residual: Option<PyReadonlyArray2<'py, f32>>,
    q_view: bool,
) -> PyResult<Bound<'py, PyArray2<f32>>> {
    let (num_rows, x_features) = x.as_array().dim();
    let weight = match encode_array(py, &weight)? {
        Encoding::W12(matrix) => matrix.pack(),
        Encoding::KeepBf16(reason) => return Err(PyValueError::new_err(reason.to_string())),
    };
    if x_features != weight.in_features() {
        return Err(PyValueError::new_err(format!(
            "w12_matmul: `x` must have {} columns, got {x_features}",
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
    run::<W12Matmul>(
        py,
        W12MatmulArgs {
            x: &buffer(&x)?,
            num_rows,
            weight: &weight,
            y: &mut y,
            epilogue,
            view: if q_view {
                WeightView::Q
            } else {
                WeightView::Exact
            },
        },
    )?;
    Ok(array(&y, (num_rows, weight.out_features()))?.into_pyarray(py))
}
