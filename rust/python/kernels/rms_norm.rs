//! Binding of [`RmsNorm`].

use numpy::{IntoPyArray, PyArray2, PyReadonlyArray1};
use pyo3::prelude::*;

use super::{array, array_on, device_named, nan_buffer_on, run};
use crate::kernels::rms_norm::{RmsNorm, RmsNormArgs};

/// Normalises `num_vectors` vectors of `width`, `x_stride` apart in the flat `x`.
#[pyfunction]
#[pyo3(signature = (x, x_offset, x_stride, num_vectors, width, eps, weight=None, device="cpu"))]
#[allow(clippy::too_many_arguments, reason = "a kernel's arguments")]
pub(super) fn rms_norm<'py>(
    x: PyReadonlyArray1<'py, f32>,
    x_offset: usize,
    x_stride: usize,
    num_vectors: usize,
    width: usize,
    eps: f32,
    weight: Option<PyReadonlyArray1<'py, f32>>,
    device: &str,
) -> PyResult<Bound<'py, PyArray2<f32>>> {
    let py = x.py();
    let device = device_named(device)?;
    let weight = weight.as_ref().map(|weight| array_on(&device, weight));
    let weight = weight.transpose()?;
    let mut y = nan_buffer_on(&device, num_vectors * width)?;
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
            y: &mut y,
        },
    )?;
    Ok(array(&y, (num_vectors, width))?.into_pyarray(py))
}
