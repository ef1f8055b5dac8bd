//! Draft stage: asks the drafter once for all entries that have something to gain.

use crate::drafter::{DraftAnchor, DraftRequest, ScoreKind};
use crate::error::Result;

use super::decode_step::{ModelPair, TreePlan};
use super::tree::TreePolicy;
use super::types::{Batch, BatchEntry, Proposals, Work};

/// Proposes continuations of every decode entry with room for more than its root.
///
/// # Errors
/// Whatever the drafter's kernels refuse.
pub fn propose(pair: &mut ModelPair, plan: &TreePlan, batch: Batch) -> Result<Proposals> {
    let mut proposals: Vec<_> = batch.entries.iter().map(|_| None).collect();
    if let Some(drafter) = &mut pair.drafter {
        let speculating: Vec<_> = batch
            .entries
            .iter()
            .enumerate()
            .filter_map(|(i, entry)| Some((i, anchor(entry)?)))
            .collect();
        if !speculating.is_empty() {
            let anchors: Vec<_> = speculating.iter().map(|(_, anchor)| *anchor).collect();
            let wanted = DraftRequest {
                num_draft_tokens: plan.num_draft_tokens,
                scores: match plan.policy {
                    TreePolicy::Conditional => ScoreKind::Conditional,
                    TreePolicy::Chain if drafter.has_conditional_scores() => ScoreKind::Conditional,
                    TreePolicy::Chain => ScoreKind::Marginal { top_k: 1 },
                    TreePolicy::DdTree => ScoreKind::Marginal {
                        top_k: plan.tree_nodes - 1,
                    },
                },
            };
            let proposed =
                drafter.propose(&pair.device, pair.target.weights(), &anchors, wanted)?;
            for ((i, _), proposal) in speculating.into_iter().zip(proposed) {
                proposals[i] = Some(proposal);
            }
        }
    }
    Ok(Proposals { batch, proposals })
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
