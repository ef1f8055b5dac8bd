//! What options come to on a given model, drafter and machine: limits, tree shape, and every byte the engine holds.
//!
//! In: options, configs, a memory size. Out: [`Limits`], then a [`Footprint`] of what is held whatever comes, then the
//! pages of keys and values for which the rest suffices. All of it is known before a weight is read: the engine
//! allocates from an [`EnginePlan`], and `specpilot plan` prints a [`deployment::DeploymentPlan`] made by the same
//! functions, which ask the types that allocate for their sizes.

pub mod available;
pub mod budget;
pub mod deployment;
pub mod examine;
pub mod footprint;
pub mod size;
mod speculation;
mod stock;
pub mod weight_bytes;

use std::fmt;

use crate::cache::gdn_state::Recurrence;
use crate::cache::pages::KvLayout;
use crate::cache::slots::{LayerCache, kv_layout};
use crate::device::Backend;
use crate::drafter::config::DrafterConfig;
use crate::drafter::footprint::DrafterSizes;
use crate::error::{OptionError, Result, human_bytes};
use crate::kernels::kv_span::{KvSpan, PerSpan};
use crate::kernels::paths::{MAX_PATH_ROWS, num_settled_rows};
use crate::kernels::tree_attention::KV_BLOCK;
use crate::model::config::{LayerConfig, ModelConfig};
use crate::model::head::HeadPath;
use crate::options::speculation::SpeculationPlan;
use crate::options::{DeviceChoice, EngineOptions, KernelSet};
use budget::Budget;
use footprint::{Footprint, kv_shape};

/// Most rows of one forward over all requests where nobody says otherwise.
const USUAL_STEP_ROWS: usize = 256;

/// Resolved limits.
#[derive(Clone, Debug)]
pub struct Limits {
    /// Context limit in tokens.
    pub max_model_len: usize,
    /// Requests that may run at once.
    pub max_num_seqs: usize,
    /// Most rows of one forward.
    pub max_step_rows: usize,
    /// Most rows of one request's prompt in it.
    pub max_chunk_rows: usize,
    /// Kernels of the target.
    pub kernels: KernelSet,
    /// How greedy tokens are found.
    pub head: HeadPath,
    /// Trees of every pass.
    pub speculation: SpeculationPlan,
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
        let kernels = KernelSet::named(&options.kernels)?;
        let implied = match kernels {
            KernelSet::Lossless => None,
            KernelSet::Stock => Some(stock::resolve(options, config, backend)?),
        };
        let options = implied.as_ref().unwrap_or(options);
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
        let head = resolve_head(options, config, backend)?;
        Ok(Self {
            max_model_len,
            max_num_seqs: options.max_num_seqs,
            max_step_rows: options.max_num_batched_tokens.unwrap_or(USUAL_STEP_ROWS),
            max_chunk_rows: match (options.max_num_batched_tokens, backend) {
                (Some(rows), _) => rows,
                (None, Backend::Host) => USUAL_STEP_ROWS,
                // Matmuls of a GPU read their weights again for every 32 rows: longer chunks gain nothing there.
                (None, Backend::Cuda) => MAX_PATH_ROWS,
            },
            speculation: speculation::resolve(options, drafter, head, backend)?,
            head,
            kernels,
        })
    }

    /// Which state recurrent layers read.
    pub fn recurrence(&self) -> Recurrence {
        match self.kernels {
            KernelSet::Lossless => Recurrence::Anchored,
            KernelSet::Stock => Recurrence::Token,
        }
    }

    /// Resolves `options` on the device that they name.
    ///
    /// # Errors
    /// As for [`resolve`](Self::resolve), and [`OptionError::Value`] for a device of no kind.
    pub fn of_options(
        options: &EngineOptions,
        config: &ModelConfig,
        drafter: Option<&DrafterConfig>,
    ) -> Result<Self> {
        let backend = Backend::of(DeviceChoice::named(&options.device)?);
        Self::resolve(options, config, drafter, backend)
    }

    /// What a drafter must hold beside `num_kv_pages` of the target's.
    pub fn drafter_sizes(&self, config: &ModelConfig, num_kv_pages: usize) -> DrafterSizes {
        DrafterSizes {
            num_slots: self.max_num_seqs,
            num_pages: num_kv_pages,
            pages_per_sequence: self.pages_per_sequence(),
            vocab_size: config.vocab_size,
            num_draft_tokens: self.speculation.max_draft_tokens(),
            width: self.speculation.max_width(),
        }
    }

    /// Most rows of a prompt that a pass settles.
    pub fn settled_rows(&self) -> usize {
        num_settled_rows(self.max_chunk_rows.min(self.max_step_rows))
    }

    /// What the attention layers of `config` keep of a request.
    pub fn kv_layout(&self, config: &ModelConfig) -> KvLayout {
        kv_layout(&layer_caches(config), self.settled_rows())
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
    /// KV pages of 64 positions, shared by all requests; the drafter's context has as many as layers that keep
    /// everything.
    pub num_kv_pages: PerSpan<usize>,
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
        let longest = footprint.pages_of(limits.max_model_len);
        let mut num_kv_pages = PerSpan {
            whole: longest.whole * limits.max_num_seqs,
            window: longest.window * limits.max_num_seqs,
        };
        if let Some(budget) = budget {
            budget.require(&footprint, limits.max_model_len)?;
            let fitting = budget.pool(&footprint);
            for span in KvSpan::ALL {
                let wanted = num_kv_pages.of_mut(span);
                *wanted = (*wanted).min(*fitting.of(span));
            }
        }
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
        let pool_bytes = self.footprint.pool_bytes(self.num_kv_pages);
        write!(f, "KV pool {}", human_bytes(pool_bytes))
    }
}

/// Which cache each layer of a model uses.
pub fn layer_caches(config: &ModelConfig) -> Vec<LayerCache> {
    config
        .layers
        .iter()
        .map(|layer| match layer {
            LayerConfig::Attention(attention) => LayerCache::Attention {
                shape: kv_shape(attention),
                window: attention.window,
            },
            LayerConfig::GatedDelta => LayerCache::GatedDelta,
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
        _ => Ok(HeadPath::usual(
            backend,
            config.vocab_size,
            config.hidden_size,
        )),
    }
}

#[cfg(test)]
pub(crate) mod tests;
