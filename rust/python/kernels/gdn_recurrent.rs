//! Binding of [`GdnRecurrent`].

use numpy::{IntoPyArray, PyArray2, PyArrayDyn, PyReadonlyArray1, PyReadonlyArray2};
use pyo3::prelude::*;

use super::gdn_wy::{CacheTuple, ShapeTuple, gdn_shape, layer_cache};
use super::{SegmentTuple, array, array_on, device_named, nan_buffer_on, row_paths, run};
use crate::kernels::gdn_recurrent::{
    AdvanceArgs, ChainArgs, GdnRecurrent, GdnRecurrentArgs, GdnRecurrentWeights,
};
use crate::kernels::gdn_wy::GdnTail;

/// Results of [`gdn_recurrent`]: y, qkv, k, d, g, a row of each per row of the pass.
type Rows<'py> = (
    Bound<'py, PyArray2<f32>>,
    Bound<'py, PyArray2<f32>>,
    Bound<'py, PyArray2<f32>>,
    Bound<'py, PyArray2<f32>>,
    Bound<'py, PyArray2<f32>>,
);

/// Outputs of chains before the gated norm, and what they leave behind; arguments are those of `gdn_wy` with the
/// projections merged, the state that of all committed tokens.
#[pyfunction]
#[pyo3(signature = (shape, projected, conv, a_log, dt_bias, segments, cache, device="cpu"))]
#[allow(clippy::too_many_arguments, reason = "the kernel's own arguments")]
pub(super) fn gdn_recurrent<'py>(
    py: Python<'py>,
    shape: ShapeTuple,
    projected: PyReadonlyArray2<'py, f32>,
    conv: PyReadonlyArray2<'py, f32>,
    a_log: PyReadonlyArray1<'py, f32>,
    dt_bias: PyReadonlyArray1<'py, f32>,
    segments: Vec<SegmentTuple>,
    cache: CacheTuple<'py>,
    device: &str,
) -> PyResult<Rows<'py>> {
    let shape = gdn_shape(shape);
    let num_rows = projected.as_array().nrows();
    let device = device_named(device)?;
    let rows = |len| nan_buffer_on(&device, num_rows * len);
    let [channels, keys, values, heads] = [
        shape.conv_channels(),
        shape.keys_len(),
        shape.values_len(),
        shape.num_value_heads,
    ];
    let (mut y, mut qkv) = (rows(values)?, rows(channels)?);
    let mut tail = GdnTail {
        k: rows(keys)?,
        d: rows(values)?,
        g: rows(heads)?,
    };
    run::<GdnRecurrent>(
        py,
        &device,
        GdnRecurrentArgs::Chain(ChainArgs {
            shape: &shape,
            weights: GdnRecurrentWeights {
                conv: &array_on(&device, &conv)?,
                a_log: &array_on(&device, &a_log)?,
                dt_bias: &array_on(&device, &dt_bias)?,
            },
            projected: &array_on(&device, &projected)?,
            segments: 0..segments.len(),
            paths: &row_paths(&device, &segments, &[])?,
            cache: &layer_cache(&device, &cache)?,
            tail_qkv: &mut qkv,
            tail: &mut tail,
            y: &mut y,
        }),
    )?;
    Ok((
        array(&y, (num_rows, values))?.into_pyarray(py),
        array(&qkv, (num_rows, channels))?.into_pyarray(py),
        array(&tail.k, (num_rows, keys))?.into_pyarray(py),
        array(&tail.d, (num_rows, values))?.into_pyarray(py),
        array(&tail.g, (num_rows, heads))?.into_pyarray(py),
    ))
}

/// `states` of several layers with those of `slot` brought forward over positions `first..end`, `[layers][...]`.
#[pyfunction]
#[pyo3(signature = (shape, caches, slot, first, end, device="cpu"))]
pub(super) fn gdn_recurrent_advance<'py>(
    py: Python<'py>,
    shape: ShapeTuple,
    caches: Vec<CacheTuple<'py>>,
    slot: usize,
    first: usize,
    end: usize,
    device: &str,
) -> PyResult<Vec<Bound<'py, PyArrayDyn<f32>>>> {
    let shape = gdn_shape(shape);
    let device = device_named(device)?;
    let layers = caches.iter().map(|cache| layer_cache(&device, cache));
    let mut layers = layers.collect::<PyResult<Vec<_>>>()?;
    run::<GdnRecurrent>(
        py,
        &device,
        GdnRecurrentArgs::Advance(AdvanceArgs {
            shape: &shape,
            layers: &mut layers,
            slot,
            positions: first..end,
        }),
    )?;
    let states = caches.iter().zip(&layers).map(|(cache, layer)| {
        let states = array(&layer.states, cache.0.as_array().raw_dim())?;
        Ok(states.into_pyarray(py))
    });
    states.collect()
}
