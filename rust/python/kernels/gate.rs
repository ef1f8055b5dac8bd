//! Binding of [`Gate`].

use numpy::{IntoPyArray, PyArray2, PyReadonlyArray1, PyReadonlyArray2};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

use super::{array, array_on, device_named, run};
use crate::kernels::gate::{Gate, GateArgs, GateKind};

/// `f(x) * y` with `kind` "silu", "sigmoid" or "gelu_tanh"; the vectors of the flat `x` lie `x_stride` apart.
#[pyfunction]
#[pyo3(signature = (kind, x, x_offset, x_stride, y, device="cpu"))]
pub(super) fn gate<'py>(
    py: Python<'py>,
    kind: &str,
    x: PyReadonlyArray1<'py, f32>,
    x_offset: usize,
    x_stride: usize,
    y: PyReadonlyArray2<'py, f32>,
    device: &str,
) -> PyResult<Bound<'py, PyArray2<f32>>> {
    let kind = gate_kind("gate", kind)?;
    let (num_vectors, width) = y.as_array().dim();
    let device = device_named(device)?;
    let mut gated = array_on(&device, &y)?;
    run::<Gate>(
        py,
        &device,
        GateArgs {
            kind,
            x: &array_on(&device, &x)?,
            x_offset,
            x_stride,
            num_vectors,
            width,
            y: &mut gated,
        },
    )?;
    Ok(array(&gated, (num_vectors, width))?.into_pyarray(py))
}

/// The gate that `kernel` was asked for.
pub(super) fn gate_kind(kernel: &str, kind: &str) -> PyResult<GateKind> {
    match kind {
        "silu" => Ok(GateKind::SiluMultiply),
        "sigmoid" => Ok(GateKind::SigmoidMultiply),
        "gelu_tanh" => Ok(GateKind::GeluTanhMultiply),
        got => Err(PyValueError::new_err(format!(
            "{kernel}: `kind` must be silu, sigmoid or gelu_tanh, got {got}"
        ))),
    }
}
