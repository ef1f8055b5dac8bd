//! `specpilot_rs._core.kernels`: each kernel as a function from numpy arrays to numpy arrays, for tests.
//!
//! BF16 arrays are their bit patterns, `uint16`. Results are new arrays; a kernel's output buffer starts as NaN, so
//! that an element it forgets shows. A refused argument raises `ValueError` with the kernel's own words.

mod append_kv;
mod append_ring;
mod bf16_matmul;
mod block_conv;
mod draft_block;
mod draft_select;
mod embed_rows;
mod fp8_matmul;
mod gate;
mod gather_taps;
mod gdn_fold;
mod gdn_recurrent;
mod gdn_wy;
mod greedy_argmax;
mod linear;
mod lm_head_screen;
mod plant_matrix;
mod rms_norm;
mod rope;
mod round_rows;
mod sample_rows;
mod shape_logits;
mod tree_attention;
mod w12_matmul;

use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use half::bf16;
use half::slice::HalfBitsSliceExt;
use numpy::ndarray::{Array, Dimension, IntoDimension};
use numpy::{PyReadonlyArray, PyReadonlyArray2, PyUntypedArrayMethods};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

use crate::device::{Buffer, Device, Element, Staged};
use crate::error::{Error, KernelError};
use crate::kernels::Kernel;
use crate::kernels::bf16_matmul::PackedBf16;
use crate::kernels::masked_ids::MaskedIds;
use crate::kernels::matmul_rows::{MatmulRows, RowsOutput};
use crate::kernels::paths::RowPaths;
use crate::kernels::placed_rows::PlacedRows;

/// Kernels on numpy arrays, for tests.
#[pymodule(submodule)]
#[pyo3(name = "kernels")]
pub(super) mod kernels_module {
    #[pymodule_export]
    use super::append_kv::append_kv;
    #[pymodule_export]
    use super::append_ring::append_ring;
    #[pymodule_export]
    use super::bf16_matmul::bf16_matmul;
    #[pymodule_export]
    use super::block_conv::block_conv;
    #[pymodule_export]
    use super::draft_block::draft_block;
    #[pymodule_export]
    use super::draft_select::draft_select;
    #[pymodule_export]
    use super::embed_rows::embed_rows;
    #[pymodule_export]
    use super::fp8_matmul::{fp8_matmul, fp8_matmul_together};
    #[pymodule_export]
    use super::gate::gate;
    #[pymodule_export]
    use super::gather_taps::gather_taps;
    #[pymodule_export]
    use super::gdn_fold::gdn_fold;
    #[pymodule_export]
    use super::gdn_recurrent::{gdn_recurrent, gdn_recurrent_advance};
    #[pymodule_export]
    use super::gdn_wy::{gdn_anchor_of, gdn_wy};
    #[pymodule_export]
    use super::greedy_argmax::greedy_argmax;
    #[pymodule_export]
    use super::linear::multiply_together;
    #[pymodule_export]
    use super::lm_head_screen::{
        has_byte_products, lm_head_estimates, lm_head_intervals, lm_head_screen,
    };
    #[pymodule_export]
    use super::plant_matrix::{plant_matrix, planted_matmul};
    #[pymodule_export]
    use super::rms_norm::rms_norm;
    #[pymodule_export]
    use super::rope::{normed_rope, rope};
    #[pymodule_export]
    use super::round_rows::round_rows;
    #[pymodule_export]
    use super::sample_rows::sample_rows;
    #[pymodule_export]
    use super::shape_logits::shape_logits;
    #[pymodule_export]
    use super::tree_attention::tree_attention;
    #[pymodule_export]
    use super::w12_matmul::w12_matmul;
}

/// The host device all test calls share.
fn device() -> PyResult<&'static Arc<Device>> {
    static DEVICE: OnceLock<Arc<Device>> = OnceLock::new();
    if let Some(device) = DEVICE.get() {
        return Ok(device);
    }
    let device = Arc::new(Device::host(None).map_err(Error::from)?);
    Ok(DEVICE.get_or_init(|| device))
}

/// The device a test names: `cpu`, `cuda` or `cuda:1`; each is opened once.
fn device_named(name: &str) -> PyResult<Arc<Device>> {
    static GPUS: Mutex<Vec<(usize, Arc<Device>)>> = Mutex::new(Vec::new());
    let Some(rest) = name.strip_prefix("cuda") else {
        return Ok(device()?.clone());
    };
    let ordinal = match rest.strip_prefix(':') {
        Some(index) => index.parse()?,
        None => 0,
    };
    let mut gpus = GPUS.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some((_, device)) = gpus.iter().find(|(index, _)| *index == ordinal) {
        return Ok(device.clone());
    }
    let device = Arc::new(Device::cuda(ordinal).map_err(Error::from)?);
    gpus.push((ordinal, device.clone()));
    Ok(device)
}

/// Values as a buffer of `device`.
fn buffer_on<T: Element>(device: &Device, values: &[T]) -> PyResult<Buffer<T>> {
    Ok(device.buffer_of(values).map_err(Error::from)?)
}

/// A C-contiguous array as a buffer of `device`.
fn array_on<D: Dimension>(
    device: &Device,
    array: &PyReadonlyArray<'_, f32, D>,
) -> PyResult<Buffer<f32>> {
    if !array.is_c_contiguous() {
        return Err(PyValueError::new_err("arrays must be C-contiguous"));
    }
    buffer_on(device, array.as_slice()?)
}

/// An output buffer of `device` in which every element is NaN.
fn nan_buffer_on(device: &Device, len: usize) -> PyResult<Buffer<f32>> {
    buffer_on(device, &vec![f32::NAN; len])
}

