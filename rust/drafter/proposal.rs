//! What a drafter proposes for one request: lists of candidates, each list the possible children of some node.
//!
//! Out of every drafter, into tree growth. The first list follows the anchor token; a candidate links to the list of
//! its own children, if it has one. Marginals are one list per depth to which all candidates before it link, selector
//! scores one list per candidate before it, a beam one list per node it expanded, so growth sees one thing. No device
//! memory, no drafter names; cleared and filled again each step without allocating.

/// A list of candidates, by the order in which it was added.
pub type ListId = u32;

/// Marks a candidate without children.
const NO_LIST: ListId = ListId::MAX;

/// A place in a list.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Candidate {
    /// The list.
    pub list: ListId,
    /// Index in it.
    pub slot: usize,
}

/// The candidates of one list.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Children<'a> {
    /// Distinct token ids; an index is a *slot*, the lower of two equally likely ones counts first.
    pub token_ids: &'a [u32],
    /// Their log-probabilities given the parent, natural and at most 0, in any order.
    pub log_probs: &'a [f32],
}

/// Where a list's parts start. Lists of one level share tokens and links.
#[derive(Clone, Copy, Debug, PartialEq)]
struct ListParts {
    first_token: usize,
    first_link: usize,
    first_log_prob: usize,
    len: usize,
}

/// Candidates of one request. The default proposes nothing.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Proposal {
    lists: Vec<ListParts>,
    token_ids: Vec<u32>,
    links: Vec<ListId>,
    log_probs: Vec<f32>,
}

impl Proposal {
    /// Forgets all candidates and keeps the memory.
    pub fn clear(&mut self) {
        self.lists.clear();
        self.token_ids.clear();
        self.links.clear();
        self.log_probs.clear();
    }

    /// Adds a list of candidates that follow `parent` (the anchor token when `None`, which only the first list does).
    ///
    /// # Panics
    /// When the two slices differ in length or `parent` is no candidate.
    pub fn push_list(
        &mut self,
        parent: Option<Candidate>,
        token_ids: &[u32],
        log_probs: &[f32],
    ) -> ListId {
        assert_eq!(token_ids.len(), log_probs.len(), "one score per candidate");
        assert_eq!(
            parent.is_none(),
            self.lists.is_empty(),
            "one list follows the anchor"
        );
        let list = self.push_tokens(token_ids, 1);
        self.log_probs.extend_from_slice(log_probs);
        if let Some(parent) = parent {
            self.link(parent, list);
        }
        list
    }

    /// Adds the candidates of the next position. Scores are `[num_parents, candidates]`: one row for all candidates of
    /// the position before when `num_parents` is 1, else one for each of them.
    ///
    /// # Panics
    /// When the sizes do not fit together or the position before was not added by this function.
    pub fn push_level(&mut self, token_ids: &[u32], log_probs: &[f32], num_parents: usize) {
        assert_eq!(
            token_ids.len() * num_parents,
            log_probs.len(),
            "one score per parent and candidate"
        );
        let above = self.lists.last().copied();
        let first = self.push_tokens(token_ids, num_parents);
        self.log_probs.extend_from_slice(log_probs);
        let Some(above) = above else {
            assert_eq!(num_parents, 1, "one list follows the anchor");
            return;
        };
        assert!(
            num_parents == 1 || num_parents == above.len,
            "one row per candidate before"
        );
        for slot in 0..above.len {
            let row = if num_parents == 1 { 0 } else { slot };
            self.links[above.first_link + slot] = first + row as ListId;
        }
    }

    /// Lists over the same tokens, whose scores the caller adds.
    fn push_tokens(&mut self, token_ids: &[u32], num_lists: usize) -> ListId {
        let first = self.lists.len();
        let parts = |i: usize| ListParts {
            first_token: self.token_ids.len(),
            first_link: self.links.len(),
            first_log_prob: self.log_probs.len() + i * token_ids.len(),
            len: token_ids.len(),
        };
        self.lists.extend((0..num_lists).map(parts));
        self.token_ids.extend_from_slice(token_ids);
        self.links
            .resize(self.links.len() + token_ids.len(), NO_LIST);
        first as ListId
    }

    /// Makes `children` the list below `parent`; several candidates may share one.
    ///
    /// # Panics
    /// When there is no such candidate or list, or the list does not come after the candidate's.
    pub fn link(&mut self, parent: Candidate, children: ListId) {
        assert!(
            parent.list < children && (children as usize) < self.lists.len(),
            "lists come in order"
        );
        let parts = self.lists[parent.list as usize];
        assert!(parent.slot < parts.len, "a candidate of its list");
        self.links[parts.first_link + parent.slot] = children;
    }

    /// The list that follows the anchor token, if anything is proposed.
    pub fn first_list(&self) -> Option<ListId> {
        (!self.lists.is_empty()).then_some(0)
    }

