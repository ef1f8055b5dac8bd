//! What goes wrong with devices: threads, drivers, GPUs, their compiler and their memory.

use super::human_bytes;

/// Errors of the device layer.
#[derive(Debug, thiserror::Error)]
pub enum DeviceError {
    /// The engine was opened in another process, whose threads a fork does not copy.
    #[error(
        "this engine was opened before a fork; open one in the child process (or start it with spawn)"
    )]
    Forked,
    /// The operating system refused worker threads.
    #[error("could not start {num_threads} worker threads: {source}")]
    ThreadPool {
        /// Threads asked for.
        num_threads: usize,
        /// The pool builder's error.
        source: rayon::ThreadPoolBuildError,
    },
    /// There is no CUDA driver, or it finds no GPU.
    #[error("no CUDA driver: {reason}; install NVIDIA's driver or use device \"cpu\"")]
    NoDriver {
        /// What was looked for, or what the driver said.
        reason: String,
    },
    /// The driver is older than the kernels' interface.
    #[error(
        "the CUDA driver is too old: expected {}.{} or newer, got {}.{}; update NVIDIA's driver",
        .expected / 1000, .expected % 1000 / 10, .got / 1000, .got % 1000 / 10
    )]
    DriverTooOld {
        /// Version needed, as CUDA counts (13000 is 13.0).
        expected: i32,
        /// Version there.
        got: i32,
    },
    /// A GPU's index is out of range.
    #[error("GPU {ordinal} does not exist: expected an index below {num_devices}")]
    NoSuchGpu {
        /// Index asked for.
        ordinal: usize,
        /// GPUs there.
        num_devices: usize,
    },
    /// No kernels exist for an architecture.
    #[error("no kernels for {got}: expected one of sm_80, sm_90a, sm_120")]
    UnknownArch {
        /// What was asked for, or what the GPU is.
        got: String,
    },
    /// The environment asks for device code of a form that there is not.
    #[error("no kernel code of form {got:?}: expected SPECPILOT_KERNEL_CODE to be cubin or ptx")]
    UnknownCodeForm {
        /// What was asked for.
        got: String,
    },
    /// The GPU's memory is full.
    #[error("out of GPU memory: {} asked for, {} of {} free", human_bytes(*.num_bytes), human_bytes(*.free_bytes), human_bytes(*.total_bytes))]
    OutOfMemory {
        /// Bytes asked for.
        num_bytes: u64,
        /// Bytes free.
        free_bytes: u64,
        /// Bytes there.
        total_bytes: u64,
    },
    /// The GPU's memory was full before all was there that had been planned.
    #[error(
        "{source} while the engine was opened, though it was planned to fit ({planned}); lower gpu_memory_utilization, max_num_seqs or max_model_len, or stop what else uses the GPU"
    )]
    OutOfMemoryAtOpen {
        /// What ran out.
        source: Box<DeviceError>,
        /// What was to be held, by purpose.
        planned: String,
    },
    /// NVRTC is not installed.
    #[error(
        "NVRTC was not found; install it with: pip install 'specpilot-rs[cuda]', or use device \"cpu\""
    )]
    NoCompiler,
    /// NVRTC refused a source.
    #[error("{stem}.cu does not compile for {arch}:\n{log}")]
    Compile {
        /// The kernel's stem.
        stem: &'static str,
        /// Architecture.
        arch: &'static str,
        /// What the compiler said.
        log: String,
    },
    /// cuBLASLt is not installed.
    #[error(
        "cuBLASLt was not found, which kernels \"stock\" multiply with; install it with: pip install 'specpilot-rs[cuda]'"
    )]
    NoCublasLt,
    /// cuBLASLt refused a call.
    #[error("cuBLASLt failed while {call}: {message}")]
    CublasLt {
        /// What was being done.
        call: &'static str,
        /// The library's words.
        message: String,
    },
    /// A call of the driver failed.
    #[error("CUDA failed while {call}: {message}")]
    Driver {
        /// What was being done.
        call: &'static str,
        /// The driver's words.
        message: String,
    },
}
