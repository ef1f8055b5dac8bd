//! Kernels: one file per stem, each with its contract, its checks and its host implementation.
//!
//! A kernel knows buffers, shapes and row paths, never a model. [`Kernel::run`] checks and then picks the backend; it
//! is the only such switch. Every kernel is **row-invariant**: what it computes for a row depends on that row's own
//! token path only, never on how many or which rows sit beside it, nor on the number of threads.

pub mod append_kv;
pub mod append_ring;
pub mod bf16_matmul;
pub mod block_conv;
mod channel_tasks;
pub mod draft_block;
pub mod draft_select;
pub mod embed_rows;
pub mod fp8_matmul;
pub mod gate;
pub mod gather_taps;
pub mod gdn_fold;
pub mod gdn_recurrent;
pub mod gdn_wy;
pub mod greedy_argmax;
pub mod kv_span;
mod launcher;
pub mod lm_head_screen;
pub mod masked_ids;
pub mod matmul_rows;
mod packed_bf16;
mod packed_fp8;
mod packed_w12;
pub mod paths;
pub mod placed_rows;
pub mod plant_matrix;
#[cfg(test)]
pub(crate) mod random_trees;
pub mod rms_norm;
pub mod rope;
pub mod round_rows;
pub mod rounded_matmul;
mod row_format;
pub mod sample_rows;
pub mod shape_logits;
pub mod simd;
pub mod skinny_matmul;
pub mod skinny_weights;
pub mod stock_matmul;
pub mod tree_attention;
pub(crate) mod vectors;
pub mod w12_matmul;
mod wgmma_matmul;

use rayon::prelude::*;

use crate::device::cuda::CudaDevice;
use crate::device::{Device, HostDevice};
use crate::error::KernelError;

/// One operation with checks in a fixed order (rank, dtype, layout, shape, capacity) and an implementation per backend.
pub trait Kernel {
    /// The stem: name of the file, of the test and of the bench.
    const NAME: &'static str;
    /// Buffers and shapes of one call.
    type Args<'a>;

    /// Refuses arguments that the implementations may not see.
    ///
    /// # Errors
    /// A [`KernelError`] naming kernel, argument, expected and got.
    fn check(args: &Self::Args<'_>) -> Result<(), KernelError>;

    /// The host implementation; `args` passed `check`.
    fn host(device: &HostDevice, args: Self::Args<'_>);

    /// The CUDA implementation; `args` passed `check`.
    ///
    /// # Errors
    /// [`KernelError::WrongDevice`], [`KernelError::Device`]; [`KernelError::NoCuda`] where there is none.
    fn cuda(_device: &CudaDevice, _args: Self::Args<'_>) -> Result<(), KernelError> {
        Err(KernelError::NoCuda { kernel: Self::NAME })
    }

    /// Checks `args` and runs the kernel on `device`.
    ///
    /// # Errors
    /// What `check` and [`cuda`](Self::cuda) say.
    fn run(device: &Device, args: Self::Args<'_>) -> Result<(), KernelError> {
        Self::check(&args)?;
        match device {
            Device::Host(host) => Self::host(host, args),
            Device::Cuda(cuda) => Self::cuda(cuda, args)?,
        }
        Ok(())
    }
}

/// Refuses a buffer shorter than its shape needs.
pub(crate) fn check_len(
    kernel: &'static str,
    argument: &'static str,
    got: usize,
    expected: usize,
) -> Result<(), KernelError> {
    if got < expected {
        return Err(KernelError::BufferTooShort {
            kernel,
            argument,
            expected,
            got,
        });
    }
    Ok(())
}

/// Refuses a size that is zero or not the one required.
pub(crate) fn check_size(
    kernel: &'static str,
    argument: &'static str,
    got: usize,
    expected: usize,
) -> Result<(), KernelError> {
    if got != expected || got == 0 {
        return Err(KernelError::Size {
            kernel,
            argument,
            expected,
            got,
        });
    }
    Ok(())
}

/// Multiply-adds below which waking other threads costs more than it saves (some ten microseconds of one core).
const PARALLEL_FROM_FMA: usize = 1 << 18;

/// Runs independent tasks on the device's threads, or here when all of them together (`num_fma` multiply-adds) are
/// too little work to share.
pub(crate) fn for_each_task<T: Send>(
    device: &HostDevice,
    num_fma: usize,
    tasks: Vec<T>,
    run: impl Fn(T) + Send + Sync,
) {
    if tasks.len() < 2 || num_fma < PARALLEL_FROM_FMA || device.num_threads() == 1 {
        tasks.into_iter().for_each(run);
    } else {
        device.install(|| tasks.into_par_iter().for_each(run));
    }
}
