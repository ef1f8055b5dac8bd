"""Sizes of trees and drafts on the command line: one number for all, or one for each, as in 16,48."""

from __future__ import annotations

from typing import Any

import typer

METAVAR = "N[,N...]"
"""How help texts write such an argument."""


def parse_sizes(text: str | int) -> Any:
    """Returns what `SpeculativeConfig` takes: a number, or a tuple of them.

    Args:
        text: As it was given; a default comes as it is.

    Raises:
        BadParameter: It is something else.
    """
    if isinstance(text, int):
        return text
    try:
        sizes = tuple(int(part) for part in text.split(","))
    except ValueError:
        raise typer.BadParameter(
            f"expected a number, or one for each tree as in 16,48, got {text!r}"
        ) from None
    return sizes[0] if len(sizes) == 1 else sizes
