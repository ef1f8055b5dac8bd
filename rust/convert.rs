//! Converting a checkpoint to W12: finds out what it is, and so which of its tensors are linear layers.
//!
//! In: a directory with a target or a drafter. Out: a directory that holds the same model in W12; see
//! [`weights::w12_file`](crate::weights::w12_file) for what is written and how.

use std::collections::BTreeSet;
use std::path::Path;

use crate::drafter::config::DrafterConfig;
use crate::error::{ConfigError, Result};
use crate::model::ModelConfig;
use crate::weights::Checkpoint;
use crate::weights::w12_file::convert::{ConvertSummary, OnProgress, convert};

/// Converts the model in `model` into directory `out`.
///
/// # Errors
/// When the model is none that this crate runs, lacks tensors or has others than it should, and as for
/// [`convert`]; `out` does not exist then.
pub fn convert_model(
    model: &Path,
    out: &Path,
    on_progress: &mut OnProgress<'_>,
) -> Result<ConvertSummary> {
    let matrices = linear_layers(model)?;
    let source = Checkpoint::open(model)?;
    Ok(convert(&source, &matrices, out, on_progress)?)
}

/// Names of the linear layers of the target or drafter in `model`.
fn linear_layers(model: &Path) -> Result<BTreeSet<String>> {
    let config = match ModelConfig::read(model) {
        Ok(config) => config,
        Err(ConfigError::DrafterAsTarget { .. }) => {
            return Ok(DrafterConfig::read(model)?.linear_layers());
        }
        Err(error) => return Err(error.into()),
    };
    let names = &config.weight_names;
    Checkpoint::open(model)?.check(&names.tensors(&config))?;
    Ok(names.linear_layers(&config).into_iter().collect())
}
