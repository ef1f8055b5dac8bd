"""`convert` and `inspect`: files, command lines, and runs that end early."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from specpilot_rs import _core
from specpilot_rs.convert import convert
from specpilot_rs.demo import DFLASH2_DIR, TARGET_DIR
from specpilot_rs.errors import CheckpointError, ConfigError, OptionError
from specpilot_rs.weight_report import inspect, table

from .conftest import FIXTURES
from .w12_oracle import encode

SHARDS = ["model-00001-of-00002.w12.safetensors", "model-00002-of-00002.w12.safetensors"]
DTYPES = {"U8": np.uint8, "U16": np.uint16, "U32": np.uint32, "BF16": np.uint16, "F32": np.float32}


def read_shard(file: Path) -> tuple[dict[str, str], dict[str, np.ndarray]]:
    """Metadata and tensors of a safetensors file, by the format's definition alone; BF16 comes as bits."""
    data = file.read_bytes()
    begin = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:begin])
    metadata = header.pop("__metadata__", {})
    tensors = {}
    for name, entry in header.items():
        first, end = entry["data_offsets"]
        values = np.frombuffer(data[begin + first : begin + end], DTYPES[entry["dtype"]])
        tensors[name] = values.reshape(entry["shape"])
    return metadata, tensors


def read_directory(directory: Path) -> dict[str, np.ndarray]:
    return {
        name: tensor
        for file in sorted(directory.glob("*.safetensors"))
        for name, tensor in read_shard(file)[1].items()
    }


def digests(directory: Path) -> dict[str, str]:
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in directory.iterdir()}


def specpilot(*arguments: str | Path, **options: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "specpilot_rs.cli", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, **options)


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("convert") / "target-w12"
    result = specpilot("convert", TARGET_DIR, out, "--weight-format", "w12")
    assert result.returncode == 0, result.stderr
    assert "50 of 108 tensors in W12" in result.stdout
    assert "12 linear layers stay BF16" in result.stderr
    return out


def test_another_reader_finds_what_another_encoder_makes(converted: Path) -> None:
    source = read_directory(TARGET_DIR)
    index = json.loads((converted / "model.safetensors.index.json").read_bytes())
    assert sorted(set(index["weight_map"].values())) == SHARDS
    seen = set()
    for shard in SHARDS:
        metadata, tensors = read_shard(converted / shard)
        assert {name for name, file in index["weight_map"].items() if file == shard} == set(tensors)
        assert metadata["w12_format_version"] == "1"
        for name, record in json.loads(metadata["w12_source_tensors"]).items():
            seen.add(name)
            assert record["shape"] == list(source[name].shape)
            assert record["sha256"] == hashlib.sha256(source[name].tobytes()).hexdigest()
            if name in tensors:
                np.testing.assert_array_equal(tensors[name].view(np.uint8), source[name].view(np.uint8))
                continue
            for part, expected in encode(source[name]).items():
                np.testing.assert_array_equal(tensors[f"{name}.w12_{part}"].reshape(-1), expected)
    assert seen == set(source)


def test_what_is_not_weights_is_copied(converted: Path) -> None:
    for name in ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"):
        assert (converted / name).read_bytes() == (TARGET_DIR / name).read_bytes()
    assert sorted(p.name for p in converted.parent.iterdir()) == [converted.name]
    result = specpilot("doctor", converted)
    assert result.returncode == 0, result.stdout
    assert "weights: 108 tensors" in result.stdout


def test_every_linear_layer_that_pays_is_converted(converted: Path) -> None:
    rows = {row["name"]: row for row in inspect(converted)}
    for name, row in rows.items():
        parts = name.split(".")
        is_linear = "layers" in parts and (parts[-2].endswith("_proj") or "in_proj" in parts[-2])
        num_bytes = row["source_bytes"]
        if is_linear and num_bytes > 2 * 2 * 256:
            assert row["format"] == "w12", name
            assert 0.75 * num_bytes < row["bytes"] < 0.77 * num_bytes
            assert 12 < row["bits_per_weight"] < 12.3
        else:
            assert row["format"] in ("bf16", "f32")
            assert (row["bytes"], row["escapes"]) == (num_bytes, 0)
    assert sum(row["escapes"] for row in rows.values()) > 0


