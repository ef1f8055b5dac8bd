//! Binding of [`Bf16Matmul`].

use numpy::ndarray::Array;
use numpy::{IntoPyArray, PyArray2, PyReadonlyArray2};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

use super::{buffer_on, device_named, packed_on, refused};
use crate::error::Error;
use crate::kernels::Kernel;
use crate::kernels::bf16_matmul::{Bf16Matmul, Bf16MatmulArgs, Epilogue, Product};

/// `x @ weight.T`, added to `residual` where there is one, on `device`.
#[pyfunction]
#[pyo3(signature = (x, weight, residual=None, device="cpu"))]
pub(super) fn bf16_matmul<'py>(
    py: Python<'py>,
    x: PyReadonlyArray2<'py, f32>,
    weight: PyReadonlyArray2<'py, u16>,
    residual: Option<PyReadonlyArray2<'py, f32>>,
    device: &str,
) -> PyResult<Bound<'py, PyArray2<f32>>> {
    let (num_rows, x_features) = x.as_array().dim();
    let device = device_named(device)?;
    let weight = packed_on(&device, &weight)?;
    if x_features != weight.in_features() {
        return Err(PyValueError::new_err(format!(
            "bf16_matmul: `x` must have {} columns, got {x_features}",
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
    let args = Bf16MatmulArgs {
        x: (&x).into(),
        num_rows,
        products: vec![Product {
            weight: &weight,
            y: &mut y,
        }],
        epilogue,
    };
    let run = || Bf16Matmul::run(&device, args);
    py.detach(run).map_err(refused)?;
    let y = y.read_back(len).map_err(Error::from)?;
    let y = Array::from_shape_vec((num_rows, weight.out_features()), y)
        .map_err(|e| PyValueError::new_err(e.to_string()))?;
    Ok(y.into_pyarray(py))
}
