//! What a directory holds as Python sees it, for those who judge a checkpoint before loading it.

use std::path::PathBuf;

use pyo3::prelude::*;
use pyo3::types::PyDict;

use super::engine::catch_panic;
use crate::plan::examine::{Contents, check_weights};
use crate::weights::Checkpoint;

/// What the config in directory `model` says: `kind` ("target" or "drafter") and a `description`.
#[pyfunction]
pub fn examine_config(py: Python<'_>, model: PathBuf) -> PyResult<Bound<'_, PyDict>> {
    let contents = py.detach(|| catch_panic(|| Contents::read(&model)))?;
    let (kind, description) = match contents {
        Contents::Target(config) => ("target", config.architecture),
        Contents::Drafter(config) => ("drafter", config.description()),
    };
    let dict = PyDict::new(py);
    dict.set_item("kind", kind)?;
    dict.set_item("description", description)?;
    Ok(dict)
}

/// Checks the weights in directory `model` by their headers, against its config where that can be used. Sizes, or
/// nothing when `may_be_partial` and files are yet to come.
#[pyfunction]
#[pyo3(signature = (model, *, may_be_partial))]
pub fn examine_weights(
    py: Python<'_>,
    model: PathBuf,
    may_be_partial: bool,
) -> PyResult<Option<Bound<'_, PyDict>>> {
    let sizes = py.detach(|| {
        catch_panic(|| match may_be_partial && !Checkpoint::is_in(&model) {
            true => Ok(None),
            false => check_weights(&model).map(Some),
        })
    })?;
    let to_dict = |sizes: crate::plan::examine::WeightSizes| {
        let dict = PyDict::new(py);
        dict.set_item("num_tensors", sizes.num_tensors)?;
        dict.set_item("num_bytes", sizes.num_bytes)?;
        Ok(dict)
    };
    sizes.map(to_dict).transpose()
}
