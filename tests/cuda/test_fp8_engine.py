"""FP8 checkpoints on a GPU: the bits of their BF16 weights, and speculation that changes none."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from specpilot_rs import LLM, OptionError, SamplingParams

from tests.conftest import FIXTURES

CASE = FIXTURES / "families" / "qwen3_5_fp8"
SEQUENCES = json.loads((CASE / "golden.json").read_text())["sequences"]
# The second half says what may follow the first, so prompt lookup has something to draft.
PROMPTS = [{"prompt_token_ids": sequence["input_ids"] * 2} for sequence in SEQUENCES[:3]]
PARAMS = SamplingParams(max_tokens=24, ignore_eos=True)
NGRAM = {"method": "ngram", "num_speculative_tokens": 6, "prompt_lookup_min": 1}


def open_model(weight_format: str, **options: Any) -> LLM:
    options = {"max_model_len": 512, "device": "cuda:0", **options}
    return LLM(str(CASE), skip_tokenizer_init=True, weight_format=weight_format, **options)


def texts(llm: LLM) -> list[Any]:
    return llm.generate(PROMPTS, PARAMS, use_tqdm=False, record_logits=True)


def assert_identical(outputs: list[Any], plain: list[Any]) -> None:
    for output, want in zip(outputs, plain, strict=True):
        assert output.outputs[0].token_ids == want.outputs[0].token_ids
        for name in ("logits", "residual_l2", "last_residuals", "gdn_state"):
            got, expected = getattr(output.record, name), getattr(want.record, name)
            np.testing.assert_array_equal(got.view(np.uint32), expected.view(np.uint32), err_msg=name)


@pytest.fixture(scope="module")
def plain() -> dict[str, list[Any]]:
    """Plain decoding, one request at a time."""
    return {name: texts(open_model(name, max_num_seqs=1)) for name in ("bf16", "fp8", "fp8_w8a8")}


def test_whole_rows_have_the_bits_of_bf16(plain: dict[str, list[Any]]) -> None:
    assert_identical(plain["fp8"], plain["bf16"])
    stored, decoded = open_model("auto"), open_model("bf16")
    assert stored.describe()["weight_format"] == "fp8"
    assert stored.describe()["num_fp8_matrices"] > 0
    assert stored.describe()["weight_bytes"] < decoded.describe()["weight_bytes"]


def test_rounded_rows_are_nearer_to_the_hosts_than_to_whole_ones(report: Any) -> None:
    ids = max((sequence["input_ids"] for sequence in SEQUENCES), key=len)
    rounded = open_model("fp8_w8a8").score(ids).logits
    whole = open_model("fp8").score(ids).logits
    host = open_model("fp8_w8a8", device="cpu").score(ids).logits
    near, far = np.abs(rounded - host).mean(), np.abs(rounded - whole).mean()
    report(f"W8A8: mean |logit difference| {near:.4f} from the host's, {far:.3f} from W8A16's")
    # All else differs by roundings to BF16, which shift some values by a step of E4M3.
    assert 1e-3 < near < 0.8 * far < 0.3 * whole.std()


@pytest.mark.parametrize("weight_format", ["fp8", "fp8_w8a8"])
@pytest.mark.parametrize(("tree", "tree_nodes"), [("chain", 7), ("conditional", 12), ("spine", 40)])
def test_speculation_changes_no_bit(
    weight_format: str, tree: str, tree_nodes: int, plain: dict[str, list[Any]]
) -> None:
    config = {**NGRAM, "tree": tree, "tree_nodes": tree_nodes}
    outputs = texts(open_model(weight_format, speculative_config=config, max_num_seqs=2))
    assert sum(output.metrics.num_draft_tokens for output in outputs) > 0
    assert_identical(outputs, plain[weight_format])


@pytest.mark.parametrize("weight_format", ["auto", "fp8", "fp8_w8a8"])
def test_matrices_without_a_q_view_allow_no_q_pass(weight_format: str) -> None:
    with pytest.raises(OptionError, match=r"`q_passes` should be 0 with FP8 matrices.*, got 1"):
        open_model(weight_format, speculative_config={**NGRAM, "q_passes": 1})


@pytest.mark.parametrize("weight_format", ["fp8", "fp8_w8a8"])
def test_steps_are_replays(weight_format: str) -> None:
    llm = open_model(weight_format, max_num_seqs=1)
    llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    llm.set_stage_clock()
    llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    times = llm.stage_times()
    assert times["activity"]["captures"] <= 0.2 * times["num_steps"]
    assert times["activity"]["replays"] >= times["num_steps"]
