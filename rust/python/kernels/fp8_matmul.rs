//! Binding of [`Fp8Matmul`].

use numpy::{IntoPyArray, PyArray2, PyReadonlyArray2};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

use super::{array, array_on, buffer_on, device_named, nan_buffer_on, refused, run};
use crate::device::Device;
use crate::kernels::bf16_matmul::{Epilogue, Product};
use crate::kernels::fp8_matmul::{Activations, Fp8Matmul, Fp8MatmulArgs, Fp8Scales, PackedFp8};

/// E4M3 codes `[out_features, in_features]` with scales `[row blocks, column blocks]`.
type Matrix<'py> = (PyReadonlyArray2<'py, u8>, PyReadonlyArray2<'py, f32>);

/// `x @ weight.T`, added to `residual` where there is one, of E4M3 `codes` with `scales` `[row blocks, column blocks]` for
/// blocks of `block` rows and columns; with `quantised` activations are rounded to E4M3 too.
#[pyfunction]
#[pyo3(signature = (x, codes, scales, block, quantised=false, residual=None, device="cpu"))]
#[expect(clippy::too_many_arguments, reason = "keywords in Python")]
pub(super) fn fp8_matmul<'py>(
    py: Python<'py>,
    x: PyReadonlyArray2<'py, f32>,
    codes: PyReadonlyArray2<'py, u8>,
    scales: PyReadonlyArray2<'py, f32>,
    block: (usize, usize),
    quantised: bool,
    residual: Option<PyReadonlyArray2<'py, f32>>,
    device: &str,
) -> PyResult<Bound<'py, PyArray2<f32>>> {
    let device = device_named(device)?;
    let (num_rows, in_features) = x.as_array().dim();
    let weight = packed(&device, &(codes, scales), block, in_features)?;
    let (mut y, epilogue) = match &residual {
        Some(residual) => (array_on(&device, residual)?, Epilogue::AddToOutput),
        None => (
            nan_buffer_on(&device, num_rows * weight.out_features())?,
            Epilogue::Store,
        ),
    };
    let x = array_on(&device, &x)?;
    let args = Fp8MatmulArgs {
        x: (&x).into(),
        num_rows,
        products: vec![Product {
            weight: &weight,
            y: &mut y,
        }],
        activations: activations(quantised),
        epilogue,
    };
    run::<Fp8Matmul>(py, &device, args)?;
    Ok(array(&y, (num_rows, weight.out_features()))?.into_pyarray(py))
}

/// [`fp8_matmul`] of several matrices, each with its codes and scales, in one call.
#[pyfunction]
#[pyo3(signature = (x, matrices, block, quantised=false, device="cpu"))]
pub(super) fn fp8_matmul_together<'py>(
    py: Python<'py>,
    x: PyReadonlyArray2<'py, f32>,
    matrices: Vec<Matrix<'py>>,
    block: (usize, usize),
    quantised: bool,
    device: &str,
) -> PyResult<Vec<Bound<'py, PyArray2<f32>>>> {
    let device = device_named(device)?;
    let (num_rows, in_features) = x.as_array().dim();
    let weights = matrices
        .iter()
        .map(|matrix| packed(&device, matrix, block, in_features))
        .collect::<PyResult<Vec<_>>>()?;
    let mut results = weights
        .iter()
        .map(|weight| nan_buffer_on(&device, num_rows * weight.out_features()))
        .collect::<PyResult<Vec<_>>>()?;
    let products = weights.iter().zip(&mut results);
    let x = buffer_on(&device, x.as_slice()?)?;
    let args = Fp8MatmulArgs {
        x: (&x).into(),
        num_rows,
        products: products.map(|(weight, y)| Product { weight, y }).collect(),
        activations: activations(quantised),
        epilogue: Epilogue::Store,
    };
    run::<Fp8Matmul>(py, &device, args)?;
    let results = weights.iter().zip(&results);
    results
        .map(|(weight, y)| Ok(array(y, (num_rows, weight.out_features()))?.into_pyarray(py)))
        .collect()
}

fn activations(quantised: bool) -> Activations {
    match quantised {
        true => Activations::Quantised,
        false => Activations::Whole,
    }
}

fn packed(
    device: &Device,
    (codes, scales): &Matrix<'_>,
    (block_rows, block_columns): (usize, usize),
    in_features: usize,
) -> PyResult<PackedFp8> {
    let (n, k) = codes.as_array().dim();
    let grid = (n.div_ceil(block_rows), k.div_ceil(block_columns));
    if in_features != k || scales.as_array().dim() != grid {
        return Err(PyValueError::new_err(format!(
            "fp8_matmul: `x` must have {k} columns and `scales` shape {grid:?}"
        )));
    }
    let scales = Fp8Scales {
        values: scales.as_slice()?.to_vec(),
        block_rows,
        block_columns,
    };
    PackedFp8::pack_on(device, codes.as_slice()?, n, k, &scales).map_err(refused)
}
