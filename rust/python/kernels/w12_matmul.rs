//! Binding of [`W12Matmul`].

use numpy::ndarray::Array;
use numpy::{IntoPyArray, PyArray2, PyReadonlyArray2};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

use super::{buffer_on, device_named, refused};
use crate::error::Error;
use crate::kernels::Kernel;
use crate::kernels::bf16_matmul::{Epilogue, Product};
use crate::kernels::w12_matmul::{W12Matmul, W12MatmulArgs, WeightView};
use crate::python::w12::encode_array;
use crate::weights::w12::Encoding;

/// `x @ weight.T` through W12, added to `residual` where there is one; `q_view` reads the 8-bit view only; on `device`.
#[pyfunction]
#[pyo3(signature = (x, weight, residual=None, q_view=false, device="cpu"))]
pub(super) fn w12_matmul<'py>(
    py: Python<'py>,
    x: PyReadonlyArray2<'py, f32>,
    weight: PyReadonlyArray2<'py, u16>,
    residual: Option<PyReadonlyArray2<'py, f32>>,
    q_view: bool,
    device: &str,
) -> PyResult<Bound<'py, PyArray2<f32>>> {
    let (num_rows, x_features) = x.as_array().dim();
    let device = device_named(device)?;
    let weight = match encode_array(py, &weight)? {
        Encoding::W12(matrix) => matrix.pack_on(&device).map_err(Error::from)?,
        Encoding::KeepBf16(reason) => return Err(PyValueError::new_err(reason.to_string())),
    };
    if x_features != weight.in_features() {
        return Err(PyValueError::new_err(format!(
            "w12_matmul: `x` must have {} columns, got {x_features}",
            weight.in_features()
        )));
    }
    let len = num_rows * weight.out_features();
    let (mut y, epilogue) = match residual {
        Some(residual) => (
            buffer_on(&device, residual.as_slice()?)?,
            Epilogue::AddToOutput,
        ),
        None => (buffer_on(&device, &vec![f32::NAN; len])?, Epilogue::Store),
    };
    let x = buffer_on(&device, x.as_slice()?)?;
    let args = W12MatmulArgs {
        x: (&x).into(),
        num_rows,
        products: vec![Product {
            weight: &weight,
            y: &mut y,
        }],
        epilogue,
        view: if q_view {
            WeightView::Q
        } else {
            WeightView::Exact
        },
    };
    let run = || W12Matmul::run(&device, args);
    py.detach(run).map_err(refused)?;
    let y = y.read_back(len).map_err(Error::from)?;
    let y = Array::from_shape_vec((num_rows, weight.out_features()), y)
        .map_err(|e| PyValueError::new_err(e.to_string()))?;
    Ok(y.into_pyarray(py))
}
