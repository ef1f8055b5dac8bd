//! Errors: one enum per layer, each variant with what was expected and what was got; [`Error`] wraps them all.

use std::path::PathBuf;

mod checkpoint;
pub use checkpoint::{CheckpointError, W12Error};

/// Result of everything an engine does.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Any error of this crate. `code` is stable and what tests and programs match on.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A device could not be set up or is not this process's.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// A kernel refused its arguments: a bug above the kernels.
    #[error(transparent)]
    Kernel(#[from] KernelError),
    /// A checkpoint's files or tensors are not what its config says.
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    /// A `config.json` cannot be used.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// A drafter does not fit its target or the options asked of it.
    #[error(transparent)]
    Drafter(#[from] DrafterError),
    /// An engine option cannot be honoured.
    #[error(transparent)]
    Option(#[from] OptionError),
    /// A request cannot be served.
    #[error(transparent)]
    Request(#[from] RequestError),
    /// A bug: the engine is closed.
    #[error(transparent)]
    Internal(#[from] InternalError),
}

impl Error {
    /// A stable slug for the kind of error.
    pub fn code(&self) -> &'static str {
        match self {
            Self::Device(_) => "device",
            Self::Kernel(_) => "kernel",
            Self::Checkpoint(_) => "checkpoint",
            Self::Config(_) => "config",
            Self::Drafter(_) => "drafter",
            Self::Option(_) => "option",
            Self::Request(_) => "request",
            Self::Internal(_) => "internal",
        }
    }
}

/// Bugs that were caught at the edge.
#[derive(Debug, thiserror::Error)]
pub enum InternalError {
    /// A panic was caught; the engine's state is unknown from here on.
    #[error("internal error, the engine is closed (please report it): {message}")]
    Panicked {
        /// The panic's message.
        message: String,
    },
    /// The engine was closed by an earlier internal error.
    #[error("the engine was closed by an earlier internal error; open a new one")]
    Closed,
}

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
    /// A call of the driver failed.
    #[error("CUDA failed while {call}: {message}")]
    Driver {
        /// What was being done.
        call: &'static str,
        /// The driver's words.
        message: String,
    },
}

/// Errors of kernels: of their checks, or of the device they run on.
#[derive(Debug, thiserror::Error)]
pub enum KernelError {
    /// The device failed.
    #[error("{kernel}: {source}")]
    Device {
        /// Kernel stem.
        kernel: &'static str,
        /// What happened.
        source: DeviceError,
    },
    /// A kernel does not run on CUDA.
    #[error("{kernel}: has no CUDA implementation; use device \"cpu\"")]
    NoCuda {
        /// Kernel stem.
        kernel: &'static str,
    },
    /// An argument lies on another device than the kernel runs on.
    #[error("{kernel}: `{argument}` must be on {expected}")]
    WrongDevice {
        /// Kernel stem.
        kernel: &'static str,
        /// Argument name.
        argument: &'static str,
        /// Where it must be.
        expected: &'static str,
    },
    /// A size asks for more shared memory than a block of the GPU may take.
    #[error("{kernel}: `{argument}` needs {got} bytes of shared memory, the GPU has {expected}")]
    SharedMemory {
        /// Kernel stem.
        kernel: &'static str,
        /// Argument name.
        argument: &'static str,
        /// Bytes there.
        expected: usize,
        /// Bytes needed.
        got: usize,
    },
    /// A buffer holds fewer elements than its shape needs.
    #[error("{kernel}: `{argument}` needs at least {expected} elements, got {got}")]
    BufferTooShort {
        /// Kernel stem.
        kernel: &'static str,
        /// Argument name.
        argument: &'static str,
        /// Elements needed.
        expected: usize,
        /// Elements there.
        got: usize,
    },
    /// A size differs from the one required, or is zero.
    #[error("{kernel}: `{argument}` must be {expected}, got {got}")]
    Size {
        /// Kernel stem.
        kernel: &'static str,
        /// Argument name.
        argument: &'static str,
        /// Size needed.
        expected: usize,
        /// Size there.
        got: usize,
    },
    /// An index lies outside its table.
    #[error("{kernel}: `{argument}` must be below {bound}, got {got}")]
    OutOfRange {
        /// Kernel stem.
        kernel: &'static str,
        /// Argument name.
        argument: &'static str,
        /// Exclusive bound.
        bound: usize,
        /// Index there.
        got: usize,
    },
    /// A number lies outside its range.
    #[error("{kernel}: `{argument}` must be {expected}, got {got}")]
    Number {
        /// Kernel stem.
        kernel: &'static str,
        /// Argument name.
        argument: &'static str,
        /// What is allowed.
        expected: &'static str,
        /// Number there.
        got: f64,
    },
    /// An exact product with weights of which only the Q view is held.
    #[error("{kernel}: the weights should hold every bit, got their Q view alone")]
    QViewOnly {
        /// Kernel name.
        kernel: &'static str,
    },
    /// A row's parent does not come before it.
    #[error("row {row} of a segment has parent {parent}: parents must come first")]
    ParentOrder {
        /// The child.
        row: usize,
        /// Its parent.
        parent: usize,
    },
    /// A path of uncommitted rows is longer than the engine's constant.
    #[error("a path of uncommitted rows may hold {expected} rows, got {got}")]
    PathTooLong {
        /// Largest length.
        expected: usize,
        /// Length there.
        got: usize,
    },
}

/// Errors of interpreting a `config.json`.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// The file could not be read.
    #[error("{file}: {source}")]
    Io {
        /// The file.
        file: PathBuf,
        /// What the operating system said.
        source: std::io::Error,
    },
    /// The file is not JSON.
    #[error("{file}: not valid JSON: {source}")]
    Json {
        /// The file.
        file: PathBuf,
        /// The parser's error.
        source: serde_json::Error,
    },
    /// The architecture is not one this crate runs.
    #[error("{file}: architecture `{got}` is not supported; supported: {expected}")]
    Architecture {
        /// The file.
        file: PathBuf,
        /// Supported names, comma-separated.
        expected: String,
        /// Name in the file.
        got: String,
    },
    /// A drafter stands where a target is wanted.
    #[error(
        "{file}: `{got}` is a drafter, expected a target ({expected}); drafters go into speculative_config"
    )]
    DrafterAsTarget {
        /// The file.
        file: PathBuf,
        /// Supported targets, comma-separated.
        expected: String,
        /// Name in the file.
        got: String,
    },
    /// A key is absent.
    #[error("{file}: key `{key}` is missing ({expected})")]
    MissingKey {
        /// The file.
        file: PathBuf,
        /// Dotted path of the key.
        key: String,
        /// What it should hold.
        expected: &'static str,
    },
    /// A key holds a value that cannot be used.
    #[error("{file}: `{key}` should be {expected}, got {got}")]
    Value {
        /// The file.
        file: PathBuf,
        /// Dotted path of the key.
        key: String,
        /// What it should hold.
        expected: String,
        /// The value, as JSON.
        got: String,
    },
    /// Sizes whose product no model has.
    #[error(
        "{file}: `{tensor}` would have shape {got:?}, but no more than {expected} elements: the sizes are damaged"
    )]
    Oversized {
        /// The file.
        file: PathBuf,
        /// The tensor.
        tensor: String,
        /// Most elements.
        expected: u64,
        /// Its shape by the config.
        got: Vec<usize>,
    },
}

