//! The exception hierarchy and the one match from [`Error`] to it.

use pyo3::create_exception;
use pyo3::exceptions::PyException;
use pyo3::prelude::*;

use crate::error::Error;

create_exception!(
    specpilot_rs,
    SpecPilotError,
    PyException,
    "Base of all errors of this package."
);
create_exception!(
    specpilot_rs,
    DeviceError,
    SpecPilotError,
    "A device could not be set up, or belongs to the process that this one was forked from."
);
create_exception!(
    specpilot_rs,
    KernelError,
    SpecPilotError,
    "A kernel refused its arguments."
);
create_exception!(
    specpilot_rs,
    CheckpointError,
    SpecPilotError,
    "Files or tensors of a checkpoint are not what its config says."
);
create_exception!(
    specpilot_rs,
    ConfigError,
    SpecPilotError,
    "A config.json cannot be used."
);
create_exception!(
    specpilot_rs,
    DrafterError,
    SpecPilotError,
    "A drafter does not fit its target or the options asked of it."
);
create_exception!(
    specpilot_rs,
    OptionError,
    SpecPilotError,
    "An option cannot be honoured."
);
create_exception!(
    specpilot_rs,
    RequestError,
    SpecPilotError,
    "A request cannot be served."
);
create_exception!(
    specpilot_rs,
    InternalError,
    SpecPilotError,
    "A bug in this package; the engine is closed."
);

impl From<Error> for PyErr {
    fn from(error: Error) -> Self {
        let (code, message) = (error.code(), error.to_string());
        let raised = match error {
            Error::Device(_) => DeviceError::new_err(message),
            Error::Kernel(_) => KernelError::new_err(message),
            Error::Checkpoint(_) => CheckpointError::new_err(message),
            Error::Config(_) => ConfigError::new_err(message),
            Error::Drafter(_) => DrafterError::new_err(message),
            Error::Option(_) => OptionError::new_err(message),
            Error::Request(_) => RequestError::new_err(message),
            Error::Internal(_) => InternalError::new_err(message),
        };
        Python::attach(|py| {
            // A plain exception object always takes attributes; should that fail, the error itself still stands.
            let _ = raised.value(py).setattr("code", code);
        });
        raised
    }
}
