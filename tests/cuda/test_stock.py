"""The stock configuration runs the demo pair and agrees with lossless kernels as far as rounding lets it."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from specpilot_rs import LLM, SamplingParams

PROMPTS = ["def fib(n):", "Once upon a time", "1 + 1 =", "The capital of France is"]
PARAMS = SamplingParams(max_tokens=64, ignore_eos=True)
CHAIN = {"method": "dflash2", "tree": "chain"}


def stock(speculation: dict[str, object] | None, **options: object) -> LLM:
    return LLM.demo(speculation, device="cuda:0", kernels="stock", max_model_len=512, **options)


def ids_of(llm: LLM) -> list[list[int]]:
    outputs = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


def agreement(got: list[list[int]], want: list[list[int]]) -> float:
    """Share of positions before and at the first that differs, of all."""
    same = 0
    for a, b in zip(got, want, strict=True):
        same += next((i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), len(a))
    return same / sum(map(len, want))


@pytest.fixture(scope="module")
def lossless() -> LLM:
    return LLM.demo(None, device="cuda:0", weight_format="bf16", head="dense", max_model_len=512)


def test_it_says_what_it_is() -> None:
    plan = stock(CHAIN).describe()
    said = [plan[key] for key in ("kernels", "lossless", "head", "weight_format", "tree")]
    assert said == ["stock", False, "dense", "bf16", "chain"]


def test_logits_are_those_of_the_lossless_kernels(lossless: LLM) -> None:
    ids = lossless.get_tokenizer().encode(PROMPTS[1])
    prompt = (ids * 40)[:150]
    want, got = (llm.score(prompt) for llm in (lossless, stock(None)))
    np.testing.assert_allclose(got.logits, want.logits, rtol=0, atol=0.25)
    assert (got.logits.argmax(-1) == want.logits.argmax(-1)).mean() > 0.97
    scale = np.abs(want.gdn_state).max()
    np.testing.assert_allclose(got.gdn_state, want.gdn_state, rtol=0, atol=0.03 * scale)


@pytest.mark.parametrize("speculation", [None, CHAIN], ids=["plain", "chain"])
def test_ids_agree_but_for_near_ties(
    lossless: LLM, speculation: dict[str, object] | None, record_property: Callable[[str, object], None]
) -> None:
    share = agreement(ids_of(stock(speculation)), ids_of(lossless))
    record_property("agreement", share)
    kind = "chain" if speculation else "plain"
    print(f"stock, {kind}: {share:.1%} of ids agree with lossless plain decoding")
    assert share > 0.5


def test_chains_are_accepted() -> None:
    llm = stock(CHAIN)
    outputs = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    assert max(output.metrics.mean_acceptance_length for output in outputs) > 1.5
