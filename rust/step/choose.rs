//! Which token follows each row of a pass: the LM head for the rows that need one, each as its request decodes.
//!
//! In: rows with their positions and requests. Out: choices by row of the pass. Exact and Q passes choose here alike,
//! so that a Q pass marks what the exact one would choose by the same noise; only a Q pass may go by estimates. Greedy
//! rows whose logits nobody wants may be screened; recorded and sampled rows go through all logits.

use crate::device::Device;
use crate::error::Result;
use crate::kernels::lm_head_screen::HeadScores;
use crate::kernels::sample_rows::RowSampler;
use crate::model::decoder::Decoder;
use crate::model::head::TokenChoices;
use crate::request::{Request, ScreenCounts};

use super::types::Choice;

/// One row whose next token or logits are wanted.
pub(super) struct HeadRow<'a> {
    /// Row in the pass.
    pub(super) row: usize,
    /// Its absolute position.
    pub(super) position: usize,
    /// Whose it is.
    pub(super) request: &'a Request,
    /// Index of the request's entry in the batch.
    pub(super) entry: usize,
    /// Whether the choice decides anything.
    pub(super) decides: bool,
    /// Whether its logits are to stay readable.
    pub(super) is_recorded: bool,
}

/// Rows that go through the LM head, in the two ways there are.
#[derive(Default)]
pub(super) struct HeadRows<'a> {
    greedy: RowGroup<'a>,
    dense: RowGroup<'a>,
}

/// What the head says of the rows of a pass.
pub(super) struct ChosenRows {
    /// Choice after each row of the pass, where it decides.
    pub(super) choices: Vec<Option<Choice>>,
    /// How the choices of each entry's rows were found.
    pub(super) screening: Vec<ScreenCounts>,
    /// Index of each row among those whose logits can be read.
    pub(super) logit_rows: Vec<Option<usize>>,
}

impl<'a> HeadRows<'a> {
    pub(super) fn push(&mut self, row: HeadRow<'a>) {
        let sampler = sampler(row.request, row.position);
        let group = match row.is_recorded || !sampler.is_greedy() {
            true => &mut self.dense,
            false => &mut self.greedy,
        };
        group.rows.push(row.row as u32);
        group.masked.push(row.request.masked_ids(row.position));
        group.samplers.push(sampler);
        group.entries.push(row.entry);
        group.decides.push(row.decides);
    }

    /// Chooses after the rows of the target's last forward, which had `num_rows` rows of `num_entries` entries. Greedy
    /// rows whose logits nobody wants go by `scores`.
    ///
    /// # Errors
    /// Whatever a kernel refuses.
    pub(super) fn choose(
        &self,
        device: &Device,
        target: &mut Decoder,
        num_rows: usize,
        num_entries: usize,
        scores: HeadScores,
    ) -> Result<ChosenRows> {
        let mut chosen = ChosenRows {
            choices: vec![None; num_rows],
            screening: vec![ScreenCounts::default(); num_entries],
            logit_rows: vec![None; num_rows],
        };
        let RowGroup { rows, masked, .. } = &self.greedy;
        if !rows.is_empty() {
            let choices = target.choose(device, rows, masked, scores)?;
            self.greedy.note(&choices, &mut chosen);
        }
        // Last, so that its logits are those that can be read afterwards.
        let RowGroup {
            rows,
            masked,
            samplers,
            ..
        } = &self.dense;
        if !rows.is_empty() {
            let choices = target.choose_with_logits(device, rows, masked, samplers)?;
            self.dense.note(&choices, &mut chosen);
            for (i, &row) in rows.iter().enumerate() {
                chosen.logit_rows[row as usize] = Some(i);
            }
        }
        Ok(chosen)
    }
}

/// How the token after the row at `position` is drawn.
fn sampler(request: &Request, position: usize) -> RowSampler {
    match &request.sampling {
        None => RowSampler::GREEDY,
        Some(sampling) => RowSampler {
            temperature: sampling.temperature,
            top_k: sampling.top_k,
            top_p: sampling.top_p,
            min_p: sampling.min_p,
            seed: request.noise_seed,
            position: position as u32,
        },
    }
}

/// Rows that go through the LM head together.
#[derive(Default)]
struct RowGroup<'a> {
    rows: Vec<u32>,
    /// Ids that each row may not choose.
    masked: Vec<&'a [u32]>,
    samplers: Vec<RowSampler>,
    entries: Vec<usize>,
    decides: Vec<bool>,
}

impl RowGroup<'_> {
    /// Spreads the rows' choices over the rows of the pass, and their counts over the entries of the batch.
    fn note(&self, choices: &TokenChoices, chosen: &mut ChosenRows) {
        for (i, &row) in self.rows.iter().enumerate() {
            let logit = choices.logits[i];
            chosen.choices[row as usize] = self.decides[i].then(|| match logit.is_finite() {
                true => Choice::Token(choices.token_ids[i]),
                false => Choice::NotFinite(logit),
            });
            chosen.screening[self.entries[i]].add(choices.screening[i]);
        }
    }
}