/// Errors of pairing a drafter with a target.
#[derive(Debug, thiserror::Error)]
pub enum DrafterError {
    /// The config's name and the tensors tell of different drafters.
    #[error("{file}: config says {config} but the tensors are those of {tensors} (`{evidence}`)")]
    NameAgainstTensors {
        /// The weights file.
        file: PathBuf,
        /// Method by the config.
        config: &'static str,
        /// Method by the tensors.
        tensors: &'static str,
        /// A tensor that says so.
        evidence: String,
    },
    /// The kind of drafter is known but not served.
    #[error("{file}: drafter architecture `{got}` is not supported; supported: {expected}")]
    Unsupported {
        /// The config file.
        file: PathBuf,
        /// Supported names.
        expected: String,
        /// Name in the file.
        got: String,
    },
    /// A size of the drafter differs from the target's.
    #[error(
        "drafter {drafter} does not fit target {target}: {what} is {got} in the drafter, {expected} in the target"
    )]
    Pairing {
        /// Drafter directory.
        drafter: PathBuf,
        /// Target directory.
        target: PathBuf,
        /// The size that differs.
        what: &'static str,
        /// The target's.
        expected: usize,
        /// The drafter's.
        got: usize,
    },
    /// A tap names a layer whose output cannot be tapped.
    #[error(
        "drafter {drafter} reads what target layer {got}, counted from 0, puts out, but target {target} has layers 0..{num_layers} and the last one cannot be tapped"
    )]
    Tap {
        /// Drafter directory.
        drafter: PathBuf,
        /// Target directory.
        target: PathBuf,
        /// The layer, whichever way the drafter's config counts.
        got: i64,
        /// The target's number of layers.
        num_layers: usize,
    },
    /// A tree policy needs scores that this drafter does not have.
    #[error(
        "tree \"{policy}\" needs {scores} scores, which {method} drafters do not have; use {usable}"
    )]
    NoScores {
        /// Tree policy.
        policy: &'static str,
        /// Drafter method.
        method: &'static str,
        /// Kind of scores.
        scores: &'static str,
        /// Policies that the drafter can serve.
        usable: &'static str,
    },
    /// A limit for a confidence head was given to a drafter that has none.
    #[error(
        "min_confidence goes by a drafter's confidence head, which this {method} drafter does not have; leave it out"
    )]
    NoConfidenceHead {
        /// Drafter method.
        method: &'static str,
    },
    /// A directory was given for a method without weights.
    #[error("a {method} drafter has no files, but speculative_config names {drafter} as its model")]
    NoFiles {
        /// The directory.
        drafter: PathBuf,
        /// Drafter method.
        method: &'static str,
    },
    /// `method` in `speculative_config` and the checkpoint disagree.
    #[error(
        "speculative_config asks for method \"{expected}\", but the drafter in {drafter} is \"{got}\""
    )]
    Method {
        /// Drafter directory.
        drafter: PathBuf,
        /// Method asked for.
        expected: String,
        /// Method found.
        got: &'static str,
    },
    /// A drafter's context must grow without gaps and be whole when it drafts.
    #[error(
        "the drafter's context of slot {slot} holds {expected} positions, but position {got} was taken to be next"
    )]
    ContextGap {
        /// Cache slot.
        slot: usize,
        /// Positions held.
        expected: usize,
        /// Position given.
        got: usize,
    },
    /// More draft tokens were asked for than fit a path or the drafter was opened for.
    #[error("num_speculative_tokens must be 1..={expected}, got {got}")]
    DraftLength {
        /// Most drafts.
        expected: usize,
        /// Drafts asked for.
        got: usize,
    },
}

