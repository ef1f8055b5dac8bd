//! Right tokens at the stated rates, and what is left of a draft.

use super::*;

/// A marginal draft of 15 positions with 8 candidates each, none of them right: right tokens are 1000 and up.
fn levels() -> Vec<Vec<u32>> {
    (0..15)
        .map(|depth| (0..8).map(|slot| 10 * depth + slot).collect())
        .collect()
}

#[test]
fn profiles_are_probabilities() {
    let AcceptanceProfile {
        easy,
        hard,
        easy_share,
        ..
    } = PUBLISHED;
    for ranks in [easy, hard] {
        assert!(ranks.iter().sum::<f64>() < 1.0);
        assert!(ranks.is_sorted_by(|a, b| a > b), "ranks are ranks");
    }
    let first = easy_share * easy[0] + (1.0 - easy_share) * hard[0];
    let chain: f64 = (0..16).map(|i| first.powi(i)).sum();
    assert!((chain - 4.65).abs() < 0.02, "{chain}");
}

#[test]
fn right_tokens_come_at_the_stated_rates_and_nothing_else_moves() {
    const NUM_DRAFTS: usize = 20_000;
    let mut counts = [[0_usize; 9]; 2];
    for anchor in 0..NUM_DRAFTS {
        let place = Place { script: 0, anchor };
        for (depth, drafted) in levels().into_iter().enumerate().take(2) {
            let mut candidates = drafted.clone();
            let right = 1000 + depth as u32;
            let ranks = rewrite(&PUBLISHED, place, depth, Some(right), 2000, &mut candidates);
            let kind = usize::from(ranks == PUBLISHED.hard);
            let rank = candidates.iter().position(|&token| token == right);
            counts[kind][rank.unwrap_or(8)] += 1;
            candidates.retain(|&token| token != right);
            assert_eq!(candidates, drafted[..candidates.len()]);
        }
    }
    let num_easy: usize = counts[0].iter().sum();
    let share = num_easy as f64 / (2 * NUM_DRAFTS) as f64;
    assert!((share - PUBLISHED.easy_share).abs() < 0.015, "{share}");
    for (counts, ranks) in counts.iter().zip([PUBLISHED.easy, PUBLISHED.hard]) {
        let total = counts.iter().sum::<usize>() as f64;
        for (rank, &count) in counts[..8].iter().enumerate() {
            let expected = ranks.get(rank).copied().unwrap_or(0.0);
            let error = (count as f64 / total - expected).abs();
            let allowed = 4.0 * (expected.max(1e-4) * (1.0 - expected) / total).sqrt();
            assert!(error < allowed, "rank {rank}: {count} of {total}");
        }
    }
}

#[test]
fn a_right_guess_that_must_be_wrong_is_replaced() {
    for anchor in 0..200 {
        let place = Place { script: 3, anchor };
        let mut candidates = vec![7];
        rewrite(&PUBLISHED, place, 0, Some(7), 9, &mut candidates);
        let is_first = PUBLISHED.rank(3, anchor + 1, anchor) == Some(0);
        assert_eq!(candidates, [if is_first { 7 } else { 8 }]);
    }
}

#[test]
fn draws_are_of_the_script_the_place_and_the_anchor() {
    let ranks = |script, anchor: usize| -> Vec<_> {
        let positions = anchor + 1..anchor + 40;
        positions
            .map(|position| PUBLISHED.rank(script, position, anchor))
            .collect()
    };
    assert_eq!(ranks(0, 10), ranks(0, 10));
    assert_ne!(ranks(0, 10), ranks(1, 10));
    let shifted: Vec<_> = (12..50).map(|p| PUBLISHED.rank(0, p, 10)).collect();
    assert_ne!(shifted, ranks(0, 11)[..38]);
}

#[test]
fn scripts_go_on_where_their_text_is() {
    let scripts = Scripts::default();
    scripts.add(vec![1, 2, 3, 4]);
    scripts.add(vec![1, 2, 9]);
    scripts.add(vec![1, 2, 9]);
    let after =
        |text: &[u32]| scripts.with_continuation(text, |script, rest| (script, rest.to_vec()));
    assert_eq!(after(&[1, 2]), Some((0, vec![3, 4])));
    assert_eq!(after(&[1, 2, 9]), Some((1, vec![])));
    assert_eq!(after(&[2]), None);
}

#[test]
fn levels_of_conditional_drafts_are_read_once() {
    let mut proposal = Proposal::default();
    proposal.push_level(&[7, 9], &[-0.5, -1.0], 1);
    proposal.push_level(&[4, 5, 6], &[-1.0, -2.0, -3.0, -4.0, -5.0, -6.0], 2);
    let mut levels = vec![vec![0]; 5];
    take_levels(&proposal, &mut levels);
    assert_eq!(levels, [vec![7, 9], vec![4, 5, 6]]);
}

#[test]
fn ranks_that_are_not_stated_halve() {
    let got = log_probs(&[0.5, 0.25], 4);
    let expected = [0.5_f32, 0.25, 0.125, 0.0625].map(f32::ln);
    assert_eq!(got, expected);
}
