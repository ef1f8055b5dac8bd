//! Binding of [`SampleRows`].

use numpy::{IntoPyArray, PyArray1, PyReadonlyArray2};
use pyo3::prelude::*;

use super::{buffer, run};
use crate::kernels::sample_rows::{RowSampler, SampleRows, SampleRowsArgs};

/// Token ids and their logits, one per row.
type Choices<'py> = (Bound<'py, PyArray1<u32>>, Bound<'py, PyArray1<f32>>);

/// Temperature, top_k, top_p, min_p, seed and position of a row.
type SamplerTuple = (f64, usize, f64, f64, u64, u32);

/// The id drawn from every row of `logits` and its logit; `masked` lists the forbidden ids of each row.
#[pyfunction]
pub(super) fn sample_rows<'py>(
    py: Python<'py>,
    logits: PyReadonlyArray2<'py, f32>,
    masked: Vec<Vec<u32>>,
    samplers: Vec<SamplerTuple>,
) -> PyResult<Choices<'py>> {
    let (num_rows, vocab_size) = logits.as_array().dim();
    let masked: Vec<&[u32]> = masked.iter().map(Vec::as_slice).collect();
    let samplers: Vec<RowSampler> = samplers
        .into_iter()
        .map(
            |(temperature, top_k, top_p, min_p, seed, position)| RowSampler {
                temperature,
                top_k,
                top_p,
                min_p,
                seed,
                position,
            },
        )
        .collect();
    let mut token_ids = vec![u32::MAX; num_rows];
    let mut chosen_logits = vec![f32::NAN; num_rows];
    run::<SampleRows>(
        py,
        SampleRowsArgs {
            logits: &buffer(&logits)?,
            num_rows,
            vocab_size,
            masked: &masked,
            samplers: &samplers,
            token_ids: &mut token_ids,
            chosen_logits: &mut chosen_logits,
        },
    )?;
    Ok((token_ids.into_pyarray(py), chosen_logits.into_pyarray(py)))
}
