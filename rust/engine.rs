//! The engine: owns model, caches, scheduler and plan; takes requests, steps, and hands outputs back.

use std::collections::{HashMap, HashSet};
use std::time::Instant;

use crate::device::Device;
use crate::drafter::planted::Scripts;
use crate::drafter::{Drafter, config::DrafterConfig};
use crate::error::{RequestError, Result};
use crate::kernels::kv_span::PerSpan;
use crate::kernels::sample_rows::philox::request_seed;
use crate::model::config::ModelConfig;
use crate::model::decoder::Decoder;
use crate::plan::{EnginePlan, Limits};
use crate::request::{
    FinishReason, Request, RequestDefaults, RequestId, SamplingParams, Seed, State,
};
use crate::scheduler::queue::Scheduler;
use crate::scheduler::rows::RowBudget;
use crate::step::decode_step::{ModelPair, decode_step};
use crate::step::stage_times::{StageClock, StageTimes};
use crate::stream::StepEvent;
use crate::weights::checkpoint::Verification;

mod opening;
mod switching;
mod warm_up;

/// A loaded deployment that serves requests.
pub struct Engine {
    pair: ModelPair,
    /// The drafter while decoding is plain though the engine was opened with one.
    idle_drafter: Option<Box<dyn Drafter>>,
    /// What the plan was when the engine was opened: what later ones must stay within.
    opened: Limits,
    /// What a planted drafter goes by.
    scripts: Option<Scripts>,
    draft_config: Option<DrafterConfig>,
    plan: EnginePlan,
    scheduler: Scheduler,
    defaults: RequestDefaults,
    /// Of the target.
    verification: Verification,
    finished: HashMap<RequestId, Request>,
    next_id: RequestId,
    seed: u64,
}

/// What to keep of a request besides its tokens.
#[derive(Clone, Copy, Debug, Default)]
pub struct Record {
    /// Logits and residual norms of the rows that choose output tokens.
    pub logits: bool,
    /// What each decode pass drafted and accepted.
    pub rounds: bool,
}

/// What a request that ended leaves.
#[derive(Debug)]
pub struct EngineOutput {
    /// The request with its tokens, passes and records.
    pub request: Request,
    /// Why it ended.
    pub finish_reason: FinishReason,
}

impl Engine {
    /// The resolved plan.
    pub fn plan(&self) -> &EnginePlan {
        &self.plan
    }

    /// The target's config.
    pub fn config(&self) -> &ModelConfig {
        self.pair.target.config()
    }

    /// The target with its weights.
    pub fn target(&self) -> &Decoder {
        &self.pair.target
    }

    /// What proving the weights of target and drafter took at load; nothing is proved of a plain BF16 checkpoint.
    pub fn verification(&self) -> Verification {
        let drafter = self.pair.drafter.as_ref();
        self.verification + drafter.map_or_else(Verification::default, |d| d.verification())
    }

    /// Where the engine computes.
    pub fn device(&self) -> &Device {
        &self.pair.device
    }

    /// The drafter's config, when speculating: `None` after a switch to plain decoding, too.
    pub fn drafter_config(&self) -> Option<&DrafterConfig> {
        let is_speculating = self.pair.drafter.is_some();
        self.draft_config.as_ref().filter(|_| is_speculating)
    }

    /// End-of-sequence ids of model and tokenizer.
    pub fn eos_token_ids(&self) -> &[u32] {
        &self.defaults.eos_token_ids
    }

    /// Free KV pages, for memory accounting.
    pub fn num_free_kv_pages(&self) -> PerSpan<usize> {
        self.pair.caches.num_free_pages()
    }

    /// Where the time of decode steps went since the engine was opened or the clock set.
    pub fn stage_times(&self) -> &StageTimes {
        self.pair.clock.times()
    }

    /// Sets the clock of [`stage_times`](Self::stage_times) to zero; `is_settled`: from now on it waits for the device
    /// at the end of every stage.
    pub fn set_stage_clock(&mut self, is_settled: bool) {
        self.pair.clock = StageClock::new(is_settled);
    }

