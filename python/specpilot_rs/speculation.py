"""What an `LLM` opens to speculate: the drafter's directory, and the engine options of a configuration.

In: a checked `SpeculativeConfig`, or None for plain decoding. Out: values for `_core.Engine`.
"""

from __future__ import annotations

import dataclasses

from specpilot_rs.errors import OptionError
from specpilot_rs.hub import model_directory
from specpilot_rs.options import EngineOptions, SpeculativeConfig, shown

# Which drafter speculates; a loaded engine cannot change it.
_DRAFTER_KEYS = ("model", "method", "revision", "prompt_lookup_min", "prompt_lookup_max")


def with_speculation(options: EngineOptions, speculation: SpeculativeConfig | None) -> EngineOptions:
    """Returns `options` with those of `speculation` in their fields."""
    if speculation is None:
        return options
    return dataclasses.replace(
        options,
        method=speculation.method,
        num_speculative_tokens=speculation.num_speculative_tokens,
        tree=speculation.tree,
        tree_nodes=speculation.tree_nodes,
        q_passes=speculation.q_passes,
        q_head=speculation.q_head,
        verify_costs=speculation.verify_costs,
        min_confidence=speculation.min_confidence,
        prompt_lookup_min=speculation.prompt_lookup_min,
        prompt_lookup_max=speculation.prompt_lookup_max,
    )


def drafter_directory(speculation: SpeculativeConfig | None) -> str | None:
    """Returns where the drafter's files lie, fetched if need be; None for plain decoding and `ngram`.

    Raises:
        OptionError: No drafter is named.
    """
    if speculation is None or speculation.method == "ngram":
        return None
    if speculation.model is None:
        raise OptionError(
            "speculative_config needs `model`, the drafter's directory or hub id, "
            "or method 'ngram', which has none"
        )
    return str(model_directory(speculation.model, speculation.revision))


def refuse_another_drafter(wanted: SpeculativeConfig, opened: SpeculativeConfig) -> None:
    """Checks that `wanted` speculates with the drafter that is loaded.

    Args:
        wanted: A later configuration; keys left out mean the drafter there is.
        opened: What the engine was opened with, its `method` found out.

    Raises:
        OptionError: A key asks for another drafter.
    """
    for key in _DRAFTER_KEYS:
        value, there = getattr(wanted, key), getattr(opened, key)
        if value not in (None, there):
            raise OptionError(
                f"`{key}` should be {shown(there)}, as the engine was opened, or left out; got {shown(value)}"
            )
