//! Copies rows from a pass's tail into rings of their slots, any number of them: a row goes to lane
//! `position % ring_len`.
//!
//! A plain copy that changes no bit; of rows that share a lane the last stays. The recurrent layers' logs and
//! convolution inputs are such rings.

use super::kv_span::KvSpan;
use super::launcher::Launcher;
use super::placed_rows::PlacedRows;
use super::{Kernel, check_len, check_size};
use crate::device::cuda::{CudaDevice, Shape};
use crate::device::{Buffer, HostDevice};
use crate::error::KernelError;

/// One kind of row, and the rings that keep it.
pub struct Ring<'a> {
    /// Rows of the pass, `[rows, row_len]`.
    pub tail: &'a Buffer<f32>,
    /// Length of a row.
    pub row_len: usize,
    /// Lanes of a ring.
    pub ring_len: usize,
    /// Rings `[slots, ring_len, row_len]`.
    pub rings: &'a mut Buffer<f32>,
}

/// Arguments of [`AppendRing`].
pub struct AppendRingArgs<'a> {
    /// The rows.
    pub rows: &'a PlacedRows,
    /// Where they are and go.
    pub rings: Vec<Ring<'a>>,
}

/// The kernel; see the module's head for its contract.
pub struct AppendRing;

impl Kernel for AppendRing {
    const NAME: &'static str = "append_ring";
    type Args<'a> = AppendRingArgs<'a>;

    fn check(args: &AppendRingArgs<'_>) -> Result<(), KernelError> {
        let num_slots = args.rows.ends().iter().map(|&(slot, _)| slot + 1).max();
        for ring in &args.rings {
            let Ring {
                row_len, ring_len, ..
            } = *ring;
            check_size(Self::NAME, "row_len", row_len, row_len.max(1))?;
            check_size(Self::NAME, "ring_len", ring_len, ring_len.max(1))?;
            let tail_len = args.rows.tail_len(row_len);
            check_len(Self::NAME, "tail", ring.tail.len(), tail_len)?;
            let rings_len = num_slots.unwrap_or(0) * ring_len * row_len;
            check_len(Self::NAME, "rings", ring.rings.len(), rings_len)?;
        }
        Ok(())
    }

    fn host(_device: &HostDevice, args: AppendRingArgs<'_>) {
        for ring in args.rings {
            let (row_len, ring_len) = (ring.row_len, ring.ring_len);
            let rings = ring.rings.host_mut();
            for placed in args.rows.iter() {
                let lane = placed.slot as usize * ring_len + placed.position as usize % ring_len;
                rings[lane * row_len..][..row_len]
                    .copy_from_slice(&ring.tail.host()[placed.row as usize * row_len..][..row_len]);
            }
        }
    }

    fn cuda(device: &CudaDevice, args: AppendRingArgs<'_>) -> Result<(), KernelError> {
        let launcher = Launcher::of::<Self>(device);
        let rows = args.rows.on_cuda(Self::NAME, KvSpan::Whole)?;
        for rings in args.rings.chunks(MAX_RINGS) {
            let mut params = AppendRingParams {
                rows,
                num_rows: args.rows.len() as u32,
                num_rings: rings.len() as u32,
                rings: [RingParams::default(); MAX_RINGS],
            };
            for (ring, params) in rings.iter().zip(&mut params.rings) {
                *params = RingParams {
                    tail: launcher.buffer("tail", ring.tail)?,
                    rings: launcher.buffer("rings", ring.rings)?,
                    row_len: ring.row_len as u32,
                    ring_len: ring.ring_len as u32,
                };
            }
            let num_blocks = args.rows.len() * rings.len();
            if num_blocks == 0 {
                continue;
            }
            let shape = Shape::of_blocks(num_blocks, BLOCK_THREADS);
            // SAFETY: `params` mirrors the kernel's; `check` saw that tails hold the rows and rings the slots.
            unsafe { launcher.run(Self::NAME, shape, &params)? };
        }
        Ok(())
    }
}

/// Rings of one launch.
const MAX_RINGS: usize = 128;
const BLOCK_THREADS: usize = 256;

/// `Ring` of `append_ring.cu`.
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct RingParams {
    tail: u64,
    rings: u64,
    row_len: u32,
    ring_len: u32,
}

/// `AppendRingParams` of `append_ring.cu`.
#[repr(C)]
#[derive(Clone, Copy)]
struct AppendRingParams {
    rows: u64,
    num_rows: u32,
    num_rings: u32,
    rings: [RingParams; MAX_RINGS],
}
