//! Times of decode steps as Python sees them: a dict in plain types, ready for JSON.

use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::device::ActivityCounts;
use crate::step::stage_times::{Stage, StageTimes};

/// `{"num_steps", "seconds": {stage: s}, "activity": {"launches", .., "waited_s"}}`, sums over the steps.
pub(super) fn into_dict<'py>(py: Python<'py>, times: &StageTimes) -> PyResult<Bound<'py, PyDict>> {
    let seconds = PyDict::new(py);
    for stage in Stage::ALL {
        seconds.set_item(stage.name(), times.of(stage).as_secs_f64())?;
    }
    let ActivityCounts {
        num_launches,
        num_replays,
        num_captures,
        num_uploads,
        num_read_backs,
        waited,
    } = times.activity;
    let activity = PyDict::new(py);
    activity.set_item("launches", num_launches)?;
    activity.set_item("replays", num_replays)?;
    activity.set_item("captures", num_captures)?;
    activity.set_item("uploads", num_uploads)?;
    activity.set_item("read_backs", num_read_backs)?;
    activity.set_item("waited_s", waited.as_secs_f64())?;
    let dict = PyDict::new(py);
    dict.set_item("num_steps", times.num_steps)?;
    dict.set_item("seconds", seconds)?;
    dict.set_item("activity", activity)?;
    Ok(dict)
}
