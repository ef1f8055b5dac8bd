//! Binding of [`BlockConv`].

use numpy::{IntoPyArray, PyArray3, PyReadonlyArray3, PyReadonlyArray5};
use pyo3::prelude::*;

use super::{array, array_on, device_named, nan_buffer_on, run};
use crate::kernels::bf16_matmul::Epilogue;
use crate::kernels::block_conv::{BlockConv, BlockConvArgs, ConvSide};

/// Convolves `x` `[block_size, blocks, width]` with `base` `[2, taps, width]` plus `delta`
/// `[block_size, blocks, 2, taps, groups]`; adds to `y` where that is given.
#[pyfunction]
#[pyo3(signature = (x, delta, base, output_side, y=None, device="cpu"))]
pub(super) fn block_conv<'py>(
    py: Python<'py>,
    x: PyReadonlyArray3<'py, f32>,
    delta: PyReadonlyArray5<'py, f32>,
    base: PyReadonlyArray3<'py, f32>,
    output_side: bool,
    y: Option<PyReadonlyArray3<'py, f32>>,
    device: &str,
) -> PyResult<Bound<'py, PyArray3<f32>>> {
    let shape = x.as_array().dim();
    let (_, _, _, kernel_size, num_groups) = delta.as_array().dim();
    let device = device_named(device)?;
    let (mut out, epilogue) = match &y {
        Some(y) => (array_on(&device, y)?, Epilogue::AddToOutput),
        None => (nan_buffer_on(&device, x.as_array().len())?, Epilogue::Store),
    };
    run::<BlockConv>(
        py,
        &device,
        BlockConvArgs {
            x: &array_on(&device, &x)?,
            delta: &array_on(&device, &delta)?,
            base: &array_on(&device, &base)?,
            side: match output_side {
                true => ConvSide::Output,
                false => ConvSide::Input,
            },
            num_rows: shape.0 * shape.1,
            num_blocks: shape.1,
            width: shape.2,
            kernel_size,
            group_size: shape.2 / num_groups.max(1),
            y: &mut out,
            epilogue,
        },
    )?;
    Ok(array(&out, shape)?.into_pyarray(py))
}
