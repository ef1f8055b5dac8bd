//! Verify stage: one exact forward over the rows of all trees, then the target's choice after each row that needs one.

use std::ops::Range;

use crate::error::Result;
use crate::kernels::lm_head_screen::HeadScores;
use crate::kernels::w12_matmul::WeightView;
use crate::model::decoder::ResidualProbe;
use crate::request::Request;

use super::choose::{ChosenRows, HeadRow, HeadRows};
use super::decode_step::ModelPair;
use super::stage_times::Stage;
use super::tree::TokenTree;
use super::types::{BatchEntry, RowRecords, TokenTrees, Verified, Work};

/// Verifies all trees.
///
/// # Errors
/// Whatever a kernel refuses.
pub fn verify(pair: &mut ModelPair, requests: &[Request], trees: TokenTrees) -> Result<Verified> {
    let TokenTrees { batch, trees } = trees;
    let mut probe = batch
        .entries
        .iter()
        .any(|entry| requests[entry.index].record_from.is_some())
        .then(ResidualProbe::default);
    let rows = batch.entries.iter().zip(&trees);
    forward(pair, WeightView::Exact, rows, probe.as_mut())?;

    let ModelPair {
        device,
        target,
        paths,
        clock,
        ..
    } = pair;
    clock.lap(device, Stage::Forward)?;
    let mut wanted = HeadRows::default();
    let rows = rows_of(&trees);
    for (index, (entry, rows)) in batch.entries.iter().zip(&rows).enumerate() {
        let request = &requests[entry.index];
        for row in rows.clone() {
            let position = paths.position(row);
            let decides = match entry.work {
                Work::Decode { .. } => true,
                Work::Prompt { completes, .. } => {
                    completes && row + 1 == rows.end && !request.is_score()
                }
            };
            let is_recorded = request.record_from.is_some_and(|from| position >= from);
            if decides || is_recorded {
                wanted.push(HeadRow {
                    row,
                    position,
                    request,
                    entry: index,
                    decides,
                    is_recorded,
                });
            }
        }
    }
    let num_entries = batch.entries.len();
    let ChosenRows {
        choices,
        screening,
        logit_rows,
    } = wanted.choose(
        device,
        target,
        paths.num_rows(),
        num_entries,
        HeadScores::Logits,
    )?;
    let records = match probe {
        None => None,
        Some(probe) => {
            let num_rows = logit_rows.iter().flatten().count();
            let config = target.config();
            let logits = target.last_logits();
            let mut logits = logits.read_back(num_rows * config.vocab_size)?;
            config.logit_shape.apply_to(&mut logits);
            Some(RowRecords {
                probe,
                logits,
                logit_rows,
            })
        }
    };
    clock.lap(device, Stage::Head)?;
    Ok(Verified {
        batch,
        trees,
        rows,
        choices,
        screening,
        records,
    })
}

/// Rows of each tree in a pass over all of them.
fn rows_of(trees: &[TokenTree]) -> Vec<Range<usize>> {
    let mut end = 0;
    let rows = trees.iter().map(|tree| {
        let start = end;
        end += tree.num_rows();
        start..end
    });
    rows.collect()
}

/// Runs the target over the rows of trees, each behind what is committed of its entry; leaves them in `pair.paths`.
pub(super) fn forward<'a>(
    pair: &mut ModelPair,
    view: WeightView,
    rows: impl Iterator<Item = (&'a BatchEntry, &'a TokenTree)>,
    probe: Option<&mut ResidualProbe>,
) -> Result<()> {
    let ModelPair {
        device,
        target,
        caches,
        paths,
        ..
    } = pair;
    paths.clear();
    let mut token_ids = Vec::new();
    for (entry, tree) in rows {
        let (slot, first, pages) = (entry.slot, entry.committed_len, caches.pages(entry.slot));
        match entry.work {
            Work::Prompt { .. } => paths.push_prompt(slot, first, pages, tree.num_rows())?,
            Work::Decode { .. } => paths.push_segment(slot, first, pages, &tree.parents)?,
        }
        token_ids.extend_from_slice(&tree.token_ids);
    }
    let num_padding = paths.pad(device);
    token_ids.resize(token_ids.len() + num_padding, 0);
    paths.finish(device)?;
    caches.prepare(device, paths)?;
    target.forward(device, view, &token_ids, paths, caches, probe)
}
