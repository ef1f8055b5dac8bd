//! Binding of [`RmsNorm`].

use numpy::{IntoPyArray, PyArray2, PyReadonlyArray1, PyReadonlyArray2};
use pyo3::prelude::*;

use super::{NanRows, array, array_on, device_named, run};
use crate::kernels::rms_norm::{NormOutput, RmsNorm, RmsNormArgs};

/// Normalises `num_vectors` vectors of `width`, `x_stride` apart in the flat `x`; with `residual` and `factor`, the result
/// is `(residual + normed) * factor`. `for_matmul` asks for rows as matmuls of the device take them.
#[pyfunction]
#[pyo3(signature = (x, x_offset, x_stride, num_vectors, width, eps, weight=None, residual=None, factor=1.0, for_matmul=false,
                    device="cpu"))]
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
    for_matmul: bool,
    device: &str,
) -> PyResult<Bound<'py, PyArray2<f32>>> {
    let py = x.py();
    let device = device_named(device)?;
    let weight = weight.as_ref().map(|weight| array_on(&device, weight));
    let weight = weight.transpose()?;
    let x = array_on(&device, &x)?;
    let args = |y| RmsNormArgs {
        x: &x,
        x_offset,
        x_stride,
        num_vectors,
        width,
        weight: weight.as_ref(),
        eps,
        y,
    };
    let shape = (num_vectors, width);
    if let Some(residual) = &residual {
        let mut y = array_on(&device, residual)?;
        let output = NormOutput::AddTo { y: &mut y, factor };
        run::<RmsNorm>(py, &device, args(output))?;
        return Ok(array(&y, shape)?.into_pyarray(py));
    }
    let mut y = NanRows::on(&device, num_vectors, width, for_matmul)?;
    run::<RmsNorm>(py, &device, args(NormOutput::Store(y.output())))?;
    Ok(y.array(&device, shape, shape)?.into_pyarray(py))
}
