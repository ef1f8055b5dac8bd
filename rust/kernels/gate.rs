//! `y = silu(x) * values` or `y = gelu(x) * values` (MLP) and `y = sigmoid(x) * values` (attention output), vector by
//! vector, mostly for the matmul that follows.
//!
//! The gate `x` may be strided: Qwen's query projection interleaves `[query head h | gate head h]` per head, and a
//! fused gate+up projection has the gate in the first half of each row.

use super::launcher::Launcher;
use super::matmul_rows::{CudaRows, RowsOutput};
use super::simd::{self, Lanes, Task};
use super::vectors::{StridedVectors, for_each_row};
use super::{Kernel, check_len, check_size};
use crate::device::cuda::{CudaDevice, Shape};
use crate::device::{Buffer, HostDevice};
use crate::error::KernelError;

/// The function applied to the gate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GateKind {
    /// `y = silu(x) * values`.
    SiluMultiply,
    /// `y = sigmoid(x) * values`.
    SigmoidMultiply,
    /// `y = gelu(x) * values`, gelu with its tanh: `x * sigmoid(2 u)`, `u = sqrt(2 / pi) * (x + 0.044715 x^3)`.
    GeluTanhMultiply,
}

/// Arguments of [`Gate`].
pub struct GateArgs<'a> {
    /// Which function.
    pub kind: GateKind,
    /// Gate values; vector `i` starts at `x_offset + i * x_stride`.
    pub x: &'a Buffer<f32>,
    /// Start of the first vector.
    pub x_offset: usize,
    /// Distance between starts of vectors.
    pub x_stride: usize,
    /// Vectors to gate.
    pub num_vectors: usize,
    /// Length of a vector.
    pub width: usize,
    /// What is gated, contiguous `[num_vectors, width]`.
    pub values: &'a Buffer<f32>,
    /// Vectors of a row of `y`.
    pub per_row: usize,
    /// Result `[num_vectors / per_row, per_row * width]`.
    pub y: RowsOutput<'a>,
}

impl<'a> GateArgs<'a> {
    fn vectors(&self) -> StridedVectors<'a> {
        StridedVectors {
            values: self.x,
            offset: self.x_offset,
            stride: self.x_stride,
            num_vectors: self.num_vectors,
            width: self.width,
        }
    }
}

/// The kernel; see the module's head for its contract.
pub struct Gate;

impl Kernel for Gate {
    const NAME: &'static str = "gate";
    type Args<'a> = GateArgs<'a>;

    fn check(args: &GateArgs<'_>) -> Result<(), KernelError> {
        let (name, num_vectors, per_row) = (Self::NAME, args.num_vectors, args.per_row);
        args.vectors().check(name)?;
        check_size(name, "per_row", per_row, per_row.max(1))?;
        let whole_rows = num_vectors.next_multiple_of(per_row);
        if num_vectors > 0 {
            check_size(name, "num_vectors", num_vectors, whole_rows)?;
        }
        check_len(name, "values", args.values.len(), num_vectors * args.width)?;
        args.y
            .check(name, num_vectors / per_row, per_row * args.width)
    }

    fn host(device: &HostDevice, args: GateArgs<'_>) {
        let vectors = args.vectors();
        let values = &args.values.host()[..args.num_vectors * args.width];
        let mut y = args.y;
        let y = &mut y.host_mut()[..values.len()];
        for_each_row(device, y, args.width, |i, y| {
            simd::dispatch(VectorTask {
                kind: args.kind,
                x: vectors.vector(i),
                values: &values[i * args.width..][..args.width],
                y,
            });
        });
    }

    fn cuda(device: &CudaDevice, args: GateArgs<'_>) -> Result<(), KernelError> {
        let launcher = Launcher::of::<Self>(device);
        let (num_rows, row_len) = (args.num_vectors / args.per_row, args.per_row * args.width);
        if num_rows == 0 {
            return Ok(());
        }
        let params = GateParams {
            x: launcher.buffer("x", args.x)?,
            values: launcher.buffer("values", args.values)?,
            y: args.y.on_cuda(&launcher, num_rows, row_len)?,
            x_offset: args.x_offset as u64,
            x_stride: args.x_stride as u64,
            num_rows: num_rows as u32,
            per_row: args.per_row as u32,
            width: args.width as u32,
            has_quads: u32::from(
                [args.x_offset, args.x_stride, args.width]
                    .iter()
                    .all(|len| len.is_multiple_of(4)),
            ),
        };
        let num_quads = num_rows * row_len.div_ceil(4);
        let between_matmuls = Shape::of_few_values(num_quads, device.limits());
        let (entry, shape) = match args.kind {
            GateKind::SiluMultiply => ("gate_silu", between_matmuls),
            GateKind::GeluTanhMultiply => ("gate_gelu_tanh", between_matmuls),
            GateKind::SigmoidMultiply => ("gate_sigmoid", Shape::of_values(num_quads)),
        };
        // SAFETY: `params` mirrors the kernel's; `check` saw that gates and values are long enough.
        unsafe { launcher.run(entry, shape, &params) }
    }
}

/// `GateParams` of `gate.cu`.
#[repr(C)]
#[derive(Clone, Copy)]
struct GateParams {
    x: u64,
    values: u64,
    y: CudaRows,
    x_offset: u64,
    x_stride: u64,
    num_rows: u32,
    per_row: u32,
    width: u32,
    has_quads: u32,
}

struct VectorTask<'a> {
    kind: GateKind,
    x: &'a [f32],
    values: &'a [f32],
    y: &'a mut [f32],
}

impl Task for VectorTask<'_> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(self) {
        // `y` takes the values first, so that one two-operand pass remains.
        self.y.copy_from_slice(self.values);
        match self.kind {
            GateKind::SiluMultiply => simd::map2::<L>(self.x, self.y, |x, y| x.silu().mul(y)),
            GateKind::SigmoidMultiply => simd::map2::<L>(self.x, self.y, |x, y| x.sigmoid().mul(y)),
            GateKind::GeluTanhMultiply => {
                simd::map2::<L>(self.x, self.y, |x, y| x.gelu_tanh().mul(y));
            }
        }
    }
}
