"""What a checkpoint's files hold, tensor by tensor: format, escapes, bits per weight, bytes.

In: a model directory or one safetensors file, converted or not. Out: rows for programs, a table for people.
Only headers and escape counts are read, so a model of any size takes no time.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from specpilot_rs._core import inspect_weights
from specpilot_rs.errors import CheckpointError

_COLUMNS = ("tensor", "format", "escapes", "bits/weight", "bytes before", "bytes after")


def inspect(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Returns a row per tensor, by name.

    Args:
        path: A model directory or a safetensors file.

    Returns:
        Rows with `name`, `format` ("w12", "bf16", "f32", "fp8", or another dtype), `bits_per_weight`,
        `escapes`, `bytes` as stored and `source_bytes` as before a conversion.

    Raises:
        CheckpointError: There are no weights, or the files do not fit together.
    """
    place = Path(path).expanduser()
    if not place.exists():
        raise CheckpointError(f"{place}: no such file or directory")
    return inspect_weights(place)


def table(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Yields the lines of a table with one line per tensor and totals per format."""
    cells = [_cells(row["name"], row) for row in rows]
    formats = sorted({row["format"] for row in rows})
    totals = [_total(f"total {name}", [row for row in rows if row["format"] == name]) for name in formats]
    if len(formats) != 1:
        totals.append(_total("total", rows))
    widths = [max(map(len, column)) for column in zip(_COLUMNS, *cells, *totals, strict=True)]
    for line in (_COLUMNS, *cells, *totals):
        name, *figures = (
            cell.ljust(width) if i < 2 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        yield "  ".join((name, *figures)).rstrip()


def _cells(name: str, row: dict[str, Any]) -> tuple[str, ...]:
    return (
        name,
        row["format"],
        f"{row['escapes']:,}",
        f"{row['bits_per_weight']:.3f}",
        f"{row['source_bytes']:,}",
        f"{row['bytes']:,}",
    )


def _total(name: str, rows: Sequence[dict[str, Any]]) -> tuple[str, ...]:
    sums = {key: sum(row[key] for row in rows) for key in ("escapes", "bytes", "source_bytes")}
    num_weights = sum(row["bytes"] * 8 / row["bits_per_weight"] for row in rows if row["bits_per_weight"])
    bits = sums["bytes"] * 8 / num_weights if num_weights else 0.0
    return _cells(name, {**sums, "format": f"{len(rows)} tensors", "bits_per_weight": bits})
