"""Planted models on a GPU: the host's numbers in every layout, and decoding that no speculation changes."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from specpilot_rs import LLM, DeviceError, OptionError, SamplingParams, _core

DEVICE = "cuda:0"
kernels = _core.kernels
SUCCESSORS = (5, [41, 97], 0.4)


@pytest.mark.parametrize("shape", [(48, 64), (33, 130), (257, 5120)])
@pytest.mark.parametrize("kind", ["layer", "table", SUCCESSORS])
def test_the_gpu_plants_the_hosts_bits(kind: Any, shape: tuple[int, int]) -> None:
    got, expected = (kernels.plant_matrix(7, shape, 0.02, kind, device=name) for name in (DEVICE, "cpu"))
    np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("shape", [(48, 64), (33, 130), (96, 5120), (272, 1088)])
def test_every_layout_holds_these_bits(shape: tuple[int, int]) -> None:
    """Products of unit vectors are the columns themselves."""
    rows = kernels.plant_matrix(11, shape, 0.02, "layer")
    expected = (rows.astype(np.uint32) << 16).view(np.float32)
    for weight_format in ("bf16", "w12"):
        for first in range(0, shape[1], 64):
            columns = np.arange(first, min(first + 64, shape[1]))
            x = np.zeros((len(columns), shape[1]), np.float32)
            x[np.arange(len(columns)), columns] = 1
            got = kernels.planted_matmul(x, 11, shape[0], 0.02, weight_format, device=DEVICE)
            np.testing.assert_array_equal(got, expected[:, columns].T)


@pytest.mark.parametrize("shape", [(96, 5120), (272, 1088)])
def test_views_are_near_all_but_small_weights(shape: tuple[int, int]) -> None:
    """Three bits of a mantissa are within a sixteenth, and escapes above a window exact, if a note tells."""
    rows = kernels.plant_matrix(11, shape, 0.02, "layer")
    expected = (rows.astype(np.uint32) << 16).view(np.float32)
    medians = np.median(np.abs(expected), axis=1)
    assert np.any(np.abs(expected) > 32 * medians[:, None])
    for first in range(0, shape[1], 64):
        x = np.eye(64, shape[1], first, dtype=np.float32)
        got = kernels.planted_matmul(x, 11, shape[0], 0.02, "w12", q_view=True, device=DEVICE)
        want = expected[:, first : first + 64].T
        wrong = np.abs(got - want) > np.abs(want) / 16
        assert not np.any(wrong & (np.abs(want) > medians))


@pytest.mark.parametrize("shape", [(128, 256), (384, 5120)])
def test_the_gpu_plants_the_hosts_fp8(shape: tuple[int, int]) -> None:
    for first in range(0, shape[1], shape[1] // 4):
        x = np.zeros((64, shape[1]), np.float32)
        x[np.arange(64), np.arange(first, first + 64)] = 1
        got, expected = (
            kernels.planted_matmul(x, 11, shape[0], 0.02, "fp8", device=name) for name in (DEVICE, "cpu")
        )
        np.testing.assert_array_equal(got, expected)
        assert np.count_nonzero(got) > 0.9 * got.size


@pytest.mark.parametrize("weight_format", ["fp8", "fp8_w8a8"])
@pytest.mark.parametrize("name", ["tiny", "qwen3.5-4b"])
def test_speculation_changes_nothing_of_fp8(
    name: str, weight_format: str, report: Callable[[str], None]
) -> None:
    """The drafter is told the text of plain decoding, or none of its drafts would be right."""
    params = SamplingParams(max_tokens=32, ignore_eos=True)
    prompts = [{"prompt_token_ids": list(range(7, 77))}]
    options = {"device": DEVICE, "max_model_len": 256, "max_num_seqs": 1, "weight_format": weight_format}
    plain = LLM.planted(name, **options)
    assert plain.describe()["weight_format"] == weight_format
    [want] = plain.generate(prompts, params, use_tqdm=False)
    del plain
    llm = LLM.planted(name, {"tree": "ddtree"}, **options)
    llm.add_script(want.prompt_token_ids + want.outputs[0].token_ids)
    [output] = llm.generate(prompts, params, use_tqdm=False)
    assert output.outputs[0].token_ids == want.outputs[0].token_ids
    tau = output.metrics.mean_acceptance_length
    report(f"{name}, {weight_format}: tau {tau:.2f}")
    assert tau > 2


# Ways to decode, those that need most last: of drafters with marginal scores, and of EAGLE-3, which has none.
MARGINAL: list[dict[str, Any]] = [{"tree": "chain"}, {"tree": "ddtree"}, {"tree": "ddtree", "q_passes": 1}]
EAGLE: list[dict[str, Any]] = [{"tree": "chain"}, {"tree": "eagle"}, {"tree": "conditional", "q_passes": 1}]


@pytest.mark.parametrize(
    ("name", "ways"),
    [
        ("tiny", [*MARGINAL, {"q_passes": 1}]),
        ("tiny-gemma", EAGLE),
        ("tiny-muse", MARGINAL),
        ("qwen3.5-4b", [*MARGINAL, {"q_passes": 1}]),
    ],
)
def test_speculation_changes_nothing(
    name: str, ways: list[dict[str, Any]], report: Callable[[str], None]
) -> None:
    params = SamplingParams(max_tokens=48, ignore_eos=True)
    ids = np.random.default_rng(3).integers(2000, size=(2, 70))
    prompts = [{"prompt_token_ids": row.tolist()} for row in ids]
    options = {"device": DEVICE, "max_model_len": 256, "max_num_seqs": 2}
    plain: list[Any] = []
    for weight_format in ("bf16", "w12"):
        llm = LLM.planted(name, ways[2], weight_format=weight_format, **options)
        llm.switch_speculation(None, head="dense")
        outputs = llm.generate(prompts, params, use_tqdm=False, record_logits=True)
        plain = plain or outputs
        compare(outputs, plain)
        for output in plain:
            llm.add_script(output.prompt_token_ids + output.outputs[0].token_ids)
        assert len({token for output in plain for token in output.outputs[0].token_ids}) > 48
        for config in ways:
            llm.switch_speculation(config)
            outputs = llm.generate(prompts, params, use_tqdm=False, record_logits=True)
            compare(outputs, plain)
            taus = [output.metrics.mean_acceptance_length for output in outputs]
            report(f"{name}, {weight_format}, {config}: tau {np.mean(taus):.2f}")
            assert np.mean(taus) > 2


@pytest.mark.parametrize(("name", "ways"), [("gemma-4-12b", EAGLE), ("muse-glimmer-30b", MARGINAL)])
def test_large_models_say_the_same_in_both_formats(
    name: str, ways: list[dict[str, Any]], report: Callable[[str], None]
) -> None:
    """One engine at a time: a GPU does not hold two of the larger one."""
    params = SamplingParams(max_tokens=40, ignore_eos=True)
    prompt = {"prompt_token_ids": np.random.default_rng(7).integers(2000, size=70).tolist()}
    options = {"device": DEVICE, "max_model_len": 256, "max_num_seqs": 1}

    def decode(llm: LLM, **record: bool) -> list[Any]:
        return llm.generate([prompt], params, use_tqdm=False, **record)

    llm = planted_in_most_memory(name, weight_format="bf16", head="dense", **options)
    plain = decode(llm, record_logits=True)
    text = plain[0].outputs[0].token_ids
    assert len(set(text)) > 30
    del llm
    llm = planted_in_most_memory(name, ways[-1], weight_format="w12", head="screened", **options)
    assert llm.describe()["num_w12_matrices"] > 300
    llm.add_script(prompt["prompt_token_ids"] + text)
    llm.switch_speculation(None, head="dense")
    compare(decode(llm, record_logits=True), plain)
    for config in (None, *ways):
        llm.switch_speculation(config, head="screened")
        [output] = decode(llm)
        assert output.outputs[0].token_ids == text
        tau = output.metrics.mean_acceptance_length
        report(f"{name}, w12, {config}: tau {tau:.2f}")
        assert (tau > 2) == (config is not None)


def planted_in_most_memory(*args: Any, **options: Any) -> LLM:
    """A model that leaves room for few others: where tests run side by side, it waits for their memory."""
    patience_s = 120 if "PYTEST_XDIST_WORKER" in os.environ else 0
    end_s = time.monotonic() + patience_s
    while True:
        try:
            return LLM.planted(*args, **options)
        except (DeviceError, OptionError) as error:
            is_full = re.search(r"are missing|out of (GPU )?memory", str(error))
            if not is_full or time.monotonic() >= end_s:
                raise
        time.sleep(2)


def compare(outputs: list[Any], plain: list[Any]) -> None:
    for output, want in zip(outputs, plain, strict=True):
        assert output.outputs[0].token_ids == want.outputs[0].token_ids
        np.testing.assert_array_equal(
            output.record.logits.view(np.uint32), want.record.logits.view(np.uint32)
        )
