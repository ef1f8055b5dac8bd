"""Everything here needs a GPU: each test carries the marker `cuda` and is skipped where there is none."""

from __future__ import annotations

from pathlib import Path

import pytest
from specpilot_rs import DeviceError, _core, _cuda


def has_gpu() -> bool:
    _cuda.preload()
    try:
        return _core.num_cuda_devices() > 0
    except DeviceError:
        return False


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = [item for item in items if item.path.parent == Path(__file__).parent]
    skip = None if not here or has_gpu() else pytest.mark.skip(reason="no CUDA device")
    for item in here:
        item.add_marker("cuda")
        if skip:
            item.add_marker(skip)
