//! Binding of [`RmsNorm`].

use numpy::{IntoPyArray, PyArray2, PyReadonlyArray1, PyReadonlyArray2};
use pyo3::prelude::*;

use super::{array, array_on, device_named, nan_buffer_on, run};
use crate::kernels::rms_norm::{NormEpilogue, RmsNorm, RmsNormArgs};

/// Normalises `num_vectors` vectors of `width`, `x_stride` apart in the flat `x`; with `residual` and `factor`, the result
/// is `(residual + normed) * factor`.
#[pyfunction]
#[pyo3(signature = (x, x_offset, x_stride, num_vectors, width, eps, weight=None, residual=None, factor=1.0, device="cpu"))]
#[allow(clippy::too_many_arguments, reason = "a kernel's arguments")]
pub(super) fn rms_norm<'py>(
    x: PyReadonlyArray1<'py, f32>,
    x_offset: usize,
    x_stride: usize,
    num_vectors: usize,
    width: usize,
    eps: f32,
    weight: Option<PyReadonlyArray1<'py, f32>>,
    residual: Option<PyReadonlyArray2<'py, f32>>,
    factor: f32,
    device: &str,
) -> PyResult<Bound<'py, PyArray2<f32>>> {
    let py = x.py();
    let device = device_named(device)?;
    let weight = weight.as_ref().map(|weight| array_on(&device, weight));
    let weight = weight.transpose()?;
    let (mut y, epilogue) = match &residual {
        Some(residual) => (
            array_on(&device, residual)?,
            NormEpilogue::AddToOutput { factor },
        ),
        None => (
            nan_buffer_on(&device, num_vectors * width)?,
            NormEpilogue::Store,
        ),
    };
    run::<RmsNorm>(
        py,
        &device,
        RmsNormArgs {
            x: &array_on(&device, &x)?,
            x_offset,
            x_stride,
            num_vectors,
            width,
            weight: weight.as_ref(),
            eps,
            epilogue,
            y: &mut y,
        },
    )?;
    Ok(array(&y, (num_vectors, width))?.into_pyarray(py))
}
