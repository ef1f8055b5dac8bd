//! Verify stage: one exact forward over the rows of all trees, then the greedy choice after each row that needs one.

use crate::error::Result;
use crate::kernels::paths::RowPaths;
use crate::model::decoder::ResidualProbe;
use crate::model::head::GreedyChoices;
use crate::request::{Request, ScreenCounts};

use super::decode_step::ModelPair;
use super::types::{Choice, RowRecords, TokenTrees, Verified, Work};

/// Verifies all trees.
///
/// # Errors
/// Whatever a kernel refuses.
pub fn verify(pair: &mut ModelPair, requests: &[Request], trees: TokenTrees) -> Result<Verified> {
    let TokenTrees { batch, trees } = trees;
    let mut paths = RowPaths::new();
    let mut token_ids = Vec::new();
    for (entry, tree) in batch.entries.iter().zip(&trees) {
        paths.push_segment(entry.slot, entry.committed_len, &tree.parents)?;
        token_ids.extend_from_slice(&tree.token_ids);
    }
    for segment in paths.segments() {
        let last_position = segment.rows.clone().map(|row| paths.positions()[row]).max();
        let last_position = last_position.unwrap_or_default() as usize;
        pair.caches
            .prepare(&pair.device, segment.slot, last_position)?;
    }

    let mut probe = batch
        .entries
        .iter()
        .any(|entry| requests[entry.index].record_from.is_some())
        .then(ResidualProbe::default);
    pair.target.forward(
        &pair.device,
        &token_ids,
        &paths,
        &pair.caches,
        probe.as_mut(),
    )?;

    // Rows whose logits a caller wants to see, and rows of which only the choice matters.
    let (mut seen, mut unseen) = (HeadRows::default(), HeadRows::default());
    for (index, (entry, segment)) in batch.entries.iter().zip(paths.segments()).enumerate() {
        let request = &requests[entry.index];
        for row in segment.rows.clone() {
            let position = paths.positions()[row] as usize;
            let decides = match entry.work {
                Work::Decode { .. } => true,
                Work::Prompt { completes, .. } => {
                    completes && row + 1 == segment.rows.end && !request.is_score()
                }
            };
            let is_recorded = request.record_from.is_some_and(|from| position >= from);
            if decides || is_recorded {
                let to = if is_recorded { &mut seen } else { &mut unseen };
                to.rows.push(row as u32);
                to.masked.push(request.masked_ids(position));
                to.entries.push(index);
                to.decides.push(decides);
            }
        }
    }
    let mut row_choices = vec![None; paths.num_rows()];
    let mut logit_rows = vec![None; paths.num_rows()];
    let mut screening = vec![ScreenCounts::default(); batch.entries.len()];
    let ModelPair { device, target, .. } = pair;
    if !unseen.rows.is_empty() {
        let choices = target.choose(device, &unseen.rows, &unseen.masked)?;
        unseen.note(&choices, &mut row_choices, &mut screening);
    }
    if !seen.rows.is_empty() {
        let choices = target.choose_with_logits(device, &seen.rows, &seen.masked)?;
        seen.note(&choices, &mut row_choices, &mut screening);
        for (i, &row) in seen.rows.iter().enumerate() {
            logit_rows[row as usize] = Some(i);
        }
    }
    Ok(Verified {
        batch,
        trees,
        paths,
        choices: row_choices,
        screening,
        records: probe.map(|probe| RowRecords { probe, logit_rows }),
    })
}

/// Rows that go through the LM head together.
#[derive(Default)]
struct HeadRows<'a> {
    rows: Vec<u32>,
    /// Ids that each row may not choose.
    masked: Vec<&'a [u32]>,
    /// Index of each row's entry in the batch.
    entries: Vec<usize>,
    /// Whether the row's choice decides anything.
    decides: Vec<bool>,
}

impl HeadRows<'_> {
    /// Spreads the rows' choices over the rows of the pass, and their counts over the entries of the batch.
    fn note(
        &self,
        choices: &GreedyChoices,
        row_choices: &mut [Option<Choice>],
        screening: &mut [ScreenCounts],
    ) {
        for (i, &row) in self.rows.iter().enumerate() {
            let logit = choices.logits[i];
            row_choices[row as usize] = self.decides[i].then(|| match logit.is_finite() {
                true => Choice::Token(choices.token_ids[i]),
                false => Choice::NotFinite(logit),
            });
            screening[self.entries[i]].add(choices.screening[i]);
        }
    }
}
