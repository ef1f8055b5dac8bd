//! Verify stage: one exact forward over the rows of all trees, then the greedy choice after each row that needs one.

use crate::error::Result;
use crate::kernels::Kernel;
use crate::kernels::greedy_argmax::{GreedyArgmax, GreedyArgmaxArgs};
use crate::kernels::paths::RowPaths;
use crate::model::decoder::ResidualProbe;
use crate::request::Request;

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

    // Rows whose choice decides something, and rows whose logits a caller wants to see.
    let mut rows = Vec::new();
    let mut masked: Vec<&[u32]> = Vec::new();
    let mut decides = Vec::new();
    for (entry, segment) in batch.entries.iter().zip(paths.segments()) {
        let request = &requests[entry.index];
        for row in segment.rows.clone() {
            let position = paths.positions()[row] as usize;
            let chosen = match entry.work {
                Work::Decode { .. } => true,
                Work::Prompt { completes, .. } => {
                    completes && row + 1 == segment.rows.end && !request.is_score()
                }
            };
            if chosen || request.record_from.is_some_and(|from| position >= from) {
                rows.push(row as u32);
                masked.push(request.masked_ids(position));
                decides.push(chosen);
            }
        }
    }
    let mut choices = vec![0; rows.len()];
    let mut best_logits = Vec::with_capacity(rows.len());
    if !rows.is_empty() {
        let vocab_size = pair.target.config().vocab_size;
        let logits = pair.target.logits(&pair.device, &rows)?;
        GreedyArgmax::run(
            &pair.device,
            GreedyArgmaxArgs {
                logits,
                num_rows: rows.len(),
                vocab_size,
                masked: &masked,
                token_ids: &mut choices,
            },
        )?;
        best_logits.extend(
            choices
                .iter()
                .enumerate()
                .map(|(i, &choice)| logits.host()[i * vocab_size + choice as usize]),
        );
    }
    let mut row_choices = vec![None; paths.num_rows()];
    let mut logit_rows = vec![None; paths.num_rows()];
    for (i, row) in rows.into_iter().enumerate() {
        let row = row as usize;
        row_choices[row] = decides[i].then(|| match best_logits[i].is_finite() {
            true => Choice::Token(choices[i]),
            false => Choice::NotFinite(best_logits[i]),
        });
        logit_rows[row] = Some(i);
    }
    Ok(Verified {
        batch,
        trees,
        paths,
        choices: row_choices,
        records: probe.map(|probe| RowRecords { probe, logit_rows }),
    })
}