def test_inspect_as_json(converted: Path) -> None:
    result = specpilot("inspect", converted, "--json")
    assert result.returncode == 0, result.stderr
    tensors = json.loads(result.stdout)["tensors"]
    assert len(tensors) == 108
    for row in tensors:
        assert row.keys() == {"name", "format", "bits_per_weight", "escapes", "bytes", "source_bytes"}
    before = json.loads(specpilot("inspect", TARGET_DIR, "--json").stdout)["tensors"]
    assert [row["name"] for row in before] == [row["name"] for row in tensors]
    assert all(row["bytes"] == row["source_bytes"] for row in before)
    assert [row["source_bytes"] for row in before] == [row["source_bytes"] for row in tensors]
    fp8 = inspect(FIXTURES / "families" / "qwen3_5_fp8")
    assert {row["format"] for row in fp8} == {"fp8", "bf16"}
    assert {row["bits_per_weight"] for row in fp8 if row["format"] == "fp8"} == {8.0}


def test_inspect_as_a_table(converted: Path) -> None:
    lines = specpilot("inspect", converted / SHARDS[1]).stdout.splitlines()
    rows = inspect(converted / SHARDS[1])
    assert lines == list(table(rows))
    assert lines[0].split() == [
        "tensor",
        "format",
        "escapes",
        "bits/weight",
        "bytes",
        "before",
        "bytes",
        "after",
    ]
    total = sum(row["bytes"] for row in rows)
    assert lines[-1].split()[-1] == f"{total:,}"
    assert any(line.startswith("total w12") for line in lines)


def test_inspect_of_nothing(tmp_path: Path) -> None:
    for path, message in (
        (tmp_path / "absent", "no such file"),
        (tmp_path, "expected model.safetensors"),
        (TARGET_DIR / "config.json", "not a valid safetensors file"),
    ):
        result = specpilot("inspect", path)
        assert (result.returncode, result.stdout) == (2, "")
        assert message in result.stderr


def test_a_drafter_is_converted_too(tmp_path: Path) -> None:
    made = convert(DFLASH2_DIR, tmp_path / "dflash2")
    formats = {row["name"]: row["format"] for row in inspect(made.directory)}
    assert formats["fc.weight"] == "w12"
    assert formats["layers.1.mlp.down_proj.weight"] == "w12"
    assert formats["candidate_selector.predecessor_codebook"] == "bf16"
    assert made.num_w12 == sum(name == "w12" for name in formats.values())


def test_progress_and_summary(tmp_path: Path) -> None:
    told: list[tuple[Any, ...]] = []
    summary = _core.convert_weights(TARGET_DIR, tmp_path / "out", lambda *progress: told.append(progress))
    names, done, total, num_bytes, bytes_total = zip(*told, strict=True)
    assert names[-1] == ""
    assert set(names[:-1]) == set(read_directory(TARGET_DIR))
    assert list(done) == sorted(done)
    assert (done[0], done[-1], set(total)) == (0, 108, {108})
    assert list(num_bytes) == sorted(num_bytes)
    assert num_bytes[-1] == bytes_total[0] == summary["source_bytes"]
    assert summary["bytes"] < summary["source_bytes"]
    assert (summary["num_shards_written"], summary["num_shards_found"]) == (2, 0)


def test_an_exception_in_progress_stops_and_the_next_run_goes_on(converted: Path, tmp_path: Path) -> None:
    class EnoughError(Exception):
        pass

    def stop_late(_name: str, done: int, *_: int) -> None:
        if done == 106:
            raise EnoughError

    out = tmp_path / "out"
    with pytest.raises(EnoughError):
        _core.convert_weights(TARGET_DIR, out, stop_late)
    assert not out.exists()
    made = convert(TARGET_DIR, out)
    assert (made.num_shards_found, made.num_shards_written) == (1, 1)
    assert digests(out) == digests(converted)


KILLED = """
import os, signal, sys
from specpilot_rs import _core
signal.signal(signal.SIGINT, signal.default_int_handler)  # whatever the shell left
def tell(name, done, *_):
    if done == int(sys.argv[4]):
        os.kill(os.getpid(), getattr(signal, sys.argv[3]))
_core.convert_weights(sys.argv[1], sys.argv[2], tell)
"""


