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
use crate::model::DecoderWeights;
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

    fn extend(
        &mut self,
        _device: &Device,
        _target: &DecoderWeights,
        rows: ContextRows<'_>,
    ) -> Result<()> {
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
        _target: &DecoderWeights,
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
            share(
                token_ids,
                &self.places,
                None,
                wanted.num_draft_tokens,
                proposal,
            );
            token_ids.pop();
        }
        Ok(())
    }
}

/// Adds the texts at `places` below `parent`, as far as `depth` tokens; those with the same next token go on together.
/// A text that reaches the end has nothing more to say.
fn share(
    text: &[u32],
    places: &[usize],
    parent: Option<Candidate>,
    depth: usize,
    proposal: &mut Proposal,
) {
    let going_on = || places.iter().copied().filter(|&place| place < text.len());
    let num_texts = going_on().count();
    if depth == 0 || num_texts == 0 {
        return;
    }
    let mut token_ids = Vec::with_capacity(num_texts);
    for place in going_on() {
        if !token_ids.contains(&text[place]) {
            token_ids.push(text[place]);
        }
    }
    let after = |token_id: u32| going_on().filter(move |&place| text[place] == token_id);
    // One more text than there are: the one that goes on as none before did.
    let share_of = |&token_id: &u32| after(token_id).count() as f32 / (num_texts + 1) as f32;
    let log_probs: Vec<f32> = token_ids.iter().map(|id| share_of(id).ln()).collect();
    let list = proposal.push_list(parent, &token_ids, &log_probs);
    for (slot, &token_id) in token_ids.iter().enumerate() {
        let places: Vec<usize> = after(token_id).map(|place| place + 1).collect();
        let below = Some(Candidate { list, slot });
        share(text, &places, below, depth - 1, proposal);
    }
}
