//! One decode step over the requests of a batch, in the order of the method.

use crate::cache::slots::SequenceCaches;
use crate::device::Device;
use crate::drafter::Drafter;
use crate::error::Result;
use crate::model::decoder::Decoder;
use crate::request::Request;

use super::types::{Batch, Committed};
use super::{accept, commit, draft, forest, tree::TreePolicy, verify};

/// A target with its caches and, when speculating, a drafter: all that a step computes with.
pub struct ModelPair {
    /// Where everything runs.
    pub device: Device,
    /// The model whose greedy tokens are emitted.
    pub target: Decoder,
    /// The target's sequence memory.
    pub caches: SequenceCaches,
    /// Proposes tokens; `None` = plain decoding.
    pub drafter: Option<Box<dyn Drafter>>,
}

/// How trees are grown, fixed for an engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TreePlan {
    /// Growth policy.
    pub policy: TreePolicy,
    /// Rows of a tree, root included.
    pub tree_nodes: usize,
    /// Longest path below the root.
    pub num_draft_tokens: usize,
}

/// Runs one step. Plain decoding is the tree of one node: it takes the same stages.
///
/// # Errors
/// Whatever a kernel or the drafter refuses. Nothing is committed for any request unless all rows were verified.
pub fn decode_step(
    pair: &mut ModelPair,
    requests: &mut [Request],
    plan: &TreePlan,
    batch: Batch,
) -> Result<Committed> {
    let proposals = draft::propose(pair, plan, batch)?;
    let trees = forest::grow(plan, proposals);
    let verified = verify::verify(pair, requests, trees)?;
    let accepted = accept::accept(requests, verified);
    commit::commit(pair, requests, accepted)
}
