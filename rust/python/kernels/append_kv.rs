//! Binding of [`AppendKv`].

use numpy::{IntoPyArray, PyArray4, PyReadonlyArray1, PyReadonlyArray3, PyReadonlyArray4};
use pyo3::prelude::*;

use super::{array, array_on, device_named, placed_rows, run};
use crate::kernels::append_kv::{AppendKv, AppendKvArgs, KvLayer};
use crate::kernels::kv_span::KvSpan;

/// Key pages, value pages.
type Pages<'py> = (Bound<'py, PyArray4<f32>>, Bound<'py, PyArray4<f32>>);

/// Key and value pages `[pages, kv_heads, 64, head_dim]` after the tail's `rows` went to `first_position` and on.
#[pyfunction]
#[pyo3(signature = (k_tail, v_tail, rows, first_position, page_table, k_pages, v_pages, device="cpu"))]
#[allow(clippy::too_many_arguments, reason = "the kernel's own arguments")]
pub(super) fn append_kv<'py>(
    py: Python<'py>,
    k_tail: PyReadonlyArray3<'py, f32>,
    v_tail: PyReadonlyArray3<'py, f32>,
    rows: PyReadonlyArray1<'py, u32>,
    first_position: usize,
    page_table: PyReadonlyArray1<'py, u32>,
    k_pages: PyReadonlyArray4<'py, f32>,
    v_pages: PyReadonlyArray4<'py, f32>,
    device: &str,
) -> PyResult<Pages<'py>> {
    let (_, kv_heads, head_dim) = k_tail.as_array().dim();
    let device = device_named(device)?;
    let (mut k, mut v) = (array_on(&device, &k_pages)?, array_on(&device, &v_pages)?);
    let place = (0, first_position);
    let placed = placed_rows(&device, place, page_table.as_slice()?, rows.as_slice()?)?;
    run::<AppendKv>(
        py,
        &device,
        AppendKvArgs {
            rows: &placed,
            span: KvSpan::Whole,
            layers: vec![KvLayer {
                k_tail: &array_on(&device, &k_tail)?,
                v_tail: &array_on(&device, &v_tail)?,
                kv_heads,
                head_dim,
                k_pages: &mut k,
                v_pages: &mut v,
            }],
        },
    )?;
    let shape = k_pages.as_array().dim();
    Ok((
        array(&k, shape)?.into_pyarray(py),
        array(&v, v_pages.as_array().dim())?.into_pyarray(py),
    ))
}
