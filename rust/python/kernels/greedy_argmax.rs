//! Binding of [`GreedyArgmax`].

use numpy::{IntoPyArray, PyArray1, PyReadonlyArray2};
use pyo3::prelude::*;

use super::{array_on, device_named, masked_on, run};
use crate::kernels::greedy_argmax::{GreedyArgmax, GreedyArgmaxArgs};

/// Token ids and their logits, one per row.
type Choices<'py> = (Bound<'py, PyArray1<u32>>, Bound<'py, PyArray1<f32>>);

/// The greedy id of every row of `logits` and its logit; `masked` lists the forbidden ids of each row.
#[pyfunction]
#[pyo3(signature = (logits, masked, device="cpu"))]
pub(super) fn greedy_argmax<'py>(
    py: Python<'py>,
    logits: PyReadonlyArray2<'py, f32>,
    masked: Vec<Vec<u32>>,
    device: &str,
) -> PyResult<Choices<'py>> {
    let (num_rows, vocab_size) = logits.as_array().dim();
    let device = device_named(device)?;
    let mut token_ids = vec![u32::MAX; num_rows];
    let mut best_logits = vec![f32::NAN; num_rows];
    run::<GreedyArgmax>(
        py,
        &device,
        GreedyArgmaxArgs {
            logits: &array_on(&device, &logits)?,
            num_rows,
            vocab_size,
            masked: &masked_on(&device, &masked)?,
            token_ids: &mut token_ids,
            best_logits: &mut best_logits,
        },
    )?;
    Ok((token_ids.into_pyarray(py), best_logits.into_pyarray(py)))
}
