//! Converting and inspecting checkpoints as Python sees it. Progress is told with the interpreter held, on the caller's
//! thread, where Ctrl-C is noticed between two tensors.

use std::ops::ControlFlow;
use std::path::PathBuf;

use pyo3::prelude::*;
use pyo3::types::PyDict;

use super::engine::catch_panic;
use crate::convert::convert_model;
use crate::weights::inspect::inspect;
use crate::weights::w12_file::convert::ConvertProgress;

/// Converts the model in `model` to W12 in directory `out`; `on_progress` hears the next tensor's name, tensors done and
/// in all, bytes done and in all. An exception in it stops the conversion and is raised here.
#[pyfunction]
#[pyo3(signature = (model, out, on_progress = None))]
pub fn convert_weights<'py>(
    py: Python<'py>,
    model: PathBuf,
    out: PathBuf,
    on_progress: Option<Py<PyAny>>,
) -> PyResult<Bound<'py, PyDict>> {
    let mut raised = None;
    let result = py.detach(|| {
        let mut tell = |progress: &ConvertProgress<'_>| {
            let told = Python::attach(|py| {
                py.check_signals()?;
                if let Some(on_progress) = &on_progress {
                    let counts = (progress.tensors_done, progress.tensors_total);
                    let bytes = (progress.bytes_done, progress.bytes_total);
                    on_progress
                        .call1(py, (progress.tensor, counts.0, counts.1, bytes.0, bytes.1))?;
                }
                PyResult::Ok(())
            });
            match told {
                Ok(()) => ControlFlow::Continue(()),
                Err(error) => {
                    raised = Some(error);
                    ControlFlow::Break(())
                }
            }
        };
        catch_panic(|| convert_model(&model, &out, &mut tell))
    });
    if let Some(error) = raised {
        return Err(error);
    }
    let summary = result?;
    let dict = PyDict::new(py);
    dict.set_item("num_tensors", summary.num_tensors)?;
    dict.set_item("num_w12", summary.num_w12)?;
    dict.set_item("kept_bf16", summary.kept_bf16)?;
    dict.set_item("num_shards_written", summary.num_shards_written)?;
    dict.set_item("num_shards_found", summary.num_shards_found)?;
    dict.set_item("bytes", summary.num_bytes)?;
    dict.set_item("source_bytes", summary.source_bytes)?;
    Ok(dict)
}

/// What the files of `path` (a model directory or one safetensors file) say of each tensor.
#[pyfunction]
pub fn inspect_weights(py: Python<'_>, path: PathBuf) -> PyResult<Vec<Bound<'_, PyDict>>> {
    let reports = py.detach(|| catch_panic(|| Ok(inspect(&path)?)))?;
    let to_dict = |report: crate::weights::inspect::TensorReport| {
        let dict = PyDict::new(py);
        dict.set_item("name", report.name)?;
        dict.set_item("format", report.format)?;
        dict.set_item("bits_per_weight", report.bits_per_weight)?;
        dict.set_item("escapes", report.num_escapes)?;
        dict.set_item("bytes", report.num_bytes)?;
        dict.set_item("source_bytes", report.source_bytes)?;
        Ok(dict)
    };
    reports.into_iter().map(to_dict).collect()
}
