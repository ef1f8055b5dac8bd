//! Outputs as Python sees them: read-only classes and numpy arrays.

use numpy::{PyArray, PyArray1, PyArrayMethods};
use pyo3::prelude::*;

use crate::engine;
use crate::error::RequestError;
use crate::model::config::ModelConfig;
use crate::request::{self, NonFiniteLogit};
use crate::stream;

/// News of one request after a step.
#[pyclass(frozen, get_all, module = "specpilot_rs._core")]
pub struct StepEvent {
    request_id: u64,
    new_token_ids: Vec<u32>,
    finish_reason: Option<&'static str>,
    num_prompt_tokens_done: usize,
}

impl From<stream::StepEvent> for StepEvent {
    fn from(event: stream::StepEvent) -> Self {
        Self {
            request_id: event.request_id,
            new_token_ids: event.new_token_ids,
            finish_reason: event.finish_reason.map(request::FinishReason::as_str),
            num_prompt_tokens_done: event.num_prompt_tokens_done,
        }
    }
}

/// Counts and times of one request.
#[pyclass(frozen, get_all, module = "specpilot_rs._core")]
pub struct EngineMetrics {
    num_prompt_passes: usize,
    num_target_passes: usize,
    num_draft_tokens: usize,
    num_accepted_tokens: usize,
    num_q_passes: usize,
    num_marked_tokens: usize,
    num_accepted_marks: usize,
    num_screened_rows: usize,
    num_screen_survivors: usize,
    num_screen_fallbacks: usize,
    acceptance_histogram: Vec<usize>,
    per_position_draft: Vec<usize>,
    per_position_accepted: Vec<usize>,
    time_to_first_token_s: f64,
    decode_time_s: f64,
}

impl From<request::Metrics> for EngineMetrics {
    fn from(metrics: request::Metrics) -> Self {
        Self {
            num_prompt_passes: metrics.num_prompt_passes,
            num_target_passes: metrics.num_target_passes,
            num_draft_tokens: metrics.num_draft_tokens,
            num_accepted_tokens: metrics.num_accepted_tokens,
            num_q_passes: metrics.num_q_passes,
            num_marked_tokens: metrics.num_marked_tokens,
            num_accepted_marks: metrics.num_accepted_marks,
            num_screened_rows: metrics.screening.num_rows,
            num_screen_survivors: metrics.screening.num_survivors,
            num_screen_fallbacks: metrics.screening.num_fallbacks,
            acceptance_histogram: metrics.acceptance_histogram,
            per_position_draft: metrics.per_position_draft,
            per_position_accepted: metrics.per_position_accepted,
            time_to_first_token_s: metrics.time_to_first_token_s,
            decode_time_s: metrics.decode_time_s,
        }
    }
}

/// What one decode pass drafted and accepted: its tree (the marked path first; parent -1 is the root), and the greedy walk
/// and the likeliest tokens of each position of the last draft, which follows the marked path.
#[pyclass(frozen, get_all, module = "specpilot_rs._core")]
pub struct RoundRecord {
    anchor_position: usize,
    draft_token_ids: Vec<u32>,
    parents: Vec<i64>,
    num_accepted: usize,
    num_marked: usize,
    greedy_token_ids: Vec<u32>,
    candidate_token_ids: Vec<Vec<u32>>,
}

impl RoundRecord {
    /// `None` for a pass whose drafts were not recorded.
    fn of(pass: request::DecodePass) -> Option<Self> {
        let drafts = pass.drafts?;
        Some(Self {
            anchor_position: pass.anchor_position,
            draft_token_ids: drafts.token_ids,
            parents: drafts
                .parents
                .into_iter()
                .map(|parent| parent.map_or(-1, |p| p as i64))
                .collect(),
            num_accepted: pass.num_accepted,
            num_marked: pass.num_marked,
            greedy_token_ids: drafts.offer.greedy_token_ids,
            candidate_token_ids: drafts.offer.candidate_token_ids,
        })
    }
}

/// Fp32 values of recorded rows.
#[pyclass(frozen, get_all, module = "specpilot_rs._core")]
pub struct ScoreRecord {
    logits: Py<PyAny>,
    residual_l2: Py<PyAny>,
    final_norm_l2: Py<PyAny>,
    last_residuals: Py<PyAny>,
    gdn_state: Option<Py<PyAny>>,
}

