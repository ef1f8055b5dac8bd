//! Binding of [`AppendRing`].

use numpy::{IntoPyArray, PyArray3, PyReadonlyArray1, PyReadonlyArray2, PyReadonlyArray3};
use pyo3::prelude::*;

use super::{array, array_on, device_named, placed_rows, run};
use crate::kernels::append_ring::{AppendRing, AppendRingArgs, Ring};

/// Rings `[slots, ring_len, row_len]` after the tail's `rows` went to `slot` from `first_position` on.
#[pyfunction]
#[pyo3(signature = (tail, rows, first_position, slot, rings, device="cpu"))]
pub(super) fn append_ring<'py>(
    py: Python<'py>,
    tail: PyReadonlyArray2<'py, f32>,
    rows: PyReadonlyArray1<'py, u32>,
    first_position: usize,
    slot: usize,
    rings: PyReadonlyArray3<'py, f32>,
    device: &str,
) -> PyResult<Bound<'py, PyArray3<f32>>> {
    let (_, ring_len, row_len) = rings.as_array().dim();
    let device = device_named(device)?;
    let mut to = array_on(&device, &rings)?;
    let placed = placed_rows(&device, (slot, first_position), &[], rows.as_slice()?)?;
    run::<AppendRing>(
        py,
        &device,
        AppendRingArgs {
            rows: &placed,
            rings: vec![Ring {
                tail: &array_on(&device, &tail)?,
                row_len,
                ring_len,
                rings: &mut to,
            }],
        },
    )?;
    Ok(array(&to, rings.as_array().dim())?.into_pyarray(py))
}
