//! Binding of [`GdnFold`].

use numpy::{IntoPyArray, PyArrayDyn};
use pyo3::prelude::*;

use super::gdn_wy::{CacheTuple, ShapeTuple, gdn_shape, layer_cache};
use super::{array, device_named, run};
use crate::kernels::gdn_fold::{GdnFold, GdnFoldArgs};

/// The cache's states after the one behind `anchor` was folded for `slot`.
#[pyfunction]
#[pyo3(signature = (shape, cache, slot, anchor, device="cpu"))]
pub(super) fn gdn_fold<'py>(
    py: Python<'py>,
    shape: ShapeTuple,
    cache: CacheTuple<'py>,
    slot: usize,
    anchor: usize,
    device: &str,
) -> PyResult<Bound<'py, PyArrayDyn<f32>>> {
    let device = device_named(device)?;
    let mut layer = layer_cache(&device, &cache)?;
    run::<GdnFold>(
        py,
        &device,
        GdnFoldArgs {
            shape: &gdn_shape(shape),
            cache: &mut layer,
            slot,
            anchor,
        },
    )?;
    Ok(array(&layer.states, cache.0.as_array().raw_dim())?.into_pyarray(py))
}
