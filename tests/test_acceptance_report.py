"""The acceptance report: figures against sums and resamples made another way, and the command around them."""

from __future__ import annotations

import io
import itertools
import json
import random
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from specpilot_rs import LLM, OptionError, RequestError, SamplingParams, SpeculativeConfig, cli
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
from .test_cli import specpilot

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


# The command


@pytest.fixture(scope="module")
def prompt_files(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("prompts")
    files = []
    for name in ("gsm8k", "humaneval"):
        lines = (FIXTURES / "prompts" / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()[:3]
        files.append(folder / f"{name}.jsonl")
        files[-1].write_text("\n".join(lines), encoding="utf-8")
    return files


def arguments(files: list[Path], *more: str | Path) -> list[str | Path]:
    sets = [part for file in files for part in ("--prompts", file)]
    return ["bench", "--acceptance", "--demo", *sets, *more]


def test_the_command_writes_table_json_and_picture(prompt_files: list[Path], tmp_path: Path):
    results, picture = tmp_path / "a.json", tmp_path / "a.png"
    shape = ("--limit", "2", "--max-tokens", "16", "--tree", "chain", "--tree", "conditional", "--chat")
    files = ("--output", results, "--plot", picture)
    printed = specpilot(
        *arguments(prompt_files, *shape, *files, "--drafter", "dflash2", "--drafter", "ngram")
    )
    assert printed.returncode == 0, printed.stderr
    assert sorted(file.name for file in tmp_path.iterdir()) == ["a.json", "a.png"]
    report = json.loads(results.read_bytes())
    assert report["prompt_sets"] == [{"name": name, "num_prompts": 2} for name in ("gsm8k", "humaneval")]
    assert (report["complete"], report["max_tokens"], report["chat"]) == (True, 16, True)
    assert [item["drafter"] for item in report["configurations"]] == ["dflash2", "dflash2", "ngram", "ngram"]
    table = printed.stdout.decode()
    for item in report["configurations"]:
        assert {"method", "tree", "tree_nodes", "q_passes", "num_speculative_tokens"} <= item.keys()
        assert list(item["tokens_and_passes"]) == ["gsm8k", "humaneval"]
        for result in item["results"]:
            pairs = np.array(list(itertools.chain(*item["tokens_and_passes"].values())))
            if result["set"] == "all":
                assert pairs.sum(axis=0).tolist() == [result["num_tokens"], result["num_passes"]]
            assert result.keys() == {
                "set",
                "num_prompts",
                "num_tokens",
                "num_passes",
                "tau",
                "interval",
                "difference",
                "oracles",
                "candidates_per_position",
                "rows_per_pass",
                "wasted_rows",
                "q_pass_agreement",
                "acceptance_by_position",
                "accepted_lengths",
            }
            assert f"{result['tau']:.3f}" in table
    assert "humaneval: 2 prompts" in table
    progress = printed.stderr.decode()
    assert "plain decoding of 4 prompts" in progress
    assert "[4/4] ngram" in progress
    # A PNG that another reader takes, with something on it.
    image = pytest.importorskip("matplotlib.image").imread(io.BytesIO(picture.read_bytes()), format="png")
    assert image.ndim == 3
    assert min(image.shape[:2]) > 300
    assert 0.02 < (image[:, :, :3].min(axis=2) < 0.9).mean() < 0.5


def call(monkeypatch: pytest.MonkeyPatch, *given: str | Path) -> int:
    """Runs the command in this process and returns its exit code."""
    monkeypatch.setattr(sys, "argv", ["specpilot", *map(str, given)])
    with pytest.raises(SystemExit) as end:
        cli.main()
    assert isinstance(end.value.code, int)
    return end.value.code


def test_a_token_that_is_not_plain_decodings_fails_the_run(
    prompt_files: list[Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    decode = AcceptanceRun.plain_token_ids

    def planted(run: AcceptanceRun) -> list[list[list[int]]]:
        token_ids = decode(run)
        token_ids[0][1][5] += 1
        return token_ids

    monkeypatch.setattr(AcceptanceRun, "plain_token_ids", planted)
    written = tmp_path / "a.json"
    shape = ("--limit", "2", "--max-tokens", "8", "--tree", "chain", "--json", "--output", written)
    assert call(monkeypatch, *arguments(prompt_files[:1], *shape)) == 1
    printed = capsys.readouterr()
    report = json.loads(printed.out)
    assert json.loads(written.read_bytes()) == report
    [mismatch] = report["mismatches"]
    assert (mismatch["configuration"], mismatch["prompt_set"], mismatch["index"]) == (
        "dflash2 chain 16",
        "gsm8k",
        5,
    )
    assert mismatch["expected"] == mismatch["got"] + 1
    assert "NOT LOSSLESS: dflash2 chain 16, gsm8k, prompt gsm8k/test/21" in printed.err


def test_ctrl_c_leaves_a_report_of_what_is_complete(prompt_files: list[Path], tmp_path: Path):
    results = tmp_path / "a.json"
    shape = (
        "--limit",
        "2",
        "--tree",
        "chain",
        "--tree",
        "conditional",
        "--max-tokens",
        "120",
        "--ignore-eos",
    )
    command = arguments(prompt_files, *shape, "--output", results)
    process = subprocess.Popen(
        [sys.executable, "-m", "specpilot_rs.cli", *map(str, command)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    for line in process.stderr:
        if line.startswith("[1/2]"):
            break
    process.send_signal(signal.SIGINT)
    table, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    assert "stopped after 1 of 2 configurations" in errors
    report = json.loads(results.read_bytes())
    assert not report["complete"]
    assert [item["tree"] for item in report["configurations"]] == ["chain"]
    assert f"{report['configurations'][0]['results'][-1]['tau']:.3f}" in table
    assert [file.name for file in tmp_path.iterdir()] == ["a.json"]


def test_bad_input_is_one_line(prompt_files: list[Path], tmp_path: Path):
    empty, same = tmp_path / "empty.jsonl", tmp_path / prompt_files[0].name
    empty.write_text("\n", encoding="utf-8")
    same.write_bytes(prompt_files[0].read_bytes())
    for given, part in (
        (arguments([tmp_path / "none.jsonl"]), "No such file"),
        (arguments([empty]), "no prompts"),
        (arguments([]), "--prompts"),
        (arguments([prompt_files[0], same]), "is taken"),
        (arguments(prompt_files, "--tree", "chian"), "did you mean `chain`"),
        (arguments(prompt_files, "--tree-nodes", "65"), "1..=64"),
        (arguments(prompt_files, "--q-passes", "9"), "q_passes"),
        (arguments(prompt_files, "--model", "x"), "--demo"),
        (arguments(prompt_files, "--limit", "0"), "limit"),
        (arguments(prompt_files, "--drafter", "ngram", "--drafter", "ngram"), "given once"),
        (arguments(prompt_files, "--output", tmp_path / "no" / "a.json"), "does not exist"),
        (arguments(prompt_files, "--output", prompt_files[0]), "write these elsewhere"),
        (arguments(prompt_files, "--output", tmp_path / "a", "--plot", tmp_path / "a"), "elsewhere"),
        (arguments(prompt_files, "--drafter", "dflash2", "--drafter", "dspark"), "drafters have files"),
        (arguments(prompt_files, "--drafter", tmp_path / "nothing"), "no such directory"),
        (arguments(prompt_files, "--tree-nodes", "16,x"), "as in 16,48"),
        (arguments(prompt_files, "--tree-nodes", "16,48"), "one for each of the 1 trees"),
        (arguments(prompt_files, "--num-speculative-tokens", "64"), "1..=63"),
        (["bench", "--demo", "--prompts", prompt_files[0]], "--acceptance"),
        (["bench", "--acceptance", "--model", "x", "--prompts", prompt_files[0]], "ngram"),
    ):
        assert part in error_of_call(given), given


def error_of_call(given: list[str | Path]) -> str:
    """The one line that a command ends with before it decodes anything."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        stderr, stdout = io.StringIO(), io.StringIO()
        monkeypatch.setattr(sys, "stderr", stderr)
        monkeypatch.setattr(sys, "stdout", stdout)
        assert call(monkeypatch, *given) == 2
    assert stdout.getvalue() == ""
    assert stderr.getvalue().startswith("error: ")
    assert stderr.getvalue().count("\n") == 1
    return stderr.getvalue()


def test_errors_of_a_run_reach_the_shell(prompt_files: list[Path], tmp_path: Path):
    """Those that need the extension or a model: a drafter that is not there, a policy that none can serve."""
    assert "no such" in specpilot_error(arguments(prompt_files, "--drafter", tmp_path / "nothing"))
    impossible = arguments(prompt_files[:1], "--drafter", "ngram", "--tree", "ddtree", "--max-tokens", "2")
    assert "no configuration can be measured: ngram ddtree 32: tree" in specpilot_error(impossible)


def test_all_prompts_are_checked_before_any_is_decoded(tmp_path: Path):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "def"}\n{"prompt_token_ids": [8192]}\n', encoding="utf-8")
    run = AcceptanceRun(demo, read_prompt_sets([prompts]), [], PARAMS)
    decoded: list[int] = []
    run.progress.advance = decoded.append  # type: ignore[method-assign]
    with pytest.raises(RequestError, match="prompts, prompt 2: prompt token 0 is 8192"):
        run.measure()
    assert decoded == []


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a full device")
def test_a_full_disk_takes_the_file_and_not_the_table(prompt_files: list[Path]):
    shape = (
        "--limit",
        "1",
        "--max-tokens",
        "4",
        "--q-passes",
        "1",
        "--tree",
        "spine",
        "--tree-nodes",
        "8,16",
    )
    result = specpilot(*arguments(prompt_files[:1], *shape, "--output", "/dev/full"))
    assert result.returncode == 2
    assert result.stderr.decode().splitlines()[-1] == "error: [Errno 28] No space left on device"
    assert "dflash2 spine 8/16 + 1Q" in result.stdout.decode()


def specpilot_error(given: list[str | Path]) -> str:
    result = specpilot(*given)
    assert (result.returncode, result.stdout) == (2, b"")
    lines = result.stderr.decode().splitlines()
    assert lines[-1].startswith("error: ")
    return lines[-1]


def test_a_missing_matplotlib_names_the_extra(monkeypatch: pytest.MonkeyPatch, report: dict[str, Any]):
    assert plot.draw(report).startswith(b"\x89PNG\r\n\x1a\n")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(OptionError, match=r"specpilot-rs\[bench\]"):
        plot.draw(report)
