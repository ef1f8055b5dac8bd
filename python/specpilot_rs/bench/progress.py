"""Who hears of a run as it goes: nobody, or a reader at a terminal or of a log."""

from __future__ import annotations

import sys
from typing import Self

from tqdm import tqdm


class Progress:
    """Hears of a run and keeps it to itself."""

    def start(self, num_prompts: int) -> None:
        """Told once, with the prompts to decode over all configurations."""

    def advance(self, num_prompts: int) -> None:
        """So many prompts more are done, or will not be needed."""

    def note(self, line: str) -> None:
        """A line for the reader."""


class StderrProgress(Progress):
    """Lines on stderr, and a bar below them if it is a terminal."""

    def __init__(self) -> None:
        """Opens the bar."""
        self._bar = tqdm(
            desc="Decoding",
            unit="prompt",
            file=sys.stderr,
            disable=not sys.stderr.isatty(),
            dynamic_ncols=True,
        )

    def __enter__(self) -> Self:
        """Returns itself; the bar is open already."""
        return self

    def __exit__(self, *_: object) -> None:
        """Closes the bar."""
        self._bar.close()

    def start(self, num_prompts: int) -> None:
        """Gives the bar its length."""
        self._bar.reset(total=num_prompts)

    def advance(self, num_prompts: int) -> None:
        """Moves the bar."""
        self._bar.update(num_prompts)

    def note(self, line: str) -> None:
        """Writes a line above the bar."""
        self._bar.write(line, file=sys.stderr)
