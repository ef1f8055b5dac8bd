//! Binding of [`GatherTaps`].

use numpy::{IntoPyArray, PyArray2, PyReadonlyArray2};
use pyo3::prelude::*;

use super::{array, buffer, nan_buffer, run};
use crate::device::Buffer;
use crate::kernels::gather_taps::{GatherTaps, GatherTapsArgs};

/// Rows `rows` of all `taps`, each `[rows of the pass, width]`, side by side.
#[pyfunction]
pub(super) fn gather_taps<'py>(
    py: Python<'py>,
    taps: Vec<PyReadonlyArray2<'py, f32>>,
    rows: Vec<u32>,
) -> PyResult<Bound<'py, PyArray2<f32>>> {
    let width = taps.first().map_or(0, |tap| tap.as_array().ncols());
    let buffers: Vec<Buffer<f32>> = taps.iter().map(buffer).collect::<PyResult<_>>()?;
    let shape = (rows.len(), taps.len() * width);
    let mut y = nan_buffer(shape.0 * shape.1);
    run::<GatherTaps>(
        py,
        GatherTapsArgs {
            taps: &buffers,
            rows: &rows,
            width,
            y: &mut y,
        },
    )?;
    Ok(array(&y, shape)?.into_pyarray(py))
}
