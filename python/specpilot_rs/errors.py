"""Everything this package raises, one class per layer.

Each error says what was expected and what was got; `.code` is a stable slug for programs. The classes come
from the extension, so an error raised in Rust and one raised in Python are the same type. An error about a
request leaves the engine usable; an error about a checkpoint or an option leaves no engine behind; an
`InternalError` is a bug of ours and closes the engine.
"""

from specpilot_rs._core import (
    CheckpointError,
    ConfigError,
    DeviceError,
    DrafterError,
    InternalError,
    KernelError,
    OptionError,
    RequestError,
    SpecPilotError,
)

__all__ = [
    "CheckpointError",
    "ConfigError",
    "DeviceError",
    "DrafterError",
    "InternalError",
    "KernelError",
    "OptionError",
    "RequestError",
    "SpecPilotError",
]

# Rust sets `code` on the instances that it raises; those raised from Python find it on their class.
for _error in (
    CheckpointError,
    ConfigError,
    DeviceError,
    DrafterError,
    InternalError,
    KernelError,
    OptionError,
    RequestError,
):
    _error.code = _error.__name__.removesuffix("Error").lower()
SpecPilotError.code = "engine"
