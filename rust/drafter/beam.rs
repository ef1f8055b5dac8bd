//! The nodes that a drafter expands, depth by depth, for all requests of a call.
//!
//! A drafter that pays for every parent expands only the likeliest: per request and depth the `width` best candidates
//! by their score from the anchor. In: the children of all current nodes, one row each. Out: lists in the proposals and
//! the next depth's nodes. Ties go to the candidate seen first. Where scores depend on no more than the token before
//! (`Merging::ByToken`), candidates of one token are one node, and all of them link to its list.

use super::proposal::{Candidate, Proposal};

/// Which candidates of a depth are one node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Merging {
    /// Those of one token.
    ByToken,
    /// None: a path is more than its last token.
    Never,
}

/// A node to expand: a row of the drafter's next forward.
#[derive(Clone, Copy, Debug)]
pub(super) struct BeamNode {
    /// Which of the call's requests.
    pub(super) request: usize,
    /// Its token.
    pub(super) token_id: u32,
    /// Row of the node above it, in the forward before; its own for an anchor.
    pub(super) parent_row: usize,
    score: f64,
    /// Logarithm of the estimated chance that the path down to it is accepted.
    log_confidence: f64,
    /// Where it stands in the proposal; `None` for an anchor.
    place: Option<Candidate>,
}

/// The likeliest children of each row.
pub(super) struct RankedRows<'a> {
    pub(super) top_k: usize,
    /// `[rows, top_k]`.
    pub(super) token_ids: &'a [u32],
    /// `[rows, top_k]`.
    pub(super) log_probs: &'a [f32],
}

/// Nodes of the current depth.
#[derive(Debug)]
pub(super) struct Beam {
    merging: Merging,
    nodes: Vec<BeamNode>,
    /// All candidates of the current depth, of which `nodes` are the best.
    candidates: Vec<BeamNode>,
    /// Candidates of the next depth.
    coming: Vec<BeamNode>,
}

impl Beam {
    pub(super) fn new(merging: Merging) -> Self {
        Self {
            merging,
            nodes: Vec::new(),
            candidates: Vec::new(),
            coming: Vec::new(),
        }
    }

    /// Starts from the anchor tokens of requests, given in ascending order.
    pub(super) fn start(&mut self, anchors: impl Iterator<Item = (usize, u32)>) {
        self.nodes.clear();
        self.candidates.clear();
        let anchor = |(row, (request, token_id))| BeamNode {
            request,
            token_id,
            parent_row: row,
            score: 0.0,
            log_confidence: 0.0,
            place: None,
        };
        self.nodes.extend(anchors.enumerate().map(anchor));
    }

    /// The nodes to expand, request by request.
    pub(super) fn nodes(&self) -> &[BeamNode] {
        &self.nodes
    }

    /// Gives up nodes whose children are unlikely to be accepted: `log_confidences` holds, per node, the logarithm of
    /// the chance that a child of it is, given that the node is.
    pub(super) fn give_up(&mut self, log_confidences: &[f32], log_min: f64) {
        for (node, &log_confidence) in self.nodes.iter_mut().zip(log_confidences) {
            node.log_confidence += f64::from(log_confidence);
        }
        self.nodes.retain(|node| node.log_confidence >= log_min);
    }

    /// Adds the children of all nodes to the proposals and goes on to the `width` best of each request.
    pub(super) fn advance(
        &mut self,
        proposals: &mut [Proposal],
        children: &RankedRows<'_>,
        width: usize,
    ) {
        self.coming.clear();
        let rows = children
            .token_ids
            .chunks_exact(children.top_k)
            .zip(children.log_probs.chunks_exact(children.top_k));
        for (row, (node, (token_ids, log_probs))) in self.nodes.iter().zip(rows).enumerate() {
            let proposal = &mut proposals[node.request];
            let list = proposal.push_list(node.place, token_ids, log_probs);
            if self.merging == Merging::ByToken {
                for twin in self.candidates.iter().filter(|c| is_twin(c, node)) {
                    twin.place
                        .into_iter()
                        .for_each(|place| proposal.link(place, list));
                }
            }
            let child = |(slot, (&token_id, &log_prob)): (usize, (&u32, &f32))| BeamNode {
                request: node.request,
                token_id,
                parent_row: row,
                score: node.score + f64::from(log_prob),
                log_confidence: node.log_confidence,
                place: Some(Candidate { list, slot }),
            };
            self.coming
                .extend(token_ids.iter().zip(log_probs).enumerate().map(child));
        }
        std::mem::swap(&mut self.candidates, &mut self.coming);
        self.nodes.clear();
        for candidates in self.candidates.chunk_by_mut(|a, b| a.request == b.request) {
            let order_seen = |node: &BeamNode| node.place.map(|place| (place.list, place.slot));
            candidates.sort_unstable_by(|a, b| {
                let by_score = b.score.total_cmp(&a.score);
                by_score.then_with(|| order_seen(a).cmp(&order_seen(b)))
            });
            let first = self.nodes.len();
            for candidate in candidates.iter() {
                if self.nodes.len() - first == width {
                    break;
                }
                let is_new = self.merging == Merging::Never
                    || !self.nodes[first..]
                        .iter()
                        .any(|node| is_twin(candidate, node));
                if is_new {
                    self.nodes.push(*candidate);
                }
            }
        }
    }
}

