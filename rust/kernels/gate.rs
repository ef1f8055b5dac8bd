//! `y = silu(x) * y` or `y = gelu(x) * y` (MLP) and `y = sigmoid(x) * y` (attention output), vector by vector and in
//! place.
//!
//! The gate `x` may be strided: Qwen's query projection interleaves `[query head h | gate head h]` per head, and a
//! fused gate+up projection has the gate in the first half of each row.

use super::Kernel;
use super::launcher::Launcher;
use super::simd::{self, Lanes, Task};
use super::vectors::{StridedVectors, for_each_row};
use crate::device::cuda::{CudaDevice, Shape};
use crate::device::{Buffer, HostDevice};
use crate::error::KernelError;

/// The function applied to the gate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GateKind {
    /// `y = silu(x) * y`.
    SiluMultiply,
    /// `y = sigmoid(x) * y`.
    SigmoidMultiply,
    /// `y = gelu(x) * y`, gelu with its tanh: `x * sigmoid(2 u)`, `u = sqrt(2 / pi) * (x + 0.044715 x^3)`.
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
    /// Gated in place, contiguous `[num_vectors, width]`.
    pub y: &'a mut Buffer<f32>,
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
        args.vectors().check(Self::NAME, args.y.len())
    }

    fn host(device: &HostDevice, args: GateArgs<'_>) {
        let vectors = args.vectors();
        let y = &mut args.y.host_mut()[..args.num_vectors * args.width];
        for_each_row(device, y, args.width, |i, y| {
            simd::dispatch(VectorTask {
                kind: args.kind,
                x: vectors.vector(i),
                y,
            });
        });
    }

    fn cuda(device: &CudaDevice, args: GateArgs<'_>) -> Result<(), KernelError> {
        let launcher = Launcher::of::<Self>(device);
        let num_values = args.num_vectors * args.width;
        if num_values == 0 {
            return Ok(());
        }
        let params = GateParams {
            x: launcher.buffer("x", args.x)?,
            y: launcher.buffer("y", args.y)?,
            x_offset: args.x_offset as u64,
            x_stride: args.x_stride as u64,
            num_vectors: args.num_vectors as u32,
            width: args.width as u32,
        };
        let entry = match args.kind {
            GateKind::SiluMultiply => "gate_silu",
            GateKind::SigmoidMultiply => "gate_sigmoid",
            GateKind::GeluTanhMultiply => "gate_gelu_tanh",
        };
        let shape = Shape::of_values(num_values);
        // SAFETY: `params` mirrors the kernel's; `check` saw that gates and values are long enough.
        unsafe { launcher.run(entry, shape, &params) }
    }
}

/// `GateParams` of `gate.cu`.
#[repr(C)]
#[derive(Clone, Copy)]
struct GateParams {
    x: u64,
    y: u64,
    x_offset: u64,
    x_stride: u64,
    num_vectors: u32,
    width: u32,
}

struct VectorTask<'a> {
    kind: GateKind,
    x: &'a [f32],
    y: &'a mut [f32],
}

impl Task for VectorTask<'_> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(self) {
        match self.kind {
            GateKind::SiluMultiply => simd::map2::<L>(self.x, self.y, |x, y| x.silu().mul(y)),
            GateKind::SigmoidMultiply => simd::map2::<L>(self.x, self.y, |x, y| x.sigmoid().mul(y)),
            GateKind::GeluTanhMultiply => {
                simd::map2::<L>(self.x, self.y, |x, y| x.gelu_tanh().mul(y));
            }
        }
    }
}
