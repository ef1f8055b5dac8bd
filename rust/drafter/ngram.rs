//! Prompt lookup: what followed the last tokens when they stood in the text before is what may follow now.
//!
//! No weights. The longest suffix of the text, from `max` down to `min` tokens, that occurs earlier is looked up; the
//! texts after its latest occurrences, newest first, are the draft. They share their common beginnings; a token's
//! probability given the path before it is its share of the texts that go on from there and one more that was never
//! seen. The newest text alone is the chain.

use super::context_length::ContextLength;
use super::footprint::DrafterSizes;
use super::proposal::{Candidate, Proposal};
use super::{ContextRows, DraftAnchor, DraftRequest, Drafter, check_length};
use crate::device::Device;
use crate::error::{DrafterError, OptionError, Result};
use crate::model::Lent;
use crate::options::PromptLookup;
use crate::options::speculation::DraftScores;

/// Draft length when nothing is said.
pub(super) const USUAL_DRAFT_TOKENS: usize = 10;

/// Suffix lengths when nothing is said: one token repeats too often to tell anything.
const USUAL_MIN: usize = 2;
const USUAL_MAX: usize = 5;

/// Longest suffix that may be asked for.
const LONGEST: usize = 64;

/// Suffix lengths to look up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NgramConfig {
    /// Shortest.
    pub min: usize,
    /// Longest.
    pub max: usize,
}

impl NgramConfig {
    /// The lengths that options come to.
    ///
    /// # Errors
    /// [`OptionError::Value`] unless `1 <= min <= max <= 64`.
    pub fn resolve(options: PromptLookup) -> Result<Self, OptionError> {
        let max = options
            .max
            .unwrap_or(USUAL_MAX.max(options.min.unwrap_or(0)));
        let min = options.min.unwrap_or(USUAL_MIN.min(max));
        let refuse = |option, expected: String, got: usize| {
            Err(OptionError::Value {
                option,
                expected,
                got: got.to_string(),
            })
        };
        if !(1..=LONGEST).contains(&max) {
            return refuse("prompt_lookup_max", format!("1..={LONGEST}"), max);
        }
        if !(1..=max).contains(&min) {
            return refuse(
                "prompt_lookup_min",
                format!("1..={max} (prompt_lookup_max)"),
                min,
            );
        }
        Ok(Self { min, max })
    }

    pub(super) fn description(&self) -> String {
        format!(
            "prompt lookup of the last {} to {} tokens",
            self.min, self.max
        )
    }
}

/// Prompt lookup over the texts of all slots.
pub(super) struct Ngram {
    config: NgramConfig,
    sizes: DrafterSizes,
    slots: Vec<Slot>,
    /// The texts that a draft is made of: where each goes on in its slot, newest first.
    places: Vec<usize>,
}

#[derive(Clone, Default)]
struct Slot {
    token_ids: Vec<u32>,
    length: ContextLength,
}

impl Ngram {
    pub(super) fn new(config: NgramConfig, sizes: DrafterSizes) -> Self {
        Self {
            config,
            sizes,
            slots: vec![Slot::default(); sizes.num_slots],
            places: Vec::new(),
        }
    }
}

/// Positions after the up to `width` latest earlier occurrences of the longest suffix of `text` that has any.
fn find(text: &[u32], config: NgramConfig, width: usize, places: &mut Vec<usize>) {
    places.clear();
    let mut longest = config.min - 1;
    for end in (1..text.len()).rev() {
        let shared = text[..end].iter().rev().zip(text.iter().rev());
        let len = shared.take(config.max).take_while(|(a, b)| a == b).count();
        if len > longest {
            longest = len;
            places.clear();
        }
        if len >= config.min && len == longest && places.len() < width {
            places.push(end);
        }
        if longest == config.max && places.len() == width {
            return;
        }
    }
}

impl Drafter for Ngram {
    fn weight_bytes(&self) -> usize {
        0
    }

    fn taps(&self) -> &[usize] {
        &[]
    }

    fn reserve(&mut self, slot: usize, num_tokens: usize) -> bool {
        self.slots[slot].token_ids.reserve(num_tokens + 1);
        true
    }

    fn release(&mut self, slot: usize) {
        self.slots[slot].token_ids.clear();
        self.slots[slot].length = ContextLength::default();
    }

    fn extend(&mut self, _device: &Device, _target: Lent<'_>, rows: ContextRows<'_>) -> Result<()> {
        let slot = &mut self.slots[rows.slot];
        slot.length.check_extends(&rows)?;
        slot.token_ids.extend_from_slice(rows.token_ids);
        slot.length.grow(rows.token_ids.len(), rows.standing);
        Ok(())
    }

    fn rollback(&mut self, slot: usize) {
        let slot = &mut self.slots[slot];
        slot.length.rollback();
        slot.token_ids.truncate(slot.length.len());
    }

    fn propose(
        &mut self,
        _device: &Device,
        _target: Lent<'_>,
        anchors: &[DraftAnchor],
        wanted: DraftRequest,
        proposals: &mut [Proposal],
    ) -> Result<()> {
        check_length(wanted.num_draft_tokens, &self.sizes)?;
        let width = match wanted.scores {
            DraftScores::Greedy => 1,
            DraftScores::Conditional => wanted.width.min(self.sizes.width),
            DraftScores::Marginal => {
                return Err(DrafterError::NoScores {
                    policy: "ddtree",
                    method: "ngram",
                    scores: "position-wise",
                    usable: "\"conditional\" or \"chain\"",
                }
                .into());
            }
        };
        for (anchor, proposal) in anchors.iter().zip(proposals) {
            proposal.clear();
            let Slot { token_ids, length } = &mut self.slots[anchor.slot];
            length.check_ends_before(anchor)?;
            token_ids.push(anchor.token_id);
            find(token_ids, self.config, width, &mut self.places);
            let max_depth = wanted.num_draft_tokens;
            share(token_ids, &self.places, 0, max_depth, None, proposal);
            token_ids.pop();
        }
        Ok(())
    }
}

