//! Which drafter a checkpoint holds: its architecture's name and its tensors, which must tell of the same one.

use std::path::Path;

use super::config::Keys;
use crate::error::{ConfigError, DrafterError, Error};
use crate::model::config_file::Section;
use crate::weights::Checkpoint;

/// Architecture names that are served, and the method that each one names.
const SUPPORTED: [(&str, MethodKind); 2] = [
    ("DFlashDraftModel", MethodKind::DFlash),
    ("DFlash2DraftModel", MethodKind::DFlash2),
];

/// Names of all supported architectures.
pub fn supported_architectures() -> impl Iterator<Item = &'static str> {
    SUPPORTED.iter().map(|(architecture, _)| *architecture)
}

/// A drafter's method, with the sizes that only it has.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Method {
    /// Marginals per position.
    DFlash,
    /// Convolution inside the block and scores conditional on the candidate before.
    DFlash2(SelectorConfig),
}

/// Sizes of DFlash2's in-block convolution and candidate selector.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SelectorConfig {
    /// Taps of the convolution, the row's own included.
    pub conv_kernel_size: usize,
    /// Channels that share a predicted kernel; divides the hidden size.
    pub conv_group_size: usize,
    /// Width of the codebooks.
    pub rank: usize,
    /// Candidates per position.
    pub top_k: usize,
    /// Rows of the codebooks.
    pub vocab_size: usize,
}

/// The methods a checkpoint may hold, before sizes are read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum MethodKind {
    DFlash,
    DFlash2,
}

impl Method {
    /// The value of `method` in `speculative_config`.
    pub fn name(&self) -> &'static str {
        match self {
            Self::DFlash => "dflash",
            Self::DFlash2(_) => "dflash2",
        }
    }

    /// Sizes of convolution and selector, where there are any.
    pub fn selector(&self) -> Option<&SelectorConfig> {
        match self {
            Self::DFlash => None,
            Self::DFlash2(selector) => Some(selector),
        }
    }

    pub(super) fn read(
        keys: &Keys<'_>,
        kind: MethodKind,
        hidden_size: usize,
    ) -> Result<Self, ConfigError> {
        if kind == MethodKind::DFlash {
            return Ok(Self::DFlash);
        }
        let selector = SelectorConfig {
            conv_kernel_size: keys.size("conv_kernel_size")?,
            conv_group_size: keys.size("conv_group_size")?,
            rank: keys.size("selector_rank")?,
            top_k: keys.size("selector_top_k")?,
            vocab_size: keys.root.size("vocab_size")?,
        };
        if !hidden_size.is_multiple_of(selector.conv_group_size) {
            return Err(keys.at("conv_group_size")?.invalid(
                "conv_group_size",
                format!("a divisor of hidden_size {hidden_size}"),
            ));
        }
        if selector.top_k > selector.vocab_size {
            return Err(keys.at("selector_top_k")?.invalid(
                "selector_top_k",
                format!("at most vocab_size {}", selector.vocab_size),
            ));
        }
        Ok(Self::DFlash2(selector))
    }
}

impl SelectorConfig {
    /// Values of a row's predicted kernels: two sides, all taps, all groups.
    pub fn conv_delta_dim(&self, hidden_size: usize) -> usize {
        2 * self.conv_kernel_size * hidden_size / self.conv_group_size
    }
}

impl MethodKind {
    fn title(self) -> &'static str {
        match self {
            Self::DFlash => "DFlash",
            Self::DFlash2 => "DFlash2",
        }
    }
}

/// Whether a tensor of this name belongs to a method.
type IsEvidence = fn(&str) -> bool;

/// What tensor names say of a method; the first that matches decides.
const EVIDENCE: [(&str, IsEvidence); 3] = [
    ("DSpark", |name| {
        name.starts_with("markov_head.") || name.starts_with("confidence_head.")
    }),
    ("EAGLE-3", |name| {
        name.starts_with("midlayer.") || name == "d2t" || name == "t2d"
    }),
    ("DFlash2", |name| {
        name.starts_with("candidate_selector.")
            || name.contains(".attention_conv.")
            || name.contains(".mlp_conv.")
    }),
];

/// The method by name, cross-checked with the tensors.
pub(super) fn detect(
    dir: &Path,
    root: &Section<'_>,
    checkpoint: &Checkpoint,
) -> Result<MethodKind, Error> {
    let kind = by_name(dir, root)?;
    let by_tensors = EVIDENCE.iter().find_map(|(method, matches)| {
        let evidence = checkpoint.names().find(|name| matches(name))?;
        Some((*method, evidence))
    });
    let file = |tensor: &str| match checkpoint.file(tensor) {
        Some(file) => file.to_owned(),
        None => dir.to_owned(),
    };
    match by_tensors {
        Some((tensors, evidence)) if tensors != kind.title() => {
            Err(DrafterError::NameAgainstTensors {
                file: file(evidence),
                config: kind.title(),
                tensors,
                evidence: evidence.to_owned(),
            })?
        }
        None if kind == MethodKind::DFlash2 => Err(DrafterError::NameAgainstTensors {
            file: file("fc.weight"),
            config: kind.title(),
            tensors: MethodKind::DFlash.title(),
            evidence: "no candidate_selector.* or *_conv.*".to_owned(),
        })?,
        _ => Ok(kind),
    }
}

/// The method that the config's architecture names.
pub(super) fn by_name(dir: &Path, root: &Section<'_>) -> Result<MethodKind, Error> {
    let unsupported = |got: String| {
        Error::from(DrafterError::Unsupported {
            file: dir.join("config.json"),
            expected: SUPPORTED.map(|(architecture, _)| architecture).join(", "),
            got,
        })
    };
    // Another format whatever the architecture says: it nests the decoder's config and counts taps from one.
    if let Some(format) = root.optional_text("speculators_model_type")? {
        return Err(unsupported(format!("speculators {format}")));
    }
    let names = root
        .optional_array("architectures")?
        .ok_or_else(|| root.missing("architectures", "an array with the drafter's class name"))?;
    let Some(name) = names.first().and_then(|name| name.as_str()) else {
        return Err(root.invalid("architectures", "an array with one class name"))?;
    };
    match SUPPORTED.iter().find(|(known, _)| *known == name) {
        Some((_, kind)) => Ok(*kind),
        None => Err(unsupported(name.to_owned())),
    }
}
