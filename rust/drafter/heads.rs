//! From hidden states of drafted positions to proposals: the target's LM head and, for DFlash2, the selector.

use super::DraftAnchor;
use super::config::DrafterConfig;
use super::proposal::{Level, Proposal};
use super::weights::SelectorWeights;
use crate::device::{Buffer, Device};
use crate::error::Result;
use crate::kernels::Kernel;
use crate::kernels::bf16_matmul::Epilogue;
use crate::kernels::draft_select::{DraftSelect, DraftSelectArgs, LogitShape, Selector};
use crate::kernels::paths::MAX_PATH_ROWS;
use crate::model::DecoderWeights;

/// Most candidates per position of a marginal proposal: no tree of a pass has more rows.
const MAX_MARGINAL_TOP_K: usize = MAX_PATH_ROWS;

/// What scores a head computes, with what it needs for them.
pub(super) enum HeadScores<'a> {
    /// Log-probabilities over the whole vocabulary.
    Marginal {
        /// Candidates per position.
        top_k: usize,
    },
    /// Log-probabilities among the candidates, given the candidate before.
    Selector(&'a SelectorWeights),
}

/// Elements of the head's buffers.
pub(super) struct HeadLens {
    /// Fp32.
    pub(super) logits: usize,
    /// Activations.
    pub(super) gate: usize,
    /// 32-bit ids.
    pub(super) token_ids: usize,
    /// Fp32.
    pub(super) log_probs: usize,
}

impl HeadLens {
    /// For the drafted positions of `num_blocks` requests.
    pub(super) fn of(config: &DrafterConfig, vocab_size: usize, num_blocks: usize) -> Self {
        let num_rows = num_blocks * config.max_draft_tokens();
        let (rank, top_k) = config
            .method
            .selector()
            .map_or((0, 0), |s| (s.rank, s.top_k));
        Self {
            logits: num_rows * vocab_size,
            gate: num_rows * rank,
            token_ids: num_rows * top_k.max(MAX_MARGINAL_TOP_K),
            log_probs: num_rows * (top_k * top_k).max(MAX_MARGINAL_TOP_K),
        }
    }
}

/// Buffers of the head, allocated once.
pub(super) struct Head {
    shape: LogitShape,
    vocab_size: usize,
    logits: Buffer<f32>,
    gate: Buffer<f32>,
    token_ids: Buffer<u32>,
    log_probs: Buffer<f32>,
}

impl Head {
    /// Buffers for the drafted positions of `num_blocks` requests.
    pub(super) fn new(
        device: &Device,
        config: &DrafterConfig,
        vocab_size: usize,
        num_blocks: usize,
    ) -> Self {
        let lens = HeadLens::of(config, vocab_size, num_blocks);
        Self {
            shape: config.logit_shape,
            vocab_size,
            logits: device.alloc(lens.logits),
            gate: device.alloc(lens.gate),
            token_ids: device.alloc(lens.token_ids),
            log_probs: device.alloc(lens.log_probs),
        }
    }

    /// Proposals of `num_levels` positions from `hidden` `[num_levels, anchors, hidden_size]`.
    pub(super) fn propose(
        &mut self,
        device: &Device,
        target: &DecoderWeights,
        hidden: &Buffer<f32>,
        anchors: &[DraftAnchor],
        num_levels: usize,
        scores: HeadScores<'_>,
    ) -> Result<Vec<Proposal>> {
        let num_blocks = anchors.len();
        let num_rows = num_levels * num_blocks;
        target.logits(device, hidden, num_rows, &mut self.logits)?;
        let anchor_tokens: Vec<u32> = anchors.iter().map(|anchor| anchor.token_id).collect();
        let (top_k, selector) = match scores {
            HeadScores::Marginal { top_k } => {
                (top_k.min(self.vocab_size).min(MAX_MARGINAL_TOP_K), None)
            }
            HeadScores::Selector(weights) => {
                weights.hidden_projection.forward(
                    device,
                    hidden,
                    num_rows,
                    &mut self.gate,
                    Epilogue::Store,
                )?;
                let selector = Selector {
                    gate: &self.gate,
                    predecessor: &weights.predecessor,
                    successor: &weights.successor,
                    anchor_tokens: &anchor_tokens,
                };
                (weights.top_k, Some(selector))
            }
        };
        let is_conditional = selector.is_some();
        DraftSelect::run(
            device,
            DraftSelectArgs {
                logits: &self.logits,
                vocab_size: self.vocab_size,
                num_levels,
                num_blocks,
                top_k,
                shape: self.shape,
                selector,
                token_ids: &mut self.token_ids,
                log_probs: &mut self.log_probs,
            },
        )?;
        let level = |block: usize, depth: usize| {
            let row = depth * num_blocks + block;
            let (num_parents, scores_per_row) = match is_conditional {
                true => (if depth == 0 { 1 } else { top_k }, top_k * top_k),
                false => (1, top_k),
            };
            Level {
                token_ids: self.token_ids.host()[row * top_k..][..top_k].to_vec(),
                log_probs: self.log_probs.host()[row * scores_per_row..][..num_parents * top_k]
                    .to_vec(),
                num_parents,
            }
        };
        Ok((0..num_blocks)
            .map(|block| Proposal {
                levels: (0..num_levels).map(|depth| level(block, depth)).collect(),
            })
            .collect())
    }
}
