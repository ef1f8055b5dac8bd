//! Tree stage: one tree per entry. A prompt chunk is the chain of its tokens.

use crate::options::speculation::TreePlan;

use super::decode_step::DraftWorkspace;
use super::grow::GrowthLimits;
use super::types::{Proposals, TokenTrees, Work};

/// Grows the tree of every entry under its own row budget.
pub fn grow(workspace: &mut DraftWorkspace, plan: &TreePlan, drafted: Proposals) -> TokenTrees {
    let Proposals { batch, places } = drafted;
    let DraftWorkspace {
        proposals,
        grower,
        spare_trees,
    } = workspace;
    let trees = batch
        .entries
        .iter()
        .zip(places)
        .map(|(entry, place)| {
            let mut tree = spare_trees.pop().unwrap_or_default();
            match (&entry.work, place) {
                (Work::Prompt { token_ids, .. }, _) => tree.set_chain(token_ids),
                (Work::Decode { anchor_token, .. }, None) => tree.reset(*anchor_token),
                (
                    Work::Decode {
                        anchor_token,
                        max_rows,
                        max_draft_tokens,
                    },
                    Some(place),
                ) => {
                    let limits = GrowthLimits {
                        max_rows: *max_rows,
                        max_depth: *max_draft_tokens,
                    };
                    grower.grow(plan, *anchor_token, &proposals[place], limits, &mut tree);
                }
            }
            tree
        })
        .collect();
    TokenTrees { batch, trees }
}
