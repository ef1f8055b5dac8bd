//! Exact logits of survivors, and the dense path for rows that were not decided by them.

use super::super::Kernel;
use super::super::bf16_matmul::{
    Bf16Matmul, Bf16MatmulArgs, Epilogue, PackedBf16, Product, TilePair, multiply_tile_pairs,
};
use super::super::greedy_argmax::{GreedyArgmax, GreedyArgmaxArgs};
use super::super::masked_ids::MaskedIds;
use super::super::simd::{Isa, LANES};
use crate::device::{Buffer, HostDevice};

/// What both ways to a decision read.
pub(super) struct Problem<'a> {
    pub(super) device: &'a HostDevice,
    pub(super) isa: Isa,
    /// `[rows, in_features]`.
    pub(super) x: &'a [f32],
    pub(super) exact: &'a PackedBf16,
}

/// A channel that may hold its row's largest logit.
#[derive(Clone, Copy)]
pub(super) struct Survivor {
    pub(super) row: usize,
    pub(super) id: u32,
}

/// A decided row.
pub(super) struct Choice {
    pub(super) row: usize,
    pub(super) id: u32,
    pub(super) logit: f32,
    pub(super) gap: f32,
}

/// The two largest logits of a row, over ids in ascending order.
struct TopTwo {
    id: u32,
    largest: f32,
    second: f32,
}

impl TopTwo {
    /// Nothing is above -inf yet: the first id stands.
    fn starting_at(id: u32) -> Self {
        Self {
            id,
            largest: f32::NEG_INFINITY,
            second: f32::NEG_INFINITY,
        }
    }

    /// A NaN is passed over, and the lower id keeps a tie.
    fn add(&mut self, id: u32, logit: f32) {
        if logit > self.largest {
            self.second = self.largest;
            (self.id, self.largest) = (id, logit);
        } else if logit > self.second {
            self.second = logit;
        }
    }

    fn gap(&self) -> f32 {
        if self.second == f32::NEG_INFINITY {
            f32::INFINITY
        } else if self.second == self.largest {
            // Infinities too.
            0.0
        } else {
            self.largest - self.second
        }
    }
}

/// Decides every row that has survivors; they come row by row, ids ascending.
pub(super) fn decide_survivors(problem: &Problem<'_>, survivors: &[Survivor]) -> Vec<Choice> {
    let pair_of = |survivor: &Survivor| TilePair {
        tile: survivor.id / LANES as u32,
        row: survivor.row as u32,
    };
    let mut pairs: Vec<_> = survivors.iter().map(pair_of).collect();
    pairs.sort_unstable();
    pairs.dedup();
    let Problem {
        device,
        isa,
        x,
        exact,
    } = problem;
    let sums = multiply_tile_pairs(device, *isa, x, exact, &pairs);
    let logit = |survivor: &Survivor| {
        let pair = pairs.binary_search(&pair_of(survivor));
        let pair = pair.expect("every survivor has a pair");
        sums[pair][survivor.id as usize % LANES]
    };
    survivors
        .chunk_by(|a, b| a.row == b.row)
        .map(|survivors| {
            let mut top = TopTwo::starting_at(survivors[0].id);
            for survivor in survivors {
                top.add(survivor.id, logit(survivor));
            }
            Choice {
                row: survivors[0].row,
                id: top.id,
                logit: top.largest,
                gap: top.gap(),
            }
        })
        .collect()
}

/// Decides `rows` by all of their logits.
pub(super) fn decide_densely(
    problem: &Problem<'_>,
    rows: &[usize],
    masked: &MaskedIds,
    with_gap: bool,
    logits: &mut Buffer<f32>,
) -> Vec<Choice> {
    if rows.is_empty() {
        return Vec::new();
    }
    let (n, k) = (problem.exact.out_features(), problem.exact.in_features());
    let x: Vec<f32> = rows
        .iter()
        .flat_map(|row| &problem.x[row * k..][..k])
        .copied()
        .collect();
    Bf16Matmul::host(
        problem.device,
        Bf16MatmulArgs {
            x: (&Buffer::from_slice(&x)).into(),
            num_rows: rows.len(),
            products: vec![Product {
                weight: problem.exact,
                y: logits,
            }],
            epilogue: Epilogue::Store,
        },
    );
    let masked: Vec<&[u32]> = rows.iter().map(|&row| masked.row(row)).collect();
    let mut token_ids = vec![0; rows.len()];
    let mut best_logits = vec![0.0; rows.len()];
    GreedyArgmax::host(
        problem.device,
        GreedyArgmaxArgs {
            logits,
            num_rows: rows.len(),
            vocab_size: n,
            masked: &MaskedIds::on_host(&masked),
            token_ids: &mut token_ids,
            best_logits: &mut best_logits,
        },
    );
    let gap = |i: usize| gap_of(&logits.host()[i * n..][..n], masked[i]);
    (rows.iter().zip(token_ids).zip(best_logits).enumerate())
        .map(|(i, ((&row, id), logit))| Choice {
            row,
            id,
            logit,
            gap: if with_gap { gap(i) } else { f32::NAN },
        })
        .collect()
}

/// The difference between the two largest logits that are neither masked nor NaN.
pub(super) fn gap_of(logits: &[f32], masked: &[u32]) -> f32 {
    let mut top = TopTwo::starting_at(0);
    let masked = super::mask_bits(masked, logits.len());
    for (id, &logit) in logits.iter().enumerate() {
        if masked[id / LANES] >> (id % LANES) & 1 == 0 {
            top.add(id as u32, logit);
        }
    }
    top.gap()
}
