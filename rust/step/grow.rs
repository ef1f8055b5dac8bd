//! How trees grow: [`Proposal`] in, [`TokenTree`] out, by one of five policies.
//!
//! A node's score is the sum of its edges' log-probabilities. Best-first growth takes the best node, then offers its
//! next sibling under the same parent and its own best child. Both come after it in (score, rank tuple) order, so nodes
//! are taken in exactly that order: the tree is the top-N set, every prefix of it is the best smaller tree, parents
//! come first and no node appears twice. The greedy walk is the same with the best child alone; a spine is that walk
//! whose siblings are then on offer. Pure functions of their arguments: nothing here depends on time, threads or other
//! requests. A grower keeps its memory, so that growing allocates nothing once it has grown as large a tree.

mod eagle;

use crate::drafter::proposal::{Candidate, ListId, Proposal};
use crate::kernels::paths::MAX_PATH_ROWS;
use crate::options::speculation::{TreePlan, TreePolicy};

use super::tree::TokenTree;
use eagle::Eagle;

/// Most that a tree may have, beside the plan's own limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GrowthLimits {
    /// Rows that are verified in any case, besides the tree's: only costs ask for them.
    pub num_rows_above: usize,
    /// Rows, root included; 0 counts as 1.
    pub max_rows: usize,
    /// Drafted tokens on a path.
    pub max_depth: usize,
}

/// Grows trees and keeps the memory it needs for it.
#[derive(Debug, Default)]
pub struct TreeGrower {
    search: Search,
    eagle: Eagle,
}

impl TreeGrower {
    /// Makes `tree` the tree that `plan` grows under `anchor_token`: smaller than the limits where the proposal runs
    /// out or, with costs in the plan, where more rows do not pay.
    pub fn grow(
        &mut self,
        plan: &TreePlan,
        anchor_token: u32,
        proposal: &Proposal,
        limits: GrowthLimits,
        tree: &mut TokenTree,
    ) {
        let limits = GrowthLimits {
            num_rows_above: limits.num_rows_above,
            max_rows: limits.max_rows.min(plan.tree_nodes),
            max_depth: limits.max_depth.min(MAX_PATH_ROWS - 1),
        };
        tree.reset(anchor_token);
        match plan.policy {
            TreePolicy::Eagle => self.eagle.grow(plan, proposal, limits, tree),
            policy => {
                self.search.grow(policy, proposal, limits, tree);
                if let Some(costs) = &plan.verify_costs {
                    let scores = tree.scores.iter().copied();
                    tree.truncate(costs.best_num_rows(limits.num_rows_above, scores));
                }
            }
        }
    }
}

/// A child of a list in the order of its log-probabilities (ties: lowest slot).
#[derive(Clone, Copy, Debug)]
struct RankedChild {
    slot: usize,
    log_prob: f32,
}

/// The largest of some numbers and `least`. Several maxima in flight hide the latency of a comparison.
fn largest<T: Copy + PartialOrd>(values: impl Iterator<Item = T>, least: T) -> T {
    let larger = |a: T, b: T| if b > a { b } else { a };
    let mut lanes = [least; 8];
    for (i, value) in values.enumerate() {
        lanes[i % 8] = larger(lanes[i % 8], value);
    }
    lanes.into_iter().fold(least, larger)
}

/// The child that follows `before` in its list, the best one when `None`; one that is impossible is none. Two plain
/// passes over a list as short as a drafter's are cheaper than sorting it, and need no memory.
fn next_child(log_probs: &[f32], before: Option<RankedChild>) -> Option<RankedChild> {
    let (bound, first_slot) = match before {
        None => (f32::INFINITY, 0),
        Some(before) => (before.log_prob, before.slot + 1),
    };
    // The search is exact only while scores fall along a path.
    let capped = |log_prob: f32| log_prob.min(0.0);
    let is_ahead = |slot: usize, log_prob: f32| {
        (log_prob < bound) | ((log_prob == bound) & (slot >= first_slot))
    };
    let ahead = |(slot, &log_prob): (usize, &f32)| {
        let log_prob = capped(log_prob);
        match is_ahead(slot, log_prob) {
            true => log_prob,
            false => f32::NEG_INFINITY,
        }
    };
    let log_prob = largest(log_probs.iter().enumerate().map(ahead), f32::NEG_INFINITY);
    if log_prob == f32::NEG_INFINITY {
        return None;
    }
    let found = |slot: &usize| capped(log_probs[*slot]) == log_prob && is_ahead(*slot, log_prob);
    let slot = (0..log_probs.len()).find(found)?;
    Some(RankedChild { slot, log_prob })
}

