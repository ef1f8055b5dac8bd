"""The ways to decode that `specpilot bench --presets` and `--ladder` compare.

A preset says how weights are held, how the LM head is read and how trees are made. Presets that hold the same
weights share an engine, which is switched between them, so that weights are read once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from specpilot_rs.options import EngineOptions, SpeculativeConfig, option_error

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
        kernels: What the target runs on; "stock" is outside the lossless promise.
        is_fitted: Whether trees grow only while rows pay, by costs measured in the same run.
    """

    name: str
    weight_format: str
    head: str
    speculation: dict[str, Any] | None
    about: str
    kernels: str = EngineOptions.kernels
    is_fitted: bool = False

    @property
    def engine(self) -> tuple[str, str]:
        """What presets share an engine by: kernels and weight format."""
        return self.kernels, self.weight_format

    @property
    def is_lossless(self) -> bool:
        """Whether its tokens must be plain decoding's."""
        return self.kernels == "lossless"

    def speculative_config(
        self, drafter: dict[str, Any], verify_costs: Sequence[float] | None = None
    ) -> SpeculativeConfig | None:
        """Returns its speculation.

        Args:
            drafter: `model` or `method` of the drafter.
            verify_costs: Costs of steps of 1, 2, ... rows, for a fitted one.
        """
        if self.speculation is None:
            return None
        costs = verify_costs if self.is_fitted else None
        return SpeculativeConfig(**drafter, **self.speculation, verify_costs=costs)


PRESETS = {
    preset.name: preset
    for preset in (
        Preset("plain", "bf16", "dense", None, "BF16, a token a pass"),
        Preset("w12", "w12", "screened", None, "W12 and the screened head, a token a pass"),
        Preset(
            "plain-stock", "bf16", "dense", None, "BF16 through cuBLASLt, a token a pass", kernels="stock"
        ),
        Preset(
            "stock",
            "bf16",
            "dense",
            {"tree": "chain"},
            "BF16 through cuBLASLt, the drafter's chain",
            kernels="stock",
        ),
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
        Preset(
            "fitted",
            "w12",
            "screened",
            {"tree_nodes": TREE_NODES, "q_passes": 1},
            "the same, trees as large as measured costs pay for",
            is_fitted=True,
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


def presets_named(names: Sequence[str]) -> list[Preset]:
    """Returns presets in the order given.

    Raises:
        OptionError: One has no such name, or is given twice.
    """
    if len(set(names)) < len(names):
        raise option_error(f"each preset should be given once, got {', '.join(names)}")
    for name in names:
        if name not in PRESETS:
            raise option_error(f"preset should be one of {', '.join(PRESETS)}, got {name!r}")
    return [PRESETS[name] for name in names]


def with_ladder(presets: Sequence[Preset]) -> list[Preset]:
    """Returns `presets` with the steps of the ladder that are none of them, before the last."""

    def shape(preset: Preset) -> tuple[str, ...]:
        return *preset.engine, preset.head, repr((preset.speculation, preset.is_fitted))

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
    tree = "ddtree" if "ddtree" in trees else max(trees, key=str)
    return SpeculativeConfig(
        **drafter,
        tree=tree,
        tree_nodes=None if tree == "chain" else MOST_TREE_NODES,
        q_passes=max(item.get("q_passes", 0) for item in asked),
    )


def opening_head(presets: Sequence[Preset]) -> str:
    """Returns the head with which such an engine must be opened."""
    return "screened" if any(preset.head == "screened" for preset in presets) else "dense"
