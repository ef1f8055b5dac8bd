"""Planted models with the layers of Gemma 4 and Muse Glimmer on the host: sure like others, and lossless."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from specpilot_rs import LLM, SamplingParams, _core

from .planted_oracle import BLOCK_DRAFTS, expected_drafts
from .test_planted import OPTIONS, PROFILE, RIVAL_STRIDE, STRIDE, assert_identical, texts

VOCAB = 2048
NUM_TOKENS = 96
"""Two windows of these models."""
PARAMS = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True)
NAMES = ("tiny-gemma", "tiny-muse")
EAGLE_DRAFTS = 8
WAYS: dict[str, list[dict[str, Any]]] = {
    "tiny-gemma": [{"tree": "eagle"}, {"tree": "conditional"}, {"tree": "spine", "q_passes": 1}],
    "tiny-muse": [{"tree": "ddtree"}, {"tree": "spine"}, {"tree": "ddtree", "q_passes": 1}],
}
"""Trees besides chains that their drafters (EAGLE-3, DFlash) have the scores for."""


def prompts() -> list[dict[str, Any]]:
    ids = np.random.default_rng(5).integers(2000, size=(4, 12))
    return [{"prompt_token_ids": row.tolist()} for row in ids]


def open_planted(name: str, speculative_config: dict[str, Any] | None = None, **options: Any) -> LLM:
    return LLM.planted(name, speculative_config, **{**OPTIONS, **options})


def decode(llm: LLM) -> list[Any]:
    return llm.generate(prompts(), PARAMS, use_tqdm=False, record_logits=True)


@pytest.fixture(scope="module", params=NAMES)
def plain(request: pytest.FixtureRequest) -> tuple[str, list[Any]]:
    return request.param, decode(open_planted(request.param, weight_format="bf16"))


def test_they_are_listed() -> None:
    published = {"qwen3.8-27b", "qwen3.5-4b", "llama-3.1-8b", "gemma-4-12b", "muse-glimmer-30b"}
    assert published | {"tiny", *NAMES} == set(_core.PLANTED_NAMES)


def test_they_are_sure_and_have_rivals(plain: tuple[str, list[Any]]) -> None:
    _, outputs = plain
    pairs = np.array([pair for text in texts(outputs) for pair in itertools.pairwise(text[11:])])
    steps = (pairs[:, 1] - pairs[:, 0]) % VOCAB
    assert (steps == STRIDE).mean() > 0.85
    assert np.isin(steps, (STRIDE, RIVAL_STRIDE)).mean() > 0.97
    logits = np.concatenate([output.record.logits for output in outputs])
    top = np.sort(logits, axis=1)[:, -2:]
    spread = np.median(logits.std(axis=1))
    # What the model makes of its logits is in them: Muse's factor of 0.45, both softcaps.
    assert 1.5 < spread < 3.5
    assert 4 < np.median(top[:, 1]) / spread < 9
    gaps = (top[:, 1] - top[:, 0]) / spread
    assert np.quantile(gaps, 0.05) < 1.5 < np.median(gaps)


def test_layers_add_a_fifth(plain: tuple[str, list[Any]]) -> None:
    """By the norms behind sublayers, whatever comes out of them; Gemma's scalars change some percents."""
    name, outputs = plain
    norms = np.concatenate([output.record.residual_l2 for output in outputs], axis=1)
    assert (np.diff(norms[:, :], axis=0) != 0).all(), "every layer adds something"
    growth = (norms[-1] / norms[0]) ** 2
    low, high = (1.05, 1.45) if name == "tiny-gemma" else (1.1, 1.35)
    assert low < np.median(growth) < high


def test_w12_is_bf16(plain: tuple[str, list[Any]]) -> None:
    name, outputs = plain
    llm = open_planted(name, weight_format="w12")
    assert llm.describe()["num_w12_matrices"] > 40
    assert_identical(decode(llm), outputs)


@pytest.mark.parametrize("weight_format", ["bf16", "w12"])
def test_speculation_changes_nothing(plain: tuple[str, list[Any]], weight_format: str) -> None:
    name, outputs = plain
    llm = open_planted(name, {**WAYS[name][-1]}, weight_format=weight_format)
    for text in texts(outputs):
        llm.add_script(text)
    for way in ({"tree": "chain"}, *WAYS[name]):
        llm.switch_speculation(way)
        drafted = decode(llm)
        assert_identical(drafted, outputs)
        num_passes = sum(output.metrics.num_target_passes for output in drafted)
        tau = len(outputs) * (NUM_TOKENS - 1) / num_passes
        if way["tree"] == "chain" and name == "tiny-muse":
            low, high = expected_drafts(PROFILE, BLOCK_DRAFTS, 1).band(num_passes)
            # The ends of texts cut drafts short.
            assert 0.85 * low < tau < high, f"tau {tau:.2f}, expected {low:.2f} to {high:.2f}"
        assert tau > 2.5
