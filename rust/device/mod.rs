//! Where buffers live and kernels run.
//!
//! The host backend is complete on its own: it runs the whole engine with no GPU. A device owns what all kernels of
//! one engine share (here the thread pool); it knows no kernel and no model.

mod activity;
mod buffer;
pub mod cuda;
mod graphs;
mod staged;

pub use activity::ActivityCounts;
pub use buffer::{Buffer, Element};
pub use graphs::Graphs;
pub use staged::Staged;

use std::sync::atomic::{AtomicU64, Ordering};

use crate::error::DeviceError;
use crate::options::DeviceChoice;
use cuda::CudaDevice;

/// The two kinds of devices, as far as layouts and sizes go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Backend {
    /// CPU.
    Host,
    /// A GPU through CUDA.
    Cuda,
}

impl Backend {
    /// Where `choice` leads on this machine.
    pub fn of(choice: DeviceChoice) -> Self {
        match choice {
            DeviceChoice::Auto if cuda::is_usable(0) => Self::Cuda,
            DeviceChoice::Auto | DeviceChoice::Cpu => Self::Host,
            DeviceChoice::Cuda(_) => Self::Cuda,
        }
    }

    /// Whether matrices can be held as FP8; where they cannot, they are decoded as they are loaded.
    pub fn serves_fp8(self) -> bool {
        self == Self::Host
    }

    /// A short name for reports: `cpu` or `cuda`.
    pub fn name(self) -> &'static str {
        match self {
            Self::Host => "cpu",
            Self::Cuda => "cuda",
        }
    }
}

/// The device an engine computes on. `Kernel::run` is the only place that matches on it.
pub enum Device {
    /// CPU threads of this process.
    Host(HostDevice),
    /// One GPU.
    Cuda(Box<CudaDevice>),
}

impl Device {
    /// The device of `choice`, with `num_threads` host workers, or one per available core when `None`.
    ///
    /// # Errors
    /// As for [`host`](Self::host) and [`cuda`](Self::cuda).
    pub fn open(choice: DeviceChoice, num_threads: Option<usize>) -> Result<Self, DeviceError> {
        let ordinal = match (choice, Backend::of(choice)) {
            (_, Backend::Host) => return Self::host(num_threads),
            (DeviceChoice::Cuda(ordinal), _) => ordinal,
            _ => 0,
        };
        let device = CudaDevice::new(ordinal, HostDevice::new(num_threads)?)?;
        Ok(Self::Cuda(Box::new(device)))
    }

    /// A host device with `num_threads` workers, or one per available core when `None`.
    ///
    /// # Errors
    /// [`DeviceError::ThreadPool`] when the operating system refuses the threads.
    pub fn host(num_threads: Option<usize>) -> Result<Self, DeviceError> {
        Ok(Self::Host(HostDevice::new(num_threads)?))
    }

    /// GPU `ordinal`.
    ///
    /// # Errors
    /// [`DeviceError`] when there is no driver, it is too old, there is no such GPU, or no kernel runs on it.
    pub fn cuda(ordinal: usize) -> Result<Self, DeviceError> {
        Self::open(DeviceChoice::Cuda(ordinal), None)
    }

    /// A zero-filled buffer of `len` elements on this device.
    ///
    /// # Errors
    /// [`DeviceError::OutOfMemory`].
    pub fn try_alloc<T: Element>(&self, len: usize) -> Result<Buffer<T>, DeviceError> {
        match self {
            Self::Host(host) => {
                let num_bytes = (len * size_of::<T>()) as u64;
                host.bytes_allocated.fetch_add(num_bytes, Ordering::Relaxed);
                Ok(Buffer::zeroed(len))
            }
            Self::Cuda(cuda) => Buffer::zeroed_on_cuda(cuda, len),
        }
    }

