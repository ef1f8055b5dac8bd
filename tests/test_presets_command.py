"""`specpilot bench --presets` and `--ladder` from outside: what they print, write, refuse; exit codes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from specpilot_rs.bench.presets import LADDER, presets_named, with_ladder
from specpilot_rs.bench.timing import VERIFY_ROWS, PresetTiming, TimingRun, gpu_clocks
from specpilot_rs.bench.timing_report import STAGES

from .test_acceptance_command import call
from .test_cli import error_of, specpilot

PNG = b"\x89PNG"
TINY = ("--planted", "tiny", "--device", "cpu", "--num-threads", "1", "--prompt-tokens", "20")


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, dict[str, Any], bytes]:
    folder = tmp_path_factory.mktemp("presets")
    results, picture = folder / "a.json", folder / "a.png"
    shape = ("--presets", "plain,ddtree,specpilot", "--rounds", "3", "--max-tokens", "72")
    printed = specpilot("bench", *shape, *TINY, "--output", results, "--plot", picture)
    assert printed.returncode == 0, printed.stderr
    assert sorted(file.name for file in folder.iterdir()) == ["a.json", "a.png"]
    return printed, json.loads(results.read_bytes()), picture.read_bytes()


def test_the_report_holds_what_was_measured(measured: tuple[Any, dict[str, Any], bytes]) -> None:
    _, report, picture = measured
    assert picture.startswith(PNG)
    assert {
        "target": "planted tiny",
        "acceptance": "modelled",
        "device": "cpu",
        "gpu": None,
        "complete": True,
        "num_rounds": 3,
        "max_tokens": 72,
        "prompt_tokens": 20,
    }.items() <= report.items()
    assert report["profile"]["easy_share"] == 0.7
    assert [item["name"] for item in report["presets"]] == ["plain", "ddtree", "specpilot"]
    for item in report["presets"]:
        assert item["num_checked_tokens"] == 3 * 72
        assert item["num_checked_logit_rows"] == 24
        assert (item["num_wrong_tokens"], item["num_wrong_logit_rows"]) == (0, 0)
        assert [sample["num_tokens"] for sample in item["rounds"]] == [71] * 3
        rates = [sample["num_tokens"] / sample["seconds"] for sample in item["rounds"]]
        assert item["tokens_per_s"]["median"] == pytest.approx(np.median(rates))
        low, high = item["tokens_per_s"]["interval"]
        assert min(rates) * 0.999 <= low <= item["tokens_per_s"]["median"] <= high <= max(rates) * 1.001
        assert item["tau"] == pytest.approx(3 * 71 / sum(sample["num_passes"] for sample in item["rounds"]))
        assert list(item["stages_ms"]) == list(STAGES)
        assert item["stages_ms"]["forward"] > 0
    plain, ddtree, specpilot = report["presets"]
    assert (plain["tau"], plain["is_plain"], plain["stages_ms"]["draft"]) == (
        1,
        True,
        pytest.approx(0, abs=0.05),
    )
    assert ddtree["tau"] > 3
    assert specpilot["tau"] > ddtree["tau"]
    assert [item["weight_format"] for item in report["presets"]] == ["bf16", "bf16", "w12"]
    assert (specpilot["q_passes"], specpilot["head"], specpilot["tree"]) == (1, "screened", "conditional")
    assert specpilot["stages_ms"]["q_forward"] > 0
    assert specpilot["weight_bytes"] < plain["weight_bytes"]
    for ratio, other in zip(report["ratios"], (plain, ddtree), strict=True):
        assert (ratio["of"], ratio["to"]) == ("specpilot", other["name"])
        pairs = zip(specpilot["rounds"], other["rounds"], strict=True)
        expected = np.median([b["seconds"] / a["seconds"] for a, b in pairs])
        assert ratio["median"] == pytest.approx(expected)
    for rows in report["verify_costs"].values():
        assert [row["rows"] for row in rows] == list(VERIFY_ROWS)
        assert all(row["forward_ms"] > 0 for row in rows)


def test_the_table_tells_what_is_modelled(measured: tuple[Any, dict[str, Any], bytes]) -> None:
    text = measured[0].stdout.decode()
    assert text.count("modelled acceptance") == 2
    assert "specpilot  to  plain" in text
    assert "milliseconds of a step by stage" in text
    assert "milliseconds of an exact pass by its rows, lossless w12" in text


def test_the_ladder_adds_a_part_at_a_time() -> None:
    printed = specpilot("bench", "--ladder", *TINY, "--rounds", "1", "--max-tokens", "24", "--json")
    assert printed.returncode == 0, printed.stderr
    report = json.loads(printed.stdout)
    got = [
        (item["name"], item["weight_format"], item["head"], item["q_passes"]) for item in report["presets"]
    ]
    assert [name for name, *_ in got] == [step.name for step in LADDER]
    assert got[1:] == [
        ("tree", "bf16", "dense", 0),
        ("+W12", "w12", "dense", 0),
        ("+head", "w12", "screened", 0),
        ("+Q pass", "w12", "screened", 1),
    ]


def test_fitted_trees_stop_where_rows_stop_paying() -> None:
    shape = ("--presets", "specpilot,fitted", "--rounds", "2", "--max-tokens", "48", "--json")
    printed = specpilot("bench", *shape, *TINY)
    assert printed.returncode == 0, printed.stderr
    report = json.loads(printed.stdout)
    full, fitted = report["presets"]
    # On a CPU a row costs nearly as much as the first one, so fewer are worth it.
    assert fitted["tau"] < full["tau"]
    rows = {item["name"]: item["rows_per_pass"] for item in report["presets"]}
    assert 1 <= rows["fitted"] < rows["specpilot"]
    assert (fitted["num_wrong_tokens"], fitted["num_checked_tokens"]) == (0, 96)


def test_w12_decodes_plainly_and_like_bf16() -> None:
    shape = ("--presets", "plain,w12", "--rounds", "2", "--max-tokens", "24", "--json")
    printed = specpilot("bench", *shape, *TINY)
    assert printed.returncode == 0, printed.stderr
    report = json.loads(printed.stdout)
    plain, w12 = report["presets"]
    assert [(item["is_plain"], item["tau"], item["tree_nodes"]) for item in (plain, w12)] == [
        (True, 1, 1)
    ] * 2
    assert (w12["weight_format"], w12["head"]) == ("w12", "screened")
    assert w12["weight_bytes"] < plain["weight_bytes"]
    assert (w12["num_checked_tokens"], w12["num_wrong_tokens"], w12["num_wrong_logit_rows"]) == (48, 0, 0)
    assert report["verify_costs"] == {}, "nothing here verifies drafts"


def test_stock_scripts_come_from_the_preset_that_drafts() -> None:
    asked = []

    class Llm:
        def switch_speculation(self, config: Any) -> None:
            asked.append(config)

    presets = presets_named(["plain-stock", "stock", "plain"])
    run = TimingRun(lambda *_: Llm(), {}, [], presets, 8, is_planted=True)  # type: ignore[arg-type, return-value]
    run._write_stock_scripts(Llm(), presets[:1])  # type: ignore[arg-type]
    assert asked == []
    run._write_stock_scripts(Llm(), presets[:2])  # type: ignore[arg-type]
    assert [config.tree for config in asked] == ["chain"]


def test_the_demo_is_measured_not_modelled() -> None:
    shape = ("--presets", "plain,specpilot", "--demo", "--device", "cpu", "--max-model-len", "256")
    printed = specpilot("bench", *shape, "--rounds", "2", "--max-tokens", "24", "--json")
    assert printed.returncode == 0, printed.stderr
    report = json.loads(printed.stdout)
    assert (report["target"], report["acceptance"], report["profile"]) == ("demo", "measured", None)
    assert report["presets"][1]["tau"] > 2


def test_a_wrong_token_fails_the_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    decode = TimingRun._decode_plainly

    def with_another_token(run: TimingRun) -> None:
        decode(run)
        run._plain[0][5] += 1

    monkeypatch.setattr(TimingRun, "_decode_plainly", with_another_token)
    shape = ("--presets", "plain,ddtree", "--rounds", "2", "--max-tokens", "16")
    assert call(monkeypatch, "bench", *shape, *TINY) == 1
    assert "NOT LOSSLESS: ddtree: 11 tokens and 0 rows of logits" in capsys.readouterr().err


def test_only_whole_rounds_of_a_run_that_is_stopped_are_reported(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    check, num_checked = PresetTiming.check, 0

    def stop_in_the_third_round(timing: PresetTiming, *tokens: Any) -> None:
        nonlocal num_checked
        check(timing, *tokens)
        num_checked += 1
        if num_checked == 2 * 2 + 1:
            raise KeyboardInterrupt

    monkeypatch.setattr(PresetTiming, "check", stop_in_the_third_round)
    shape = ("--presets", "plain,ddtree", "--rounds", "4", "--max-tokens", "16", "--json")
    assert call(monkeypatch, "bench", *shape, *TINY) == 130
    printed = capsys.readouterr()
    report = json.loads(printed.out)
    assert (report["complete"], report["num_rounds"]) == (False, 2)
    assert [len(item["rounds"]) for item in report["presets"]] == [2, 2]
    assert "stopped after 2 of 4 rounds; only these are reported" in printed.err


@pytest.mark.parametrize(("drafter", "described"), [("dflash2", "DFlash2"), ("ngram", "prompt lookup")])
def test_a_drafter_may_be_named_by_its_method(drafter: str, described: str) -> None:
    shape = ("--presets", "plain,specpilot", "--demo", "--drafter", drafter, "--device", "cpu", "--json")
    printed = specpilot("bench", *shape, "--rounds", "1", "--max-tokens", "12", "--max-model-len", "256")
    assert printed.returncode == 0, printed.stderr
    assert described in json.loads(printed.stdout)["drafter"]


def test_the_ladder_joins_presets_before_the_last() -> None:
    names = [preset.name for preset in with_ladder(presets_named(["plain", "ddtree", "specpilot"]))]
    assert names == ["plain", "ddtree", "tree", "+W12", "+head", "specpilot"]


def test_differences_are_counted_to_the_end_of_an_output() -> None:
    timing = PresetTiming(LADDER[0])
    timing.check([1, 2, 3], [1, 2, 3])
    timing.check([1, 9, 3], [1, 2, 3])
    timing.check([1, 2], [1, 2, 3])
    assert (timing.num_checked_tokens, timing.num_wrong_tokens, timing.num_parted) == (9, 3, 2)
    # Six right tokens and two wrong ones had the same text before them.
    assert timing.mismatch_rate == 2 / 8


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("--presets", "plain,fast", *TINY),
            "preset should be one of plain, w12, plain-stock, stock, ddtree, specpilot, fitted, got 'fast'",
        ),
        (("--presets", "plain,plain", *TINY), "each preset should be given once"),
        (("--presets", "plain,stock", *TINY), "--presets: stock should not be the last"),
        (("--presets", "w12,plain-stock", *TINY), "--presets: plain-stock should not be the last"),
        (("--presets", "plain", *TINY, "--max-tokens", "1"), "--max-tokens should be at least 2"),
        (("--presets", "plain", *TINY, "--tree", "chain"), "--tree: no option of --presets and --ladder"),
        (("--acceptance", "--demo", "--rounds", "2"), "--rounds: no option of --acceptance"),
        (("--presets", "plain", "--planted", "qwen"), "--planted should be one of qwen3.8-27b"),
        (("--presets", "plain"), "or --planted NAME"),
        (("--presets", "plain", "--demo", *TINY), "or --planted NAME"),
        (("--acceptance", "--planted", "tiny"), "--planted goes with --presets"),
        (("--acceptance", "--ladder", "--demo"), "give --acceptance, or --presets or --ladder"),
        (("--presets", "plain", *TINY, "--prompts", "x"), "--planted makes its own prompts"),
        (("--presets", "plain", *TINY, "--drafter", "x"), "a planted model comes with its own"),
        (("--presets", "plain", "--demo", "--drafter", "eagle3"), "is a method whose drafters have files"),
        ((), "give --acceptance, or --presets or --ladder"),
    ],
)
def test_what_cannot_be_measured_is_refused(arguments: tuple[str, ...], message: str) -> None:
    assert message in error_of("bench", *arguments)


def test_stock_kernels_want_a_gpu() -> None:
    printed = specpilot("bench", "--presets", "stock", *TINY)
    assert printed.returncode == 2
    assert b'a GPU with kernels "stock"' in printed.stderr


def test_clocks_are_left_out_where_there_are_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert gpu_clocks("GPU-7") is None
    program = tmp_path / "nvidia-smi"
    answer = "case $* in *--id=GPU-7*) echo '1980, 3201, 412.55, 41';; *) exit 6;; esac"
    program.write_text(f"#!/bin/sh\n{answer}\n", encoding="utf-8")
    program.chmod(0o755)
    expected = {"clocks.sm": 1980, "clocks.mem": 3201, "power.draw": 412.55, "temperature.gpu": 41}
    assert gpu_clocks("GPU-7") == expected
    assert gpu_clocks("GPU-8") is None
    assert gpu_clocks(None) is None
    program.write_text("#!/bin/sh\necho 'N/A, 3201, 412.55, 41'\n", encoding="utf-8")
    assert gpu_clocks("GPU-7") is None
