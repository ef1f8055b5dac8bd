//! DSpark's walk: position by position, each token's logits corrected by the token before it.
//!
//! The correction is low-rank: a code of the token before, as it is (vanilla), gated by hidden state and code, or fed
//! to a recurrent state over the path, times `markov_w2`. A beam decides which tokens of a position go on as parents;
//! with one parent and one child each this is the published greedy walk over the whole vocabulary.

use std::convert::Infallible;

use super::DraftRequest;
use super::beam::{Beam, BeamNode, Merging, RankedRows};
use super::config::{BlockConfig, MarkovConfig, MarkovKind};
use super::draft_head::{DraftedRows, OwnHead};
use super::footprint::DrafterSizes;
use super::proposal::Proposal;
use super::weights::{ConfidenceWeights, MarkovMixing, MarkovWeights};
use crate::device::{Buffer, Device};
use crate::error::Result;
use crate::kernels::Kernel;
use crate::kernels::bf16_matmul::Epilogue;
use crate::kernels::draft_select::{DraftSelect, DraftSelectArgs, LogitShape};
use crate::kernels::embed_rows::{EmbedRows, EmbedRowsArgs};
use crate::kernels::gate::{Gate, GateArgs, GateKind};
use crate::kernels::gather_taps::{GatherTaps, GatherTapsArgs};

/// Rows of the walk's buffers, by what they hold. `B` is a buffer; planning memory puts a number in its place.
struct Activations<B = Buffer<f32>> {
    /// Codes of the parents, then what corrects.
    codes: B,
    /// Gate, or the three parts of the recurrent update.
    mixed: B,
    /// Recurrent states of the parents, and those after their update.
    states_before: B,
    states: B,
}

/// Widths of [`Activations`] and of the hidden state's part of `mixed`.
fn mixed_dim(markov: &MarkovConfig) -> usize {
    match markov.kind {
        MarkovKind::Vanilla => 0,
        MarkovKind::Gated => markov.rank,
        MarkovKind::Rnn { .. } => 3 * markov.rank,
    }
}

impl<B> Activations<B> {
    fn with<E>(
        markov: &MarkovConfig,
        mut rows: impl FnMut(usize) -> Result<B, E>,
    ) -> Result<Self, E> {
        let state = match markov.kind {
            MarkovKind::Rnn { .. } => markov.rank,
            _ => 0,
        };
        Ok(Self {
            codes: rows(markov.rank)?,
            mixed: rows(mixed_dim(markov))?,
            states_before: rows(state)?,
            states: rows(state)?,
        })
    }
}

/// Elements that the walk of `num_slots` requests takes: activations, fp32 values, 32-bit ids.
pub(super) fn lens_of(config: &BlockConfig, sizes: &DrafterSizes, num_slots: usize) -> [usize; 3] {
    let Some(markov) = config.method.markov() else {
        return [0; 3];
    };
    let mut row_len = 0;
    let count = |width| {
        row_len += width;
        Ok::<_, Infallible>(width)
    };
    let Ok(_) = Activations::with(markov, count);
    let num_rows = num_slots * sizes.width;
    let from_hidden = num_slots * sizes.num_draft_tokens * mixed_dim(markov);
    let logits = config.num_drafted_ids(sizes.vocab_size);
    [
        num_rows * row_len + from_hidden,
        num_rows * (logits + sizes.width),
        num_rows * sizes.width,
    ]
}

/// Buffers of the walk, allocated once.
pub(super) struct MarkovWalk {
    rank: usize,
    mixed_dim: usize,
    hidden_size: usize,
    num_drafted_ids: usize,
    shape: LogitShape,
    activations: Activations,
    /// The hidden state's part of `mixed`, for all positions.
    from_hidden: Buffer<f32>,
    logits: Buffer<f32>,
    token_ids: Buffer<u32>,
    log_probs: Buffer<f32>,
    beam: Beam,
}

/// What a walk reads.
#[derive(Clone, Copy)]
pub(super) struct WalkWeights<'a> {
    pub(super) markov: &'a MarkovWeights,
    pub(super) confidence: Option<&'a ConfidenceWeights>,
    pub(super) own_head: Option<&'a OwnHead>,
}