/// Whether two nodes of one depth hold the same token of the same request.
fn is_twin(a: &BeamNode, b: &BeamNode) -> bool {
    (a.request, a.token_id) == (b.request, b.token_id)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn advance(beam: &mut Beam, proposals: &mut [Proposal], rows: &[&[(u32, f32)]], width: usize) {
        let token_ids: Vec<u32> = rows.concat().iter().map(|c| c.0).collect();
        let log_probs: Vec<f32> = rows.concat().iter().map(|c| c.1).collect();
        let children = RankedRows {
            top_k: rows[0].len(),
            token_ids: &token_ids,
            log_probs: &log_probs,
        };
        beam.advance(proposals, &children, width);
    }

    fn tokens(beam: &Beam) -> Vec<(usize, u32, usize)> {
        let seen = |node: &BeamNode| (node.request, node.token_id, node.parent_row);
        beam.nodes().iter().map(seen).collect()
    }

    #[test]
    fn the_best_of_each_request_go_on() {
        let mut beam = Beam::new(Merging::Never);
        let mut proposals = vec![Proposal::default(); 2];
        beam.start([(0, 7), (1, 8)].into_iter());
        assert_eq!(tokens(&beam), [(0, 7, 0), (1, 8, 1)]);
        let rows: [&[(u32, f32)]; 2] = [&[(1, -0.5), (2, -1.0)], &[(3, -0.25), (4, -2.0)]];
        advance(&mut beam, &mut proposals, &rows, 2);
        assert_eq!(tokens(&beam), [(0, 1, 0), (0, 2, 0), (1, 3, 1), (1, 4, 1)]);
        let rows: [&[(u32, f32)]; 4] = [
            &[(5, -1.0), (6, -2.0)],
            &[(5, -0.5), (9, -0.75)],
            &[(5, 0.0), (6, -9.0)],
            &[(5, 0.0), (6, -9.0)],
        ];
        advance(&mut beam, &mut proposals, &rows, 2);
        // Equal scores -1.5 of request 0: the one seen first leads.
        assert_eq!(tokens(&beam), [(0, 5, 0), (0, 5, 1), (1, 5, 2), (1, 5, 3)]);
    }

    #[test]
    fn unlikely_paths_are_given_up() {
        let mut beam = Beam::new(Merging::Never);
        let mut proposals = vec![Proposal::default(); 2];
        beam.start([(0, 7), (1, 8)].into_iter());
        beam.give_up(&[-0.5, -0.25], -1.0);
        let rows: [&[(u32, f32)]; 2] = [&[(1, -0.5)], &[(3, -0.25)]];
        advance(&mut beam, &mut proposals, &rows, 1);
        beam.give_up(&[-0.75, -0.75], -1.0);
        assert_eq!(tokens(&beam), [(1, 3, 1)]);
        advance(&mut beam, &mut proposals, &[&[(5, -1.0)]], 1);
        assert_eq!(tokens(&beam), [(1, 5, 0)]);
        beam.give_up(&[-0.75], -1.0);
        assert!(beam.nodes().is_empty());
    }

    #[test]
    fn equal_tokens_share_a_list_where_nothing_else_counts() {
        let mut beam = Beam::new(Merging::ByToken);
        let mut proposals = vec![Proposal::default()];
        beam.start([(0, 7)].into_iter());
        advance(&mut beam, &mut proposals, &[&[(1, -0.5), (2, -1.0)]], 2);
        advance(
            &mut beam,
            &mut proposals,
            &[&[(5, -1.0), (6, -3.0)], &[(9, -2.0), (5, -0.25)]],
            2,
        );
        assert_eq!(tokens(&beam), [(0, 5, 1), (0, 9, 1)]);
        advance(&mut beam, &mut proposals, &[&[(3, 0.0)], &[(4, 0.0)]], 2);
        let [proposal] = &proposals[..] else {
            panic!("one request")
        };
        let below = |list, slot| proposal.below(Candidate { list, slot });
        let [under_1, under_2] = [0, 1].map(|slot| below(0, slot).unwrap());
        assert_eq!(below(under_1, 0), below(under_2, 1));
        assert!(below(under_1, 0).is_some() && below(under_1, 1).is_none());
        assert_eq!(proposal.children(below(under_2, 0).unwrap()).token_ids, [4]);
    }
}
