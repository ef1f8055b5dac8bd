//! DFlash and DFlash2: one parallel forward per draft, backbone plus head.

use std::path::Path;

use super::block::Block;
use super::config::DrafterConfig;
use super::context::{Contexts, Model};
use super::heads::{Head, HeadScores};
use super::proposal::Proposal;
use super::weights::DrafterWeights;
use super::{DraftAnchor, DraftRequest, Drafter, ScoreKind};
use crate::device::{Buffer, Device};
use crate::error::{DrafterError, Result};
use crate::model::DecoderWeights;
use crate::weights::checkpoint::Verification;

/// A loaded drafter.
pub(super) struct DFlash {
    config: DrafterConfig,
    taps: Vec<usize>,
    weights: DrafterWeights,
    inverse_frequencies: Buffer<f32>,
    contexts: Contexts,
    block: Block,
    head: Head,
}

/// How much a drafter must hold.
pub(super) struct Capacity {
    pub(super) num_slots: usize,
    pub(super) num_pages: usize,
    /// The target's.
    pub(super) vocab_size: usize,
}

impl DFlash {
    pub(super) fn load(
        dir: &Path,
        config: DrafterConfig,
        taps: Vec<usize>,
        capacity: Capacity,
        device: &Device,
    ) -> Result<Self> {
        let weights = DrafterWeights::load(dir, &config)?;
        let Capacity {
            num_slots,
            num_pages,
            vocab_size,
        } = capacity;
        Ok(Self {
            taps,
            inverse_frequencies: Buffer::from_slice(&config.rope.inverse_frequencies()),
            contexts: Contexts::new(device, &config, num_slots, num_pages),
            block: Block::new(device, &config, num_slots),
            head: Head::new(device, &config, vocab_size, num_slots),
            weights,
            config,
        })
    }
}

impl Drafter for DFlash {
    fn method(&self) -> &'static str {
        self.config.method.name()
    }

    fn weight_bytes(&self) -> usize {
        self.weights.num_bytes()
    }

    fn verification(&self) -> Verification {
        self.weights.verification
    }

    fn taps(&self) -> &[usize] {
        &self.taps
    }

    fn max_draft_tokens(&self) -> usize {
        self.config.max_draft_tokens()
    }

    fn has_conditional_scores(&self) -> bool {
        self.weights.selector.is_some()
    }

    fn reserve(&mut self, slot: usize, num_tokens: usize) -> bool {
        self.contexts.reserve(slot, num_tokens)
    }

    fn release(&mut self, slot: usize) {
        self.contexts.release(slot);
    }

    fn extend_context(
        &mut self,
        device: &Device,
        slot: usize,
        first_position: usize,
        taps: &[Buffer<f32>],
        rows: &[u32],
    ) -> Result<()> {
        let model = Model {
            config: &self.config,
            weights: &self.weights,
            inverse_frequencies: &self.inverse_frequencies,
        };
        self.contexts
            .extend(device, model, slot, first_position, taps, rows)
    }

    fn propose(
        &mut self,
        device: &Device,
        target: &DecoderWeights,
        anchors: &[DraftAnchor],
        wanted: DraftRequest,
    ) -> Result<Vec<Proposal>> {
        let (num_levels, expected) = (wanted.num_draft_tokens, self.max_draft_tokens());
        if num_levels == 0 || num_levels > expected {
            return Err(DrafterError::DraftLength {
                expected,
                got: num_levels,
            }
            .into());
        }
        let scores = match (wanted.scores, &self.weights.selector) {
            (ScoreKind::Marginal { top_k }, _) => HeadScores::Marginal { top_k },
            (ScoreKind::Conditional, Some(selector)) => HeadScores::Selector(selector),
            (ScoreKind::Conditional, None) => {
                return Err(DrafterError::NoConditionalScores {
                    policy: "conditional",
                    method: self.method(),
                }
                .into());
            }
        };
        if anchors.is_empty() {
            return Ok(Vec::new());
        }
        let model = Model {
            config: &self.config,
            weights: &self.weights,
            inverse_frequencies: &self.inverse_frequencies,
        };
        let embed = &target.embed;
        let hidden =
            self.block
                .forward(device, model, &self.contexts, embed, anchors, num_levels)?;
        self.head
            .propose(device, target, hidden, anchors, num_levels, scores)
    }
}