    /// Queues a request.
    ///
    /// # Errors
    /// [`RequestError`] for a prompt or parameter that cannot be served; nothing is queued then.
    pub fn add_request(
        &mut self,
        prompt_token_ids: Vec<u32>,
        params: &SamplingParams,
        record: Record,
    ) -> Result<RequestId> {
        self.check_request(&prompt_token_ids, params)?;
        let record_from = record.logits.then(|| prompt_token_ids.len() - 1);
        let mut request = Request::new(self.next_id, prompt_token_ids, params, &self.defaults);
        if let Some(sampling) = &params.sampling {
            request.noise_seed = match sampling.seed {
                Seed::Given(seed) => seed as u64,
                Seed::OfCall { index } => request_seed(self.seed, index),
            };
        }
        request.record_from = record_from;
        request.record_rounds = record.rounds;
        Ok(self.submit(request))
    }

    /// Checks a request as [`add_request`](Self::add_request) does, and queues nothing.
    ///
    /// # Errors
    /// [`RequestError`] for a prompt or parameter that cannot be served.
    pub fn check_request(&self, prompt_token_ids: &[u32], params: &SamplingParams) -> Result<()> {
        params.validate()?;
        self.check_prompt(prompt_token_ids, 1)?;
        let vocab_size = self.config().vocab_size;
        if let Some(&id) = params
            .stop_token_ids
            .iter()
            .find(|&&id| id as usize >= vocab_size)
        {
            return Err(RequestError::Parameter {
                parameter: "stop_token_ids",
                expected: format!("ids below the vocabulary size {vocab_size}"),
                got: id.to_string(),
            }
            .into());
        }
        if params.min_tokens > 0 {
            let stops = (!params.ignore_eos).then_some(&self.defaults.eos_token_ids);
            let masked: HashSet<u32> = params
                .stop_token_ids
                .iter()
                .chain(stops.into_iter().flatten())
                .chain(&self.defaults.suppressed_ids)
                .copied()
                .collect();
            if masked.len() >= vocab_size {
                return Err(RequestError::Parameter {
                    parameter: "min_tokens",
                    expected: "0 when every token is a stop token".into(),
                    got: params.min_tokens.to_string(),
                }
                .into());
            }
        }
        Ok(())
    }

    /// Queues a request for fp32 logits, residual norms and the final recurrent state of a prompt, by the same kernels
    /// and caches as decoding. It generates nothing and ends with its prompt; its record holds every position.
    ///
    /// # Errors
    /// [`RequestError`] for a prompt that cannot be served.
    pub fn add_score_request(&mut self, prompt_token_ids: Vec<u32>) -> Result<RequestId> {
        self.check_prompt(&prompt_token_ids, 0)?;
        let params = SamplingParams {
            max_tokens: None,
            min_tokens: 0,
            ignore_eos: true,
            stop_token_ids: Vec::new(),
            sampling: None,
        };
        let mut request = Request::new(self.next_id, prompt_token_ids, &params, &self.defaults);
        request.max_new_tokens = 0;
        request.record_from = Some(0);
        Ok(self.submit(request))
    }

    fn submit(&mut self, request: Request) -> RequestId {
        let id = request.id;
        self.next_id += 1;
        self.scheduler.submit(request);
        id
    }

    fn check_prompt(&self, prompt: &[u32], num_new_tokens: usize) -> Result<(), RequestError> {
        let max_model_len = self.plan.limits.max_model_len;
        let vocab_size = self.config().vocab_size;
        if prompt.is_empty() {
            return Err(RequestError::EmptyPrompt);
        }
        if prompt.len() + num_new_tokens > max_model_len {
            return Err(RequestError::PromptTooLong {
                max_model_len,
                expected: max_model_len - num_new_tokens,
                got: prompt.len(),
            });
        }
        match prompt.iter().position(|&id| id as usize >= vocab_size) {
            Some(index) => Err(RequestError::TokenOutOfRange {
                index,
                expected: vocab_size,
                got: prompt[index],
            }),
            None => Ok(()),
        }
    }

    /// Whether any request waits or runs.
    pub fn has_unfinished(&self) -> bool {
        !self.scheduler.is_idle()
    }

