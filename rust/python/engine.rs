//! The engine as Python sees it: arguments are converted, the interpreter is released, and a panic becomes an
//! `InternalError` that closes the engine.

use std::panic::AssertUnwindSafe;
use std::path::PathBuf;
use std::sync::Mutex;

use pyo3::IntoPyObjectExt;
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::device::Device;
use crate::drafter::config::DrafterConfig;
use crate::engine::{self, Record};
use crate::error::{DeviceError, InternalError, Result};
use crate::kernels::kv_span::PerSpan;
use crate::model::ModelConfig;
use crate::options::speculation::{HeadPrecision, SpeculationPlan, TreePlan, VerifyCosts};
use crate::options::{EngineOptions, KernelSet, PromptLookup};
use crate::plan::footprint::ACTIVATION_DTYPE;
use crate::planted::PlantedPair;
use crate::request::{Sampling, SamplingParams, Seed};
use crate::weights::checkpoint::Verification;

use super::outputs::{EngineOutput, RecordShape, StepEvent};
use super::stage_times;

/// A loaded deployment. Methods release the interpreter while they work and may be called from several threads.
#[pyclass(frozen, module = "specpilot_rs._core")]
pub struct Engine {
    /// Worker threads do not survive a fork.
    process_id: u32,
    record_shape: RecordShape,
    /// `None` after an internal error.
    inner: Mutex<Option<engine::Engine>>,
}

#[pymethods]
impl Engine {
    #[new]
    #[pyo3(signature = (*, model, drafter, options))]
    fn new(
        py: Python<'_>,
        model: PathBuf,
        drafter: Option<PathBuf>,
        options: &Bound<'_, PyAny>,
    ) -> PyResult<Self> {
        let options = extract_options(options)?;
        Self::opened(py, || {
            engine::Engine::open(&model, drafter.as_deref(), &options)
        })
    }

    /// An engine on planted weights; it goes by the texts of `add_script` when it `speculates`.
    #[staticmethod]
    #[pyo3(signature = (*, name, speculates, options))]
    fn planted(
        py: Python<'_>,
        name: &str,
        speculates: bool,
        options: &Bound<'_, PyAny>,
    ) -> PyResult<Self> {
        let options = extract_options(options)?;
        let pair = PlantedPair::named(name)?;
        Self::opened(py, || {
            engine::Engine::open_planted(&pair, speculates, &options)
        })
    }

    #[pyo3(signature = (*, speculates, options))]
    fn switch_to(
        &self,
        py: Python<'_>,
        speculates: bool,
        options: &Bound<'_, PyAny>,
    ) -> PyResult<()> {
        let options = extract_options(options)?;
        self.with(py, |engine| engine.switch_to(speculates, &options))
    }

    fn add_script(&self, py: Python<'_>, token_ids: Vec<u32>) -> PyResult<()> {
        self.with(py, |engine| engine.add_script(token_ids))
    }

