//! What a `config.json` can say wrong.

use std::path::PathBuf;

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
    /// Weights in a format that is not read.
    #[error(
        "{file}: `quantization_config` says {got}, which is not supported; supported: BF16, FP8 (E4M3 with scales of \
         128 x 128 blocks, channels or tensors) and checkpoints that `specpilot convert` wrote"
    )]
    Quantization {
        /// The file.
        file: PathBuf,
        /// The format.
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
        expected: String,
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
