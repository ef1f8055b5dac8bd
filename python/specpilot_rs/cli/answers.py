"""What commands write: JSON for programs to stdout, and a line about speed to stderr."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from specpilot_rs.outputs import RequestOutput


def write_json(value: Any) -> None:
    """Writes one line of JSON to stdout."""
    # ASCII, so that no string (half a surrogate pair) and no terminal can make it fail.
    typer.echo(json.dumps(value))


def report(outputs: list[RequestOutput], before: str = "") -> None:
    """Writes to stderr how many tokens a target pass gave.

    Args:
        outputs: Of one call.
        before: Written to stdout first: what ends an unfinished line.
    """
    from specpilot_rs.outputs import tokens_per_pass

    num_tokens = sum(output.metrics.num_output_tokens for output in outputs)
    num_passes = sum(output.metrics.num_target_passes for output in outputs)
    # A prompt's own pass gives the first token of its output, and is not among these passes.
    num_later = sum(max(0, output.metrics.num_output_tokens - 1) for output in outputs)
    typer.echo(before, nl=False)
    typer.echo(
        f"{num_tokens} tokens, {num_later} of them in {num_passes} target passes after those of prompts "
        f"({tokens_per_pass(outputs):.2f} per pass)",
        err=True,
    )
