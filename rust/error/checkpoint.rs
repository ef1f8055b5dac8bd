//! What can be wrong with a checkpoint: its files, its tensors, and the W12 matrices in them.

use std::path::PathBuf;

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
    /// The index names a shard that does not lie beside it.
    #[error("{index}: names shard `{shard}`, expected the name of a file beside the index")]
    ShardElsewhere {
        /// The index file.
        index: PathBuf,
        /// The shard as the index names it.
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
    /// An entry of an id table points outside the vocabulary.
    #[error(
        "{dir}: tensor `{tensor}` should lead every row to an id below {expected}, but row {row} is offset by {got}"
    )]
    Offset {
        /// Checkpoint directory.
        dir: PathBuf,
        /// The tensor.
        tensor: &'static str,
        /// The row.
        row: usize,
        /// Size of the vocabulary.
        expected: usize,
        /// Its offset.
        got: i64,
    },
    /// A tensor holds NaN or infinity where every forward reads it.
    #[error("{file}: tensor `{tensor}` should hold finite numbers, got {got} at index {index}")]
    NotFinite {
        /// The file.
        file: PathBuf,
        /// The tensor.
        tensor: String,
        /// Where in it, row-major.
        index: usize,
        /// What is there.
        got: f32,
    },
    /// Two entries of an id table point to one id.
    #[error(
        "{dir}: tensor `{tensor}` should lead every row to an id of its own, but rows {first} and {row} both lead to \
         {got}"
    )]
    OffsetTwice {
        /// Checkpoint directory.
        dir: PathBuf,
        /// The tensor.
        tensor: &'static str,
        /// The row that leads there first.
        first: usize,
        /// The other row.
        row: usize,
        /// Their id.
        got: u32,
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
    /// A quantisation that is not read.
    #[error(
        "{file}: `{tensor}` is part of {got} weights, which are not supported; supported: BF16, FP8 (E4M3 with \
         scales) and W12"
    )]
    Quantised {
        /// The file.
        file: PathBuf,
        /// The tensor that tells.
        tensor: String,
        /// The quantisation.
        got: &'static str,
    },
    /// An FP8 tensor whose scale is missing or does not fit it.
    #[error("{file}: FP8 tensor `{tensor}` should have {expected}, got {got}")]
    Fp8Scale {
        /// The file.
        file: PathBuf,
        /// The tensor.
        tensor: String,
        /// The scale it should have.
        expected: String,
        /// What there is.
        got: String,
    },
    /// A scale beside a tensor that is not FP8.
    #[error("{file}: `{scale}` scales `{tensor}`, which should have dtype F8_E4M3, got {got}")]
    UnusedScale {
        /// File of the scale.
        file: PathBuf,
        /// The scale.
        scale: String,
        /// What it would scale.
        tensor: String,
        /// Its dtype.
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
