//! Binding of [`GatherTaps`].

use numpy::{IntoPyArray, PyArray2, PyReadonlyArray2};
use pyo3::prelude::*;

use super::{array, array_on, device_named, list_on, nan_buffer_on, run};
use crate::device::Buffer;
use crate::kernels::gather_taps::{GatherTaps, GatherTapsArgs};

/// Rows `rows` of all `taps`, each `[rows of the pass, width]`, side by side.
#[pyfunction]
#[pyo3(signature = (taps, rows, device="cpu"))]
pub(super) fn gather_taps<'py>(
    py: Python<'py>,
    taps: Vec<PyReadonlyArray2<'py, f32>>,
    rows: Vec<u32>,
    device: &str,
) -> PyResult<Bound<'py, PyArray2<f32>>> {
    let width = taps.first().map_or(0, |tap| tap.as_array().ncols());
    let device = device_named(device)?;
    let buffers = taps.iter().map(|tap| array_on(&device, tap));
    let buffers: Vec<Buffer<f32>> = buffers.collect::<PyResult<_>>()?;
    let shape = (rows.len(), taps.len() * width);
    let mut y = nan_buffer_on(&device, shape.0 * shape.1)?;
    run::<GatherTaps>(
        py,
        &device,
        GatherTapsArgs {
            taps: &buffers,
            rows: &list_on(&device, &rows)?,
            width,
            y: &mut y,
        },
    )?;
    Ok(array(&y, shape)?.into_pyarray(py))
}
