"""What could go wrong here, found before a model is loaded.

In: nothing, or a checkpoint directory. Out: findings, each OK, WARN or FAIL, the latter two with what to do.
Weight files are judged by their headers, so a check of a large model takes no time; only loading proves the
tensors' shapes.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

_LENGTH_BYTES = 8
_MAX_HEADER_BYTES = 100_000_000
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


def examine(directory: Path | None) -> list[Finding]:
    """Looks at the environment and, if given, a checkpoint."""
    findings = [*_environment()]
    if directory is not None:
        findings += _checkpoint(directory)
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
    yield Finding(Level.OK, "device", "cpu; this release has no GPU backend")
    available = _available_bytes()
    if available is not None:
        yield Finding(Level.OK, "memory", f"{available / 2**30:.1f} GiB available")


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
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    kib = next((line.split()[1] for line in lines if line.startswith("MemAvailable:")), None)
    return None if kib is None else int(kib) * 1024


def _checkpoint(directory: Path) -> Iterator[Finding]:
    if not directory.is_dir():
        yield Finding(Level.FAIL, "checkpoint", f"{directory}: no such directory", "download the model first")
        return
    yield _config(directory)
    yield from _weights(directory)
    yield from _tokenizer(directory)


def _json_file(file: Path) -> dict[str, Any]:
    value = json.loads(file.read_bytes())
    if not isinstance(value, dict):
        raise ValueError(f"expected an object, got {type(value).__name__}")
    return value


def _config(directory: Path) -> Finding:
    file = directory / "config.json"
    try:
        config = _json_file(file)
    except (OSError, ValueError) as error:
        return Finding(Level.FAIL, "config.json", str(error), "download the file again")
    names = config.get("architectures") or []
    if not isinstance(names, list) or len(names) != 1:
        return Finding(
            Level.FAIL,
            "config.json",
            f"`architectures` should hold one name, got {names!r}",
            "download it again",
        )
    return Finding(Level.OK, "config.json", str(names[0]))


def _weights(directory: Path) -> Iterator[Finding]:
    index, single = directory / "model.safetensors.index.json", directory / "model.safetensors"
    if index.is_file():
        try:
            weight_map = _json_file(index)["weight_map"]
            files = sorted({directory / str(shard) for shard in weight_map.values()})
        except (OSError, ValueError, KeyError, AttributeError) as error:
            yield Finding(Level.FAIL, index.name, f"not an index: {error!r}", "download the file again")
            return
    elif single.is_file():
        weight_map, files = {}, [single]
    else:
        yield Finding(
            Level.FAIL,
            "weights",
            f"expected {single.name} or {index.name}, found neither",
            "download the weights in safetensors format",
        )
        return
    held: dict[str, str] = {}
    num_bytes = 0
    for file in files:
        try:
            held |= dict.fromkeys(_tensor_names(file), file.name)
        except (OSError, ValueError) as error:
            yield Finding(Level.FAIL, file.name, str(error), "download the file again")
            return
        num_bytes += file.stat().st_size
    astray = [name for name, shard in weight_map.items() if held.get(name) != shard]
    if astray:
        yield Finding(
            Level.FAIL,
            index.name,
            f"{len(astray)} tensor(s) are not in the shard it names, first `{astray[0]}`",
            "download index and shards of one revision",
        )
        return
    yield Finding(
        Level.OK, "weights", f"{len(held)} tensors, {num_bytes / 2**20:.1f} MiB in {len(files)} file(s)"
    )
    available = _available_bytes()
    if available is not None and num_bytes > available:
        yield Finding(
            Level.WARN,
            "memory",
            f"weights take {num_bytes / 2**30:.1f} GiB, {available / 2**30:.1f} GiB are available",
            "use a machine with more memory, or a smaller model",
        )


def _tensor_names(file: Path) -> list[str]:
    """Returns the names in a safetensors file whose header and length agree."""
    size = file.stat().st_size
    with file.open("rb") as handle:
        num_header = int.from_bytes(handle.read(_LENGTH_BYTES), "little")
        if size < _LENGTH_BYTES or num_header > min(size - _LENGTH_BYTES, _MAX_HEADER_BYTES):
            raise ValueError(f"{size} bytes are too few for a safetensors header")
        header = json.loads(handle.read(num_header))
    header.pop("__metadata__", None)
    end = max((entry["data_offsets"][1] for entry in header.values()), default=0)
    expected = _LENGTH_BYTES + num_header + end
    if size != expected:
        raise ValueError(f"expected {expected} bytes by its header, got {size}")
    return list(header)


def _tokenizer(directory: Path) -> Iterator[Finding]:
    try:
        from specpilot_rs.tokenizer import Tokenizer

        tokenizer = Tokenizer(directory)
    except ImportError:
        return  # reported with the environment
    except Exception as error:
        yield Finding(Level.WARN, "tokenizer", str(error), "download tokenizer.json, or work with token ids")
        return
    yield Finding(Level.OK, "tokenizer", f"{tokenizer.vocab_size} tokens, end token {tokenizer.eos_token_id}")
    if not tokenizer.chat_templates:
        yield Finding(Level.WARN, "chat template", "none", "use generate, or pass chat_template")
        return
    yield Finding(Level.OK, "chat template", ", ".join(sorted(tokenizer.chat_templates)))
