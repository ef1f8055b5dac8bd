//! The extension module `specpilot_rs._core`: converts values, releases the interpreter's lock, and nothing else.

mod cuda;
mod engine;
mod errors;
mod examine;
mod kernels;
mod outputs;
mod plan;
mod planted;
mod stage_times;
mod w12;
mod weights;

use pyo3::prelude::*;
use pyo3::types::{PyDict, PyTuple};

/// The Rust core of `specpilot_rs`.
#[pymodule(gil_used = false)]
#[pyo3(name = "_core")]
mod core_module {
    use super::{Bound, PyAnyMethods, PyDict, PyModule, PyModuleMethods, PyResult, PyTuple};
    use crate::drafter::config;
    use crate::model::families;

    #[pymodule_export]
    #[allow(non_upper_case_globals, reason = "the Python name")]
    const __version__: &str = env!("CARGO_PKG_VERSION");
    #[pymodule_export]
    use super::cuda::{compile_kernels, cuda_compiler_version, cuda_gpus, num_cuda_devices};
    #[pymodule_export]
    use super::engine::{Engine, check_target};
    #[pymodule_export]
    use super::errors::{
        CheckpointError, ConfigError, DeviceError, DrafterError, InternalError, KernelError,
        OptionError, RequestError, SpecPilotError,
    };
    #[pymodule_export]
    use super::examine::{examine_config, examine_weights};
    #[pymodule_export]
    use super::kernels::kernels_module;
    #[pymodule_export]
    use super::outputs::{EngineMetrics, EngineOutput, RoundRecord, ScoreRecord, StepEvent};
    #[pymodule_export]
    use super::plan::{available_bytes, plan};
    #[pymodule_export]
    use super::planted::planted_acceptance;

    /// What can be loaded, for those who judge a checkpoint before loading it.
    #[pymodule_init]
    fn init(module: &Bound<'_, PyModule>) -> PyResult<()> {
        // Loaded here, where Ctrl-C is an exception: at the first array it would be a panic.
        module.py().import("numpy")?;
        let targets = PyDict::new(module.py());
        for (architecture, ignored_prefixes) in families::supported_architectures() {
            targets.set_item(architecture, PyTuple::new(module.py(), ignored_prefixes)?)?;
        }
        module.add("TARGET_ARCHITECTURES", targets)?;
        let drafters = PyTuple::new(
            module.py(),
            config::supported_architectures().collect::<Vec<_>>(),
        )?;
        module.add("DRAFTER_ARCHITECTURES", drafters)?;
        let planted = PyTuple::new(module.py(), crate::planted::names().collect::<Vec<_>>())?;
        module.add("PLANTED_NAMES", planted)
    }
    #[pymodule_export]
    use super::w12::w12_module;
    #[pymodule_export]
    use super::weights::{convert_weights, inspect_weights};
}
