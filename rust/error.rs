//! Errors: one enum per layer, each variant with what was expected and what was got; [`Error`] wraps them all.

use std::path::PathBuf;

/// Result of everything an engine does.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Any error of this crate. `code` is stable and what tests and programs match on.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A device could not be set up.
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
    /// The operating system refused worker threads.
    #[error("could not start {num_threads} worker threads: {source}")]
    ThreadPool {
        /// Threads asked for.
        num_threads: usize,
        /// The pool builder's error.
        source: rayon::ThreadPoolBuildError,
    },
}

/// Errors of kernel checks.
#[derive(Debug, thiserror::Error)]
pub enum KernelError {
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

/// Errors of reading checkpoint files.
#[derive(Debug, thiserror::Error)]
pub enum CheckpointError {
    /// The directory holds neither one safetensors file nor an index.
    #[error("{dir}: expected model.safetensors or model.safetensors.index.json, found neither")]
    NoWeights {
        /// Model directory.
        dir: PathBuf,
    },
    /// A file could not be opened or read.
    #[error("{file}: {source}")]
    Io {
        /// The file.
        file: PathBuf,
        /// What the operating system said.
        source: std::io::Error,
    },
    /// A JSON file does not parse.
    #[error("{file}: not valid JSON: {source}")]
    Json {
        /// The file.
        file: PathBuf,
        /// The parser's error.
        source: serde_json::Error,
    },
    /// A safetensors file is cut short, has a broken header or inconsistent offsets.
    #[error("{file}: not a valid safetensors file (truncated or damaged): {reason}")]
    Damaged {
        /// The file.
        file: PathBuf,
        /// What the reader said.
        reason: String,
    },
    /// The index names a shard that is not there.
    #[error("{index}: names shard `{shard}`, which is missing")]
    MissingShard {
        /// The index file.
        index: PathBuf,
        /// The shard's file name.
        shard: String,
    },
    /// The index says a tensor is in a shard that does not hold it.
    #[error("{file}: the index places tensor `{tensor}` here, but the file does not hold it")]
    NotInShard {
        /// The shard.
        file: PathBuf,
        /// The tensor.
        tensor: String,
    },
    /// A tensor the config needs is absent.
    #[error("{dir}: tensor `{tensor}` with shape {expected:?} is missing{}", .near.as_ref().map(|n| format!("; the checkpoint has `{n}`")).unwrap_or_default())]
    MissingTensor {
        /// Checkpoint directory.
        dir: PathBuf,
        /// The tensor.
        tensor: String,
        /// Its shape by the config.
        expected: Vec<usize>,
        /// The unused tensor with the most similar name, if any is close.
        near: Option<String>,
    },
    /// Tensors that nothing in the model uses.
    #[error("{file}: {} tensor(s) that this architecture does not use, first `{}`", .tensors.len(), .tensors[0])]
    UnusedTensors {
        /// File of the first.
        file: PathBuf,
        /// Their names, sorted.
        tensors: Vec<String>,
    },
    /// A tensor has another shape than the config says.
    #[error("{file}: tensor `{tensor}` should have shape {expected:?}, got {got:?}")]
    Shape {
        /// The file.
        file: PathBuf,
        /// The tensor.
        tensor: String,
        /// Shape by the config.
        expected: Vec<usize>,
        /// Shape in the file.
        got: Vec<usize>,
    },
    /// The config ties a tensor to another, but the checkpoint holds different values for both.
    #[error(
        "{file}: tensor `{tensor}` should equal `{expected}` (tie_word_embeddings is true), but got other values"
    )]
    TiedTensor {
        /// The file.
        file: PathBuf,
        /// The tensor.
        tensor: String,
        /// The tensor it is tied to.
        expected: String,
    },
    /// A tensor has a dtype that its place does not allow.
    #[error("{file}: tensor `{tensor}` should have dtype {expected}, got {got}")]
    Dtype {
        /// The file.
        file: PathBuf,
        /// The tensor.
        tensor: String,
        /// Dtypes allowed.
        expected: &'static str,
        /// Dtype in the file.
        got: String,
    },
    /// A W12 file of a format that this crate does not read.
    #[error(
        "{file}: W12 format version should be {expected}, got {got}; it may need a newer release"
    )]
    FormatVersion {
        /// The file.
        file: PathBuf,
        /// The version that is read.
        expected: u32,
        /// The version of the file.
        got: String,
    },
    /// A W12 file's metadata is not what the format says.
    #[error("{file}: the metadata of a W12 file is damaged: {reason}")]
    W12Metadata {
        /// The file.
        file: PathBuf,
        /// What is wrong.
        reason: String,
    },
    /// A W12 file lists a tensor that it does not hold, or not whole.
    #[error("{file}: tensor `{tensor}` should be stored here, but `{missing}` is missing")]
    MissingPart {
        /// The file.
        file: PathBuf,
        /// The tensor.
        tensor: String,
        /// The stored tensor that is not there.
        missing: String,
    },
    /// The parts of a W12 tensor do not fit together.
    #[error("{file}: tensor `{tensor}`: {source}")]
    W12 {
        /// The file.
        file: PathBuf,
        /// The tensor.
        tensor: String,
        /// What the codec said.
        source: W12Error,
    },
    /// The bits of a tensor are not those that were converted.
    #[error(
        "{file}: tensor `{tensor}` should have SHA-256 {expected}, got {got}: the file is damaged"
    )]
    Checksum {
        /// The file.
        file: PathBuf,
        /// The tensor.
        tensor: String,
        /// Digest of the source's bytes.
        expected: String,
        /// Digest of the bytes read or decoded.
        got: String,
    },
    /// Encoding and decoding a tensor did not give its bits back: a bug, caught before any harm.
    #[error(
        "{file}: tensor `{tensor}` does not survive W12 encoding bit for bit (please report it)"
    )]
    RoundTrip {
        /// The file.
        file: PathBuf,
        /// The tensor.
        tensor: String,
    },
    /// A checkpoint to be converted is converted already.
    #[error("{file}: tensor `{tensor}` is W12 already; convert the BF16 checkpoint")]
    AlreadyConverted {
        /// The file.
        file: PathBuf,
        /// A W12 tensor.
        tensor: String,
    },
    /// The place for a converted checkpoint is not free.
    #[error("{dir}: expected no such directory or an empty one, but it holds {holds}")]
    OutputTaken {
        /// The directory.
        dir: PathBuf,
        /// What is there.
        holds: String,
    },
    /// The caller stopped a conversion.
    #[error(
        "{dir}: the conversion was stopped after {done} of {total} tensors; the same call goes on from the last whole shard"
    )]
    Stopped {
        /// The directory to be written.
        dir: PathBuf,
        /// Tensors done.
        done: usize,
        /// Tensors of the checkpoint.
        total: usize,
    },
}