    fn describe<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let facts = self.with(py, |engine| {
            let plan = engine.plan();
            let config = engine.config();
            let weights = engine.target().weights();
            Ok(Description {
                architecture: config.architecture.clone(),
                vocab_size: config.vocab_size,
                num_layers: config.layers.len(),
                hidden_size: config.hidden_size,
                eos_token_ids: engine.eos_token_ids().to_vec(),
                suppress_tokens: config.suppress_tokens.clone(),
                device: engine.device().name(),
                gpu: match engine.device() {
                    Device::Host(_) => None,
                    Device::Cuda(cuda) => Some((cuda.gpu_name()?, cuda.gpu_uuid()?)),
                },
                num_parameters: weights.num_parameters(),
                weight_bytes: weights.num_bytes(),
                q_view_bytes: weights.q_view_bytes(),
                num_w12_matrices: weights.num_w12_matrices(),
                num_fp8_matrices: weights.num_fp8_matrices(),
                fp8_name: weights.fp8_format().name(),
                verification: engine.verification(),
                copy_bytes: engine.target().num_copy_bytes(),
                head: engine.target().head_path().name(),
                method: engine.drafter_config().map(DrafterConfig::method),
                drafter: engine.drafter_config().map(DrafterConfig::description),
                plan: plan.clone(),
                num_free_kv_pages: engine.num_free_kv_pages(),
            })
        })?;
        facts.into_dict(py)
    }

    #[pyo3(signature = (prompt_token_ids, params, record_logits, record_rounds, call_index=0))]
    fn add_request(
        &self,
        py: Python<'_>,
        prompt_token_ids: Vec<u32>,
        params: &Bound<'_, PyAny>,
        record_logits: bool,
        record_rounds: bool,
        call_index: u64,
    ) -> PyResult<u64> {
        let params = extract_params(params, call_index)?;
        let record = Record {
            logits: record_logits,
            rounds: record_rounds,
        };
        self.with(py, |engine| {
            engine.add_request(prompt_token_ids, &params, record)
        })
    }

    fn check_request(
        &self,
        py: Python<'_>,
        prompt_token_ids: Vec<u32>,
        params: &Bound<'_, PyAny>,
    ) -> PyResult<()> {
        let params = extract_params(params, 0)?;
        self.with(py, |engine| {
            engine.check_request(&prompt_token_ids, &params)
        })
    }

    fn step(&self, py: Python<'_>) -> PyResult<Vec<StepEvent>> {
        let events = self.with(py, engine::Engine::step)?;
        Ok(events.into_iter().map(StepEvent::from).collect())
    }

    fn stop_at(&self, py: Python<'_>, request_id: u64, num_tokens: usize) -> PyResult<()> {
        self.with(py, |engine| engine.stop_at(request_id, num_tokens))
    }

    fn abort(&self, py: Python<'_>, request_id: u64) -> PyResult<()> {
        self.with(py, |engine| engine.abort(request_id))
    }

    fn take_output(&self, py: Python<'_>, request_id: u64) -> PyResult<EngineOutput> {
        let output = self.with(py, |engine| engine.take_output(request_id))?;
        EngineOutput::new(py, output, self.record_shape)
    }

    fn add_score_request(&self, py: Python<'_>, prompt_token_ids: Vec<u32>) -> PyResult<u64> {
        self.with(py, |engine| engine.add_score_request(prompt_token_ids))
    }

    fn stage_times<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let times = self.with(py, |engine| Ok(engine.stage_times().clone()))?;
        stage_times::into_dict(py, &times)
    }

    fn set_stage_clock(&self, py: Python<'_>, is_settled: bool) -> PyResult<()> {
        self.with(py, |engine| {
            engine.set_stage_clock(is_settled);
            Ok(())
        })
    }

    fn has_unfinished(&self, py: Python<'_>) -> PyResult<bool> {
        self.with(py, |engine| Ok(engine.has_unfinished()))
    }
}

impl Engine {
    fn opened(
        py: Python<'_>,
        open: impl FnOnce() -> Result<engine::Engine> + Send,
    ) -> PyResult<Self> {
        let opened = py.detach(|| catch_panic(open))?;
        // Numpy's interface is looked up now: later, a pending Ctrl-C could make that look-up fail.
        numpy::PyArray1::<f32>::zeros(py, 0, false);
        Ok(Self {
            process_id: std::process::id(),
            record_shape: RecordShape::of(opened.config()),
            inner: Mutex::new(Some(opened)),
        })
    }

    /// Runs `work` on the engine with the interpreter released; a panic in it closes the engine.
    fn with<R: Send>(
        &self,
        py: Python<'_>,
        work: impl FnOnce(&mut engine::Engine) -> Result<R> + Send,
    ) -> PyResult<R> {
        if std::process::id() != self.process_id {
            return Err(crate::error::Error::from(DeviceError::Forked).into());
        }
        let result = py.detach(|| {
            // `catch_panic` below keeps panics from poisoning the lock; a poisoned one would still hold a valid option.
            let mut inner = self
                .inner
                .lock()
                .unwrap_or_else(std::sync::PoisonError::into_inner);
            let engine = inner.as_mut().ok_or(InternalError::Closed)?;
            let result = catch_panic(|| work(engine));
            if let Err(crate::error::Error::Internal(_)) = result {
                *inner = None;
            }
            result
        });
        Ok(result?)
    }
}

pub(super) fn catch_panic<R>(work: impl FnOnce() -> Result<R>) -> Result<R> {
    // Unwind safety: whoever sees a panic drops the value that `work` was changing.
    std::panic::catch_unwind(AssertUnwindSafe(work)).unwrap_or_else(|panic| {
        let message = panic
            .downcast_ref::<String>()
            .cloned()
            .or_else(|| panic.downcast_ref::<&str>().map(|s| (*s).to_owned()))
            .unwrap_or_else(|| "no message".to_owned());
        Err(InternalError::Panicked { message }.into())
    })
}

/// Parameters of the request with this index in its call.
fn extract_params(params: &Bound<'_, PyAny>, call_index: u64) -> PyResult<SamplingParams> {
    Ok(SamplingParams {
        max_tokens: params.getattr("max_tokens")?.extract()?,
        min_tokens: params.getattr("min_tokens")?.extract()?,
        ignore_eos: params.getattr("ignore_eos")?.extract()?,
        stop_token_ids: params.getattr("stop_token_ids")?.extract()?,
        sampling: extract_sampling(params, call_index)?,
    })
}

