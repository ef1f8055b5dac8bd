//! Rotary position embedding, rotate-half form, of the heads of one or more projections: in place, or after their norm.
//!
//! Pair `j` of every head is `(x[j], x[j + pair_offset])` and turns by `position * inverse_frequencies[j]`, a product
//! in fp32 as in the published models. Dimensions outside the pairs stay as they are: partial rotary has fewer
//! frequencies than half a head. A norm is that of `rms_norm`, to the bit; a layer that has one and no rotation turns no
//! pairs.

use super::launcher::Launcher;
use super::rms_norm::{RmsNorm, RmsNormArgs};
use super::simd::{self, Lanes, Task};
use super::vectors::for_each_row;
use super::{Kernel, check_len, check_size};
use crate::device::cuda::{CudaDevice, Shape};
use crate::device::{Buffer, HostDevice, Staged};
use crate::error::KernelError;

/// Heads before their norm.
#[derive(Clone, Copy)]
pub struct HeadNorm<'a> {
    /// Vector `i` of all rows' heads starts at `i * x_stride`.
    pub x: &'a Buffer<f32>,
    /// Distance between starts of heads.
    pub x_stride: usize,
    /// Effective weight `[head_dim]`.
    pub weight: Option<&'a Buffer<f32>>,
    /// Added to the mean square.
    pub eps: f32,
}

/// Heads of one projection.
pub struct RopeHeads<'a> {
    /// What they are the norm of; heads without one are turned where they are.
    pub norm: Option<HeadNorm<'a>>,
    /// Heads of a row.
    pub num_heads: usize,
    /// Queries or keys `[num_rows, num_heads, head_dim]`.
    pub y: &'a mut Buffer<f32>,
}

/// How pairs are turned.
#[derive(Clone, Copy)]
pub struct Rotation<'a> {
    /// One per pair: `rotary_dim / 2` values.
    pub inverse_frequencies: &'a Buffer<f32>,
    /// Distance between the two dimensions of a pair.
    pub pair_offset: usize,
}

/// Arguments of [`Rope`].
pub struct RopeArgs<'a> {
    /// Projections, each of which is read by none of the others.
    pub heads: Vec<RopeHeads<'a>>,
    /// Length of a head.
    pub head_dim: usize,
    /// Position of each row; its length is the number of rows.
    pub positions: &'a Staged<u32>,
    /// Nothing where heads are only normalised.
    pub rotation: Option<Rotation<'a>>,
}

/// The kernel; see the module's head for its contract.
pub struct Rope;

impl Kernel for Rope {
    const NAME: &'static str = "rope";
    type Args<'a> = RopeArgs<'a>;

    fn check(args: &RopeArgs<'_>) -> Result<(), KernelError> {
        let (name, head_dim, num_rows) = (Self::NAME, args.head_dim, args.positions.len());
        check_size(name, "head_dim", head_dim, head_dim.max(1))?;
        if let Some(rotation) = &args.rotation {
            let (num_pairs, offset) = (rotation.inverse_frequencies.len(), rotation.pair_offset);
            // A shorter distance would make pairs overlap, a longer one would leave the head.
            check_len(name, "pair_offset", offset, num_pairs)?;
            check_len(name, "head_dim", head_dim, offset + num_pairs)?;
        }
        for heads in &args.heads {
            let num_heads = heads.num_heads;
            check_size(name, "num_heads", num_heads, num_heads.max(1))?;
            check_len(name, "y", heads.y.len(), num_rows * num_heads * head_dim)?;
            let Some(norm) = &heads.norm else {
                continue;
            };
            if let Some(last) = (num_rows * num_heads).checked_sub(1) {
                check_len(name, "x", norm.x.len(), last * norm.x_stride + head_dim)?;
            }
            if let Some(weight) = norm.weight {
                check_len(name, "weight", weight.len(), head_dim)?;
            }
        }
        Ok(())
    }

    fn host(device: &HostDevice, args: RopeArgs<'_>) {
        let (head_dim, num_rows) = (args.head_dim, args.positions.len());
        for heads in args.heads {
            if let Some(norm) = heads.norm {
                let args = RmsNormArgs {
                    x: norm.x,
                    x_offset: 0,
                    x_stride: norm.x_stride,
                    num_vectors: num_rows * heads.num_heads,
                    width: head_dim,
                    weight: norm.weight,
                    eps: norm.eps,
                    y: (&mut *heads.y).into(),
                };
                RmsNorm::host(device, args);
            }
            let Some(rotation) = args.rotation else {
                continue;
            };
            let frequencies = rotation.inverse_frequencies.host();
            let row_len = heads.num_heads * head_dim;
            let y = &mut heads.y.host_mut()[..num_rows * row_len];
            for_each_row(device, y, row_len, |row, x| {
                let position = args.positions.values()[row] as f32;
                let (sin, cos): (Vec<f32>, Vec<f32>) = frequencies
                    .iter()
                    .map(|frequency| (position * frequency).sin_cos())
                    .unzip();
                simd::dispatch(RowTask {
                    x,
                    head_dim,
                    pair_offset: rotation.pair_offset,
                    sin: &sin,
                    cos: &cos,
                });
            });
        }
    }