/// Sizes of a model that give recorded values their shape.
#[derive(Clone, Copy)]
pub(super) struct RecordShape {
    vocab_size: usize,
    hidden_size: usize,
    num_layers: usize,
    /// One layer's recurrent state `[value heads, key size, value size]`.
    gdn_state: Option<[usize; 3]>,
}

impl RecordShape {
    pub(super) fn of(config: &ModelConfig) -> Self {
        Self {
            vocab_size: config.vocab_size,
            hidden_size: config.hidden_size,
            num_layers: config.layers.len(),
            gdn_state: config
                .gdn
                .as_ref()
                .map(|gdn| [gdn.num_value_heads, gdn.key_dim, gdn.value_dim]),
        }
    }
}

impl ScoreRecord {
    fn new(py: Python<'_>, record: request::ScoreRecord, model: RecordShape) -> PyResult<Self> {
        let (t, points) = (record.num_rows, model.num_layers + 1);
        // Recorded row by row; Python gets one row of norms per layer.
        let residual_l2: Vec<f32> = (0..points)
            .flat_map(|point| {
                record
                    .residual_l2
                    .iter()
                    .skip(point)
                    .step_by(points)
                    .copied()
            })
            .collect();
        let gdn_state = match (record.gdn_state, model.gdn_state) {
            (Some(state), Some([heads, key_dim, value_dim])) => {
                let num_layers = state.len() / (heads * key_dim * value_dim);
                Some(array(py, state, [num_layers, heads, key_dim, value_dim])?)
            }
            _ => None,
        };
        let last_rows = record.last_residuals.len() / model.hidden_size;
        Ok(Self {
            logits: array(py, record.logits, [t, model.vocab_size])?,
            residual_l2: array(py, residual_l2, [points, t])?,
            final_norm_l2: array(py, record.final_norm_l2, [t])?,
            last_residuals: array(py, record.last_residuals, [last_rows, model.hidden_size])?,
            gdn_state,
        })
    }
}

fn array<const D: usize>(py: Python<'_>, values: Vec<f32>, shape: [usize; D]) -> PyResult<Py<PyAny>>
where
    [usize; D]: numpy::ndarray::IntoDimension<Dim = numpy::ndarray::Dim<[usize; D]>>,
    numpy::ndarray::Dim<[usize; D]>: numpy::ndarray::Dimension,
{
    let reshaped: Bound<'_, PyArray<f32, _>> = PyArray1::from_vec(py, values).reshape(shape)?;
    Ok(reshaped.into_any().unbind())
}

/// What an ended request leaves.
#[pyclass(frozen, get_all, module = "specpilot_rs._core")]
pub struct EngineOutput {
    token_ids: Vec<u32>,
    finish_reason: &'static str,
    stop_token_id: Option<u32>,
    metrics: Py<EngineMetrics>,
    record: Option<Py<ScoreRecord>>,
    rounds: Option<Vec<Py<RoundRecord>>>,
    failure: Option<String>,
}

impl EngineOutput {
    pub(super) fn new(
        py: Python<'_>,
        output: engine::EngineOutput,
        model: RecordShape,
    ) -> PyResult<Self> {
        let mut request = output.request;
        let metrics = request.metrics();
        let record = match request.record_from {
            Some(_) => {
                let record = std::mem::take(&mut request.record);
                Some(Py::new(py, ScoreRecord::new(py, record, model)?)?)
            }
            None => None,
        };
        let rounds = request
            .record_rounds
            .then(|| {
                let passes = std::mem::take(&mut request.passes).into_iter();
                passes
                    .filter_map(RoundRecord::of)
                    .map(|round| Py::new(py, round))
                    .collect()
            })
            .transpose()?;
        let failure = request.failure.map(|NonFiniteLogit { position, got }| {
            RequestError::NonFiniteLogit { position, got }.to_string()
        });
        Ok(Self {
            token_ids: request.output().to_vec(),
            finish_reason: output.finish_reason.as_str(),
            stop_token_id: request.stop_token_id(),
            metrics: Py::new(py, EngineMetrics::from(metrics))?,
            record,
            rounds,
            failure,
        })
    }
}
