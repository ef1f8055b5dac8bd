"""Sampling keeps the promise: a seed gives plain decoding's tokens, whoever drafts, whatever runs beside.

What is drawn is also right: by an oracle from the recorded logits, and by the shares of whole sequences.
"""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from specpilot_rs import LLM, SamplingParams
from specpilot_rs.demo import TARGET_DIR

from . import sampling_oracle as oracle
from .conftest import DRAFTERS, FIXTURES

NUM_TOKENS = 24


def sampled(**params: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0.8, "max_tokens": NUM_TOKENS, "ignore_eos": True, **params})


# One for each prompt: every limit alone and together, with a seed and without, and a greedy one between them.
PARAMS = [
    sampled(seed=1),
    sampled(temperature=1.0, top_k=40, seed=-(2**63)),
    sampled(temperature=0.0),
    sampled(temperature=0.6, top_p=0.9),
    sampled(temperature=1.2, min_p=0.1, seed=2**63 - 1),
    sampled(temperature=0.7, top_k=20, top_p=0.95, min_p=0.01, min_tokens=9, ignore_eos=False),
]


def demo(speculative_config: dict[str, Any] | None, **options: Any) -> LLM:
    return LLM.demo(speculative_config=speculative_config, max_model_len=1024, **options)


def ids(outputs: list[Any]) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in outputs]


def num_accepted(outputs: list[Any]) -> int:
    return sum(output.metrics.num_accepted_tokens for output in outputs)


@pytest.fixture(scope="module")
def prompts(benchmark_prompts: Any) -> list[str]:
    return [prompt for prompt in benchmark_prompts(6) if len(prompt) < 600][: len(PARAMS)]


@pytest.fixture(scope="module")
def plain(prompts: list[str]) -> list[Any]:
    """Plain decoding, one request at a time, on the dense head."""
    llm = demo(None, max_num_seqs=1, weight_format="bf16", head="dense")
    return llm.generate(prompts, PARAMS, use_tqdm=False, record_logits=True)


def test_recorded_logits_change_nothing_and_give_the_tokens(prompts: list[str], plain: list[Any]) -> None:
    """The oracle draws each token again from the logits, which temperature and limits have not touched."""
    outputs = demo(DRAFTERS["dflash2"], seed=0).generate(prompts, PARAMS, use_tqdm=False, record_logits=True)
    for index, (output, want, params) in enumerate(zip(outputs, plain, PARAMS, strict=True)):
        np.testing.assert_array_equal(
            output.record.logits.view(np.uint32), want.record.logits.view(np.uint32)
        )
        if params.temperature == 0:
            assert ids([output]) == [output.record.logits.argmax(1).tolist()]
            continue
        seed = oracle.random_bits(0, (index, 0, 0, 1)) if params.seed is None else params.seed % 2**64
        limits = (params.temperature, params.top_k, params.top_p, params.min_p)
        first = len(output.prompt_token_ids) - 1
        for i, (row, token) in enumerate(zip(output.record.logits, ids([output])[0], strict=True)):
            masked = [0] if i < params.min_tokens else []
            assert oracle.draw(row, masked, (*limits, seed, first + i)) == token


@pytest.mark.parametrize("drafter", [None, "dflash2", "eagle3"])
def test_batch_mates_and_arrival_order_change_nothing(
    drafter: str | None, prompts: list[str], plain: list[Any]
) -> None:
    """Requests arrive one by one at random steps, each by the index that it has in the other's call."""
    order = random.Random(len(drafter or ""))
    llm = demo(None if drafter is None else {**DRAFTERS[drafter], "q_passes": 1}, max_num_seqs=3)
    engine, tokenizer = llm._engine, llm.get_tokenizer()
    waiting = order.sample(range(len(prompts)), len(prompts))
    index_of = {}
    while waiting or engine.has_unfinished():
        if waiting and (order.random() < 0.3 or not engine.has_unfinished()):
            index = waiting.pop()
            request = engine.add_request(
                tokenizer.encode(prompts[index]), PARAMS[index], order.random() < 0.3, False, index
            )
            index_of[request] = index
        engine.step()
    for request, index in index_of.items():
        assert engine.take_output(request).token_ids == ids(plain)[index]


