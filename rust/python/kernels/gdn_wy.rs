//! Binding of [`GdnWy`].

use numpy::{IntoPyArray, PyArray2, PyReadonlyArray1, PyReadonlyArray2, PyReadonlyArrayDyn};
use pyo3::prelude::*;

use super::{NanRows, SegmentTuple, array, array_on, device_named, nan_buffer_on, row_paths, run};
use crate::device::Device;
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

pub(super) fn layer_cache(device: &Device, cache: &CacheTuple<'_>) -> PyResult<GdnLayerCache> {
    Ok(GdnLayerCache {
        states: array_on(device, &cache.0)?,
        log_k: array_on(device, &cache.1)?,
        log_d: array_on(device, &cache.2)?,
        log_g: array_on(device, &cache.3)?,
        conv: array_on(device, &cache.4)?,
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
/// for rows behind the committed tokens. `for_matmul` asks for `y` as matmuls of the device take it.
#[pyfunction]
#[pyo3(signature = (shape, qkv, z, a, b, conv, a_log, dt_bias, norm, norm_eps, segments, cache, for_matmul=false,
                    device="cpu"))]
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
    for_matmul: bool,
    device: &str,
) -> PyResult<Rows<'py>> {
    let shape = gdn_shape(shape);
    let num_rows = qkv.as_array().nrows();
    let row_lens = [
        shape.values_len(),
        shape.keys_len(),
        shape.values_len(),
        shape.num_value_heads,
    ];
    let device = device_named(device)?;
    let rows = |len| nan_buffer_on(&device, num_rows * len);
    let mut y = NanRows::on(&device, num_rows, row_lens[0], for_matmul)?;
    let (k, d, g) = (rows(row_lens[1])?, rows(row_lens[2])?, rows(row_lens[3])?);
    let mut tail = GdnTail { k, d, g };
    run::<GdnWy>(
        py,
        &device,
        GdnWyArgs {
            shape: &shape,
            weights: GdnWeights {
                conv: &array_on(&device, &conv)?,
                a_log: &array_on(&device, &a_log)?,
                dt_bias: &array_on(&device, &dt_bias)?,
                norm: &array_on(&device, &norm)?,
                norm_eps,
            },
            qkv: &array_on(&device, &qkv)?,
            z: &array_on(&device, &z)?,
            a: &array_on(&device, &a)?,
            b: &array_on(&device, &b)?,
            segments: 0..segments.len(),
            paths: &row_paths(&device, &segments, &[])?,
            cache: &layer_cache(&device, &cache)?,
            tail: &mut tail,
            y: y.output(),
        },
    )?;
    let of_y = (num_rows, row_lens[0]);
    Ok((
        y.array(&device, of_y, of_y)?.into_pyarray(py),
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
