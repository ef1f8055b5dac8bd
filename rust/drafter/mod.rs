//! Drafters: models that propose tokens for the target to verify.
//!
//! In: rows of the target ([`Drafter::extend`]) and anchor tokens ([`Drafter::propose`]). Out: one
//! [`Proposal`](proposal::Proposal) per request. [`open`] finds out what a checkpoint is by its keys and tensors and
//! checks it against the target; nothing above this module knows which drafter runs. A drafter's context holds exactly
//! the positions before the anchor. Verified rows of the target stay; scratch rows, of a pass that marks a path and
//! verifies nothing, stand until [`Drafter::rollback`]. Drafted rows never enter it. What is proposed for a request
//! depends on its own context and anchor only, not on the requests drafted beside it.

mod beam;
mod block;
mod block_drafter;
pub mod config;
mod context;
mod context_length;
mod draft_head;
mod eagle3;
pub mod footprint;
mod heads_of_rows;
mod markov;
mod ngram;
pub mod pairing;
pub mod planted;
pub mod proposal;
mod weights;

use std::path::Path;

use crate::device::{Buffer, Device};
use crate::error::Result;
use crate::model::{Lent, ModelConfig};
use crate::options::WeightFormat;
use crate::options::speculation::DraftScores;
use crate::weights::checkpoint::Verification;
use crate::weights::{Checkpoint, PlantedWeights, WeightSource};
use config::{BlockConfig, DrafterConfig};
use footprint::DrafterSizes;
use proposal::Proposal;

/// The last token of a request: the target has not seen it yet, and drafts follow it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DraftAnchor {
    /// The request's slot.
    pub slot: usize,
    /// The token.
    pub token_id: u32,
    /// Its position; the context must hold all positions before it.
    pub position: usize,
}

/// What to draft, for all requests of a call.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct DraftRequest {
    /// Positions to propose, from 1 to what the drafter was opened for.
    pub num_draft_tokens: usize,
    /// Their scores.
    pub scores: DraftScores,
    /// Candidates per position, or per parent; see [`TreePlan::width`](crate::options::speculation::TreePlan::width).
    pub width: usize,
    /// Where a drafter with a confidence head stops; see
    /// [`TreePlan::min_confidence`](crate::options::speculation::TreePlan::min_confidence).
    pub min_confidence: f64,
}

/// What the rows that extend a context are worth.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Standing {
    /// Committed rows of an exact pass: they stay.
    Verified,
    /// Rows of a marked path: the next rollback drops them.
    Scratch,
}

/// Positions to append to a context.
#[derive(Clone, Copy, Debug)]
pub struct ContextRows<'a> {
    /// The request's slot.
    pub slot: usize,
    /// Position of the first row; the context ends right before it.
    pub first_position: usize,
    /// One buffer `[rows of the pass, hidden_size]` per tap, in the order of [`Drafter::taps`].
    pub taps: &'a [Buffer<f32>],
    /// Rows of that pass, in position order.
    pub rows: &'a [u32],
    /// The token of each row.
    pub token_ids: &'a [u32],
    /// Whether they stay.
    pub standing: Standing,
}

/// A drafter with its context caches. Slots are the engine's; there are as many as [`open`] was told.
pub trait Drafter: Send {
    /// Bytes of its weights in memory.
    fn weight_bytes(&self) -> usize;

    /// What proving its weights took at load; nothing is proved of a drafter without W12 weights.
    fn verification(&self) -> Verification {
        Verification::default()
    }

    /// Bytes of scratch that its attention takes on a GPU at most.
    fn scratch_bytes(&self) -> usize {
        0
    }

    /// Target layers, 0-based, whose outputs [`extend`](Self::extend) wants, in this order.
    fn taps(&self) -> &[usize];

    /// Makes room for a context of `num_tokens` positions in `slot`; `false`, and nothing changed, when pages run out.
    fn reserve(&mut self, slot: usize, num_tokens: usize) -> bool;

    /// Empties `slot` and gives its pages back.
    fn release(&mut self, slot: usize);

    /// Appends positions to a context; `target` lends its embedding.
    ///
    /// # Errors
    /// [`ContextGap`](crate::error::DrafterError::ContextGap) unless the rows start where the context ends, and for
    /// verified rows after scratch rows; a [`KernelError`](crate::error::KernelError) when room was not reserved.
    fn extend(&mut self, device: &Device, target: Lent<'_>, rows: ContextRows<'_>) -> Result<()>;

    /// Drops all scratch rows of `slot`: the context is again what the last verified rows made it.
    fn rollback(&mut self, slot: usize);

    /// Gives a GPU what a [`propose`](Self::propose) of the same arguments will read back, so that the host need not wait
    /// for it now. Contexts stay as they are; whoever changes one only makes the next `propose` start anew.
    ///
    /// # Errors
    /// As for `propose`.
    fn start(
        &mut self,
        _device: &Device,
        _target: Lent<'_>,
        _anchors: &[DraftAnchor],
        _wanted: DraftRequest,
    ) -> Result<()> {
        Ok(())
    }

