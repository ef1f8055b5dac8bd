//! A drafter whose guesses are right as often as a profile says: for costs of real shapes with a stated acceptance.
//!
//! In: a drafter, of which every kernel runs, and the texts that plain decoding gives ([`Scripts`]). Out: its proposals
//! with the right token put at a rank that a counter generator draws; the other candidates stay what they were. A
//! context that no script goes on from is left as it was drafted. What is right for a request depends on its own text
//! and the place alone, so proposals can be made again.

use std::sync::{Arc, PoisonError, RwLock};

use super::context_length::ContextLength;
use super::footprint::DrafterSizes;
use super::proposal::{Candidate, Proposal};
use super::{ContextRows, DraftAnchor, DraftRequest, Drafter};
use crate::device::Device;
use crate::error::Result;
use crate::kernels::sample_rows::philox::draft_uniform;
use crate::model::Lent;
use crate::weights::checkpoint::Verification;

/// How often a position's candidates are right. Positions are of two kinds, as texts are easy or hard to go on; of a
/// kind, item r is the probability that the right token is the candidate of rank r, and the scores say so. What is left
/// is the probability that it is no candidate at all.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AcceptanceProfile {
    /// What it reproduces.
    pub name: &'static str,
    /// Share of the easy positions.
    pub easy_share: f64,
    /// Probabilities by rank at easy positions.
    pub easy: &'static [f64],
    /// Probabilities by rank at hard positions.
    pub hard: &'static [f64],
    /// Seed of the draws.
    pub seed: u64,
}

/// The acceptance that the method was published with: chains of 15 drafts commit 4.65 tokens a pass, for which the first
/// candidate is right 79 times in a hundred, and two stages of 32 nodes about 13.
pub const PUBLISHED: AcceptanceProfile = AcceptanceProfile {
    name: "chain of 15: 4.65, two stages of 32 nodes: 13",
    easy_share: 0.7,
    easy: &[0.985, 0.0065, 0.003, 0.0015, 0.001],
    hard: &[0.335, 0.263, 0.145, 0.08, 0.044, 0.024, 0.013, 0.006],
    seed: 2026,
};

/// Beyond the ranks that a profile states, probabilities halve.
const NEXT_RANK: f64 = 0.5;

impl AcceptanceProfile {
    /// Probabilities by rank of the token at `position` of script `script`.
    fn ranks(&self, script: usize, position: usize) -> &'static [f64] {
        let lot = draft_uniform(self.script_seed(script), position as u32, u32::MAX);
        match lot < self.easy_share {
            true => self.easy,
            false => self.hard,
        }
    }

    /// Rank of the right token at `position` in a draft after an anchor token; `None` where it is no candidate.
    fn rank(&self, script: usize, position: usize, anchor: usize) -> Option<usize> {
        let mut lot = draft_uniform(self.script_seed(script), position as u32, anchor as u32);
        for (rank, probability) in self.ranks(script, position).iter().enumerate() {
            if lot < *probability {
                return Some(rank);
            }
            lot -= probability;
        }
        None
    }

    fn script_seed(&self, script: usize) -> u64 {
        self.seed ^ (script as u64) << 32
    }
}

/// Whole texts, prompt and output, that plain decoding gave; clones share them.
#[derive(Clone, Debug, Default)]
pub struct Scripts(Arc<RwLock<Vec<Vec<u32>>>>);

impl Scripts {
    /// Adds a text.
    pub fn add(&self, token_ids: Vec<u32>) {
        let mut scripts = self.0.write().unwrap_or_else(PoisonError::into_inner);
        if !scripts.contains(&token_ids) {
            scripts.push(token_ids);
        }
    }

    /// The first script that begins with `text`, and what comes after it there.
    fn with_continuation<R>(
        &self,
        text: &[u32],
        then: impl FnOnce(usize, &[u32]) -> R,
    ) -> Option<R> {
        let scripts = self.0.read().unwrap_or_else(PoisonError::into_inner);
        let index = scripts.iter().position(|script| script.starts_with(text))?;
        Some(then(index, &scripts[index][text.len()..]))
    }
}

/// The text of a slot as far as the drafter's context goes.
#[derive(Clone, Default)]
struct Text {
    token_ids: Vec<u32>,
    length: ContextLength,
}

/// See the module's head.
pub(super) struct PlantedDrafter {
    inner: Box<dyn Drafter>,
    profile: AcceptanceProfile,
    scripts: Scripts,
    texts: Vec<Text>,
    vocab_size: usize,
    drafted: Vec<Vec<u32>>,
}

impl PlantedDrafter {
    pub(super) fn new(
        inner: Box<dyn Drafter>,
        profile: AcceptanceProfile,
        scripts: Scripts,
        sizes: &DrafterSizes,
    ) -> Self {
        Self {
            inner,
            profile,
            scripts,
            texts: vec![Text::default(); sizes.num_slots],
            vocab_size: sizes.vocab_size,
            drafted: Vec::new(),
        }
    }
}

