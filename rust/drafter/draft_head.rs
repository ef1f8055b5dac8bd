//! From hidden states of drafted positions to proposals: an LM head, then the likeliest tokens of each position, scored
//! alone or, by DFlash2's selector, given the candidate before.

use super::DraftAnchor;
use super::config::BlockConfig;
use super::footprint::DrafterSizes;
use super::proposal::Proposal;
use super::weights::SelectorWeights;
use crate::device::{Buffer, Device, Staged};
use crate::error::{CheckpointError, Result};
use crate::kernels::Kernel;
use crate::kernels::bf16_matmul::Epilogue;
use crate::kernels::draft_select::{DraftSelect, DraftSelectArgs, LogitShape, Selector};
use crate::kernels::shape_logits::{ShapeLogits, ShapeLogitsArgs};
use crate::model::Lent;
use crate::options::WeightFormat;
use crate::weights::{Linear, WeightLoader};

/// A drafter's own LM head, perhaps over a part of the vocabulary.
pub(super) struct OwnHead {
    lm_head: Linear,
    /// The target's id of each row; `None` = the same.
    target_ids: Option<Vec<u32>>,
}

impl OwnHead {
    /// Reads the head of `[rows, hidden_size]` and, for a target of `offset_into` ids, the offsets of its rows' ids.
    pub(super) fn load(
        tensors: WeightLoader<'_>,
        [num_rows, hidden_size]: [usize; 2],
        offset_into: Option<usize>,
    ) -> Result<Self> {
        const OFFSETS: &str = super::config::OFFSETS;
        let target_ids = |vocab_size: usize| {
            let Some(checkpoint) = tensors.source.checkpoint() else {
                // Planted heads draft the first ids.
                return Ok((0..num_rows as u32).collect());
            };
            let offsets = checkpoint.vector_i64(OFFSETS, num_rows)?;
            let id = |(row, offset): (usize, &i64)| {
                let id = (row as i64).checked_add(*offset);
                id.and_then(|id| u32::try_from(id).ok())
                    .filter(|&id| (id as usize) < vocab_size)
                    .ok_or_else(|| CheckpointError::Offset {
                        dir: checkpoint.dir().to_owned(),
                        tensor: OFFSETS,
                        row,
                        expected: vocab_size,
                        got: *offset,
                    })
            };
            let ids: Vec<u32> = offsets
                .iter()
                .enumerate()
                .map(id)
                .collect::<Result<_, _>>()?;
            let mut first_rows = vec![None; vocab_size];
            for (row, &got) in ids.iter().enumerate() {
                if let Some(first) = first_rows[got as usize].replace(row) {
                    return Err(CheckpointError::OffsetTwice {
                        dir: checkpoint.dir().to_owned(),
                        tensor: OFFSETS,
                        first,
                        row,
                        got,
                    });
                }
            }
            Ok(ids)
        };
        Ok(Self {
            lm_head: tensors.linear(
                "lm_head.weight",
                [num_rows, hidden_size],
                WeightFormat::Auto,
            )?,
            target_ids: offset_into.map(target_ids).transpose()?,
        })
    }

    /// Bytes in memory.
    pub(super) fn num_bytes(&self) -> usize {
        let ids = self.target_ids.as_ref().map_or(0, Vec::len);
        self.lm_head.num_bytes() + ids * size_of::<u32>()
    }

    /// Turns rows of the head into the target's ids.
    pub(super) fn to_target_ids(&self, ids: &mut [u32]) {
        if let Some(target_ids) = &self.target_ids {
            for id in ids {
                *id = target_ids[*id as usize];
            }
        }
    }

    /// Logits `[num_rows, rows of the head]`.
    pub(super) fn forward(
        &self,
        device: &Device,
        hidden: &Buffer<f32>,
        num_rows: usize,
        logits: &mut Buffer<f32>,
    ) -> Result<()> {
        Ok(self
            .lm_head
            .forward(device, hidden, num_rows, logits, Epilogue::Store)?)
    }
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
    /// For `num_slots` requests of `sizes`.
    pub(super) fn of(config: &BlockConfig, sizes: &DrafterSizes, num_slots: usize) -> Self {
        let num_rows = num_slots * sizes.num_draft_tokens;
        let (rank, top_k) = config
            .method
            .selector()
            .map_or((0, 0), |s| (s.rank, s.top_k));
        Self {
            logits: num_rows * config.num_drafted_ids(sizes.vocab_size),
            gate: num_rows * rank,
            token_ids: num_rows * top_k.max(sizes.width),
            log_probs: num_rows * (top_k * top_k).max(sizes.width),
        }
    }
}

/// Rows of a call, level-major: position by position, in each the requests in the order of their anchors.
#[derive(Clone, Copy)]
pub(super) struct DraftedRows<'a> {
    pub(super) anchors: &'a [DraftAnchor],
    pub(super) num_levels: usize,
    /// Final-norm outputs `[num_levels, anchors, hidden_size]`.
    pub(super) hidden: &'a Buffer<f32>,
}

impl DraftedRows<'_> {
    pub(super) fn num_rows(&self) -> usize {
        self.num_levels * self.anchors.len()
    }
}

/// Buffers of the head, allocated once.
pub(super) struct DraftHead {
    shape: LogitShape,
    num_drafted_ids: usize,
    max_width: usize,
    logits: Buffer<f32>,
    gate: Buffer<f32>,
    anchor_tokens: Staged<u32>,
    token_ids: Buffer<u32>,
    log_probs: Buffer<f32>,
}

/// Candidates of all rows of a call, on the host.
struct Selected {
    top_k: usize,
    /// `[rows, top_k]`.
    token_ids: Vec<u32>,
    /// `[rows, 1 or top_k (before), top_k]`.
    log_probs: Vec<f32>,
}

