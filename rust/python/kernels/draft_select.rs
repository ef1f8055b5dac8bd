//! Binding of [`DraftSelect`].

use numpy::ndarray::Array;
use numpy::{IntoPyArray, PyArray3, PyArray4, PyReadonlyArray2, PyReadonlyArray3};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

use super::{array, array_on, buffer_on, device_named, list_on, nan_buffer_on, packed_on, run};
use crate::error::Error;
use crate::kernels::draft_select::{DraftSelect, DraftSelectArgs, LogitShape, Selector};

/// Candidates `[levels, blocks, top_k]` of `logits` `[levels, blocks, vocab_size]` and their log-probabilities
/// `[levels, blocks, parents, top_k]`: one parent without `selector` (`gate`, `predecessor`, `successor`,
/// `anchor_tokens`), else `top_k`.
#[pyfunction]
#[pyo3(signature = (logits, top_k, multiplier=1.0, softcap=None, selector=None, device="cpu"))]
#[allow(clippy::type_complexity, reason = "arrays in, arrays out")]
pub(super) fn draft_select<'py>(
    py: Python<'py>,
    logits: PyReadonlyArray3<'py, f32>,
    top_k: usize,
    multiplier: f32,
    softcap: Option<f32>,
    selector: Option<(
        PyReadonlyArray3<'py, f32>,
        PyReadonlyArray2<'py, u16>,
        PyReadonlyArray2<'py, u16>,
        Vec<u32>,
    )>,
    device: &str,
) -> PyResult<(Bound<'py, PyArray3<u32>>, Bound<'py, PyArray4<f32>>)> {
    let (num_levels, num_blocks, vocab_size) = logits.as_array().dim();
    let num_rows = num_levels * num_blocks;
    let num_parents = if selector.is_some() { top_k } else { 1 };
    let device = device_named(device)?;
    let selector = match &selector {
        Some((gate, predecessor, successor, anchors)) => Some((
            array_on(&device, gate)?,
            packed_on(&device, predecessor)?,
            packed_on(&device, successor)?,
            list_on(&device, anchors)?,
        )),
        None => None,
    };
    let mut token_ids = buffer_on(&device, &vec![u32::MAX; num_rows * top_k])?;
    let mut log_probs = nan_buffer_on(&device, num_rows * num_parents * top_k)?;
    run::<DraftSelect>(
        py,
        &device,
        DraftSelectArgs {
            logits: &array_on(&device, &logits)?,
            vocab_size,
            num_levels,
            num_blocks,
            top_k,
            shape: LogitShape {
                multiplier,
                softcap,
            },
            selector: selector
                .as_ref()
                .map(|(gate, predecessor, successor, anchors)| Selector {
                    gate,
                    predecessor,
                    successor,
                    anchor_tokens: anchors,
                }),
            token_ids: &mut token_ids,
            log_probs: &mut log_probs,
        },
    )?;
    let token_ids = token_ids.read_back(num_rows * top_k).map_err(Error::from)?;
    let token_ids = Array::from_shape_vec((num_levels, num_blocks, top_k), token_ids)
        .map_err(|e| PyValueError::new_err(e.to_string()))?;
    let log_probs = array(&log_probs, (num_levels, num_blocks, num_parents, top_k))?;
    Ok((token_ids.into_pyarray(py), log_probs.into_pyarray(py)))
}
