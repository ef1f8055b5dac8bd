//! What Python asks of the CUDA backend without an engine: which GPUs there are, and kernels compiled ahead.

use std::path::PathBuf;

use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::device::cuda::{
    Arch, CodeCache, CodeForm, KERNEL_SOURCES, compile_many, compiler_version, gpu_facts,
    num_devices,
};
use crate::error::{DeviceError, Error};

/// Number of GPUs. Raises `DeviceError` without a driver or with one that is too old.
#[pyfunction]
pub(super) fn num_cuda_devices() -> PyResult<usize> {
    Ok(num_devices().map_err(Error::from)?)
}

/// Describes every GPU: `name`, `compute_capability`, `arch` (`None` if no kernel runs there) and `total_bytes`. Raises
/// `DeviceError` without a driver or with one that is too old.
#[pyfunction]
pub(super) fn cuda_gpus(py: Python<'_>) -> PyResult<Vec<Bound<'_, PyDict>>> {
    (0..num_devices().map_err(Error::from)?)
        .map(|ordinal| {
            let facts = gpu_facts(ordinal).map_err(Error::from)?;
            let gpu = PyDict::new(py);
            gpu.set_item("name", facts.name)?;
            gpu.set_item("compute_capability", facts.compute_capability)?;
            gpu.set_item("arch", facts.arch.map(Arch::name))?;
            gpu.set_item("total_bytes", facts.total_bytes)?;
            Ok(gpu)
        })
        .collect()
}

/// Version of the kernels' compiler. Raises `DeviceError` if it is not installed.
#[pyfunction]
pub(super) fn cuda_compiler_version() -> PyResult<(i32, i32)> {
    Ok(compiler_version().map_err(Error::from)?)
}

/// Compiles every kernel for every architecture of `arches` into the cache (in `cache_dir`, else the user's own), several
/// at a time, and returns a dictionary for each: `stem`, `arch`, `is_hot`, `was_cached`, `num_bytes` and the compiler's
/// `log`. Needs no GPU. `on_progress(stem, arch, num_ready, num_kernels)` is called when one is ready; what it raises ends
/// the work, as an interrupt does.
#[pyfunction]
#[pyo3(signature = (arches, cache_dir=None, on_progress=None))]
pub(super) fn compile_kernels<'py>(
    py: Python<'py>,
    arches: Vec<String>,
    cache_dir: Option<PathBuf>,
    on_progress: Option<Py<PyAny>>,
) -> PyResult<Vec<Bound<'py, PyDict>>> {
    let arches: Vec<Arch> = arches
        .iter()
        .map(|name| Arch::from_name(name).map_err(|e| Error::from(e).into()))
        .collect::<PyResult<_>>()?;
    let form = CodeForm::from_env().map_err(Error::from)?;
    let cache = match cache_dir {
        Some(folder) => CodeCache::in_folder(&folder, form),
        None => CodeCache::in_user_folder(form),
    };
    let jobs: Vec<_> = arches
        .iter()
        .flat_map(|&arch| KERNEL_SOURCES.iter().map(move |source| (source, arch)))
        .collect();
    let mut num_ready = 0;
    let go_on = |ready: Option<usize>| -> Result<(), Stop> {
        Python::attach(|py| {
            if let (Some(index), Some(on_progress)) = (ready, &on_progress) {
                let (source, arch) = jobs[index];
                num_ready += 1;
                on_progress.call1(py, (source.stem, arch.name(), num_ready, jobs.len()))?;
            }
            Ok(py.check_signals()?)
        })
    };
    let compiled = py
        .detach(|| compile_many(&cache, &jobs, go_on))
        .map_err(|stop| stop.0)?;
    jobs.iter()
        .zip(compiled)
        .map(|((source, arch), compiled)| {
            let result = PyDict::new(py);
            result.set_item("stem", source.stem)?;
            result.set_item("arch", arch.name())?;
            result.set_item("is_hot", source.is_hot)?;
            result.set_item("was_cached", compiled.was_cached)?;
            result.set_item("num_bytes", compiled.code.len())?;
            result.set_item("log", compiled.log)?;
            Ok(result)
        })
        .collect()
}

/// Why compiling ended early, as Python is told.
struct Stop(PyErr);

impl From<PyErr> for Stop {
    fn from(error: PyErr) -> Self {
        Self(error)
    }
}

impl From<DeviceError> for Stop {
    fn from(error: DeviceError) -> Self {
        Self(Error::from(error).into())
    }
}
