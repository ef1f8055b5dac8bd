//! A deployment planned on paper: all weight formats side by side, from `config.json` and, where there are weights,
//! their headers. Nothing is loaded, so a model can be planned before it is downloaded.

use std::path::Path;

use super::Limits;
use super::available::available_bytes;
use super::budget::Budget;
use super::footprint::{Footprint, Holdings};
use super::weight_bytes::num_parameters;
use crate::device::{Backend, cuda};
use crate::drafter::config::DrafterConfig;
use crate::drafter::{PairFiles, pairing};
use crate::error::{OptionError, Result};
use crate::kernels::kv_span::{KvSpan, PerSpan};
use crate::kernels::tree_attention::KV_BLOCK;
use crate::model::config::ModelConfig;
use crate::model::weights::check_dtypes;
use crate::options::{DeviceChoice, EngineOptions, WeightFormat};
use crate::weights::Checkpoint;

/// What to plan besides the engine's options.
#[derive(Clone, Copy, Debug)]
pub struct Setting<'a> {
    /// Directory of the target.
    pub model: &'a Path,
    /// Directory of the drafter.
    pub drafter: Option<&'a Path>,
    /// Where the engine would run.
    pub device: DeviceChoice,
    /// The device's memory; `None` = what it has available now.
    pub memory_bytes: Option<u64>,
}

/// A planned deployment.
#[derive(Debug)]
pub struct DeploymentPlan {
    /// Where the engine would run.
    pub backend: Backend,
    /// The target.
    pub config: ModelConfig,
    /// The target's parameters.
    pub num_parameters: u64,
    /// The drafter.
    pub drafter: Option<DrafterConfig>,
    /// Limits of requests and passes.
    pub limits: Limits,
    /// The memory and the engine's share.
    pub budget: Budget,
    /// Linear layers as BF16.
    pub bf16: FormatPlan,
    /// Linear layers as W12.
    pub w12: FormatPlan,
    /// Linear layers as FP8, where the checkpoint holds it or a published one would.
    pub fp8: FormatPlan,
    /// [`OptionError::Memory`] when no format that is served leaves room for a request: of `max_model_len` tokens when
    /// that was given, of one page when it was left to the model.
    pub shortfall: Option<OptionError>,
}

/// What one weight format comes to.
#[derive(Clone, Copy, Debug)]
pub struct FormatPlan {
    /// Bytes by purpose.
    pub footprint: Footprint,
    /// Pages that fit; none when not even the rest does.
    pub num_pages: PerSpan<usize>,
    /// Pages of the longest request that fits, in layers that keep everything.
    pub longest_request: usize,
    /// Requests of `max_model_len` tokens that fit at once.
    pub full_requests: usize,
    /// Bytes short of a request of `max_model_len` tokens; 0 when it fits.
    pub missing_bytes: u64,
}

impl DeploymentPlan {
    /// Plans `options` in `setting`.
    ///
    /// # Errors
    /// Errors of configs, headers, options and pairing as when an engine opens. That nothing fits is none: what would be
    /// held shows why.
    pub fn new(options: &EngineOptions, setting: Setting<'_>) -> Result<Self> {
        options.validate()?;
        let config = ModelConfig::read(setting.model)?;
        let drafter =
            DrafterConfig::find(setting.drafter, options, DrafterConfig::read_for_planning)?;
        if let Some(drafter) = &drafter {
            let files = PairFiles {
                drafter: setting.drafter.unwrap_or(Path::new("")),
                target: setting.model,
            };
            pairing::check(files, drafter, &config)?;
        }
        let headers_in = |dir: &Path| match Checkpoint::is_in(dir) {
            true => Checkpoint::open(dir).map(Some),
            false => Ok(None),
        };
        let headers = headers_in(setting.model)?;
        let drafter_headers = match setting.drafter {
            Some(dir) => headers_in(dir)?,
            None => None,
        };
        if let Some(headers) = &headers {
            check_dtypes(headers, &config)?;
        }
        let backend = Backend::of(setting.device);
        let limits = Limits::resolve(options, &config, drafter.as_ref(), backend)?;
        let memory_bytes = match (setting.memory_bytes, setting.device, backend) {
            (Some(bytes), ..) => Some(bytes),
            (None, _, Backend::Host) => available_bytes(),
            (None, DeviceChoice::Cuda(ordinal), _) => cuda::free_bytes(ordinal).ok(),
            (None, ..) => cuda::free_bytes(0).ok(),
        };
        let budget = Budget {
            memory_bytes: memory_bytes.ok_or(OptionError::UnknownMemory {
                device: backend.name(),
            })?,
            utilization: options.gpu_memory_utilization,
        };
        let format = |format| {
            let footprint = Footprint::of(&Holdings {
                config: &config,
                headers: headers.as_ref(),
                drafter: drafter.as_ref(),
                drafter_headers: drafter_headers.as_ref(),
                drafter_format: WeightFormat::Auto,
                limits: &limits,
                format,
                backend,
            });
            let num_pages = budget.pool(&footprint);
            FormatPlan {
                footprint,
                num_pages,
                longest_request: budget.longest_request(&footprint),
                full_requests: budget.full_requests(&footprint, num_pages),
                missing_bytes: budget.missing_bytes(&footprint, limits.max_model_len),
            }
        };
        let (bf16, w12) = (format(WeightFormat::Bf16), format(WeightFormat::W12));
        let fp8 = format(WeightFormat::Fp8);
        let num_tokens = options.max_model_len.unwrap_or(KV_BLOCK);
        let smallest = [&bf16, &w12, &fp8]
            .into_iter()
            .map(|format| &format.footprint)
            .min_by_key(|footprint| footprint.fixed_bytes())
            .unwrap_or(&w12.footprint);
        let shortfall = budget.require(smallest, num_tokens).err();
        Ok(Self {
            backend,
            num_parameters: num_parameters(&config),
            config,
            drafter,
            limits,
            budget,
            bf16,
            w12,
            fp8,
            shortfall,
        })
    }

    /// How many times as many KV tokens fit with W12 as with BF16, or windows where layers keep nothing else; `None` when
    /// none fits with BF16.
    pub fn pool_ratio(&self) -> Option<f64> {
        let [bf16, w12] = [&self.bf16, &self.w12].map(|format| {
            let page = format.footprint.page_bytes();
            let span = match page.whole == 0 && page.window > 0 {
                true => KvSpan::Window,
                false => KvSpan::Whole,
            };
            *format.num_pages.of(span)
        });
        (bf16 > 0).then(|| w12 as f64 / bf16 as f64)
    }
}