/// Adds what follows after the first `num_shared` tokens of the texts that start at `places`, down to `max_depth` tokens
/// below the anchor; those with the same next token go on together. A text that reaches the end goes on as the
/// repetition that it then is.
fn share(
    text: &[u32],
    places: &[usize],
    num_shared: usize,
    max_depth: usize,
    parent: Option<Candidate>,
    proposal: &mut Proposal,
) {
    if num_shared == max_depth || places.is_empty() {
        return;
    }
    let next = |place: usize| text[place + num_shared % (text.len() - place)];
    let mut token_ids = Vec::with_capacity(places.len());
    for &place in places {
        if !token_ids.contains(&next(place)) {
            token_ids.push(next(place));
        }
    }
    let going_to = |token_id: u32| {
        places
            .iter()
            .copied()
            .filter(move |&place| next(place) == token_id)
    };
    // One more text than there are: the one that goes on as none before did.
    let share_of = |&id: &u32| going_to(id).count() as f32 / (places.len() + 1) as f32;
    let log_probs: Vec<f32> = token_ids.iter().map(|id| share_of(id).ln()).collect();
    let list = proposal.push_list(parent, &token_ids, &log_probs);
    for (slot, &token_id) in token_ids.iter().enumerate() {
        let places: Vec<usize> = going_to(token_id).collect();
        let below = Some(Candidate { list, slot });
        share(text, &places, num_shared + 1, max_depth, below, proposal);
    }
}

#[cfg(test)]
mod tests {
    use super::super::proposal::ListId;
    use super::*;

    const CONFIG: NgramConfig = NgramConfig { min: 2, max: 3 };

    fn places(text: &[u32], config: NgramConfig, width: usize) -> Vec<usize> {
        let mut places = Vec::new();
        find(text, config, width, &mut places);
        places
    }

    /// All paths of a proposal with the probability of their last token, depth first.
    fn paths(text: &[u32], width: usize, max_depth: usize) -> Vec<(Vec<u32>, f32)> {
        fn descend(
            proposal: &Proposal,
            list: Option<ListId>,
            before: &[u32],
            paths: &mut Vec<(Vec<u32>, f32)>,
        ) {
            let Some(list) = list else { return };
            let children = proposal.children(list);
            for (slot, &token) in children.token_ids.iter().enumerate() {
                let path = [before, &[token]].concat();
                paths.push((path.clone(), children.log_probs[slot].exp()));
                let below = proposal.below(Candidate { list, slot });
                descend(proposal, below, &path, paths);
            }
        }
        let mut proposal = Proposal::default();
        let places = places(text, CONFIG, width);
        share(text, &places, 0, max_depth, None, &mut proposal);
        let mut all = Vec::new();
        descend(&proposal, proposal.first_list(), &[], &mut all);
        all
    }

    #[test]
    fn the_longest_suffix_wins_and_newer_occurrences_come_first() {
        let text = [1, 2, 3, 4, 9, 2, 3, 5, 1, 2, 3, 7, 8, 1, 2, 3];
        assert_eq!(places(&text, CONFIG, 8), [11, 3], "three tokens, not two");
        assert_eq!(places(&text, CONFIG, 1), [11]);
        let shorter = NgramConfig { min: 1, max: 2 };
        assert_eq!(places(&text, shorter, 8), [11, 7, 3]);
        assert!(
            places(&text[..12], CONFIG, 8).is_empty(),
            "nothing ended so"
        );
        assert!(places(&[5], CONFIG, 8).is_empty());
    }

    #[test]
    fn texts_share_their_beginning_and_split_by_count() {
        let text = [1, 2, 3, 4, 0, 1, 2, 3, 5, 0, 1, 2, 3, 4, 6, 1, 2, 3];
        let expected = [
            (vec![4], 2.0 / 4.0),
            (vec![4, 6], 1.0 / 3.0),
            (vec![4, 0], 1.0 / 3.0),
            (vec![5], 1.0 / 4.0),
            (vec![5, 0], 1.0 / 2.0),
        ];
        let got = paths(&text, 8, 2);
        assert_eq!(got.len(), expected.len());
        for ((path, p), (wanted, share)) in got.iter().zip(&expected) {
            assert_eq!(path, wanted);
            assert!((p - share).abs() < 1e-6, "{path:?}: {p}");
        }
        let newest: Vec<_> = paths(&text, 1, 2).into_iter().map(|path| path.0).collect();
        assert_eq!(newest, [vec![4], vec![4, 6]]);
    }

    #[test]
    fn a_text_that_meets_its_end_repeats() {
        let (path, _) = paths(&[7, 1, 2, 3, 1, 2, 3, 1], 1, 7).pop().unwrap();
        assert_eq!(path, [2, 3, 1, 2, 3, 1, 2]);
    }

    #[test]
    fn lengths_are_checked_with_both_names() {
        let resolve = |min, max| NgramConfig::resolve(PromptLookup { min, max });
        for (given, min, max) in [
            ((None, None), 2, 5),
            ((Some(7), None), 7, 7),
            ((None, Some(1)), 1, 1),
        ] {
            let config = resolve(given.0, given.1).unwrap();
            assert_eq!((config.min, config.max), (min, max));
        }
        for (min, max) in [
            (Some(4), Some(3)),
            (Some(0), None),
            (None, Some(0)),
            (None, Some(65)),
        ] {
            let message = resolve(min, max).unwrap_err().to_string();
            assert!(message.contains("prompt_lookup_m"), "{message}");
        }
    }
}