/// Temperature 0 is greedy, whatever else is set.
fn extract_sampling(params: &Bound<'_, PyAny>, call_index: u64) -> PyResult<Option<Sampling>> {
    let temperature: f64 = params.getattr("temperature")?.extract()?;
    if temperature == 0.0 {
        return Ok(None);
    }
    // -1 and 0 keep all.
    let top_k: i64 = params.getattr("top_k")?.extract()?;
    let seed: Option<i64> = params.getattr("seed")?.extract()?;
    Ok(Some(Sampling {
        temperature,
        min_p: params.getattr("min_p")?.extract()?,
        top_k: usize::try_from(top_k).unwrap_or(0),
        top_p: params.getattr("top_p")?.extract()?,
        seed: seed.map_or(Seed::OfCall { index: call_index }, Seed::Given),
    }))
}

pub(super) fn extract_options(options: &Bound<'_, PyAny>) -> PyResult<EngineOptions> {
    Ok(EngineOptions {
        dtype: options.getattr("dtype")?.extract()?,
        device: options.getattr("device")?.extract()?,
        weight_format: options.getattr("weight_format")?.extract()?,
        kernels: options.getattr("kernels")?.extract()?,
        head: options.getattr("head")?.extract()?,
        max_model_len: options.getattr("max_model_len")?.extract()?,
        max_num_seqs: options.getattr("max_num_seqs")?.extract()?,
        max_num_batched_tokens: options.getattr("max_num_batched_tokens")?.extract()?,
        gpu_memory_utilization: options.getattr("gpu_memory_utilization")?.extract()?,
        seed: options.getattr("seed")?.extract()?,
        num_threads: options.getattr("num_threads")?.extract()?,
        extra_eos_token_ids: options.getattr("extra_eos_token_ids")?.extract()?,
        method: options.getattr("method")?.extract()?,
        num_speculative_tokens: sizes_of(options, "num_speculative_tokens")?,
        tree: options.getattr("tree")?.extract()?,
        tree_nodes: sizes_of(options, "tree_nodes")?,
        q_passes: options.getattr("q_passes")?.extract()?,
        q_head: options.getattr("q_head")?.extract()?,
        min_confidence: options.getattr("min_confidence")?.extract()?,
        verify_costs: options.getattr("verify_costs")?.extract()?,
        prompt_lookup: PromptLookup {
            min: options.getattr("prompt_lookup_min")?.extract()?,
            max: options.getattr("prompt_lookup_max")?.extract()?,
        },
    })
}

/// Checks that `model` holds the config of a target, which what else is missing there follows from.
#[pyfunction]
pub fn check_target(py: Python<'_>, model: PathBuf) -> PyResult<()> {
    py.detach(|| catch_panic(|| Ok(ModelConfig::read(&model).map(drop)?)))?;
    Ok(())
}

/// Cost of proving the weights; `None` where nothing was to be proved.
fn verification_dict(
    py: Python<'_>,
    verification: Verification,
) -> PyResult<Option<Bound<'_, PyDict>>> {
    if verification.num_tensors == 0 {
        return Ok(None);
    }
    let seconds = verification.time.as_secs_f64();
    let dict = PyDict::new(py);
    dict.set_item("num_tensors", verification.num_tensors)?;
    dict.set_item("num_bytes", verification.num_bytes)?;
    dict.set_item("thread_seconds", seconds)?;
    dict.set_item(
        "gb_per_thread_second",
        verification.num_bytes as f64 / 1e9 / seconds,
    )?;
    Ok(Some(dict))
}

struct Description {
    architecture: String,
    vocab_size: usize,
    num_layers: usize,
    hidden_size: usize,
    eos_token_ids: Vec<u32>,
    suppress_tokens: Vec<u32>,
    device: String,
    /// Name and identity.
    gpu: Option<(String, String)>,
    num_parameters: usize,
    weight_bytes: usize,
    q_view_bytes: usize,
    num_w12_matrices: usize,
    num_fp8_matrices: usize,
    fp8_name: &'static str,
    verification: Verification,
    copy_bytes: usize,
    head: &'static str,
    method: Option<&'static str>,
    drafter: Option<String>,
    plan: crate::plan::EnginePlan,
    num_free_kv_pages: PerSpan<usize>,
}

