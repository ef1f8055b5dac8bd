//! What options come to on a given model, drafter and machine: limits, tree shape, and every byte the engine holds.
//!
//! In: options, configs, a memory size. Out: [`Limits`], then a [`Footprint`] of what is held whatever comes, then the
//! pages of keys and values for which the rest suffices. All of it is known before a weight is read: the engine
//! allocates from an [`EnginePlan`], and `specpilot plan` prints a [`deployment::DeploymentPlan`] made by the same
//! functions, which ask the types that allocate for their sizes.

pub mod available;
pub mod budget;
pub mod deployment;
pub mod footprint;
pub mod size;
pub mod weight_bytes;

use std::fmt;

use crate::cache::slots::LayerCache;
use crate::device::Backend;
use crate::drafter::config::DrafterConfig;
use crate::drafter::footprint::DrafterSizes;
use crate::error::{DrafterError, OptionError, Result, human_bytes};
use crate::kernels::paths::MAX_PATH_ROWS;
use crate::kernels::tree_attention::KV_BLOCK;
use crate::model::config::{MixerKind, ModelConfig};
use crate::model::head::HeadPath;
use crate::options::EngineOptions;
use crate::options::speculation::{DraftScores, TreePlan, TreePolicy, VerifyCosts};
use budget::Budget;
use footprint::{Footprint, kv_shape};

/// Most rows of one forward over all requests.
const MAX_STEP_ROWS: usize = 256;

/// Rows of a tree when nothing is said: acceptance gains little beyond, cost grows with every row.
const USUAL_TREE_NODES: usize = 32;

/// Parents per position, and children of each, where conditional scores cost the drafter work. EAGLE-2 takes 10; on the
/// demo pair 4 accepts more with trees of 32 rows (DSpark 4.87 against 4.75 tokens a pass, EAGLE-3 5.55 against 5.30),
/// as scores of unlikely siblings are too high, and it costs less.
const USUAL_WIDTH: usize = 4;

/// Resolved limits.
#[derive(Clone, Debug)]
pub struct Limits {
    /// Context limit in tokens.
    pub max_model_len: usize,
    /// Requests that may run at once.
    pub max_num_seqs: usize,
    /// Most rows of one forward.
    pub max_step_rows: usize,
    /// How greedy tokens are found.
    pub head: HeadPath,
    /// Tree shape.
    pub tree: TreePlan,
}

impl Limits {
    /// Resolves `options` on `backend`.
    ///
    /// # Errors
    /// [`OptionError`] when an option cannot be honoured on this model, [`DrafterError`] when the drafter cannot serve
    /// the tree asked for.
    pub fn resolve(
        options: &EngineOptions,
        config: &ModelConfig,
        drafter: Option<&DrafterConfig>,
        backend: Backend,
    ) -> Result<Self> {
        let max_model_len = options
            .max_model_len
            .unwrap_or(config.max_position_embeddings);
        if max_model_len > config.max_position_embeddings {
            return Err(OptionError::Value {
                option: "max_model_len",
                expected: format!(
                    "at most the model's max_position_embeddings {}",
                    config.max_position_embeddings
                ),
                got: max_model_len.to_string(),
            }
            .into());
        }
        let tree = resolve_tree(options, drafter)?;
        Ok(Self {
            max_model_len,
            max_num_seqs: options.max_num_seqs,
            max_step_rows: MAX_STEP_ROWS.max(MAX_PATH_ROWS),
            head: resolve_head(options, config, backend)?,
            tree,
        })
    }

    /// What a drafter must hold beside `num_kv_pages` of the target's.
    pub fn drafter_sizes(&self, config: &ModelConfig, num_kv_pages: usize) -> DrafterSizes {
        DrafterSizes {
            num_slots: self.max_num_seqs,
            num_pages: num_kv_pages,
            pages_per_sequence: self.pages_per_sequence(),
            vocab_size: config.vocab_size,
            num_draft_tokens: self.tree.num_draft_tokens,
            width: self.tree.width,
        }
    }

    /// KV pages of one request of `max_model_len` tokens.
    pub fn pages_per_sequence(&self) -> usize {
        self.max_model_len.div_ceil(KV_BLOCK)
    }
}

