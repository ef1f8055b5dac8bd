//! Tree stage: one tree per entry. A prompt chunk is the chain of its tokens.

use super::decode_step::TreePlan;
use super::tree::{self, TokenTree};
use super::types::{Proposals, TokenTrees, Work};

/// Grows the tree of every entry under its own row budget.
pub fn grow(plan: &TreePlan, proposals: Proposals) -> TokenTrees {
    let Proposals { batch, proposals } = proposals;
    let trees = batch
        .entries
        .iter()
        .zip(proposals)
        .map(|(entry, proposal)| match (&entry.work, proposal) {
            (Work::Prompt { token_ids, .. }, _) => TokenTree::chain(token_ids),
            (Work::Decode { anchor_token, .. }, None) => TokenTree::chain(&[*anchor_token]),
            (
                Work::Decode {
                    anchor_token,
                    max_rows,
                    max_draft_tokens,
                },
                Some(mut proposal),
            ) => {
                proposal.levels.truncate(*max_draft_tokens);
                tree::grow(plan.policy, *anchor_token, &proposal, *max_rows)
            }
        })
        .collect();
    TokenTrees { batch, trees }
}
