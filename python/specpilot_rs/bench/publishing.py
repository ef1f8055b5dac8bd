"""What becomes of a finished report: files, and what is printed."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import typer

from specpilot_rs.bench.report import report_text
from specpilot_rs.output_file import writing


def publish(
    report: Mapping[str, Any],
    files: Mapping[str, Path | None],
    as_json: bool,
    *,
    draw: Callable[[Mapping[str, Any]], bytes],
    lines: Callable[[Mapping[str, Any]], Iterable[str]],
) -> None:
    """Writes and prints a report.

    Args:
        report: What was measured.
        files: Where to write `json` and `png`.
        as_json: Print JSON instead of `lines`.
        draw: Makes the picture, as PNG.
        lines: Makes the table.

    Raises:
        OSError: A file cannot be written; the report is printed all the same.
    """
    try:
        if (path := files["json"]) is not None:
            with writing(path) as handle:
                handle.write(report_text(report).encode())
        if (path := files["png"]) is not None:
            picture = draw(report)
            with writing(path) as handle:
                handle.write(picture)
    finally:  # a full disk takes the files, not what was measured
        for line in [json.dumps(report)] if as_json else lines(report):
            typer.echo(line)
