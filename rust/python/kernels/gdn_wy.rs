//! Binding of [`GdnWy`].

use numpy::{IntoPyArray, PyArray2, PyReadonlyArray1, PyReadonlyArray2, PyReadonlyArrayDyn};
use pyo3::prelude::*;

use super::{SegmentTuple, array, buffer, device, nan_buffer, row_paths, run};
use crate::kernels::gdn_wy::{
    GdnLayerCache, GdnShape, GdnTail, GdnWeights, GdnWy, GdnWyArgs, anchor_of,
};

/// `(num_key_heads, num_value_heads, key_dim, value_dim, conv_kernel)`.
pub(super) type ShapeTuple = (usize, usize, usize, usize, usize);

pub(super) fn gdn_shape(shape: ShapeTuple) -> GdnShape {
    GdnShape {
        num_key_heads: shape.0,
        num_value_heads: shape.1,
        key_dim: shape.2,
        value_dim: shape.3,
        conv_kernel: shape.4,
    }
}

/// `states`, `log_k`, `log_d`, `log_g`, `conv`, each with its slots first.
pub(super) type CacheTuple<'py> = (
    PyReadonlyArrayDyn<'py, f32>,
    PyReadonlyArrayDyn<'py, f32>,
    PyReadonlyArrayDyn<'py, f32>,
    PyReadonlyArrayDyn<'py, f32>,
    PyReadonlyArrayDyn<'py, f32>,
);

pub(super) fn layer_cache(cache: &CacheTuple<'_>) -> PyResult<GdnLayerCache> {
    Ok(GdnLayerCache {
        states: buffer(&cache.0)?,
        log_k: buffer(&cache.1)?,
        log_d: buffer(&cache.2)?,
        log_g: buffer(&cache.3)?,
        conv: buffer(&cache.4)?,
    })
}

/// Results of [`gdn_wy`]: y, k, d, g, a row of each per row of the pass.
type Rows<'py> = (
    Bound<'py, PyArray2<f32>>,
    Bound<'py, PyArray2<f32>>,
    Bound<'py, PyArray2<f32>>,
    Bound<'py, PyArray2<f32>>,
);

/// Outputs `y` of the rows and their `k`, `d`, `g`; `segments` holds `(slot, committed_len, parents)` with parent -1
/// for rows behind the committed tokens.
#[pyfunction]
#[allow(clippy::too_many_arguments, reason = "the kernel's own arguments")]
pub(super) fn gdn_wy<'py>(
    py: Python<'py>,
    shape: ShapeTuple,
    qkv: PyReadonlyArray2<'py, f32>,
    z: PyReadonlyArray2<'py, f32>,
    a: PyReadonlyArray2<'py, f32>,
    b: PyReadonlyArray2<'py, f32>,
    conv: PyReadonlyArray2<'py, f32>,
    a_log: PyReadonlyArray1<'py, f32>,
    dt_bias: PyReadonlyArray1<'py, f32>,
    norm: PyReadonlyArray1<'py, f32>,
    norm_eps: f32,
    segments: Vec<SegmentTuple>,
    cache: CacheTuple<'py>,
) -> PyResult<Rows<'py>> {
    let shape = gdn_shape(shape);
    let num_rows = qkv.as_array().nrows();
    let row_lens = [
        shape.values_len(),
        shape.keys_len(),
        shape.values_len(),
        shape.num_value_heads,
    ];
    let [mut y, k, d, g] = row_lens.map(|len| nan_buffer(num_rows * len));
    let mut tail = GdnTail { k, d, g };
    run::<GdnWy>(
        py,
        GdnWyArgs {
            shape: &shape,
            weights: GdnWeights {
                conv: &buffer(&conv)?,
                a_log: &buffer(&a_log)?,
                dt_bias: &buffer(&dt_bias)?,
                norm: &buffer(&norm)?,
                norm_eps,
            },
            qkv: &buffer(&qkv)?,
            z: &buffer(&z)?,
            a: &buffer(&a)?,
            b: &buffer(&b)?,
            paths: &row_paths(device()?, &segments, &[])?,
            cache: &layer_cache(&cache)?,
            tail: &mut tail,
            y: &mut y,
        },
    )?;
    Ok((
        array(&y, (num_rows, row_lens[0]))?.into_pyarray(py),
        array(&tail.k, (num_rows, row_lens[1]))?.into_pyarray(py),
        array(&tail.d, (num_rows, row_lens[2]))?.into_pyarray(py),
        array(&tail.g, (num_rows, row_lens[3]))?.into_pyarray(py),
    ))
}

/// The anchor of a position.
#[pyfunction]
pub(super) fn gdn_anchor_of(position: usize) -> usize {
    anchor_of(position)
}
