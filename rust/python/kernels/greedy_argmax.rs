//! Binding of [`GreedyArgmax`].

use numpy::{IntoPyArray, PyArray1, PyReadonlyArray2};
use pyo3::prelude::*;

use super::{buffer, run};
use crate::kernels::greedy_argmax::{GreedyArgmax, GreedyArgmaxArgs};

/// The greedy id of every row of `logits`; `masked` lists the forbidden ids of each row.
#[pyfunction]
pub(super) fn greedy_argmax<'py>(
    py: Python<'py>,
    logits: PyReadonlyArray2<'py, f32>,
    masked: Vec<Vec<u32>>,
) -> PyResult<Bound<'py, PyArray1<u32>>> {
    let (num_rows, vocab_size) = logits.as_array().dim();
    let masked: Vec<&[u32]> = masked.iter().map(Vec::as_slice).collect();
    let mut token_ids = vec![u32::MAX; num_rows];
    run::<GreedyArgmax>(
        py,
        GreedyArgmaxArgs {
            logits: &buffer(&logits)?,
            num_rows,
            vocab_size,
            masked: &masked,
            token_ids: &mut token_ids,
        },
    )?;
    Ok(token_ids.into_pyarray(py))
}
