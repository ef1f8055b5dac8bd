//! The memory plan as Python sees it: nested dicts of plain numbers.

use std::path::PathBuf;

use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::kernels::tree_attention::KV_BLOCK;
use crate::model::config::AttentionConfig;
use crate::options::DeviceChoice;
use crate::options::speculation::HeadPrecision;
use crate::plan::deployment::{DeploymentPlan, FormatPlan, Setting};
use crate::plan::footprint::{ACTIVATION_DTYPE, Footprint};
use crate::plan::size::parse_size;
use crate::plan::weight_bytes::{ASSUMED_ESCAPE_RATE, SizeBasis};

use super::engine::{catch_panic, extract_options, sizes};

/// Bytes that this process can still get; `None` where the operating system does not tell.
#[pyfunction]
pub fn available_bytes() -> Option<u64> {
    crate::plan::available::available_bytes()
}

/// Plans what an engine would hold, from configs and headers alone; `memory` is a size such as `80GB`, `None` = what
/// the device has available.
#[pyfunction]
#[pyo3(signature = (*, model, drafter, options, memory, device))]
pub fn plan<'py>(
    py: Python<'py>,
    model: PathBuf,
    drafter: Option<PathBuf>,
    options: &Bound<'py, PyAny>,
    memory: Option<&str>,
    device: &str,
) -> PyResult<Bound<'py, PyDict>> {
    let options = extract_options(options)?;
    let result = py.detach(|| {
        catch_panic(|| {
            let setting = Setting {
                model: &model,
                drafter: drafter.as_deref(),
                device: DeviceChoice::named(device)?,
                memory_bytes: memory.map(|text| parse_size("memory", text)).transpose()?,
            };
            DeploymentPlan::new(&options, setting)
        })
    });
    let plan = result?;
    let dict = deployment_dict(py, &plan)?;
    dict.set_item("device", plan.backend.name())?;
    dict.set_item("dtype", ACTIVATION_DTYPE)?;
    dict.set_item("head", plan.limits.head.name())?;
    Ok(dict)
}

fn deployment_dict<'py>(py: Python<'py>, plan: &DeploymentPlan) -> PyResult<Bound<'py, PyDict>> {
    let (config, limits, budget) = (&plan.config, &plan.limits, &plan.budget);
    let footprint = &plan.bf16.footprint;
    let dict = PyDict::new(py);
    dict.set_item("architecture", &config.architecture)?;
    dict.set_item("num_parameters", plan.num_parameters)?;
    dict.set_item("max_position_embeddings", config.max_position_embeddings)?;
    let drafter = plan.drafter.as_ref();
    dict.set_item("method", drafter.map(|drafter| drafter.method()))?;
    let drafter_parameters = drafter.map_or(0, |drafter| drafter.num_parameters());
    dict.set_item("num_drafter_parameters", drafter_parameters)?;
    dict.set_item("memory_bytes", budget.memory_bytes)?;
    dict.set_item("gpu_memory_utilization", budget.utilization)?;
    dict.set_item("budget_bytes", budget.bytes())?;
    dict.set_item("max_model_len", limits.max_model_len)?;
    dict.set_item("max_num_seqs", limits.max_num_seqs)?;
    dict.set_item("max_step_rows", limits.max_step_rows)?;
    dict.set_item(
        "tree_nodes",
        sizes(py, &limits.speculation, |t| t.tree_nodes)?,
    )?;
    let draft_head = limits.speculation.draft_head.map(HeadPrecision::name);
    dict.set_item("draft_head", draft_head)?;
    let has_window = |attention: &&AttentionConfig| attention.window.is_some();
    let num_windowed = config.attention_layers().filter(has_window).count();
    dict.set_item("num_windowed_layers", num_windowed)?;
    dict.set_item("page_tokens", KV_BLOCK)?;
    dict.set_item("kv_page_bytes", footprint.kv_page.whole)?;
    dict.set_item("window_page_bytes", footprint.kv_page.window)?;
    dict.set_item("window_pages", footprint.ring_pages)?;
    dict.set_item("drafter_page_bytes", footprint.drafter.page)?;
    let block = KV_BLOCK as u64;
    dict.set_item("kv_bytes_per_token", footprint.kv_page.whole / block)?;
    dict.set_item("window_bytes_per_token", footprint.kv_page.window / block)?;
    dict.set_item(
        "drafter_bytes_per_token",
        footprint.drafter.page as u64 / block,
    )?;
    dict.set_item("gdn_slot_bytes", slot_dict(py, footprint)?)?;
    dict.set_item("assumed_escape_rate", ASSUMED_ESCAPE_RATE)?;
    let formats = PyDict::new(py);
    for (name, format) in [("bf16", &plan.bf16), ("w12", &plan.w12), ("fp8", &plan.fp8)] {
        formats.set_item(name, format_dict(py, format, plan)?)?;
    }
    dict.set_item("formats", formats)?;
    dict.set_item("pool_ratio", plan.pool_ratio())?;
    let shortfall = plan.shortfall.as_ref().map(ToString::to_string);
    dict.set_item("shortfall", shortfall)?;
    Ok(dict)
}

fn slot_dict<'py>(py: Python<'py>, footprint: &Footprint) -> PyResult<Bound<'py, PyDict>> {
    let slot = &footprint.gdn_slot;
    let dict = PyDict::new(py);
    dict.set_item("states", slot.states)?;
    dict.set_item("log", slot.log)?;
    dict.set_item("conv", slot.conv)?;
    Ok(dict)
}

fn format_dict<'py>(
    py: Python<'py>,
    format: &FormatPlan,
    plan: &DeploymentPlan,
) -> PyResult<Bound<'py, PyDict>> {
    let footprint = &format.footprint;
    let bytes = PyDict::new(py);
    for (part, num_bytes) in footprint.parts() {
        bytes.set_item(part, num_bytes)?;
    }
    let dict = PyDict::new(py);
    dict.set_item("bytes", bytes)?;
    dict.set_item("fixed_bytes", footprint.fixed_bytes())?;
    dict.set_item("weight_bytes", footprint.weights.total())?;
    let bits = footprint.weights.linear_bits_per_weight();
    dict.set_item("linear_bits_per_weight", bits)?;
    dict.set_item("num_w12_matrices", footprint.weights.num_w12_matrices)?;
    dict.set_item("num_fp8_matrices", footprint.weights.num_fp8_matrices)?;
    let is_estimate = footprint.weights.basis == SizeBasis::Estimate;
    dict.set_item("is_estimate", is_estimate)?;
    dict.set_item("pool_pages", format.num_pages.whole)?;
    dict.set_item("pool_window_pages", format.num_pages.window)?;
    dict.set_item("pool_tokens", format.num_pages.whole * KV_BLOCK)?;
    let longest = plan.config.max_position_embeddings;
    let fitting = format.longest_request * KV_BLOCK;
    dict.set_item("largest_context", longest.min(fitting))?;
    dict.set_item("pool_bytes", footprint.pool_bytes(format.num_pages))?;
    dict.set_item("full_requests", format.full_requests)?;
    dict.set_item("missing_bytes", format.missing_bytes)?;
    Ok(dict)
}
