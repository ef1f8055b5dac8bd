//! The INT8 copy of an LM head on a GPU, coded there.

use super::LmHeadScreen;
use crate::device::cuda::{Arch, CudaDevice, Shape};
use crate::device::{Buffer, Device};
use crate::error::KernelError;
use crate::kernels::Kernel;
use crate::kernels::launcher::Launcher;
use crate::kernels::packed_bf16::PackedBf16;

/// Columns of a chunk of codes.
pub(super) const CHUNK_COLUMNS: usize = 16;
/// Chunks that K is padded to: two stages of the wgmma scan's ring.
const CHUNK_ALIGN: usize = 16;
/// Floats of a channel's bounds.
const BOUNDS: usize = 4;
const BLOCK_THREADS: usize = 256;
/// Threads that code a channel.
const CHANNEL_THREADS: usize = 16;

/// Which instruction scans codes. Both give the same integers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ScreenScan {
    /// `mma.sync`, on every GPU.
    Mma,
    /// `wgmma`, on Hopper, where the codes of the rows fit shared memory.
    Wgmma,
}

impl ScreenScan {
    /// The faster one of a GPU.
    pub fn of(arch: Arch) -> Self {
        match arch {
            Arch::Sm90a => Self::Wgmma,
            Arch::Sm80 | Arch::Sm120 => Self::Mma,
        }
    }
}

/// Codes and bounds of a head; `screen.cuh` says how they lie.
#[derive(Clone, Debug)]
pub(super) struct HeadCodes {
    pub(super) codes: Buffer<u8>,
    /// Of each channel: scale, norm of the residual, norm of what the codes give, and nothing.
    pub(super) bounds: Buffer<f32>,
    pub(super) scan: ScreenScan,
    num_channels: usize,
    num_chunks: usize,
}

/// `CodeHeadParams` of `lm_head_screen.cu`.
#[repr(C)]
#[derive(Clone, Copy)]
struct CodeHeadParams {
    exact: u64,
    codes: u64,
    bounds: u64,
    vocab_size: u32,
    in_features: u32,
    num_chunks: u32,
}

impl HeadCodes {
    /// Channels of a tile.
    pub(super) const TILE_CHANNELS: usize = 64;

    /// Codes `weight`, which lies on the GPU of `device`.
    ///
    /// # Errors
    /// [`KernelError::WrongDevice`], [`KernelError::Device`].
    pub(super) fn new(
        device: &Device,
        cuda: &CudaDevice,
        weight: &PackedBf16,
    ) -> Result<Self, KernelError> {
        let launcher = Launcher::of::<LmHeadScreen>(cuda);
        let named = |source| KernelError::Device {
            kernel: LmHeadScreen::NAME,
            source,
        };
        let (num_channels, num_chunks) = Self::padded(weight.out_features(), weight.in_features());
        let codes = device.try_alloc(num_channels * num_chunks * CHUNK_COLUMNS);
        let bounds = device.try_alloc(num_channels * BOUNDS);
        let this = Self {
            codes: codes.map_err(named)?,
            bounds: bounds.map_err(named)?,
            scan: ScreenScan::of(cuda.arch()),
            num_channels,
            num_chunks,
        };
        let params = CodeHeadParams {
            exact: launcher.matrix("exact", weight)?,
            codes: launcher.buffer("head", &this.codes)?,
            bounds: launcher.buffer("head", &this.bounds)?,
            vocab_size: weight.out_features() as u32,
            in_features: weight.in_features() as u32,
            num_chunks: num_chunks as u32,
        };
        let num_blocks = num_channels / (BLOCK_THREADS / CHANNEL_THREADS);
        let shape = Shape::of_blocks(num_blocks, BLOCK_THREADS);
        // SAFETY: `params` mirrors the kernel's, and the buffers hold all channels, padded.
        unsafe { launcher.run("code_head", shape, &params)? };
        Ok(this)
    }

    /// Channels, and chunks of columns, with their padding.
    fn padded(out_features: usize, in_features: usize) -> (usize, usize) {
        let num_chunks = in_features.div_ceil(CHUNK_COLUMNS);
        (
            out_features.next_multiple_of(Self::TILE_CHANNELS),
            num_chunks.next_multiple_of(CHUNK_ALIGN),
        )
    }

    /// Bytes of the copy of a head of this shape.
    pub(super) fn bytes_for(out_features: usize, in_features: usize) -> usize {
        let (num_channels, num_chunks) = Self::padded(out_features, in_features);
        num_channels * (num_chunks * CHUNK_COLUMNS + BOUNDS * size_of::<f32>())
    }

    /// Channels with their padding.
    pub(super) fn num_channels(&self) -> usize {
        self.num_channels
    }

    /// Chunks of columns with their padding.
    pub(super) fn num_chunks(&self) -> usize {
        self.num_chunks
    }

    /// At least the norm of every channel whose bounds are finite.
    ///
    /// # Errors
    /// [`KernelError::Device`].
    pub(super) fn largest_norm(&self) -> Result<f64, KernelError> {
        let bounds = self.bounds.read_back(self.num_channels * BOUNDS);
        let bounds = bounds.map_err(|source| KernelError::Device {
            kernel: LmHeadScreen::NAME,
            source,
        })?;
        let norms = bounds
            .chunks_exact(BOUNDS)
            .map(|channel| f64::from(channel[1]) + f64::from(channel[2]));
        Ok(norms.filter(|norm| norm.is_finite()).fold(0.0, f64::max))
    }
}
