//! From options to a loaded engine: plan, weights of a checkpoint or planted ones, caches, rehearsal.

use std::collections::HashMap;
use std::path::Path;

use super::Engine;
use crate::cache::slots::{CacheSizes, SequenceCaches};
use crate::device::{Backend, Device};
use crate::drafter::planted::Scripts;
use crate::drafter::{self, PairFiles, config::DrafterConfig};
use crate::error::{DeviceError, Error, KernelError, Result};
use crate::kernels::kv_span::PerSpan;
use crate::kernels::paths::RowPaths;
use crate::kernels::placed_rows::PlacedRows;
use crate::model::config::ModelConfig;
use crate::model::decoder::Decoder;
use crate::model::weights::{DecoderWeights, check_format, no_q_view};
use crate::options::{DeviceChoice, EngineOptions, KernelSet, WeightFormat};
use crate::plan::available::available_bytes;
use crate::plan::budget::Budget;
use crate::plan::footprint::{Footprint, Holdings, gdn_shape};
use crate::plan::{EnginePlan, Limits, layer_caches};
use crate::planted::PlantedPair;
use crate::request::RequestDefaults;
use crate::scheduler::queue::Scheduler;
use crate::step::decode_step::{DraftWorkspace, ModelPair};
use crate::step::stage_times::StageClock;
use crate::weights::{Checkpoint, PlantedWeights, WeightSource};

/// Tells of a GPU that is full what was to be held.
pub(super) fn with_plan(error: Error, planned: &str) -> Error {
    match error {
        Error::Device(source @ DeviceError::OutOfMemory { .. })
        | Error::Kernel(KernelError::Device {
            source: source @ DeviceError::OutOfMemory { .. },
            ..
        }) => DeviceError::OutOfMemoryAtOpen {
            source: Box::new(source),
            planned: planned.to_owned(),
        }
        .into(),
        other => other,
    }
}

/// A deployment before its weights are read.
struct Planned<'a> {
    config: ModelConfig,
    draft_config: Option<DrafterConfig>,
    plan: EnginePlan,
    budget: Option<Budget>,
    origin: Origin<'a>,
}

/// Where weights come from.
#[derive(Clone, Copy)]
enum Origin<'a> {
    /// Directories.
    Files {
        pair: PairFiles<'a>,
        target: &'a Checkpoint,
        drafter: Option<&'a Checkpoint>,
    },
    /// Recipes.
    Planted {
        target: &'a PlantedWeights,
        drafter: &'a PlantedWeights,
        scripts: &'a Scripts,
    },
}

impl Planned<'_> {
    /// Reads the weights and allocates everything else: nothing is allocated on a GPU after this.
    fn load(self, device: Device, format: WeightFormat, options: &EngineOptions) -> Result<Engine> {
        let Self {
            config,
            draft_config,
            plan:
                EnginePlan {
                    limits,
                    mut footprint,
                    ..
                },
            budget,
            origin,
        } = self;
        let source = match origin {
            Origin::Files { target, .. } => WeightSource::Checkpoint(target),
            Origin::Planted { target, .. } => WeightSource::Planted(target),
        };
        // On our own threads: the process-wide pool would be dead in a forked child.
        let q_passes = limits.speculation.q_passes();
        let with_q_views = q_passes > 0;
        let weights = device.install(|| match limits.kernels {
            KernelSet::Lossless => {
                DecoderWeights::load(&device, source, &config, format, with_q_views)
            }
            KernelSet::Stock => DecoderWeights::load_stock(&device, source, &config),
        })?;
        if with_q_views && weights.num_fp8_matrices() > 0 {
            return Err(no_q_view(q_passes).into());
        }
        let verification = source.verification();
        // Encoding in memory has shown what the plan could only estimate.
        footprint
            .weights
            .settle(weights.num_bytes() as u64, weights.q_view_bytes() as u64);
        let mut plan = EnginePlan::resolve(limits, footprint, budget)?;
        let sizes = plan.limits.drafter_sizes(&config, plan.num_kv_pages.whole);
        let open = |drafter: &DrafterConfig| {
            device.install(|| match origin {
                Origin::Files { pair, .. } => drafter::open(pair, drafter, &config, &device, sizes),
                Origin::Planted {
                    drafter: weights,
                    scripts,
                    ..
                } => {
                    let (scripts, format) = (scripts.clone(), drafter::planted_format(format));
                    drafter::open_planted(
                        weights, format, scripts, drafter, &config, &device, sizes,
                    )
                }
            })
        };
        let drafter = draft_config.as_ref().map(open).transpose()?;
        plan.footprint.drafter.weights =
            drafter.as_ref().map_or(0, |drafter| drafter.weight_bytes());
        let caches = SequenceCaches::new(
            &device,
            &layer_caches(&config),
            plan.limits.recurrence(),
            gdn_shape(&config),
            CacheSizes {
                num_slots: sizes.num_slots,
                num_pages: plan.num_kv_pages,
                settled_rows: plan.limits.settled_rows(),
            },
        )?;
        let mut eos_token_ids = config.eos_token_ids.clone();
        for &id in &options.extra_eos_token_ids {
            if !eos_token_ids.contains(&id) {
                eos_token_ids.push(id);
            }
        }
        let defaults = RequestDefaults {
            max_model_len: plan.limits.max_model_len,
            eos_token_ids,
            suppressed_ids: config.suppress_tokens.clone(),
        };
        let taps = drafter.as_ref().map_or(&[][..], |drafter| drafter.taps());
        let (head, max_rows) = (plan.limits.head, plan.limits.max_step_rows);
        let target =
            device.install(|| Decoder::new(config, weights, taps, head, max_rows, &device))?;
        // A table of windows is as long as the other.
        let num_entries = PerSpan {
            whole: sizes.num_pages,
            window: match caches.kv().layout().ring_pages() {
                0 => 0,
                _ => sizes.num_pages,
            },
        };
        let paths = RowPaths::with_capacity(&device, max_rows, num_entries)?;
        let committed_rows = PlacedRows::with_capacity(&device, max_rows)?;
        let mut engine = Engine {
            pair: ModelPair {
                device,
                target,
                caches,
                drafter,
                paths,
                committed_rows,
                workspace: DraftWorkspace::default(),
                clock: StageClock::default(),
            },
            idle_drafter: None,
            opened: plan.limits.clone(),
            scripts: match origin {
                Origin::Files { .. } => None,
                Origin::Planted { scripts, .. } => Some(scripts.clone()),
            },
            draft_config,
            plan,
            scheduler: Scheduler::default(),
            defaults,
            verification,
            finished: HashMap::new(),
            next_id: 0,
            seed: options.seed,
        };
        if engine.device().backend() == Backend::Cuda {
            engine.warm_up()?;
        }
        Ok(engine)
    }
}