    /// A buffer on this device that holds `values`.
    ///
    /// # Errors
    /// [`DeviceError::OutOfMemory`], [`DeviceError::Driver`].
    pub fn buffer_of<T: Element>(&self, values: &[T]) -> Result<Buffer<T>, DeviceError> {
        let mut buffer = self.try_alloc(values.len())?;
        buffer.upload(values)?;
        Ok(buffer)
    }

    /// A buffer of values that never change: weights, tables. On the host it does not count as allocated.
    ///
    /// # Errors
    /// [`DeviceError::OutOfMemory`], [`DeviceError::Driver`].
    pub fn constants(&self, values: &[f32]) -> Result<Buffer<f32>, DeviceError> {
        match self {
            Self::Host(_) => Ok(Buffer::from_slice(values)),
            Self::Cuda(_) => self.buffer_of(values),
        }
    }

    /// Bytes of all buffers that [`try_alloc`](Self::try_alloc) has made, given back or not: what a memory plan is held
    /// against.
    pub fn bytes_allocated(&self) -> u64 {
        match self {
            Self::Host(host) => host.bytes_allocated.load(Ordering::Relaxed),
            Self::Cuda(cuda) => cuda.bytes_allocated(),
        }
    }

    /// What the device was asked to do since it was opened.
    pub fn activity(&self) -> ActivityCounts {
        match self {
            Self::Host(_) => ActivityCounts::default(),
            Self::Cuda(cuda) => cuda.activity().counts(),
        }
    }

    /// Waits for all work given to the device; on the host it is done when it is given.
    ///
    /// # Errors
    /// [`DeviceError::Driver`] with the first error of the work waited for.
    pub fn synchronize(&self) -> Result<(), DeviceError> {
        match self {
            Self::Host(_) => Ok(()),
            Self::Cuda(cuda) => cuda.synchronize(),
        }
    }

    /// Runs `work` with this device's own host threads, for loading and packing.
    pub fn install<R: Send>(&self, work: impl FnOnce() -> R + Send) -> R {
        match self {
            Self::Host(host) => host.install(work),
            Self::Cuda(cuda) => cuda.host().install(work),
        }
    }

    /// Its kind.
    pub fn backend(&self) -> Backend {
        match self {
            Self::Host(_) => Backend::Host,
            Self::Cuda(_) => Backend::Cuda,
        }
    }

    /// Its name for reports: `cpu` or, of the second GPU, `cuda:1`.
    pub fn name(&self) -> String {
        match self {
            Self::Host(_) => "cpu".to_owned(),
            Self::Cuda(cuda) => format!("cuda:{}", cuda.ordinal()),
        }
    }
}

/// CPU workers. Work is split over output channels, heads and requests, never over a reduction, so that results do
/// not depend on the number of threads.
pub struct HostDevice {
    pool: rayon::ThreadPool,
    bytes_allocated: AtomicU64,
}

impl HostDevice {
    /// A pool of `num_threads` workers, or one per available core when `None`.
    ///
    /// # Errors
    /// [`DeviceError::ThreadPool`].
    pub fn new(num_threads: Option<usize>) -> Result<Self, DeviceError> {
        let num_threads = match num_threads {
            Some(n) => n,
            None => std::thread::available_parallelism().map_or(1, |n| n.get()),
        };
        let pool = rayon::ThreadPoolBuilder::new()
            .num_threads(num_threads)
            .thread_name(|i| format!("specpilot-{i}"))
            .build()
            .map_err(|source| DeviceError::ThreadPool {
                num_threads,
                source,
            })?;
        Ok(Self {
            pool,
            bytes_allocated: AtomicU64::new(0),
        })
    }

    /// Runs `work` inside the pool; rayon iterators in it use the pool's threads.
    pub fn install<R: Send>(&self, work: impl FnOnce() -> R + Send) -> R {
        self.pool.install(work)
    }

    /// Number of worker threads.
    pub fn num_threads(&self) -> usize {
        self.pool.current_num_threads()
    }
}
