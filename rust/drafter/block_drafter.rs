//! DFlash, DFlash2 and DSpark: one parallel forward per draft, backbone plus heads.

use super::block::Block;
use super::config::BlockConfig;
use super::context::{Contexts, Model};
use super::draft_head::{DraftHead, DraftedRows};
use super::footprint::DrafterSizes;
use super::markov::{MarkovWalk, WalkWeights};
use super::proposal::Proposal;
use super::weights::BlockWeights;
use super::{ContextRows, DraftAnchor, DraftRequest, Drafter, check_length};
use crate::device::{Buffer, Device, Graphs};
use crate::error::{DrafterError, Result};
use crate::kernels::draft_block::{self, ContextsKey};
use crate::model::Lent;
use crate::options::WeightFormat;
use crate::options::speculation::{DraftScores, HeadPrecision};
use crate::weights::WeightSource;
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
    graphs: Graphs<DraftKey>,
    /// What the GPU drafts or has drafted with the contexts as they are.
    started: Option<(Vec<DraftAnchor>, DraftRequest)>,
}

/// What the launches of a draft follow from.
#[derive(PartialEq, Eq, Hash)]
struct DraftKey {
    contexts: Vec<ContextsKey>,
    lists: [Option<u64>; 2],
    anchor_tokens: Option<u64>,
    num_levels: usize,
    /// How the target's head is read, which a head of the drafter's own makes no difference to.
    head: HeadPrecision,
    has_selector: bool,
    /// `None` where a walk selects.
    selected_width: Option<usize>,
}

impl BlockDrafter {
    pub(super) fn load(
        source: WeightSource<'_>,
        format: WeightFormat,
        config: &BlockConfig,
        taps: Vec<usize>,
        device: &Device,
        sizes: DrafterSizes,
    ) -> Result<Self> {
        let num_rows = sizes.num_slots * config.num_rows(sizes.num_draft_tokens);
        Ok(Self {
            taps,
            weights: BlockWeights::load(device, source, config, format, sizes.vocab_size)?,
            inverse_frequencies: device.constants(&config.body.rope.inverse_frequencies())?,
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
            graphs: Graphs::default(),
            started: None,
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

    fn scratch_bytes(&self) -> usize {
        let (config, sizes) = (&self.config, &self.sizes);
        let block_size = config.num_rows(sizes.num_draft_tokens);
        let (num_heads, head_dim) = (config.body.num_heads, config.body.head_dim);
        draft_block::scratch_bytes(sizes.num_slots, block_size, num_heads, head_dim)
    }

    fn taps(&self) -> &[usize] {
        &self.taps
    }

    fn reserve(&mut self, slot: usize, num_tokens: usize) -> bool {
        self.contexts.reserve(slot, num_tokens)
    }

    fn release(&mut self, slot: usize) {
        self.started = None;
        self.contexts.release(slot);
    }

    fn extend(&mut self, device: &Device, _target: Lent<'_>, rows: ContextRows<'_>) -> Result<()> {
        self.started = None;
        let model = Model {
            config: &self.config,
            weights: &self.weights,
            inverse_frequencies: &self.inverse_frequencies,
        };
        self.contexts.extend(device, model, rows)
    }

    fn rollback(&mut self, slot: usize) {
        self.started = None;
        self.contexts.rollback(slot);
    }

    fn start(
        &mut self,
        device: &Device,
        target: Lent<'_>,
        anchors: &[DraftAnchor],
        wanted: DraftRequest,
    ) -> Result<()> {
        // The host would only do now what it may not have to do at all.
        match device {
            Device::Host(_) => Ok(()),
            Device::Cuda(_) => {
                self.draft(device, target, anchors, wanted)?;
                self.started = Some((anchors.to_vec(), wanted));
                Ok(())
            }
        }
    }

    fn propose(
        &mut self,
        device: &Device,
        target: Lent<'_>,
        anchors: &[DraftAnchor],
        wanted: DraftRequest,
        proposals: &mut [Proposal],
    ) -> Result<()> {
        proposals.iter_mut().for_each(Proposal::clear);
        if anchors.is_empty() {
            return Ok(());
        }
        let is_started = |(of, as_wanted): &(Vec<DraftAnchor>, DraftRequest)| {
            of == anchors && *as_wanted == wanted
        };
        if !self.started.take().as_ref().is_some_and(is_started) {
            self.draft(device, target, anchors, wanted)?;
        }
        let rows = DraftedRows {
            anchors,
            num_levels: wanted.num_draft_tokens,
            hidden: self.block.hidden(),
        };
        let own_head = self.weights.head.as_ref();
        let width = self.width(wanted);
        let is_marginal = wanted.scores == DraftScores::Marginal;
        let walk = self.weights.markov.as_ref().zip(self.walk.as_mut());
        let Some((markov, walk)) = walk.filter(|_| !is_marginal) else {
            let selector = self.weights.selector.as_ref().filter(|_| !is_marginal);
            return self
                .head
                .propose(own_head, selector, rows, width, proposals);
        };
        let weights = WalkWeights {
            markov,
            confidence: self.weights.confidence.as_ref(),
            own_head,
        };
        let wanted = DraftRequest { width, ..wanted };
        walk.propose(device, weights, rows, self.head.logits(), wanted, proposals)
    }
}

impl BlockDrafter {
    /// Candidates per position or parent.
    fn width(&self, wanted: DraftRequest) -> usize {
        match wanted.scores {
            DraftScores::Greedy => 1,
            _ => wanted.width.min(self.sizes.width),
        }
    }

    /// Whether a Markov walk selects, level by level, and not the head all at once.
    fn walks(&self, wanted: DraftRequest) -> bool {
        self.walk.is_some() && wanted.scores != DraftScores::Marginal
    }

    /// Everything of a draft that reads nothing back: block, logits and, where no walk selects, candidates.
    fn draft(
        &mut self,
        device: &Device,
        target: Lent<'_>,
        anchors: &[DraftAnchor],
        wanted: DraftRequest,
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
        let walks = self.walks(wanted);
        let selected_width = (!walks).then(|| self.width(wanted));
        let model = Model {
            config: &self.config,
            weights: &self.weights,
            inverse_frequencies: &self.inverse_frequencies,
        };
        let num_levels = wanted.num_draft_tokens;
        self.contexts.look_from(device, anchors)?;
        self.block
            .look_from(device, &self.config, anchors, num_levels)?;
        self.head.look_from(device, anchors)?;
        let selector = match wanted.scores {
            DraftScores::Marginal => None,
            _ => self.weights.selector.as_ref(),
        };
        let key = DraftKey {
            contexts: self
                .contexts
                .launch_keys(&self.config, self.config.num_rows(num_levels)),
            lists: self.block.lists(),
            anchor_tokens: self.head.list(),
            num_levels,
            head: target.head(),
            has_selector: selector.is_some(),
            selected_width,
        };
        let own_head = self.weights.head.as_ref();
        let Self {
            block,
            head,
            contexts,
            graphs,
            ..
        } = self;
        graphs.run(device, key, || {
            block.forward(device, model, contexts, target.embed(), anchors, num_levels)?;
            let rows = DraftedRows {
                anchors,
                num_levels,
                hidden: block.hidden(),
            };
            head.project(device, target, own_head, rows)?;
            match selected_width {
                Some(width) => head.select(device, selector, rows, width),
                None => head.shape(device, rows.num_rows()),
            }
        })
    }
}
