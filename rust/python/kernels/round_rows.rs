//! Binding of [`RoundRows`].

use half::slice::HalfFloatSliceExt as _;
use numpy::ndarray::Array2;
use numpy::{IntoPyArray, PyArray2, PyReadonlyArray1};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

use super::gate::gate_kind;
use super::{array_on, buffer_on, device_named, run};
use crate::error::Error;
use crate::kernels::round_rows::{GatedBy, Norm, RoundRows, RoundRowsArgs, RowSource, Vectors};

/// Where vectors lie: `offset`, `per_row`, `stride`, `row_stride`.
type Places = (usize, usize, usize, usize);

/// BF16 bits of `num_vectors` vectors of the flat `x` after a norm (`weight`) and a gate (`kind` "silu", "sigmoid" or
/// "gelu_tanh" of the flat `gates`), where given; each at its places.
#[pyfunction]
#[pyo3(signature = (x, x_places, num_vectors, width, *, weight=None, eps=0.0, gates=None, gate_places=(0, 1, 0, 0),
                    kind="silu", device="cpu"))]
#[allow(clippy::too_many_arguments, reason = "the kernel's own arguments")]
pub(super) fn round_rows<'py>(
    py: Python<'py>,
    x: PyReadonlyArray1<'py, f32>,
    x_places: Places,
    num_vectors: usize,
    width: usize,
    weight: Option<PyReadonlyArray1<'py, f32>>,
    eps: f32,
    gates: Option<PyReadonlyArray1<'py, f32>>,
    gate_places: Places,
    kind: &str,
    device: &str,
) -> PyResult<Bound<'py, PyArray2<u16>>> {
    let kind = gate_kind("round_rows", kind)?;
    let device = device_named(device)?;
    let x = array_on(&device, &x)?;
    let weight = weight.map(|w| array_on(&device, &w)).transpose()?;
    let gates = gates.map(|g| array_on(&device, &g)).transpose()?;
    let vectors = |values, (offset, per_row, stride, row_stride): Places| Vectors {
        values,
        offset,
        per_row,
        stride,
        row_stride,
    };
    let norm = weight.as_ref().map(|weight| Norm { weight, eps });
    let gate = gates.as_ref().map(|gates| GatedBy {
        kind,
        gates: vectors(gates, gate_places),
    });
    let source = match (norm, gate) {
        (None, None) => RowSource::Plain,
        (Some(norm), None) => RowSource::Normed(norm),
        (None, Some(gate)) => RowSource::Gated(gate),
        (Some(norm), Some(gate)) => RowSource::NormedAndGated(norm, gate),
    };
    let mut y = buffer_on(&device, &vec![half::bf16::NAN; num_vectors * width])?;
    run::<RoundRows>(
        py,
        &device,
        RoundRowsArgs {
            source,
            x: vectors(&x, x_places),
            num_vectors,
            width,
            y: &mut y,
        },
    )?;
    let values = y.read_back(num_vectors * width).map_err(Error::from)?;
    let bits: &[u16] = values.reinterpret_cast();
    let bits = Array2::from_shape_vec((num_vectors, width), bits.to_vec());
    Ok(bits
        .map_err(|e| PyValueError::new_err(e.to_string()))?
        .into_pyarray(py))
}
