//! Binding of [`DraftBlock`].

use numpy::{IntoPyArray, PyArray4, PyReadonlyArray1, PyReadonlyArray4};
use pyo3::prelude::*;

use super::{array, array_on, device_named, nan_buffer_on, run_on};
use crate::error::Error;
use crate::kernels::draft_block::{BlockContext, BlockContexts, DraftBlock, DraftBlockArgs};

/// Attention of `q` `[block_size, blocks, q_heads, head_dim]` over each block's pages and its own rows.
#[pyfunction]
#[pyo3(signature = (q, k_block, v_block, k_pages, v_pages, page_tables, context_lens, scale, causal, window=None, device="cpu"))]
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
    device: &str,
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
    let device = device_named(device)?;
    let contexts = BlockContexts::of(&device, &contexts).map_err(Error::from)?;
    let mut out = nan_buffer_on(&device, q.as_array().len())?;
    run_on::<DraftBlock>(
        py,
        &device,
        DraftBlockArgs {
            q: &array_on(&device, &q)?,
            k_block: &array_on(&device, &k_block)?,
            v_block: &array_on(&device, &v_block)?,
            k_pages: &array_on(&device, &k_pages)?,
            v_pages: &array_on(&device, &v_pages)?,
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
