"""What a drafter was given and what it drafted, for oracles of its equations."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from specpilot_rs import LLM, SamplingParams

PARAMS = SamplingParams(max_tokens=12, ignore_eos=True)


@dataclass(frozen=True)
class Drafted:
    """One round: `ids` up to and with the anchor, `taps` of the positions before it, and the greedy chain."""

    ids: list[int]
    taps: np.ndarray[Any, Any]
    chain: list[int]


def drafted_chains(llm: LLM, prompts: list[list[int]], taps: list[int]) -> list[Drafted]:
    """Decodes by chains of an engine whose drafter reads what leaves the layers `taps` of its target."""
    outputs = llm.generate(
        [{"prompt_token_ids": ids} for ids in prompts], PARAMS, use_tqdm=False, record_rounds=True
    )
    rounds = []
    for output in outputs:
        ids = [*output.prompt_token_ids, *output.outputs[0].token_ids]
        last = max(drafting.anchor_position for drafting in output.rounds)
        residuals = [llm.score(ids[: end + 1]).last_residuals for end in range(last)]
        # A tap is what leaves a layer; the first residual enters layer 0.
        tapped = np.array([rows[[tap + 1 for tap in taps]].ravel() for rows in residuals], np.float64)
        for drafting in output.rounds:
            anchor = drafting.anchor_position
            rounds.append(Drafted(ids[: anchor + 1], tapped[:anchor], list(drafting.draft_token_ids)))
    return rounds
