//! Vectors rounded to BF16, what cuBLASLt takes as activations, with the operation that makes them: a norm, a gate, or
//! both, as stock engines fuse them.
//!
//! All arithmetic is fp32 and rounded once, to nearest even. In: vectors anywhere in fp32 buffers. Out: contiguous
//! `[num_vectors, width]`.

use half::bf16;

use super::gate::GateKind;
use super::launcher::Launcher;
use super::vectors::for_each_row;
use super::{Kernel, check_len, check_size};
use crate::device::cuda::{CudaDevice, Shape};
use crate::device::{Buffer, HostDevice};
use crate::error::KernelError;

/// Where vectors lie: `per_row` of them in a row, `stride` apart; rows lie `row_stride` apart, the first from `offset` on.
#[derive(Clone, Copy)]
pub struct Vectors<'a> {
    /// What they lie in.
    pub values: &'a Buffer<f32>,
    /// Start of the first vector.
    pub offset: usize,
    /// Vectors of a row.
    pub per_row: usize,
    /// Between starts of vectors of a row.
    pub stride: usize,
    /// Between starts of rows.
    pub row_stride: usize,
}

impl<'a> Vectors<'a> {
    /// Rows of `width` values, one after another.
    pub fn rows(values: &'a Buffer<f32>, width: usize) -> Self {
        Self::columns(values, 0, width)
    }

    /// Rows that are parts of longer rows of `row_stride` values, from column `offset` on.
    pub fn columns(values: &'a Buffer<f32>, offset: usize, row_stride: usize) -> Self {
        Self {
            values,
            offset,
            per_row: 1,
            stride: 0,
            row_stride,
        }
    }

    fn start(&self, i: usize) -> usize {
        self.offset + i / self.per_row * self.row_stride + i % self.per_row * self.stride
    }

    fn vector(&self, i: usize, width: usize) -> &'a [f32] {
        &self.values.host()[self.start(i)..][..width]
    }

    fn check(
        &self,
        argument: &'static str,
        num_vectors: usize,
        width: usize,
    ) -> Result<(), KernelError> {
        let name = RoundRows::NAME;
        check_size(name, "per_row", self.per_row, self.per_row.max(1))?;
        // The last of a whole row lies furthest, whichever way the strides go.
        let furthest = (0..num_vectors)
            .rev()
            .take(self.per_row)
            .map(|i| self.start(i) + width);
        check_len(
            name,
            argument,
            self.values.len(),
            furthest.max().unwrap_or(0),
        )
    }

    fn has_quads(&self) -> bool {
        [self.offset, self.stride, self.row_stride]
            .iter()
            .all(|len| len.is_multiple_of(4))
    }

    fn on_cuda(
        &self,
        launcher: &Launcher<'_>,
        argument: &'static str,
    ) -> Result<CudaVectors, KernelError> {
        Ok(CudaVectors {
            values: launcher.buffer(argument, self.values)?,
            offset: self.offset as u64,
            row_stride: self.row_stride as u64,
            stride: self.stride as u32,
            per_row: self.per_row as u32,
        })
    }
}

/// A norm of the vectors.
#[derive(Clone, Copy)]
pub struct Norm<'a> {
    /// Effective weight `[width]`.
    pub weight: &'a Buffer<f32>,
    /// Added to the mean square.
    pub eps: f32,
}

/// A gate over the vectors.
#[derive(Clone, Copy)]
pub struct GatedBy<'a> {
    /// The function applied to the gate.
    pub kind: GateKind,
    /// Gates, one for each vector.
    pub gates: Vectors<'a>,
}

/// What is done to `x` before it is rounded.
#[derive(Clone, Copy)]
pub enum RowSource<'a> {
    /// Nothing.
    Plain,
    /// `x * rsqrt(mean(x^2) + eps) * weight`.
    Normed(Norm<'a>),
    /// `f(gate) * x`.
    Gated(GatedBy<'a>),
    /// First the norm, then the gate.
    NormedAndGated(Norm<'a>, GatedBy<'a>),
}

impl<'a> RowSource<'a> {
    fn norm(&self) -> Option<Norm<'a>> {
        match self {
            Self::Normed(norm) | Self::NormedAndGated(norm, _) => Some(*norm),
            Self::Plain | Self::Gated(_) => None,
        }
    }

    fn gate(&self) -> Option<GatedBy<'a>> {
        match self {
            Self::Gated(gate) | Self::NormedAndGated(_, gate) => Some(*gate),
            Self::Plain | Self::Normed(_) => None,
        }
    }
}

/// Arguments of [`RoundRows`].
pub struct RoundRowsArgs<'a> {
    /// What is done to the vectors.
    pub source: RowSource<'a>,
    /// The vectors.
    pub x: Vectors<'a>,
    /// Number of vectors.
    pub num_vectors: usize,
    /// Length of a vector.
    pub width: usize,
    /// Result `[num_vectors, width]`.
    pub y: &'a mut Buffer<bf16>,
}

/// The kernel; see the module's head for its contract.
pub struct RoundRows;

impl Kernel for RoundRows {
    const NAME: &'static str = "round_rows";
    type Args<'a> = RoundRowsArgs<'a>;

    fn check(args: &RoundRowsArgs<'_>) -> Result<(), KernelError> {
        let (name, width) = (Self::NAME, args.width);
        check_size(name, "width", width, width.max(1))?;
        args.x.check("x", args.num_vectors, width)?;
        if let Some(norm) = args.source.norm() {
            check_len(name, "weight", norm.weight.len(), width)?;
        }
        if let Some(gate) = args.source.gate() {
            gate.gates.check("gates", args.num_vectors, width)?;
        }
        check_len(name, "y", args.y.len(), args.num_vectors * width)
    }

