"""The engine on a GPU: speculation changes no bit there either, whoever drafts, whatever runs beside it.

Everything is compared with plain decoding on the same GPU, one request at a time; values with those of an
independent implementation, as far as BF16 inputs of matmuls allow.
"""

from __future__ import annotations

import itertools
import json
import os
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from specpilot_rs import LLM, SamplingParams
from specpilot_rs.convert import convert
from specpilot_rs.demo import DFLASH2_DIR, TARGET_DIR
from specpilot_rs.options import EngineOptions
from specpilot_rs.plan_report import plan_memory

from tests import sampling_oracle as oracle
from tests.arrivals import Arrival, check_arrivals
from tests.conftest import DRAFTERS, FIXTURES

DEVICE = "cuda:0"
NUM_TOKENS = 40
PARAMS = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True)
TREES = {
    "dflash": ["chain", "ddtree", "spine", "eagle"],
    "dflash2": ["conditional", "chain", "ddtree", "spine", "eagle"],
    "dspark": ["eagle", "conditional", "chain", "ddtree", "spine"],
    "eagle3": ["spine", "eagle", "conditional", "chain"],
    "ngram": ["chain", "spine", "conditional", "eagle"],
}
SETTINGS = list(itertools.product(("bf16", "w12"), (0, 1, 2)))
# Every drafter with each of its trees, every format and number of Q passes; these two with each other.
COVER = [
    (drafter, trees[(i + shift) % len(trees)], *setting)
    for shift, (drafter, trees) in enumerate(TREES.items())
    for i, setting in enumerate(SETTINGS)
]
NUM_NODES = (16, 32, 7, 33, 64, 9)


def demo(speculative_config: dict[str, Any] | None, **options: Any) -> LLM:
    options = {"max_model_len": 1024, "device": DEVICE, **options}
    return LLM.demo(speculative_config=speculative_config, **options)


@pytest.fixture(scope="module")
def prompts(benchmark_prompts: Any) -> list[str]:
    return benchmark_prompts(2)


@pytest.fixture(scope="module")
def plain(prompts: list[str]) -> list[Any]:
    """Plain decoding of BF16 weights, one request at a time, by all logits."""
    llm = demo(None, max_num_seqs=1, weight_format="bf16", head="dense")
    assert llm.describe()["device"] == DEVICE
    outputs = llm.generate(prompts, PARAMS, use_tqdm=False, record_logits=True)
    assert all(np.isfinite(output.record.logits).all() for output in outputs)
    assert all(output.metrics.num_target_passes == NUM_TOKENS - 1 for output in outputs)
    return outputs


def assert_identical(outputs: list[Any], plain: list[Any]) -> None:
    for output, want in zip(outputs, plain, strict=True):
        assert output.outputs[0].token_ids == want.outputs[0].token_ids
        for name in ("logits", "residual_l2", "final_norm_l2", "last_residuals", "gdn_state"):
            got, expected = getattr(output.record, name), getattr(want.record, name)
            np.testing.assert_array_equal(got.view(np.uint32), expected.view(np.uint32), err_msg=name)


def mean_acceptance_length(outputs: list[Any]) -> float:
    num_tokens = sum(output.metrics.num_output_tokens - 1 for output in outputs)
    return num_tokens / sum(output.metrics.num_target_passes for output in outputs)


@pytest.mark.parametrize(("drafter", "tree", "weight_format", "q_passes"), COVER)
def test_speculation_changes_no_bit(
    drafter: str,
    tree: str,
    weight_format: str,
    q_passes: int,
    prompts: list[str],
    plain: list[Any],
    report: Any,
) -> None:
    number = COVER.index((drafter, tree, weight_format, q_passes))
    tree_nodes = NUM_NODES[number % len(NUM_NODES)] if q_passes == 0 else (8, 16, 32)[number % 3]
    config = {**DRAFTERS[drafter], "tree": tree, "tree_nodes": tree_nodes, "q_passes": q_passes}
    llm = demo(config, weight_format=weight_format, max_num_seqs=1 + number % 5)
    recorded = llm.generate(prompts[::2], PARAMS, use_tqdm=False, record_logits=True)
    assert_identical(recorded, plain[::2])
    # Rows that nobody records go through the screened head.
    outputs = llm.generate(prompts, PARAMS, use_tqdm=False)
    assert [o.outputs[0].token_ids for o in outputs] == [o.outputs[0].token_ids for o in plain]
    tau = mean_acceptance_length(outputs)
    report(
        f"{DEVICE}: {drafter} {tree}, {weight_format}, {q_passes} Q passes, {tree_nodes} nodes: tau {tau:.3f}"
    )
    assert tau > 1.05


