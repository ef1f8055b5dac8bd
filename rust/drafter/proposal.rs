//! What a drafter proposes for one request: per depth a list of candidate tokens and how likely each is.
//!
//! Out of every drafter, into tree growth. A level either has one list of log-probabilities (marginals, whatever the
//! path before) or one per candidate of the level before (conditional on the parent); growth does not care which.
//! Depth 0 follows the anchor token, so it always has a single parent. No device memory, no drafter names.

/// The candidates for the token at `anchor position + depth + 1`.
#[derive(Clone, Debug, PartialEq)]
pub struct Level {
    /// K distinct token ids, most likely by the drafter's own ranking first; an index into them is a *slot*.
    pub token_ids: Vec<u32>,
    /// `[num_parents, K]`, natural logarithms, at most 0.
    pub log_probs: Vec<f32>,
    /// 1 when the scores do not depend on the parent, else the K of the level before.
    pub num_parents: usize,
}

/// Levels of one request, shallowest first.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Proposal {
    /// `levels[d]` proposes the token at `anchor position + d + 1`.
    pub levels: Vec<Level>,
}

impl Proposal {
    /// Number of positions proposed.
    pub fn num_levels(&self) -> usize {
        self.levels.len()
    }

    /// Log-probabilities of the candidates of `depth` after the candidate in slot `parent_slot` of the level before
    /// (any value at depth 0 and for marginals).
    ///
    /// # Panics
    /// When `depth` is not proposed or a conditional level has no such parent.
    pub fn children(&self, depth: usize, parent_slot: usize) -> &[f32] {
        let level = &self.levels[depth];
        let row = if level.num_parents == 1 {
            0
        } else {
            parent_slot
        };
        &level.log_probs[row * level.token_ids.len()..][..level.token_ids.len()]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn conditional_levels_index_by_parent_and_marginal_ones_do_not() {
        let proposal = Proposal {
            levels: vec![
                Level {
                    token_ids: vec![7, 9],
                    log_probs: vec![-0.5, -1.0],
                    num_parents: 1,
                },
                Level {
                    token_ids: vec![4, 5, 6],
                    log_probs: vec![-1.0, -2.0, -3.0, -4.0, -5.0, -6.0],
                    num_parents: 2,
                },
            ],
        };
        assert_eq!(proposal.num_levels(), 2);
        assert_eq!(proposal.children(0, 5), &[-0.5, -1.0]);
        assert_eq!(proposal.children(1, 0), &[-1.0, -2.0, -3.0]);
        assert_eq!(proposal.children(1, 1), &[-4.0, -5.0, -6.0]);
    }
}
