//! Bindings of [`LmHeadScreen`] and of the bounds it decides by.

use numpy::ndarray::Array;
use numpy::{IntoPyArray, PyArray1, PyArray2, PyReadonlyArray2};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

use super::{
    array_on, buffer, device_named, masked_on, nan_buffer_on, packed, packed_on, refused, run,
};
use crate::device::Device;
use crate::error::Error;
use crate::kernels::bf16_matmul::PackedBf16;
use crate::kernels::lm_head_screen::{
    HeadScores, LmHeadScreen, LmHeadScreenArgs, LogitEstimates, LogitEstimatesArgs, ScreenScan,
    ScreenedHead, intervals,
};
use crate::kernels::simd;

/// Token ids, their logits, survivors, fallbacks and gaps, one per row.
type Decisions<'py> = (
    Bound<'py, PyArray1<u32>>,
    Bound<'py, PyArray1<f32>>,
    Bound<'py, PyArray1<u32>>,
    Bound<'py, PyArray1<bool>>,
    Option<Bound<'py, PyArray1<f32>>>,
);

/// Greedy ids of `x @ weight.T`; `masked` lists the forbidden ids of each row. Gaps between the two largest logits on
/// request. With `estimates` the ids are those of the INT8 copy alone.
#[pyfunction]
#[pyo3(signature = (x, weight, masked, with_gap=false, estimates=false, device="cpu", scan="auto"))]
#[expect(clippy::too_many_arguments, reason = "a kernel's arguments")]
pub(super) fn lm_head_screen<'py>(
    py: Python<'py>,
    x: PyReadonlyArray2<'py, f32>,
    weight: PyReadonlyArray2<'py, u16>,
    masked: Vec<Vec<u32>>,
    with_gap: bool,
    estimates: bool,
    device: &str,
    scan: &str,
) -> PyResult<Decisions<'py>> {
    let num_rows = x.as_array().nrows();
    let device = device_named(device)?;
    let (x, exact) = (array_on(&device, &x)?, packed_on(&device, &weight)?);
    let head = screened(&device, &exact, scan)?;
    let mut token_ids = vec![u32::MAX; num_rows];
    let mut best_logits = vec![f32::NAN; num_rows];
    let mut dense_logits = nan_buffer_on(&device, num_rows * exact.out_features())?;
    let mut survivors = vec![u32::MAX; num_rows];
    let mut fell_back = vec![false; num_rows];
    let mut gaps = vec![f32::NAN; num_rows];
    run::<LmHeadScreen>(
        py,
        &device,
        LmHeadScreenArgs {
            x: &x,
            num_rows,
            head: &head,
            exact: &exact,
            scores: match estimates {
                true => HeadScores::Estimates,
                false => HeadScores::Logits,
            },
            masked: &masked_on(&device, &masked)?,
            dense_logits: &mut dense_logits,
            token_ids: &mut token_ids,
            best_logits: &mut best_logits,
            survivors: &mut survivors,
            fell_back: &mut fell_back,
            top2_gap: with_gap.then_some(&mut gaps[..]),
        },
    )?;
    Ok((
        token_ids.into_pyarray(py),
        best_logits.into_pyarray(py),
        survivors.into_pyarray(py),
        fell_back.into_pyarray(py),
        with_gap.then(|| gaps.into_pyarray(py)),
    ))
}

/// The INT8 copy of `exact`, scanned by `scan`.
fn screened(device: &Device, exact: &PackedBf16, scan: &str) -> PyResult<ScreenedHead> {
    let head = ScreenedHead::new_on(device, exact).map_err(refused)?;
    match scan {
        "auto" => Ok(head),
        "mma" => Ok(head.scanned_by(ScreenScan::Mma)),
        got => Err(PyValueError::new_err(format!(
            "lm_head_screen: `scan` must be auto or mma, got {got}"
        ))),
    }
}

/// What the INT8 copy of `weight` says of all logits, `[rows, vocab_size]`.
#[pyfunction]
#[pyo3(signature = (x, weight, device="cpu", scan="auto"))]
pub(super) fn lm_head_estimates<'py>(
    py: Python<'py>,
    x: PyReadonlyArray2<'py, f32>,
    weight: PyReadonlyArray2<'py, u16>,
    device: &str,
    scan: &str,
) -> PyResult<Bound<'py, PyArray2<f32>>> {
    let num_rows = x.as_array().nrows();
    let device = device_named(device)?;
    let (x, exact) = (array_on(&device, &x)?, packed_on(&device, &weight)?);
    let head = screened(&device, &exact, scan)?;
    let mut logits = nan_buffer_on(&device, num_rows * exact.out_features())?;
    run::<LogitEstimates>(
        py,
        &device,
        LogitEstimatesArgs {
            x: &x,
            num_rows,
            head: &head,
            logits: &mut logits,
        },
    )?;
    let shape = (num_rows, exact.out_features());
    let logits = logits.read_back(shape.0 * shape.1).map_err(Error::from)?;
    let logits =
        Array::from_shape_vec(shape, logits).map_err(|e| PyValueError::new_err(e.to_string()))?;
    Ok(logits.into_pyarray(py))
}

/// Whether this machine has the instructions that make screening pay at several rows.
#[pyfunction]
pub(super) fn has_byte_products() -> bool {
    simd::bytes::has_byte_products()
}

/// Centre, bound of the coding error and bound of the summation error, `[rows * vocab_size, 3]`, of every logit as the
/// scan computes them. A row that cannot be screened is refused.
#[pyfunction]
pub(super) fn lm_head_intervals<'py>(
    py: Python<'py>,
    x: PyReadonlyArray2<'py, f32>,
    weight: PyReadonlyArray2<'py, u16>,
) -> PyResult<Bound<'py, PyArray2<f64>>> {
    let (x, exact) = (buffer(&x)?, packed(&weight)?);
    let head = ScreenedHead::new(&exact);
    let mut rows = Vec::new();
    for row in x.host().chunks_exact(exact.in_features()) {
        let intervals = intervals(simd::isa(), row, &head)
            .ok_or_else(|| PyValueError::new_err("a row takes the dense path"))?;
        rows.extend(intervals.iter().map(|i| vec![i.centre, i.screen, i.order]));
    }
    Ok(PyArray2::from_vec2(py, &rows)?)
}
