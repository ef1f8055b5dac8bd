//! Binding of [`SampleRows`].

use numpy::{IntoPyArray, PyArray1, PyReadonlyArray2};
use pyo3::prelude::*;

use super::{array_on, device_named, masked_on, run};
use crate::kernels::draft_select::LogitShape;
use crate::kernels::sample_rows::{RowSampler, SampleRows, SampleRowsArgs};

/// Token ids and their logits, one per row.
type Choices<'py> = (Bound<'py, PyArray1<u32>>, Bound<'py, PyArray1<f32>>);

/// Temperature, top_k, top_p, min_p, seed and position of a row.
type SamplerTuple = (f64, usize, f64, f64, u64, u32);

/// The id drawn from every row of `logits` and its logit; `masked` lists the forbidden ids of each row. Probabilities
/// are those of `softcap * tanh(multiplier * logits / softcap)` where there is a softcap.
#[pyfunction]
#[pyo3(signature = (logits, masked, samplers, multiplier=1.0, softcap=None, device="cpu"))]
pub(super) fn sample_rows<'py>(
    py: Python<'py>,
    logits: PyReadonlyArray2<'py, f32>,
    masked: Vec<Vec<u32>>,
    samplers: Vec<SamplerTuple>,
    multiplier: f32,
    softcap: Option<f32>,
    device: &str,
) -> PyResult<Choices<'py>> {
    let (num_rows, vocab_size) = logits.as_array().dim();
    let device = device_named(device)?;
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
        &device,
        SampleRowsArgs {
            logits: &array_on(&device, &logits)?,
            num_rows,
            vocab_size,
            shape: LogitShape {
                multiplier,
                softcap,
            },
            masked: &masked_on(&device, &masked)?,
            samplers: &samplers,
            token_ids: &mut token_ids,
            chosen_logits: &mut chosen_logits,
        },
    )?;
    Ok((token_ids.into_pyarray(py), chosen_logits.into_pyarray(py)))
}
