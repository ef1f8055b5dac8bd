//! How an engine speculates with a given drafter: the tree of every pass.
//!
//! In: options, what the drafter can score. Out: a [`SpeculationPlan`], or why the drafter cannot serve it.

use crate::device::Backend;
use crate::drafter::config::DrafterConfig;
use crate::error::{DrafterError, OptionError, Result};
use crate::kernels::paths::MAX_PATH_ROWS;
use crate::model::head::HeadPath;
use crate::options::EngineOptions;
use crate::options::speculation::{
    DraftScores, HeadPrecision, SpeculationPlan, TreePlan, TreePolicy, VerifyCosts,
};

/// Rows of a tree when nothing is said: acceptance gains little beyond, cost grows with every row.
const USUAL_TREE_NODES: usize = 32;

/// Resolves what `options` ask for on `backend` where exact passes take `head`; without a drafter that is plain decoding.
///
/// # Errors
/// [`OptionError`] for values that do not fit each other, [`DrafterError`] when the drafter cannot serve them.
pub(super) fn resolve(
    options: &EngineOptions,
    drafter: Option<&DrafterConfig>,
    head: HeadPath,
    backend: Backend,
) -> Result<SpeculationPlan> {
    let named = options
        .tree
        .as_deref()
        .map(str::parse::<TreePolicy>)
        .transpose()?;
    let verify_costs = options
        .verify_costs
        .clone()
        .map(VerifyCosts::new)
        .transpose()?;
    let Some(drafter) = drafter else {
        return Ok(SpeculationPlan::plain());
    };
    let policy = named.unwrap_or(match drafter.has_conditional_scores() {
        true => TreePolicy::Conditional,
        false => TreePolicy::DdTree,
    });
    let scores = scores_for(policy, drafter)?;
    if options.min_confidence > 0.0 && !drafter.has_confidence_head() {
        return Err(DrafterError::NoConfidenceHead {
            method: drafter.method(),
        }
        .into());
    }
    // One size stands for all trees.
    let size = |sizes: &[usize], tree: usize| sizes.get(tree).or(sizes.first()).copied();
    let tree = |tree: usize| -> Result<TreePlan> {
        let num_draft_tokens =
            size(&options.num_speculative_tokens, tree).unwrap_or(drafter.usual_draft_tokens());
        if !(1..MAX_PATH_ROWS).contains(&num_draft_tokens) {
            return Err(DrafterError::DraftLength {
                expected: MAX_PATH_ROWS - 1,
                got: num_draft_tokens,
            }
            .into());
        }
        let chain_rows = num_draft_tokens + 1;
        let tree_nodes = size(&options.tree_nodes, tree);
        let tree_nodes = match policy {
            TreePolicy::Chain => tree_nodes.unwrap_or(chain_rows).min(chain_rows),
            _ => tree_nodes.unwrap_or(USUAL_TREE_NODES),
        };
        // More candidates than a tree has drafted nodes could not all be taken.
        let most = tree_nodes.saturating_sub(1).max(1);
        let width = match (policy, scores) {
            (_, DraftScores::Greedy) => 1,
            (TreePolicy::Eagle, _) | (_, DraftScores::Conditional) => {
                drafter.usual_width(tree_nodes).min(most)
            }
            (_, DraftScores::Marginal) => most,
        };
        Ok(TreePlan {
            policy,
            tree_nodes,
            num_draft_tokens,
            scores,
            width,
            min_confidence: options.min_confidence,
            verify_costs: verify_costs.clone(),
        })
    };
    let has_estimates = head == HeadPath::Screened && backend == Backend::Host;
    let q_head = match (options.q_head.as_str(), has_estimates) {
        ("exact", _) | ("auto", false) => HeadPrecision::Exact,
        (_, true) => HeadPrecision::Int8,
        (_, false) => {
            let why = match backend {
                Backend::Host => "where head is dense, which makes no INT8 copy",
                Backend::Cuda => "on CUDA, where exact scores of what survives cost no more",
            };
            return Err(OptionError::Value {
                option: "q_head",
                expected: format!("exact or auto {why}"),
                got: format!("{:?}", options.q_head),
            }
            .into());
        }
    };
    let plan = SpeculationPlan {
        trees: (0..=options.q_passes).map(tree).collect::<Result<_>>()?,
        q_head,
        draft_head: drafter.reads_target_head().then_some(match head {
            HeadPath::Screened => HeadPrecision::Int8,
            HeadPath::Dense => HeadPrecision::Exact,
        }),
    };
    match &verify_costs {
        Some(costs) if costs.max_rows() < plan.pass_rows() => Err(OptionError::Value {
            option: "verify_costs",
            expected: format!("a cost for each of 1 to {} rows", plan.pass_rows()),
            got: format!("{} costs", costs.max_rows()),
        }
        .into()),
        _ => Ok(plan),
    }
}

/// The scores that `policy` grows a tree from: conditional ones wherever they will do.
fn scores_for(policy: TreePolicy, drafter: &DrafterConfig) -> Result<DraftScores, DrafterError> {
    let scores = match policy {
        TreePolicy::Chain => return Ok(DraftScores::Greedy),
        TreePolicy::DdTree => DraftScores::Marginal,
        TreePolicy::Conditional => DraftScores::Conditional,
        TreePolicy::Spine | TreePolicy::Eagle => match drafter.has_conditional_scores() {
            true => DraftScores::Conditional,
            false => DraftScores::Marginal,
        },
    };
    let (is_there, name, usable) = match scores {
        DraftScores::Marginal => (
            drafter.has_marginal_scores(),
            "position-wise",
            "\"conditional\" or \"chain\"",
        ),
        _ => (
            drafter.has_conditional_scores(),
            "parent-conditional",
            "\"ddtree\" or \"chain\"",
        ),
    };
    match is_there {
        true => Ok(scores),
        false => Err(DrafterError::NoScores {
            policy: policy.name(),
            method: drafter.method(),
            scores: name,
            usable,
        }),
    }
}
