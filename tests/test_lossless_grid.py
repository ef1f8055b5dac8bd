"""Drafters x trees x Q passes x formats x heads x decoding: no token and no bit of a logit ever changes.

Every pair of values meets in the cover that runs by default; the whole grid is marked slow.
"""

from __future__ import annotations

import itertools
import random
from dataclasses import astuple, dataclass, fields
from typing import Any

import numpy as np
import pytest
from specpilot_rs import LLM, SamplingParams

from .conftest import DRAFTERS, TREES

NUM_TOKENS = 32
# Rows of the tree (of both trees: the first may be the larger) and how many positions are drafted.
SIZES: dict[str, dict[str, Any]] = {
    "small": {"tree_nodes": 7, "num_speculative_tokens": 5},
    "usual": {"tree_nodes": 16},
    "large": {"tree_nodes": 33, "num_speculative_tokens": 21},
}


@dataclass(frozen=True)
class Cell:
    """One way to run the demo pair."""

    drafter: str
    tree: str
    size: str
    q_passes: int
    weight_format: str
    head: str
    decoding: str

    def __str__(self) -> str:
        return "-".join(map(str, astuple(self)))

    def pairs(self) -> set[tuple[tuple[str, object], ...]]:
        """Returns the pairs of values that meet in this cell."""
        values = [(field.name, getattr(self, field.name)) for field in fields(self)]
        return set(itertools.combinations(values, 2))


PAIRINGS = [(drafter, tree) for drafter, trees in TREES.items() for tree in trees]
GRID = [
    Cell(*pairing, size, q_passes, weight_format, head, decoding)
    for pairing, size, q_passes, weight_format, head, decoding in itertools.product(
        PAIRINGS, SIZES, (0, 1, 2), ("bf16", "w12"), ("dense", "screened"), ("greedy", "sampled")
    )
]


def pairwise_cover(grid: list[Cell]) -> list[Cell]:
    """Returns cells in which all pairs of values meet that meet anywhere: always one with most new pairs."""
    open_pairs = set().union(*(cell.pairs() for cell in grid))
    cover = []
    while open_pairs:
        best = max(grid, key=lambda cell: len(cell.pairs() & open_pairs))
        open_pairs -= best.pairs()
        cover.append(best)
    return cover


# Shuffled, or ties would all go to the first values.
COVER = pairwise_cover(random.Random(0).sample(GRID, len(GRID)))
SAMPLED = [
    SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True, **params)
    for params in (
        {"temperature": 0.8, "seed": 1},
        {"temperature": 1.0, "top_k": 40, "seed": -(2**63)},
        {"temperature": 0.0},
        {"temperature": 0.6, "top_p": 0.9},
        {"temperature": 1.2, "min_p": 0.1, "seed": 2**63 - 1},
        {"temperature": 0.7, "top_k": 20, "top_p": 0.95, "min_p": 0.01},
        {"temperature": 0.7, "seed": 7, "min_tokens": 9, "stop_token_ids": [199]},
        {"temperature": 0.9},
    )
]
GREEDY = [SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True)] * len(SAMPLED)
PARAMS = {"greedy": GREEDY, "sampled": SAMPLED}


def demo(speculative_config: dict[str, Any] | None, **options: Any) -> LLM:
    return LLM.demo(speculative_config=speculative_config, max_model_len=1024, **options)


@pytest.fixture(scope="module")
def prompts(benchmark_prompts: Any) -> list[str]:
    return [prompt for prompt in benchmark_prompts(6) if len(prompt) < 700][::2][: len(SAMPLED)]


@pytest.fixture(scope="module")
def plain(prompts: list[str]) -> dict[str, list[Any]]:
    """Plain decoding, one request at a time, of the checkpoint's BF16 weights by all logits."""
    llm = demo(None, max_num_seqs=1, weight_format="bf16", head="dense")
    return {
        decoding: llm.generate(prompts, params, use_tqdm=False, record_logits=True)
        for decoding, params in PARAMS.items()
    }


def check(cell: Cell, prompts: list[str], plain: list[Any]) -> float:
    """Runs a cell, compares it with plain decoding and returns its mean acceptance length."""
    config = {**DRAFTERS[cell.drafter], "tree": cell.tree, "q_passes": cell.q_passes, **SIZES[cell.size]}
    llm = demo(config, weight_format=cell.weight_format, head=cell.head, max_num_seqs=3)
    # Rows whose logits are recorded are not screened.
    records = cell.head == "dense"
    outputs = llm.generate(prompts, PARAMS[cell.decoding], use_tqdm=False, record_logits=records)
    for output, want in zip(outputs, plain, strict=True):
        assert output.outputs[0].token_ids == want.outputs[0].token_ids
        assert output.outputs[0].finish_reason == want.outputs[0].finish_reason
        for name in ("logits", "residual_l2", "gdn_state") if records else ():
            got, expected = getattr(output.record, name), getattr(want.record, name)
            # Bit patterns, so that zeros of either sign and NaNs count too.
            np.testing.assert_array_equal(got.view(np.uint32), expected.view(np.uint32), err_msg=name)
    metrics = [output.metrics for output in outputs]
    screened = [m.num_screened_rows > 0 for m in metrics]
    assert screened == [not records and params.temperature == 0 for params in PARAMS[cell.decoding]]
    num_passes = sum(m.num_target_passes for m in metrics)
    # A Q pass looks at every tree that has branches, so at most at each before an exact pass.
    num_q_passes = sum(m.num_q_passes for m in metrics)
    assert min(1, cell.q_passes) <= num_q_passes <= cell.q_passes * num_passes
    assert sum(m.num_accepted_tokens for m in metrics) > 0
    return sum(m.num_output_tokens - 1 for m in metrics) / num_passes


def test_every_pair_meets_in_the_cover() -> None:
    def named(cells: list[Cell]) -> set[tuple[object, ...]]:
        names = [field.name for field in fields(Cell)]
        pairs = itertools.combinations(names, 2)
        return {(a, b, getattr(c, a), getattr(c, b)) for a, b in pairs for c in cells}

    assert named(COVER) == named(GRID)
    assert len(set(GRID)) == len(PAIRINGS) * 3 * 3 * 2 * 2 * 2
    assert len(COVER) < 40


@pytest.mark.parametrize("cell", COVER, ids=str)
def test_no_bit_changes(cell: Cell, prompts: list[str], plain: dict[str, list[Any]], report: Any) -> None:
    report(f"tau {check(cell, prompts, plain[cell.decoding]):6.3f} {cell}")


@pytest.mark.slow
@pytest.mark.parametrize("cell", GRID, ids=str)
def test_no_bit_changes_anywhere(cell: Cell, prompts: list[str], plain: dict[str, list[Any]]) -> None:
    check(cell, prompts, plain[cell.decoding])