impl Description {
    fn into_dict(self, py: Python<'_>) -> PyResult<Bound<'_, PyDict>> {
        let dict = PyDict::new(py);
        dict.set_item("architecture", self.architecture)?;
        dict.set_item("vocab_size", self.vocab_size)?;
        dict.set_item("num_layers", self.num_layers)?;
        dict.set_item("hidden_size", self.hidden_size)?;
        dict.set_item("num_parameters", self.num_parameters)?;
        dict.set_item("weight_bytes", self.weight_bytes)?;
        dict.set_item("q_view_bytes", self.q_view_bytes)?;
        let drafter_bytes = self.plan.footprint.drafter.weights;
        dict.set_item("drafter_weight_bytes", drafter_bytes)?;
        let format = match (self.num_w12_matrices, self.num_fp8_matrices) {
            (0, 0) => "bf16",
            (0, _) => self.fp8_name,
            _ => "w12",
        };
        dict.set_item("weight_format", format)?;
        dict.set_item("num_w12_matrices", self.num_w12_matrices)?;
        dict.set_item("num_fp8_matrices", self.num_fp8_matrices)?;
        dict.set_item("weight_check", verification_dict(py, self.verification)?)?;
        let kernels = self.plan.limits.kernels;
        dict.set_item("kernels", kernels.name())?;
        dict.set_item("lossless", kernels == KernelSet::Lossless)?;
        dict.set_item("head", self.head)?;
        dict.set_item("screened_head_bytes", self.copy_bytes)?;
        dict.set_item("eos_token_ids", self.eos_token_ids)?;
        dict.set_item("suppress_tokens", self.suppress_tokens)?;
        dict.set_item("dtype", ACTIVATION_DTYPE)?;
        dict.set_item("device", self.device)?;
        let (gpu, gpu_uuid) = self.gpu.unzip();
        dict.set_item("gpu", gpu)?;
        dict.set_item("gpu_uuid", gpu_uuid)?;
        dict.set_item(
            "isa",
            format!("{:?}", crate::kernels::simd::isa()).to_lowercase(),
        )?;
        dict.set_item("max_model_len", self.plan.limits.max_model_len)?;
        dict.set_item("max_num_seqs", self.plan.limits.max_num_seqs)?;
        dict.set_item("max_step_rows", self.plan.limits.max_step_rows)?;
        let (pages, free) = (self.plan.num_kv_pages, self.num_free_kv_pages);
        dict.set_item("num_kv_pages", pages.whole)?;
        dict.set_item("num_free_kv_pages", free.whole)?;
        dict.set_item("kv_page_bytes", self.plan.footprint.kv_page.whole)?;
        dict.set_item("num_window_pages", pages.window)?;
        dict.set_item("num_free_window_pages", free.window)?;
        dict.set_item("window_page_bytes", self.plan.footprint.kv_page.window)?;
        dict.set_item("method", self.method)?;
        dict.set_item("drafter", self.drafter)?;
        let speculating = self.method.is_some();
        let speculation = &self.plan.limits.speculation;
        let policy = speculation.trees[0].policy;
        dict.set_item("tree", speculating.then(|| policy.name()))?;
        dict.set_item("tree_nodes", sizes(py, speculation, |t| t.tree_nodes)?)?;
        dict.set_item("q_passes", speculation.q_passes())?;
        let has_q_passes = speculation.q_passes() > 0;
        dict.set_item("q_head", has_q_passes.then(|| speculation.q_head.name()))?;
        dict.set_item(
            "draft_head",
            speculation.draft_head.map(HeadPrecision::name),
        )?;
        let draft_lengths = sizes(py, speculation, |tree| tree.num_draft_tokens)?;
        dict.set_item("num_speculative_tokens", draft_lengths)?;
        let min_confidence = speculation.trees[0].min_confidence;
        dict.set_item("min_confidence", speculating.then_some(min_confidence))?;
        let verify_costs = speculation.trees[0].verify_costs.as_ref();
        dict.set_item("verify_costs", verify_costs.map(VerifyCosts::of_rows))?;
        Ok(dict)
    }
}

/// A size of all trees or of each, as Python holds it: a number, a sequence or `None`.
fn sizes_of(options: &Bound<'_, PyAny>, name: &str) -> PyResult<Vec<usize>> {
    let value = options.getattr(name)?;
    if value.is_none() {
        return Ok(Vec::new());
    }
    value.extract().or_else(|_| Ok(vec![value.extract()?]))
}

/// The same the other way: a number where all trees are alike.
pub(super) fn sizes<'py>(
    py: Python<'py>,
    plan: &SpeculationPlan,
    of: impl Fn(&TreePlan) -> usize,
) -> PyResult<Bound<'py, PyAny>> {
    let sizes: Vec<usize> = plan.trees.iter().map(of).collect();
    match sizes.iter().all(|&size| size == sizes[0]) {
        true => sizes[0].into_bound_py_any(py),
        false => sizes.into_bound_py_any(py),
    }
}
