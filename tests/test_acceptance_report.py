"""The acceptance report: figures against sums and resamples made another way."""

from __future__ import annotations

import itertools
import json
import random
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from specpilot_rs import LLM, OptionError, RequestError, SamplingParams, SpeculativeConfig
from specpilot_rs.bench import plot
from specpilot_rs.bench.acceptance import (
    AcceptanceRun,
    BenchPrompt,
    Configuration,
    PromptSet,
    read_prompt_sets,
)
from specpilot_rs.bench.report import build_report, report_text
from specpilot_rs.bench.resampling import Resampling, interval
from specpilot_rs.bench.rounds import ORACLES, PromptCounts, oracle_tokens

from .conftest import FIXTURES

PARAMS = SamplingParams(max_tokens=32, ignore_eos=True, detokenize=False)
DRAFTERS: dict[str, dict[str, Any]] = {
    "dflash2": {"method": "dflash2"},
    "dspark": {"model": str(FIXTURES / "demo" / "dspark")},
    "ngram": {"method": "ngram"},
}
SHAPES: list[tuple[str, dict[str, Any]]] = [
    ("dflash2", {"tree": "chain", "tree_nodes": 32}),
    ("dflash2", {"tree": "conditional", "tree_nodes": 32}),
    ("dflash2", {"tree": "conditional", "tree_nodes": 32, "q_passes": 1}),
    ("dflash2", {"tree": "chain", "tree_nodes": 48}),
    ("dspark", {"tree": "ddtree", "tree_nodes": 17}),
    ("ngram", {"tree": "ddtree", "tree_nodes": 32}),
]
MEASURED = [
    "dflash2 chain 16",
    "dflash2 conditional 32",
    "dflash2 conditional 32 + 1Q",
    "dspark ddtree 17",
]
Outputs = dict[str, list[Any]]


def demo(speculation: SpeculativeConfig | None) -> LLM:
    return LLM.demo(speculative_config=speculation, max_num_seqs=1, max_model_len=1024)


def config_of(drafter: str, shape: dict[str, Any]) -> SpeculativeConfig:
    return SpeculativeConfig(**DRAFTERS[drafter], **shape)


@pytest.fixture(scope="module")
def prompt_sets(golden_cases: list[dict[str, Any]]) -> list[PromptSet]:
    """The golden prompts, as two sets."""
    prompts = [
        BenchPrompt(str(i), {"prompt_token_ids": case["prompt_ids"]}) for i, case in enumerate(golden_cases)
    ]
    return [PromptSet("first", tuple(prompts[:3])), PromptSet("next", tuple(prompts[3:5]))]


@pytest.fixture(scope="module")
def run(prompt_sets: list[PromptSet]) -> AcceptanceRun:
    configurations = [Configuration(drafter, config_of(drafter, shape)) for drafter, shape in SHAPES]
    run = AcceptanceRun(demo, prompt_sets, configurations, PARAMS)
    run.measure()
    return run


@pytest.fixture(scope="module")
def report(run: AcceptanceRun) -> dict[str, Any]:
    return build_report(run, {"target": "demo", "max_tokens": 32}, seed=3)


@pytest.fixture(scope="module")
def outputs(run: AcceptanceRun, prompt_sets: list[PromptSet]) -> Outputs:
    """The same prompts decoded again, side by side in one batch, by the names of the configurations."""
    prompts = [prompt.prompt for prompt_set in prompt_sets for prompt in prompt_set.prompts]
    made = {}
    for result in run.results:
        llm = LLM.demo(
            speculative_config=result.configuration.speculation, max_num_seqs=4, max_model_len=1024
        )
        made[result.name] = llm.generate(prompts, PARAMS, use_tqdm=False, record_rounds=True)
    return made


def results_of(report: dict[str, Any], name: str) -> dict[str, dict[str, Any]]:
    [configuration] = [item for item in report["configurations"] if item["name"] == name]
    return {result["set"]: result for result in configuration["results"]}


def committed_and_passes(outputs: list[Any]) -> tuple[int, int]:
    metrics = [output.metrics for output in outputs]
    return sum(m.num_output_tokens - 1 for m in metrics), sum(m.num_target_passes for m in metrics)


def test_what_cannot_be_measured_is_skipped_with_its_reason(report: dict[str, Any]):
    assert [item["name"] for item in report["configurations"]] == MEASURED
    assert report["complete"]
    assert report["mismatches"] == []
    duplicate, impossible = report["skipped"]
    assert duplicate == {"name": "dflash2 chain 48", "reason": "comes to the same as dflash2 chain 16"}
    assert impossible["name"] == "ngram ddtree 32"
    assert "position-wise scores" in impossible["reason"]


