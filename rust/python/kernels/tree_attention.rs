//! Binding of [`TreeAttention`].

use numpy::{IntoPyArray, PyArray3, PyReadonlyArray3, PyReadonlyArray4};
use pyo3::prelude::*;

use super::{SegmentTuple, array, array_on, device_named, nan_buffer_on, row_paths, run};
use crate::kernels::kv_span::KvSpan;
use crate::kernels::tree_attention::{TreeAttention, TreeAttentionArgs};

/// Attention of `q` `[rows, q_heads, head_dim]`; `segments` holds `(slot, committed_len, parents)` with parent -1 for
/// rows behind the committed tokens, `page_tables` one list of pages per segment.
#[pyfunction]
#[pyo3(signature = (q, k_tail, v_tail, k_pages, v_pages, page_tables, segments, scale, window=None, device="cpu"))]
#[allow(clippy::too_many_arguments, reason = "the kernel's own arguments")]
pub(super) fn tree_attention<'py>(
    py: Python<'py>,
    q: PyReadonlyArray3<'py, f32>,
    k_tail: PyReadonlyArray3<'py, f32>,
    v_tail: PyReadonlyArray3<'py, f32>,
    k_pages: PyReadonlyArray4<'py, f32>,
    v_pages: PyReadonlyArray4<'py, f32>,
    page_tables: Vec<Vec<u32>>,
    segments: Vec<SegmentTuple>,
    scale: f32,
    window: Option<usize>,
    device: &str,
) -> PyResult<Bound<'py, PyArray3<f32>>> {
    let shape = q.as_array().dim();
    let device = device_named(device)?;
    let mut out = nan_buffer_on(&device, shape.0 * shape.1 * shape.2)?;
    run::<TreeAttention>(
        py,
        &device,
        TreeAttentionArgs {
            q: &array_on(&device, &q)?,
            k_tail: &array_on(&device, &k_tail)?,
            v_tail: &array_on(&device, &v_tail)?,
            k_pages: &array_on(&device, &k_pages)?,
            v_pages: &array_on(&device, &v_pages)?,
            paths: &row_paths(&device, &segments, &page_tables)?,
            span: KvSpan::Whole,
            q_heads: shape.1,
            kv_heads: k_tail.as_array().dim().1,
            head_dim: shape.2,
            scale,
            window,
            out: &mut out,
        },
    )?;
    Ok(array(&out, shape)?.into_pyarray(py))
}
