//! Tree stage: every stem grows by its proposal.

use crate::options::speculation::TreePlan;

use super::decode_step::DraftWorkspace;
use super::grow::GrowthLimits;
use super::types::{Proposals, TokenTrees, Work};

/// Grows the tree of every entry under its own row budget.
pub fn grow(workspace: &mut DraftWorkspace, plan: &TreePlan, drafted: Proposals) -> TokenTrees {
    let Proposals {
        batch,
        stems: mut trees,
        places,
    } = drafted;
    let DraftWorkspace {
        proposals,
        grower,
        branches,
        ..
    } = workspace;
    for ((entry, tree), place) in batch.entries.iter().zip(&mut trees).zip(places) {
        let (
            Some(place),
            Work::Decode {
                max_rows,
                max_draft_tokens,
                ..
            },
        ) = (place, &entry.work)
        else {
            continue;
        };
        let end = tree.num_rows() - 1;
        let limits = GrowthLimits {
            num_rows_above: end,
            max_rows: max_rows - end,
            max_depth: max_draft_tokens - end,
        };
        grower.grow(
            plan,
            tree.token_ids[end],
            &proposals[place],
            limits,
            branches,
        );
        tree.graft(branches);
    }
    TokenTrees { batch, trees }
}
