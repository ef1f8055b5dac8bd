"""Planted models on the host: what they say, and how often drafts are right, which changes none of it."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from specpilot_rs import LLM, OptionError, RequestError, SamplingParams, _core

from tests.planted_oracle import BLOCK_DRAFTS, expected_drafts, rank_of_right

STRIDE, RIVAL_STRIDE = 1009, 1601
NUM_TOKENS = 160
PARAMS = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True)
PROFILE = _core.planted_acceptance()
OPTIONS = {"device": "cpu", "max_model_len": 512, "max_num_seqs": 2, "num_threads": 1}


def tiny(speculative_config: dict[str, Any] | None = None, **options: Any) -> LLM:
    return LLM.planted("tiny", speculative_config, **{**OPTIONS, **options})


@pytest.fixture(scope="module")
def prompts() -> list[dict[str, Any]]:
    ids = np.random.default_rng(3).integers(2000, size=(8, 12))
    return [{"prompt_token_ids": row.tolist()} for row in ids]


@pytest.fixture(scope="module")
def plain(prompts: list[dict[str, Any]]) -> list[Any]:
    return tiny(weight_format="bf16").generate(prompts, PARAMS, use_tqdm=False, record_logits=True)


def texts(outputs: list[Any]) -> list[list[int]]:
    return [output.prompt_token_ids + output.outputs[0].token_ids for output in outputs]


def assert_identical(outputs: list[Any], plain: list[Any]) -> None:
    assert texts(outputs) == texts(plain)
    for output, want in zip(outputs, plain, strict=True):
        np.testing.assert_array_equal(
            output.record.logits.view(np.uint32), want.record.logits.view(np.uint32)
        )


def test_a_token_is_mostly_followed_by_its_successor(plain: list[Any]) -> None:
    pairs = np.array([pair for text in texts(plain) for pair in itertools.pairwise(text[11:])])
    steps = (pairs[:, 1] - pairs[:, 0]) % 2048
    assert (steps == STRIDE).mean() > 0.85
    assert np.isin(steps, (STRIDE, RIVAL_STRIDE)).mean() > 0.97
    assert len({text[-1] for text in texts(plain)}) == len(plain), "texts differ to their ends"


def test_logits_are_peaked_and_have_rivals(plain: list[Any]) -> None:
    logits = np.concatenate([output.record.logits for output in plain])
    top = np.sort(logits, axis=1)[:, -2:]
    spread = np.median(logits.std(axis=1))
    assert 1.5 < spread < 3.5
    assert 4 < np.median(top[:, 1]) / spread < 9
    gaps = (top[:, 1] - top[:, 0]) / spread
    assert np.quantile(gaps, 0.05) < 1.5, "some choices are close"
    assert np.median(gaps) > 1.5


def test_layers_matter(plain: list[Any]) -> None:
    """The residual stream grows by a fifth of its energy: no layer is for show, none drowns the embedding."""
    norms = plain[0].record.residual_l2
    growth = (norms[-1] / norms[0]) ** 2
    assert growth.min() > 1.03
    # Where few positions are attended to, what is read is larger.
    assert np.median(growth) < 1.6
    assert growth.max() < 4


def test_w12_is_bf16(prompts: list[dict[str, Any]], plain: list[Any]) -> None:
    llm = tiny(weight_format="w12")
    assert llm.describe()["num_w12_matrices"] > 20
    assert_identical(llm.generate(prompts, PARAMS, use_tqdm=False, record_logits=True), plain)


@pytest.mark.parametrize("weight_format", ["bf16", "w12"])
@pytest.mark.parametrize("q_passes", [0, 1])
@pytest.mark.parametrize("tree", ["chain", "ddtree", "conditional"])
def test_speculation_changes_nothing(
    tree: str, q_passes: int, weight_format: str, prompts: list[dict[str, Any]], plain: list[Any]
) -> None:
    llm = tiny({"tree": tree, "q_passes": q_passes}, weight_format=weight_format)
    for text in texts(plain):
        llm.add_script(text)
    outputs = llm.generate(prompts, PARAMS, use_tqdm=False, record_logits=True)
    assert_identical(outputs, plain)
    num_passes = sum(output.metrics.num_target_passes for output in outputs)
    tau = len(plain) * (NUM_TOKENS - 1) / num_passes
    expected = expected_drafts(PROFILE, BLOCK_DRAFTS if tree == "chain" else 31, 1 if tree == "chain" else 8)
    low, high = expected.band(num_passes, 1 + q_passes)
    # The ends of texts cut drafts short, and a Q pass marks some token wrong.
    assert 0.85 * low < tau < high, f"tau {tau:.2f}, expected {low:.2f} to {high:.2f}"


def test_the_right_token_has_the_rank_that_was_drawn(prompts: list[dict[str, Any]], plain: list[Any]) -> None:
    llm = tiny({"tree": "ddtree"})
    for text in texts(plain):
        llm.add_script(text)
    outputs = llm.generate(prompts, PARAMS, use_tqdm=False, record_rounds=True)
    ranks = []
    for script, (output, text) in enumerate(zip(outputs, texts(plain), strict=True)):
        for drafted in output.rounds:
            anchor = drafted.anchor_position
            for depth, candidates in enumerate(drafted.candidate_token_ids):
                position = anchor + 1 + depth
                if position == len(text):
                    break
                got = candidates.index(text[position]) if text[position] in candidates else None
                assert got == rank_of_right(PROFILE, script, position, anchor)
                ranks.append(got)
    first = PROFILE["easy_share"] * PROFILE["easy"][0] + (1 - PROFILE["easy_share"]) * PROFILE["hard"][0]
    assert len(ranks) > 1000
    assert abs(np.mean([rank == 0 for rank in ranks]) - first) < 0.05


def test_without_a_script_drafts_are_what_the_drafter_says(plain: list[Any], prompts: list[Any]) -> None:
    outputs = tiny({"tree_nodes": 16}).generate(prompts[:2], PARAMS, use_tqdm=False)
    assert texts(outputs) == texts(plain[:2])
    assert sum(output.metrics.num_accepted_tokens for output in outputs) < 10


def test_an_engine_switches_between_ways_to_decode(plain: list[Any], prompts: list[Any]) -> None:
    llm = tiny({"tree": "ddtree", "q_passes": 1}, weight_format="w12", head="screened")
    for text in texts(plain):
        llm.add_script(text)
    for config, head in (
        (None, "dense"),
        ({"tree": "chain"}, "screened"),
        ({"tree_nodes": 9}, "dense"),
        ({"q_passes": 1, "tree_nodes": (12, 32)}, "screened"),
        (None, "screened"),
    ):
        llm.switch_speculation(config, head=head)
        plan = llm.describe()
        assert plan["head"] == head
        shown = {key: plan[key] for key in ("method", "tree", "tree_nodes", "num_speculative_tokens")}
        if config is None:
            assert shown == {"method": None, "tree": None, "tree_nodes": 1, "num_speculative_tokens": 0}
            assert plan["drafter"] is None
        else:
            assert shown["method"] == "dflash2"
            assert shown["tree"] == config.get("tree", "conditional")
        outputs = llm.generate(prompts[:3], PARAMS, use_tqdm=False)
        assert texts(outputs) == texts(plain[:3])
        assert plan["q_passes"] == (config or {}).get("q_passes", 0)
        per_pass = (NUM_TOKENS - 1) / outputs[0].metrics.num_target_passes
        assert (per_pass == 1) == (config is None)
        assert (outputs[0].metrics.num_screened_rows > 0) == (head == "screened")


def test_an_engine_switches_to_nothing_larger(prompts: list[Any]) -> None:
    llm = tiny({"tree_nodes": 8, "num_speculative_tokens": 4}, head="dense")
    for config, head, message in (
        ({"num_speculative_tokens": 5}, None, r"num_speculative_tokens.*at most 4, which the engine was"),
        ({"tree": "ddtree", "num_speculative_tokens": 4}, None, r"tree width.*at most 7"),
        ({"q_passes": 1, "tree_nodes": 8, "num_speculative_tokens": 4}, None, r"q_passes.*at most 0"),
        (
            {"tree_nodes": 8, "num_speculative_tokens": 4},
            "screened",
            r"head.*dense, as the engine was opened",
        ),
    ):
        with pytest.raises(OptionError, match=message):
            llm.switch_speculation(config, head=head)
    with pytest.raises(OptionError, match="`method` should be 'dflash2', as the engine was opened"):
        llm.switch_speculation({"method": "ngram"})
    assert llm.describe()["tree_nodes"] == 8
    with pytest.raises(OptionError, match="an engine with a drafter"):
        tiny().switch_speculation({})
    ngram = LLM.demo({"method": "ngram"}, device="cpu")
    with pytest.raises(OptionError, match="`prompt_lookup_max` should be None, as the engine was opened"):
        ngram.switch_speculation({"method": "ngram", "prompt_lookup_max": 4})
    stream = llm.stream(prompts[0], PARAMS)
    next(stream)
    with pytest.raises(OptionError, match="idle engine"):
        llm.switch_speculation(None)
    stream.close()
    llm.switch_speculation(None)


def test_what_does_not_fit_is_refused() -> None:
    for name, shown in (("nano", "nano"), (5, "5"), (None, "None")):
        with pytest.raises(OptionError, match=rf"planted.*qwen3\.8-27b, qwen3\.5-4b, .*, tiny, .*{shown}"):
            LLM.planted(name)
    for script, message in (
        (5, "token_ids should be token ids, a list or array of integers, got int 5"),
        ([0, 2048], "token 1 is 2048, outside the vocabulary of 2048"),
    ):
        with pytest.raises(RequestError, match=f"^{message}"):
            tiny({}).add_script(script)
    with pytest.raises(OptionError, match="neither `model` nor `method`"):
        tiny({"method": "ngram"})
    with pytest.raises(OptionError, match="tokenizer"):
        LLM.planted("tiny", tokenizer="x")
    with pytest.raises(OptionError, match=r"script.*a planted engine"):
        LLM.demo(None, max_num_seqs=1, max_model_len=128).add_script([1, 2])