@pytest.mark.parametrize("tree_nodes", [1, 2, 7, 8, 9, 16, 17, 31, 32, 33, 63, 64])
def test_no_number_of_rows_changes_a_bit(tree_nodes: int, prompts: list[str], plain: list[Any]) -> None:
    llm = demo({**DRAFTERS["dflash2"], "tree_nodes": tree_nodes}, weight_format="w12", max_num_seqs=1)
    outputs = llm.generate(prompts[1::2], PARAMS, use_tqdm=False, record_logits=True)
    assert_identical(outputs, plain[1::2])
    assert (mean_acceptance_length(outputs) > 1) == (tree_nodes > 1)


@pytest.mark.parametrize("drafter", ["dflash2", "eagle3"])
def test_batch_mates_and_arrival_order_change_nothing(
    drafter: str, prompts: list[str], plain: list[Any]
) -> None:
    """Requests of different lengths that arrive at random steps, one of them aborted on the way."""
    order = random.Random(drafter)
    llm = demo({**DRAFTERS[drafter], "q_passes": 1, "tree_nodes": 16}, max_num_seqs=4)
    shuffled = order.sample(range(len(prompts)), 8)
    arrivals = [Arrival(i, order.choice([9, 21, NUM_TOKENS])) for i in shuffled]
    check_arrivals(llm, prompts, arrivals, arrivals[3].index, plain, order)


def test_a_whole_chunk_behind_other_rows_ends() -> None:
    """Passes of 65 to 127 rows whose last segment has all its rows already: none is left for padding."""
    rng = np.random.default_rng(5)
    prompts = [{"prompt_token_ids": rng.integers(16, 200, n).tolist()} for n in (100, 65, 230)]
    params = SamplingParams(max_tokens=6, ignore_eos=True)
    alone = demo(None, max_num_seqs=1).generate(prompts, params, use_tqdm=False)
    together = demo(None, max_num_seqs=3).generate(prompts, params, use_tqdm=False)
    assert [o.outputs[0].token_ids for o in together] == [o.outputs[0].token_ids for o in alone]


def test_prompts_and_decoding_agree(prompts: list[str], plain: list[Any]) -> None:
    """A prompt that holds another request's text gives the bits that decoding gave; so do converted files."""
    llm = demo(None)
    tokenizer = llm.get_tokenizer()
    for prompt, want in zip(prompts[::3], plain[::3], strict=True):
        prompt_ids = tokenizer.encode(prompt)
        scored = llm.score([*prompt_ids, *want.outputs[0].token_ids[:-1]])
        for got, expected in [
            (scored.logits[len(prompt_ids) - 1 :], want.record.logits),
            (scored.gdn_state, want.record.gdn_state),
        ]:
            np.testing.assert_array_equal(got.view(np.uint32), expected.view(np.uint32))


def test_long_prompts_cross_splits_and_states(benchmark_prompts: Any) -> None:
    """Beyond several splits of attention and many anchors of the recurrent state."""
    tokenizer = demo(None).get_tokenizer()
    ids = [token for prompt in benchmark_prompts(6) for token in tokenizer.encode(prompt)][:1500]
    prompts = [{"prompt_token_ids": ids[:length]} for length in (1500, 1009, 763, 500, 255)]
    params = SamplingParams(max_tokens=50, ignore_eos=True)
    options = {"max_model_len": 2048}
    want = demo(None, max_num_seqs=1, **options).generate(prompts, params, use_tqdm=False, record_logits=True)
    for config in ({**DRAFTERS["dflash2"], "tree_nodes": 48}, {**DRAFTERS["eagle3"], "q_passes": 1}):
        llm = demo(config, max_num_seqs=3, **options)
        assert_identical(llm.generate(prompts, params, use_tqdm=False, record_logits=True), want)