    fn host(device: &HostDevice, args: RoundRowsArgs<'_>) {
        let width = args.width;
        let norm = args
            .source
            .norm()
            .map(|norm| (&norm.weight.host()[..width], norm.eps));
        let y = &mut args.y.host_mut()[..args.num_vectors * width];
        for_each_row(device, y, width, |i, y| {
            let x = args.x.vector(i, width);
            let scale = norm.map(|(_, eps)| {
                let squares: f64 = x.iter().map(|&x| f64::from(x) * f64::from(x)).sum();
                (1.0 / (squares / width as f64 + f64::from(eps)).sqrt()) as f32
            });
            let gates = args
                .source
                .gate()
                .map(|gate| (gate.kind, gate.gates.vector(i, width)));
            for (column, y) in y.iter_mut().enumerate() {
                let mut value = x[column];
                if let (Some((weight, _)), Some(scale)) = (norm, scale) {
                    value = value * scale * weight[column];
                }
                if let Some((kind, gates)) = gates {
                    value *= gate_of(kind, gates[column]);
                }
                *y = bf16::from_f32(value);
            }
        });
    }

    fn cuda(device: &CudaDevice, args: RoundRowsArgs<'_>) -> Result<(), KernelError> {
        let y = Launcher::of::<Self>(device).buffer("y", &*args.y)?;
        Launched {
            source: args.source,
            x: args.x,
            num_vectors: args.num_vectors,
            width: args.width,
        }
        .run(device, y)
    }
}

/// The launch, for a result anywhere on the GPU.
pub(super) struct Launched<'a> {
    pub(super) source: RowSource<'a>,
    pub(super) x: Vectors<'a>,
    pub(super) num_vectors: usize,
    pub(super) width: usize,
}

impl Launched<'_> {
    /// Runs on arguments that passed `check`; `y` has room for the result.
    ///
    /// # Errors
    /// [`KernelError::WrongDevice`], [`KernelError::Device`].
    pub(super) fn run(self, device: &CudaDevice, y: u64) -> Result<(), KernelError> {
        let launcher = Launcher::of::<RoundRows>(device);
        if self.num_vectors == 0 {
            return Ok(());
        }
        let args = self;
        let (norm, gate) = (args.source.norm(), args.source.gate());
        let has_quads = args.width.is_multiple_of(4)
            && args.x.has_quads()
            && gate.is_none_or(|gate| gate.gates.has_quads());
        let weight = norm.map(|norm| launcher.buffer("weight", norm.weight));
        let gates = gate.map(|gate| gate.gates.on_cuda(&launcher, "gates"));
        let params = RoundRowsParams {
            x: args.x.on_cuda(&launcher, "x")?,
            gates: gates.transpose()?.unwrap_or_default(),
            weight: weight.transpose()?.unwrap_or(0),
            y,
            num_vectors: args.num_vectors as u32,
            width: args.width as u32,
            eps: norm.map_or(0.0, |norm| norm.eps),
            gate_kind: match gate.map(|gate| gate.kind) {
                None => 0,
                Some(GateKind::SiluMultiply) => 1,
                Some(GateKind::SigmoidMultiply) => 2,
                Some(GateKind::GeluTanhMultiply) => 3,
            },
            has_quads: u32::from(has_quads),
        };
        let (entry, shape) = match (norm, args.width) {
            (None, _) => {
                let num_quads = args.num_vectors * args.width.div_ceil(4);
                ("round_rows", Shape::of_values(num_quads))
            }
            (Some(_), 0..=MAX_SHORT_WIDTH) => {
                let num_blocks = args.num_vectors.div_ceil(SHORT_VECTORS);
                (
                    "round_normed_short",
                    Shape::of_blocks(num_blocks, SHORT_VECTORS * 32),
                )
            }
            (Some(_), _) => (
                "round_normed_long",
                Shape::of_blocks(args.num_vectors, LONG_THREADS),
            ),
        };
        // SAFETY: `params` mirrors the kernel's; `check` saw that vectors, weight and result are long enough.
        unsafe { launcher.run(entry, shape, &params) }
    }
}

fn gate_of(kind: GateKind, x: f32) -> f32 {
    let sigmoid = |x: f32| 1.0 / (1.0 + (-x).exp());
    match kind {
        GateKind::SiluMultiply => x * sigmoid(x),
        GateKind::SigmoidMultiply => sigmoid(x),
        GateKind::GeluTanhMultiply => x * sigmoid(1.595_769_2 * (x + 0.044_715 * x * x * x)),
    }
}

/// Widest vector that one warp normalises.
const MAX_SHORT_WIDTH: usize = 512;
/// Vectors of a block of short ones.
const SHORT_VECTORS: usize = 8;
/// Threads of a long vector.
const LONG_THREADS: usize = 640;

/// `Vectors` of `round_rows.cu`.
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct CudaVectors {
    values: u64,
    offset: u64,
    row_stride: u64,
    stride: u32,
    per_row: u32,
}

/// `RoundRowsParams` of `round_rows.cu`.
#[repr(C)]
#[derive(Clone, Copy)]
struct RoundRowsParams {
    x: CudaVectors,
    gates: CudaVectors,
    weight: u64,
    y: u64,
    num_vectors: u32,
    width: u32,
    eps: f32,
    gate_kind: u32,
    has_quads: u32,
}
