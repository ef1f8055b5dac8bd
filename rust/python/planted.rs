//! What planted deployments go by, as Python sees it.

use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::drafter::planted::{AcceptanceProfile, PUBLISHED};

/// The acceptance that planted drafters are made to have: name, share of easy positions, probabilities by rank.
#[pyfunction]
pub fn planted_acceptance(py: Python<'_>) -> PyResult<Bound<'_, PyDict>> {
    let AcceptanceProfile {
        name,
        easy_share,
        easy,
        hard,
        seed,
    } = PUBLISHED;
    let dict = PyDict::new(py);
    dict.set_item("name", name)?;
    dict.set_item("easy_share", easy_share)?;
    dict.set_item("easy", easy)?;
    dict.set_item("hard", hard)?;
    dict.set_item("seed", seed)?;
    Ok(dict)
}