impl MarkovWalk {
    /// Buffers for `sizes`; `None` for a drafter without a Markov head.
    pub(super) fn new(
        device: &Device,
        config: &BlockConfig,
        sizes: &DrafterSizes,
    ) -> Result<Option<Self>> {
        let Some(markov) = config.method.markov() else {
            return Ok(None);
        };
        let num_rows = sizes.num_slots * sizes.width;
        let num_drafted_ids = config.num_drafted_ids(sizes.vocab_size);
        let from_hidden = sizes.num_slots * sizes.num_draft_tokens * mixed_dim(markov);
        Ok(Some(Self {
            rank: markov.rank,
            mixed_dim: mixed_dim(markov),
            hidden_size: config.hidden_size,
            num_drafted_ids,
            shape: config.logit_shape,
            activations: Activations::with(markov, |width| device.try_alloc(num_rows * width))?,
            from_hidden: device.try_alloc(from_hidden)?,
            logits: device.try_alloc(num_rows * num_drafted_ids)?,
            token_ids: device.try_alloc(num_rows * sizes.width)?,
            log_probs: device.try_alloc(num_rows * sizes.width)?,
            beam: Beam::new(match markov.kind {
                MarkovKind::Rnn { .. } => Merging::Never,
                _ => Merging::ByToken,
            }),
        }))
    }

    /// Proposes `width` children of each of the `width` best nodes per position. `logits` are those of all `rows`,
    /// uncorrected.
    pub(super) fn propose(
        &mut self,
        device: &Device,
        weights: WalkWeights<'_>,
        rows: DraftedRows<'_>,
        logits: &Buffer<f32>,
        wanted: DraftRequest,
        proposals: &mut [Proposal],
    ) -> Result<()> {
        let width = wanted.width.min(self.num_drafted_ids);
        self.mix_hidden(device, weights.markov, rows)?;
        self.activations.states.host_mut().fill(0.0);
        let anchors = rows.anchors.iter().map(|anchor| anchor.token_id);
        self.beam.start(anchors.enumerate());
        for level in 0..rows.num_levels {
            let first_row = level * rows.anchors.len();
            if let Some(confidence) = weights.confidence.filter(|_| wanted.min_confidence > 0.0) {
                let log_min = f64::from(wanted.min_confidence).ln();
                self.give_up(weights.markov, confidence, rows, first_row, log_min);
            }
            if self.beam.nodes().is_empty() {
                break;
            }
            self.correct(device, weights.markov, first_row, logits)?;
            let num_nodes = self.beam.nodes().len();
            DraftSelect::run(
                device,
                DraftSelectArgs {
                    logits: &self.logits,
                    vocab_size: self.num_drafted_ids,
                    num_levels: 1,
                    num_blocks: num_nodes,
                    top_k: width,
                    shape: self.shape,
                    selector: None,
                    token_ids: &mut self.token_ids,
                    log_probs: &mut self.log_probs,
                },
            )?;
            let token_ids = &mut self.token_ids.host_mut()[..num_nodes * width];
            if let Some(head) = weights.own_head {
                head.to_target_ids(token_ids);
            }
            let log_probs = &self.log_probs.host()[..num_nodes * width];
            let children = RankedRows {
                top_k: width,
                token_ids,
                log_probs,
            };
            self.beam.advance(proposals, &children, width);
        }
        Ok(())
    }

    /// The part of `mixed` that no parent changes.
    fn mix_hidden(
        &mut self,
        device: &Device,
        weights: &MarkovWeights,
        rows: DraftedRows<'_>,
    ) -> Result<()> {
        let (linear, bias) = match &weights.mixing {
            MarkovMixing::Vanilla => return Ok(()),
            MarkovMixing::Gated { hidden, bias, .. } => (hidden, Some(bias)),
            MarkovMixing::Rnn { hidden, bias, .. } => (hidden, bias.as_ref()),
        };
        let num_rows = rows.num_rows();
        linear.forward(
            device,
            rows.hidden,
            num_rows,
            &mut self.from_hidden,
            Epilogue::Store,
        )?;
        if let Some(bias) = bias {
            let from_hidden = &mut self.from_hidden.host_mut()[..num_rows * self.mixed_dim];
            for row in from_hidden.chunks_exact_mut(self.mixed_dim) {
                row.iter_mut()
                    .zip(bias.host())
                    .for_each(|(x, bias)| *x += bias);
            }
        }
        Ok(())
    }

    /// Gives up nodes of the beam whose children the confidence head thinks unlikely to be accepted.
    fn give_up(
        &mut self,
        markov: &MarkovWeights,
        confidence: &ConfidenceWeights,
        rows: DraftedRows<'_>,
        first_row: usize,
        log_min: f64,
    ) {
        let mut code = vec![0.0; self.rank];
        let log_probability = |node: &BeamNode| {
            markov.codes.unpack_row(node.token_id as usize, &mut code);
            let start = (first_row + node.request) * self.hidden_size;
            confidence.log_probability(&rows.hidden.host()[start..][..self.hidden_size], &code)
        };
        let log_confidences: Vec<f32> = self.beam.nodes().iter().map(log_probability).collect();
        self.beam.give_up(&log_confidences, log_min);
    }

