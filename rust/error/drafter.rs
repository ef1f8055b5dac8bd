//! Drafters that are not what they say, or that do not fit their target or the options.

use std::path::PathBuf;

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
