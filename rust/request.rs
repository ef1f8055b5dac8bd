//! One request: its tokens, its limits, how far it is committed, and what its passes did.
//!
//! A leaf: it holds numbers only. Cache slots are handles, and nothing here computes.

use std::time::Instant;

use crate::error::RequestError;

/// Identifies a request for its whole life.
pub type RequestId = u64;

/// What a caller may ask of decoding. Text-level stops are the reader's: see `Engine::stop_at`.
#[derive(Clone, Debug, PartialEq)]
pub struct SamplingParams {
    /// Most tokens to generate; `None` = up to the context limit.
    pub max_tokens: Option<usize>,
    /// Tokens before which no stop id may be chosen.
    pub min_tokens: usize,
    /// Whether end-of-sequence ids are ordinary tokens.
    pub ignore_eos: bool,
    /// Further ids that end the request.
    pub stop_token_ids: Vec<u32>,
    /// How tokens are drawn; `None` = greedily, each the likeliest.
    pub sampling: Option<Sampling>,
}

/// The distribution that tokens are drawn from, limits in this order after the temperature: `min_p`, `top_k`, `top_p`.
#[derive(Clone, Debug, PartialEq)]
pub struct Sampling {
    /// Divides the logits; above 0.
    pub temperature: f64,
    /// Drops tokens less likely than this times the likeliest, in [0, 1].
    pub min_p: f64,
    /// Keeps this many of the likeliest tokens; 0 = all.
    pub top_k: usize,
    /// Keeps the fewest of the likeliest tokens that have this share of the probability, in (0, 1].
    pub top_p: f64,
    /// What makes its draws differ from those of others.
    pub seed: Seed,
}

/// Where the noise of a request comes from: never from its id, slot or time of arrival.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Seed {
    /// The caller's own.
    Given(i64),
    /// The engine's, for the request with this index in its call.
    OfCall {
        /// Index among the prompts of one call.
        index: u64,
    },
}

impl Sampling {
    fn validate(&self) -> Result<(), RequestError> {
        for (parameter, value, expected, holds) in [
            (
                "temperature",
                self.temperature,
                "finite and above 0, or 0 for greedy decoding",
                self.temperature.is_finite() && self.temperature > 0.0,
            ),
            (
                "top_p",
                self.top_p,
                "above 0 and at most 1",
                self.top_p > 0.0 && self.top_p <= 1.0,
            ),
            (
                "min_p",
                self.min_p,
                "in 0..=1",
                (0.0..=1.0).contains(&self.min_p),
            ),
        ] {
            if !holds {
                return Err(RequestError::Parameter {
                    parameter,
                    expected: expected.into(),
                    got: value.to_string(),
                });
            }
        }
        Ok(())
    }
}

impl SamplingParams {
    /// Checks what can be judged without a model.
    ///
    /// # Errors
    /// [`RequestError::Parameter`] naming the parameter, what is allowed and what was given.
    pub fn validate(&self) -> Result<(), RequestError> {
        if self.max_tokens == Some(0) {
            return Err(RequestError::Parameter {
                parameter: "max_tokens",
                expected: "at least 1".into(),
                got: "0".into(),
            });
        }
        if let Some(max_tokens) = self.max_tokens
            && self.min_tokens > max_tokens
        {
            return Err(RequestError::Parameter {
                parameter: "min_tokens",
                expected: format!("at most max_tokens ({max_tokens})"),
                got: self.min_tokens.to_string(),
            });
        }
        self.sampling.as_ref().map_or(Ok(()), Sampling::validate)
    }
}

/// Why a request ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FinishReason {
    /// A stop id, an end-of-sequence id or a stop string.
    Stop,
    /// `max_tokens` or the context limit.
    Length,
    /// The caller gave it up, or a step failed.
    Abort,
}

impl FinishReason {
    /// The word used in outputs.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Stop => "stop",
            Self::Length => "length",
            Self::Abort => "abort",
        }
    }
}

/// What screening the LM head did for some rows.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ScreenCounts {
    /// Rows decided by the screened head.
    pub num_rows: usize,
    /// Channels that were multiplied exactly, of rows that did not fall back.
    pub num_survivors: usize,
    /// Rows among them that took the dense path after all.
    pub num_fallbacks: usize,
}

