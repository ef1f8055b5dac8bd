//! Binding of [`AppendRing`].

use numpy::{IntoPyArray, PyArray3, PyReadonlyArray1, PyReadonlyArray2, PyReadonlyArray3};
use pyo3::prelude::*;

use super::{array, buffer, run};
use crate::kernels::append_ring::{AppendRing, AppendRingArgs};

/// Rings `[slots, ring_len, row_len]` after the tail's `rows` went to `slot` from `first_position` on.
#[pyfunction]
pub(super) fn append_ring<'py>(
    py: Python<'py>,
    tail: PyReadonlyArray2<'py, f32>,
    rows: PyReadonlyArray1<'py, u32>,
    first_position: usize,
    slot: usize,
    rings: PyReadonlyArray3<'py, f32>,
) -> PyResult<Bound<'py, PyArray3<f32>>> {
    let (_, ring_len, row_len) = rings.as_array().dim();
    let mut to = buffer(&rings)?;
    run::<AppendRing>(
        py,
        AppendRingArgs {
            tail: &buffer(&tail)?,
            rows: rows.as_slice()?,
            first_position,
            row_len,
            ring_len,
            slot,
            rings: &mut to,
        },
    )?;
    Ok(array(&to, rings.as_array().dim())?.into_pyarray(py))
}
