//! How an engine speculates: tree policy, sizes, and what a pass costs.
//!
//! Plain values that drafting, growth and planning share; what options come to on a given drafter is `plan`'s work.

use std::str::FromStr;
use std::sync::Arc;

use super::MAX_TREE_NODES;
use crate::error::OptionError;

/// How a tree grows from a proposal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TreePolicy {
    /// The greedy walk: each token is the best child of the one before.
    Chain,
    /// Best-first over marginals (DDTree).
    DdTree,
    /// Best-first over parent-conditional scores.
    Conditional,
    /// The greedy walk first, then best-first around it.
    Spine,
    /// A beam per depth, then the best of all its candidates (EAGLE-2).
    Eagle,
}

impl TreePolicy {
    /// All policies, in the order errors list them.
    pub const ALL: [Self; 5] = [
        Self::Chain,
        Self::DdTree,
        Self::Conditional,
        Self::Spine,
        Self::Eagle,
    ];

    /// The option value that selects this policy.
    pub fn name(self) -> &'static str {
        match self {
            Self::Chain => "chain",
            Self::DdTree => "ddtree",
            Self::Conditional => "conditional",
            Self::Spine => "spine",
            Self::Eagle => "eagle",
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

/// How exact an LM head is where it decides nothing: in Q passes, whose choices mark a path, and in drafts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum HeadPrecision {
    /// As in exact passes.
    Exact,
    /// The INT8 copy that exact passes screen with, taken at its word.
    Int8,
}

impl HeadPrecision {
    /// What reports call it, and the value of the option `q_head`.
    pub fn name(self) -> &'static str {
        match self {
            Self::Exact => "exact",
            Self::Int8 => "int8",
        }
    }
}

/// What scores a proposal should hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DraftScores {
    /// Whatever the drafter's own chain needs.
    Greedy,
    /// The likeliest tokens of each position, whatever comes before.
    Marginal,
    /// Tokens scored given the one before them.
    Conditional,
}

/// How an engine speculates: a tree for every pass.
#[derive(Clone, Debug, PartialEq)]
pub struct SpeculationPlan {
    /// How the trees of each pass are drafted and grown, in the order of the passes and never none. The last belongs to
    /// the exact pass; those before it to Q passes, which go through the 8-bit view of the weights, mark a path, and are
    /// followed by a draft from its end.
    pub trees: Vec<TreePlan>,
    /// What greedy choices of a Q pass go by.
    pub q_head: HeadPrecision,
    /// What drafts through the target's LM head go by; `None` where none do.
    pub draft_head: Option<HeadPrecision>,
}

impl SpeculationPlan {
    /// Plain decoding.
    pub fn plain() -> Self {
        Self {
            trees: vec![TreePlan::PLAIN],
            q_head: HeadPrecision::Exact,
            draft_head: None,
        }
    }

    /// Passes through the 8-bit view before the exact one.
    pub fn q_passes(&self) -> usize {
        self.trees.len() - 1
    }

    /// Most rows that an exact pass verifies for one request: a path through each tree but the last, and that.
    pub fn pass_rows(&self) -> usize {
        let rows = self.trees.iter().map(|tree| tree.tree_nodes);
        rows.sum::<usize>().min(MAX_TREE_NODES)
    }

    /// Most positions that one draft has.
    pub fn max_draft_tokens(&self) -> usize {
        self.largest(|tree| tree.num_draft_tokens)
    }

    /// Most candidates per position of one draft.
    pub fn max_width(&self) -> usize {
        self.largest(|tree| tree.width)
    }

    fn largest(&self, of: impl Fn(&TreePlan) -> usize) -> usize {
        self.trees.iter().map(of).max().unwrap_or(0)
    }
}

/// How the trees of one pass are drafted and grown, fixed for an engine.
#[derive(Clone, Debug, PartialEq)]
pub struct TreePlan {
    /// Growth policy.
    pub policy: TreePolicy,
    /// Most rows of a tree, root included; 1 = plain decoding.
    pub tree_nodes: usize,
    /// Positions that are drafted, and so the longest path below the root. A parallel drafter's block has this many,
    /// whatever size it was trained with.
    pub num_draft_tokens: usize,
    /// Scores that the drafter is asked for.
    pub scores: DraftScores,
    /// Candidates per position; of conditional scores candidates per parent and, where each parent costs the drafter
    /// work, parents per position.
    pub width: usize,
    /// Drafts stop where a confidence head's estimate that the path is accepted so far falls below this; 0 = nowhere.
    pub min_confidence: f64,
    /// Trees stop growing where more rows stop paying; `None` = they always grow to `tree_nodes`.
    pub verify_costs: Option<VerifyCosts>,
}

