//! What a drafter is: read off its `config.json` and checked against its tensors.
//!
//! In: a directory in one of the published formats, or the options of a drafter without weights. Out: a
//! [`DrafterConfig`] that is consistent in itself; whether it fits a target is `pairing`'s business. The architecture's
//! name and the tensors must tell of the same drafter and every tensor must be used or known to be a copy: a drafter
//! run without one of its parts drafts badly and says nothing.

mod block;
mod eagle3;
pub(super) mod format;
mod heads;
mod keys;
mod layer_body;

use std::collections::BTreeSet;
use std::path::Path;

use crate::error::{DrafterError, Error};
use crate::kernels::paths::MAX_PATH_ROWS;
use crate::model::config_file::ConfigFile;
use crate::options::EngineOptions;
use crate::weights::Checkpoint;
use crate::weights::checkpoint::StoredAs;

pub use block::{BlockConfig, BlockMethod, DraftLayerConfig};
pub use eagle3::Eagle3Config;
pub use format::supported_architectures;
use format::{Format, MethodKind};
pub use heads::{ConfidenceConfig, DSparkConfig, MarkovConfig, MarkovKind, SelectorConfig};
use keys::Keys;
pub use layer_body::LayerBody;

pub(super) use keys::OFFSETS;

pub use super::ngram::NgramConfig;

/// The `method` of a drafter without weights.
const NGRAM: &str = "ngram";

/// A drafter's config.
#[derive(Clone, Debug, PartialEq)]
pub enum DrafterConfig {
    /// One parallel forward over a block: DFlash, DFlash2, DSpark.
    Block(BlockConfig),
    /// One forward of a single layer per depth.
    Eagle3(Eagle3Config),
    /// Prompt lookup: no weights.
    Ngram(NgramConfig),
}

impl DrafterConfig {
    /// The drafter that `options` and a directory name: that of `dir`, or one without weights; `None` = none.
    ///
    /// # Errors
    /// As for [`Self::read`]; [`DrafterError::Method`] when the directory holds another method than `options` ask for,
    /// [`DrafterError::NoFiles`] when that method has no files but a directory is given.
    pub fn find(
        dir: Option<&Path>,
        options: &EngineOptions,
        read: impl Fn(&Path) -> Result<Self, Error>,
    ) -> Result<Option<Self>, Error> {
        match (options.method.as_deref(), dir) {
            (Some(NGRAM), None) => Ok(Some(Self::Ngram(NgramConfig::resolve(
                options.prompt_lookup,
            )?))),
            (Some(NGRAM), Some(dir)) => Err(DrafterError::NoFiles {
                drafter: dir.to_owned(),
                method: NGRAM,
            })?,
            (_, None) => Ok(None),
            (wanted, Some(dir)) => {
                let config = read(dir)?;
                match wanted {
                    Some(wanted) if wanted != config.method() => Err(DrafterError::Method {
                        drafter: dir.to_owned(),
                        expected: wanted.to_owned(),
                        got: config.method(),
                    })?,
                    _ => Ok(Some(config)),
                }
            }
        }
    }

    /// Reads the drafter in `dir` and checks its tensors' names and shapes, without reading their values.
    ///
    /// # Errors
    /// [`DrafterError`] when the kind of drafter is not served or name and tensors disagree,
    /// [`crate::error::ConfigError`] for a key, [`crate::error::CheckpointError`] for a tensor that is missing, extra or
    /// of another shape.
    pub fn read(dir: &Path) -> Result<Self, Error> {
        let file = ConfigFile::read(&dir.join("config.json"))?;
        let checkpoint = Checkpoint::open(dir)?;
        let format = format::detect(dir, &file.root(), &checkpoint)?;
        let config = Self::from_root(&file, format, Some(&checkpoint))?;
        let tensors = config.checked_tensors(&file)?;
        checkpoint.check(&tensors)?;
        // A drafter's matrices are held as its files are, and FP8 is not among the formats it may have.
        checkpoint.check_dtypes(&tensors, |name, shape| match (name, shape.len()) {
            (OFFSETS, _) => StoredAs::Integers,
            (heads::CONFIDENCE_WEIGHT, _) => StoredAs::Values,
            (_, 2) => StoredAs::Matrix,
            _ => StoredAs::Values,
        })?;
        checkpoint.skip_all(&tensors);
        checkpoint.finish(config.copies())?;
        Ok(config)
    }

    /// Reads the drafter in `dir`, from its config alone when its weights are not there: enough to plan its memory.
    ///
    /// # Errors
    /// As for [`Self::read`].
    pub fn read_for_planning(dir: &Path) -> Result<Self, Error> {
        if Checkpoint::is_in(dir) {
            return Self::read(dir);
        }
        Self::of_file(&ConfigFile::read(&dir.join("config.json"))?)
    }

    /// What a config alone tells of.
    ///
    /// # Errors
    /// As for [`Self::read`].
    pub fn of_file(file: &ConfigFile) -> Result<Self, Error> {
        let dir = file.path().parent().unwrap_or(Path::new(""));
        let format = format::by_name(dir, &file.root())?;
        let config = Self::from_root(file, format, None)?;
        config.checked_tensors(file)?;
        Ok(config)
    }

