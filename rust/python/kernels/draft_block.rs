//! Binding of [`DraftBlock`].

use numpy::{IntoPyArray, PyArray4, PyReadonlyArray1, PyReadonlyArray4};
use pyo3::prelude::*;

use super::{array, buffer, nan_buffer, run};
use crate::kernels::draft_block::{BlockContext, DraftBlock, DraftBlockArgs};

/// Attention of `q` `[block_size, blocks, q_heads, head_dim]` over each block's pages and its own rows.
#[pyfunction]
#[pyo3(signature = (q, k_block, v_block, k_pages, v_pages, page_tables, context_lens, scale, causal, window=None))]
#[allow(clippy::too_many_arguments, reason = "a kernel's arguments")]
pub(super) fn draft_block<'py>(
    py: Python<'py>,
    q: PyReadonlyArray4<'py, f32>,
    k_block: PyReadonlyArray4<'py, f32>,
    v_block: PyReadonlyArray4<'py, f32>,
    k_pages: PyReadonlyArray4<'py, f32>,
    v_pages: PyReadonlyArray4<'py, f32>,
    page_tables: Vec<PyReadonlyArray1<'py, u32>>,
    context_lens: Vec<usize>,
    scale: f32,
    causal: bool,
    window: Option<usize>,
) -> PyResult<Bound<'py, PyArray4<f32>>> {
    let shape = q.as_array().dim();
    let contexts = page_tables
        .iter()
        .zip(&context_lens)
        .map(|(page_table, &context_len)| {
            Ok(BlockContext {
                page_table: page_table.as_slice()?,
                context_len,
            })
        })
        .collect::<PyResult<Vec<_>>>()?;
    let mut out = nan_buffer(q.as_array().len());
    run::<DraftBlock>(
        py,
        DraftBlockArgs {
            q: &buffer(&q)?,
            k_block: &buffer(&k_block)?,
            v_block: &buffer(&v_block)?,
            k_pages: &buffer(&k_pages)?,
            v_pages: &buffer(&v_pages)?,
            contexts: &contexts,
            block_size: shape.0,
            q_heads: shape.2,
            kv_heads: k_block.as_array().dim().2,
            head_dim: shape.3,
            scale,
            window,
            causal,
            out: &mut out,
        },
    )?;
    Ok(array(&out, shape)?.into_pyarray(py))
}
