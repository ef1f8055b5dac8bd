"""What could go wrong here, found before a model is loaded.

In: nothing, or a model's directory or hub id. Out: findings, each OK, WARN or FAIL, the latter two with what
to do. Weight files are judged by their headers, so a check of a large model takes no time; only loading
proves the tensors' shapes. Of a hub model all but the weights is fetched, and weights are judged if they are
in the cache.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from specpilot_rs.options import as_integer, shown

_LENGTH_BYTES = 8
_MAX_HEADER_BYTES = 100_000_000
_MIN_PYTHON = (3, 11)
_FP8 = "F8_E4M3"
_DTYPES = ("BF16", "F32", _FP8)
# A matrix in 12 bits a weight is stored as these parts, in dtypes of their own.
_W12_PART = re.compile(r"\.w12_(plane8|plane4|base|counts|escapes)$")
# A drafter with a vocabulary of its own brings tables between it and the target's.
_ID_TABLES = {"d2t": "I64", "t2d": "BOOL"}
_UNREADABLE = (OSError, ValueError, RecursionError, MemoryError)
"""What reading a damaged file can raise; the checks themselves raise only `ValueError`."""


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


@dataclass(frozen=True)
class _Kind:
    """What a config says that a checkpoint is."""

    is_drafter: bool = False
    prefixes_not_read: tuple[str, ...] = ()


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
    yield from _weights(directory, kind, is_cached=not Path(model).expanduser().is_dir())
    yield from _tokenizer(directory, kind)


def _json_file(file: Path) -> dict[str, Any]:
    _require_regular(file)
    return _json_object(file.read_bytes())


def _json_object(data: bytes) -> dict[str, Any]:
    value = json.loads(data)
    if not isinstance(value, dict):
        raise ValueError(f"expected a JSON object, got {type(value).__name__}")
    return value


def _require_regular(file: Path) -> None:
    # Opening a pipe would wait for a writer that never comes.
    if file.exists() and not file.is_file():
        raise ValueError(f"{file}: expected a regular file")


def _reason(error: BaseException) -> str:
    return str(error) or type(error).__name__


def _config(directory: Path) -> tuple[Finding, _Kind]:
    from specpilot_rs._core import DRAFTER_ARCHITECTURES, TARGET_ARCHITECTURES

    def failed(message: str, fix: str) -> tuple[Finding, _Kind]:
        return Finding(Level.FAIL, "config.json", message, fix), _Kind()

    try:
        config = _json_file(directory / "config.json")
    except _UNREADABLE as error:
        return failed(_reason(error), "download the file again")
    names = config.get("architectures")
    if not isinstance(names, list) or not names or not all(isinstance(name, str) for name in names):
        return failed(f"`architectures` should be a list of names, got {shown(names)}", "download it again")
    for name in names:
        if name in TARGET_ARCHITECTURES:
            kind = _Kind(prefixes_not_read=TARGET_ARCHITECTURES[name])
            return Finding(Level.OK, "config.json", name), kind
        if name in DRAFTER_ARCHITECTURES:
            return Finding(Level.OK, "config.json", f"{name}, a drafter"), _Kind(is_drafter=True)
    targets, drafters = ", ".join(TARGET_ARCHITECTURES), ", ".join(DRAFTER_ARCHITECTURES)
    return failed(
        f"architecture {shown(names[0])} is not supported",
        f"use a model of {targets} or a drafter of {drafters}",
    )


def _weights(directory: Path, kind: _Kind, *, is_cached: bool) -> Iterator[Finding]:
    index, single = directory / "model.safetensors.index.json", directory / "model.safetensors"
    weight_map: dict[str, str] = {}
    if single.exists():  # as in loading, it comes before an index
        files = [single]
    elif index.exists():
        try:
            weight_map = _weight_map(index)
        except _UNREADABLE as error:
            yield Finding(
                Level.FAIL, index.name, f"not an index: {_reason(error)}", "download the file again"
            )
            return
        files = sorted({directory / shard for shard in weight_map.values()})
        missing = [file for file in files if not file.exists()]
        if is_cached and missing:
            yield Finding(
                Level.OK,
                "weights",
                f"{len(missing)} of {len(files)} file(s) not downloaded yet; opening the model does",
            )
            return
    elif is_cached:
        yield Finding(Level.OK, "weights", "not downloaded yet; opening the model does")
        return
    else:
        yield Finding(
            Level.FAIL,
            "weights",
            f"expected {single.name} or {index.name}, found neither",
            "download the weights in safetensors format",
        )
        return
    held: dict[str, str] = {}
    dtypes: dict[str, str] = {}
    num_bytes = 0
    for file in files:
        try:
            found = _tensor_dtypes(file)
            num_bytes += file.stat().st_size
        except _UNREADABLE as error:
            yield Finding(Level.FAIL, file.name, _reason(error), "download the file again")
            return
        held |= dict.fromkeys(found, file.name)
        dtypes |= found
    astray = [name for name, shard in weight_map.items() if held.get(name) != shard]
    if astray:
        yield Finding(
            Level.FAIL,
            index.name,
            f"{len(astray)} tensor(s) are not in the shard it names, first `{astray[0]}`",
            "download index and shards of one revision",
        )
        return
    others = {
        name: dtype
        for name, dtype in dtypes.items()
        if dtype not in _DTYPES
        and not name.startswith(kind.prefixes_not_read)
        and not _W12_PART.search(name)
        and not (kind.is_drafter and _ID_TABLES.get(name) == dtype)
    }
    if others:
        name, dtype = next(iter(others.items()))
        yield Finding(
            Level.FAIL,
            "weights",
            f"expected {' or '.join(_DTYPES)}, got {len(others)} tensor(s) of another dtype, "
            f"first {dtype} in `{name}`",
            "use the model's BF16 checkpoint",
        )
        return
    unscaled = [
        name
        for name, dtype in dtypes.items()
        if dtype == _FP8
        and not name.startswith(kind.prefixes_not_read)
        and not {f"{name}_scale_inv", f"{name}_scale"} & dtypes.keys()
    ]
    if unscaled:
        yield Finding(
            Level.FAIL,
            "weights",
            f"{len(unscaled)} {_FP8} tensor(s) have no scale beside them, first `{unscaled[0]}`",
            "download all files of one revision, or use the model's BF16 checkpoint",
        )
        return
    # The parts of a matrix are one tensor.
    num_tensors = len({_W12_PART.sub("", name) for name in held})
    yield Finding(
        Level.OK, "weights", f"{num_tensors} tensors, {num_bytes / 2**20:.1f} MiB in {len(files)} file(s)"
    )
    available = _available_bytes()
    if available is not None and num_bytes > available:
        yield Finding(
            Level.WARN,
            "memory",
            f"weights take {num_bytes / 2**30:.1f} GiB, {available / 2**30:.1f} GiB are available",
            "use a machine with more memory, or a smaller model",
        )


def _weight_map(index: Path) -> dict[str, str]:
    """Returns the shard of each tensor by an index whose shards lie beside it."""
    weight_map = _json_file(index).get("weight_map")
    if not isinstance(weight_map, dict):
        raise ValueError(f"`weight_map` should be an object, got {type(weight_map).__name__}")
    for name, shard in weight_map.items():
        if not isinstance(shard, str) or Path(shard).name != shard:
            raise ValueError(f"the shard of `{name}` should be a file's name, got {shown(shard)}")
    return weight_map


def _tensor_dtypes(file: Path) -> dict[str, str]:
    """Returns names and dtypes in a safetensors file whose header and length agree."""
    _require_regular(file)
    size = file.stat().st_size
    with file.open("rb") as handle:
        num_header = int.from_bytes(handle.read(_LENGTH_BYTES), "little")
        if size < _LENGTH_BYTES or num_header > min(size - _LENGTH_BYTES, _MAX_HEADER_BYTES):
            raise ValueError(f"{size} bytes are too few for a safetensors header")
        header = _json_object(handle.read(num_header))
    header.pop("__metadata__", None)
    dtypes, end = {}, 0
    for name, entry in header.items():
        dtype, offsets = (
            (entry.get("dtype"), entry.get("data_offsets")) if isinstance(entry, dict) else (0, 0)
        )
        pair = [as_integer(offset) for offset in offsets] if isinstance(offsets, list) else []
        match pair:
            case [int(first), int(last)] if isinstance(dtype, str) and 0 <= first <= last:
                dtypes[name], end = dtype, max(end, last)
            case _:
                raise ValueError(
                    f"the header's `{name}` should have a dtype and two data_offsets, got {shown(entry)}"
                )
    expected = _LENGTH_BYTES + num_header + end
    if size != expected:
        raise ValueError(f"expected {shown(expected)} bytes by its header, got {size}")
    return dtypes


def _tokenizer(directory: Path, kind: _Kind) -> Iterator[Finding]:
    if kind.is_drafter and not (directory / "tokenizer.json").exists():
        yield Finding(Level.OK, "tokenizer", "none, as usual: a drafter takes its target's")
        return
    try:
        from specpilot_rs.tokenizer import Tokenizer

        tokenizer = Tokenizer(directory)
    except ImportError:
        return  # reported with the environment
    except Exception as error:
        yield Finding(
            Level.WARN, "tokenizer", _reason(error), "download tokenizer.json, or work with token ids"
        )
        return
    yield Finding(Level.OK, "tokenizer", f"{tokenizer.vocab_size} tokens, end token {tokenizer.eos_token_id}")
    if not tokenizer.chat_templates:
        yield Finding(Level.WARN, "chat template", "none", "use generate, or pass chat_template")
        return
    yield Finding(Level.OK, "chat template", ", ".join(sorted(tokenizer.chat_templates)))