    fn checked_tensors(&self, file: &ConfigFile) -> Result<Vec<(String, Vec<usize>)>, Error> {
        let tensors = self.tensors();
        for (name, shape) in &tensors {
            file.check_shape(name, shape)?;
        }
        Ok(tensors)
    }

    fn from_root(
        file: &ConfigFile,
        format: Format,
        tensors: Option<&Checkpoint>,
    ) -> Result<Self, Error> {
        let keys = Keys::new(file.root(), format, tensors)?;
        Ok(match format.kind {
            MethodKind::Eagle3 => Self::Eagle3(Eagle3Config::from_keys(&keys)?),
            _ => Self::Block(BlockConfig::from_keys(&keys)?),
        })
    }

    /// The value of `method` in `speculative_config`.
    pub fn method(&self) -> &'static str {
        match self {
            Self::Block(config) => config.method.name(),
            Self::Eagle3(_) => "eagle3",
            Self::Ngram(_) => NGRAM,
        }
    }

    /// What was found, for a reader: packaging and the rules that follow from it.
    pub fn description(&self) -> String {
        match self {
            Self::Block(config) => config.description(),
            Self::Eagle3(config) => config.description(),
            Self::Ngram(config) => config.description(),
        }
    }

    /// Draft tokens when nothing is said.
    pub fn usual_draft_tokens(&self) -> usize {
        match self {
            // The anchor takes one of a path's rows, so a block whose row 0 drafts may have one row too many.
            Self::Block(config) => (config.block_size - config.first_row).min(MAX_PATH_ROWS - 1),
            Self::Eagle3(_) => eagle3::USUAL_DRAFT_TOKENS,
            Self::Ngram(_) => super::ngram::USUAL_DRAFT_TOKENS,
        }
    }

    /// Parents per position and children of each, for a tree of `tree_nodes` rows. Larger trees find use for unlikelier
    /// parents; EAGLE-3, whose scores of unlikely siblings are too high and which pays a row of a forward for each
    /// parent, for fewer than others. Measured: benches/record/2026-11-29-acceptance-report.md.
    pub fn usual_width(&self, tree_nodes: usize) -> usize {
        match self {
            Self::Eagle3(_) => (tree_nodes / 8).clamp(4, 8),
            Self::Block(_) | Self::Ngram(_) => (tree_nodes / 4).clamp(8, 16),
        }
    }

    /// Whether tokens can be scored position by position, whatever comes before.
    pub fn has_marginal_scores(&self) -> bool {
        matches!(self, Self::Block(_))
    }

    /// Whether tokens can be scored given the one before them.
    pub fn has_conditional_scores(&self) -> bool {
        match self {
            Self::Block(config) => config.method.has_conditional_scores(),
            Self::Eagle3(_) | Self::Ngram(_) => true,
        }
    }

    /// Whether drafts say how sure they are, which `min_confidence` goes by.
    pub fn has_confidence_head(&self) -> bool {
        match self {
            Self::Block(config) => config.method.confidence().is_some(),
            Self::Eagle3(_) | Self::Ngram(_) => false,
        }
    }

    /// Names of the matrices that layers multiply by: what a compressed checkpoint compresses. Embeddings, heads and
    /// codebooks stay as they are, and so does what is not read as one matrix.
    pub fn linear_layers(&self) -> BTreeSet<String> {
        let stays = [
            "embed_tokens.weight",
            "lm_head.weight",
            "markov_w1.weight",
            // Read in groups of columns.
            "markov_head.gate_proj.weight",
            "markov_head.joint_proj.weight",
            // Read as a vector.
            "confidence_head.proj.weight",
        ];
        let matrices = self.tensors().into_iter().filter(|(name, shape)| {
            shape.len() == 2
                && name.ends_with(".weight")
                && !stays.iter().any(|stays| name.ends_with(stays))
        });
        matrices.map(|(name, _)| name).collect()
    }

    /// Whether it drafts through the target's LM head.
    pub fn reads_target_head(&self) -> bool {
        match self {
            Self::Block(config) => config.draft_vocab_size.is_none(),
            Self::Eagle3(_) | Self::Ngram(_) => false,
        }
    }

    /// Target layers that are tapped.
    pub fn num_taps(&self) -> usize {
        match self {
            Self::Block(config) => config.target_layer_ids.len(),
            Self::Eagle3(config) => config.num_taps(),
            Self::Ngram(_) => 0,
        }
    }

    /// Name and shape of every tensor that is read.
    pub(crate) fn tensors(&self) -> Vec<(String, Vec<usize>)> {
        match self {
            Self::Block(config) => config.tensors(),
            Self::Eagle3(config) => config.tensors(),
            Self::Ngram(_) => Vec::new(),
        }
    }

    /// Tensors that may be there and are not read, as the target has them or only training needs them.
    fn copies(&self) -> &'static [&'static str] {
        match self {
            Self::Block(config) => config.copies(),
            Self::Eagle3(config) => config.copies(),
            Self::Ngram(_) => &[],
        }
    }

    /// Number of parameters that are read.
    pub fn num_parameters(&self) -> usize {
        self.tensors()
            .iter()
            .filter(|(name, _)| name != OFFSETS)
            .map(|(_, shape)| shape.iter().product::<usize>())
            .sum()
    }
}

#[cfg(test)]
pub(super) mod tests;
