//! Binding of [`Rope`].

use numpy::{IntoPyArray, PyArray3, PyReadonlyArray1, PyReadonlyArray3};
use pyo3::prelude::*;

use super::{array, array_on, device_named, list_on, run};
use crate::kernels::rope::{Rope, RopeArgs};

/// Turns the pairs `(j, j + pair_offset)` of every head of `x` `[num_rows, num_heads, head_dim]`.
#[pyfunction]
#[pyo3(signature = (x, positions, inverse_frequencies, pair_offset, device="cpu"))]
pub(super) fn rope<'py>(
    py: Python<'py>,
    x: PyReadonlyArray3<'py, f32>,
    positions: PyReadonlyArray1<'py, u32>,
    inverse_frequencies: PyReadonlyArray1<'py, f32>,
    pair_offset: usize,
    device: &str,
) -> PyResult<Bound<'py, PyArray3<f32>>> {
    let shape = x.as_array().dim();
    let device = device_named(device)?;
    let mut y = array_on(&device, &x)?;
    run::<Rope>(
        py,
        &device,
        RopeArgs {
            x: &mut y,
            num_heads: shape.1,
            head_dim: shape.2,
            positions: &list_on(&device, positions.as_slice()?)?,
            inverse_frequencies: &array_on(&device, &inverse_frequencies)?,
            pair_offset,
        },
    )?;
    Ok(array(&y, shape)?.into_pyarray(py))
}
