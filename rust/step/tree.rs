//! Token trees and how they grow: [`Proposal`] in, the rows of one verification pass out.
//!
//! A node's score is the sum of its edges' log-probabilities. One best-first search serves marginals (DDTree) and
//! parent-conditional scores: pop the best node, push its next sibling under the same parent and its own best child.
//! Both come after it in (score, rank tuple) order, so nodes leave the heap in exactly that order: the tree is the
//! top-N set, every prefix of it is the best smaller tree, parents come first and no node appears twice.
//! Pure functions of the proposal: nothing here depends on time, threads or other requests.

use std::cmp::Ordering;
use std::collections::{BinaryHeap, HashMap};
use std::rc::Rc;
use std::str::FromStr;

use crate::drafter::proposal::Proposal;
use crate::error::OptionError;

/// Rows of one request in a verification pass: row 0 is the anchor token, every other row a drafted token.
#[derive(Clone, Debug, PartialEq)]
pub struct TokenTree {
    /// Token of each row.
    pub token_ids: Vec<u32>,
    /// Row before each row; `None` for row 0 only. Parents come first.
    pub parents: Vec<Option<usize>>,
    /// Drafted tokens on the path to each row, itself included; 0 for row 0. Row r stands at anchor position + depth.
    pub depths: Vec<usize>,
    /// Sum of log-probabilities from the root, non-increasing along every path (and over rows, when grown best-first).
    pub scores: Vec<f64>,
}

impl TokenTree {
    /// The tree of plain decoding: the anchor token alone.
    pub fn root(anchor_token: u32) -> Self {
        Self {
            token_ids: vec![anchor_token],
            parents: vec![None],
            depths: vec![0],
            scores: vec![0.0],
        }
    }

    /// The chain of given tokens: a prompt chunk, every node of which is accepted.
    pub fn chain(token_ids: &[u32]) -> Self {
        Self {
            token_ids: token_ids.to_vec(),
            parents: (0..token_ids.len())
                .map(|row: usize| row.checked_sub(1))
                .collect(),
            depths: (0..token_ids.len()).collect(),
            scores: vec![0.0; token_ids.len()],
        }
    }

    /// The row below `parent` that holds `token_id`, if there is one.
    pub fn child(&self, parent: usize, token_id: u32) -> Option<usize> {
        (parent + 1..self.num_rows())
            .find(|&row| self.parents[row] == Some(parent) && self.token_ids[row] == token_id)
    }

    /// Length of the longest branch below the root.
    pub fn max_depth(&self) -> usize {
        self.depths.iter().copied().max().unwrap_or(0)
    }

    /// Number of rows, root included.
    pub fn num_rows(&self) -> usize {
        self.token_ids.len()
    }

    /// Appends a row below `parent` and returns its index.
    fn push(&mut self, parent: usize, token_id: u32, score: f64) -> usize {
        self.token_ids.push(token_id);
        self.parents.push(Some(parent));
        self.depths.push(self.depths[parent] + 1);
        self.scores.push(score);
        self.token_ids.len() - 1
    }
}

/// How a tree grows from a proposal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TreePolicy {
    /// The greedy walk: each token is the best child of the one before.
    Chain,
    /// Best-first over marginals (DDTree).
    DdTree,
    /// Best-first over parent-conditional scores.
    Conditional,
}

impl TreePolicy {
    /// All policies, in the order errors list them.
    pub const ALL: [Self; 3] = [Self::Chain, Self::DdTree, Self::Conditional];

    /// The option value that selects this policy.
    pub fn name(self) -> &'static str {
        match self {
            Self::Chain => "chain",
            Self::DdTree => "ddtree",
            Self::Conditional => "conditional",
        }
    }
}

impl FromStr for TreePolicy {
    type Err = OptionError;

    fn from_str(name: &str) -> Result<Self, OptionError> {
        Self::ALL
            .into_iter()
            .find(|policy| policy.name() == name)
            .ok_or_else(|| OptionError::Value {
                option: "tree",
                expected: format!(
                    "one of {}",
                    Self::ALL.map(|p| format!("{:?}", p.name())).join(", ")
                ),
                got: format!("{name:?}"),
            })
    }
}