impl DraftHead {
    pub(super) fn new(device: &Device, config: &BlockConfig, sizes: &DrafterSizes) -> Result<Self> {
        let lens = HeadLens::of(config, sizes, sizes.num_slots);
        let num_drafted_ids = config.num_drafted_ids(sizes.vocab_size);
        Ok(Self {
            shape: config.logit_shape.unwrap_or(LogitShape::PLAIN),
            num_drafted_ids,
            max_width: sizes.width.min(num_drafted_ids),
            logits: device.try_alloc(lens.logits)?,
            gate: device.try_alloc(lens.gate)?,
            anchor_tokens: Staged::with_capacity(device, sizes.num_slots)?,
            token_ids: device.try_alloc(lens.token_ids)?,
            log_probs: device.try_alloc(lens.log_probs)?,
        })
    }

    /// Writes down the tokens of `anchors`.
    pub(super) fn look_from(&mut self, device: &Device, anchors: &[DraftAnchor]) -> Result<()> {
        let anchor_tokens = anchors.iter().map(|anchor| anchor.token_id);
        Ok(self.anchor_tokens.fill(device, anchor_tokens)?)
    }

    /// Where the list of [`look_from`](Self::look_from) lies.
    pub(super) fn list(&self) -> Option<u64> {
        self.anchor_tokens.cuda_address()
    }

    /// Logits of the last [`project`](Self::project), `[rows, drafted ids]`, as [`shape`](Self::shape) may have left them.
    pub(super) fn logits(&self) -> &Buffer<f32> {
        &self.logits
    }

    /// Computes the logits of all rows by the drafter's own head or the target's.
    pub(super) fn project(
        &mut self,
        device: &Device,
        target: Lent<'_>,
        own: Option<&OwnHead>,
        rows: DraftedRows<'_>,
    ) -> Result<()> {
        match own {
            Some(head) => head.forward(device, rows.hidden, rows.num_rows(), &mut self.logits),
            None => Ok(target.logits(device, rows.hidden, rows.num_rows(), &mut self.logits)?),
        }
    }

    /// Shapes the logits of `num_rows` rows in place, for a walk that adds its corrections to what they have become.
    pub(super) fn shape(&mut self, device: &Device, num_rows: usize) -> Result<()> {
        if self.shape == LogitShape::PLAIN {
            return Ok(());
        }
        ShapeLogits::run(
            device,
            ShapeLogitsArgs {
                shape: self.shape,
                num_rows,
                vocab_size: self.num_drafted_ids,
                logits: &mut self.logits,
            },
        )?;
        Ok(())
    }

    /// Candidates of each row that are wanted: the selector's, or the `width` likeliest.
    pub(super) fn top_k(&self, selector: Option<&SelectorWeights>, width: usize) -> usize {
        selector.map_or(width.min(self.max_width), |weights| weights.top_k)
    }

    /// Selects candidates of each position by the logits: with `selector` its own, scored given the candidate before;
    /// else the likeliest.
    pub(super) fn select(
        &mut self,
        device: &Device,
        selector: Option<&SelectorWeights>,
        rows: DraftedRows<'_>,
        width: usize,
    ) -> Result<()> {
        let top_k = self.top_k(selector, width);
        if let Some(weights) = selector {
            let (projection, store) = (&weights.hidden_projection, Epilogue::Store);
            let num_rows = rows.num_rows();
            projection.forward(device, rows.hidden, num_rows, &mut self.gate, store)?;
        }
        DraftSelect::run(
            device,
            DraftSelectArgs {
                logits: &self.logits,
                vocab_size: self.num_drafted_ids,
                num_levels: rows.num_levels,
                num_blocks: rows.anchors.len(),
                top_k,
                shape: self.shape,
                selector: selector.map(|weights| Selector {
                    gate: &self.gate,
                    predecessor: &weights.predecessor,
                    successor: &weights.successor,
                    anchor_tokens: &self.anchor_tokens,
                }),
                token_ids: &mut self.token_ids,
                log_probs: &mut self.log_probs,
            },
        )?;
        Ok(())
    }

    /// Proposes what [`select`](Self::select) left.
    pub(super) fn propose(
        &self,
        own: Option<&OwnHead>,
        selector: Option<&SelectorWeights>,
        rows: DraftedRows<'_>,
        width: usize,
        proposals: &mut [Proposal],
    ) -> Result<()> {
        let top_k = self.top_k(selector, width);
        let (num_rows, scores_per_row) = match selector {
            Some(_) => (rows.num_rows(), top_k * top_k),
            None => (rows.num_rows(), top_k),
        };
        let (ids, scores) = (num_rows * top_k, num_rows * scores_per_row);
        let (mut token_ids, log_probs) =
            self.token_ids
                .read_back_with(ids, &self.log_probs, scores)?;
        // A selector's candidates are the target's own ids.
        if let (Some(head), None) = (own, selector) {
            head.to_target_ids(&mut token_ids);
        }
        let selected = Selected {
            top_k,
            token_ids,
            log_probs,
        };
        selected.push_levels(rows, proposals);
        Ok(())
    }
}

impl Selected {
    fn push_levels(&self, rows: DraftedRows<'_>, proposals: &mut [Proposal]) {
        let scores_per_row = self.log_probs.len() / rows.num_rows();
        for (block, proposal) in proposals.iter_mut().enumerate() {
            for level in 0..rows.num_levels {
                let row = level * rows.anchors.len() + block;
                let num_parents = match level {
                    0 => 1,
                    _ => scores_per_row / self.top_k,
                };
                proposal.push_level(
                    &self.token_ids[row * self.top_k..][..self.top_k],
                    &self.log_probs[row * scores_per_row..][..num_parents * self.top_k],
                    num_parents,
                );
            }
        }
    }
}