impl Engine {
    /// Loads the target in `model` and, when given, the drafter in `drafter_dir`.
    ///
    /// # Errors
    /// Anything wrong with options, configs, files, tensors or the pairing; nothing is kept of a failed load.
    pub fn open(model: &Path, drafter_dir: Option<&Path>, options: &EngineOptions) -> Result<Self> {
        options.validate()?;
        let config = ModelConfig::read(model)?;
        let draft_config = DrafterConfig::find(drafter_dir, options, DrafterConfig::read)?;
        // Of what does not fit a file is told before it is looked for.
        Limits::of_options(options, &config, draft_config.as_ref())?;
        let checkpoint = Checkpoint::open(model)?;
        let drafter_files = drafter_dir.map(Checkpoint::open).transpose()?;
        let origin = Origin::Files {
            pair: PairFiles {
                drafter: drafter_dir.unwrap_or(Path::new("")),
                target: model,
            },
            target: &checkpoint,
            drafter: drafter_files.as_ref(),
        };
        Self::open_from(origin, config, draft_config, options)
    }

    /// Opens a planted deployment, with its drafter when it `speculates`. That goes by the texts given to
    /// [`add_script`](Self::add_script).
    ///
    /// # Errors
    /// As for [`open`](Self::open), as far as there are no files.
    pub fn open_planted(
        pair: &PlantedPair,
        speculates: bool,
        options: &EngineOptions,
    ) -> Result<Self> {
        options.validate()?;
        let origin = Origin::Planted {
            target: &pair.target_weights(),
            drafter: &pair.drafter_weights(),
            scripts: &Scripts::default(),
        };
        let draft_config = speculates.then(|| pair.drafter.clone());
        Self::open_from(origin, pair.target.clone(), draft_config, options)
    }

    fn open_from(
        origin: Origin<'_>,
        config: ModelConfig,
        draft_config: Option<DrafterConfig>,
        options: &EngineOptions,
    ) -> Result<Self> {
        let choice = DeviceChoice::named(&options.device)?;
        let limits = Limits::of_options(options, &config, draft_config.as_ref())?;
        let format = WeightFormat::named(&options.weight_format)?;
        let device = Device::open(choice, options.num_threads)?;
        if let (KernelSet::Stock, Device::Cuda(cuda)) = (limits.kernels, &device) {
            // Its absence shows before a weight is read, and its workspace counts as taken.
            cuda.cublaslt()?;
        }
        let (headers, drafter_headers) = match origin {
            Origin::Files {
                target, drafter, ..
            } => (Some(target), drafter),
            Origin::Planted { .. } => (None, None),
        };
        if let (Some(headers), KernelSet::Lossless) = (headers, limits.kernels) {
            check_format(headers, &config, format, limits.speculation.q_passes())?;
        }
        let footprint = Footprint::of(&Holdings {
            config: &config,
            headers,
            drafter: draft_config.as_ref(),
            drafter_headers,
            drafter_format: drafter::planted_format(format),
            limits: &limits,
            format,
            backend: device.backend(),
        });
        let memory_bytes = match &device {
            Device::Host(_) => available_bytes(),
            Device::Cuda(cuda) => Some(cuda.memory_bytes()?.0),
        };
        let budget = memory_bytes.map(|memory_bytes| Budget {
            memory_bytes,
            utilization: options.gpu_memory_utilization,
        });
        let plan = EnginePlan::resolve(limits, footprint, budget)?;
        let planned_bytes = plan.to_string();
        let planned = Planned {
            config,
            draft_config,
            plan,
            budget,
            origin,
        };
        planned
            .load(device, format, options)
            .map_err(|error| with_plan(error, &planned_bytes))
    }
}