def test_w12_files_give_the_bits_of_bf16(
    prompts: list[str], plain: list[Any], tmp_path_factory: pytest.TempPathFactory
) -> None:
    directory = convert(TARGET_DIR, tmp_path_factory.mktemp("demo") / "target", use_tqdm=False).directory
    llm = LLM(directory, device=DEVICE, max_model_len=1024, max_num_seqs=2)
    facts = llm.describe()
    assert facts["weight_format"] == "w12"
    assert facts["weight_check"]["num_tensors"] > 0
    assert_identical(llm.generate(prompts, PARAMS, use_tqdm=False, record_logits=True), plain)


SAMPLED = [
    {"temperature": 0.8, "seed": 1},
    {"temperature": 1.0, "top_k": 40, "seed": -(2**63)},
    {"temperature": 0.0},
    {"temperature": 0.6, "top_p": 0.9},
    {"temperature": 1.2, "min_p": 0.1, "seed": 2**63 - 1},
    {"temperature": 0.7, "top_k": 20, "top_p": 0.95, "min_p": 0.01},
]


@pytest.fixture(scope="module")
def sampled(prompts: list[str]) -> list[Any]:
    params = [SamplingParams(max_tokens=24, ignore_eos=True, **given) for given in SAMPLED]
    llm = demo(None, max_num_seqs=1)
    outputs = llm.generate(prompts[:6], params, use_tqdm=False, record_logits=True)
    for index, (output, given) in enumerate(zip(outputs, SAMPLED, strict=True)):
        tokens = output.outputs[0].token_ids
        if given["temperature"] == 0:
            assert output.record.logits.argmax(1).tolist() == tokens
            continue
        seed = given["seed"] % 2**64 if "seed" in given else oracle.random_bits(0, (index, 0, 0, 1))
        limits = (
            given["temperature"],
            given.get("top_k", 0),
            given.get("top_p", 1.0),
            given.get("min_p", 0.0),
        )
        first = len(output.prompt_token_ids) - 1
        for i, (row, token) in enumerate(zip(output.record.logits, tokens, strict=True)):
            assert oracle.draw(row, [], (*limits, seed, first + i)) == token
    return outputs


@pytest.mark.parametrize(
    ("drafter", "q_passes"), [("dflash2", 0), ("dspark", 1), ("eagle3", 2), ("ngram", 1)]
)
def test_draws_are_those_of_plain_decoding(
    drafter: str, q_passes: int, prompts: list[str], sampled: list[Any]
) -> None:
    params = [SamplingParams(max_tokens=24, ignore_eos=True, **given) for given in SAMPLED]
    config = {**DRAFTERS[drafter], "tree_nodes": 16, "q_passes": q_passes}
    outputs = demo(config, max_num_seqs=4).generate(prompts[:6], params, use_tqdm=False)
    assert [o.outputs[0].token_ids for o in outputs] == [o.outputs[0].token_ids for o in sampled]
    assert sum(o.metrics.num_accepted_tokens for o in outputs) > 0


FAMILIES = [
    "gemma4_unified",
    "llama_rope_parameters",
    "llama_rope_scaling",
    "muse_glimmer",
    "qwen3_5_fp8",
    "qwen3_5_text",
    "qwen3_5_wrapper",
]
# Matmuls round their inputs to BF16; all else is fp32. The golden values say how far the reference departs
# from fp32 when it rounds every value so (0.3 to 0.8 at logits of a deviation of 3): a part of its roundings
# must not move a logit as far, and most logits much less.
BF16_DEPARTURE = "logits_bf16_vs_fp32_max_abs"
TYPICAL_SHARE = 0.1
RESIDUAL_REL = 0.02


