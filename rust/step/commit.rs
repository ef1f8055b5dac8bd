//! Commit stage: accepted rows to the caches, tokens to the requests, records and counters. Everything not accepted
//! is simply not committed: the pass changed the caches for prompt rows alone, all of which are accepted.

use std::time::Instant;

use crate::drafter::{ContextRows, Standing};
use crate::error::Result;
use crate::kernels::paths::num_settled_rows;
use crate::request::{DecodePass, DraftOffer, Drafts, Request, ScreenCounts, State};

use super::decode_step::ModelPair;
use super::stage_times::Stage;
use super::tree::TokenTree;
use super::types::{
    Accepted, AcceptedPath, BatchEntry, Committed, CommittedEntry, RowRecords, Work,
};

/// Commits every entry's path.
///
/// # Errors
/// Whatever a kernel or the drafter refuses.
pub fn commit(
    pair: &mut ModelPair,
    requests: &mut [Request],
    accepted: Accepted,
) -> Result<Committed> {
    let Accepted {
        batch,
        trees,
        accepted,
        screening,
        records,
    } = accepted;
    let ModelPair {
        device,
        target,
        caches,
        committed_rows,
        clock,
        ..
    } = pair;
    committed_rows.clear();
    for (entry, path) in batch.entries.iter().zip(&accepted) {
        // Others are in the caches since the pass.
        let num_settled = num_settled_rows(path.rows.len());
        let first_position = entry.committed_len + num_settled;
        let (pages, rows) = (caches.pages(entry.slot), &path.rows[num_settled..]);
        committed_rows.push(entry.slot, first_position, pages, rows.iter().copied())?;
    }
    committed_rows.finish(device)?;
    target.commit(device, caches, committed_rows)?;
    clock.lap(device, Stage::Commit)?;
    let mut entries = Vec::with_capacity(accepted.len());
    let entries_of_batch = batch.entries.iter().zip(&trees).zip(screening);
    for (((entry, tree), screening), path) in entries_of_batch.zip(accepted) {
        let ModelPair {
            device,
            target,
            drafter,
            ..
        } = pair;
        if let (Some(drafter), None) = (drafter, path.finish) {
            // A path starts at its tree's root.
            let in_tree = |row: &u32| (row - path.rows[0]) as usize;
            let token_ids: Vec<u32> = path
                .rows
                .iter()
                .map(|row| tree.token_ids[in_tree(row)])
                .collect();
            let rows = ContextRows {
                slot: entry.slot,
                first_position: entry.committed_len,
                taps: target.taps(),
                rows: &path.rows,
                token_ids: &token_ids,
                standing: Standing::Verified,
            };
            drafter.rollback(entry.slot);
            drafter.extend(device, target.lent(), rows)?;
        }
        let request = &mut requests[entry.index];
        if let Some(records) = &records {
            record_rows(request, entry, &path.rows, records, pair);
        }
        update(request, entry, tree, &path, screening);
        if path.finish.is_some() && request.record_from.is_some() {
            let state = pair.caches.gdn_state(entry.slot, request.committed_len);
            request.record.gdn_state = state?;
        }
        entries.push(CommittedEntry {
            index: entry.index,
            new_token_ids: path.new_token_ids,
            finish: path.finish,
        });
    }
    pair.workspace.spare_trees.extend(trees);
    Ok(Committed { entries })
}

fn update(
    request: &mut Request,
    entry: &BatchEntry,
    tree: &TokenTree,
    path: &AcceptedPath,
    screening: ScreenCounts,
) {
    let now = Instant::now();
    request.committed_len += path.rows.len();
    request.token_ids.extend_from_slice(&path.new_token_ids);
    match entry.work {
        Work::Prompt { .. } => {
            request.num_prompt_passes += 1;
            request.prompt_screening.add(screening);
        }
        Work::Decode { .. } => request.passes.push(DecodePass {
            anchor_position: entry.committed_len,
            num_draft_tokens: tree.token_ids.len() - 1,
            draft_depth: tree.max_depth(),
            num_accepted: path.num_accepted,
            num_emitted: path.new_token_ids.len(),
            screening,
            num_q_passes: entry.num_q_passes,
            num_marked: entry.num_marked,
            drafts: entry.offer.as_ref().map(|offer| drafts_of(tree, offer)),
        }),
    }
    if !path.new_token_ids.is_empty() {
        request.first_token.get_or_insert(now);
    }
    request.failure = path.failure;
    if let Some(reason) = path.finish {
        request.state = State::Finished(reason);
        request.finished = Some(now);
    }
}

fn drafts_of(tree: &TokenTree, offer: &DraftOffer) -> Drafts {
    Drafts {
        token_ids: tree.token_ids[1..].to_vec(),
        // Row 0 is the root, so a parent of a draft is the root or draft number row - 1.
        parents: tree.parents[1..]
            .iter()
            .map(|parent| parent.and_then(|row| row.checked_sub(1)))
            .collect(),
        offer: offer.clone(),
    }
}

fn record_rows(
    request: &mut Request,
    entry: &BatchEntry,
    rows: &[u32],
    records: &RowRecords,
    pair: &ModelPair,
) {
    let Some(from) = request.record_from else {
        return;
    };
    let config = pair.target.config();
    let (vocab_size, hidden_size) = (config.vocab_size, config.hidden_size);
    for (i, &row) in rows.iter().enumerate() {
        let row = row as usize;
        if entry.committed_len + i < from {
            continue;
        }
        let Some(logit_row) = records.logit_rows[row] else {
            continue;
        };
        let record = &mut request.record;
        record.num_rows += 1;
        record
            .logits
            .extend_from_slice(&records.logits[logit_row * vocab_size..][..vocab_size]);
        record
            .residual_l2
            .extend(records.probe.residual_l2.iter().map(|norms| norms[row]));
        record.final_norm_l2.push(records.probe.final_norm_l2[row]);
        record.last_residuals = records
            .probe
            .residuals
            .iter()
            .flat_map(|rows| &rows[row * hidden_size..][..hidden_size])
            .copied()
            .collect();
    }
}
