//! What options come to on a given model, drafter and machine: limits, tree shape, cache sizes. Decided once at load
//! and printed; the engine allocates from it.

use crate::cache::pages::{KvCache, KvShape};
use crate::cache::slots::LayerCache;
use crate::drafter::Drafter;
use crate::error::{DrafterError, OptionError, Result};
use crate::kernels::paths::MAX_PATH_ROWS;
use crate::kernels::tree_attention::KV_BLOCK;
use crate::model::config::{MixerKind, ModelConfig};
use crate::model::head::HeadPath;
use crate::options::EngineOptions;
use crate::step::decode_step::TreePlan;
use crate::step::tree::TreePolicy;

/// Most rows of one forward over all requests.
const MAX_STEP_ROWS: usize = 256;

/// Rows of a tree when nothing is said: acceptance gains little beyond, cost grows with every row.
const USUAL_TREE_NODES: usize = 32;

/// Resolved limits and sizes.
#[derive(Clone, Debug)]
pub struct EnginePlan {
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
    /// KV pages of 64 positions, shared by all requests.
    pub num_kv_pages: usize,
    /// Bytes of one page over all attention layers.
    pub kv_page_bytes: usize,
}

impl EnginePlan {
    /// Resolves `options`; `available_bytes` is the memory that caches may take in all (`None` = unknown, no limit).
    ///
    /// # Errors
    /// [`OptionError`] when an option cannot be honoured on this model, [`DrafterError`] when the drafter cannot serve
    /// the tree asked for.
    pub fn resolve(
        options: &EngineOptions,
        config: &ModelConfig,
        drafter: Option<&dyn Drafter>,
        available_bytes: Option<u64>,
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
        let kv_shapes: Vec<_> = layer_caches(config)
            .into_iter()
            .filter_map(|layer| match layer {
                LayerCache::Attention(shape) => Some(shape),
                LayerCache::GatedDelta => None,
            })
            .collect();
        let kv_page_bytes = KvCache::page_bytes_of(&kv_shapes);
        let pages_per_sequence = max_model_len.div_ceil(KV_BLOCK);
        let wanted_pages = pages_per_sequence * options.max_num_seqs;
        let num_kv_pages = match available_bytes {
            Some(bytes) if kv_page_bytes > 0 => {
                let budget = bytes as f64 * options.gpu_memory_utilization / kv_page_bytes as f64;
                wanted_pages.min(budget as usize)
            }
            _ => wanted_pages,
        };
        if num_kv_pages < pages_per_sequence {
            return Err(OptionError::Memory {
                max_model_len,
                needed_bytes: (pages_per_sequence * kv_page_bytes) as u64,
                available_bytes: available_bytes.unwrap_or_default(),
            }
            .into());
        }
        Ok(Self {
            max_model_len,
            max_num_seqs: options.max_num_seqs,
            max_step_rows: MAX_STEP_ROWS.max(tree.tree_nodes).max(MAX_PATH_ROWS),
            head: resolve_head(options, config)?,
            tree,
            num_kv_pages,
            kv_page_bytes,
        })
    }
}

/// Which cache each layer of a model uses.
pub fn layer_caches(config: &ModelConfig) -> Vec<LayerCache> {
    config
        .layers
        .iter()
        .map(|layer| match layer.mixer {
            MixerKind::Attention => LayerCache::Attention(KvShape {
                num_kv_heads: config.attention.num_kv_heads,
                head_dim: config.attention.head_dim,
            }),
            MixerKind::GatedDelta => LayerCache::GatedDelta,
        })
        .collect()
}

fn resolve_head(options: &EngineOptions, config: &ModelConfig) -> Result<HeadPath> {
    match options.head.as_str() {
        "dense" => Ok(HeadPath::Dense),
        "screened" if HeadPath::can_screen(config.hidden_size) => Ok(HeadPath::Screened),
        "screened" => Err(OptionError::Value {
            option: "head",
            expected: "dense or auto for a hidden size beyond 65536".into(),
            got: "\"screened\"".into(),
        }
        .into()),
        _ => Ok(HeadPath::usual(config.vocab_size, config.hidden_size)),
    }
}

fn resolve_tree(options: &EngineOptions, drafter: Option<&dyn Drafter>) -> Result<TreePlan> {
    let named = options
        .tree
        .as_deref()
        .map(str::parse::<TreePolicy>)
        .transpose()?;
    let Some(drafter) = drafter else {
        return Ok(TreePlan {
            policy: TreePolicy::Chain,
            tree_nodes: 1,
            num_draft_tokens: 0,
        });
    };
    let policy = match (named, drafter.has_conditional_scores()) {
        (Some(TreePolicy::Conditional), false) => {
            return Err(DrafterError::NoConditionalScores {
                policy: TreePolicy::Conditional.name(),
                method: drafter.method(),
            }
            .into());
        }
        (Some(policy), _) => policy,
        (None, true) => TreePolicy::Conditional,
        (None, false) => TreePolicy::DdTree,
    };
    let max_draft_tokens = drafter.max_draft_tokens();
    let num_draft_tokens = options.num_speculative_tokens.unwrap_or(max_draft_tokens);
    if !(1..=max_draft_tokens).contains(&num_draft_tokens) {
        return Err(DrafterError::DraftLength {
            expected: max_draft_tokens,
            got: num_draft_tokens,
        }
        .into());
    }
    let tree_nodes = match policy {
        TreePolicy::Chain => options
            .tree_nodes
            .unwrap_or(usize::MAX)
            .min(num_draft_tokens + 1),
        TreePolicy::DdTree | TreePolicy::Conditional => {
            options.tree_nodes.unwrap_or(USUAL_TREE_NODES)
        }
    };
    Ok(TreePlan {
        policy,
        tree_nodes,
        num_draft_tokens: num_draft_tokens.min(MAX_PATH_ROWS - 1),
    })
}
