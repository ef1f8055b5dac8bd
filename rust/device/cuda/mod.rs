//! The CUDA backend's device: presence probe, memory, stream, compiled modules.
//!
//! CUDA's libraries are opened at run time, so one build serves machines with and without them. Nothing here calls into
//! them before [`probe`] has seen that they are there: the bindings panic otherwise. Work of one engine goes to one
//! stream in order; buffers carry no events, so whoever adds a stream orders it himself.

mod cache;
mod capture;
mod compile_many;
mod compiler;
mod copies;
mod cublaslt;
mod launch;
mod lists;
mod loaded;
mod probe;
mod source;

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use cudarc::driver::sys::CUdevice_attribute as Attribute;
use cudarc::driver::{CudaContext, CudaFunction, CudaSlice, CudaStream, DevicePtr, DriverError};

use super::activity::Activity;
use super::buffer::as_bytes_mut;
use super::{Element, HostDevice};
use crate::error::DeviceError;
pub use cache::CodeCache;
pub use capture::CapturedLaunches;
pub use compile_many::compile_many;
pub use compiler::{Arch, CodeForm, Compiled, compile, compiler_version};
pub(super) use copies::{HostCopies, ReadBack};
pub use cublaslt::{CublasLt, LtOperands, LtProduct, LtShape, LtValues};
pub use launch::{Launch, Shape};
use lists::ListMemory;
pub use lists::ListPlace;
use loaded::LoadedKernels;
pub use probe::{GpuFacts, MIN_DRIVER_VERSION, free_bytes, gpu_facts, is_usable, num_devices};
pub use source::{KERNEL_SOURCES, KernelSource};

/// Counter and generation of a barrier, on a line of its own.
const GRID_BARRIER_BYTES: usize = 256;
/// Flags of a block, see [`CudaDevice::block_flags`].
const BLOCK_FLAG_BYTES: usize = 128;

/// One GPU, its stream and the kernels compiled for it.
pub struct CudaDevice {
    ordinal: usize,
    context: Arc<CudaContext>,
    stream: Arc<CudaStream>,
    /// Threads for loading and packing.
    host: HostDevice,
    arch: Arch,
    kernels: LoadedKernels,
    cublaslt: OnceLock<CublasLt>,
    limits: Limits,
    bytes_allocated: AtomicU64,
    /// Shared with the buffers, which copy without asking the device.
    copies: Arc<HostCopies>,
    lists: Arc<ListMemory>,
    /// The last is in use; those before are kept for graphs that were captured with them.
    scratch: Mutex<Vec<CudaSlice<u8>>>,
    /// See [`CudaDevice::grid_barrier`].
    grid_barrier: CudaSlice<u8>,
}

/// What kernels size themselves by.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Streaming multiprocessors.
    pub num_multiprocessors: usize,
    /// Shared memory that one block may take.
    pub block_shared_bytes: usize,
    /// Whether blocks of a cluster reach each other's shared memory, and launches may overlap (9.0 on).
    pub has_clusters: bool,
}