@pytest.mark.parametrize("family", FAMILIES)
def test_scores_are_near_fp32(family: str, report: Any) -> None:
    directory = FIXTURES / "families" / family
    golden = json.loads((directory / "golden.json").read_text())
    bound = golden["measured"][BF16_DEPARTURE]
    llm = LLM(str(directory), skip_tokenizer_init=True, device=DEVICE)
    departures, norm_departures, is_equal, gaps = [], [], [], []
    for sequence in golden["sequences"]:
        want = sequence["fp32"]
        got = llm.score(sequence["input_ids"])
        departures.append(got.logits[-1] - np.array(want["last_logits"]))
        norm_departures.append(np.abs(got.residual_l2 / np.array(want["residual_l2"]) - 1).max())
        is_equal.append(got.logits.argmax(1) == np.array(want["argmax"]))
        gaps.append(want["top2_gap"])
    worst, worst_norm = float(np.abs(departures).max()), float(np.max(norm_departures))
    typical = float(np.sqrt(np.mean(np.square(departures))))
    equal = np.concatenate(is_equal)
    clear = np.concatenate(gaps) > 2 * bound
    report(
        f"{DEVICE}: {family}: logits within {worst:.3f} of fp32 (typically {typical:.3f}; BF16 {bound}), "
        f"norms within {worst_norm:.1e}, {np.sum(~equal)} of {len(equal)} choices differ, {clear.sum()} clear"
    )
    assert worst <= bound
    assert typical <= TYPICAL_SHARE * bound
    assert worst_norm <= RESIDUAL_REL
    assert clear.sum() >= len(clear) // 4
    assert equal[clear].all()
    num_differing, num_positions = golden["measured"]["bf16_argmax_differs"]
    assert len(equal) == num_positions
    assert np.sum(~equal) <= num_differing


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_text_departs_from_fp32_at_small_gaps_only(family: str) -> None:
    directory = FIXTURES / "families" / family
    golden = json.loads((directory / "golden.json").read_text())
    bound = golden["measured"][BF16_DEPARTURE]
    llm = LLM(str(directory), skip_tokenizer_init=True, device=DEVICE)
    num_equal = 0
    for sequence in golden["sequences"]:
        want = sequence["fp32"]["greedy"]
        params = SamplingParams(max_tokens=len(want["ids"]), ignore_eos=True)
        [output] = llm.generate([{"prompt_token_ids": sequence["input_ids"]}], params, use_tqdm=False)
        pairs = zip(output.outputs[0].token_ids, want["ids"], strict=True)
        departs = next((i for i, (got, expected) in enumerate(pairs) if got != expected), None)
        num_equal += len(want["ids"]) if departs is None else departs
        assert departs is None or want["top2_gap"][departs] < 2 * bound
    assert num_equal > 0


@pytest.mark.parametrize("q_passes", [0, 1])
def test_steps_are_replays_with_few_copies(q_passes: int, prompts: list[str], report: Any) -> None:
    llm = demo({"method": "dflash2", "q_passes": q_passes}, weight_format="w12", max_num_seqs=1)
    llm.generate(prompts[:3], PARAMS, use_tqdm=False)
    llm.set_stage_clock()
    llm.generate(prompts, PARAMS, use_tqdm=False)
    times = llm.stage_times()
    num_steps, num_passes = times["num_steps"], 1 + q_passes
    a_step = {name: count / num_steps for name, count in times["activity"].items()}
    report(f"{DEVICE}: {q_passes} Q passes, a step: { ({name: round(n, 2) for name, n in a_step.items()}) }")
    # Drafts, passes and appended rows go in one sequence each; a length that is new may add some.
    assert a_step["captures"] <= 0.2
    assert 3 * num_passes - 0.5 <= a_step["replays"] <= 3 * num_passes
    # Lists travel together, and a draft and what a head chose come back in one copy each.
    assert a_step["read_backs"] <= 2 * num_passes
    assert a_step["uploads"] <= 8 * num_passes


@pytest.mark.parametrize("drafter", ["dflash", "dflash2", "dspark"])
def test_drafts_made_ahead_are_those_made_in_turn(drafter: str, prompts: list[str]) -> None:
    """One request's next block starts with its commit, those of several are made when they are asked for."""
    llm = demo({**DRAFTERS[drafter], "q_passes": 1, "tree_nodes": 16}, max_num_seqs=2)
    alone = [llm.generate([prompt], PARAMS, use_tqdm=False, record_rounds=True)[0] for prompt in prompts[:2]]
    together = llm.generate(prompts[:2], PARAMS, use_tqdm=False, record_rounds=True)
    for one, beside in zip(alone, together, strict=True):
        rounds, others = one.rounds, beside.rounds
        assert len(rounds) == len(others) == one.metrics.num_target_passes
        for name in ("anchor_position", "draft_token_ids", "parents", "num_marked", "candidate_token_ids"):
            assert [getattr(r, name) for r in rounds] == [getattr(r, name) for r in others], name