impl ScreenCounts {
    /// Adds the counts of other rows.
    pub fn add(&mut self, other: Self) {
        self.num_rows += other.num_rows;
        self.num_survivors += other.num_survivors;
        self.num_fallbacks += other.num_fallbacks;
    }
}

/// What one exact decode pass did for one request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DecodePass {
    /// Position of the anchor token (the tree's root).
    pub anchor_position: usize,
    /// Drafted tokens in the verified tree.
    pub num_draft_tokens: usize,
    /// Length of the tree's longest branch.
    pub draft_depth: usize,
    /// Drafted tokens accepted *and* emitted.
    pub num_accepted: usize,
    /// Tokens emitted: accepted drafts and the target's own next token, cut at a stop.
    pub num_emitted: usize,
    /// How the rows' tokens were found.
    pub screening: ScreenCounts,
    /// Q passes before the exact one.
    pub num_q_passes: usize,
    /// Drafted tokens that they marked: the tree's first.
    pub num_marked: usize,
    /// The drafts themselves, for callers who asked to see them.
    pub drafts: Option<Drafts>,
}

/// What was drafted for one pass: its tree without the root, and what the tree was grown from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Drafts {
    /// The tokens, parents first; those that Q passes marked come before all others, as a chain.
    pub token_ids: Vec<u32>,
    /// Tree parent of each token, as index into `token_ids`; `None` = the root.
    pub parents: Vec<Option<usize>>,
    /// The last draft, of which the tree has what fits.
    pub offer: DraftOffer,
}

/// What a draft held for the positions after its anchor or, after a Q pass, after the marked path. Empty when there was
/// none.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DraftOffer {
    /// Its greedy walk, whether or not the tree had room for it.
    pub greedy_token_ids: Vec<u32>,
    /// The likeliest tokens of each position, best first.
    pub candidate_token_ids: Vec<Vec<u32>>,
}

/// Fp32 values of the rows that a caller asked to see.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ScoreRecord {
    /// Number of recorded rows T.
    pub num_rows: usize,
    /// Unmasked logits `[T, V]`.
    pub logits: Vec<f32>,
    /// L2 norm of the residual stream entering layer 0 and after each layer, `[T, L + 1]`.
    pub residual_l2: Vec<f32>,
    /// L2 norm after the final norm, `[T]`.
    pub final_norm_l2: Vec<f32>,
    /// Residual stream of the last recorded row entering layer 0 and after each layer, `[L + 1, H]`; empty after a stop
    /// string.
    pub last_residuals: Vec<f32>,
    /// Recurrent state after the last committed token, `[GDN layers, Hv, Dk, Dv]`; absent when the model has none, and
    /// after a stop string, which ends a request between passes.
    pub gdn_state: Option<Vec<f32>>,
}

impl ScoreRecord {
    /// Forgets all rows after the first `num_rows`, and what belongs to the last row or to the state after it: where a
    /// pass ended must not show.
    pub fn cut_at_stop(&mut self, num_rows: usize) {
        self.last_residuals.clear();
        self.gdn_state = None;
        if num_rows < self.num_rows {
            for values in [
                &mut self.logits,
                &mut self.residual_l2,
                &mut self.final_norm_l2,
            ] {
                values.truncate(values.len() / self.num_rows * num_rows);
            }
            self.num_rows = num_rows;
        }
    }
}

/// The target's best logit after a committed position is NaN or infinite: nothing can be chosen by it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct NonFiniteLogit {
    /// Position of the row.
    pub position: usize,
    /// The logit.
    pub got: f32,
}

/// Where a request stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    /// Queued, without a slot.
    Waiting,
    /// Holds a slot: prompt chunks first, then decode passes.
    Running {
        /// Its cache slot.
        slot: usize,
    },
    /// Ended; holds no slot.
    Finished(FinishReason),
}

