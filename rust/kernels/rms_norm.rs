//! `y = x * rsqrt(mean(x^2) + eps)`, times a weight where there is one, vector by vector; or that added to `y`.
//!
//! A vector is a row of the residual stream or one head. The mean is the canonical dot product of [`simd::dot`]; the
//! weight is the effective one: families that store `w` for a factor `1 + w` are resolved when weights are loaded.

use super::Kernel;
use super::check_len;
use super::launcher::Launcher;
use super::matmul_rows::{CudaRows, MatmulRows, RowsOutput};
use super::simd::{self, Lanes, Task};
use super::vectors::{StridedVectors, for_each_row};
use crate::device::cuda::{CudaDevice, Shape};
use crate::device::{Buffer, HostDevice};
use crate::error::KernelError;

/// What becomes of a normalised vector.
#[derive(Debug)]
pub enum NormOutput<'a> {
    /// `y = normed`, `[num_vectors, width]`.
    Store(RowsOutput<'a>),
    /// `y = (y + normed) * factor`: the norm behind a sublayer, and the residual stream it ends in.
    AddTo {
        /// Contiguous `[num_vectors, width]`.
        y: &'a mut Buffer<f32>,
        /// Factor on the sum.
        factor: f32,
    },
}

impl<'a> From<&'a mut Buffer<f32>> for NormOutput<'a> {
    fn from(values: &'a mut Buffer<f32>) -> Self {
        Self::Store(values.into())
    }
}

impl<'a> From<&'a mut MatmulRows> for NormOutput<'a> {
    fn from(rows: &'a mut MatmulRows) -> Self {
        Self::Store(rows.into())
    }
}

impl<'a> NormOutput<'a> {
    /// Where results go, and the factor on the sum where there is one.
    fn parts(self) -> (RowsOutput<'a>, Option<f32>) {
        match self {
            Self::Store(y) => (y, None),
            Self::AddTo { y, factor } => (y.into(), Some(factor)),
        }
    }
}

/// Arguments of [`RmsNorm`].
pub struct RmsNormArgs<'a> {
    /// Source; vector `i` starts at `x_offset + i * x_stride`.
    pub x: &'a Buffer<f32>,
    /// Start of the first vector.
    pub x_offset: usize,
    /// Distance between starts of vectors.
    pub x_stride: usize,
    /// Vectors to normalise.
    pub num_vectors: usize,
    /// Length of a vector.
    pub width: usize,
    /// Effective weight `[width]`; the loader has already added 1 where the family does.
    pub weight: Option<&'a Buffer<f32>>,
    /// Added to the mean square.
    pub eps: f32,
    /// Takes the results.
    pub y: NormOutput<'a>,
}

impl<'a> RmsNormArgs<'a> {
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
pub struct RmsNorm;

impl Kernel for RmsNorm {
    const NAME: &'static str = "rms_norm";
    type Args<'a> = RmsNormArgs<'a>;

    fn check(args: &RmsNormArgs<'_>) -> Result<(), KernelError> {
        args.vectors().check(Self::NAME)?;
        let (num_vectors, width) = (args.num_vectors, args.width);
        match &args.y {
            NormOutput::Store(y) => y.check(Self::NAME, num_vectors, width)?,
            NormOutput::AddTo { y, .. } => {
                check_len(Self::NAME, "y", y.len(), num_vectors * width)?;
            }
        }
        args.weight.map_or(Ok(()), |weight| {
            check_len(Self::NAME, "weight", weight.len(), args.width)
        })
    }

    fn host(device: &HostDevice, args: RmsNormArgs<'_>) {
        let vectors = args.vectors();
        let weight = args.weight.map(|weight| &weight.host()[..args.width]);
        let (mut y, factor) = args.y.parts();
        let y = &mut y.host_mut()[..args.num_vectors * args.width];
        for_each_row(device, y, args.width, |i, y| {
            simd::dispatch(VectorTask {
                x: vectors.vector(i),
                weight,
                eps: args.eps,
                factor,
                y,
            });
        });
    }

    fn cuda(device: &CudaDevice, args: RmsNormArgs<'_>) -> Result<(), KernelError> {
        let launcher = Launcher::of::<Self>(device);
        if args.num_vectors == 0 {
            return Ok(());
        }
        let weight = args.weight.map(|weight| launcher.buffer("weight", weight));
        let (y, factor) = args.y.parts();
        let params = RmsNormParams {
            x: launcher.buffer("x", args.x)?,
            weight: weight.transpose()?.unwrap_or(0),
            y: y.on_cuda(&launcher, args.num_vectors, args.width)?,
            x_offset: args.x_offset as u64,
            x_stride: args.x_stride as u64,
            num_vectors: args.num_vectors as u32,
            width: args.width as u32,
            eps: args.eps,
            factor: factor.unwrap_or(0.0),
            adds: u32::from(factor.is_some()),
            has_quads: u32::from(
                [args.x_offset, args.x_stride, args.width]
                    .iter()
                    .all(|len| len.is_multiple_of(4)),
            ),
        };
        // By the width alone: the order of the sum must not depend on the number of vectors.
        let (entry, shape) = match args.width {
            0..=MAX_SHORT_WIDTH => (
                "rms_norm_short",
                Shape::of_blocks(args.num_vectors.div_ceil(8), 256),
            ),
            _ => ("rms_norm_long", Shape::of_blocks(args.num_vectors, 640)),
        };
        // SAFETY: `params` mirrors the kernel's; `check` saw that source, weight and result are long enough.
        unsafe { launcher.run(entry, shape, &params) }
    }
}

/// Widest vector that one warp normalises.
const MAX_SHORT_WIDTH: usize = 512;

/// `RmsNormParams` of `rms_norm.cu`.
#[repr(C)]
#[derive(Clone, Copy)]
struct RmsNormParams {
    x: u64,
    weight: u64,
    y: CudaRows,
    x_offset: u64,
    x_stride: u64,
    num_vectors: u32,
    width: u32,
    eps: f32,
    has_quads: u32,
    factor: f32,
    adds: u32,
}

struct VectorTask<'a> {
    x: &'a [f32],
    weight: Option<&'a [f32]>,
    eps: f32,
    factor: Option<f32>,
    y: &'a mut [f32],
}

impl Task for VectorTask<'_> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(self) {
        let mean_square = simd::dot::<L>(self.x, self.x) / self.x.len() as f32;
        let scale = L::splat(1.0 / (mean_square + self.eps).sqrt());
        match (self.factor, self.weight) {
            // `y` takes the weight first, so that one two-operand pass remains.
            (None, Some(weight)) => {
                self.y.copy_from_slice(weight);
                simd::map2::<L>(self.x, self.y, |x, w| x.mul(scale).mul(w));
            }
            (None, None) => simd::map2::<L>(self.x, self.y, |x, _| x.mul(scale)),
            (Some(factor), weight) => {
                let mut normed = weight.map_or_else(|| vec![1.0; self.x.len()], <[f32]>::to_vec);
                simd::map2::<L>(self.x, &mut normed, |x, w| x.mul(scale).mul(w));
                let factor = L::splat(factor);
                simd::map2::<L>(&normed, self.y, |normed, y| y.add(normed).mul(factor));
            }
        }
    }
}
