//! Draft stage: asks the drafter once for all entries that have something to gain.

use crate::drafter::proposal::Proposal;
use crate::drafter::{DraftAnchor, DraftRequest};
use crate::error::Result;
use crate::options::speculation::TreePlan;

use super::decode_step::ModelPair;
use super::types::{Batch, BatchEntry, Proposals, Work};

/// Proposes continuations of every decode entry with room for more than its root. The proposals stay in the pair's
/// workspace.
///
/// # Errors
/// Whatever the drafter's kernels refuse.
pub fn propose(pair: &mut ModelPair, plan: &TreePlan, batch: Batch) -> Result<Proposals> {
    let mut anchors = Vec::new();
    let mut places = vec![None; batch.entries.len()];
    if pair.drafter.is_some() {
        for (entry, place) in batch.entries.iter().zip(&mut places) {
            if let Some(anchor) = anchor(entry) {
                *place = Some(anchors.len());
                anchors.push(anchor);
            }
        }
    }
    let kept = &mut pair.workspace.proposals;
    kept.resize_with(kept.len().max(anchors.len()), Proposal::default);
    if let (Some(drafter), false) = (&mut pair.drafter, anchors.is_empty()) {
        let wanted = DraftRequest {
            num_draft_tokens: plan.num_draft_tokens,
            scores: plan.scores,
            width: plan.width,
            min_confidence: plan.min_confidence,
        };
        let target = pair.target.weights();
        let proposals = &mut kept[..anchors.len()];
        drafter.propose(&pair.device, target, &anchors, wanted, proposals)?;
    }
    Ok(Proposals { batch, places })
}

/// The anchor of an entry that may verify more than its root.
fn anchor(entry: &BatchEntry) -> Option<DraftAnchor> {
    match entry.work {
        Work::Decode {
            anchor_token,
            max_rows,
            max_draft_tokens,
        } if max_rows > 1 && max_draft_tokens > 0 => Some(DraftAnchor {
            slot: entry.slot,
            token_id: anchor_token,
            position: entry.committed_len,
        }),
        _ => None,
    }
}
