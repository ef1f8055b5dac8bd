//! Binding of [`Rope`].

use numpy::{IntoPyArray, PyArray3, PyReadonlyArray1, PyReadonlyArray3};
use pyo3::prelude::*;

use super::{array, buffer, run};
use crate::kernels::rope::{Rope, RopeArgs};

/// Turns the pairs `(j, j + pair_offset)` of every head of `x` `[num_rows, num_heads, head_dim]`.
#[pyfunction]
pub(super) fn rope<'py>(
    py: Python<'py>,
    x: PyReadonlyArray3<'py, f32>,
    positions: PyReadonlyArray1<'py, u32>,
    inverse_frequencies: PyReadonlyArray1<'py, f32>,
    pair_offset: usize,
) -> PyResult<Bound<'py, PyArray3<f32>>> {
    let shape = x.as_array().dim();
    let mut y = buffer(&x)?;
    run::<Rope>(
        py,
        RopeArgs {
            x: &mut y,
            num_heads: shape.1,
            head_dim: shape.2,
            positions: positions.as_slice()?,
            inverse_frequencies: &buffer(&inverse_frequencies)?,
            pair_offset,
        },
    )?;
    Ok(array(&y, shape)?.into_pyarray(py))
}
