"""What could go wrong here, found before a model is loaded.

In: nothing, or a model's directory or hub id. Out: findings, each OK, WARN or FAIL, the latter two with what
to do. Config, weights and tokenizer go through the readers of `LLM(model)`, weight files by their headers,
so that a check of a large model takes no time and fails where loading would; only loading reads the values,
and the finding says so. Of a hub model all but the weights is fetched, and weights are judged if they are in
the cache.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

_MIN_PYTHON = (3, 11)


class Level(Enum):
    """How bad a finding is."""

    OK = "OK"
    WARN = "WARN"
    FAIL = "FAIL"


@dataclass(frozen=True)
class Finding:
    """One thing looked at."""

    level: Level
    what: str
    message: str
    fix: str | None = None

    def to_dict(self) -> dict[str, str | None]:
        """Returns the finding as JSON-ready values."""
        return {"level": self.level.value, "what": self.what, "message": self.message, "fix": self.fix}


def examine(model: str | os.PathLike[str] | None, revision: str | None = None) -> list[Finding]:
    """Looks at the environment and, if given, a model.

    Args:
        model: Directory or hub id.
        revision: Branch, tag or commit on the hub.
    """
    findings = [*_environment()]
    if model is not None:
        findings += _model(model, revision)
    return findings


def _environment() -> Iterator[Finding]:
    version = platform.python_version()
    if sys.version_info >= _MIN_PYTHON:
        yield Finding(Level.OK, "python", f"{version} at {sys.executable}")
    else:
        yield Finding(Level.FAIL, "python", f"{version} is too old", "install Python 3.11 or newer")
    yield _extension()
    for package in ("numpy", "tokenizers", "jinja2", "huggingface_hub", "tqdm"):
        try:
            yield Finding(Level.OK, package, importlib.metadata.version(package))
        except importlib.metadata.PackageNotFoundError:
            yield Finding(Level.FAIL, package, "not installed", f"pip install {package}")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    yield Finding(Level.OK, "cpu", f"{platform.machine()}, {cores} cores usable")
    yield from _gpus()
    available = _available_bytes()
    if available is not None:
        yield Finding(Level.OK, "memory", f"{available / 2**30:.1f} GiB available")


def _gpus() -> Iterator[Finding]:
    try:
        from specpilot_rs import _core, _cuda
        from specpilot_rs.errors import DeviceError
    except ImportError:
        return  # reported with the environment
    try:
        gpus = _core.cuda_gpus()
    except DeviceError as error:
        yield Finding(Level.OK, "gpu", f"none can be used: {_reason(error)}")
        return
    for index, gpu in enumerate(gpus):
        what = f"{gpu['name']}, {gpu['total_bytes'] / 2**30:.1f} GiB"
        if gpu["arch"] is None:
            major, minor = gpu["compute_capability"]
            fix = 'use device="cpu" or another GPU'
            yield Finding(Level.WARN, f"cuda:{index}", f"{what}: no kernels for sm_{major}{minor}", fix)
        else:
            yield Finding(Level.OK, f"cuda:{index}", f"{what}, kernels for {gpu['arch']}")
    if any(gpu["arch"] for gpu in gpus):
        _cuda.preload()
        try:
            major, minor = _core.cuda_compiler_version()
            yield Finding(Level.OK, "nvrtc", f"{major}.{minor}")
        except DeviceError as error:
            yield Finding(Level.WARN, "nvrtc", _reason(error), "pip install 'specpilot-rs[cuda]'")


def _extension() -> Finding:
    try:
        from specpilot_rs._core import __version__
    except ImportError as error:
        return Finding(
            Level.FAIL, "extension", str(error), "reinstall with `pip install .` (needs cargo and cc)"
        )
    try:
        installed = importlib.metadata.version("specpilot-rs")
    except importlib.metadata.PackageNotFoundError:
        return Finding(
            Level.WARN,
            "extension",
            f"{__version__}, imported from a folder that is not installed",
            "pip install .",
        )
    if installed != __version__:
        return Finding(
            Level.WARN,
            "extension",
            f"version {__version__}, but the package is {installed}",
            "remove a stale _core file from the source tree and reinstall",
        )
    return Finding(Level.OK, "extension", __version__)


def _available_bytes() -> int | None:
    try:
        from specpilot_rs._core import available_bytes
    except ImportError:
        return None  # reported with the environment
    return available_bytes()


def _model(model: str | os.PathLike[str], revision: str | None) -> Iterator[Finding]:
    try:
        from specpilot_rs.errors import SpecPilotError
        from specpilot_rs.hub import FILES, WEIGHT_FILES, model_directory
    except ImportError:
        return  # reported with the environment
    try:
        directory = model_directory(
            model, revision, files=[pattern for pattern in FILES if pattern != WEIGHT_FILES]
        )
        os.listdir(directory)
    except (SpecPilotError, OSError) as error:
        fix = "give the directory of a checkpoint, or a hub id that can be reached from here"
        yield Finding(Level.FAIL, "checkpoint", _reason(error), fix)
        return
    finding, kind = _config(directory)
    yield finding
    yield from _weights(
        directory, is_cached=not Path(model).expanduser().is_dir(), is_compared=kind is not None
    )
    # Whether one is needed is what a config that cannot be used leaves open.
    if kind is not None:
        yield from _tokenizer(directory, is_drafter=kind == "drafter")


def _reason(error: BaseException) -> str:
    return str(error) or type(error).__name__


def _config(directory: Path) -> tuple[Finding, str | None]:
    """Returns what loading says of the config, and whose it is: "target", "drafter"; None if it is no use."""
    from specpilot_rs._core import DRAFTER_ARCHITECTURES, TARGET_ARCHITECTURES, examine_config
    from specpilot_rs.errors import SpecPilotError

    try:
        config = examine_config(directory)
    except SpecPilotError as error:
        targets, drafters = ", ".join(TARGET_ARCHITECTURES), ", ".join(DRAFTER_ARCHITECTURES)
        fix = (
            f"download the file again, or use a model of {targets}, or a drafter of {drafters} or in "
            "speculators format"
        )
        return Finding(Level.FAIL, "config.json", _reason(error), fix), None
    kind = config["kind"]
    what = f"a drafter: {config['description']}" if kind == "drafter" else config["description"]
    return Finding(Level.OK, "config.json", what), kind


def _weights(directory: Path, *, is_cached: bool, is_compared: bool) -> Iterator[Finding]:
    from specpilot_rs._core import examine_weights
    from specpilot_rs.errors import SpecPilotError

    try:
        # Of a hub model they come when it is opened; in a directory all have to be there.
        found = examine_weights(directory, may_be_partial=is_cached)
    except SpecPilotError as error:
        fix = "download all files of one revision again, in safetensors format, BF16 or FP8 with its scales"
        yield Finding(Level.FAIL, "weights", _reason(error), fix)
        return
    if found is None:
        yield Finding(Level.OK, "weights", "not all downloaded yet; opening the model does that")
        return
    num_tensors, num_bytes = found["num_tensors"], found["num_bytes"]
    size = f"{num_tensors} tensors, {num_bytes / 2**20:.1f} MiB"
    fit = (
        "names, shapes and dtypes fit"
        if is_compared
        else "sound, but not compared: the config cannot be used"
    )
    yield Finding(Level.OK, "weights", f"{size}; {fit}, only loading looks at values")
    available = _available_bytes()
    if available is not None and num_bytes > available:
        yield Finding(
            Level.WARN,
            "memory",
            f"weights take {num_bytes / 2**30:.1f} GiB, {available / 2**30:.1f} GiB are available",
            "use a machine with more memory, or a smaller model",
        )


def _tokenizer(directory: Path, *, is_drafter: bool) -> Iterator[Finding]:
    if is_drafter:
        yield Finding(Level.OK, "tokenizer", "none is needed: a drafter takes its target's")
        return
    try:
        from specpilot_rs.tokenizer import Tokenizer

        tokenizer = Tokenizer(directory)
    except ImportError:
        return  # reported with the environment
    except Exception as error:
        fix = "download it again, or open the model with tokenizer=DIRECTORY or skip_tokenizer_init=True"
        yield Finding(Level.FAIL, "tokenizer", _reason(error), fix)
        return
    yield Finding(Level.OK, "tokenizer", f"{tokenizer.vocab_size} tokens, end token {tokenizer.eos_token_id}")
    if not tokenizer.chat_templates:
        yield Finding(Level.WARN, "chat template", "none", "use generate, or pass chat_template")
        return
    yield Finding(Level.OK, "chat template", ", ".join(sorted(tokenizer.chat_templates)))