    fn cuda(device: &CudaDevice, args: RopeArgs<'_>) -> Result<(), KernelError> {
        let launcher = Launcher::of::<Self>(device);
        let (head_dim, num_rows) = (args.head_dim, args.positions.len());
        check_size(Self::NAME, "head_dim", head_dim, head_dim.min(MAX_HEAD_DIM))?;
        if num_rows == 0 {
            return Ok(());
        }
        let frequencies = args.rotation.map(|rotation| rotation.inverse_frequencies);
        let at = frequencies.map(|buffer| launcher.buffer("inverse_frequencies", buffer));
        let at = at.transpose()?.unwrap_or(0);
        for heads in args.heads.chunks(MAX_GROUPS) {
            let mut groups = [HeadGroup::default(); MAX_GROUPS];
            let mut num_vectors = 0;
            for (group, heads) in groups.iter_mut().zip(heads) {
                num_vectors += num_rows * heads.num_heads;
                *group = HeadGroup::new(&launcher, heads, head_dim, num_vectors)?;
            }
            let params = RopeParams {
                groups,
                positions: launcher.list("positions", args.positions)?,
                inverse_frequencies: at,
                num_vectors: num_vectors as u32,
                head_dim: head_dim as u32,
                num_pairs: frequencies.map_or(0, Buffer::len) as u32,
                pair_offset: args.rotation.map_or(0, |rotation| rotation.pair_offset) as u32,
            };
            let num_blocks = num_vectors.div_ceil(BLOCK_HEADS);
            let shape = Shape::of_blocks(num_blocks, BLOCK_HEADS * 32);
            // SAFETY: `params` mirrors the kernel's; `check` saw that sources and results hold the heads, a head all pairs.
            unsafe { launcher.run("rope", shape, &params) }?;
        }
        Ok(())
    }
}

/// Longest head.
const MAX_HEAD_DIM: usize = 512;
/// Projections of one launch.
const MAX_GROUPS: usize = 8;
/// Heads of a block.
const BLOCK_HEADS: usize = 8;

/// `HeadGroup` of `rope.cu`.
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct HeadGroup {
    x: u64,
    weight: u64,
    y: u64,
    x_stride: u32,
    num_heads: u32,
    end_vector: u32,
    has_quads: u32,
    eps: f32,
}

impl HeadGroup {
    fn new(
        launcher: &Launcher<'_>,
        heads: &RopeHeads<'_>,
        head_dim: usize,
        end_vector: usize,
    ) -> Result<Self, KernelError> {
        let norm = heads.norm;
        let x = norm.map(|norm| launcher.buffer("x", norm.x));
        let weight = norm.and_then(|norm| norm.weight);
        let weight = weight.map(|weight| launcher.buffer("weight", weight));
        let x_stride = norm.map_or(head_dim, |norm| norm.x_stride);
        Ok(Self {
            x: x.transpose()?.unwrap_or(0),
            weight: weight.transpose()?.unwrap_or(0),
            y: launcher.buffer("y", heads.y)?,
            x_stride: x_stride as u32,
            num_heads: heads.num_heads as u32,
            end_vector: end_vector as u32,
            has_quads: u32::from(head_dim.is_multiple_of(4) && x_stride.is_multiple_of(4)),
            eps: norm.map_or(0.0, |norm| norm.eps),
        })
    }
}

/// `RopeParams` of `rope.cu`.
#[repr(C)]
#[derive(Clone, Copy)]
struct RopeParams {
    groups: [HeadGroup; MAX_GROUPS],
    positions: u64,
    inverse_frequencies: u64,
    num_vectors: u32,
    head_dim: u32,
    num_pairs: u32,
    pair_offset: u32,
}

/// All heads of one row.
struct RowTask<'a> {
    x: &'a mut [f32],
    head_dim: usize,
    pair_offset: usize,
    sin: &'a [f32],
    cos: &'a [f32],
}

impl Task for RowTask<'_> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(self) {
        let num_pairs = self.cos.len();
        for head in self.x.chunks_exact_mut(self.head_dim) {
            let (first, second) = head.split_at_mut(self.pair_offset);
            for (((a, b), &sin), &cos) in first[..num_pairs]
                .iter_mut()
                .zip(&mut second[..num_pairs])
                .zip(self.sin)
                .zip(self.cos)
            {
                (*a, *b) = (*a * cos - *b * sin, *b * cos + *a * sin);
            }
        }
    }
}
