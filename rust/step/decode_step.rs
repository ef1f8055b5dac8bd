//! One decode step over the requests of a batch, in the order of the method.

use crate::cache::slots::SequenceCaches;
use crate::device::Device;
use crate::drafter::Drafter;
use crate::drafter::proposal::Proposal;
use crate::error::Result;
use crate::kernels::paths::RowPaths;
use crate::kernels::placed_rows::PlacedRows;
use crate::model::decoder::Decoder;
use crate::options::speculation::{SpeculationPlan, TreePlan};
use crate::request::Request;

use super::grow::TreeGrower;
use super::stage_times::{Stage, StageClock};
use super::tree::TokenTree;
use super::types::{Batch, Committed, Stems, TokenTrees};
use super::{accept, commit, draft, forest, q_pass, verify};

/// A target with its caches and, when speculating, a drafter: all that a step computes with.
pub struct ModelPair {
    /// Where everything runs.
    pub device: Device,
    /// The model whose own choices are emitted.
    pub target: Decoder,
    /// The target's sequence memory.
    pub caches: SequenceCaches,
    /// Proposes tokens; `None` = plain decoding.
    pub drafter: Option<Box<dyn Drafter>>,
    /// Rows of the last forward of the target.
    pub paths: RowPaths,
    /// Those of them that were committed.
    pub committed_rows: PlacedRows,
    /// What drafting and growing use again every step.
    pub workspace: DraftWorkspace,
    /// Times the stages of steps.
    pub clock: StageClock,
}

/// Memory of past steps.
#[derive(Default)]
pub struct DraftWorkspace {
    /// Proposals, as many as there ever were entries to draft for.
    pub(super) proposals: Vec<Proposal>,
    /// Grows trees.
    pub(super) grower: TreeGrower,
    /// What grows below a stem.
    pub(super) branches: TokenTree,
    /// Trees that were committed.
    pub(super) spare_trees: Vec<TokenTree>,
}

/// Runs one step. Plain decoding is the tree of one node: it takes the same stages.
///
/// # Errors
/// Whatever a kernel or the drafter refuses. No request moves on unless all rows were verified; a drafter that fails after
/// that leaves what was committed. A pass that fails in the middle of a long prompt chunk has changed its slot's caches,
/// so after an error no slot of the batch may be used but for a new request.
pub fn decode_step(
    pair: &mut ModelPair,
    requests: &mut [Request],
    plan: &SpeculationPlan,
    batch: Batch,
) -> Result<Committed> {
    let has_prompts = batch.has_prompts();
    pair.clock.start_step(&pair.device);
    let stems = draft::stems(pair, batch);
    let mut trees = draft_trees(pair, &plan.trees[0], stems)?;
    for next in &plan.trees[1..] {
        let marked = q_pass::mark(pair, requests, plan.q_head, trees)?;
        trees = draft_trees(pair, next, marked)?;
    }
    let verified = verify::verify(pair, requests, trees)?;
    let accepted = accept::accept(requests, verified);
    let committed = commit::commit(pair, requests, accepted)?;
    pair.clock.lap(&pair.device, Stage::Context)?;
    draft::start_next(pair, plan, requests, &committed)?;
    pair.clock.lap(&pair.device, Stage::Draft)?;
    if !has_prompts {
        pair.clock.end_step(&pair.device);
    }
    Ok(committed)
}

fn draft_trees(pair: &mut ModelPair, plan: &TreePlan, stems: Stems) -> Result<TokenTrees> {
    let proposals = draft::propose(pair, plan, stems)?;
    pair.clock.lap(&pair.device, Stage::Draft)?;
    let trees = forest::grow(&mut pair.workspace, plan, proposals);
    pair.clock.lap(&pair.device, Stage::Tree)?;
    Ok(trees)
}
