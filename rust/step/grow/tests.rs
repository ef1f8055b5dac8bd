//! Growth against brute force: enumerate every node of a small proposal, sort, compare.

use std::collections::HashSet;

use proptest::prelude::*;

use super::*;
use crate::options::speculation::{DraftScores, VerifyCosts};

/// A node by enumeration.
#[derive(Clone, Debug)]
struct Enumerated {
    score: f64,
    ranks: Vec<usize>,
    tokens: Vec<u32>,
}

/// Slots of a list, best first.
fn ranking(log_probs: &[f32]) -> Vec<usize> {
    let mut slots: Vec<usize> = (0..log_probs.len()).collect();
    slots.sort_by(|&a, &b| {
        log_probs[b]
            .partial_cmp(&log_probs[a])
            .unwrap()
            .then(a.cmp(&b))
    });
    slots
}

/// All nodes down to `max_depth`, best first.
fn enumerate(proposal: &Proposal, max_depth: usize) -> Vec<Enumerated> {
    fn descend(
        proposal: &Proposal,
        parent: &Enumerated,
        list: Option<ListId>,
        max_depth: usize,
        out: &mut Vec<Enumerated>,
    ) {
        let Some(list) = list.filter(|_| parent.ranks.len() < max_depth) else {
            return;
        };
        let children = proposal.children(list);
        for (rank, slot) in ranking(children.log_probs).into_iter().enumerate() {
            let mut node = parent.clone();
            node.score += f64::from(children.log_probs[slot]);
            node.ranks.push(rank);
            node.tokens.push(children.token_ids[slot]);
            let below = proposal.below(Candidate { list, slot });
            descend(proposal, &node, below, max_depth, out);
            out.push(node);
        }
    }
    let root = Enumerated {
        score: 0.0,
        ranks: vec![],
        tokens: vec![],
    };
    let mut nodes = vec![];
    descend(
        proposal,
        &root,
        proposal.first_list(),
        max_depth,
        &mut nodes,
    );
    nodes.sort_by(|a, b| {
        b.score
            .partial_cmp(&a.score)
            .unwrap()
            .then_with(|| a.ranks.cmp(&b.ranks))
    });
    nodes
}

/// Drafted tokens from the root to `row`.
fn path(tree: &TokenTree, mut row: usize) -> Vec<u32> {
    let mut tokens = vec![];
    while let Some(parent) = tree.parents[row] {
        tokens.push(tree.token_ids[row]);
        row = parent;
    }
    tokens.reverse();
    tokens
}

fn paths(tree: &TokenTree) -> Vec<Vec<u32>> {
    (1..tree.num_rows()).map(|row| path(tree, row)).collect()
}

fn plan(policy: TreePolicy, width: usize) -> TreePlan {
    TreePlan {
        policy,
        tree_nodes: 64,
        num_draft_tokens: 8,
        scores: DraftScores::Conditional,
        width,
        min_confidence: 0.0,
        verify_costs: None,
    }
}

fn grow(policy: TreePolicy, proposal: &Proposal, max_rows: usize) -> TokenTree {
    grow_with(&plan(policy, 2), proposal, max_rows, 8)
}

fn grow_with(plan: &TreePlan, proposal: &Proposal, max_rows: usize, max_depth: usize) -> TokenTree {
    let mut tree = TokenTree::default();
    let limits = GrowthLimits {
        num_rows_above: 0,
        max_rows,
        max_depth,
    };
    TreeGrower::default().grow(plan, 7, proposal, limits, &mut tree);
    tree
}

/// Log-probabilities that are multiples of 1/4 (0 included), so that equal scores are common and sums exact.
fn log_probs(len: usize) -> impl Strategy<Value = Vec<f32>> {
    prop::collection::vec(
        (0..12_u8).prop_map(|quarters| -f32::from(quarters) / 4.0),
        len,
    )
}

/// Proposals of up to four positions; every position's tokens are its own.
fn levels(conditional: bool) -> impl Strategy<Value = Proposal> {
    prop::collection::vec(1..=3_usize, 0..=4).prop_flat_map(move |widths| {
        let parents = |depth: usize| match depth {
            0 => 1,
            _ if conditional => widths[depth - 1],
            _ => 1,
        };
        let scores: Vec<_> = (0..widths.len())
            .map(|depth| log_probs(parents(depth) * widths[depth]))
            .collect();
        let num_parents: Vec<_> = (0..widths.len()).map(parents).collect();
        scores.prop_map(move |scores| {
            let mut proposal = Proposal::default();
            for (depth, scores) in scores.iter().enumerate() {
                let width = scores.len() / num_parents[depth];
                let tokens: Vec<u32> = (0..width as u32)
                    .map(|slot| 100 * depth as u32 + slot)
                    .collect();
                proposal.push_level(&tokens, scores, num_parents[depth]);
            }
            proposal
        })
    })
}

