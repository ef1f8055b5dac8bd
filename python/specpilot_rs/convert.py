"""Converting a checkpoint to W12.

In: a model's directory or hub id. Out: a directory that holds the same model, its linear layers in 12 bits
a weight that decode to the same bits. The directory appears under its name once it is complete; until then
the work is in `OUT.partial`, from which the same call goes on after an error or Ctrl-C.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from tqdm import tqdm

from specpilot_rs._core import convert_weights
from specpilot_rs.errors import OptionError
from specpilot_rs.hub import model_directory

FORMATS = ("w12",)
"""Formats that a checkpoint can be converted to."""


@dataclass(frozen=True)
class Conversion:
    """What a conversion made."""

    directory: Path
    num_tensors: int
    num_w12: int
    """Matrices that are W12 now."""
    kept_bf16: list[str]
    """Linear layers that stay BF16, because W12 would not make them smaller."""
    num_shards_written: int
    num_shards_found: int
    """Shards that an earlier run had written."""
    source_bytes: int
    bytes: int

    def to_dict(self) -> dict[str, Any]:
        """Returns the summary as JSON-ready values."""
        return {**self.__dict__, "directory": str(self.directory)}


def convert(
    model: str | os.PathLike[str],
    out: str | os.PathLike[str],
    weight_format: str = "w12",
    *,
    revision: str | None = None,
    use_tqdm: bool = True,
) -> Conversion:
    """Writes a model in another weight format.

    Args:
        model: Directory or hub id of a target or drafter in BF16.
        out: Directory to write; absent, or empty.
        weight_format: "w12".
        revision: Revision of the model on the hub.
        use_tqdm: Show progress on stderr if it is a terminal.

    Returns:
        What was written.

    Raises:
        SpecPilotError: The model cannot be converted, or `out` is taken or cannot be written; then it is as
            it was before.
    """
    if weight_format not in FORMATS:
        raise OptionError(
            f"option `weight_format` should be {' or '.join(FORMATS)} to convert to, got {weight_format!r}"
        )
    source = model_directory(model, revision)
    directory = Path(out).expanduser().absolute()
    with _Bar(use_tqdm) as bar:
        summary = convert_weights(source, directory, bar.update)
    return Conversion(directory=directory, **summary)


class _Bar:
    """A bar over the source's bytes."""

    def __init__(self, use_tqdm: bool) -> None:
        self._bar = tqdm(
            desc="Converting",
            unit="B",
            unit_scale=True,
            file=sys.stderr,
            disable=not (use_tqdm and sys.stderr.isatty()),
            dynamic_ncols=True,
        )

    def __enter__(self) -> _Bar:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.close()

    def update(
        self, tensor: str, tensors_done: int, tensors_total: int, bytes_done: int, bytes_total: int
    ) -> None:
        if self._bar.disable:
            return
        self._bar.total = bytes_total
        self._bar.set_postfix_str(f"{tensors_done}/{tensors_total} tensors {tensor}", refresh=False)
        self._bar.update(bytes_done - self._bar.n)
