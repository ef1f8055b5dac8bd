"""`specpilot bench --acceptance` from outside: what it prints, writes and refuses, and its exit codes."""

from __future__ import annotations

import io
import itertools
import json
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from specpilot_rs import cli
from specpilot_rs.bench.acceptance import AcceptanceRun

from .conftest import FIXTURES
from .test_cli import specpilot


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
        "400",
        "--ignore-eos",
    )
    command = arguments(prompt_files, *shape, "--output", results)
    process = subprocess.Popen(
        [sys.executable, "-m", "specpilot_rs.cli", *map(str, command)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # A shell that starts the tests in the background has SIGINT ignored, which children inherit.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
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