impl TreePlan {
    /// Plain decoding.
    pub const PLAIN: Self = Self {
        policy: TreePolicy::Chain,
        tree_nodes: 1,
        num_draft_tokens: 0,
        scores: DraftScores::Greedy,
        width: 1,
        min_confidence: 0.0,
        verify_costs: None,
    };
}

/// Measured cost of a whole step (draft and exact pass) by the rows that it verifies.
#[derive(Clone, Debug, PartialEq)]
pub struct VerifyCosts(Arc<[f64]>);

impl VerifyCosts {
    /// `costs[i]` is the cost of `i + 1` rows, in any unit.
    ///
    /// # Errors
    /// [`OptionError::Value`] unless there is at least one and all are positive numbers.
    pub fn new(costs: Vec<f64>) -> Result<Self, OptionError> {
        if costs.is_empty() || !costs.iter().all(|cost| cost.is_finite() && *cost > 0.0) {
            return Err(OptionError::Value {
                option: "verify_costs",
                expected: "positive costs of steps with 1, 2, ... rows".to_owned(),
                got: format!("{costs:?}"),
            });
        }
        Ok(Self(costs.into()))
    }

    /// Rows that the table covers; a tree has no more.
    pub fn max_rows(&self) -> usize {
        self.0.len()
    }

    /// The costs of 1, 2, ... rows.
    pub fn of_rows(&self) -> &[f64] {
        &self.0
    }

    /// How many rows of a tree, of rows with these scores in this order (the root's first), commit most per cost, below
    /// `num_rows_above` rows that are verified in any case and taken to be accepted. A row of the tree is taken to be
    /// accepted with probability `exp(score)`. All sizes are compared, as costs have cliffs; the smallest of the best
    /// wins.
    pub fn best_num_rows(&self, num_rows_above: usize, scores: impl Iterator<Item = f64>) -> usize {
        let mut committed = num_rows_above as f64;
        let mut best = (1, 0.0);
        let costs = self.0.iter().skip(num_rows_above);
        for (i, (score, cost)) in scores.zip(costs).enumerate() {
            committed += score.exp();
            if committed / cost > best.1 {
                best = (i + 1, committed / cost);
            }
        }
        best.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn policies_parse_by_name_and_unknown_ones_list_the_valid() {
        for policy in TreePolicy::ALL {
            assert_eq!(policy.name().parse::<TreePolicy>().unwrap(), policy);
        }
        for name in ["tree", "Chain", ""] {
            let message = name.parse::<TreePolicy>().unwrap_err().to_string();
            assert!(
                message.contains(r#""chain", "ddtree", "conditional", "spine", "eagle""#)
                    && message.contains(name),
                "{message}"
            );
        }
    }

    #[test]
    fn rows_are_taken_while_they_pay() {
        // Expected tokens 1, 1.5, 1.75, 1.875.
        let scores = || [1.0_f64, 0.5, 0.25, 0.125].into_iter().map(f64::ln);
        let best = |costs: &[f64]| {
            VerifyCosts::new(costs.to_vec())
                .unwrap()
                .best_num_rows(0, scores())
        };
        assert_eq!(best(&[1.0; 4]), 4);
        assert_eq!(best(&[1.0, 2.0, 3.0, 4.0]), 1);
        assert_eq!(best(&[1.0, 1.1, 1.4, 1.6]), 2);
        // Past a cliff that more rows make up for.
        assert_eq!(best(&[1.0, 1.6, 1.6, 1.6]), 4);
        assert_eq!(best(&[1.0, 1.0]), 2);
        // Two rows above: the cheap pass of two rows is none that can be had.
        let costs = VerifyCosts::new(vec![1.0, 1.0, 9.0, 9.0, 9.0, 99.0]).unwrap();
        assert_eq!(costs.best_num_rows(2, scores()), 3);
    }

    #[test]
    fn costs_must_be_positive_numbers() {
        for costs in [
            vec![],
            vec![0.0],
            vec![1.0, -1.0],
            vec![f64::NAN],
            vec![f64::INFINITY],
        ] {
            assert!(VerifyCosts::new(costs).is_err());
        }
    }
}
