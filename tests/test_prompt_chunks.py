"""How a prompt is cut in chunks changes no bit: not of a row's logits, the state behind it or the text."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from specpilot_rs import LLM, SamplingParams
from specpilot_rs.demo import TARGET_DIR
from specpilot_rs.options import EngineOptions
from specpilot_rs.plan_report import plan_memory

from .arrivals import Arrival, check_arrivals
from .conftest import DRAFTERS, FIXTURES
from .prompt_chunks import assert_same_record, check_scores

FAMILIES = sorted(path.parent.name for path in (FIXTURES / "families").glob("*/config.json"))
CHUNKS = (7, 64, 65, 128, 200, 256)


def vocab_size_of(family: str) -> int:
    config = json.loads((FIXTURES / "families" / family / "config.json").read_text())
    return config.get("text_config", config)["vocab_size"]


@pytest.mark.parametrize("family", FAMILIES)
def test_chunks_of_any_size_give_the_same_bits(family: str):
    def open_with_chunks(chunk: int) -> LLM:
        return LLM(
            str(FIXTURES / "families" / family),
            skip_tokenizer_init=True,
            device="cpu",
            max_model_len=320,
            max_num_seqs=1,
            max_num_batched_tokens=chunk,
        )

    check_scores(open_with_chunks, vocab_size_of(family), CHUNKS)


@pytest.fixture(scope="module")
def long_prompts(benchmark_prompts: Any) -> list[str]:
    """Prompts of some hundred tokens beside shorter ones."""
    texts = benchmark_prompts(2)
    return [" ".join(texts[i : i + 3]) for i in range(4)] + texts[:3]


@pytest.fixture(scope="module")
def token_by_token(long_prompts: list[str]) -> list[Any]:
    llm = LLM.demo(None, device="cpu", max_model_len=1024, max_num_seqs=1, max_num_batched_tokens=1)
    params = SamplingParams(max_tokens=24, ignore_eos=True)
    outputs = llm.generate(long_prompts, params, use_tqdm=False, record_logits=True)
    lengths = sorted(len(output.prompt_token_ids) for output in outputs)
    assert lengths[0] <= 64
    assert lengths[-4] > 128
    assert lengths[-1] > 256
    return outputs


@pytest.mark.parametrize(
    ("drafter", "q_passes", "chunk"), [("dflash2", 0, 256), ("dflash2", 1, 100), ("eagle3", 0, 512)]
)
def test_drafters_see_the_same_context(
    drafter: str, q_passes: int, chunk: int, long_prompts: list[str], token_by_token: list[Any]
):
    options = {"device": "cpu", "max_model_len": 1024, "max_num_seqs": 1}
    config = {**DRAFTERS[drafter], "tree_nodes": 16, "q_passes": q_passes}
    params = SamplingParams(max_tokens=24, ignore_eos=True)
    rounds = []
    for num_rows in (64, chunk):
        llm = LLM.demo(config, **options, max_num_batched_tokens=num_rows)
        outputs = llm.generate(
            long_prompts[:2], params, use_tqdm=False, record_logits=True, record_rounds=True
        )
        for output, want in zip(outputs, token_by_token, strict=False):
            assert output.outputs[0].token_ids == want.outputs[0].token_ids
            assert_same_record(output.record, want.record, f"{drafter}, {num_rows} rows")
        rounds.append([r.draft_token_ids for output in outputs for r in output.rounds])
    assert rounds[0] == rounds[1]
    assert len(rounds[0]) > 0


@pytest.mark.parametrize("max_rows", [96, 256])
def test_long_prompts_arrive_beside_decoding(
    max_rows: int, long_prompts: list[str], token_by_token: list[Any]
):
    order = random.Random(max_rows)
    llm = LLM.demo(
        {**DRAFTERS["dflash2"], "tree_nodes": 12},
        device="cpu",
        max_model_len=1024,
        max_num_seqs=3,
        max_num_batched_tokens=max_rows,
    )
    arrivals = [Arrival(i, order.choice([9, 24])) for i in order.sample(range(len(long_prompts)), 7)]
    check_arrivals(llm, long_prompts, arrivals, arrivals[3].index, token_by_token, order)


def test_sizes_of_passes_are_planned():
    sizes = (64, None, 512)
    plans = [
        plan_memory(TARGET_DIR, device="cpu", options=EngineOptions(max_num_batched_tokens=rows))
        for rows in sizes
    ]
    assert [plan["max_step_rows"] for plan in plans] == [64, 256, 512]
    for purpose in ("activations", "pass_tail", "logits"):
        few, usual, many = (plan["formats"]["bf16"]["bytes"][purpose] for plan in plans)
        assert few * 4 == usual == many // 2
    assert LLM.demo(None, device="cpu", max_num_batched_tokens=65).describe()["max_step_rows"] == 65