    /// The candidates of `list`.
    pub fn children(&self, list: ListId) -> Children<'_> {
        let parts = &self.lists[list as usize];
        Children {
            token_ids: &self.token_ids[parts.first_token..][..parts.len],
            log_probs: &self.log_probs[parts.first_log_prob..][..parts.len],
        }
    }

    /// The likeliest tokens of each position, at most `most`, best first. A token counts by the best path that ends in
    /// it (ties: the one seen first). For showing: it allocates.
    pub fn likeliest_by_position(&self, most: usize) -> Vec<Vec<u32>> {
        // Per list the position of its candidates and the score of the best path to it; parents come first.
        let mut reached: Vec<Option<(usize, f64)>> = vec![None; self.lists.len()];
        if let Some(first) = reached.first_mut() {
            *first = Some((0, 0.0));
        }
        let mut positions: Vec<Vec<(u32, f64)>> = Vec::new();
        for list in 0..self.lists.len() {
            let Some((position, score)) = reached[list] else {
                continue;
            };
            positions.resize_with(positions.len().max(position + 1), Vec::new);
            let children = self.children(list as ListId);
            for (slot, &token_id) in children.token_ids.iter().enumerate() {
                let score = score + f64::from(children.log_probs[slot]);
                match positions[position].iter_mut().find(|t| t.0 == token_id) {
                    Some(seen) => seen.1 = seen.1.max(score),
                    None => positions[position].push((token_id, score)),
                }
                let at = Candidate {
                    list: list as ListId,
                    slot,
                };
                if let Some(below) = self.below(at) {
                    let best = reached[below as usize].map_or(score, |(_, best)| best.max(score));
                    reached[below as usize] = Some((position + 1, best));
                }
            }
        }
        let best_first = |mut tokens: Vec<(u32, f64)>| {
            tokens.retain(|t| t.1 > f64::NEG_INFINITY);
            tokens.sort_by(|a, b| b.1.total_cmp(&a.1));
            tokens.into_iter().take(most).map(|t| t.0).collect()
        };
        positions.into_iter().map(best_first).collect()
    }

    /// The list below a candidate, if it has children.
    pub fn below(&self, parent: Candidate) -> Option<ListId> {
        let parts = &self.lists[parent.list as usize];
        let list = self.links[parts.first_link + parent.slot];
        (list != NO_LIST).then_some(list)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(list: ListId, slot: usize) -> Candidate {
        Candidate { list, slot }
    }

    #[test]
    fn conditional_levels_have_a_list_per_parent_and_marginal_ones_share() {
        let mut proposal = Proposal::default();
        assert_eq!(proposal.first_list(), None);
        proposal.push_level(&[7, 9], &[-0.5, -1.0], 1);
        proposal.push_level(&[4, 5, 6], &[-1.0, -2.0, -3.0, -4.0, -5.0, -6.0], 2);
        proposal.push_level(&[8], &[-0.25], 1);
        let first = proposal.first_list().unwrap();
        assert_eq!(proposal.children(first).log_probs, [-0.5, -1.0]);
        let below = [0, 1].map(|slot| proposal.below(at(first, slot)).unwrap());
        assert_ne!(below[0], below[1]);
        assert_eq!(proposal.children(below[1]).token_ids, [4, 5, 6]);
        assert_eq!(proposal.children(below[1]).log_probs, [-4.0, -5.0, -6.0]);
        let last = proposal.below(at(below[1], 2)).unwrap();
        assert_eq!(proposal.below(at(below[0], 0)), Some(last));
        assert_eq!(proposal.children(last).token_ids, [8]);
        assert_eq!(proposal.below(at(last, 0)), None);
    }

    #[test]
    fn tokens_of_a_position_count_by_their_best_path() {
        let mut proposal = Proposal::default();
        assert!(proposal.likeliest_by_position(4).is_empty());
        proposal.push_level(&[7, 9], &[-1.0, -0.5], 1);
        // Below 7: 4 at -1.25 in all, 5 at -6; below 9: 4 at -8.5, 5 at -1.5, and 6 is impossible after both.
        let impossible = f32::NEG_INFINITY;
        let scores = [-0.25, -5.0, impossible, -8.0, -1.0, impossible];
        proposal.push_level(&[4, 5, 6], &scores, 2);
        proposal.push_level(&[8, 3], &[-2.0, -2.0], 1);
        let wanted: [&[u32]; 3] = [&[9, 7], &[4, 5], &[8, 3]];
        assert_eq!(proposal.likeliest_by_position(4), wanted);
        let firsts: [&[u32]; 3] = [&[9], &[4], &[8]];
        assert_eq!(proposal.likeliest_by_position(1), firsts);
    }

    #[test]
    fn beams_link_the_nodes_they_expand() {
        let mut proposal = Proposal::default();
        let first = proposal.push_list(None, &[3, 1], &[-0.1, -2.5]);
        let below = proposal.push_list(Some(at(first, 1)), &[5], &[0.0]);
        assert_eq!(proposal.below(at(first, 0)), None);
        assert_eq!(proposal.below(at(first, 1)), Some(below));
        proposal.link(at(first, 0), below);
        assert_eq!(proposal.below(at(first, 0)), Some(below));
        proposal.clear();
        assert_eq!(proposal, Proposal::default());
    }
}
