//! DFlash, DFlash2 and DSpark: one parallel forward per draft, backbone plus heads.

use std::path::Path;

use super::block::Block;
use super::config::BlockConfig;
use super::context::{Contexts, Model};
use super::draft_head::{DraftHead, DraftedRows};
use super::footprint::DrafterSizes;
use super::markov::{MarkovWalk, WalkWeights};
use super::proposal::Proposal;
use super::weights::BlockWeights;
use super::{ContextRows, DraftAnchor, DraftRequest, Drafter, check_length};
use crate::device::{Buffer, Device};
use crate::error::{DrafterError, Result};
use crate::model::DecoderWeights;
use crate::options::speculation::DraftScores;
use crate::weights::checkpoint::Verification;

/// A loaded drafter.
pub(super) struct BlockDrafter {
    config: BlockConfig,
    sizes: DrafterSizes,
    taps: Vec<usize>,
    weights: BlockWeights,
    inverse_frequencies: Buffer<f32>,
    contexts: Contexts,
    block: Block,
    head: DraftHead,
    walk: Option<MarkovWalk>,
}

impl BlockDrafter {
    pub(super) fn load(
        dir: &Path,
        config: &BlockConfig,
        taps: Vec<usize>,
        device: &Device,
        sizes: DrafterSizes,
    ) -> Result<Self> {
        let num_rows = sizes.num_slots * config.num_rows(sizes.num_draft_tokens);
        Ok(Self {
            taps,
            weights: BlockWeights::load(device, dir, config, sizes.vocab_size)?,
            inverse_frequencies: device.constants(&config.rope.inverse_frequencies())?,
            contexts: Contexts::new(
                device,
                config,
                sizes.num_slots,
                sizes.num_pages,
                sizes.pages_per_sequence,
            )?,
            block: Block::new(device, config, num_rows)?,
            head: DraftHead::new(device, config, &sizes)?,
            walk: MarkovWalk::new(device, config, &sizes)?,
            config: config.clone(),
            sizes,
        })
    }
}

impl Drafter for BlockDrafter {
    fn weight_bytes(&self) -> usize {
        self.weights.num_bytes()
    }

    fn verification(&self) -> Verification {
        self.weights.verification
    }

    fn taps(&self) -> &[usize] {
        &self.taps
    }

    fn reserve(&mut self, slot: usize, num_tokens: usize) -> bool {
        self.contexts.reserve(slot, num_tokens)
    }

    fn release(&mut self, slot: usize) {
        self.contexts.release(slot);
    }

    fn extend(
        &mut self,
        device: &Device,
        _target: &DecoderWeights,
        rows: ContextRows<'_>,
    ) -> Result<()> {
        let model = Model {
            config: &self.config,
            weights: &self.weights,
            inverse_frequencies: &self.inverse_frequencies,
        };
        self.contexts.extend(device, model, rows)
    }

    fn rollback(&mut self, slot: usize) {
        self.contexts.rollback(slot);
    }

    fn propose(
        &mut self,
        device: &Device,
        target: &DecoderWeights,
        anchors: &[DraftAnchor],
        wanted: DraftRequest,
        proposals: &mut [Proposal],
    ) -> Result<()> {
        check_length(wanted.num_draft_tokens, &self.sizes)?;
        if wanted.scores == DraftScores::Conditional && !self.config.method.has_conditional_scores()
        {
            return Err(DrafterError::NoScores {
                policy: "conditional",
                method: self.config.method.name(),
                scores: "parent-conditional",
                usable: "\"ddtree\" or \"chain\"",
            }
            .into());
        }
        proposals.iter_mut().for_each(Proposal::clear);
        if anchors.is_empty() {
            return Ok(());
        }
        let model = Model {
            config: &self.config,
            weights: &self.weights,
            inverse_frequencies: &self.inverse_frequencies,
        };
        let num_levels = wanted.num_draft_tokens;
        self.contexts.look_from(device, anchors)?;
        let embed = &target.embed;
        let hidden =
            self.block
                .forward(device, model, &self.contexts, embed, anchors, num_levels)?;
        let rows = DraftedRows {
            anchors,
            num_levels,
            hidden,
        };
        let own_head = self.weights.head.as_ref();
        let logits = self.head.project(device, target, own_head, rows)?;
        let width = match wanted.scores {
            DraftScores::Greedy => 1,
            _ => wanted.width.min(self.sizes.width),
        };
        let weights = &self.weights;
        match (
            wanted.scores,
            &weights.selector,
            &weights.markov,
            &mut self.walk,
        ) {
            (DraftScores::Greedy | DraftScores::Conditional, Some(selector), ..) => self
                .head
                .propose_selected(device, selector, rows, proposals),
            (DraftScores::Greedy | DraftScores::Conditional, _, Some(markov), Some(walk)) => {
                let confidence = weights.confidence.as_ref();
                let weights = WalkWeights {
                    markov,
                    confidence,
                    own_head,
                };
                let wanted = DraftRequest { width, ..wanted };
                walk.propose(device, weights, rows, logits, wanted, proposals)
            }
            _ => self
                .head
                .propose_marginal(device, own_head, rows, width, proposals),
        }
    }
}
