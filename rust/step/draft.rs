//! Draft stage: asks the drafter once for all entries that have something to gain.

use crate::drafter::proposal::Proposal;
use crate::drafter::{DraftAnchor, DraftRequest};
use crate::error::Result;
use crate::options::speculation::{SpeculationPlan, TreePlan};
use crate::request::{Request, State};

use super::decode_step::ModelPair;
use super::types::{Batch, Committed, Proposals, Stems, Work};

/// The rows that every entry brings along: a prompt chunk or the anchor token.
pub fn stems(pair: &mut ModelPair, batch: Batch) -> Stems {
    let has_drafter = pair.drafter.is_some();
    let spare_trees = &mut pair.workspace.spare_trees;
    let (stems, is_open) = batch
        .entries
        .iter()
        .map(|entry| {
            let mut stem = spare_trees.pop().unwrap_or_default();
            match &entry.work {
                Work::Prompt { token_ids, .. } => {
                    stem.set_chain(token_ids);
                    (stem, false)
                }
                Work::Decode {
                    anchor_token,
                    max_rows,
                    max_draft_tokens,
                } => {
                    stem.reset(*anchor_token);
                    let is_open = has_drafter && *max_rows > 1 && *max_draft_tokens > 0;
                    (stem, is_open)
                }
            }
        })
        .unzip();
    Stems {
        batch,
        stems,
        is_open,
    }
}

/// What `plan` asks of a drafter.
fn wanted(plan: &TreePlan) -> DraftRequest {
    DraftRequest {
        num_draft_tokens: plan.num_draft_tokens,
        scores: plan.scores,
        width: plan.width,
        min_confidence: plan.min_confidence,
    }
}

/// Lets a GPU draft for the next step while the host delivers this one's tokens, where one request runs: of several,
/// it is not known who comes next with whom.
///
/// # Errors
/// Whatever the drafter's kernels refuse.
pub fn start_next(
    pair: &mut ModelPair,
    plan: &SpeculationPlan,
    requests: &[Request],
    committed: &Committed,
) -> Result<()> {
    let (Some(drafter), [entry]) = (&mut pair.drafter, &committed.entries[..]) else {
        return Ok(());
    };
    let request = &requests[entry.index];
    let State::Running { slot } = request.state else {
        return Ok(());
    };
    // Trees of one row draft nothing.
    if plan.pass_rows() < 2
        || requests.len() > 1
        || request.in_prompt()
        || request.num_tokens_left() < 2
    {
        return Ok(());
    }
    let anchor = DraftAnchor {
        slot,
        token_id: request.token_ids[request.committed_len],
        position: request.committed_len,
    };
    let target = pair.target.lent();
    drafter.start(&pair.device, target, &[anchor], wanted(&plan.trees[0]))
}

/// Proposes what follows every open stem. The proposals stay in the pair's workspace.
///
/// # Errors
/// Whatever the drafter's kernels refuse.
pub fn propose(pair: &mut ModelPair, plan: &TreePlan, stems: Stems) -> Result<Proposals> {
    let Stems {
        batch,
        stems,
        is_open,
    } = stems;
    let mut anchors = Vec::new();
    let places = batch
        .entries
        .iter()
        .zip(&stems)
        .zip(is_open)
        .map(|((entry, stem), is_open)| {
            let end = stem.num_rows() - 1;
            is_open.then(|| {
                anchors.push(DraftAnchor {
                    slot: entry.slot,
                    token_id: stem.token_ids[end],
                    position: entry.committed_len + end,
                });
                anchors.len() - 1
            })
        })
        .collect();
    let kept = &mut pair.workspace.proposals;
    kept.resize_with(kept.len().max(anchors.len()), Proposal::default);
    if let (Some(drafter), false) = (&mut pair.drafter, anchors.is_empty()) {
        let target = pair.target.lent();
        let proposals = &mut kept[..anchors.len()];
        drafter.propose(&pair.device, target, &anchors, wanted(plan), proposals)?;
    }
    Ok(Proposals {
        batch,
        stems,
        places,
    })
}
