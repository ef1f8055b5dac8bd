"""The ways to decode that `specpilot bench --presets` and `--ladder` compare.

A preset says how weights are held, how the LM head is read and how trees are made. Presets that hold the same
weights share an engine, which is switched between them, so that weights are read once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from specpilot_rs.options import SpeculativeConfig, option_error

TREE_NODES = 32
"""Rows of every tree, the published size."""
MOST_TREE_NODES = 64
"""Rows of the largest trees whose cost is measured."""


@dataclass(frozen=True)
class Preset:
    """A way to decode.

    Attributes:
        name: What reports call it.
        weight_format: How linear layers are held, the drafter's too where it is planted.
        head: How greedy tokens are found.
        speculation: Fields of `SpeculativeConfig` besides the drafter; None for plain decoding.
        about: What it stands for, in a line.
    """

    name: str
    weight_format: str
    head: str
    speculation: dict[str, Any] | None
    about: str

    def speculative_config(self, drafter: dict[str, Any]) -> SpeculativeConfig | None:
        """Returns its speculation with `drafter` (its `model` or `method`)."""
        return None if self.speculation is None else SpeculativeConfig(**drafter, **self.speculation)


PRESETS = {
    preset.name: preset
    for preset in (
        Preset("plain", "bf16", "dense", None, "BF16, a token a pass"),
        Preset(
            "ddtree",
            "bf16",
            "dense",
            {"tree": "ddtree", "tree_nodes": TREE_NODES},
            "BF16, a tree grown from the drafter's marginals",
        ),
        Preset(
            "specpilot",
            "w12",
            "screened",
            {"tree_nodes": TREE_NODES, "q_passes": 1},
            "W12, two trees with a Q pass between, screened head",
        ),
    )
}
"""Presets by name."""

_TREE = {"tree_nodes": TREE_NODES}
LADDER = (
    PRESETS["plain"],
    Preset("tree", "bf16", "dense", _TREE, "one tree by the drafter's best scores"),
    Preset("+W12", "w12", "dense", _TREE, "the same, weights in 12 bits"),
    Preset("+head", "w12", "screened", _TREE, "the same, screened head"),
    Preset("+Q pass", "w12", "screened", {**_TREE, "q_passes": 1}, "the same, a Q pass and a second tree"),
)
"""Each step adds one part of the method to the one before."""

NOT_BUILT = {
    "stock": "it runs on cuBLASLt's matmuls, which this build has no engine for",
}
"""Presets that are refused, and why."""


def presets_named(names: Sequence[str]) -> list[Preset]:
    """Returns presets in the order given.

    Raises:
        OptionError: One has no such name, or is given twice.
    """
    if len(set(names)) < len(names):
        raise option_error(f"each preset should be given once, got {', '.join(names)}")
    for name in names:
        if name in NOT_BUILT:
            raise option_error(f"preset {name!r} cannot be measured: {NOT_BUILT[name]}")
        if name not in PRESETS:
            raise option_error(f"preset should be one of {', '.join(PRESETS)}, got {name!r}")
    return [PRESETS[name] for name in names]


def with_ladder(presets: Sequence[Preset]) -> list[Preset]:
    """Returns `presets` with the steps of the ladder that are none of them, before the last."""

    def shape(preset: Preset) -> tuple[str, str, str]:
        return preset.weight_format, preset.head, repr(preset.speculation)

    taken = {shape(preset) for preset in presets}
    steps = [step for step in LADDER if shape(step) not in taken]
    return [*presets[:-1], *steps, presets[-1]]


def opening_config(presets: Sequence[Preset], drafter: dict[str, Any]) -> SpeculativeConfig | None:
    """Returns the speculation with which an engine must be opened to be switched to each of `presets`."""
    asked = [preset.speculation for preset in presets if preset.speculation is not None]
    if not asked:
        return None
    # Marginals are asked for with more candidates than any other scores.
    trees = {item.get("tree") for item in asked}
    return SpeculativeConfig(
        **drafter,
        tree="ddtree" if "ddtree" in trees else max(trees, key=str),
        tree_nodes=MOST_TREE_NODES,
        q_passes=max(item.get("q_passes", 0) for item in asked),
    )


def opening_head(presets: Sequence[Preset]) -> str:
    """Returns the head with which such an engine must be opened."""
    return "screened" if any(preset.head == "screened" for preset in presets) else "dense"
