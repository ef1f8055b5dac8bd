//! Binding of [`Fp8Matmul`].

use numpy::{IntoPyArray, PyArray2, PyReadonlyArray2};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

use super::{array, device_named, run};
use crate::device::Buffer;
use crate::kernels::bf16_matmul::{Epilogue, Product};
use crate::kernels::fp8_matmul::{Activations, Fp8Matmul, Fp8MatmulArgs, Fp8Scales, PackedFp8};

/// `x @ weight.T`, added to `residual` where there is one, of E4M3 `codes` with `scales` `[row blocks, column blocks]` for
/// blocks of `block` rows and columns; with `quantised` activations are rounded to E4M3 too.
#[pyfunction]
#[pyo3(signature = (x, codes, scales, block, quantised=false, residual=None))]
pub(super) fn fp8_matmul<'py>(
    py: Python<'py>,
    x: PyReadonlyArray2<'py, f32>,
    codes: PyReadonlyArray2<'py, u8>,
    scales: PyReadonlyArray2<'py, f32>,
    block: (usize, usize),
    quantised: bool,
    residual: Option<PyReadonlyArray2<'py, f32>>,
) -> PyResult<Bound<'py, PyArray2<f32>>> {
    let (num_rows, x_features) = x.as_array().dim();
    let (n, k) = codes.as_array().dim();
    let (block_rows, block_columns) = block;
    let grid = (n.div_ceil(block_rows), k.div_ceil(block_columns));
    if x_features != k || scales.as_array().dim() != grid {
        return Err(PyValueError::new_err(format!(
            "fp8_matmul: `x` must have {k} columns and `scales` shape {grid:?}"
        )));
    }
    let scales = Fp8Scales {
        values: scales.as_slice()?.to_vec(),
        block_rows,
        block_columns,
    };
    let weight = PackedFp8::pack(codes.as_slice()?, n, k, &scales);
    let (mut y, epilogue) = match &residual {
        Some(residual) => (
            Buffer::from_slice(residual.as_slice()?),
            Epilogue::AddToOutput,
        ),
        None => (
            Buffer::from_slice(&vec![f32::NAN; num_rows * n]),
            Epilogue::Store,
        ),
    };
    run::<Fp8Matmul>(
        py,
        &*device_named("cpu")?,
        Fp8MatmulArgs {
            x: (&Buffer::from_slice(x.as_slice()?)).into(),
            num_rows,
            products: vec![Product {
                weight: &weight,
                y: &mut y,
            }],
            activations: match quantised {
                true => Activations::Quantised,
                false => Activations::Whole,
            },
            epilogue,
        },
    )?;
    Ok(array(&y, (num_rows, n))?.into_pyarray(py))
}