def test_drafts_by_estimates_are_of_each_request_and_change_no_token(prompts: list[str]) -> None:
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    config = {**DRAFTERS["dflash2"], "tree_nodes": 16}
    texts = []
    for head, draft_head in (("dense", "exact"), ("screened", "int8")):
        llm = demo(config, max_num_seqs=2, head=head)
        assert llm.describe()["draft_head"] == draft_head
        alone = [
            llm.generate([prompt], params, use_tqdm=False, record_rounds=True)[0] for prompt in prompts[:2]
        ]
        together = llm.generate(prompts[:2], params, use_tqdm=False, record_rounds=True)
        for one, beside in zip(alone, together, strict=True):
            drafts = [[r.draft_token_ids for r in output.rounds] for output in (one, beside)]
            assert drafts[0] == drafts[1]
        texts.append([output.outputs[0].token_ids for output in together])
        assert mean_acceptance_length(together) > 1.5
    assert texts[0] == texts[1]


def test_an_engine_switches_while_its_launches_are_replayed(prompts: list[str], plain: list[Any]) -> None:
    """Launches captured for one way to decode neither serve another nor are lost to it."""
    config = {**DRAFTERS["dflash2"], "tree": "ddtree", "tree_nodes": 32, "q_passes": 1}
    llm = demo(config, weight_format="w12", max_num_seqs=1, head="screened")
    ways: list[tuple[dict[str, Any] | None, str]] = [
        (None, "dense"),
        ({"tree": "chain"}, "screened"),
        ({"tree": "ddtree", "tree_nodes": 9}, "dense"),
        (None, "screened"),
        ({"q_passes": 1, "tree_nodes": 32}, "screened"),
    ]
    ids = [output.outputs[0].token_ids for output in plain[:3]]
    lengths = []
    for turn in range(3):
        for config, head in ways:
            llm.switch_speculation(config, head=head)
            llm.set_stage_clock()
            outputs = llm.generate(prompts[:3], PARAMS, use_tqdm=False)
            assert [output.outputs[0].token_ids for output in outputs] == ids
            lengths.append(mean_acceptance_length(outputs))
            activity = llm.stage_times()["activity"]
            assert activity["replays"] > 0
            # What comes the third time was captured the second.
            assert turn < 2 or activity["captures"] == 0
    # Drafts go by the taps of a pass, which plain decoding leaves out.
    assert lengths == lengths[: len(ways)] * 3
    assert [length > 1 for length in lengths[: len(ways)]] == [config is not None for config, _ in ways]
    assert_identical(llm.generate(prompts[:2], PARAMS, use_tqdm=False, record_logits=True), plain[:2])


@pytest.mark.skipif("PYTEST_XDIST_WORKER" in os.environ, reason="others take and give memory meanwhile")
def test_memory_is_given_back(report: Any) -> None:
    torch = pytest.importorskip("torch")
    demo({"method": "dflash2"})
    torch.cuda.synchronize()
    before = torch.cuda.mem_get_info()[0]
    for _ in range(3):
        demo({"method": "dflash2", "q_passes": 1}).generate("def f(x):", PARAMS, use_tqdm=False)
    after = torch.cuda.mem_get_info()[0]
    report(f"{DEVICE}: {(before - after) / 2**20:.1f} MiB less free after three engines")
    assert before - after < 64 << 20


def test_the_plan_is_what_is_held() -> None:
    llm = demo({"method": "dflash2"}, weight_format="bf16", max_num_seqs=3)
    facts = llm.describe()
    assert facts["gpu"]
    assert facts["dtype"] == "float32"
    options = EngineOptions(max_model_len=1024, max_num_seqs=3)
    planned = plan_memory(TARGET_DIR, drafter=DFLASH2_DIR, device=DEVICE, options=options)
    form = planned["formats"]["bf16"]
    assert form["weight_bytes"] == facts["weight_bytes"]
    assert form["bytes"]["drafter_weights"] == facts["drafter_weight_bytes"]
    assert form["bytes"]["lm_head_copy"] == facts["screened_head_bytes"]
    assert planned["memory_bytes"] > 2**30


def test_a_folder_of_kernels_may_be_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, prompts: list[str], plain: list[Any]
) -> None:
    cache = tmp_path / "cache"
    monkeypatch.setenv("SPECPILOT_CACHE_DIR", str(cache))
    cache.write_text("a file where the folder should be")
    [output] = demo(None).generate(prompts[:1], PARAMS, use_tqdm=False)
    assert output.outputs[0].token_ids == plain[0].outputs[0].token_ids