/// A request and all that is known of it.
#[derive(Debug)]
pub struct Request {
    /// Its id.
    pub id: RequestId,
    /// Prompt and generated tokens.
    pub token_ids: Vec<u32>,
    /// Length of the prompt.
    pub num_prompt_tokens: usize,
    /// Tokens whose hidden states are in the caches. While decoding, the token at this index is the anchor token.
    pub committed_len: usize,
    /// Most tokens to generate, context limit included. Zero for a score-only request.
    pub max_new_tokens: usize,
    /// Output index from which stop ids may be chosen.
    pub min_tokens: usize,
    /// Ids that end the request.
    pub stop_ids: Vec<u32>,
    /// Of these, the ones the caller named (reported as the stop reason).
    pub named_stop_ids: Vec<u32>,
    /// Ids that may never be chosen.
    pub suppressed_ids: Vec<u32>,
    /// `suppressed_ids` and `stop_ids`: what rows before `min_tokens` may not choose.
    pub suppressed_and_stop_ids: Vec<u32>,
    /// How its tokens are drawn; `None` = greedily.
    pub sampling: Option<Sampling>,
    /// Key of the noise that draws them.
    pub noise_seed: u64,
    /// Where it stands.
    pub state: State,
    /// Rows to record, from this position on.
    pub record_from: Option<usize>,
    /// The recorded rows.
    pub record: ScoreRecord,
    /// Whether the caller wants to see what each decode pass drafted.
    pub record_rounds: bool,
    /// Set when the request was ended because it could not go on; its batch mates are not touched.
    pub failure: Option<NonFiniteLogit>,
    /// Exact decode passes so far.
    pub passes: Vec<DecodePass>,
    /// Prompt passes so far.
    pub num_prompt_passes: usize,
    /// How the first token was found.
    pub prompt_screening: ScreenCounts,
    /// When it was submitted.
    pub submitted: Instant,
    /// When its first token was committed.
    pub first_token: Option<Instant>,
    /// When it ended.
    pub finished: Option<Instant>,
}

/// What an engine adds to every request of its model.
#[derive(Clone, Debug, Default)]
pub struct RequestDefaults {
    /// Context limit in tokens.
    pub max_model_len: usize,
    /// End-of-sequence ids of model and tokenizer.
    pub eos_token_ids: Vec<u32>,
    /// Ids that may never be chosen.
    pub suppressed_ids: Vec<u32>,
}

impl Request {
    /// A waiting request. Prompt and parameters have been validated.
    pub fn new(
        id: RequestId,
        prompt_token_ids: Vec<u32>,
        params: &SamplingParams,
        defaults: &RequestDefaults,
    ) -> Self {
        let num_prompt_tokens = prompt_token_ids.len();
        let room = defaults.max_model_len.saturating_sub(num_prompt_tokens);
        let mut stop_ids = params.stop_token_ids.clone();
        if !params.ignore_eos {
            stop_ids.extend(&defaults.eos_token_ids);
        }
        let suppressed_ids = defaults.suppressed_ids.clone();
        Self {
            id,
            token_ids: prompt_token_ids,
            num_prompt_tokens,
            committed_len: 0,
            max_new_tokens: params.max_tokens.unwrap_or(room).min(room),
            min_tokens: params.min_tokens,
            suppressed_and_stop_ids: suppressed_ids.iter().chain(&stop_ids).copied().collect(),
            stop_ids,
            named_stop_ids: params.stop_token_ids.clone(),
            suppressed_ids,
            sampling: params.sampling.clone(),
            noise_seed: 0,
            state: State::Waiting,
            record_from: None,
            record: ScoreRecord::default(),
            record_rounds: false,
            failure: None,
            passes: Vec::new(),
            num_prompt_passes: 0,
            prompt_screening: ScreenCounts::default(),
            submitted: Instant::now(),
            first_token: None,
            finished: None,
        }
    }

    /// Tokens generated so far.
    pub fn output(&self) -> &[u32] {
        &self.token_ids[self.num_prompt_tokens..]
    }

    /// Tokens that may still be generated.
    pub fn num_tokens_left(&self) -> usize {
        self.max_new_tokens - self.output().len()
    }

    /// Whether prompt rows are still to be committed.
    pub fn in_prompt(&self) -> bool {
        self.committed_len < self.num_prompt_tokens
    }

    /// Whether it only wants values of its prompt.
    pub fn is_score(&self) -> bool {
        self.max_new_tokens == 0
    }

    /// Positions its caches must hold: every token but the last generated one.
    pub fn num_cache_positions(&self) -> usize {
        (self.num_prompt_tokens + self.max_new_tokens.saturating_sub(1)).max(self.num_prompt_tokens)
    }

