//! Tree stage: every stem grows by its proposal.

use crate::drafter::proposal::Proposal;
use crate::kernels::paths::MAX_PATH_ROWS;
use crate::options::speculation::TreePlan;
use crate::request::DraftOffer;

use super::decode_step::DraftWorkspace;
use super::grow::{GrowthLimits, TreeGrower};
use super::tree::TokenTree;
use super::types::{Proposals, TokenTrees, Work};

/// Candidates of a position that are shown to callers who ask for drafts: as many as DFlash2's selector chooses among.
const SHOWN_CANDIDATES: usize = 16;

/// Grows the tree of every entry under its own row budget.
pub fn grow(workspace: &mut DraftWorkspace, plan: &TreePlan, drafted: Proposals) -> TokenTrees {
    let Proposals {
        mut batch,
        stems: mut trees,
        places,
    } = drafted;
    let DraftWorkspace {
        proposals,
        grower,
        branches,
        ..
    } = workspace;
    for ((entry, tree), place) in batch.entries.iter_mut().zip(&mut trees).zip(places) {
        if let Some(offer) = &mut entry.offer {
            *offer = place.map_or_else(DraftOffer::default, |place| {
                offer_of(&proposals[place], grower, branches)
            });
        }
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

/// What a proposal holds, whatever tree it is grown to; `walk` is lent memory.
fn offer_of(proposal: &Proposal, grower: &mut TreeGrower, walk: &mut TokenTree) -> DraftOffer {
    let chain = TreePlan {
        tree_nodes: MAX_PATH_ROWS,
        ..TreePlan::PLAIN
    };
    let limits = GrowthLimits {
        num_rows_above: 0,
        max_rows: MAX_PATH_ROWS,
        max_depth: MAX_PATH_ROWS,
    };
    grower.grow(&chain, 0, proposal, limits, walk);
    DraftOffer {
        greedy_token_ids: walk.token_ids[1..].to_vec(),
        candidate_token_ids: proposal.likeliest_by_position(SHOWN_CANDIDATES),
    }
}
