//! Verify stage: one exact forward over the rows of all trees, then the target's choice after each row that needs one.

use crate::error::Result;
use crate::kernels::lm_head_screen::HeadScores;
use crate::kernels::paths::RowPaths;
use crate::kernels::w12_matmul::WeightView;
use crate::model::decoder::ResidualProbe;
use crate::request::Request;

use super::choose::{ChosenRows, HeadRow, HeadRows};
use super::decode_step::ModelPair;
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
    let paths = forward(pair, WeightView::Exact, rows, probe.as_mut())?;

    let mut wanted = HeadRows::default();
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
    let ModelPair { device, target, .. } = pair;
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
    Ok(Verified {
        batch,
        trees,
        paths,
        choices,
        screening,
        records: probe.map(|probe| RowRecords { probe, logit_rows }),
    })
}

/// Runs the target over the rows of trees, each behind what is committed of its entry.
pub(super) fn forward<'a>(
    pair: &mut ModelPair,
    view: WeightView,
    rows: impl Iterator<Item = (&'a BatchEntry, &'a TokenTree)>,
    probe: Option<&mut ResidualProbe>,
) -> Result<RowPaths> {
    let ModelPair {
        device,
        target,
        caches,
        ..
    } = pair;
    let mut paths = RowPaths::new();
    let mut token_ids = Vec::new();
    for (entry, tree) in rows {
        paths.push_segment(entry.slot, entry.committed_len, &tree.parents)?;
        token_ids.extend_from_slice(&tree.token_ids);
    }
    for segment in paths.segments() {
        let last_position = segment.rows.clone().map(|row| paths.positions()[row]).max();
        let last_position = last_position.unwrap_or_default() as usize;
        caches.prepare(device, segment.slot, last_position)?;
    }
    target.forward(device, view, &token_ids, &paths, caches, probe)?;
    Ok(paths)
}
