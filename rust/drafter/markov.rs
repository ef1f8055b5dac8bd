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
use crate::device::{Buffer, Device, Staged};
use crate::error::Result;
use crate::kernels::Kernel;
use crate::kernels::bf16_matmul::Epilogue;
use crate::kernels::draft_select::{DraftSelect, DraftSelectArgs, LogitShape};
use crate::kernels::embed_rows::{EmbedRows, EmbedRowsArgs};
use crate::kernels::gate::{Gate, GateArgs, GateKind};
use crate::kernels::gather_taps::{GatherTaps, GatherTapsArgs};
use crate::kernels::matmul_rows::{MatmulInput, MatmulRows};

/// Rows of the walk's buffers, by what they hold. `B` is a buffer; planning memory puts a number in its place.
struct Activations<B = Buffer<f32>> {
    /// Codes of the parents; of a recurrent walk then what corrects.
    codes: B,
    /// Gated codes.
    gated: MatmulRows<B>,
    /// Gate, or the three parts of the recurrent update.
    mixed: B,
    /// Recurrent states of the parents.
    states_before: B,
}

/// What a step's kernels read on both sides.
#[derive(Default)]
struct Lists {
    /// Tokens of the beam's nodes.
    token_ids: Staged<u32>,
    /// Their rows of the block.
    own_rows: Staged<u32>,
    /// A zero for each row of the block.
    zeros: Staged<u32>,
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
        let gated = match markov.kind {
            MarkovKind::Gated => markov.rank,
            _ => 0,
        };
        let state = match markov.kind {
            MarkovKind::Rnn { .. } => markov.rank,
            _ => 0,
        };
        Ok(Self {
            codes: rows(markov.rank)?,
            gated: MatmulRows::with(gated, &mut rows)?,
            mixed: rows(mixed_dim(markov))?,
            states_before: rows(state)?,
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
    activations: Activations,
    lists: Lists,
    /// Recurrent states of the beam's nodes after their update. Such walks are rare and their states short: the host
    /// updates them.
    states: Vec<f32>,
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
            activations: Activations::with(markov, |width| device.try_alloc(num_rows * width))?,
            lists: Lists::default(),
            states: Vec::new(),
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

    /// Proposes `width` children of each of the `width` best nodes per position. `logits` are those of all `rows`, shaped
    /// and uncorrected.
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
        self.states.clear();
        self.states.resize(rows.anchors.len() * self.rank, 0.0);
        let confidence = weights.confidence.filter(|_| wanted.min_confidence > 0.0);
        let hidden = match confidence {
            Some(_) => rows.hidden.read_back(rows.num_rows() * self.hidden_size)?,
            None => Vec::new(),
        };
        let anchors = rows.anchors.iter().map(|anchor| anchor.token_id);
        self.beam.start(anchors.enumerate());
        for level in 0..rows.num_levels {
            let first_row = level * rows.anchors.len();
            if let Some(confidence) = confidence {
                let log_min = wanted.min_confidence.ln();
                let hidden = &hidden[first_row * self.hidden_size..];
                self.give_up(device, weights.markov, confidence, hidden, log_min)?;
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
                    shape: LogitShape::PLAIN,
                    selector: None,
                    token_ids: &mut self.token_ids,
                    log_probs: &mut self.log_probs,
                },
            )?;
            let num_children = num_nodes * width;
            let (mut token_ids, log_probs) =
                self.token_ids
                    .read_back_with(num_children, &self.log_probs, num_children)?;
            if let Some(head) = weights.own_head {
                head.to_target_ids(&mut token_ids);
            }
            let children = RankedRows {
                top_k: width,
                token_ids: &token_ids,
                log_probs: &log_probs,
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
        let (num_rows, mixed) = (rows.num_rows(), &mut self.from_hidden);
        let mut epilogue = Epilogue::Store;
        if let Some(bias) = bias {
            let zeros = std::iter::repeat_n(0, num_rows);
            self.lists.zeros.fill(device, zeros)?;
            take_rows(device, bias, &self.lists.zeros, self.mixed_dim, mixed)?;
            epilogue = Epilogue::AddToOutput;
        }
        Ok(linear.forward(device, rows.hidden, num_rows, mixed, epilogue)?)
    }

    /// Gives up nodes of the beam whose children the confidence head thinks unlikely to be accepted; `hidden` holds the
    /// rows of their position.
    fn give_up(
        &mut self,
        device: &Device,
        markov: &MarkovWeights,
        confidence: &ConfidenceWeights,
        hidden: &[f32],
        log_min: f64,
    ) -> Result<()> {
        self.look_codes_up(device, markov)?;
        let nodes = self.beam.nodes();
        let codes = self.activations.codes.read_back(nodes.len() * self.rank)?;
        let log_probability = |(node, code): (&BeamNode, _)| {
            let hidden = &hidden[node.request * self.hidden_size..][..self.hidden_size];
            confidence.log_probability(hidden, code)
        };
        let nodes = nodes.iter().zip(codes.chunks_exact(self.rank));
        let log_confidences: Vec<f32> = nodes.map(log_probability).collect();
        self.beam.give_up(&log_confidences, log_min);
        Ok(())
    }

    /// Fills `codes` with those of the beam's tokens.
    fn look_codes_up(&mut self, device: &Device, weights: &MarkovWeights) -> Result<()> {
        let token_ids = self.beam.nodes().iter().map(|node| node.token_id);
        self.lists.token_ids.fill(device, token_ids)?;
        EmbedRows::run(
            device,
            EmbedRowsArgs {
                table: &weights.codes,
                token_ids: &self.lists.token_ids,
                scale: 1.0,
                y: &mut self.activations.codes,
            },
        )?;
        Ok(())
    }

    /// Corrected logits of the children of all nodes of the beam.
    fn correct(
        &mut self,
        device: &Device,
        weights: &MarkovWeights,
        first_row: usize,
        logits: &Buffer<f32>,
    ) -> Result<()> {
        self.look_codes_up(device, weights)?;
        let nodes = self.beam.nodes();
        let num_nodes = nodes.len();
        let own_row = |node: &BeamNode| (first_row + node.request) as u32;
        let own_rows = &mut self.lists.own_rows;
        own_rows.fill(device, nodes.iter().map(own_row))?;
        let Activations {
            codes,
            gated,
            mixed,
            states_before,
        } = &mut self.activations;
        if self.mixed_dim > 0 {
            take_rows(device, &self.from_hidden, own_rows, self.mixed_dim, mixed)?;
        }
        let add = Epilogue::AddToOutput;
        let corrects = match &weights.mixing {
            MarkovMixing::Vanilla => MatmulInput::from(&*codes),
            MarkovMixing::Gated { code, .. } => {
                code.forward(device, &*codes, num_nodes, mixed, add)?;
                Gate::run(
                    device,
                    GateArgs {
                        kind: GateKind::SigmoidMultiply,
                        x: mixed,
                        x_offset: 0,
                        x_stride: self.rank,
                        num_vectors: num_nodes,
                        width: self.rank,
                        values: codes,
                        per_row: 1,
                        y: (&mut *gated).into(),
                    },
                )?;
                MatmulInput::from(&*gated)
            }
            MarkovMixing::Rnn { state, code, .. } => {
                let of_parent =
                    |node: &BeamNode| &self.states[node.parent_row * self.rank..][..self.rank];
                let before: Vec<f32> = nodes.iter().flat_map(of_parent).copied().collect();
                states_before.upload_in_order(&before)?;
                code.forward(device, &*codes, num_nodes, mixed, add)?;
                state.forward(device, &*states_before, num_nodes, mixed, add)?;
                let mixed = mixed.read_back(num_nodes * 3 * self.rank)?;
                let mut corrects = vec![0.0; before.len()];
                self.states.resize(before.len(), 0.0);
                for (((mixed, before), state), corrects) in mixed
                    .chunks_exact(3 * self.rank)
                    .zip(before.chunks_exact(self.rank))
                    .zip(self.states.chunks_exact_mut(self.rank))
                    .zip(corrects.chunks_exact_mut(self.rank))
                {
                    update_state(mixed, before, state, corrects);
                }
                codes.upload_in_order(&corrects)?;
                MatmulInput::from(&*codes)
            }
        };
        let num_ids = self.num_drafted_ids;
        take_rows(device, logits, own_rows, num_ids, &mut self.logits)?;
        Ok(weights
            .correction
            .forward(device, corrects, num_nodes, &mut self.logits, add)?)
    }
}

/// Copies rows of `width` values to the front of `to`.
fn take_rows(
    device: &Device,
    from: &Buffer<f32>,
    rows: &Staged<u32>,
    width: usize,
    to: &mut Buffer<f32>,
) -> Result<()> {
    GatherTaps::run(
        device,
        GatherTapsArgs {
            taps: std::slice::from_ref(from),
            rows,
            width,
            y: to,
        },
    )?;
    Ok(())
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