    /// Drafts after every anchor, all requests together, into `proposals` (one per anchor, whatever they held);
    /// `target` lends its embedding and LM head. Contexts stay as they are, so drafting again gives the same proposals.
    ///
    /// # Errors
    /// [`DraftLength`](crate::error::DrafterError::DraftLength),
    /// [`NoScores`](crate::error::DrafterError::NoScores), and
    /// [`ContextGap`](crate::error::DrafterError::ContextGap) when a context does not end right before its anchor.
    fn propose(
        &mut self,
        device: &Device,
        target: Lent<'_>,
        anchors: &[DraftAnchor],
        wanted: DraftRequest,
        proposals: &mut [Proposal],
    ) -> Result<()>;
}

/// Where a drafter and its target come from.
#[derive(Clone, Copy, Debug)]
pub struct PairFiles<'a> {
    /// The drafter's directory; unused by a drafter without weights.
    pub drafter: &'a Path,
    /// The target's.
    pub target: &'a Path,
}

/// Opens the drafter of `config` for a target, with room for what `sizes` says.
///
/// # Errors
/// An error that names file or directories, expected and got, when the checkpoint is damaged, of a kind that is not
/// served, inconsistent in itself, or made for another target.
pub fn open(
    files: PairFiles<'_>,
    config: &DrafterConfig,
    target: &ModelConfig,
    device: &Device,
    sizes: DrafterSizes,
) -> Result<Box<dyn Drafter>> {
    let taps = pairing::check(files, config, target)?;
    if let DrafterConfig::Ngram(config) = config {
        return Ok(Box::new(ngram::Ngram::new(*config, sizes)));
    }
    let checkpoint = Checkpoint::open(files.drafter)?;
    let source = Source {
        weights: WeightSource::Checkpoint(&checkpoint),
        format: WeightFormat::Auto,
    };
    load(source, config, target, taps, device, sizes)
}

/// How a planted drafter's linear layers are held beside a target's in `format`: as that is converted so is its drafter, but
/// beside FP8 BF16 was published.
pub fn planted_format(format: WeightFormat) -> WeightFormat {
    match format {
        WeightFormat::Fp8 | WeightFormat::Fp8W8A8 => WeightFormat::Bf16,
        other => other,
    }
}

/// Opens a planted drafter, its linear layers in `format`: its proposals are right as often as [`planted::PUBLISHED`] says, by
/// `scripts`.
///
/// # Errors
/// As for [`open`], of which nothing about files applies.
pub fn open_planted(
    weights: &PlantedWeights,
    format: WeightFormat,
    scripts: planted::Scripts,
    config: &DrafterConfig,
    target: &ModelConfig,
    device: &Device,
    sizes: DrafterSizes,
) -> Result<Box<dyn Drafter>> {
    let named = Path::new("planted");
    let files = PairFiles {
        drafter: named,
        target: named,
    };
    let taps = pairing::check(files, config, target)?;
    let source = Source {
        weights: WeightSource::Planted(weights),
        format,
    };
    let inner = load(source, config, target, taps, device, sizes)?;
    let profile = planted::PUBLISHED;
    Ok(Box::new(planted::PlantedDrafter::new(
        inner, profile, scripts, &sizes,
    )))
}

/// Where a drafter's weights come from, and how its linear layers are held.
#[derive(Clone, Copy)]
struct Source<'a> {
    weights: WeightSource<'a>,
    format: WeightFormat,
}

/// Loads a drafter that fits its target, whose `taps` it reads.
fn load(
    source: Source<'_>,
    config: &DrafterConfig,
    target: &ModelConfig,
    taps: Vec<usize>,
    device: &Device,
    sizes: DrafterSizes,
) -> Result<Box<dyn Drafter>> {
    let Source { weights, format } = source;
    Ok(match config {
        DrafterConfig::Block(config) => {
            // A drafter's block starts as its target does, unless its file says otherwise.
            let scale = config.input_embedding_scale;
            let config = BlockConfig {
                input_embedding_scale: scale.or(Some(target.embedding_scale)),
                logit_shape: config.logit_shape.or(Some(target.logit_shape)),
                ..config.clone()
            };
            Box::new(block_drafter::BlockDrafter::load(
                weights, format, &config, taps, device, sizes,
            )?)
        }
        DrafterConfig::Eagle3(config) => Box::new(eagle3::Eagle3::load(
            weights, format, config, taps, device, sizes,
        )?),
        DrafterConfig::Ngram(config) => Box::new(ngram::Ngram::new(*config, sizes)),
    })
}

/// Refuses a draft length that a drafter was not opened for.
fn check_length(wanted: usize, sizes: &DrafterSizes) -> Result<()> {
    match (1..=sizes.num_draft_tokens).contains(&wanted) {
        true => Ok(()),
        false => Err(crate::error::DrafterError::DraftLength {
            expected: sizes.num_draft_tokens,
            got: wanted,
        }
        .into()),
    }
}

#[cfg(test)]
mod golden {
    mod tests;
}
#[cfg(test)]
mod tests;