@pytest.mark.parametrize("name", MEASURED)
def test_figures_are_sums_over_prompts(name: str, report: dict[str, Any], outputs: Outputs):
    results = results_of(report, name)
    assert list(results) == ["first", "next", "all"]
    for prompt_set, part in (("first", slice(3)), ("next", slice(3, None)), ("all", slice(None))):
        result, of_set = results[prompt_set], outputs[name][part]
        committed, passes = committed_and_passes(of_set)
        assert (result["num_tokens"], result["num_passes"]) == (committed, passes)
        assert result["num_prompts"] == len(of_set)
        assert result["tau"] == pytest.approx(committed / passes, abs=1e-4)
        assert result["interval"][0] <= result["tau"] <= result["interval"][1]
        # Every pass has its root and its drafts; accepted ones and roots are what was not wasted.
        drafted = sum(len(drafting.draft_token_ids) for o in of_set for drafting in o.rounds)
        accepted = sum(drafting.num_accepted for o in of_set for drafting in o.rounds)
        rows = passes + drafted
        assert result["rows_per_pass"] == pytest.approx(rows / passes, abs=1e-4)
        assert (1 - result["wasted_rows"]) * rows == pytest.approx(passes + accepted, abs=1e-3 * rows)
        lengths = [drafting.num_accepted for o in of_set for drafting in o.rounds]
        assert result["accepted_lengths"] == np.bincount(lengths).tolist()


def test_positions_accept_what_metrics_say(report: dict[str, Any], outputs: Outputs):
    """Chains are as deep as they are long, so the share at a position follows from lengths alone."""
    rounds = [drafting for o in outputs["dflash2 chain 16"] for drafting in o.rounds]
    expected = []
    for position in range(1, max(len(r.draft_token_ids) for r in rounds) + 1):
        with_draft = [r for r in rounds if len(r.draft_token_ids) >= position]
        expected.append(sum(r.num_accepted >= position for r in with_draft) / len(with_draft))
    got = results_of(report, "dflash2 chain 16")["all"]["acceptance_by_position"]
    assert got == pytest.approx(expected, abs=1e-4)


def test_q_passes_report_how_often_the_exact_pass_agrees(report: dict[str, Any], outputs: Outputs):
    metrics = [output.metrics for output in outputs["dflash2 conditional 32 + 1Q"]]
    share = sum(m.num_accepted_marks for m in metrics) / sum(m.num_marked_tokens for m in metrics)
    assert 0.8 < share < 1
    agreement = results_of(report, "dflash2 conditional 32 + 1Q")["all"]["q_pass_agreement"]
    assert agreement == pytest.approx(share, abs=1e-4)
    assert results_of(report, "dflash2 conditional 32")["all"]["q_pass_agreement"] is None


def test_differences_are_to_the_first_of_the_drafter_and_between_policies(report: dict[str, Any]):
    chain, tree = (results_of(report, name) for name in MEASURED[:2])
    assert chain["all"]["difference"] is None
    assert results_of(report, "dspark ddtree 17")["all"]["difference"] is None
    for name in ("first", "next", "all"):
        difference = tree[name]["difference"]
        assert difference["to"] == "dflash2 chain 16"
        assert difference["tau"] == pytest.approx(tree[name]["tau"] - chain[name]["tau"], abs=2e-4)
    [between] = report["policy_differences"]
    assert (between["of"], between["to"]) == ("dflash2 conditional 32", "dflash2 chain 16")
    assert between["interval"] == tree["all"]["difference"]["interval"]
    assert between["interval"][0] > 0, "a tree beats its chain on the demo pair"


def test_reports_repeat_and_depend_on_the_seed(run: AcceptanceRun, report: dict[str, Any]):
    settings = {"target": "demo", "max_tokens": 32}
    assert report_text(build_report(run, settings, seed=3)) == report_text(report)
    assert json.loads(report_text(report)) == report
    other = build_report(run, settings, seed=4)
    assert (
        results_of(other, MEASURED[1])["all"]["interval"]
        != results_of(report, MEASURED[1])["all"]["interval"]
    )
    assert results_of(other, MEASURED[1])["all"]["tau"] == results_of(report, MEASURED[1])["all"]["tau"]


# Resampling


