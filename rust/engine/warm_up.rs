//! A rehearsal on a GPU before the first request: steps as large as they come.
//!
//! It compiles and loads every kernel that steps use and brings lists and scratch memory to their final sizes, so that
//! nothing is compiled or allocated once requests run. Nothing of it is left.

use super::{Engine, Record};
use crate::device::Device;
use crate::error::Result;
use crate::kernels::paths::MAX_PATH_ROWS;
use crate::request::{Sampling, SamplingParams, Seed};
use crate::step::rehearsal::rehearse_forwards;

/// Decode steps of a rehearsal: the first drafts from a prompt, the next from what was committed.
const NUM_DECODE_STEPS: usize = 3;

impl Engine {
    /// Rehearses greedy and sampled decoding.
    ///
    /// # Errors
    /// Whatever a step fails with: then real ones would, too.
    pub(super) fn warm_up(&mut self) -> Result<()> {
        if let Device::Cuda(cuda) = &self.pair.device {
            // Contexts grow beyond those of a rehearsal.
            let limits = &self.plan.limits;
            let target = &self.pair.target;
            let own = target.scratch_bytes(limits.max_step_rows, limits.max_model_len);
            let drafter = self.pair.drafter.as_ref().map_or(0, |d| d.scratch_bytes());
            cuda.scratch(own.max(drafter))?;
        }
        self.rehearse(self.plan.limits.max_num_seqs, None)?;
        let sampling = Sampling {
            temperature: 1.0,
            min_p: 0.0,
            top_k: 0,
            top_p: 0.9,
            seed: Seed::Given(0),
        };
        self.rehearse(1, Some(sampling))?;
        let limits = &self.plan.limits;
        let decode_rows = limits.speculation.pass_rows().min(limits.max_step_rows);
        let with_q_views = limits.speculation.q_passes() > 0;
        let max_model_len = limits.max_model_len;
        rehearse_forwards(&mut self.pair, decode_rows, with_q_views, max_model_len)?;
        self.next_id = 0;
        self.set_stage_clock(false);
        Ok(())
    }

    /// Runs `num_requests` at once, as many of them with long prompts as fill a pass.
    fn rehearse(&mut self, num_requests: usize, sampling: Option<Sampling>) -> Result<()> {
        let limits = &self.plan.limits;
        let longest = (limits.max_model_len - 1).min(limits.max_chunk_rows);
        let num_long = limits.max_step_rows.div_ceil(longest);
        let params = SamplingParams {
            // Enough for whole trees, and few pages.
            max_tokens: Some(NUM_DECODE_STEPS * MAX_PATH_ROWS),
            min_tokens: 1,
            ignore_eos: true,
            stop_token_ids: Vec::new(),
            sampling,
        };
        let mut ids = Vec::with_capacity(num_requests);
        for i in 0..num_requests {
            let prompt_len = if i < num_long { longest } else { 1 };
            ids.push(self.add_request(vec![0; prompt_len], &params, Record::default())?);
        }
        let num_prompt_rows = num_long.min(num_requests) * longest + num_requests;
        let max_rows = self.plan.limits.max_step_rows;
        for _ in 0..num_prompt_rows.div_ceil(max_rows) + NUM_DECODE_STEPS {
            self.step()?;
        }
        for id in ids {
            self.abort(id)?;
        }
        self.finished.clear();
        Ok(())
    }
}
