//! A deployment planned on paper: both weight formats side by side, from `config.json` and, where there are weights,
//! their headers. Nothing is loaded, so a model can be planned before it is downloaded.

use std::path::Path;

use super::Limits;
use super::budget::{Budget, available_bytes};
use super::footprint::{Backend, Footprint, Holdings};
use super::weight_bytes::num_parameters;
use crate::drafter::config::DrafterConfig;
use crate::drafter::pairing;
use crate::error::{DrafterError, OptionError, Result};
use crate::kernels::tree_attention::KV_BLOCK;
use crate::model::config::ModelConfig;
use crate::options::{EngineOptions, WeightFormat};
use crate::weights::Checkpoint;

/// What to plan besides the engine's options.
#[derive(Clone, Copy, Debug)]
pub struct Setting<'a> {
    /// Directory of the target.
    pub model: &'a Path,
    /// Directory of the drafter.
    pub drafter: Option<&'a Path>,
    /// Where the engine would run.
    pub backend: Backend,
    /// The device's memory; `None` = what this machine has available.
    pub memory_bytes: Option<u64>,
}

/// A planned deployment.
#[derive(Clone, Debug)]
pub struct DeploymentPlan {
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
}

/// What one weight format comes to.
#[derive(Clone, Copy, Debug)]
pub struct FormatPlan {
    /// Bytes by purpose.
    pub footprint: Footprint,
    /// Pages that fit; 0 when not even the rest does.
    pub num_pages: usize,
    /// Bytes short of a request of `max_model_len` tokens; 0 when it fits.
    pub missing_bytes: u64,
}

impl DeploymentPlan {
    /// Plans `options` in `setting`.
    ///
    /// # Errors
    /// [`OptionError::Memory`] when no format leaves room for a request: of `max_model_len` tokens when that was
    /// given, of one page when it was left to the model. Errors of configs, headers, options and pairing as when an
    /// engine opens.
    pub fn new(options: &EngineOptions, setting: Setting<'_>) -> Result<Self> {
        options.validate()?;
        let config = ModelConfig::read(setting.model)?;
        let drafter = setting
            .drafter
            .map(|dir| paired_drafter(dir, options, setting.model, &config))
            .transpose()?;
        let headers = match Checkpoint::is_in(setting.model) {
            true => Some(Checkpoint::open(setting.model)?),
            false => None,
        };
        let limits = Limits::resolve(options, &config, drafter.as_ref(), setting.backend)?;
        let memory_bytes = match (setting.memory_bytes, setting.backend) {
            (Some(bytes), _) => Some(bytes),
            (None, Backend::Host) => available_bytes(),
            (None, Backend::Cuda) => None,
        };
        let budget = Budget {
            memory_bytes: memory_bytes.ok_or(OptionError::UnknownMemory {
                device: setting.backend.name(),
            })?,
            utilization: options.gpu_memory_utilization,
        };
        let format = |format| {
            let footprint = Footprint::of(&Holdings {
                config: &config,
                headers: headers.as_ref(),
                drafter: drafter.as_ref(),
                limits: &limits,
                format,
                backend: setting.backend,
            });
            FormatPlan {
                footprint,
                num_pages: budget.num_pages(&footprint),
                missing_bytes: budget.missing_bytes(&footprint, limits.max_model_len),
            }
        };
        let (bf16, w12) = (format(WeightFormat::Bf16), format(WeightFormat::W12));
        let num_tokens = options.max_model_len.unwrap_or(KV_BLOCK);
        if budget.missing_bytes(&bf16.footprint, num_tokens) > 0 {
            budget.require(&w12.footprint, num_tokens)?;
        }
        Ok(Self {
            num_parameters: num_parameters(&config),
            config,
            drafter,
            limits,
            budget,
            bf16,
            w12,
        })
    }

    /// How many times as many KV tokens fit with W12 as with BF16; `None` when none fits with BF16.
    pub fn pool_ratio(&self) -> Option<f64> {
        (self.bf16.num_pages > 0).then(|| self.w12.num_pages as f64 / self.bf16.num_pages as f64)
    }
}

/// The drafter in `dir`, checked against its target and the method asked for.
fn paired_drafter(
    dir: &Path,
    options: &EngineOptions,
    target_dir: &Path,
    target: &ModelConfig,
) -> Result<DrafterConfig> {
    let drafter = DrafterConfig::read_for_planning(dir)?;
    check_method(dir, &drafter, options)?;
    pairing::check(dir, &drafter, target_dir, target)?;
    Ok(drafter)
}

/// Checks that `drafter` is of the method that `options` ask for, if they do.
///
/// # Errors
/// [`DrafterError::Method`].
pub fn check_method(
    dir: &Path,
    drafter: &DrafterConfig,
    options: &EngineOptions,
) -> Result<(), DrafterError> {
    match &options.method {
        Some(wanted) if wanted != drafter.method.name() => Err(DrafterError::Method {
            drafter: dir.to_path_buf(),
            expected: wanted.clone(),
            got: drafter.method.name(),
        }),
        _ => Ok(()),
    }
}
