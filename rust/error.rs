//! Errors: one enum per layer, each variant with what was expected and what was got; [`Error`] wraps them all.

mod checkpoint;
mod config;
mod device;
mod drafter;
mod kernel;

pub use checkpoint::{CheckpointError, W12Error};
pub use config::ConfigError;
pub use device::DeviceError;
pub use drafter::DrafterError;
pub use kernel::KernelError;

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
