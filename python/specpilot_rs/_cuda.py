"""CUDA's compiler and cuBLASLt from the wheels of `specpilot-rs[cuda]`, loaded before the core looks.

The core opens libraries by name. One that is loaded already is found by its name, so a wheel's library is
loaded here by its path, its helpers first. What is loaded already (by torch, say) stays; without wheels the
system's loader decides. Called when CUDA is asked for, never on import.
"""

from __future__ import annotations

import ctypes
import importlib.util
import logging
import sys
from pathlib import Path

from tqdm import tqdm

from specpilot_rs import _core
from specpilot_rs.errors import DeviceError

# In this order: the compiler looks for its helper by name and has no search path of its own.
_LIBRARIES = ("libnvrtc-builtins.so.13.0", "libnvrtc.so.13")
_MATMUL_LIBRARY = "libcublasLt.so.13"
_loaded: list[ctypes.CDLL] = []
_LOG = logging.getLogger("specpilot_rs")


def preload() -> None:
    """Load the compiler of the CUDA wheels, where they are installed and nothing else was loaded before."""
    _load_all(_LIBRARIES)


def preload_matmuls() -> None:
    """Load cuBLASLt of the CUDA wheels likewise: only kernels "stock" multiply with it."""
    _load_all((_MATMUL_LIBRARY,))


def _load_all(names: tuple[str, ...]) -> None:
    if _is_loaded(names[-1]):
        return
    for folder in _wheel_folders():
        paths = [folder / name for name in names]
        if all(path.is_file() for path in paths):
            _loaded.extend(ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL) for path in paths)
            return


def find_gpu(device: str) -> str | None:
    """Loads the compiler for the GPU that `device` leads to, and returns what it compiles for.

    None where no GPU would be used: the device is the CPU, or there is no such GPU, of which the engine says
    why. With "auto" a GPU whose compiler is missing is none either; a warning says how to get it.
    """
    name, _, index = device.partition(":")
    if name not in ("auto", "cuda") or not (index or "0").isdecimal():
        return None
    try:
        gpu = _core.cuda_gpus()[int(index or 0)]
    except (DeviceError, IndexError):
        return None
    arch: str | None = gpu["arch"]
    if arch is None:
        return None
    preload()
    try:
        _core.cuda_compiler_version()
    except DeviceError as error:
        if name == "cuda":
            raise
        _LOG.warning("%s is left alone: %s", gpu["name"], error)
        return None
    return arch


def prepare(device: str, kernels: str = "lossless") -> None:
    """Gets ready for an engine on `device`: compiles what its GPU, if it has one, does not find in the cache.

    Args:
        device: The engine's device.
        kernels: The engine's kernels; "stock" ones need a library besides the compiler.

    Raises:
        DeviceError: The compiler of a GPU that was named is missing, or refuses a kernel.
    """
    arch = find_gpu(device)
    if arch is None:
        return
    if kernels == "stock":
        preload_matmuls()
    # Silent while it is quick: kernels in the cache are only read.
    bar = tqdm(desc="Compiling CUDA kernels", file=sys.stderr, disable=not sys.stderr.isatty(), delay=1)

    def show(stem: str, _: str, num_ready: int, num_kernels: int) -> None:
        bar.total = num_kernels
        bar.set_postfix_str(stem, refresh=False)
        bar.update(num_ready - bar.n)

    with bar:
        _core.compile_kernels([arch], on_progress=show)


def _is_loaded(name: str) -> bool:
    try:
        maps = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
    return f"/{name}" in maps


def _wheel_folders() -> list[Path]:
    spec = importlib.util.find_spec("nvidia")
    roots = spec.submodule_search_locations if spec else None
    return [Path(root) / "cu13" / "lib" for root in roots or ()]
