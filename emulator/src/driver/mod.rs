//! The C functions of `libcuda.so.1`, as far as this repository's device layer calls them.
//!
//! What the real driver has and nobody here calls does not exist, so that a caller finds out by name. Calls of a
//! process take turns behind one lock. A call checks handles and arguments as strictly as the real driver or more so;
//! what it finds wrong goes to standard error, the call's status says the rest. Work is queued in [`work`]; all streams
//! share one queue, which is an order that streams allow.
//!
//! A fault of a kernel or copy stays: as on a GPU every later call for work is refused with it, until the context's last
//! owner releases it. Opening the GPU again then starts afresh, memory and schedule included.

mod device_calls;
mod gpu;
mod graph_calls;
mod host_memory;
mod launch_calls;
mod memory_calls;
mod module_calls;
mod registry;
mod status;
mod stream_calls;
mod work;

use std::collections::HashMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use gpu::Gpu;
use host_memory::HostMemory;
use module_calls::Function;
use registry::{Kind, Registry};
use status::Status;
use stream_calls::Stream;
use work::{Operation, Work};

use crate::ptx::Module;

/// What a call comes to: nothing, or why not.
type Outcome<T = ()> = Result<T, Status>;

/// Launches and copies of a graph, in order.
type Recorded = Arc<[Operation]>;

static DRIVER: OnceLock<Mutex<Driver>> = OnceLock::new();

/// Everything that the functions act on.
struct Driver {
    gpu: Gpu,
    work: Work,
    host_memory: HostMemory,
    /// Modules by their texts. These are long and few, and every context loads them again.
    parsed: HashMap<String, Arc<Module>>,
    modules: Registry<Arc<Module>>,
    functions: Registry<Function>,
    streams: Registry<Stream>,
    events: Registry<()>,
    graphs: Registry<Recorded>,
    executables: Registry<Recorded>,
    num_retains: usize,
}

impl Driver {
    /// A driver as the environment describes its GPU and schedule.
    fn from_env() -> Result<Self, String> {
        let gpu = Gpu::from_env()?;
        Ok(Self {
            work: Work::from_env(gpu.memory_bytes)?,
            gpu,
            host_memory: HostMemory::default(),
            parsed: HashMap::new(),
            modules: Registry::new(Kind::Module),
            functions: Registry::new(Kind::Function),
            streams: Registry::new(Kind::Stream),
            events: Registry::new(Kind::Event),
            graphs: Registry::new(Kind::Graph),
            executables: Registry::new(Kind::Executable),
            num_retains: 0,
        })
    }

    /// Forgets all work, memory and handles.
    fn start_afresh(&mut self) -> Outcome {
        let afresh = Self::from_env().map_err(|what| refuse(Status::INVALID_VALUE, what))?;
        let parsed = std::mem::take(&mut self.parsed);
        *self = Self { parsed, ..afresh };
        Ok(())
    }

    /// The module of a text.
    fn module(&mut self, text: &str) -> Outcome<Arc<Module>> {
        if let Some(module) = self.parsed.get(text) {
            return Ok(module.clone());
        }
        let module = Module::parse(text).map_err(|error| refuse(Status::INVALID_PTX, error))?;
        let module = Arc::new(module);
        self.parsed.insert(text.to_owned(), module.clone());
        Ok(module)
    }
}

/// Says on standard error why a call is refused.
fn refuse(status: Status, why: impl std::fmt::Display) -> Status {
    eprintln!("PTX emulator: {why}");
    status
}

/// Initialises the driver once.
fn initialise() -> Status {
    if DRIVER.get().is_some() {
        return Status::SUCCESS;
    }
    if !gpu::is_visible() {
        return Status::NO_DEVICE;
    }
    match Driver::from_env() {
        Ok(driver) => {
            DRIVER.get_or_init(|| Mutex::new(driver));
            Status::SUCCESS
        }
        Err(what) => refuse(Status::INVALID_VALUE, what),
    }
}

/// A call that a failed context still answers.
fn call(body: impl FnOnce(&mut Driver) -> Outcome) -> Status {
    let Some(driver) = DRIVER.get() else {
        return Status::NOT_INITIALIZED;
    };
    let mut driver = driver.lock().unwrap_or_else(PoisonError::into_inner);
    // No panic may cross into C.
    match catch_unwind(AssertUnwindSafe(|| body(&mut driver))) {
        Ok(Ok(())) => Status::SUCCESS,
        Ok(Err(status)) => status,
        Err(_) => {
            let why = "the emulator itself failed, see the panic above";
            driver.work.fail(refuse(Status::LAUNCH_FAILED, why))
        }
    }
}

/// A call that a failed context refuses with what it failed of.
fn work_call(body: impl FnOnce(&mut Driver) -> Outcome) -> Status {
    call(|driver| {
        driver.work.refuse_after_failure()?;
        body(driver)
    })
}

/// Writes an answer where the caller wants it.
///
/// # Safety
/// `place` must be null or valid for a write of a `T`.
unsafe fn answer<T>(place: *mut T, value: T) -> Outcome {
    if place.is_null() {
        return Err(Status::INVALID_VALUE);
    }
    // SAFETY: not null, and the rest is the caller's promise.
    unsafe { place.write(value) };
    Ok(())
}
