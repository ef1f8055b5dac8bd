//! `y = cap(multiplier * y)`, `cap(l) = c * tanh(l / c)`: a drafter's own shaping of its head's logits, in place.
//!
//! Selection shapes the logits that it reads by itself; this is for logits that something is added to after their shape
//! and before their selection, such as a Markov head's correction. A value depends on nothing but itself.

use super::draft_select::LogitShape;
use super::launcher::Launcher;
use super::simd::{self, Lanes, Task};
use super::vectors::for_each_row;
use super::{Kernel, check_len};
use crate::device::cuda::{CudaDevice, Shape};
use crate::device::{Buffer, HostDevice};
use crate::error::KernelError;

/// Arguments of [`ShapeLogits`].
pub struct ShapeLogitsArgs<'a> {
    /// What becomes of every logit.
    pub shape: LogitShape,
    /// Rows to shape, from the first on.
    pub num_rows: usize,
    /// Logits of a row.
    pub vocab_size: usize,
    /// `[num_rows, vocab_size]`, shaped in place.
    pub logits: &'a mut Buffer<f32>,
}

/// The kernel; see the module's head for its contract.
pub struct ShapeLogits;

impl Kernel for ShapeLogits {
    const NAME: &'static str = "shape_logits";
    type Args<'a> = ShapeLogitsArgs<'a>;

    fn check(args: &ShapeLogitsArgs<'_>) -> Result<(), KernelError> {
        let needed = args.num_rows * args.vocab_size;
        check_len(Self::NAME, "logits", args.logits.len(), needed)
    }

    fn host(device: &HostDevice, args: ShapeLogitsArgs<'_>) {
        let logits = &mut args.logits.host_mut()[..args.num_rows * args.vocab_size];
        for_each_row(device, logits, args.vocab_size, |_, logits| {
            simd::dispatch(RowTask {
                shape: args.shape,
                logits,
            });
        });
    }

    fn cuda(device: &CudaDevice, args: ShapeLogitsArgs<'_>) -> Result<(), KernelError> {
        let num_values = args.num_rows * args.vocab_size;
        if num_values == 0 {
            return Ok(());
        }
        let launcher = Launcher::of::<Self>(device);
        let params = ShapeLogitsParams {
            logits: launcher.buffer("logits", args.logits)?,
            num_values: num_values as u64,
            multiplier: args.shape.multiplier,
            softcap: args.shape.softcap.unwrap_or(0.0),
        };
        let shape = Shape::of_values(num_values);
        // SAFETY: `params` mirrors the kernel's; `check` saw that the logits are long enough.
        unsafe { launcher.run("shape_logits", shape, &params) }
    }
}

/// `ShapeLogitsParams` of `shape_logits.cu`.
#[repr(C)]
#[derive(Clone, Copy)]
struct ShapeLogitsParams {
    logits: u64,
    num_values: u64,
    multiplier: f32,
    softcap: f32,
}

struct RowTask<'a> {
    shape: LogitShape,
    logits: &'a mut [f32],
}

impl Task for RowTask<'_> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(self) {
        let shape = self.shape;
        simd::map1::<L>(self.logits, |logits| shape.apply(logits));
    }
}
