//! EAGLE-2's dynamic tree: a beam deepens the draft, then the best of all that it saw are kept.
//!
//! Per depth the `width` best nodes (by score from the root) are expanded into their `width` best children each. Of all
//! candidates the best by score stay, in the order in which they were seen. Ties go to the one seen first. Scores do
//! not rise along a path and parents are seen first, so a kept node's ancestors are kept.

use std::cmp::Ordering;

use crate::drafter::proposal::{Candidate, Proposal};
use crate::options::speculation::TreePlan;

use super::{GrowthLimits, TokenTree, next_child};

/// A node that the beam saw.
#[derive(Clone, Copy, Debug)]
struct Seen {
    place: Candidate,
    /// Index of the node above; `None` = the root.
    parent: Option<usize>,
    score: f64,
}

/// Memory of the beam.
#[derive(Debug, Default)]
pub(super) struct Eagle {
    seen: Vec<Seen>,
    /// Indices into `seen`, those of the nodes to expand.
    beam: Vec<usize>,
    ranked: Vec<usize>,
    /// Row of each seen node, where it is kept.
    rows: Vec<usize>,
}

impl Eagle {
    pub(super) fn grow(
        &mut self,
        plan: &TreePlan,
        proposal: &Proposal,
        limits: GrowthLimits,
        tree: &mut TokenTree,
    ) {
        self.look(proposal, plan.width, limits.max_depth);
        let Self {
            seen, ranked, rows, ..
        } = self;
        ranked.clear();
        ranked.extend(0..seen.len());
        let num_kept = limits.max_rows.saturating_sub(1);
        if num_kept < ranked.len() {
            ranked.select_nth_unstable_by(num_kept, |&a, &b| by_score(seen, a, b));
            ranked.truncate(num_kept);
        }
        if let Some(costs) = &plan.verify_costs {
            ranked.sort_unstable_by(|&a, &b| by_score(seen, a, b));
            let root = std::iter::once(0.0);
            let scores = root.chain(ranked.iter().map(|&i| seen[i].score));
            ranked.truncate(costs.best_num_rows(limits.num_rows_above, scores) - 1);
        }
        ranked.sort_unstable();
        rows.clear();
        rows.resize(seen.len(), 0);
        for &i in ranked.iter() {
            let Seen {
                place,
                parent,
                score,
            } = seen[i];
            let token_id = proposal.children(place.list).token_ids[place.slot];
            rows[i] = tree.push(parent.map_or(0, |parent| rows[parent]), token_id, score);
        }
    }

    /// Collects what the beam sees.
    fn look(&mut self, proposal: &Proposal, width: usize, max_depth: usize) {
        self.seen.clear();
        self.beam.clear();
        for depth in 0..max_depth {
            let start = self.seen.len();
            if depth == 0 {
                see(&mut self.seen, proposal, None, width);
            }
            for &parent in &self.beam {
                see(&mut self.seen, proposal, Some(parent), width);
            }
            self.beam.clear();
            self.beam.extend(start..self.seen.len());
            let seen = &self.seen;
            self.beam.sort_unstable_by(|&a, &b| by_score(seen, a, b));
            self.beam.truncate(width);
        }
    }
}

/// Adds the `width` best children of `parent`.
fn see(seen: &mut Vec<Seen>, proposal: &Proposal, parent: Option<usize>, width: usize) {
    let (list, score) = match parent {
        None => (proposal.first_list(), 0.0),
        Some(parent) => (proposal.below(seen[parent].place), seen[parent].score),
    };
    let Some(list) = list else { return };
    let log_probs = proposal.children(list).log_probs;
    let mut child = None;
    for _ in 0..width {
        child = next_child(log_probs, child);
        let Some(child) = child else { return };
        seen.push(Seen {
            place: Candidate {
                list,
                slot: child.slot,
            },
            parent,
            score: score + f64::from(child.log_prob),
        });
    }
}

/// Best first, ties in the order seen.
fn by_score(seen: &[Seen], a: usize, b: usize) -> Ordering {
    let by_score = seen[b].score.total_cmp(&seen[a].score);
    by_score.then(a.cmp(&b))
}
