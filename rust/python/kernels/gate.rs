//! Binding of [`Gate`].

use numpy::{IntoPyArray, PyArray2, PyReadonlyArray1, PyReadonlyArray2};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

use super::{NanRows, array_on, device_named, run};
use crate::kernels::gate::{Gate, GateArgs, GateKind};

/// `f(x) * values` with `kind` "silu", "sigmoid" or "gelu_tanh"; the vectors of the flat `x` lie `x_stride` apart, a row of
/// the result is `per_row` of them. `for_matmul` asks for rows as matmuls of the device take them.
#[pyfunction]
#[pyo3(signature = (kind, x, x_offset, x_stride, values, per_row=1, for_matmul=false, device="cpu"))]
#[allow(clippy::too_many_arguments, reason = "a kernel's arguments")]
pub(super) fn gate<'py>(
    py: Python<'py>,
    kind: &str,
    x: PyReadonlyArray1<'py, f32>,
    x_offset: usize,
    x_stride: usize,
    values: PyReadonlyArray2<'py, f32>,
    per_row: usize,
    for_matmul: bool,
    device: &str,
) -> PyResult<Bound<'py, PyArray2<f32>>> {
    let kind = gate_kind("gate", kind)?;
    let (num_vectors, width) = values.as_array().dim();
    let device = device_named(device)?;
    let rows = (num_vectors / per_row.max(1), per_row * width);
    let mut gated = NanRows::on(&device, rows.0, rows.1, for_matmul)?;
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
            values: &array_on(&device, &values)?,
            per_row,
            y: gated.output(),
        },
    )?;
    Ok(gated
        .array(&device, rows, (num_vectors, width))?
        .into_pyarray(py))
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
