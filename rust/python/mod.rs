//! The extension module `specpilot_rs._core`: converts values, releases the interpreter's lock, and nothing else.

mod kernels;

use pyo3::prelude::*;

/// The Rust core of `specpilot_rs`.
#[pymodule(gil_used = false)]
#[pyo3(name = "_core")]
mod core_module {
    #[pymodule_export]
    use super::kernels::kernels_module;
}