/// What an engine allocates.
#[derive(Clone, Debug)]
pub struct EnginePlan {
    /// Limits of requests and passes.
    pub limits: Limits,
    /// What is held whatever comes, and the size of a page.
    pub footprint: Footprint,
    /// KV pages of 64 positions, shared by all requests; the drafter's context has as many.
    pub num_kv_pages: usize,
}

impl EnginePlan {
    /// Gives what `budget` leaves to KV pages, up to what all requests together can use; `None` = no limit is known.
    ///
    /// # Errors
    /// [`OptionError::Memory`] when not even one request of `max_model_len` tokens fits.
    pub fn resolve(
        limits: Limits,
        footprint: Footprint,
        budget: Option<Budget>,
    ) -> Result<Self, OptionError> {
        let num_wanted = limits.pages_per_sequence() * limits.max_num_seqs;
        let num_kv_pages = match budget {
            None => num_wanted,
            Some(budget) => {
                budget.require(&footprint, limits.max_model_len)?;
                num_wanted.min(budget.num_pages(&footprint))
            }
        };
        Ok(Self {
            limits,
            footprint,
            num_kv_pages,
        })
    }
}

impl fmt::Display for EnginePlan {
    /// What is held, by purpose.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (part, num_bytes) in self.footprint.parts() {
            if num_bytes > 0 {
                write!(f, "{part} {}, ", human_bytes(num_bytes))?;
            }
        }
        let pool_bytes = self.num_kv_pages as u64 * self.footprint.page_bytes();
        write!(f, "KV pool {}", human_bytes(pool_bytes))
    }
}

/// Which cache each layer of a model uses.
pub fn layer_caches(config: &ModelConfig) -> Vec<LayerCache> {
    config
        .layers
        .iter()
        .map(|layer| match layer.mixer {
            MixerKind::Attention => LayerCache::Attention(kv_shape(config)),
            MixerKind::GatedDelta => LayerCache::GatedDelta,
        })
        .collect()
}

fn resolve_head(
    options: &EngineOptions,
    config: &ModelConfig,
    backend: Backend,
) -> Result<HeadPath> {
    match options.head.as_str() {
        "dense" => Ok(HeadPath::Dense),
        "screened" if HeadPath::can_screen(config.hidden_size) => Ok(HeadPath::Screened),
        "screened" => Err(OptionError::Value {
            option: "head",
            expected: "dense or auto for a hidden size beyond 65536".into(),
            got: "\"screened\"".into(),
        }
        .into()),
        _ if backend == Backend::Cuda && HeadPath::can_screen(config.hidden_size) => {
            Ok(HeadPath::Screened)
        }
        _ => Ok(HeadPath::usual(config.vocab_size, config.hidden_size)),
    }
}

fn resolve_tree(options: &EngineOptions, drafter: Option<&DrafterConfig>) -> Result<TreePlan> {
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
        return Ok(TreePlan::PLAIN);
    };
    let policy = named.unwrap_or(match drafter.has_conditional_scores() {
        true => TreePolicy::Conditional,
        false => TreePolicy::DdTree,
    });
    let scores = scores_for(policy, drafter)?;
    let num_draft_tokens = options
        .num_speculative_tokens
        .unwrap_or(drafter.usual_draft_tokens());
    if !(1..MAX_PATH_ROWS).contains(&num_draft_tokens) {
        return Err(DrafterError::DraftLength {
            expected: MAX_PATH_ROWS - 1,
            got: num_draft_tokens,
        }
        .into());
    }
    let chain_rows = num_draft_tokens + 1;
    let tree_nodes = match policy {
        TreePolicy::Chain => options.tree_nodes.unwrap_or(chain_rows).min(chain_rows),
        _ => options.tree_nodes.unwrap_or(USUAL_TREE_NODES),
    };
    // More candidates than a tree has drafted nodes could not all be taken.
    let most = tree_nodes.saturating_sub(1).max(1);
    let width = match (policy, scores) {
        (_, DraftScores::Greedy) => 1,
        (TreePolicy::Eagle, _) | (_, DraftScores::Conditional) => USUAL_WIDTH.min(most),
        (_, DraftScores::Marginal) => most,
    };
    let plan = TreePlan {
        policy,
        tree_nodes,
        num_draft_tokens,
        scores,
        width,
        q_passes: options.q_passes,
        min_confidence: options.min_confidence,
        verify_costs,
    };
    match &plan.verify_costs {
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

#[cfg(test)]
pub(crate) mod tests;