impl CudaDevice {
    /// Opens GPU `ordinal`; `host` loads and packs for it.
    ///
    /// # Errors
    /// [`DeviceError`] when there is no driver, it is too old, there is no such GPU, or no kernel runs on it.
    pub fn new(ordinal: usize, host: HostDevice) -> Result<Self, DeviceError> {
        probe::check_ordinal(ordinal)?;
        let context = CudaContext::new(ordinal).map_err(driver("opening the GPU"))?;
        // SAFETY: all work of this device goes to its one stream, in order; no event is needed to order it.
        unsafe { context.disable_event_tracking() };
        let stream = context.new_stream().map_err(driver("creating a stream"))?;
        let (major, minor) = context
            .compute_capability()
            .map_err(driver("reading the compute capability"))?;
        let attribute = |attribute| -> Result<usize, DeviceError> {
            let value = context
                .attribute(attribute)
                .map_err(driver("reading the GPU's limits"))?;
            Ok(usize::try_from(value).unwrap_or(0))
        };
        let limits = Limits {
            num_multiprocessors: attribute(Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?,
            block_shared_bytes: attribute(
                Attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN,
            )?,
            has_clusters: major >= 9,
        };
        Ok(Self {
            ordinal,
            host,
            arch: Arch::of_gpu(major, minor)?,
            kernels: LoadedKernels::new(CodeCache::in_user_folder(CodeForm::from_env()?)),
            cublaslt: OnceLock::new(),
            limits,
            bytes_allocated: AtomicU64::new(0),
            copies: Arc::new(HostCopies::new(&context, &stream)?),
            lists: Arc::default(),
            scratch: Mutex::default(),
            grid_barrier: stream
                .alloc_zeros(GRID_BARRIER_BYTES + limits.num_multiprocessors * BLOCK_FLAG_BYTES)
                .map_err(driver("allocating a barrier"))?,
            context,
            stream,
        })
    }

    /// The GPU's index.
    pub fn ordinal(&self) -> usize {
        self.ordinal
    }

    /// The GPU's own name.
    ///
    /// # Errors
    /// [`DeviceError::Driver`].
    pub fn gpu_name(&self) -> Result<String, DeviceError> {
        self.context
            .name()
            .map_err(driver("reading the GPU's name"))
    }

    /// The GPU's identity as `nvidia-smi` takes it, `GPU-` and 32 digits in groups: an index counts other GPUs there
    /// than here where some are hidden.
    ///
    /// # Errors
    /// [`DeviceError::Driver`].
    pub fn gpu_uuid(&self) -> Result<String, DeviceError> {
        let uuid = self.context.uuid();
        let uuid = uuid.map_err(driver("reading the GPU's identity"))?;
        let digits = format!(
            "{:032x}",
            u128::from_be_bytes(uuid.bytes.map(|byte| byte as u8))
        );
        let [a, b, c, d, e] = [0..8, 8..12, 12..16, 16..20, 20..32].map(|group| &digits[group]);
        Ok(format!("GPU-{a}-{b}-{c}-{d}-{e}"))
    }

    /// What kernels are compiled for.
    pub fn arch(&self) -> Arch {
        self.arch
    }

    /// What kernels size themselves by.
    pub fn limits(&self) -> Limits {
        self.limits
    }

    /// The stream of all work.
    pub fn stream(&self) -> &Arc<CudaStream> {
        &self.stream
    }

    /// cuBLASLt on this GPU, opened now if it was never before.
    ///
    /// # Errors
    /// [`DeviceError::NoCublasLt`] where it is not installed; [`DeviceError::CublasLt`], [`DeviceError::OutOfMemory`].
    pub fn cublaslt(&self) -> Result<&CublasLt, DeviceError> {
        if let Some(opened) = self.cublaslt.get() {
            return Ok(opened);
        }
        let opened = CublasLt::new(self)?;
        Ok(self.cublaslt.get_or_init(|| opened))
    }

    /// Makes this GPU the calling thread's own, for libraries that ask which one it is.
    ///
    /// # Errors
    /// [`DeviceError::Driver`].
    fn bind(&self) -> Result<(), DeviceError> {
        let entered = self.context.bind_to_thread();
        entered.map_err(driver("entering the GPU's context"))
    }

    /// Host threads for loading and packing.
    pub fn host(&self) -> &HostDevice {
        &self.host
    }

    /// Bytes of all buffers made, given back or not.
    pub fn bytes_allocated(&self) -> u64 {
        self.bytes_allocated.load(Ordering::Relaxed)
    }

    /// What it was asked to do.
    pub(super) fn activity(&self) -> &Activity {
        self.copies.activity()
    }

    /// Its copies.
    pub(super) fn copies(&self) -> &Arc<HostCopies> {
        &self.copies
    }

    /// Bytes of the GPU's memory that are free, and all of them.
    ///
    /// # Errors
    /// [`DeviceError::Driver`].
    pub fn memory_bytes(&self) -> Result<(u64, u64), DeviceError> {
        let (free, total) = self
            .context
            .mem_get_info()
            .map_err(driver("reading the GPU's free memory"))?;
        Ok((free as u64, total as u64))
    }

    /// Waits for all work.
    ///
    /// # Errors
    /// [`DeviceError::Driver`] with the first error of the work waited for.
    pub fn synchronize(&self) -> Result<(), DeviceError> {
        self.copies.synchronize()
    }

    /// Zero-filled memory for `len` elements.
    ///
    /// # Errors
    /// [`DeviceError::OutOfMemory`].
    pub(super) fn alloc<T: Element>(&self, len: usize) -> Result<CudaSlice<u8>, DeviceError> {
        // The driver refuses empty allocations.
        let num_bytes = (len * size_of::<T>()).max(1);
        let slice = self.stream.alloc_zeros::<u8>(num_bytes).map_err(|_| {
            let (free_bytes, total_bytes) = self.memory_bytes().unwrap_or((0, 0));
            DeviceError::OutOfMemory {
                num_bytes: num_bytes as u64,
                free_bytes,
                total_bytes,
            }
        })?;
        self.bytes_allocated
            .fetch_add(num_bytes as u64, Ordering::Relaxed);
        Ok(slice)
    }

    /// Room for a list of `num_bytes` that the host writes and kernels read.
    ///
    /// # Errors
    /// [`DeviceError::OutOfMemory`].
    pub fn place_list(&self, num_bytes: usize) -> Result<ListPlace, DeviceError> {
        self.lists
            .place(num_bytes, &self.stream, |len| self.alloc::<u8>(len))
    }

    /// Sends what changed in lists; every launch does so first.
    fn send_lists(&self) -> Result<(), DeviceError> {
        self.lists.send_changes(&self.stream, self.activity())
    }

    /// The address of the barrier at which the blocks of one kernel meet; its counter is zero between kernels.
    pub fn grid_barrier(&self) -> u64 {
        self.grid_barrier.device_ptr(&self.stream).0
    }

    /// The address of 128 bytes for each of as many blocks as there are multiprocessors, zero whenever no kernel runs: one that
    /// sets some of them sets them back.
    pub fn block_flags(&self) -> u64 {
        self.grid_barrier() + GRID_BARRIER_BYTES as u64
    }

    /// The address of at least `num_bytes` of memory that any kernel of the stream may use until the next one starts,
    /// whatever is in it. Grows as needed, which a capture must not see: ask for the largest size before.
    ///
    /// # Errors
    /// [`DeviceError::OutOfMemory`].
    pub fn scratch(&self, num_bytes: usize) -> Result<u64, DeviceError> {
        let mut scratch = self.scratch.lock().unwrap_or_else(PoisonError::into_inner);
        if scratch.last().is_none_or(|last| last.len() < num_bytes) {
            scratch.push(self.alloc::<u8>(num_bytes.next_multiple_of(1 << 20))?);
        }
        let last = scratch.last().expect("one was pushed if there was none");
        Ok(last.device_ptr(&self.stream).0)
    }

    /// `len` elements that a kernel left `offset` bytes into the scratch in use, once all work is done.
    ///
    /// # Errors
    /// [`DeviceError::Driver`] with the first error of that work.
    ///
    /// # Panics
    /// Panics if the scratch in use is shorter.
    pub fn read_scratch<T: Element>(
        &self,
        offset: usize,
        len: usize,
    ) -> Result<Vec<T>, DeviceError> {
        let scratch = self.scratch.lock().unwrap_or_else(PoisonError::into_inner);
        let last = scratch
            .last()
            .expect("a kernel that left something asked for scratch");
        let mut values = vec![T::default(); len];
        let part = ReadBack {
            from: last.slice(offset..offset + len * size_of::<T>()),
            to: as_bytes_mut(&mut values),
        };
        self.copies.read(vec![part])?;
        Ok(values)
    }

    /// Lets `function` take `num_bytes` of dynamic shared memory.
    ///
    /// # Errors
    /// [`DeviceError::Driver`].
    pub fn allow_shared_bytes(
        &self,
        function: &CudaFunction,
        num_bytes: usize,
    ) -> Result<(), DeviceError> {
        self.kernels.allow_shared_bytes(function, num_bytes)
    }

    /// Kernel `name` of `source`, compiled now if it was never before.
    ///
    /// # Errors
    /// [`DeviceError`] when the compiler is missing or refuses, or the module lacks the kernel.
    pub fn function(
        &self,
        source: &'static KernelSource,
        name: &str,
    ) -> Result<CudaFunction, DeviceError> {
        self.kernels
            .function(&self.context, self.arch, source, name)
    }
}

/// Names the call that failed.
pub(crate) fn driver(call: &'static str) -> impl Fn(DriverError) -> DeviceError {
    move |error| DeviceError::Driver {
        call,
        message: format!("{error:?}"),
    }
}