def test_intervals_are_those_of_all_possible_draws():
    """Five prompts can be drawn in 3125 ways, which are enumerated here, differences paired by prompt."""
    tokens, passes, fewer = [31, 40, 8, 22, 5], [9, 8, 5, 7, 2], [12, 13, 6, 11, 3]
    drawn = [list(draw) for draw in itertools.product(range(5), repeat=5)]

    def every_ratio(denominators: list[int]) -> np.ndarray:
        return np.array([sum(tokens[i] for i in draw) / sum(denominators[i] for i in draw) for draw in drawn])

    resampling = Resampling(5, seed=1)
    for got, exact in (
        (resampling.ratios(tokens, passes), every_ratio(passes)),
        (
            resampling.ratios(tokens, passes) - resampling.ratios(tokens, fewer),
            every_ratio(passes) - every_ratio(fewer),
        ),
    ):
        places = np.sort(exact)
        distance = np.abs(
            np.searchsorted(np.sort(got), places, side="right") / len(got)
            - np.searchsorted(places, places, side="right") / len(places)
        )
        assert distance.max() < 0.02
        assert interval(got) == pytest.approx(np.quantile(exact, [0.025, 0.975]), abs=0.05)


def test_intervals_are_those_of_drawing_prompts_one_by_one():
    source = random.Random(5)
    passes = [source.randint(3, 30) for _ in range(40)]
    tokens = [count * source.randint(1, 9) for count in passes]
    ratios = []
    for _ in range(4000):
        draw = source.choices(range(40), k=40)
        ratios.append(sum(tokens[i] for i in draw) / sum(passes[i] for i in draw))
    low, high = sorted(ratios)[100], sorted(ratios)[-100]
    assert interval(Resampling(40, seed=2).ratios(tokens, passes)) == pytest.approx((low, high), rel=0.01)


def test_intervals_hold_the_truth_as_often_as_they_say():
    """Prompts whose acceptance differs: 60 of them are drawn 300 times over from a known population."""
    rng = np.random.default_rng(7)
    shares = rng.beta(2, 2, size=100_000)
    all_passes = 1 + rng.poisson(63 / (1 + 4 * shares))
    all_tokens = all_passes + rng.binomial(4 * all_passes, shares)
    truth = all_tokens.sum() / all_passes.sum()
    inside = 0
    for trial in range(300):
        chosen = rng.integers(len(shares), size=60)
        low, high = interval(Resampling(60, trial, 400).ratios(all_tokens[chosen], all_passes[chosen]))
        inside += low <= truth <= high
    # 95 % less what a percentile bootstrap loses with 60 prompts, and three standard errors.
    assert 0.90 <= inside / 300 <= 0.985


def test_prompts_without_passes_count_as_plain_decoding():
    assert Resampling(2, seed=0, num_resamples=50).ratios([0, 0], [0, 0]).tolist() == [1.0] * 50


# Oracles


def drafted(**values: Any) -> Any:
    usual = {
        "draft_token_ids": [],
        "num_marked": 0,
        "greedy_token_ids": [],
        "candidate_token_ids": [],
    }
    return SimpleNamespace(**{**usual, **values})


TEN = [[10 * k, 10 * k + 1] for k in range(10)]


@pytest.mark.parametrize(
    ("drafting", "continuation", "chain", "at_8", "at_16"),
    [
        # Nothing proposed: the target's own token is all there is.
        (drafted(), [5, 6], 1, 1, 1),
        # The greedy walk leaves the text at its second token, the candidates at the fourth.
        (
            drafted(greedy_token_ids=[1, 9, 3], candidate_token_ids=[[1], [9, 2], [3, 8], [7]]),
            [1, 2, 3, 4, 5],
            2,
            4,
            4,
        ),
        # Ten positions inside: eight of them are seen by one oracle, ten by the other.
        (drafted(candidate_token_ids=TEN), [row[1] for row in TEN] + [1, 1], 1, 9, 11),
        # The output ends inside the draft.
        (drafted(greedy_token_ids=[1, 2, 3], candidate_token_ids=[[1], [2], [3]]), [1, 2], 2, 2, 2),
        # A seventeenth candidate does not count.
        (drafted(candidate_token_ids=[[*range(100, 116), 7], [8]]), [7, 8, 9], 1, 1, 1),
        # Both marks hold, and the draft goes on behind them.
        (
            drafted(
                draft_token_ids=[4, 5, 6, 9],
                num_marked=2,
                greedy_token_ids=[6, 7],
                candidate_token_ids=[[6], [8, 7], [1]],
            ),
            [4, 5, 6, 7, 2, 3],
            5,
            5,
            5,
        ),
        # The second mark is wrong, and what was drafted behind it is worth nothing.
        (
            drafted(draft_token_ids=[4, 0, 6], num_marked=2, greedy_token_ids=[6], candidate_token_ids=[[6]]),
            [4, 5, 6],
            2,
            2,
            2,
        ),
    ],
)
def test_oracles_of_drafts_made_by_hand(
    drafting: Any, continuation: list[int], chain: int, at_8: int, at_16: int
):
    assert oracle_tokens(drafting, continuation) == (chain, at_8, at_16)
    assert ORACLES == ("chain", "top16_at_8", "top16_at_16")