/// Errors of the parts of a W12 matrix: they are not what the encoder makes.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum W12Error {
    /// A shape without weights, or of more than can be addressed.
    #[error(
        "W12 matrix of shape [{out_features}, {in_features}]: expected at least one weight and fewer bytes than can be addressed"
    )]
    Shape {
        /// Output channels.
        out_features: usize,
        /// Length of a row.
        in_features: usize,
    },
    /// A part is longer or shorter than the shape and the counts say.
    #[error("W12 part `{part}` should hold {expected} elements, got {got}")]
    Length {
        /// The part.
        part: &'static str,
        /// Elements by shape and counts.
        expected: usize,
        /// Elements there.
        got: usize,
    },
    /// A super-tile counts more escapes than it has weights.
    #[error("W12 super-tile {tile} should count at most {expected} escapes, got {got}")]
    Count {
        /// The super-tile.
        tile: usize,
        /// Weights of a super-tile.
        expected: u16,
        /// The count.
        got: u16,
    },
    /// A channel's exponent base is out of range.
    #[error("W12 base of channel {channel} should be in {expected:?}, got {got}")]
    Base {
        /// The channel.
        channel: usize,
        /// Bases allowed.
        expected: std::ops::RangeInclusive<u8>,
        /// The base.
        got: u8,
    },
    /// An escape entry that the encoder would not write.
    #[error("W12 escape {entry:#010x} of super-tile {tile}: {reason}")]
    Escape {
        /// The super-tile.
        tile: usize,
        /// The entry.
        entry: u32,
        /// What is wrong with it.
        reason: &'static str,
    },
    /// Padding that is not code 0.
    #[error("W12 super-tile {tile} should be padded with code 0, got another")]
    Padding {
        /// The super-tile.
        tile: usize,
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
        expected: &'static str,
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
        "drafter {drafter}: target_layer_ids holds {got}, but target {target} has layers 0..{num_layers} and the last one cannot be tapped"
    )]
    Tap {
        /// Drafter directory.
        drafter: PathBuf,
        /// Target directory.
        target: PathBuf,
        /// The id.
        got: i64,
        /// The target's number of layers.
        num_layers: usize,
    },
    /// A tree policy needs scores that this drafter does not have.
    #[error(
        "tree \"{policy}\" needs parent-conditional scores, which a {method} drafter does not have; use \"ddtree\" or \"chain\""
    )]
    NoConditionalScores {
        /// Tree policy.
        policy: &'static str,
        /// Drafter method.
        method: &'static str,
    },
    /// `method` in `speculative_config` and the checkpoint disagree.
    #[error(
        "speculative_config asks for method \"{expected}\", but {drafter} holds a {got} drafter"
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
    /// More draft tokens were asked for than one block gives.
    #[error("num_speculative_tokens must be 1..={expected} for this drafter, got {got}")]
    DraftLength {
        /// Most drafts of a block.
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
    /// Memory for the caches is not to be had.
    #[error(
        "a KV cache of {needed_bytes} bytes for one sequence of max_model_len {max_model_len} exceeds the {available_bytes} bytes available; lower max_model_len"
    )]
    Memory {
        /// Option value.
        max_model_len: usize,
        /// Bytes that one sequence needs.
        needed_bytes: u64,
        /// Bytes to be had.
        available_bytes: u64,
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
    /// No request of this id is known.
    #[error("no request with id {id}")]
    Unknown {
        /// The id.
        id: u64,
    },
}