/// Proposals in which some nodes have lists of their own and others have none, as a beam leaves them.
fn sparse() -> impl Strategy<Value = Proposal> {
    prop::collection::vec(
        (any::<prop::sample::Index>(), 1..=3_usize, log_probs(3)),
        1..12,
    )
    .prop_map(|lists| {
        let mut proposal = Proposal::default();
        let mut childless: Vec<Candidate> = vec![];
        for (i, (place, width, scores)) in lists.into_iter().enumerate() {
            let parent = (i > 0).then(|| childless.swap_remove(place.index(childless.len())));
            let tokens: Vec<u32> = (0..width as u32)
                .map(|slot| 100 * i as u32 + slot)
                .collect();
            let list = proposal.push_list(parent, &tokens, &scores[..width]);
            childless.extend((0..width).map(|slot| Candidate { list, slot }));
        }
        proposal
    })
}

fn any_proposal() -> impl Strategy<Value = Proposal> {
    prop_oneof![levels(false), levels(true), sparse()]
}

fn best_first() -> impl Strategy<Value = TreePolicy> {
    prop::sample::select(vec![TreePolicy::DdTree, TreePolicy::Conditional])
}

fn any_policy() -> impl Strategy<Value = TreePolicy> {
    prop::sample::select(TreePolicy::ALL.to_vec())
}

/// The greedy walk by sorting.
fn walk(proposal: &Proposal, max_len: usize) -> Vec<u32> {
    let (mut tokens, mut list) = (vec![], proposal.first_list());
    while let Some(id) = list.filter(|_| tokens.len() < max_len) {
        let children = proposal.children(id);
        let slot = ranking(children.log_probs)[0];
        tokens.push(children.token_ids[slot]);
        list = proposal.below(Candidate { list: id, slot });
    }
    tokens
}