/// Errors of engine options.
#[derive(Debug, thiserror::Error)]
pub enum OptionError {
    /// A value lies outside its range or set.
    #[error("option `{option}` should be {expected}, got {got}")]
    Value {
        /// Option name.
        option: &'static str,
        /// What is allowed.
        expected: String,
        /// What was given.
        got: String,
    },
    /// What the engine must hold exceeds its share of the memory.
    #[error(
        "weights, buffers and the caches of one request of {num_tokens} tokens need {}, but the engine may take {}: {} are missing; {advice}", human_bytes(*.needed_bytes), human_bytes(*.budget_bytes), human_bytes(.needed_bytes - .budget_bytes)
    )]
    Memory {
        /// Tokens of the request that must fit.
        num_tokens: usize,
        /// Bytes of everything, its caches included.
        needed_bytes: u64,
        /// Bytes that the engine may take; less than needed.
        budget_bytes: u64,
        /// What to change.
        advice: String,
    },
    /// The memory of a device that this build cannot ask.
    #[error(
        "the memory of device `{device}` cannot be read here; give it, such as `memory` = 80GB"
    )]
    UnknownMemory {
        /// Device name.
        device: &'static str,
    },
}

/// Errors of single requests; the engine stays usable.
#[derive(Debug, thiserror::Error)]
pub enum RequestError {
    /// No token to start from.
    #[error("the prompt is empty: at least one token is needed")]
    EmptyPrompt,
    /// The prompt leaves no room for a new token.
    #[error(
        "the prompt has {got} tokens, but max_model_len {max_model_len} allows at most {expected} and one new token"
    )]
    PromptTooLong {
        /// Context limit.
        max_model_len: usize,
        /// Longest prompt.
        expected: usize,
        /// Prompt length.
        got: usize,
    },
    /// A token id outside the vocabulary.
    #[error("prompt token {index} is {got}, outside the vocabulary of {expected}")]
    TokenOutOfRange {
        /// Index in the prompt.
        index: usize,
        /// Vocabulary size.
        expected: usize,
        /// The id.
        got: u32,
    },
    /// A sampling parameter that cannot be honoured.
    #[error("sampling parameter `{parameter}` should be {expected}, got {got}")]
    Parameter {
        /// Parameter name.
        parameter: &'static str,
        /// What is allowed.
        expected: String,
        /// What was given.
        got: String,
    },
    /// The target's best logit is NaN or infinite.
    #[error(
        "the best logit after position {position} should be a finite number, got {got}: the checkpoint is damaged or overflows"
    )]
    NonFiniteLogit {
        /// Position of the row.
        position: usize,
        /// The logit.
        got: f32,
    },
    /// No request of this id is known.
    #[error("no request with id {id}")]
    Unknown {
        /// The id.
        id: u64,
    },
}

/// A size with three or four digits and a decimal unit.
pub(crate) fn human_bytes(num_bytes: u64) -> String {
    let mut size = num_bytes as f64;
    let mut unit = "B";
    for larger in ["kB", "MB", "GB", "TB"] {
        if size < 999.95 {
            break;
        }
        (size, unit) = (size / 1000.0, larger);
    }
    match unit {
        "B" => format!("{num_bytes} B"),
        _ if size < 10.0 => format!("{size:.2} {unit}"),
        _ => format!("{size:.1} {unit}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lack_of_memory_is_told_in_sizes_that_people_read() {
        let error = OptionError::Memory {
            num_tokens: 64,
            needed_bytes: 62_345_678_901,
            budget_bytes: 9_000_000_000,
            advice: "buy more".to_owned(),
        };
        let told = "need 62.3 GB, but the engine may take 9.00 GB: 53.3 GB are missing; buy more";
        assert!(error.to_string().ends_with(told), "{error}");
        let sizes = [999, 1000, 999_960, 2_500_000_000_000].map(human_bytes);
        assert_eq!(sizes, ["999 B", "1.00 kB", "1.00 MB", "2.50 TB"]);
    }
}