/// A node on offer: not in the tree, while its parent and its better siblings are.
#[derive(Clone, Copy, Debug)]
struct Offer {
    score: f64,
    parent: usize,
    rank: u32,
    list: ListId,
    child: RankedChild,
}

/// Best-first growth and its greedy special case.
#[derive(Debug, Default)]
struct Search {
    /// At most one more than the tree has rows, so the best is found by a scan.
    offers: Vec<Offer>,
    /// Score of each offer, apart from them to make that scan a short one.
    scores: Vec<f64>,
    /// Rank of each row among its siblings; 0 for the root.
    ranks: Vec<u32>,
}

impl Search {
    fn grow(
        &mut self,
        policy: TreePolicy,
        proposal: &Proposal,
        limits: GrowthLimits,
        tree: &mut TokenTree,
    ) {
        self.offers.clear();
        self.scores.clear();
        self.ranks.clear();
        self.ranks.push(0);
        let first =
            |list, row, tree: &TokenTree| first_offer(proposal, list, row, limits.max_depth, tree);
        let mut next = first(proposal.first_list(), 0, tree);
        if matches!(policy, TreePolicy::Chain | TreePolicy::Spine) {
            while let Some(offer) = next.filter(|_| tree.num_rows() < limits.max_rows) {
                let row = self.take(proposal, offer, tree);
                next = first(below(proposal, offer), row, tree);
            }
        }
        if policy == TreePolicy::Chain {
            return;
        }
        self.offer(next);
        while tree.num_rows() < limits.max_rows {
            let Some(offer) = self.pop(tree) else { return };
            let row = self.take(proposal, offer, tree);
            self.offer(first(below(proposal, offer), row, tree));
        }
    }

    /// Appends an offered node to the tree and offers its next sibling.
    fn take(&mut self, proposal: &Proposal, offer: Offer, tree: &mut TokenTree) -> usize {
        let Offer {
            score,
            parent,
            rank,
            list,
            child,
        } = offer;
        let children = proposal.children(list);
        let row = tree.push(parent, children.token_ids[child.slot], score);
        self.ranks.push(rank);
        let sibling = next_child(children.log_probs, Some(child));
        self.offer(sibling.map(|child| Offer {
            score: tree.scores[parent] + f64::from(child.log_prob),
            rank: rank + 1,
            child,
            ..offer
        }));
        row
    }

    fn offer(&mut self, offer: Option<Offer>) {
        self.offers.extend(offer);
        self.scores.extend(offer.map(|offer| offer.score));
    }

    /// Withdraws the best offer: that of the highest score or, among equal ones, of the first rank tuple.
    fn pop(&mut self, tree: &TokenTree) -> Option<Offer> {
        let best_score = largest(self.scores.iter().copied(), f64::NEG_INFINITY);
        let best = (0..self.offers.len())
            .filter(|&i| self.scores[i] == best_score)
            .reduce(|a, b| match self.precedes(b, a, tree) {
                true => b,
                false => a,
            })?;
        self.scores.swap_remove(best);
        Some(self.offers.swap_remove(best))
    }

    /// Whether the rank tuple of offer `a` comes before that of offer `b`.
    fn precedes(&self, a: usize, b: usize, tree: &TokenTree) -> bool {
        let (mut a_ranks, mut b_ranks) = ([0; MAX_PATH_ROWS], [0; MAX_PATH_ROWS]);
        self.ranks_to(&self.offers[a], tree, &mut a_ranks)
            < self.ranks_to(&self.offers[b], tree, &mut b_ranks)
    }

    /// Ranks from the root's child down to `offer`: its name.
    fn ranks_to<'a>(
        &self,
        offer: &Offer,
        tree: &TokenTree,
        ranks: &'a mut [u32; MAX_PATH_ROWS],
    ) -> &'a [u32] {
        let depth = tree.depths[offer.parent];
        ranks[depth] = offer.rank;
        let mut row = offer.parent;
        while let Some(parent) = tree.parents[row] {
            ranks[tree.depths[parent]] = self.ranks[row];
            row = parent;
        }
        &ranks[..=depth]
    }
}

/// The best child of `row`, whose children are `list`.
fn first_offer(
    proposal: &Proposal,
    list: Option<ListId>,
    row: usize,
    max_depth: usize,
    tree: &TokenTree,
) -> Option<Offer> {
    let list = list.filter(|_| tree.depths[row] < max_depth)?;
    let child = next_child(proposal.children(list).log_probs, None)?;
    Some(Offer {
        score: tree.scores[row] + f64::from(child.log_prob),
        parent: row,
        rank: 0,
        list,
        child,
    })
}

fn below(proposal: &Proposal, offer: Offer) -> Option<ListId> {
    proposal.below(Candidate {
        list: offer.list,
        slot: offer.child.slot,
    })
}

#[cfg(test)]
mod tests;
