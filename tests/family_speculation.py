"""Each family's tiny checkpoint with drafters in the formats published for it, on either device.

The drafters are random, so that nearly nothing is accepted: they load, and wrong drafts leave no trace.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from specpilot_rs import LLM, SamplingParams

from . import random_drafters as drafters
from . import speculators_drafters as speculators
from .conftest import FIXTURES

FAMILIES = FIXTURES / "families"
# Published drafters of each family's kind, by format.
PAIRINGS: dict[str, tuple[Callable[..., str], ...]] = {
    "qwen3_5_wrapper": (
        drafters.dflash2,
        drafters.dspark,
        speculators.dspark_speculators,
        speculators.dflash2_speculators,
    ),
    "qwen3_5_text": (drafters.dflash, drafters.deepspec, speculators.dflash_speculators_reduced),
    "qwen3_5_fp8": (drafters.dflash2, drafters.dflash),
    "llama_rope_scaling": (drafters.eagle3, drafters.dflash),
    "llama_rope_parameters": (drafters.eagle3, drafters.dflash),
    "gemma4_unified": (
        speculators.eagle3_speculators,
        drafters.gemma_dspark,
        drafters.dflash,
        speculators.dflash_speculators,
        speculators.dspark_speculators_reduced,
    ),
    "muse_glimmer": (drafters.muse_assistant, drafters.dflash2, speculators.dspark_speculators_muse),
}
# Drafters that score a candidate alone; all others do so given the one before.
MARGINAL = (
    drafters.dflash,
    drafters.muse_assistant,
    speculators.dflash_speculators,
    speculators.dflash_speculators_reduced,
)
# A chain, a tree, and a tree that goes on behind what a Q pass marked.
SHAPES = ("chain", "tree", "two-stage")
PARAMS = SamplingParams(max_tokens=40, ignore_eos=True)
# Its rows of 96 columns fill one tile of W12 and half another, which saves too little: "w12" leaves all its
# matrices BF16. The family's other fixture has rows of 64.
WITHOUT_W12 = "llama_rope_scaling"


def settings(family: str) -> list[tuple[str, str]]:
    """Shapes with formats of the target's weights; FP8 has no Q view, and so no Q passes."""
    found = [(shape, weight_format) for weight_format in ("bf16", "w12") for shape in SHAPES]
    return found + [("chain", "fp8"), ("tree", "fp8")] * (family == "qwen3_5_fp8")


def every(cases: Callable[[str], Sequence[Any]]) -> list[tuple[Any, ...]]:
    """Families with what `cases` gives for them, as a test's parameters."""
    return [(family, *case) for family in PAIRINGS for case in cases(family)]


def open_family(family: str, **options: Any) -> LLM:
    options = {"max_model_len": 512, **options}
    return LLM(str(FAMILIES / family), skip_tokenizer_init=True, **options)


def prompts(family: str) -> list[dict[str, Any]]:
    golden = json.loads((FAMILIES / family / "golden.json").read_text())
    # The last is longer than every window; two more begin inside of it.
    ids = [sequence["input_ids"] for sequence in golden["sequences"]]
    return [{"prompt_token_ids": each} for each in (*ids, ids[-1][:50], ids[-1][:17])]


def generate(llm: LLM, family: str) -> list[Any]:
    return llm.generate(prompts(family), PARAMS, use_tqdm=False, record_logits=True)


def decode_plainly(family: str, **options: Any) -> list[Any]:
    """One request at a time by BF16 weights and all logits."""
    return generate(
        open_family(family, max_num_seqs=1, weight_format="bf16", head="dense", **options), family
    )


def speculation(drafter: Callable[..., str] | None, shape: str) -> dict[str, Any]:
    """A configuration without the drafter itself; `None` for prompt lookup."""
    tree = "ddtree" if drafter in MARGINAL else "conditional"
    return {
        "tree": "chain" if shape == "chain" else tree,
        "tree_nodes": 12,
        "q_passes": int(shape == "two-stage"),
        "num_speculative_tokens": 5,
    }


def decode_speculatively(
    family: str, shape: str, weight_format: str, config: dict[str, Any], **options: Any
) -> tuple[LLM, list[Any]]:
    """Requests side by side, each of them drafted for; the target is held as it was asked for."""
    llm = open_family(
        family, speculative_config=config, weight_format=weight_format, max_num_seqs=3, **options
    )
    facts = llm.describe()
    assert (facts["num_w12_matrices"] > 0) == (weight_format == "w12" and family != WITHOUT_W12)
    assert (facts["num_fp8_matrices"] > 0) == (weight_format == "fp8")
    outputs = generate(llm, family)
    drafted = [output.metrics.num_draft_tokens for output in outputs]
    marked = [output.metrics.num_marked_tokens for output in outputs]
    assert sum(drafted) > 0
    assert (sum(marked) > 0) == (shape == "two-stage")
    return llm, outputs


def assert_identical(outputs: list[Any], want: list[Any]) -> None:
    for output, expected in zip(outputs, want, strict=True):
        assert output.outputs[0].token_ids == expected.outputs[0].token_ids
        for name in ("logits", "residual_l2", "last_residuals", "gdn_state"):
            got, right = getattr(output.record, name), getattr(expected.record, name)
            assert (got is None) == (right is None)
            if got is not None:
                np.testing.assert_array_equal(got.view(np.uint32), right.view(np.uint32), err_msg=name)
