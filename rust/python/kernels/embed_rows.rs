//! Binding of [`EmbedRows`].

use numpy::{IntoPyArray, PyArray2, PyReadonlyArray1, PyReadonlyArray2};
use pyo3::prelude::*;

use super::{array, device_named, list_on, nan_buffer_on, packed_on, run};
use crate::kernels::embed_rows::{EmbedRows, EmbedRowsArgs};

/// Rows `token_ids` of `table`, widened, times `scale`.
#[pyfunction]
#[pyo3(signature = (table, token_ids, scale=1.0, device="cpu"))]
pub(super) fn embed_rows<'py>(
    py: Python<'py>,
    table: PyReadonlyArray2<'py, u16>,
    token_ids: PyReadonlyArray1<'py, u32>,
    scale: f32,
    device: &str,
) -> PyResult<Bound<'py, PyArray2<f32>>> {
    let device = device_named(device)?;
    let table = packed_on(&device, &table)?;
    let token_ids = list_on(&device, token_ids.as_slice()?)?;
    let shape = (token_ids.len(), table.in_features());
    let mut y = nan_buffer_on(&device, shape.0 * shape.1)?;
    run::<EmbedRows>(
        py,
        &device,
        EmbedRowsArgs {
            table: &table,
            token_ids: &token_ids,
            scale,
            y: &mut y,
        },
    )?;
    Ok(array(&y, shape)?.into_pyarray(py))
}
