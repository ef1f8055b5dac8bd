//! What a directory holds and whether it opens, by its config and the headers of its weights: the verdict of loading
//! before anything is loaded.
//!
//! In: a directory. Out: its [`Contents`], or the error that opening it would end in. Configs and headers go through the
//! readers that loading uses. What only the values of tensors tell (checksums, scales that are no numbers) is left to
//! loading.

use std::path::Path;

use crate::drafter::config::DrafterConfig;
use crate::error::{ConfigError, Error, Result};
use crate::model::config::ModelConfig;
use crate::model::config_file::ConfigFile;
use crate::model::weights;
use crate::weights::Checkpoint;

/// What a config says that a checkpoint is.
#[derive(Debug)]
pub enum Contents {
    /// A model to decode.
    Target(Box<ModelConfig>),
    /// A drafter, with its description.
    Drafter(Box<DrafterConfig>),
}

/// Sizes of weights whose headers were found right.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WeightSizes {
    /// Tensors, a W12 matrix being one.
    pub num_tensors: usize,
    /// Their bytes as stored.
    pub num_bytes: u64,
}

impl Contents {
    /// Reads the config in `dir`.
    ///
    /// # Errors
    /// As for [`ModelConfig::read`], or for [`DrafterConfig::of_file`] when it is a drafter's.
    pub fn read(dir: &Path) -> Result<Self> {
        match ModelConfig::read(dir) {
            Ok(config) => Ok(Self::Target(Box::new(config))),
            Err(ConfigError::DrafterAsTarget { .. }) => {
                let file = ConfigFile::read(&dir.join("config.json"))?;
                Ok(Self::Drafter(Box::new(DrafterConfig::of_file(&file)?)))
            }
            Err(error) => Err(error.into()),
        }
    }
}

/// Checks the weights in `dir` against its config, where that can be used, by their headers.
///
/// # Errors
/// [`CheckpointError`](crate::error::CheckpointError) for files that are missing or damaged and tensors that are missing,
/// extra or of another shape or dtype; [`DrafterError`](crate::error::DrafterError) when a drafter's tensors are those of
/// another kind.
pub fn check_weights(dir: &Path) -> Result<WeightSizes> {
    let checkpoint = Checkpoint::open(dir)?;
    match Contents::read(dir) {
        Ok(Contents::Target(config)) => weights::check_headers(&checkpoint, &config)?,
        Ok(Contents::Drafter(_)) => {
            DrafterConfig::read(dir)?;
        }
        // A finding of its own.
        Err(Error::Config(_) | Error::Drafter(_)) => {}
        Err(error) => return Err(error),
    }
    Ok(WeightSizes {
        num_tensors: checkpoint.names().count(),
        num_bytes: checkpoint.bytes_total(),
    })
}
