//! Growth against brute force: enumerate every node of a small proposal, sort, compare.

use proptest::prelude::*;

use super::*;
use crate::drafter::proposal::Level;

/// A node by enumeration.
#[derive(Clone, Debug)]
struct Enumerated {
    score: f64,
    ranks: Vec<usize>,
    tokens: Vec<u32>,
}

/// Slots of a parent's children, best first.
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

fn enumerate(proposal: &Proposal) -> Vec<Enumerated> {
    fn descend(
        proposal: &Proposal,
        parent: &Enumerated,
        parent_slot: usize,
        out: &mut Vec<Enumerated>,
    ) {
        let depth = parent.ranks.len();
        if depth == proposal.num_levels() {
            return;
        }
        let log_probs = proposal.children(depth, parent_slot);
        for (rank, slot) in ranking(log_probs).into_iter().enumerate() {
            let mut node = parent.clone();
            node.score += f64::from(log_probs[slot]);
            node.ranks.push(rank);
            node.tokens.push(proposal.levels[depth].token_ids[slot]);
            descend(proposal, &node, slot, out);
            out.push(node);
        }
    }
    let root = Enumerated {
        score: 0.0,
        ranks: vec![],
        tokens: vec![],
    };
    let mut nodes = vec![];
    descend(proposal, &root, 0, &mut nodes);
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

/// Small proposals; log-probs are multiples of 1/4 (0 included) so that equal scores are common and sums exact.
fn proposals(conditional: bool) -> impl Strategy<Value = Proposal> {
    prop::collection::vec(1..=3_usize, 0..=4).prop_flat_map(move |widths| {
        let levels: Vec<_> = widths
            .iter()
            .enumerate()
            .map(|(depth, &width)| {
                let num_parents = match depth {
                    0 => 1,
                    _ if conditional => widths[depth - 1],
                    _ => 1,
                };
                prop::collection::vec(0..12_u8, num_parents * width).prop_map(move |quarters| {
                    Level {
                        token_ids: (0..width as u32)
                            .map(|slot| 100 * depth as u32 + slot)
                            .collect(),
                        log_probs: quarters.iter().map(|&q| -f32::from(q) / 4.0).collect(),
                        num_parents,
                    }
                })
            })
            .collect();
        levels.prop_map(|levels| Proposal { levels })
    })
}

fn any_proposal() -> impl Strategy<Value = (TreePolicy, Proposal)> {
    prop_oneof![
        proposals(false).prop_map(|p| (TreePolicy::DdTree, p)),
        proposals(true).prop_map(|p| (TreePolicy::Conditional, p)),
    ]
}

proptest! {
    #[test]
    fn best_first_is_the_sorted_enumeration((policy, proposal) in any_proposal(), tree_nodes in 1..40_usize) {
        let tree = grow(policy, 7, &proposal, tree_nodes);
        let best = enumerate(&proposal);
        prop_assert_eq!(tree.num_rows(), tree_nodes.min(best.len() + 1));
        prop_assert_eq!((tree.token_ids[0], tree.parents[0], tree.depths[0]), (7, None, 0));
        for (row, node) in (1..tree.num_rows()).zip(&best) {
            prop_assert_eq!(path(&tree, row), &node.tokens[..]);
            prop_assert_eq!(tree.scores[row], node.score);
            prop_assert_eq!(tree.depths[row], node.ranks.len());
        }
    }

    #[test]
    fn every_prefix_is_the_smaller_tree((policy, proposal) in any_proposal(), tree_nodes in 1..40_usize, fewer in 1..40_usize) {
        let large = grow(policy, 0, &proposal, tree_nodes);
        let small = grow(policy, 0, &proposal, fewer.min(tree_nodes));
        prop_assert_eq!(&large.token_ids[..small.num_rows()], &small.token_ids[..]);
        prop_assert_eq!(&large.parents[..small.num_rows()], &small.parents[..]);
    }

    #[test]
    fn trees_are_well_formed((policy, proposal) in any_proposal(), tree_nodes in 1..40_usize) {
        let tree = grow(policy, 0, &proposal, tree_nodes);
        let mut edges = std::collections::HashSet::new();
        for row in 1..tree.num_rows() {
            let parent = tree.parents[row].expect("only row 0 has no parent");
            prop_assert!(parent < row, "parents first");
            prop_assert_eq!(tree.depths[row], tree.depths[parent] + 1);
            prop_assert!(tree.scores[row] <= tree.scores[row - 1], "scores do not rise over rows");
            prop_assert!(tree.scores[row] <= tree.scores[parent], "nor along a path");
            prop_assert!(edges.insert((parent, tree.token_ids[row])), "siblings are distinct");
        }
    }

    #[test]
    fn a_chain_is_the_greedy_walk((_, proposal) in any_proposal(), tree_nodes in 1..8_usize) {
        let tree = grow(TreePolicy::Chain, 3, &proposal, tree_nodes);
        let (mut tokens, mut slot) = (vec![3], 0);
        for depth in 0..proposal.num_levels().min(tree_nodes - 1) {
            slot = ranking(proposal.children(depth, slot))[0];
            tokens.push(proposal.levels[depth].token_ids[slot]);
        }
        prop_assert_eq!(&tree.token_ids, &tokens);
        let parents: Vec<_> = (0..tokens.len()).map(|row: usize| row.checked_sub(1)).collect();
        prop_assert_eq!(tree.parents, parents);
    }
}

#[test]
fn conditional_scores_pick_children_by_their_parent() {
    let proposal = Proposal {
        levels: vec![
            Level {
                token_ids: vec![1, 2],
                log_probs: vec![-0.4, -1.1],
                num_parents: 1,
            },
            Level {
                token_ids: vec![3, 4],
                log_probs: vec![-3.0, -0.1, -0.1, -3.0],
                num_parents: 2,
            },
        ],
    };
    let tree = grow(TreePolicy::Conditional, 0, &proposal, 5);
    assert_eq!(tree.token_ids, [0, 1, 4, 2, 3]);
    assert_eq!(tree.parents, [None, Some(0), Some(1), Some(0), Some(3)]);
}

#[test]
fn one_node_is_plain_decoding() {
    let tree = grow(TreePolicy::DdTree, 9, &Proposal::default(), 32);
    assert_eq!(tree, TokenTree::root(9));
}

#[test]
fn policies_parse_by_name_and_unknown_ones_list_the_valid() {
    for policy in TreePolicy::ALL {
        assert_eq!(policy.name().parse::<TreePolicy>().unwrap(), policy);
    }
    for name in ["spine", "eagle", "Chain", ""] {
        let message = name.parse::<TreePolicy>().unwrap_err().to_string();
        assert!(
            message.contains(r#""chain", "ddtree", "conditional""#) && message.contains(name),
            "{message}"
        );
    }
}