    /// One decode step over all running requests. Empty when there was nothing to do.
    ///
    /// # Errors
    /// When a stage fails; all requests are then aborted and the engine stays usable.
    pub fn step(&mut self) -> Result<Vec<StepEvent>> {
        if self.scheduler.is_idle() {
            return Ok(Vec::new());
        }
        let ModelPair {
            caches, drafter, ..
        } = &mut self.pair;
        let take_slot = |num_positions| {
            let slot = caches.admit(num_positions)?;
            if let Some(drafter) = drafter
                && !drafter.reserve(slot, num_positions)
            {
                caches.release(slot);
                return None;
            }
            Some(slot)
        };
        let limits = &self.plan.limits;
        let budget = RowBudget {
            pass_rows: limits.max_step_rows,
            chunk_rows: limits.max_chunk_rows,
            decode_rows: limits.speculation.pass_rows(),
        };
        let batch = self.scheduler.next_batch(budget, take_slot);
        let slots: Vec<(usize, usize)> = batch.entries.iter().map(|e| (e.index, e.slot)).collect();
        let committed = decode_step(
            &mut self.pair,
            self.scheduler.running_mut(),
            &limits.speculation,
            batch,
        );
        let committed = match committed {
            Ok(committed) => committed,
            Err(error) => {
                // What the step had finished before it failed is over; all else is given up.
                self.keep_finished(&slots);
                for id in self.scheduler.ids() {
                    self.abort(id)?;
                }
                return Err(error);
            }
        };
        let running = self.scheduler.running_mut();
        let events = committed
            .entries
            .into_iter()
            .map(|entry| {
                let request = &running[entry.index];
                StepEvent {
                    request_id: request.id,
                    new_token_ids: entry.new_token_ids,
                    num_prompt_tokens_done: request.committed_len.min(request.num_prompt_tokens),
                    finish_reason: entry.finish,
                }
            })
            .collect();
        self.keep_finished(&slots);
        if self.scheduler.is_idle() {
            self.pair.clock.pause();
        }
        Ok(events)
    }

    /// Frees the slots of requests that a step has finished, of those `(index, slot)`, and keeps their outputs.
    fn keep_finished(&mut self, slots: &[(usize, usize)]) {
        for &(index, slot) in slots {
            let request = &self.scheduler.running_mut()[index];
            if matches!(request.state, State::Finished(_)) {
                self.release(slot);
            }
        }
        for request in self.scheduler.take_finished() {
            self.finished.insert(request.id, request);
        }
    }

    fn release(&mut self, slot: usize) {
        self.pair.caches.release(slot);
        if let Some(drafter) = &mut self.pair.drafter {
            drafter.release(slot);
        }
    }

    /// Ends a request after `num_tokens` output tokens, where a stop string was completed. Later tokens, and the
    /// passes that made them, are forgotten.
    ///
    /// # Errors
    /// [`RequestError::Unknown`] for an id that is not known.
    pub fn stop_at(&mut self, id: RequestId, num_tokens: usize) -> Result<()> {
        self.abort(id)?;
        let request = self
            .finished
            .get_mut(&id)
            .ok_or(RequestError::Unknown { id })?;
        request.truncate_output(num_tokens);
        request.state = State::Finished(FinishReason::Stop);
        request.finished = Some(Instant::now());
        Ok(())
    }

    /// Gives a request up; its output so far can be taken. One that has ended is left as it is.
    ///
    /// # Errors
    /// [`RequestError::Unknown`] for an id that is not known.
    pub fn abort(&mut self, id: RequestId) -> Result<()> {
        if let Some((mut request, slot)) = self.scheduler.abort(id) {
            if let Some(slot) = slot {
                self.release(slot);
            }
            request.finished = Some(Instant::now());
            self.finished.insert(id, request);
        }
        match self.finished.contains_key(&id) {
            true => Ok(()),
            false => Err(RequestError::Unknown { id }.into()),
        }
    }

    /// Hands over what an ended request left and forgets it.
    ///
    /// # Errors
    /// [`RequestError::Unknown`] for an id that is unknown or has not ended.
    pub fn take_output(&mut self, id: RequestId) -> Result<EngineOutput> {
        let request = self
            .finished
            .remove(&id)
            .ok_or(RequestError::Unknown { id })?;
        let finish_reason = match request.state {
            State::Finished(reason) => reason,
            State::Waiting | State::Running { .. } => FinishReason::Abort,
        };
        Ok(EngineOutput {
            request,
            finish_reason,
        })
    }
}

#[cfg(test)]
mod tests;
