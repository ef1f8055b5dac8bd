//! Binding of [`ShapeLogits`].

use numpy::{IntoPyArray, PyArray2, PyReadonlyArray2};
use pyo3::prelude::*;

use super::{array, array_on, device_named, run};
use crate::kernels::draft_select::LogitShape;
use crate::kernels::shape_logits::{ShapeLogits, ShapeLogitsArgs};

/// `logits` `[rows, vocab_size]` as a drafter shapes them.
#[pyfunction]
#[pyo3(signature = (logits, multiplier=1.0, softcap=None, device="cpu"))]
pub(super) fn shape_logits<'py>(
    py: Python<'py>,
    logits: PyReadonlyArray2<'py, f32>,
    multiplier: f32,
    softcap: Option<f32>,
    device: &str,
) -> PyResult<Bound<'py, PyArray2<f32>>> {
    let (num_rows, vocab_size) = logits.as_array().dim();
    let device = device_named(device)?;
    let mut shaped = array_on(&device, &logits)?;
    run::<ShapeLogits>(
        py,
        &device,
        ShapeLogitsArgs {
            shape: LogitShape {
                multiplier,
                softcap,
            },
            num_rows,
            vocab_size,
            logits: &mut shaped,
        },
    )?;
    Ok(array(&shaped, (num_rows, vocab_size))?.into_pyarray(py))
}