impl Drafter for PlantedDrafter {
    fn weight_bytes(&self) -> usize {
        self.inner.weight_bytes()
    }

    fn verification(&self) -> Verification {
        self.inner.verification()
    }

    fn scratch_bytes(&self) -> usize {
        self.inner.scratch_bytes()
    }

    fn taps(&self) -> &[usize] {
        self.inner.taps()
    }

    fn reserve(&mut self, slot: usize, num_tokens: usize) -> bool {
        self.inner.reserve(slot, num_tokens)
    }

    fn release(&mut self, slot: usize) {
        self.texts[slot] = Text::default();
        self.inner.release(slot);
    }

    fn extend(&mut self, device: &Device, target: Lent<'_>, rows: ContextRows<'_>) -> Result<()> {
        self.inner.extend(device, target, rows)?;
        let text = &mut self.texts[rows.slot];
        text.token_ids.extend_from_slice(rows.token_ids);
        text.length.grow(rows.token_ids.len(), rows.standing);
        Ok(())
    }

    fn rollback(&mut self, slot: usize) {
        self.inner.rollback(slot);
        let text = &mut self.texts[slot];
        text.length.rollback();
        text.token_ids.truncate(text.length.len());
    }

    fn start(
        &mut self,
        device: &Device,
        target: Lent<'_>,
        anchors: &[DraftAnchor],
        wanted: DraftRequest,
    ) -> Result<()> {
        self.inner.start(device, target, anchors, wanted)
    }

    fn propose(
        &mut self,
        device: &Device,
        target: Lent<'_>,
        anchors: &[DraftAnchor],
        wanted: DraftRequest,
        proposals: &mut [Proposal],
    ) -> Result<()> {
        self.inner
            .propose(device, target, anchors, wanted, proposals)?;
        let Self {
            profile,
            scripts,
            texts,
            vocab_size,
            drafted,
            ..
        } = self;
        for (anchor, proposal) in anchors.iter().zip(proposals) {
            let text = &mut texts[anchor.slot].token_ids;
            text.push(anchor.token_id);
            scripts.with_continuation(text, |script, continuation| {
                let place = Place {
                    script,
                    anchor: anchor.position,
                };
                take_levels(proposal, drafted);
                proposal.clear();
                for (depth, candidates) in drafted.iter_mut().enumerate() {
                    let right = continuation.get(depth).copied();
                    let ranks = rewrite(profile, place, depth, right, *vocab_size, candidates);
                    proposal.push_level(candidates, &log_probs(ranks, candidates.len()), 1);
                }
            });
            text.pop();
        }
        Ok(())
    }
}

/// Where a draft starts.
#[derive(Clone, Copy)]
struct Place {
    script: usize,
    anchor: usize,
}

/// The candidates of each position of `proposal`, likeliest or not.
fn take_levels(proposal: &Proposal, levels: &mut Vec<Vec<u32>>) {
    let mut num_levels = 0;
    let mut next = proposal.first_list();
    while let Some(list) = next {
        if levels.len() == num_levels {
            levels.push(Vec::new());
        }
        let tokens = proposal.children(list).token_ids;
        levels[num_levels].clear();
        levels[num_levels].extend_from_slice(tokens);
        num_levels += 1;
        next = (0..tokens.len()).find_map(|slot| proposal.below(Candidate { list, slot }));
    }
    levels.truncate(num_levels);
}

/// Puts `right` where the profile's draw wants it among `candidates`, or nowhere; returns the probabilities by rank.
/// The number of candidates stays.
fn rewrite(
    profile: &AcceptanceProfile,
    place: Place,
    depth: usize,
    right: Option<u32>,
    vocab_size: usize,
    candidates: &mut Vec<u32>,
) -> &'static [f64] {
    let position = place.anchor + 1 + depth;
    let ranks = profile.ranks(place.script, position);
    let Some(right) = right else {
        return ranks;
    };
    let len = candidates.len();
    candidates.retain(|&token| token != right);
    let rank = profile.rank(place.script, position, place.anchor);
    if let Some(rank) = rank.filter(|&rank| rank < len) {
        candidates.insert(rank.min(candidates.len()), right);
    }
    candidates.truncate(len);
    // Where the right one was drafted and must not be, some other token takes its place.
    let mut filler = right;
    while candidates.len() < len {
        filler = (filler + 1) % vocab_size as u32;
        if filler == right {
            break;
        }
        if !candidates.contains(&filler) {
            candidates.push(filler);
        }
    }
    ranks
}

/// Log-probabilities of `len` candidates by rank.
fn log_probs(ranks: &[f64], len: usize) -> Vec<f32> {
    let mut last = 1.0;
    (0..len)
        .map(|rank| {
            last = ranks.get(rank).copied().unwrap_or(last * NEXT_RANK);
            last.ln() as f32
        })
        .collect()
}

#[cfg(test)]
mod tests;
