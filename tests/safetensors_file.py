"""Safetensors files as plain bytes, by the format's definition: to change one thing in a checkpoint."""

from __future__ import annotations

import json
from pathlib import Path

Tensor = tuple[str, list[int], bytes]
"""Dtype, shape and bytes."""
Tensors = dict[str, Tensor]
"""Tensors by name."""


def read_tensors(file: Path) -> Tensors:
    """All tensors of a file."""
    content = file.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    data = content[8 + length :]
    header.pop("__metadata__", None)
    return {
        name: (entry["dtype"], entry["shape"], data[slice(*entry["data_offsets"])])
        for name, entry in header.items()
    }


def write_tensors(file: Path, tensors: Tensors) -> None:
    """Writes a file that holds `tensors`."""
    header, data = {}, b""
    for name, (dtype, shape, content) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(data), len(data) + len(content)]}
        data += content
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + data)