    /// Ids that a row at `position` may not choose.
    pub fn masked_ids(&self, position: usize) -> &[u32] {
        let output_index = (position + 1).saturating_sub(self.num_prompt_tokens);
        if output_index < self.min_tokens {
            &self.suppressed_and_stop_ids
        } else {
            &self.suppressed_ids
        }
    }

    /// The stop id that ended the request, if the caller had named it.
    pub fn stop_token_id(&self) -> Option<u32> {
        let last = *self.output().last()?;
        let stopped = self.state == State::Finished(FinishReason::Stop);
        (stopped && self.named_stop_ids.contains(&last)).then_some(last)
    }

    /// Drops all output after the first `num_tokens` and recounts the passes as if decoding had stopped there.
    pub fn truncate_output(&mut self, num_tokens: usize) {
        self.token_ids.truncate(self.num_prompt_tokens + num_tokens);
        // The first token comes from the prompt's last row, all others from decode passes.
        let mut left = num_tokens.saturating_sub(1);
        self.passes.retain_mut(|pass| {
            pass.num_emitted = pass.num_emitted.min(left);
            pass.num_accepted = pass.num_accepted.min(pass.num_emitted);
            left -= pass.num_emitted;
            pass.num_emitted > 0
        });
        self.record.cut_at_stop(num_tokens);
    }

    /// What its passes add up to.
    pub fn metrics(&self) -> Metrics {
        let mut metrics = Metrics {
            num_prompt_passes: self.num_prompt_passes,
            num_target_passes: self.passes.len(),
            screening: self.prompt_screening,
            ..Metrics::default()
        };
        let count = |counts: &mut Vec<usize>, len: usize| {
            counts.resize(counts.len().max(len), 0);
            counts[..len].iter_mut().for_each(|c| *c += 1);
        };
        for pass in &self.passes {
            metrics.num_draft_tokens += pass.num_draft_tokens;
            metrics.num_accepted_tokens += pass.num_accepted;
            metrics.num_q_passes += pass.num_q_passes;
            metrics.num_marked_tokens += pass.num_marked;
            metrics.num_accepted_marks += pass.num_accepted.min(pass.num_marked);
            metrics.screening.add(pass.screening);
            count(&mut metrics.per_position_draft, pass.draft_depth);
            count(&mut metrics.per_position_accepted, pass.num_accepted);
            let histogram = &mut metrics.acceptance_histogram;
            histogram.resize(histogram.len().max(pass.num_accepted + 1), 0);
            histogram[pass.num_accepted] += 1;
        }
        let num_positions = metrics.per_position_draft.len();
        metrics.per_position_accepted.resize(num_positions, 0);
        if let Some(first) = self.first_token {
            metrics.time_to_first_token_s = (first - self.submitted).as_secs_f64();
            let end = self.finished.unwrap_or_else(Instant::now);
            metrics.decode_time_s = (end - first).as_secs_f64();
        }
        metrics
    }
}

/// Counts and times of one request. Only emitted tokens are counted.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Metrics {
    /// Forwards that committed prompt rows.
    pub num_prompt_passes: usize,
    /// Exact decode forwards; prompt passes excluded.
    pub num_target_passes: usize,
    /// Drafted tokens that were verified.
    pub num_draft_tokens: usize,
    /// Drafted tokens accepted and emitted.
    pub num_accepted_tokens: usize,
    /// Q passes, each before an exact pass.
    pub num_q_passes: usize,
    /// Tokens that Q passes marked for exact passes.
    pub num_marked_tokens: usize,
    /// Those among them that were accepted.
    pub num_accepted_marks: usize,
    /// Rows, survivors and fallbacks of the screened LM head.
    pub screening: ScreenCounts,
    /// Passes by number of accepted drafts.
    pub acceptance_histogram: Vec<usize>,
    /// Passes that drafted at depth 1, 2, ...
    pub per_position_draft: Vec<usize>,
    /// Passes that accepted at depth 1, 2, ...
    pub per_position_accepted: Vec<usize>,
    /// From submission to the first token.
    pub time_to_first_token_s: f64,
    /// From the first token to the end.
    pub decode_time_s: f64,
}
