//! Kernels in the driver's hands: modules, functions by name, and the driver's answers about them.
//!
//! A launch asks for its function, its shared memory and sometimes for occupancy; the driver takes microseconds for each,
//! so every answer is kept. Looking one up takes a lock that nobody holds for long, except while a module loads.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use cudarc::driver::sys::CUfunction_attribute_enum;
use cudarc::driver::{CudaContext, CudaFunction, CudaModule};
use cudarc::nvrtc::Ptx;

use super::{Arch, CodeCache, KernelSource, Shape, driver};
use crate::error::DeviceError;

/// What was loaded and asked so far.
pub(super) struct LoadedKernels {
    cache: CodeCache,
    modules: Mutex<HashMap<&'static str, Module>>,
    /// Dynamic shared memory allowed to a function, by its handle.
    shared_bytes: Mutex<HashMap<usize, usize>>,
    /// Clusters of a shape that the GPU holds at a time.
    max_clusters: Mutex<HashMap<(usize, Shape), usize>>,
}

struct Module {
    module: Arc<CudaModule>,
    functions: HashMap<String, CudaFunction>,
}

impl LoadedKernels {
    pub(super) fn new(cache: CodeCache) -> Self {
        Self {
            cache,
            modules: Mutex::default(),
            shared_bytes: Mutex::default(),
            max_clusters: Mutex::default(),
        }
    }

    /// Kernel `name` of `source`.
    ///
    /// # Errors
    /// [`DeviceError`] when the compiler is missing or refuses, or the module lacks the kernel.
    pub(super) fn function(
        &self,
        context: &Arc<CudaContext>,
        arch: Arch,
        source: &'static KernelSource,
        name: &str,
    ) -> Result<CudaFunction, DeviceError> {
        let mut modules = locked(&self.modules);
        if !modules.contains_key(source.stem) {
            let module = Module {
                module: self.load(context, arch, source)?,
                functions: HashMap::new(),
            };
            modules.insert(source.stem, module);
        }
        let module = modules
            .get_mut(source.stem)
            .expect("the module was loaded if it was not there");
        if let Some(function) = module.functions.get(name) {
            return Ok(function.clone());
        }
        let function = module
            .module
            .load_function(name)
            .map_err(driver("looking a kernel up"))?;
        module.functions.insert(name.to_owned(), function.clone());
        Ok(function)
    }

    fn load(
        &self,
        context: &Arc<CudaContext>,
        arch: Arch,
        source: &'static KernelSource,
    ) -> Result<Arc<CudaModule>, DeviceError> {
        // The driver tells machine code from text by its first bytes.
        let load = |code: Vec<u8>| context.load_module(Ptx::from_binary(code));
        let compiled = self.cache.get_or_compile(source, arch)?;
        match load(compiled.code) {
            Ok(module) => Ok(module),
            // A file that passed its checksum but not the driver: made elsewhere, by another compiler. Once more, fresh.
            Err(_) if compiled.was_cached => {
                let fresh = self.cache.recompile(source, arch)?;
                load(fresh.code).map_err(driver("loading a module"))
            }
            Err(error) => Err(driver("loading a module")(error)),
        }
    }

    /// Lets `function` take `num_bytes` of dynamic shared memory.
    ///
    /// # Errors
    /// [`DeviceError::Driver`].
    pub(super) fn allow_shared_bytes(
        &self,
        function: &CudaFunction,
        num_bytes: usize,
    ) -> Result<(), DeviceError> {
        let mut allowed = locked(&self.shared_bytes);
        let most = allowed.entry(handle(function)).or_default();
        if *most >= num_bytes {
            return Ok(());
        }
        let attribute = CUfunction_attribute_enum::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
        function
            .set_attribute(attribute, i32::try_from(num_bytes).unwrap_or(i32::MAX))
            .map_err(driver("raising a kernel's shared memory"))?;
        *most = num_bytes;
        Ok(())
    }

    /// Clusters of `shape` that the GPU holds at a time, as `count` says the first time.
    ///
    /// # Errors
    /// That of `count`.
    pub(super) fn max_clusters(
        &self,
        function: &CudaFunction,
        shape: Shape,
        count: impl FnOnce() -> Result<usize, DeviceError>,
    ) -> Result<usize, DeviceError> {
        let key = (handle(function), shape);
        let mut counted = locked(&self.max_clusters);
        if let Some(&num_clusters) = counted.get(&key) {
            return Ok(num_clusters);
        }
        let num_clusters = count()?;
        counted.insert(key, num_clusters);
        Ok(num_clusters)
    }
}

fn handle(function: &CudaFunction) -> usize {
    function.cu_function().addr()
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