@pytest.mark.parametrize(("name", "at"), [("SIGKILL", 0), ("SIGKILL", 50), ("SIGKILL", 107), ("SIGINT", 50)])
def test_a_killed_run_leaves_only_temporary_names(
    name: str, at: int, converted: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    arguments = [sys.executable, "-c", KILLED, str(TARGET_DIR), str(out), name, str(at)]
    result = subprocess.run(arguments, capture_output=True, text=True, timeout=300, check=False)
    assert result.returncode == -signal.Signals[name], result.stderr
    assert ("KeyboardInterrupt" in result.stderr) == (name == "SIGINT")
    assert [path.name for path in tmp_path.iterdir()] == ["out.partial"]
    names = {path.name for path in (tmp_path / "out.partial").iterdir()}
    unfinished = {path for path in names if path.startswith(".")}
    assert names - unfinished <= set(SHARDS)
    result = specpilot("convert", TARGET_DIR, out, "--json")
    assert result.returncode == 0, result.stderr
    made = json.loads(result.stdout)
    assert made["num_shards_found"] == len(names - unfinished)
    assert digests(out) == digests(converted)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


INTERRUPTED = """
import os, signal, sys
from specpilot_rs import cli, convert
signal.signal(signal.SIGINT, signal.default_int_handler)  # whatever the shell left
real = convert.convert_weights
def interrupt(source, out, update):
    def tell(name, done, *rest):
        update(name, done, *rest)
        if done == 50:
            os.kill(os.getpid(), signal.SIGINT)
    return real(source, out, tell)
convert.convert_weights = interrupt
cli.main()
"""


def test_ctrl_c_says_what_is_left_and_how_to_go_on(tmp_path: Path) -> None:
    out = tmp_path / "out"
    arguments = [sys.executable, "-c", INTERRUPTED, "convert", str(TARGET_DIR), str(out)]
    result = subprocess.run(arguments, capture_output=True, text=True, timeout=300, check=False)
    assert result.returncode == 130
    assert result.stderr == f"stopped; what is done is in {out}.partial, and the same command goes on there\n"


LIMITED = """
import resource, sys
from specpilot_rs.cli import main
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv.pop(1)),) * 2)
main()
"""


@pytest.mark.parametrize("num_bytes", [1_000, 1_000_000, 9_000_000])
def test_a_full_disk_is_told_and_leaves_nothing_half_written(
    num_bytes: int, converted: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    arguments = [sys.executable, "-c", LIMITED, str(num_bytes), "convert", str(TARGET_DIR), str(out)]
    result = subprocess.run(arguments, capture_output=True, text=True, timeout=300, check=False)
    assert result.returncode == 2, result.stderr
    assert result.stderr.startswith("error: ")
    assert "File too large" in result.stderr
    assert not out.exists()
    assert {p.name for p in (tmp_path / "out.partial").iterdir()} <= {".conversion"}
    convert(TARGET_DIR, out)
    assert digests(out) == digests(converted)


def test_a_place_that_is_taken_is_refused(converted: Path, tmp_path: Path) -> None:
    before = digests(converted)
    result = specpilot("convert", TARGET_DIR, converted)
    assert result.returncode == 2
    assert "a W12 checkpoint already" in result.stderr
    assert digests(converted) == before
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(CheckpointError, match=r"notes\.txt"):
        convert(TARGET_DIR, tmp_path)
    with pytest.raises(CheckpointError, match="other files"):
        convert(TARGET_DIR, TARGET_DIR)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_what_cannot_be_converted_is_refused(converted: Path, tmp_path: Path) -> None:
    families = FIXTURES / "families"
    with pytest.raises(CheckpointError, match="W12 already"):
        convert(converted, tmp_path / "out")
    with pytest.raises(CheckpointError, match="F8_E4M3"):
        convert(families / "qwen3_5_fp8", tmp_path / "out")
    with pytest.raises(ConfigError, match=r"config\.json"):
        convert(FIXTURES / "prompts", tmp_path / "out")
    with pytest.raises(OptionError, match="'w13'"):
        convert(TARGET_DIR, tmp_path / "out", "w13")
    with pytest.raises(CheckpointError, match="no such directory"):
        convert(tmp_path / "absent", tmp_path / "out")
    assert not list(tmp_path.iterdir())
    assert "empty name" in specpilot("convert", TARGET_DIR, "", cwd=tmp_path).stderr
    assert not list(tmp_path.iterdir())


def test_a_directory_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="file"):
        convert(TARGET_DIR, tmp_path / "file" / "out")


@pytest.mark.skipif(not hasattr(os, "symlink"), reason="needs links")
def test_links_of_a_hub_cache_are_followed(converted: Path, tmp_path: Path) -> None:
    snapshot = tmp_path / "snapshot"
    snapshot.mkdir()
    for file in TARGET_DIR.iterdir():
        (snapshot / file.name).symlink_to(file)
    convert(snapshot, tmp_path / "out")
    assert digests(tmp_path / "out") == digests(converted)
    assert not any(path.is_symlink() for path in (tmp_path / "out").iterdir())


def test_a_mounted_file_system_is_refused_before_any_work(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    script = 'mount -t tmpfs none "$1" || exit 77; "$2" -m specpilot_rs.cli convert "$3" "$1"'
    command = ["unshare", "-rm", "sh", "-c", script, "sh", out, sys.executable, TARGET_DIR]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    except FileNotFoundError:
        pytest.skip("needs unshare")
    if result.returncode in (1, 77):
        pytest.skip(f"mounting is not allowed here: {result.stderr}")
    assert result.returncode == 2
    assert "a mounted file system" in result.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
