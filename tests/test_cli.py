"""The command line: data on stdout, the rest on stderr, one-line errors, cheap help."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from specpilot_rs import LLM, SamplingParams, SpecPilotError, __version__, _core, cli, doctor
from specpilot_rs.demo import DFLASH2_DIR, TARGET_DIR
from specpilot_rs.output_file import writable, writing

PROMPT = "def add(a, b):\n"
DEMO = Path(__file__).parent / "fixtures" / "demo"


def specpilot(*arguments: str | Path, stdin: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [sys.executable, "-m", "specpilot_rs.cli", *map(str, arguments)],
        input=stdin,
        capture_output=True,
        timeout=300,
        check=False,
    )


def error_of(*arguments: str | Path, stdin: bytes = b"") -> str:
    """The one line that a command fails with."""
    result = specpilot(*arguments, stdin=stdin)
    error = result.stderr.decode()
    assert result.returncode == 2, error
    assert result.stdout == b""
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    return error


@pytest.fixture(scope="module")
def text(demo_llm: LLM) -> str:
    return demo_llm.generate(PROMPT, SamplingParams(max_tokens=12))[0].outputs[0].text


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        [],
        ["-h"],
        ["generate", "--help"],
        ["chat", "-h"],
        ["plan", "--help"],
        ["doctor", "-h"],
        ["bench", "-h"],
    ],
)
def test_help_is_cheap(arguments: list[str]):
    code = (
        "import sys\n"
        "from specpilot_rs.cli import main\n"
        f"sys.argv[1:] = {arguments}\n"
        "try:\n"
        "    main()\n"
        "except SystemExit as end:\n"
        "    assert end.code == 0\n"
        "heavy = {'specpilot_rs._core', 'numpy', 'tokenizers', 'jinja2', 'huggingface_hub', 'matplotlib'}\n"
        "print(sorted(heavy & set(sys.modules)), file=sys.stderr)\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert result.stderr == "[]\n"
    assert "Usage:" in result.stdout


def test_the_extension_loads_numpy_itself():
    """Numpy that loads at the first array in Rust would make a panic of Ctrl-C."""
    code = "import sys, specpilot_rs._core; assert 'numpy' in sys.modules"
    subprocess.run([sys.executable, "-c", code], timeout=60, check=True)


def test_version():
    assert specpilot("--version").stdout.decode().strip() == __version__


def test_prompts_from_everywhere(tmp_path: Path, text: str):
    file = tmp_path / "prompt.txt"
    file.write_text(PROMPT, encoding="utf-8")
    common = ("generate", "--demo", "--max-tokens", "12")
    for result in (
        specpilot(*common, PROMPT),
        specpilot(*common, "--file", file),
        specpilot(*common, stdin=PROMPT.encode() + b"\n"),
        specpilot(*common, stdin=PROMPT.encode() + b"\r\n"),
        specpilot(*common, PROMPT, "--stream"),
        specpilot(*common, PROMPT, "--no-speculation"),
        specpilot(*common, PROMPT, "--tree", "chain", "--num-threads", "1"),
        specpilot(
            *common, PROMPT, "--q-passes", "1", "--tree-nodes", "8,16", "--num-speculative-tokens", "4"
        ),
        specpilot(
            *common, PROMPT, "--speculative-config", '{"q_passes": 1, "q_head": "exact"}', "--tree", "spine"
        ),
        specpilot("generate", "--model", TARGET_DIR, "--max-tokens", "12", PROMPT),
        specpilot(*common, PROMPT, "--weight-format", "w12", "--head", "screened"),
        specpilot(*common, PROMPT, "--gpu-memory-utilization", "0.5", "--num-threads", "1"),
        specpilot(*common, PROMPT, "--tokenizer", TARGET_DIR, "--dtype", "float32", "--max-num-seqs", "1"),
    ):
        assert result.returncode == 0, result.stderr
        assert result.stdout.decode() == text + "\n"
        # The first of 12 tokens comes from the prompt's pass.
        assert b"12 tokens, 11 of them in " in result.stderr


def test_options_of_the_engine_reach_it():
    for command in (("generate", "x"), ("chat",)):
        for option in ("--weight-format", "--head"):
            name = option.strip("-").replace("-", "_")
            assert f"option `{name}`" in error_of(*command, "--demo", option, "w13")
        share = ("--gpu-memory-utilization", "0.000001")
        assert "raise gpu_memory_utilization to 0" in error_of(*command, "--demo", *share)


def test_json(text: str):
    result = json.loads(specpilot("generate", "--demo", "--max-tokens", "12", "--json", PROMPT).stdout)
    assert (result["prompt"], result["text"]) == (PROMPT, text)
    assert result["metrics"]["num_output_tokens"] == len(result["token_ids"])
    lines = specpilot(
        "generate", "--demo", "--max-tokens", "12", "--json", "--stream", PROMPT
    ).stdout.splitlines()
    assert "".join(json.loads(line)["text"] for line in lines) == text


def test_jsonl_in_and_out(tmp_path: Path, text: str):
    prompts, results = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    rows = [{"id": "a", "prompt": "The"}, {"prompt_token_ids": [5, 6]}, {"id": "c", "prompt": PROMPT}]
    prompts.write_text("\n".join(json.dumps(row) for row in rows) + "\n\n", encoding="utf-8")
    common = ("generate", "--demo", "--max-tokens", "12", "--input-jsonl", prompts)
    written = specpilot(*common, "--output-jsonl", results)
    assert (written.returncode, written.stdout) == (0, b"")
    out = [json.loads(line) for line in results.read_text(encoding="utf-8").splitlines()]
    assert [row.get("id") for row in out] == ["a", None, "c"]
    assert out[1]["prompt_token_ids"] == [5, 6]
    assert out[2]["text"] == text
    assert sorted(file.name for file in tmp_path.iterdir()) == ["in.jsonl", "out.jsonl"]
    printed = [json.loads(line) for line in specpilot(*common).stdout.splitlines()]
    assert [row["token_ids"] for row in printed] == [row["token_ids"] for row in out]
    # What was written can be read again, and gives the same.
    again = specpilot("generate", "--demo", "--max-tokens", "12", "--input-jsonl", results)
    assert again.returncode == 0, again.stderr
    repeated = [json.loads(line) for line in again.stdout.splitlines()]
    for before, after in zip(out, repeated, strict=True):
        assert {**after, "metrics": None} == {**before, "metrics": None}


def test_a_text_comes_before_the_tokens_beside_it(tmp_path: Path, text: str):
    """Tokens in a line may be those of another tokenizer."""
    file = tmp_path / "in.jsonl"
    file.write_text(json.dumps({"prompt": PROMPT, "prompt_token_ids": [5]}), encoding="utf-8")
    result = specpilot("generate", "--demo", "--max-tokens", "12", "--input-jsonl", file)
    assert json.loads(result.stdout)["text"] == text
    file.write_text('{"prompt": null}', encoding="utf-8")
    assert "line 1: expected `prompt` or" in error_of("generate", "--demo", "--input-jsonl", file)


def test_a_bad_line_among_many_is_named(tmp_path: Path):
    file = tmp_path / "in.jsonl"
    file.write_text('{"prompt": "a"}\n{"prompt_token_ids": [99999]}\n', encoding="utf-8")
    assert "prompt 1: prompt token 0" in error_of("generate", "--demo", "--input-jsonl", file)


def test_options_reach_the_engine(tmp_path: Path):
    assert "max_num_seqs" in error_of("generate", "--demo", "--max-num-seqs", "0", "x")
    assert "dtype" in error_of("generate", "--demo", "--dtype", "float8", "x")
    assert "dtype" in error_of("chat", "--demo", "--dtype", "float8")
    for command in ("generate", "chat"):
        assert "tokenizer.json" in error_of(command, "--demo", "--tokenizer", tmp_path)


def test_chat_keeps_the_conversation():
    turns = b"How many are 3 and 4?\nAnd 5?\n/reset\nHow many are 3 and 4?\n/exit\nnever read\n"
    result = specpilot("chat", "--demo", "--json", "--max-tokens", "8", stdin=turns)
    assert result.returncode == 0, result.stderr
    first, second, again = (json.loads(line) for line in result.stdout.splitlines())
    assert first["role"] == "assistant"
    assert len(second["prompt_token_ids"]) > len(first["prompt_token_ids"]) + len(first["token_ids"])
    assert (again["prompt_token_ids"], again["text"]) == (first["prompt_token_ids"], first["text"])
    spoken = specpilot("chat", "--demo", "--max-tokens", "8", stdin=b"How many are 3 and 4?\n")
    assert spoken.stdout.decode() == first["text"] + "\n"


def test_doctor():
    healthy = specpilot("doctor", TARGET_DIR)
    assert healthy.returncode == 0, healthy.stdout
    assert b"OK   weights: 108 tensors" in healthy.stdout
    findings = json.loads(specpilot("doctor", "--json").stdout)
    assert {finding["level"] for finding in findings} <= {"OK", "WARN"}


def test_doctor_finds_what_is_wrong(tmp_path: Path):
    for name in ("config.json", "model.safetensors.index.json", "model-00001-of-00002.safetensors"):
        (tmp_path / name).write_bytes((TARGET_DIR / name).read_bytes())
    (tmp_path / "model-00002-of-00002.safetensors").write_bytes(b"\x08\0\0\0")
    result = specpilot("doctor", tmp_path)
    assert result.returncode == 1
    assert b"FAIL weights: " in result.stdout
    assert b"model-00002-of-00002.safetensors: not a valid safetensors file" in result.stdout
    assert b"fix: " in result.stdout
    assert b"FAIL tokenizer" in result.stdout
    assert specpilot("doctor", tmp_path / "nothing").returncode == 1


def weights(header: object, num_data_bytes: int = 0) -> bytes:
    data = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(data).to_bytes(8, "little") + data + bytes(num_data_bytes)


@pytest.mark.parametrize(
    ("name", "content", "part"),
    [
        ("config.json", b"[" * 50000, "recursion"),
        ("config.json", b"[]", "should be an object"),
        ("config.json", b"\xff", "not valid JSON"),
        ("config.json", b'{"architectures": 5}', "should be an array"),
        ("config.json", rb'{"architectures": ["\ud800"]}', "not valid JSON"),
        ("config.json", b'{"architectures": ["MambaForCausalLM"]}', "not supported"),
        ("model.safetensors", weights([]), "not a valid safetensors file"),
        ("model.safetensors", weights(None), "not a valid safetensors file"),
        ("model.safetensors", weights({"a": 5}), "not a valid safetensors file"),
        ("model.safetensors", weights({"a": {"dtype": "BF16", "data_offsets": ["x", 1]}}), "not a valid"),
        ("model.safetensors", weights({"a": {"dtype": "BF16", "data_offsets": [0]}}), "not a valid"),
        ("model.safetensors", weights({"\ud800": {}}), "not a valid safetensors file"),
        ("model.safetensors", weights(b"[" * 50000), "not a valid safetensors file"),
        ("model.safetensors.index.json", b'{"weight_map": 5}', "expected a map"),
        ("model.safetensors.index.json", b'{"weight_map": {"a": "../b"}}', "beside the index"),
    ],
    ids=lambda value: ascii(value)[:50],
)
def test_doctor_outlives_damaged_files(tmp_path: Path, name: str, content: bytes, part: str):
    (tmp_path / name).write_bytes(content)
    fails = [f for f in doctor.examine(tmp_path) if f.level is doctor.Level.FAIL]
    assert any(part in finding.message for finding in fails), fails


def test_doctor_waits_for_no_pipe_and_prefers_the_single_file(tmp_path: Path):
    os.mkfifo(tmp_path / "config.json")
    (tmp_path / "model.safetensors.index.json").write_bytes(b"damaged")
    (tmp_path / "model.safetensors").write_bytes(
        weights({"\ud800": {"dtype": "F16", "data_offsets": [0, 0]}})
    )
    result = specpilot("doctor", tmp_path)
    assert result.returncode == 1, result.stderr
    assert b"expected a regular file" in result.stdout
    assert b"model.safetensors: not a valid safetensors file" in result.stdout


def test_doctor_knows_the_architectures_that_loading_does(tmp_path: Path):
    (tmp_path / "config.json").write_text('{"architectures": ["MambaForCausalLM"]}', encoding="utf-8")
    fix = next(f.fix for f in doctor.examine(tmp_path) if f.what == "config.json")
    assert fix is not None
    with pytest.raises(SpecPilotError, match=", ".join(_core.TARGET_ARCHITECTURES)) as target:
        LLM(tmp_path, skip_tokenizer_init=True)
    assert str(target.value).rpartition("supported: ")[2].split(" or ")[0] in fix
    (tmp_path / "model.safetensors").write_bytes(weights({}))
    with pytest.raises(SpecPilotError, match=", ".join(_core.DRAFTER_ARCHITECTURES)):
        LLM.demo(speculative_config={"model": tmp_path})
    assert ", ".join(_core.DRAFTER_ARCHITECTURES) in fix


@pytest.mark.parametrize("drafter", [DFLASH2_DIR, *(DEMO / name for name in ("dflash", "dspark", "eagle3"))])
def test_doctor_misses_no_tokenizer_in_a_drafter(drafter: Path):
    findings = {finding.what: finding for finding in doctor.examine(drafter)}
    assert {finding.level for finding in findings.values()} == {doctor.Level.OK}, findings
    assert "target's" in findings["tokenizer"].message
    assert "drafter" in findings["config.json"].message
    assert "chat template" not in findings


def hub_cache(root: Path, files: dict[str, bytes]) -> dict[str, str]:
    """A hub cache with one repository, and the environment in which it is all there is."""
    commit = "0123456789abcdef0123456789abcdef01234567"
    repository = root / "models--some-org--some-model"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(commit, encoding="utf-8")
    snapshot = repository / "snapshots" / commit
    snapshot.mkdir(parents=True)
    for name, content in files.items():
        (snapshot / name).write_bytes(content)
    return {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HUB_CACHE": str(root), "HF_HOME": str(root)}


def test_doctor_takes_hub_ids(tmp_path: Path):
    names = ("config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors.index.json")
    files = {name: (TARGET_DIR / name).read_bytes() for name in names}

    def examined(model: str) -> tuple[int, str]:
        result = subprocess.run(
            [sys.executable, "-m", "specpilot_rs.cli", "doctor", model],
            env=environment,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        return result.returncode, result.stdout

    environment = hub_cache(tmp_path / "some", files)
    code, lines = examined("some-org/some-model")
    assert code == 0, lines
    assert "OK   config.json: Qwen3_5ForCausalLM" in lines
    assert "OK   weights: not all downloaded yet" in lines
    code, lines = examined("some-org/other-model")
    assert code == 1
    assert "FAIL checkpoint: some-org/other-model: no such local directory, not in the hub's cache" in lines
    shards = {file.name: file.read_bytes() for file in TARGET_DIR.glob("*.safetensors")}
    environment = hub_cache(tmp_path / "whole", {**files, **shards})
    assert "OK   weights: 108 tensors" in examined("some-org/some-model")[1]


def test_errors_are_one_line(tmp_path: Path):
    (tmp_path / "bad.txt").write_bytes(b"ab\xff")
    (tmp_path / "bad.jsonl").write_text('{"prompt": "x"}\n{"promt": "y"}\n', encoding="utf-8")
    (tmp_path / "worse.jsonl").write_text("{\n", encoding="utf-8")
    (tmp_path / "empty.jsonl").write_text("\n", encoding="utf-8")
    demo = ("generate", "--demo")
    assert "--max-tokens" in error_of(*demo, "--max-tokns", "3", "x")
    assert "No such command" in error_of("generte")
    assert "--demo" in error_of("generate", "x")
    assert "--demo" in error_of("generate", "--demo", "--model", TARGET_DIR, "x")
    assert "expected UTF-8, got byte 0xff at offset 2" in error_of(*demo, "--file", tmp_path / "bad.txt")
    assert "stdin: expected UTF-8" in error_of(*demo, stdin=b"\xff")
    assert "No such file" in error_of(*demo, "--file", tmp_path / "none.txt")
    assert "line 2" in error_of(*demo, "--input-jsonl", tmp_path / "bad.jsonl")
    assert "not valid JSON" in error_of(*demo, "--input-jsonl", tmp_path / "worse.jsonl")
    assert "no prompts" in error_of(*demo, "--input-jsonl", tmp_path / "empty.jsonl")
    assert "empty" in error_of(*demo, "")
    assert "max_tokens" in error_of(*demo, "--max-tokens", "0", "x")
    assert "did you mean `chain`" in error_of(*demo, "--tree", "chian", "x")
    assert "--no-speculation" in error_of(*demo, "--no-speculation", "--tree", "chain", "x")
    twice = error_of(*demo, "--tree", "chain", "--speculative-config", '{"tree": "spine"}', "x")
    assert "`tree` is given by its flag" in twice
    assert "--speculative-config" in error_of(*demo, "--speculative-config", "[1]", "x")
    assert "did you mean `q_passes`" in error_of(*demo, "--speculative-config", '{"q_pass": 1}', "x")
    assert "no such directory" in error_of("generate", "--model", tmp_path / "nothing", "x")
    assert "does not exist" in error_of(*demo, "--output-jsonl", tmp_path / "no" / "out.jsonl", "x")
    assert "one of" in error_of(*demo, "--file", tmp_path / "bad.txt", "x")
    assert "JSON object" in error_of("chat", "--demo", "--chat-template-kwargs", "3")


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["generate", "--demo", "x", "--output-jsonl", ""], "directory"),
        (["generate", "--demo", "x", "--output-jsonl", "."], "directory"),
        (["generate", "--demo", "x", "--output-jsonl", "/"], "directory"),
        (["generate", "--demo", "x", "--output-jsonl", "n" * 300], "too long"),
        (["generate", "--demo", "x", "--max-tokens", str(2**64)], "max_tokens"),
        (["generate", "--model", "~nouser/x", "x"], "~nouser"),
        (["chat", "--demo", "--chat-template-kwargs", "[" * 50000], "not valid JSON"),
    ],
    ids=lambda value: str(value)[-20:],
)
def test_odd_arguments_are_one_line_errors(arguments: list[str], part: str):
    assert part in error_of(*arguments)


def test_odd_json_lines(tmp_path: Path):
    (tmp_path / "deep.jsonl").write_text("[" * 50000, encoding="utf-8")
    assert "not valid JSON" in error_of("generate", "--demo", "--input-jsonl", tmp_path / "deep.jsonl")
    (tmp_path / "half.jsonl").write_text('{"id": "\\ud83d", "prompt": "x"}', encoding="utf-8")
    result = specpilot("generate", "--demo", "--input-jsonl", tmp_path / "half.jsonl")
    assert json.loads(result.stdout)["id"] == "\ud83d"


@pytest.mark.parametrize("command", ["generate", "chat"])
def test_a_closed_stdin_is_an_error(command: str):
    result = subprocess.run(
        ["sh", "-c", f'"{sys.executable}" -m specpilot_rs.cli {command} --demo <&-'],
        capture_output=True,
        timeout=300,
        check=False,
    )
    assert (result.returncode, result.stderr.count(b"\n")) == (2, 1)
    assert result.stderr.startswith(b"error: stdin")


def test_results_keep_what_they_are_written_over(tmp_path: Path):
    real, link, fifo = tmp_path / "real.jsonl", tmp_path / "link.jsonl", tmp_path / "fifo"
    real.write_text("old", encoding="utf-8")
    real.chmod(0o640)
    link.symlink_to(real)
    with writing(writable(link)) as lines:
        lines.write(b"new")
    assert (real.read_bytes(), real.stat().st_mode & 0o777, link.is_symlink()) == (b"new", 0o640, True)
    os.mkfifo(fifo)
    reader = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    try:
        with writing(writable(fifo)) as lines:
            lines.write(b"piped")
        assert (os.read(reader, 99), fifo.is_fifo()) == (b"piped", True)
    finally:
        os.close(reader)
    assert writable(Path("/dev/null")) == Path("/dev/null")
    assert len(list(tmp_path.iterdir())) == 3


@pytest.mark.parametrize("error", [KeyboardInterrupt(), ZeroDivisionError("bug"), RecursionError("deep")])
def test_whatever_is_raised_ends_in_an_exit_code(
    error: BaseException, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(cli.generate_command, "open_llm", fail)
    monkeypatch.setattr(sys, "argv", ["specpilot", "generate", "--demo", "x"])
    with pytest.raises(SystemExit) as end:
        cli.main()
    stderr = capsys.readouterr().err
    if isinstance(error, KeyboardInterrupt):
        assert (end.value.code, stderr.strip()) == (130, "")
    else:
        assert (end.value.code, stderr) == (2, f"error: {type(error).__name__}: {error}\n")


def test_an_argument_that_is_not_utf8():
    result = subprocess.run(
        [os.fsencode(sys.executable), b"-m", b"specpilot_rs.cli", b"generate", b"--demo", b"ab\xff"],
        capture_output=True,
        timeout=300,
        check=False,
    )
    assert result.returncode == 2
    assert result.stderr.startswith(b"error: the prompt is not valid Unicode")


def test_a_reader_that_leaves_early_is_no_error():
    process = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "specpilot_rs.cli",
            "generate",
            "--demo",
            "--stream",
            "--max-tokens",
            "400",
            PROMPT,
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None
    process.stdout.read(1)
    process.stdout.close()
    assert process.stderr is not None
    with process.stderr:
        assert b"Traceback" not in process.stderr.read()
    process.wait(timeout=120)


def test_sampling_options_are_those_of_the_api(demo_llm: LLM):
    params = SamplingParams(max_tokens=12, temperature=0.9, top_p=0.95, top_k=50, min_p=0.01, seed=4)
    want = demo_llm.generate(PROMPT, params)[0].outputs[0].text
    options = ("--max-tokens", 12, "--temperature", 0.9, "--top-p", 0.95, "--top-k", 50, "--min-p", 0.01)
    result = specpilot("generate", "--demo", *map(str, options), "--seed", "4", PROMPT)
    assert result.stdout.decode() == want + "\n"
    conversation = [{"role": "user", "content": "What is 2 + 3?"}]
    answer = demo_llm.chat(conversation, params)[0].outputs[0].text
    result = specpilot(
        "chat", "--demo", "--json", *map(str, options), "--seed", "4", stdin=b"What is 2 + 3?\n"
    )
    assert json.loads(result.stdout)["content"] == answer
    assert "temperature" in error_of("generate", "--demo", "--temperature", "-1", PROMPT)
