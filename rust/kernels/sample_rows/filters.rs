//! Which ids of a row may be drawn: `min_p`, then `top_k`, then `top_p`.
//!
//! Ids are ranked by logit, the lowest id first among equals, so that every limit has one meaning. Sums of probability
//! run in the order of ids or of ranks, never in one that an algorithm happens to leave.

use std::cmp::Ordering;

use super::RowSampler;

/// Ids ranked at first when looking for a nucleus; twice as many each time they are not enough.
const FIRST_RANKED: usize = 64;

/// An id that may be drawn.
#[derive(Clone, Copy)]
pub(super) struct Candidate {
    pub(super) id: u32,
    pub(super) logit: f32,
    /// Distance below the largest logit, divided by the temperature.
    pub(super) scaled: f64,
}

impl Candidate {
    /// Probability relative to the likeliest id.
    fn weight(&self) -> f64 {
        self.scaled.exp()
    }

    fn by_rank(&self, other: &Self) -> Ordering {
        // No NaN is a candidate. Zeros of either sign are equal, as in the argmax.
        let descending = other.logit.partial_cmp(&self.logit);
        descending
            .unwrap_or(Ordering::Equal)
            .then(self.id.cmp(&other.id))
    }
}

/// The candidates that the sampler keeps, in any order.
pub(super) fn kept(
    candidates: impl Iterator<Item = Candidate>,
    sampler: &RowSampler,
) -> Vec<Candidate> {
    // Without a bound there is nothing to compute; a NaN is no number above -inf.
    let mut kept: Vec<Candidate> = match sampler.min_p {
        0.0 => candidates.filter(|c| c.logit > f32::NEG_INFINITY).collect(),
        min_p => candidates.filter(|c| c.weight() >= min_p).collect(),
    };
    if (1..kept.len()).contains(&sampler.top_k) {
        kept.select_nth_unstable_by(sampler.top_k - 1, Candidate::by_rank);
        kept.truncate(sampler.top_k);
    }
    if sampler.top_p < 1.0 {
        keep_nucleus(&mut kept, sampler.top_p);
    }
    kept
}

/// Keeps the first ranks whose probabilities reach `top_p` of all.
fn keep_nucleus(kept: &mut Vec<Candidate>, top_p: f64) {
    kept.sort_unstable_by_key(|c| c.id);
    let all: f64 = kept.iter().map(Candidate::weight).sum();
    let (mut num_ranked, mut reached) = (0, 0.0);
    while num_ranked < kept.len() {
        let end = (2 * num_ranked).max(FIRST_RANKED).min(kept.len());
        let unranked = &mut kept[num_ranked..];
        let num_new = end - num_ranked;
        if num_new < unranked.len() {
            unranked.select_nth_unstable_by(num_new, Candidate::by_rank);
        }
        unranked[..num_new].sort_unstable_by(Candidate::by_rank);
        for rank in num_ranked..end {
            reached += kept[rank].weight();
            if reached >= top_p * all {
                kept.truncate(rank + 1);
                return;
            }
        }
        num_ranked = end;
    }
}