    /// Corrected logits of the children of all nodes of the beam.
    fn correct(
        &mut self,
        device: &Device,
        weights: &MarkovWeights,
        first_row: usize,
        logits: &Buffer<f32>,
    ) -> Result<()> {
        let nodes = self.beam.nodes();
        let num_nodes = nodes.len();
        let token_ids: Vec<u32> = nodes.iter().map(|node| node.token_id).collect();
        let Activations {
            codes,
            mixed,
            states_before,
            states,
        } = &mut self.activations;
        EmbedRows::run(
            device,
            EmbedRowsArgs {
                table: &weights.codes,
                token_ids: &token_ids,
                y: codes,
            },
        )?;
        let own_row = |node: &BeamNode| first_row + node.request;
        copy_rows(
            &self.from_hidden,
            mixed,
            self.mixed_dim,
            nodes.iter().map(own_row),
        );
        let add = Epilogue::AddToOutput;
        match &weights.mixing {
            MarkovMixing::Vanilla => {}
            MarkovMixing::Gated { code, .. } => {
                code.forward(device, codes, num_nodes, mixed, add)?;
                Gate::run(
                    device,
                    GateArgs {
                        kind: GateKind::SigmoidMultiply,
                        x: mixed,
                        x_offset: 0,
                        x_stride: self.rank,
                        num_vectors: num_nodes,
                        width: self.rank,
                        y: codes,
                    },
                )?;
            }
            MarkovMixing::Rnn { state, code, .. } => {
                let parent_rows: Vec<u32> =
                    nodes.iter().map(|node| node.parent_row as u32).collect();
                GatherTaps::run(
                    device,
                    GatherTapsArgs {
                        taps: std::slice::from_ref(states),
                        rows: &parent_rows,
                        width: self.rank,
                        y: states_before,
                    },
                )?;
                code.forward(device, codes, num_nodes, mixed, add)?;
                state.forward(device, states_before, num_nodes, mixed, add)?;
                for row in 0..num_nodes {
                    let range = row * self.rank..(row + 1) * self.rank;
                    update_state(
                        &mixed.host()[3 * range.start..3 * range.end],
                        &states_before.host()[range.clone()],
                        &mut states.host_mut()[range.clone()],
                        &mut codes.host_mut()[range],
                    );
                }
            }
        }
        copy_rows(
            logits,
            &mut self.logits,
            self.num_drafted_ids,
            nodes.iter().map(own_row),
        );
        Ok(weights
            .correction
            .forward(device, codes, num_nodes, &mut self.logits, add)?)
    }
}

/// Copies rows of `width` values to the front of `to`.
fn copy_rows(
    from: &Buffer<f32>,
    to: &mut Buffer<f32>,
    width: usize,
    rows: impl Iterator<Item = usize>,
) {
    if width > 0 {
        for (row, to) in rows.zip(to.host_mut().chunks_exact_mut(width)) {
            to.copy_from_slice(&from.host()[row * width..][..width]);
        }
    }
}

/// `state = g * before + (1 - g) * tanh(c)`, and `tanh(o)` is what corrects; `mixed` is `[g, c, o]`, g before its
/// sigmoid.
fn update_state(mixed: &[f32], before: &[f32], state: &mut [f32], corrects: &mut [f32]) {
    let rank = state.len();
    for i in 0..rank {
        let gate = 1.0 / (1.0 + (-mixed[i]).exp());
        state[i] = gate * before[i] + (1.0 - gate) * mixed[rank + i].tanh();
        corrects[i] = mixed[2 * rank + i].tanh();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_state_mixes_what_was_and_what_comes_by_its_gate() {
        let mixed = [0.0, 20.0, 1.0, 1.0, 0.5, -0.5];
        let (mut state, mut corrects) = ([0.0; 2], [0.0; 2]);
        update_state(&mixed, &[0.4, 0.4], &mut state, &mut corrects);
        let tanh = |x: f32| (x.exp() - (-x).exp()) / (x.exp() + (-x).exp());
        assert!((state[0] - (0.2 + 0.5 * tanh(1.0))).abs() < 1e-6);
        assert!((state[1] - 0.4).abs() < 1e-6, "an open gate keeps what was");
        assert!((corrects[0] - tanh(0.5)).abs() < 1e-6 && corrects[1] == -corrects[0]);
    }
}
