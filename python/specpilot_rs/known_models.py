"""Targets and drafters that are known to fit each other, and how much of each pair is verified.

Checkpoints of these sizes are not part of any test: golden values are of tiny checkpoints with the same keys,
names and dtypes, formats of tiny drafters in the published layouts, shapes of the published configs.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

GOLDEN = "golden values"
"""A tiny checkpoint of this family gives an independent implementation's logits and text."""
TRAINED = "trained drafts"
"""A small trained drafter of this kind drafts what an independent implementation drafts."""
FORMAT = "format"
"""A tiny file in this layout, names and keys alike, loads and changes no token."""
CONFIG = "config"
"""The published config is read, and gives the published shapes."""


@dataclass(frozen=True)
class KnownPair:
    """A target and one drafter for it."""

    target: str
    drafter: str | None
    method: str
    layout: str
    block_size: int | None
    taps: tuple[int, ...]
    formats: tuple[str, ...]
    target_verified: str
    drafter_verified: str

    def to_dict(self) -> dict[str, Any]:
        """Returns the pair as JSON-ready values."""
        return asdict(self)


_QWEN_27B, _QWEN_4B = "Qwen/Qwen3.8-27B", "Qwen/Qwen3.5-4B"
_GEMMA, _MUSE = "google/gemma-4-12B-it", "meta-models/Muse-Glimmer-30B"
_LLAMA = "meta-llama/Llama-3.1-8B-Instruct"
_BF16 = ("bf16", "w12")
_FP8 = (*_BF16, "fp8")

PAIRS = (
    KnownPair(
        _QWEN_27B,
        "z-lab/Qwen3.8-27B-DFlash2",
        "dflash2",
        "z-lab",
        8,
        (5, 19, 33, 47, 61),
        _FP8,
        GOLDEN,
        TRAINED,
    ),
    KnownPair(_QWEN_27B, "RadixArk/Qwen3.8-27B-DSpark", "dspark", "SpecForge", 7, (), _FP8, GOLDEN, TRAINED),
    KnownPair(
        _QWEN_4B,
        "z-lab/Qwen3.5-4B-DFlash",
        "dflash",
        "z-lab",
        16,
        (1, 8, 15, 22, 29),
        _BF16,
        GOLDEN,
        TRAINED,
    ),
    KnownPair(
        _LLAMA,
        "z-lab's DFlash of this target (UltraChat)",
        "dflash",
        "z-lab",
        10,
        (1, 8, 15, 22, 29),
        _BF16,
        GOLDEN,
        TRAINED,
    ),
    KnownPair(
        _LLAMA, "any EAGLE-3 of this target", "eagle3", "EAGLE", None, (1, 15, 28), _BF16, GOLDEN, TRAINED
    ),
    KnownPair(
        _GEMMA,
        "any EAGLE-3 of this target",
        "eagle3",
        "speculators",
        None,
        (1, 23, 44),
        _BF16,
        GOLDEN,
        FORMAT,
    ),
    KnownPair(
        _MUSE,
        "meta-models/Muse-Glimmer-30B-assistant",
        "dflash",
        "Muse assistant",
        16,
        (1, 13, 25, 37, 49),
        _BF16,
        GOLDEN,
        FORMAT,
    ),
    KnownPair(
        _MUSE,
        "Muse-Glimmer-30B-DFlash2",
        "dflash2",
        "z-lab",
        16,
        (1, 13, 25, 37, 49),
        _BF16,
        GOLDEN,
        CONFIG,
    ),
    KnownPair("any of these", None, "ngram", "no files", None, (), _FP8, GOLDEN, TRAINED),
)
"""Taps are 0-based layer outputs; none where the publisher's file says them and nobody else."""


def table() -> list[str]:
    """Returns the pairs as lines of a table, and what its words mean."""
    rows = [("target", "drafter", "method", "layout", "block", "taps", "formats", "target by", "drafter by")]
    for pair in PAIRS:
        rows.append(
            (
                pair.target,
                pair.drafter or "-",
                pair.method,
                pair.layout,
                str(pair.block_size or "-"),
                " ".join(map(str, pair.taps)) or "-",
                " ".join(pair.formats),
                pair.target_verified,
                pair.drafter_verified,
            )
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
    notes = [
        f"{GOLDEN}: a tiny checkpoint of the family gives an independent implementation's logits and text",
        f"{TRAINED}: a small trained drafter of the kind drafts as an independent implementation does",
        f"{FORMAT}: a tiny file of the layout loads and changes no token",
        f"{CONFIG}: the published config gives the published shapes",
    ]
    return [lines[0], "-" * max(map(len, lines)), *lines[1:], "", *notes]
