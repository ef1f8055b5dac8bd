//! Binding of [`Rope`].

use numpy::{IntoPyArray, PyArray3, PyReadonlyArray1, PyReadonlyArray3};
use pyo3::prelude::*;

use super::{array, array_on, device_named, list_on, nan_buffer_on, run};
use crate::device::Buffer;
use crate::kernels::rope::{HeadNorm, Rope, RopeArgs, RopeHeads, Rotation};

/// Turns the pairs `(j, j + pair_offset)` of every head of `x` `[num_rows, num_heads, head_dim]`.
#[pyfunction]
#[pyo3(signature = (x, positions, inverse_frequencies, pair_offset, device="cpu"))]
pub(super) fn rope<'py>(
    py: Python<'py>,
    x: PyReadonlyArray3<'py, f32>,
    positions: PyReadonlyArray1<'py, u32>,
    inverse_frequencies: PyReadonlyArray1<'py, f32>,
    pair_offset: usize,
    device: &str,
) -> PyResult<Bound<'py, PyArray3<f32>>> {
    let shape = x.as_array().dim();
    let device = device_named(device)?;
    let mut y = array_on(&device, &x)?;
    run::<Rope>(
        py,
        &device,
        RopeArgs {
            heads: vec![RopeHeads {
                norm: None,
                num_heads: shape.1,
                y: &mut y,
            }],
            head_dim: shape.2,
            positions: &list_on(&device, positions.as_slice()?)?,
            rotation: Some(Rotation {
                inverse_frequencies: &array_on(&device, &inverse_frequencies)?,
                pair_offset,
            }),
        },
    )?;
    Ok(array(&y, shape)?.into_pyarray(py))
}

/// Norms of the heads of several projections `[num_rows, num_heads, x_stride]`, of `head_dim` values each, by their
/// weights where there are any, and turned where there are `inverse_frequencies`.
#[pyfunction]
#[pyo3(signature = (projections, head_dim, eps, positions, inverse_frequencies=None, pair_offset=0, device="cpu"))]
#[allow(clippy::too_many_arguments, reason = "a kernel's arguments")]
pub(super) fn normed_rope<'py>(
    py: Python<'py>,
    projections: Vec<(
        PyReadonlyArray3<'py, f32>,
        Option<PyReadonlyArray1<'py, f32>>,
    )>,
    head_dim: usize,
    eps: f32,
    positions: PyReadonlyArray1<'py, u32>,
    inverse_frequencies: Option<PyReadonlyArray1<'py, f32>>,
    pair_offset: usize,
    device: &str,
) -> PyResult<Vec<Bound<'py, PyArray3<f32>>>> {
    let device = device_named(device)?;
    let mut held = Vec::new();
    for (x, weight) in &projections {
        let (num_rows, num_heads, _) = x.as_array().dim();
        let weight = weight.as_ref().map(|weight| array_on(&device, weight));
        let y = nan_buffer_on(&device, num_rows * num_heads * head_dim)?;
        held.push((array_on(&device, x)?, weight.transpose()?, y));
    }
    let frequencies = inverse_frequencies.map(|values| array_on(&device, &values));
    let frequencies: Option<Buffer<f32>> = frequencies.transpose()?;
    let heads = projections.iter().zip(&mut held);
    let heads = heads.map(|((of, _), (x, weight, y))| RopeHeads {
        norm: Some(HeadNorm {
            x,
            x_stride: of.as_array().dim().2,
            weight: weight.as_ref(),
            eps,
        }),
        num_heads: of.as_array().dim().1,
        y,
    });
    run::<Rope>(
        py,
        &device,
        RopeArgs {
            heads: heads.collect(),
            head_dim,
            positions: &list_on(&device, positions.as_slice()?)?,
            rotation: frequencies.as_ref().map(|inverse_frequencies| Rotation {
                inverse_frequencies,
                pair_offset,
            }),
        },
    )?;
    let results = projections.iter().zip(&held);
    results
        .map(|((of, _), (_, _, y))| {
            let (num_rows, num_heads, _) = of.as_array().dim();
            Ok(array(y, (num_rows, num_heads, head_dim))?.into_pyarray(py))
        })
        .collect()
}