/// Where a kernel leaves rows of `width`, every bit of which it has to write: fp32, or for a matmul.
enum NanRows {
    Values(Buffer<f32>),
    ForMatmul(MatmulRows),
}

impl NanRows {
    fn on(device: &Device, num_rows: usize, width: usize, for_matmul: bool) -> PyResult<Self> {
        Ok(match for_matmul {
            true => Self::ForMatmul(MatmulRows::with(width, |words| {
                nan_buffer_on(device, num_rows * words)
            })?),
            false => Self::Values(nan_buffer_on(device, num_rows * width)?),
        })
    }

    fn output(&mut self) -> RowsOutput<'_> {
        match self {
            Self::Values(values) => values.into(),
            Self::ForMatmul(rows) => rows.into(),
        }
    }

    /// The values, `[num_rows, width]` in whatever `shape`.
    fn array<Sh: IntoDimension>(
        &self,
        device: &Device,
        (num_rows, width): (usize, usize),
        shape: Sh,
    ) -> PyResult<Array<f32, Sh::Dim>> {
        match self {
            Self::Values(values) => array(values, shape),
            Self::ForMatmul(rows) => {
                let is_whole = rows.is_whole(device, num_rows, width);
                if !is_whole.map_err(Error::from)? {
                    return Err(PyValueError::new_err(
                        "rows for a matmul differ from one another",
                    ));
                }
                let values = rows.read_back(num_rows, width).map_err(Error::from)?;
                Array::from_shape_vec(shape.into_dimension(), values)
                    .map_err(|e| PyValueError::new_err(e.to_string()))
            }
        }
    }
}

/// A list that kernels on `device` read.
fn list_on(device: &Device, values: &[u32]) -> PyResult<Staged<u32>> {
    Ok(Staged::of(device, values).map_err(Error::from)?)
}

/// Lists of masked ids that kernels on `device` read.
fn masked_on(device: &Device, rows: &[Vec<u32>]) -> PyResult<MaskedIds> {
    let rows: Vec<&[u32]> = rows.iter().map(Vec::as_slice).collect();
    Ok(MaskedIds::of(device, &rows).map_err(Error::from)?)
}

/// Runs kernel `K` on `device` with the lock released.
fn run<K: Kernel>(py: Python<'_>, device: &Device, args: K::Args<'_>) -> PyResult<()>
where
    for<'a> K::Args<'a>: Send,
{
    py.detach(|| K::run(device, args)).map_err(refused)
}

fn refused(error: KernelError) -> PyErr {
    PyValueError::new_err(error.to_string())
}

/// A copy of a C-contiguous array.
fn buffer<D: Dimension>(array: &PyReadonlyArray<'_, f32, D>) -> PyResult<Buffer<f32>> {
    if !array.is_c_contiguous() {
        return Err(PyValueError::new_err("arrays must be C-contiguous"));
    }
    Ok(Buffer::from_slice(array.as_slice()?))
}

/// Packs BF16 bit patterns `[out_features, in_features]`.
fn packed(weight: &PyReadonlyArray2<'_, u16>) -> PyResult<PackedBf16> {
    let shape = weight.as_array();
    let weights: &[bf16] = weight.as_slice()?.reinterpret_cast();
    Ok(PackedBf16::pack(weights, shape.nrows(), shape.ncols()))
}

/// Likewise, in the memory of `device`.
fn packed_on(device: &Device, weight: &PyReadonlyArray2<'_, u16>) -> PyResult<PackedBf16> {
    let shape = weight.as_array();
    let weights: &[bf16] = weight.as_slice()?.reinterpret_cast();
    let packed = PackedBf16::pack_on(device, weights, shape.nrows(), shape.ncols());
    Ok(packed.map_err(Error::from)?)
}

/// The first elements of a buffer as an array of `shape`.
fn array<Sh: IntoDimension>(buffer: &Buffer<f32>, shape: Sh) -> PyResult<Array<f32, Sh::Dim>> {
    let shape = shape.into_dimension();
    let values = buffer.read_back(shape.size()).map_err(Error::from)?;
    Array::from_shape_vec(shape, values).map_err(|e| PyValueError::new_err(e.to_string()))
}

/// A request's part of a pass: slot, committed length, and each row's parent within the segment, -1 for none.
type SegmentTuple = (usize, usize, Vec<i64>);

/// Packs segments in the order given for `device`; `pages` holds those of each, if any kernel looks there.
fn row_paths(device: &Device, segments: &[SegmentTuple], pages: &[Vec<u32>]) -> PyResult<RowPaths> {
    let mut paths = RowPaths::default();
    for (i, (slot, committed_len, parents)) in segments.iter().enumerate() {
        let pages = pages.get(i).map_or(&[][..], Vec::as_slice);
        let parents: Vec<_> = parents.iter().map(|&p| usize::try_from(p).ok()).collect();
        paths
            .push_segment(*slot, *committed_len, pages, &parents)
            .map_err(refused)?;
    }
    paths.finish(device).map_err(Error::from)?;
    Ok(paths)
}

/// Rows that go to a slot from a position on; `place` is the two.
fn placed_rows(
    device: &Device,
    place: (usize, usize),
    pages: &[u32],
    rows: &[u32],
) -> PyResult<PlacedRows> {
    let mut placed = PlacedRows::default();
    let pushed = placed.push(place.0, place.1, pages, rows.iter().copied());
    pushed.map_err(refused)?;
    placed.finish(device).map_err(Error::from)?;
    Ok(placed)
}
