"""Model files: a directory touches no network, the cache serves offline, all else is a typed error."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from specpilot_rs import LLM
from specpilot_rs.demo import TARGET_DIR
from specpilot_rs.errors import CheckpointError, OptionError
from specpilot_rs.hub import model_directory

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("the network was touched")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


@pytest.mark.usefixtures("no_network")
def test_a_directory_touches_no_network(monkeypatch: pytest.MonkeyPatch):
    assert model_directory(TARGET_DIR) == TARGET_DIR.resolve()
    monkeypatch.chdir(TARGET_DIR.parent)
    assert model_directory("target") == TARGET_DIR.resolve()


@pytest.mark.usefixtures("no_network")
def test_a_revision_of_a_directory_is_refused():
    with pytest.raises(OptionError, match="local directory"):
        model_directory(TARGET_DIR, "main")


@pytest.mark.usefixtures("no_network")
@pytest.mark.parametrize("name", ["", "./nowhere", "/no/where", "~/no/where", "a/b/c", "a\\b"])
def test_what_can_be_no_hub_id_is_no_such_directory(name: str):
    with pytest.raises(CheckpointError, match="no such directory"):
        model_directory(name)


@pytest.mark.usefixtures("no_network")
@pytest.mark.parametrize("name", ["~nouser/x", "n" * 5000, "a\0b", "./" + "n" * 300, "/proc/1/root\ud800/x"])
def test_an_impossible_name_is_a_typed_error(name: str):
    with pytest.raises((CheckpointError, OptionError)):
        model_directory(name)


@pytest.mark.usefixtures("no_network")
@pytest.mark.parametrize("name", [5, None, b"..", ["x"]])
def test_a_model_is_a_string_or_a_path(name: Any):
    with pytest.raises(OptionError, match="directory or a hub id"):
        LLM(name)
    if name is not None:
        with pytest.raises(OptionError, match="directory or a hub id"):
            LLM.demo(tokenizer=name)
    with pytest.raises(OptionError, match="`model`"):
        LLM.demo(model=name)


@pytest.mark.usefixtures("no_network")
@pytest.mark.parametrize("revision", [5, "\ud800", b"main"])
def test_a_revision_is_a_string(revision: Any):
    with pytest.raises(OptionError, match="`revision`"):
        model_directory("some-org/some-model", revision)


def test_an_unreadable_directory_is_an_error_of_the_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(os, "access", lambda *_: False)  # as root, no mode would refuse
    with pytest.raises(CheckpointError, match="Permission denied"):
        model_directory(tmp_path)


@pytest.mark.usefixtures("no_network")
def test_a_file_is_no_model():
    with pytest.raises(CheckpointError, match="got a file"):
        model_directory(TARGET_DIR / "config.json")


@pytest.mark.usefixtures("no_network")
def test_a_name_the_hub_does_not_allow():
    with pytest.raises(OptionError, match="neither a local directory nor a hub id"):
        model_directory("not a name")


def resolve_offline(cache: Path, name: str, revision: str | None = None) -> subprocess.CompletedProcess[str]:
    """Resolves in a fresh interpreter: the hub's library reads its environment when it is imported."""
    code = (
        "import sys\n"
        "from specpilot_rs.errors import SpecPilotError\n"
        "from specpilot_rs.hub import model_directory\n"
        "try:\n"
        "    print(model_directory(sys.argv[1], sys.argv[2] or None))\n"
        "except SpecPilotError as error:\n"
        "    print(type(error).__name__, error)\n"
    )
    return subprocess.run(
        [sys.executable, "-c", code, name, revision or ""],
        env={**os.environ, "HF_HUB_OFFLINE": "1", "HF_HUB_CACHE": str(cache), "HF_HOME": str(cache)},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )


def test_offline_and_not_cached_is_an_error_without_a_traceback(tmp_path: Path):
    result = resolve_offline(tmp_path, "some-org/some-model")
    assert result.stdout.startswith("CheckpointError some-org/some-model: no such local directory")


def test_offline_the_cache_serves(tmp_path: Path):
    repository = tmp_path / "models--some-org--some-model"
    snapshot = repository / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}", encoding="utf-8")
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(COMMIT, encoding="utf-8")
    assert Path(resolve_offline(tmp_path, "some-org/some-model").stdout.strip()) == snapshot
    assert Path(resolve_offline(tmp_path, "some-org/some-model", "main").stdout.strip()) == snapshot
    assert "CheckpointError" in resolve_offline(tmp_path, "some-org/some-model", "v2").stdout