/// Grows a tree of at most `tree_nodes` rows (root included; 0 counts as 1), fewer when the proposal runs out.
///
/// Which scores the proposal holds is the caller's request to the drafter: [`TreePolicy::DdTree`] and
/// [`TreePolicy::Conditional`] are the same search over different lists.
pub fn grow(
    policy: TreePolicy,
    anchor_token: u32,
    proposal: &Proposal,
    tree_nodes: usize,
) -> TokenTree {
    let mut tree = TokenTree::root(anchor_token);
    let ranked = RankedChildren::new(proposal);
    match policy {
        TreePolicy::Chain => grow_chain(&mut tree, ranked, tree_nodes),
        TreePolicy::DdTree | TreePolicy::Conditional => {
            grow_best_first(&mut tree, ranked, tree_nodes)
        }
    }
    tree
}

fn grow_chain(tree: &mut TokenTree, mut ranked: RankedChildren<'_>, tree_nodes: usize) {
    let (mut parent, mut parent_slot, mut score) = (0, 0, 0.0);
    while tree.num_rows() < tree_nodes {
        let Some(child) = ranked.child(tree.num_rows() - 1, parent_slot, 0) else {
            return;
        };
        score += child.log_prob;
        parent = tree.push(parent, child.token_id, score);
        parent_slot = child.slot;
    }
}

fn grow_best_first(tree: &mut TokenTree, mut ranked: RankedChildren<'_>, tree_nodes: usize) {
    let mut heap = BinaryHeap::new();
    let root = Parent {
        row: 0,
        slot: 0,
        score: 0.0,
        ranks: Rc::from([]),
    };
    heap.extend(ranked.node(root, 0));
    while tree.num_rows() < tree_nodes {
        let Some(best) = heap.pop() else { return };
        let row = tree.push(best.parent.row, best.child.token_id, best.score);
        let as_parent = Parent {
            row,
            slot: best.child.slot,
            score: best.score,
            ranks: best.ranks().collect(),
        };
        heap.extend(ranked.node(best.parent, best.rank + 1));
        heap.extend(ranked.node(as_parent, 0));
    }
}

#[derive(Clone, Copy)]
struct Child {
    slot: usize,
    token_id: u32,
    log_prob: f64,
}

/// Children of a parent, best first (ties: lowest slot). A list is sorted when its parent is first expanded, so the
/// cost follows the tree's size and not the proposal's.
struct RankedChildren<'a> {
    proposal: &'a Proposal,
    lists: HashMap<(usize, usize), Vec<Child>>,
}

impl<'a> RankedChildren<'a> {
    fn new(proposal: &'a Proposal) -> Self {
        Self {
            proposal,
            lists: HashMap::new(),
        }
    }

    /// The child of rank `rank` at `depth` below the candidate in `parent_slot`, if there is one.
    fn child(&mut self, depth: usize, parent_slot: usize, rank: usize) -> Option<Child> {
        let level = self.proposal.levels.get(depth)?;
        let parent_slot = if level.num_parents == 1 {
            0
        } else {
            parent_slot
        };
        let list = self.lists.entry((depth, parent_slot)).or_insert_with(|| {
            let mut list: Vec<Child> = self
                .proposal
                .children(depth, parent_slot)
                .iter()
                .zip(&level.token_ids)
                .enumerate()
                .map(|(slot, (&log_prob, &token_id))| Child {
                    slot,
                    token_id,
                    // The search is exact only while scores fall along a path.
                    log_prob: f64::from(log_prob.min(0.0)),
                })
                .collect();
            list.sort_by(|a, b| b.log_prob.total_cmp(&a.log_prob).then(a.slot.cmp(&b.slot)));
            list
        });
        list.get(rank).copied()
    }

    fn node(&mut self, parent: Parent, rank: usize) -> Option<Node> {
        let child = self.child(parent.ranks.len(), parent.slot, rank)?;
        Some(Node {
            score: parent.score + child.log_prob,
            parent,
            rank,
            child,
        })
    }
}

/// A row already in the tree, as the heap's entries below it see it.
#[derive(Clone)]
struct Parent {
    row: usize,
    slot: usize,
    score: f64,
    ranks: Rc<[usize]>,
}

struct Node {
    parent: Parent,
    rank: usize,
    child: Child,
    score: f64,
}

impl Node {
    /// Ranks from the root's child down to this node: its name, and the tie-breaker.
    fn ranks(&self) -> impl Iterator<Item = usize> {
        self.parent.ranks.iter().copied().chain([self.rank])
    }
}

impl Ord for Node {
    /// Greater pops first: higher score, then lexicographically smaller rank tuple.
    fn cmp(&self, other: &Self) -> Ordering {
        self.score
            .total_cmp(&other.score)
            .then_with(|| other.ranks().cmp(self.ranks()))
    }
}

impl PartialOrd for Node {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl PartialEq for Node {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other).is_eq()
    }
}

impl Eq for Node {}

#[cfg(test)]
mod tests;