@pytest.mark.parametrize("name", MEASURED[:3])
def test_no_pass_commits_more_than_its_oracle(name: str, outputs: Outputs):
    """DFlash2 proposes 16 candidates for each of 15 positions, so all that a tree can hold is inside."""
    for output in outputs[name]:
        sequence = output.prompt_token_ids + output.outputs[0].token_ids
        for drafting in output.rounds:
            continuation = sequence[drafting.anchor_position + 1 :]
            committed = min(drafting.num_accepted + 1, len(continuation))
            chain, at_8, at_16 = oracle_tokens(drafting, continuation)
            assert max(committed, at_8, chain) <= at_16
            if "chain" in name:
                assert chain == committed
            marked, rest = drafting.num_marked, drafting.draft_token_ids[drafting.num_marked :]
            depths: list[int] = []
            for parent in drafting.parents:
                depths.append(0 if parent < 0 else depths[parent] + 1)
            assert depths[:marked] == list(range(marked))
            for token, depth in zip(rest, depths[marked:], strict=True):
                assert token in drafting.candidate_token_ids[depth - marked]


def test_greedy_walks_are_what_chains_draft(outputs: Outputs):
    rounds = [drafting for o in outputs["dflash2 chain 16"] for drafting in o.rounds]
    # The end of an output cuts trees, not proposals; before its last token nothing is proposed at all.
    assert {len(r.greedy_token_ids) for r in rounds} == {0, 15}
    assert any(0 < len(r.draft_token_ids) < 15 for r in rounds)
    for drafting in rounds:
        length = len(drafting.draft_token_ids)
        assert drafting.greedy_token_ids[:length] == drafting.draft_token_ids


def test_candidates_of_a_selector_are_the_likeliest_tokens_of_the_position(prompt_sets: list[PromptSet]):
    """Trees of marginals take the likeliest of each position from the same logits, best first."""
    prompt = prompt_sets[0].prompts[0].prompt
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    first = {}
    for tree in ("ddtree", "conditional"):
        llm = demo(config_of("dflash2", {"tree": tree, "tree_nodes": 17}))
        [output] = llm.generate(prompt, params, use_tqdm=False, record_rounds=True)
        first[tree] = output.rounds[0].candidate_token_ids
    assert len(first["ddtree"]) == 15
    assert [len(tokens) for tokens in first["ddtree"]] == [16] * 15
    for marginal, conditional in zip(first["ddtree"], first["conditional"], strict=True):
        assert set(marginal) == set(conditional)


def test_counts_of_an_output_without_rounds_are_empty(demo_llm: LLM):
    [output] = demo_llm.generate("def", SamplingParams(max_tokens=1, ignore_eos=True), use_tqdm=False)
    counts = PromptCounts.of(output)
    assert (counts.num_tokens, counts.num_passes, counts.wasted_rows) == (0, 0, 0.0)
    assert counts.acceptance_by_position == []
    assert demo_llm.generate("def", PARAMS, use_tqdm=False)[0].rounds is None


def test_all_prompts_are_checked_before_any_is_decoded(tmp_path: Path):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "def"}\n{"prompt_token_ids": [8192]}\n', encoding="utf-8")
    run = AcceptanceRun(demo, read_prompt_sets([prompts]), [], PARAMS)
    decoded: list[int] = []
    run.progress.advance = decoded.append  # type: ignore[method-assign]
    with pytest.raises(RequestError, match="prompts, prompt 2: prompt token 0 is 8192"):
        run.measure()
    assert decoded == []


def test_a_missing_matplotlib_names_the_extra(monkeypatch: pytest.MonkeyPatch, report: dict[str, Any]):
    assert plot.draw(report).startswith(b"\x89PNG\r\n\x1a\n")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(OptionError, match=r"specpilot-rs\[bench\]"):
        plot.draw(report)
