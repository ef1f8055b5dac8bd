"""How a prompt is cut in chunks changes no bit on a GPU either, and neither does what runs beside it."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from specpilot_rs import LLM, SamplingParams

from tests.arrivals import Arrival, check_arrivals
from tests.conftest import DRAFTERS, FIXTURES
from tests.prompt_chunks import check_scores

DEVICE = "cuda:0"
# With and without a recurrence, in FP8, and with windows shorter than a chunk.
MODELS = ("qwen3_5_text", "qwen3_5_fp8", "llama_rope_scaling", "gemma4_unified", "muse_glimmer")
CHUNKS = (7, 64, 65, 200, 256)


@pytest.fixture(scope="module")
def prompts(benchmark_prompts: Any) -> list[str]:
    texts = benchmark_prompts(2)
    return [" ".join(texts[i : i + 3]) for i in range(4)] + texts[:3]


@pytest.fixture(scope="module")
def token_by_token(prompts: list[str]) -> list[Any]:
    llm = LLM.demo(None, device=DEVICE, max_model_len=1024, max_num_seqs=1, max_num_batched_tokens=1)
    params = SamplingParams(max_tokens=24, ignore_eos=True)
    return llm.generate(prompts, params, use_tqdm=False, record_logits=True)


@pytest.mark.parametrize("max_rows", [96, 256])
def test_long_prompts_arrive_beside_decoding(
    max_rows: int, prompts: list[str], token_by_token: list[Any]
) -> None:
    order = random.Random(max_rows)
    config = {**DRAFTERS["dflash2"], "tree_nodes": 12, "q_passes": 1}
    options = {"max_model_len": 1024, "max_num_seqs": 3, "max_num_batched_tokens": max_rows}
    llm = LLM.demo(config, device=DEVICE, **options)
    arrivals = [Arrival(i, order.choice([9, 24])) for i in order.sample(range(len(prompts)), 7)]
    check_arrivals(llm, prompts, arrivals, arrivals[3].index, token_by_token, order)


@pytest.mark.parametrize("family", MODELS)
def test_chunks_of_any_size_give_the_same_bits(family: str) -> None:
    config = json.loads((FIXTURES / "families" / family / "config.json").read_text())

    def open_with_chunks(chunk: int) -> LLM:
        options = {"max_model_len": 320, "max_num_seqs": 1, "max_num_batched_tokens": chunk}
        directory = str(FIXTURES / "families" / family)
        return LLM(directory, skip_tokenizer_init=True, device=DEVICE, **options)

    check_scores(open_with_chunks, config.get("text_config", config)["vocab_size"], CHUNKS)


def test_stock_prompts_are_near_those_in_chunks_of_a_path() -> None:
    """Matmuls of cuBLASLt depend on the number of rows, all else does not: sums differ, rows do not."""
    ids = random.Random(3).choices(range(200), k=300)
    want, got = (
        LLM.demo(None, device=DEVICE, kernels="stock", max_model_len=512, max_num_batched_tokens=chunk).score(
            ids
        )
        for chunk in (64, 256)
    )
    assert abs(got.logits - want.logits).max() <= 0.25
    scale = abs(want.gdn_state).max()
    assert abs(got.gdn_state - want.gdn_state).max() <= 0.03 * scale
