//! `y = silu(x) * y` (MLP) and `y = sigmoid(x) * y` (attention output), vector by vector and in place.
//!
//! The gate `x` may be strided: Qwen's query projection interleaves `[query head h | gate head h]` per head, and a
//! fused gate+up projection has the gate in the first half of each row.

use super::Kernel;
use super::simd::{self, Lanes, Task};
use super::vectors::{StridedVectors, for_each_row};
use crate::device::{Buffer, HostDevice};
use crate::error::KernelError;

/// The function applied to the gate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GateKind {
    /// `y = silu(x) * y`.
    SiluMultiply,
    /// `y = sigmoid(x) * y`.
    SigmoidMultiply,
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
        }
    }
}
