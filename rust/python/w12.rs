//! `specpilot_rs._core.w12`: the codec on numpy arrays, for tests and for looking at the planes.
//!
//! BF16 arrays are their bit patterns, `uint16`. Parts that are not a matrix raise `ValueError` with the codec's words.

use half::bf16;
use half::slice::{HalfBitsSliceExt, HalfFloatSliceExt};
use numpy::ndarray::Array;
use numpy::{IntoPyArray, PyArray2, PyReadonlyArray1, PyReadonlyArray2};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::weights::w12::{Encoding, W12Matrix, W12Planes, encode};

/// The W12 codec on numpy arrays.
#[pymodule(submodule)]
#[pyo3(name = "w12")]
pub(super) mod w12_module {
    #[pymodule_export]
    use super::w12_decode as decode;
    #[pymodule_export]
    use super::w12_encode as encode;
}

/// Encodes a row-major matrix.
pub(super) fn encode_array(
    py: Python<'_>,
    weight: &PyReadonlyArray2<'_, u16>,
) -> PyResult<Encoding> {
    let (out_features, in_features) = weight.as_array().dim();
    if out_features * in_features == 0 {
        return Err(PyValueError::new_err("a matrix to encode has weights"));
    }
    let weights: &[bf16] = weight.as_slice()?.reinterpret_cast();
    Ok(py.detach(|| encode(weights, out_features, in_features)))
}

/// The parts and figures of a matrix as a dictionary, or the reason for which it stays BF16 as text.
#[pyfunction]
#[pyo3(name = "encode")]
fn w12_encode<'py>(
    py: Python<'py>,
    weight: PyReadonlyArray2<'py, u16>,
) -> PyResult<Bound<'py, PyAny>> {
    let matrix = match encode_array(py, &weight)? {
        Encoding::W12(matrix) => matrix,
        Encoding::KeepBf16(reason) => return Ok(reason.to_string().into_pyobject(py)?.into_any()),
    };
    let (parts, stats) = (matrix.planes(), matrix.stats());
    let dict = PyDict::new(py);
    dict.set_item("plane8", parts.plane8.to_vec().into_pyarray(py))?;
    dict.set_item("plane4", parts.plane4.to_vec().into_pyarray(py))?;
    dict.set_item("base", parts.base.to_vec().into_pyarray(py))?;
    dict.set_item("counts", parts.counts.to_vec().into_pyarray(py))?;
    dict.set_item("escapes", parts.escapes.to_vec().into_pyarray(py))?;
    dict.set_item("num_escapes", stats.num_escapes)?;
    dict.set_item("bits_per_weight", stats.bits_per_weight)?;
    dict.set_item("num_bytes", stats.num_bytes)?;
    dict.set_item("source_bytes", stats.source_bytes)?;
    Ok(dict.into_any())
}

/// The matrix that five parts stand for.
#[pyfunction]
#[pyo3(name = "decode")]
#[allow(clippy::too_many_arguments, reason = "keywords in Python")]
fn w12_decode<'py>(
    py: Python<'py>,
    out_features: usize,
    in_features: usize,
    plane8: PyReadonlyArray1<'py, u8>,
    plane4: PyReadonlyArray1<'py, u8>,
    base: PyReadonlyArray1<'py, u8>,
    counts: PyReadonlyArray1<'py, u16>,
    escapes: PyReadonlyArray1<'py, u32>,
) -> PyResult<Bound<'py, PyArray2<u16>>> {
    let parts = W12Planes {
        plane8: plane8.as_slice()?,
        plane4: plane4.as_slice()?,
        base: base.as_slice()?,
        counts: counts.as_slice()?,
        escapes: escapes.as_slice()?,
    };
    let weights = py
        .detach(|| {
            W12Matrix::from_planes(out_features, in_features, parts).map(|matrix| matrix.decode())
        })
        .map_err(|e| PyValueError::new_err(e.to_string()))?;
    let bits: &[u16] = weights.reinterpret_cast();
    let array = Array::from_shape_vec((out_features, in_features), bits.to_vec())
        .map_err(|e| PyValueError::new_err(e.to_string()))?;
    Ok(array.into_pyarray(py))
}
