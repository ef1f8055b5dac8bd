//! Binding of [`EmbedRows`].

use numpy::{IntoPyArray, PyArray2, PyReadonlyArray1, PyReadonlyArray2};
use pyo3::prelude::*;

use super::{array, nan_buffer, packed, run};
use crate::kernels::embed_rows::{EmbedRows, EmbedRowsArgs};

/// Rows `token_ids` of `table`, widened.
#[pyfunction]
pub(super) fn embed_rows<'py>(
    py: Python<'py>,
    table: PyReadonlyArray2<'py, u16>,
    token_ids: PyReadonlyArray1<'py, u32>,
) -> PyResult<Bound<'py, PyArray2<f32>>> {
    let table = packed(&table)?;
    let token_ids = token_ids.as_slice()?;
    let shape = (token_ids.len(), table.in_features());
    let mut y = nan_buffer(shape.0 * shape.1);
    run::<EmbedRows>(
        py,
        EmbedRowsArgs {
            table: &table,
            token_ids,
            y: &mut y,
        },
    )?;
    Ok(array(&y, shape)?.into_pyarray(py))
}