proptest! {
    #[test]
    fn best_first_is_the_sorted_enumeration(
        policy in best_first(), proposal in any_proposal(), max_rows in 1..40_usize, max_depth in 0..5_usize,
    ) {
        let tree = grow_with(&plan(policy, 2), &proposal, max_rows, max_depth);
        let best = enumerate(&proposal, max_depth);
        prop_assert_eq!(tree.num_rows(), max_rows.min(best.len() + 1));
        prop_assert_eq!((tree.token_ids[0], tree.parents[0], tree.depths[0]), (7, None, 0));
        for (row, node) in (1..tree.num_rows()).zip(&best) {
            prop_assert_eq!(path(&tree, row), &node.tokens[..]);
            prop_assert_eq!(tree.scores[row], node.score);
        }
    }

    #[test]
    fn a_chain_is_the_greedy_walk(proposal in any_proposal(), max_rows in 1..8_usize) {
        let tree = grow(TreePolicy::Chain, &proposal, max_rows);
        prop_assert_eq!(&tree.token_ids[1..], &walk(&proposal, max_rows - 1)[..]);
        let parents: Vec<_> = (0..tree.num_rows()).map(|row: usize| row.checked_sub(1)).collect();
        prop_assert_eq!(tree.parents, parents);
    }

    /// The walk, then the best of what is left: every remaining node's parent comes before it in that order.
    #[test]
    fn a_spine_is_the_walk_and_the_best_of_the_rest(proposal in any_proposal(), max_rows in 1..40_usize) {
        let spine = walk(&proposal, 8);
        let mut wanted: Vec<Vec<u32>> = (1..=spine.len()).map(|len| spine[..len].to_vec()).collect();
        let rest = enumerate(&proposal, 8).into_iter().map(|node| node.tokens);
        wanted.extend(rest.filter(|tokens| !spine.starts_with(tokens)));
        wanted.truncate(max_rows - 1);
        prop_assert_eq!(paths(&grow(TreePolicy::Spine, &proposal, max_rows)), wanted);
    }

    /// Beams by sorting whole depths, then the best of all that they saw.
    #[test]
    fn eagle_keeps_the_best_that_its_beams_saw(
        proposal in any_proposal(), max_rows in 1..40_usize, width in 1..4_usize,
    ) {
        struct Node { score: f64, tokens: Vec<u32>, below: Option<ListId> }
        let mut beam = vec![Node { score: 0.0, tokens: vec![], below: proposal.first_list() }];
        let mut seen: Vec<(f64, Vec<u32>)> = vec![];
        for _ in 0..8 {
            let mut coming = vec![];
            for node in &beam {
                let Some(list) = node.below else { continue };
                let children = proposal.children(list);
                for slot in ranking(children.log_probs).into_iter().take(width) {
                    coming.push(Node {
                        score: node.score + f64::from(children.log_probs[slot]),
                        tokens: [&node.tokens[..], &[children.token_ids[slot]]].concat(),
                        below: proposal.below(Candidate { list, slot }),
                    });
                }
            }
            seen.extend(coming.iter().map(|node| (node.score, node.tokens.clone())));
            coming.sort_by(|a, b| b.score.partial_cmp(&a.score).unwrap());
            coming.truncate(width);
            beam = coming;
        }
        let mut order: Vec<usize> = (0..seen.len()).collect();
        order.sort_by(|&a, &b| seen[b].0.partial_cmp(&seen[a].0).unwrap());
        order.truncate(max_rows - 1);
        order.sort_unstable();
        let wanted: Vec<_> = order.into_iter().map(|i| seen[i].1.clone()).collect();
        let tree = grow_with(&plan(TreePolicy::Eagle, width), &proposal, max_rows, 8);
        prop_assert_eq!(paths(&tree), wanted);
    }

    #[test]
    fn every_prefix_is_the_smaller_tree(
        policy in any_policy(), proposal in any_proposal(), max_rows in 1..40_usize, fewer in 1..40_usize,
    ) {
        // EAGLE's rows come in the order in which its beams saw them, so its smaller trees are subsets only.
        let [large, small] = [max_rows, fewer.min(max_rows)].map(|rows| grow(policy, &proposal, rows));
        if policy == TreePolicy::Eagle {
            let all: HashSet<_> = paths(&large).into_iter().collect();
            prop_assert!(paths(&small).iter().all(|path| all.contains(path)));
        } else {
            prop_assert_eq!(&large.token_ids[..small.num_rows()], &small.token_ids[..]);
            prop_assert_eq!(&large.parents[..small.num_rows()], &small.parents[..]);
        }
    }

    #[test]
    fn trees_are_well_formed(policy in any_policy(), proposal in any_proposal(), max_rows in 1..40_usize) {
        let tree = grow(policy, &proposal, max_rows);
        prop_assert!(tree.num_rows() <= max_rows);
        let mut edges = HashSet::new();
        for row in 1..tree.num_rows() {
            let parent = tree.parents[row].expect("only row 0 has no parent");
            prop_assert!(parent < row, "parents first");
            prop_assert_eq!(tree.depths[row], tree.depths[parent] + 1);
            prop_assert!(tree.scores[row] <= tree.scores[parent], "scores do not rise along a path");
            prop_assert!(edges.insert((parent, tree.token_ids[row])), "siblings are distinct");
        }
    }

    /// A used grower and a used tree give what fresh ones give.
    #[test]
    fn nothing_is_left_of_the_tree_before(
        policies in [any_policy(), any_policy()], proposals in [any_proposal(), any_proposal()],
    ) {
        let (mut grower, mut tree) = (TreeGrower::default(), TokenTree::default());
        let limits = GrowthLimits { num_rows_above: 0, max_rows: 20, max_depth: 8 };
        for (policy, proposal) in policies.into_iter().zip(&proposals) {
            grower.grow(&plan(policy, 2), 7, proposal, limits, &mut tree);
            prop_assert_eq!(&tree, &grow(policy, proposal, 20));
        }
    }

    /// With costs, best-first trees are those of the size that commits most per cost, among all sizes.
    #[test]
    fn costs_choose_the_best_size(
        policy in any_policy(), proposal in any_proposal(), costs in prop::collection::vec(1..20_u8, 12),
    ) {
        let costs: Vec<f64> = costs.into_iter().map(f64::from).collect();
        let with_costs = TreePlan {
            verify_costs: Some(VerifyCosts::new(costs.clone()).unwrap()),
            ..plan(policy, 2)
        };
        let tree = grow_with(&with_costs, &proposal, 12, 8);
        let rate = |rows: usize| {
            let tree = grow(policy, &proposal, rows);
            tree.scores.iter().map(|score| score.exp()).sum::<f64>() / costs[tree.num_rows() - 1]
        };
        let best = (1..=12).map(rate).fold(0.0, f64::max);
        prop_assert!((rate(tree.num_rows()) - best).abs() < 1e-12);
        prop_assert_eq!(&tree, &grow(policy, &proposal, tree.num_rows()));
    }
}

#[test]
fn conditional_scores_pick_children_by_their_parent() {
    let mut proposal = Proposal::default();
    proposal.push_level(&[1, 2], &[-0.4, -1.1], 1);
    proposal.push_level(&[3, 4], &[-3.0, -0.1, -0.1, -3.0], 2);
    let tree = grow(TreePolicy::Conditional, &proposal, 5);
    assert_eq!(tree.token_ids, [7, 1, 4, 2, 3]);
    assert_eq!(tree.parents, [None, Some(0), Some(1), Some(0), Some(3)]);
}

#[test]
fn without_a_proposal_the_tree_is_its_root() {
    for policy in TreePolicy::ALL {
        let tree = grow(policy, &Proposal::default(), 32);
        assert_eq!((tree.token_ids, tree.parents), (vec![7], vec![None]));
    }
}

#[test]
fn paths_end_where_a_pass_allows_no_longer_ones() {
    let mut proposal = Proposal::default();
    for token in 0..70 {
        proposal.push_level(&[token], &[-0.01], 1);
    }
    let long = TreePlan {
        tree_nodes: 100,
        ..plan(TreePolicy::Chain, 2)
    };
    assert_eq!(
        grow_with(&long, &proposal, 100, 100).max_depth(),
        MAX_PATH_ROWS - 1
    );
}
