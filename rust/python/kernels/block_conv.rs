//! Binding of [`BlockConv`].

use numpy::{IntoPyArray, PyArray3, PyReadonlyArray3, PyReadonlyArray5};
use pyo3::prelude::*;

use super::{NanRows, array, array_on, device_named, run};
use crate::kernels::block_conv::{BlockConv, BlockConvArgs, ConvOutput, ConvSide};

/// Convolves `x` `[block_size, blocks, width]` with `base` `[2, taps, width]` plus `delta`
/// `[block_size, blocks, 2, taps, groups]`; adds to `y` where that is given. `for_matmul` asks for rows as matmuls of the
/// device take them.
#[pyfunction]
#[pyo3(signature = (x, delta, base, output_side, y=None, for_matmul=false, device="cpu"))]
#[allow(clippy::too_many_arguments, reason = "a kernel's arguments")]
pub(super) fn block_conv<'py>(
    py: Python<'py>,
    x: PyReadonlyArray3<'py, f32>,
    delta: PyReadonlyArray5<'py, f32>,
    base: PyReadonlyArray3<'py, f32>,
    output_side: bool,
    y: Option<PyReadonlyArray3<'py, f32>>,
    for_matmul: bool,
    device: &str,
) -> PyResult<Bound<'py, PyArray3<f32>>> {
    let shape = x.as_array().dim();
    let (_, _, _, kernel_size, num_groups) = delta.as_array().dim();
    let device = device_named(device)?;
    let (x, delta, base) = (
        array_on(&device, &x)?,
        array_on(&device, &delta)?,
        array_on(&device, &base)?,
    );
    let num_rows = shape.0 * shape.1;
    let args = |y| BlockConvArgs {
        x: &x,
        delta: &delta,
        base: &base,
        side: match output_side {
            true => ConvSide::Output,
            false => ConvSide::Input,
        },
        num_rows,
        num_blocks: shape.1,
        width: shape.2,
        kernel_size,
        group_size: shape.2 / num_groups.max(1),
        y,
    };
    if let Some(y) = &y {
        let mut y = array_on(&device, y)?;
        run::<BlockConv>(py, &device, args(ConvOutput::AddTo(&mut y)))?;
        return Ok(array(&y, shape)?.into_pyarray(py));
    }
    let mut y = NanRows::on(&device, num_rows, shape.2, for_matmul)?;
    run::<BlockConv>(py, &device, args(ConvOutput::Store(y.output())))?;
    Ok(y.array(&device, (num_rows, shape.2), shape)?
        .into_pyarray(py))
}
