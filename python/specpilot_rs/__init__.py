"""Lossless speculative decoding: a Rust engine with a Python API in vLLM's shape.

    from specpilot_rs import LLM, SamplingParams

    llm = LLM.demo()
    out = llm.generate("def add(a, b):", SamplingParams(max_tokens=64))[0]
    out.outputs[0].text, out.metrics.mean_acceptance_length

Names are loaded on first use: the extension and numpy cost more than the whole of `specpilot --help`.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from specpilot_rs._core import ScoreRecord, __version__
    from specpilot_rs.errors import (
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
    from specpilot_rs.llm import LLM
    from specpilot_rs.options import SamplingParams, SpeculativeConfig
    from specpilot_rs.outputs import CompletionOutput, RequestMetrics, RequestOutput, StreamOutput

__all__ = [
    "LLM",
    "CheckpointError",
    "CompletionOutput",
    "ConfigError",
    "DeviceError",
    "DrafterError",
    "InternalError",
    "KernelError",
    "OptionError",
    "RequestError",
    "RequestMetrics",
    "RequestOutput",
    "SamplingParams",
    "ScoreRecord",
    "SpecPilotError",
    "SpeculativeConfig",
    "StreamOutput",
    "__version__",
]

_HOME = {
    "LLM": "llm",
    "SamplingParams": "options",
    "SpeculativeConfig": "options",
    "CompletionOutput": "outputs",
    "RequestMetrics": "outputs",
    "RequestOutput": "outputs",
    "StreamOutput": "outputs",
    "ScoreRecord": "_core",
    "__version__": "_core",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_HOME.get(name, 'errors')}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