def test_seeds() -> None:
    """One seed, one text, another seed another; without one the LLM's seed and the index decide."""
    prompt = "Once upon a time"

    def texts(llm: LLM, *params: SamplingParams) -> list[list[int]]:
        return ids(llm.generate([prompt] * len(params), list(params), use_tqdm=False))

    llm = demo(DRAFTERS["dflash2"])
    once = texts(llm, *(sampled(temperature=1.0, seed=seed) for seed in range(4)))
    again = texts(llm, *(sampled(temperature=1.0, seed=seed) for seed in (3, 2, 1, 0)))
    assert once == again[::-1]
    assert len({tuple(text) for text in once}) == 4
    unseeded = [sampled(temperature=1.0)] * 3
    own = texts(llm, *unseeded)
    assert len({tuple(text) for text in own}) == 3
    assert own == texts(llm, *unseeded) == texts(demo(None, seed=0), *unseeded)
    assert texts(llm, sampled(temperature=1.0, seed=-1)) == own[:1]
    other = texts(demo(None, seed=7), *unseeded)
    assert all(a != b for a, b in zip(own, other, strict=True))
    [piece] = [p for p in llm.stream(prompt, sampled(temperature=1.0, seed=2)) if p.result is not None]
    assert piece.result is not None
    assert ids([piece.result]) == [once[2]]


@pytest.mark.parametrize(
    "params", [{"top_k": 1}, {"min_p": 1.0}, {"top_p": 1e-9}, {"temperature": 1e-9}], ids=str
)
def test_one_token_to_draw_from_is_greedy(params: dict[str, Any], prompts: list[str]) -> None:
    llm = demo(DRAFTERS["dflash2"])
    greedy = llm.generate(prompts, sampled(temperature=0.0), use_tqdm=False)
    outputs = llm.generate(prompts, sampled(**{"temperature": 1.5, **params}), use_tqdm=False)
    assert ids(outputs) == ids(greedy)
    assert num_accepted(outputs) == num_accepted(greedy)


def test_chats_are_drawn_by_their_index(plain_llm: LLM, demo_llm: LLM) -> None:
    chat = [[{"role": "user", "content": "What is 2 + 3?"}]] * 2
    params = sampled(temperature=1.2)
    first, second = (ids(llm.chat(chat, params, use_tqdm=False)) for llm in (plain_llm, demo_llm))
    assert first == second
    assert first[0] != first[1]


def test_sampling_defaults_of_a_checkpoint_are_not_applied(tmp_path: Path) -> None:
    for file in TARGET_DIR.iterdir():
        (tmp_path / file.name).symlink_to(file)
    file = tmp_path / "generation_config.json"
    file.unlink(missing_ok=True)
    file.write_text('{"do_sample": true, "temperature": 1.5, "top_k": 20}', encoding="utf-8")
    params = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True)
    assert ids(LLM(tmp_path).generate("The", params)) == ids(LLM(TARGET_DIR).generate("The", params))


NUM_DRAWS = 2000
NUM_DRAWN = 4
TOP_K = 3


@pytest.mark.parametrize("seeded", [True, False])
def test_shares_of_sequences_are_their_probabilities(seeded: bool) -> None:
    """Whole sequences on a small vocabulary, speculating: all 81, by exact logits of each prefix."""
    target = FIXTURES / "families" / "llama_rope_scaling"
    plain = LLM(target, skip_tokenizer_init=True)
    common = {"temperature": 3.0, "top_k": TOP_K}
    # The model's own words, so that what prompt lookup finds may well be drawn again.
    start = {"prompt_token_ids": [5, 17, 101]}
    history = ids(plain.generate(start, sampled(**common, max_tokens=20, seed=1)))[0]
    prompt = [*start["prompt_token_ids"], *history]

    probability = {(): 1.0}
    for _ in range(NUM_DRAWN):
        longer = {}
        for sequence, so_far in probability.items():
            logits = plain.score([*prompt, *sequence]).logits[-1].astype(np.float64)
            tokens = np.argsort(-logits, kind="stable")[:TOP_K]
            weights = np.exp((logits[tokens] - logits.max()) / common["temperature"])
            for token, share in zip(tokens.tolist(), weights / weights.sum(), strict=True):
                longer[*sequence, token] = so_far * share
        probability = longer

    config = {"method": "ngram", "prompt_lookup_min": 1}
    llm = LLM(target, skip_tokenizer_init=True, speculative_config=config, max_num_seqs=32, seed=5)
    several = [sampled(**common, max_tokens=NUM_DRAWN, seed=i if seeded else None) for i in range(NUM_DRAWS)]
    outputs = llm.generate([{"prompt_token_ids": prompt}] * NUM_DRAWS, several, use_tqdm=False)
    assert num_accepted(outputs) > NUM_DRAWS // 5
    drawn = Counter(tuple(sequence) for sequence in ids(outputs))
    assert set(drawn) <= set(probability)

    shares = np.array(list(probability.values()))
    counts = np.array([drawn[sequence] for sequence in probability], np.float64)
    assert len(shares) == TOP_K**NUM_DRAWN
    # So many of each that the statistic is what it is called.
    assert shares.min() * NUM_DRAWS > 5
    assert oracle.chi_square(counts, shares) < oracle.chi_square_bound(len(shares))
