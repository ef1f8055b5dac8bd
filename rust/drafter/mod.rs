//! Drafters: models that propose tokens for the target to verify.
//!
//! In: taps of verified rows ([`Drafter::extend_context`]) and anchor tokens ([`Drafter::propose`]). Out: one
//! [`Proposal`](proposal::Proposal) per request. [`open`] finds out what a checkpoint is by its keys and tensors and
//! checks it against the target; nothing above this module knows which drafter runs. A drafter's context holds exactly
//! the positions before the anchor, each from a verified row of the target; drafted rows never enter it. What is
//! proposed for a request depends on its own context and anchor only, not on the requests drafted beside it.

mod block;
pub mod config;
mod context;
mod dflash;
pub mod footprint;
mod heads;
pub mod method;
pub mod pairing;
pub mod proposal;
mod weights;

use std::path::Path;

use crate::device::{Buffer, Device};
use crate::error::Result;
use crate::model::{DecoderWeights, ModelConfig};
use crate::weights::checkpoint::Verification;
use config::DrafterConfig;
use proposal::Proposal;

/// The last committed token of a request: the target has not seen it yet, and drafts follow it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DraftAnchor {
    /// The request's slot.
    pub slot: usize,
    /// The token.
    pub token_id: u32,
    /// Its position; the context must hold all positions before it.
    pub position: usize,
}

/// What scores a proposal should hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ScoreKind {
    /// The `top_k` likeliest tokens of each position, whatever comes before (at most 64, the rows of a pass).
    Marginal {
        /// Candidates per position.
        top_k: usize,
    },
    /// Candidates scored after every candidate of the position before.
    Conditional,
}

/// What to draft, for all requests of a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DraftRequest {
    /// Positions to propose, 1 to [`Drafter::max_draft_tokens`].
    pub num_draft_tokens: usize,
    /// Their scores.
    pub scores: ScoreKind,
}

/// A drafter with its context caches. Slots are the engine's; there are as many as [`open`] was told.
pub trait Drafter: Send {
    /// The method's name in `speculative_config`.
    fn method(&self) -> &'static str;

    /// Bytes of its weights in memory.
    fn weight_bytes(&self) -> usize;

    /// What proving its weights took at load; nothing is proved of a drafter without W12 weights.
    fn verification(&self) -> Verification {
        Verification::default()
    }

    /// Target layers, 0-based, whose outputs [`extend_context`](Self::extend_context) wants, in this order.
    fn taps(&self) -> &[usize];

    /// Most tokens that one call of [`propose`](Self::propose) drafts per request.
    fn max_draft_tokens(&self) -> usize;

    /// Whether [`ScoreKind::Conditional`] is to be had.
    fn has_conditional_scores(&self) -> bool;

    /// Makes room for a context of `num_tokens` positions in `slot`; `false`, and nothing changed, when pages run out.
    fn reserve(&mut self, slot: usize, num_tokens: usize) -> bool;

    /// Empties `slot` and gives its pages back.
    fn release(&mut self, slot: usize);

    /// Appends verified positions to the context of `slot`: `rows` of the pass that wrote `taps` (one buffer per tap,
    /// `[rows of the pass, hidden_size]`), in position order, the first at `first_position`.
    ///
    /// # Errors
    /// [`ContextGap`](crate::error::DrafterError::ContextGap) unless `first_position` is the length of the context;
    /// a [`KernelError`](crate::error::KernelError) when room was not reserved.
    fn extend_context(
        &mut self,
        device: &Device,
        slot: usize,
        first_position: usize,
        taps: &[Buffer<f32>],
        rows: &[u32],
    ) -> Result<()>;

    /// Drafts after every anchor, all requests in one forward; `target` lends its embedding and LM head. Contexts stay
    /// as they are, so drafting again gives the same proposals.
    ///
    /// # Errors
    /// [`DraftLength`](crate::error::DrafterError::DraftLength),
    /// [`NoConditionalScores`](crate::error::DrafterError::NoConditionalScores), and
    /// [`ContextGap`](crate::error::DrafterError::ContextGap) when a context does not end right before its anchor.
    fn propose(
        &mut self,
        device: &Device,
        target: &DecoderWeights,
        anchors: &[DraftAnchor],
        wanted: DraftRequest,
    ) -> Result<Vec<Proposal>>;
}

/// Opens the drafter of `config`, read from `dir`, for the target of `target_dir`, with room for `num_slots` requests
/// at once and `num_pages` pages of 64 context positions in all.
///
/// # Errors
/// An error that names file or directories, expected and got, when the checkpoint is damaged, of a kind that is not
/// served, inconsistent in itself, or made for another target.
pub fn open(
    dir: &Path,
    config: DrafterConfig,
    target_dir: &Path,
    target_config: &ModelConfig,
    device: &Device,
    num_slots: usize,
    num_pages: usize,
) -> Result<Box<dyn Drafter>> {
    let taps = pairing::check(dir, &config, target_dir, target_config)?;
    let drafter = dflash::DFlash::load(
        dir,
        config,
        taps,
        dflash::Capacity {
            num_slots,
            num_pages,
            vocab_size: target_config.vocab_size,
        },
        device,
    )?;
    Ok(Box::new(drafter))
}

#[cfg(test)]
mod tests;
