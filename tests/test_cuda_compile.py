"""Every kernel compiles for every architecture, hot ones without spills; damaged cache files are rebuilt."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
from specpilot_rs import DeviceError, _core, _cuda
from specpilot_rs.cli import app
from typer.testing import CliRunner

ARCHES = ["sm_80", "sm_90a", "sm_120"]


def has_compiler() -> bool:
    _cuda.preload()
    try:
        _core.cuda_compiler_version()
    except DeviceError:
        return False
    return True


needs_compiler = pytest.mark.skipif(not has_compiler(), reason="NVRTC is not installed")


def compile_for(arch: str, folder: Path) -> list[dict[str, Any]]:
    _cuda.preload()
    return _core.compile_kernels([arch], folder)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A user's cache folder, as `SPECPILOT_CACHE_DIR` names it; kernels lie in its `cubin`."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def compiled(cache: Path) -> dict[str, list[dict[str, Any]]]:
    """What the compiler said for each architecture."""
    return {arch: compile_for(arch, cache / "cubin") for arch in ARCHES}


@needs_compiler
@pytest.mark.parametrize("arch", ARCHES)
def test_kernels_compile_and_hot_ones_spill_nothing(
    arch: str, compiled: dict[str, list[dict[str, Any]]], cache: Path
) -> None:
    assert {kernel["stem"] for kernel in compiled[arch]} == {file.stem for file in Path("cuda").glob("*.cu")}
    for kernel in compiled[arch]:
        assert not kernel["was_cached"]
        spills = re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill loads", kernel["log"])
        assert spills, "the compiler says what it did with registers"
        if kernel["is_hot"]:
            assert set(spills) == {("0", "0")}, kernel["log"]
    again = compile_for(arch, cache / "cubin")
    assert all(kernel["was_cached"] for kernel in again)


@needs_compiler
@pytest.mark.usefixtures("compiled")
def test_a_damaged_file_is_rebuilt(cache: Path) -> None:
    (file,) = (cache / "cubin").glob("rms_norm-sm_90a-*.cubin")
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) // 2])
    built = {kernel["stem"]: kernel["was_cached"] for kernel in compile_for("sm_90a", cache / "cubin")}
    assert built["rms_norm"] is False
    assert built["w12_matmul"] is True
    assert file.read_bytes() == whole
    assert not list((cache / "cubin").glob("*.tmp"))


@needs_compiler
@pytest.mark.usefixtures("compiled")
def test_precompile_fills_the_cache(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (missing,) = (cache / "cubin").glob("append_kv-sm_90a-*.cubin")
    missing.unlink()
    monkeypatch.setenv("SPECPILOT_CACHE_DIR", str(cache))
    result = CliRunner().invoke(app, ["precompile", "--arch", "sm_90a", "--json"])
    assert result.exit_code == 0, result.output
    states = {kernel["stem"]: kernel["was_cached"] for kernel in json.loads(result.stdout)}
    assert states.keys() == {file.stem for file in Path("cuda").glob("*.cu")}
    assert [stem for stem, was_cached in states.items() if not was_cached] == ["append_kv"]
    assert missing.is_file()


@needs_compiler
@pytest.mark.usefixtures("compiled")
def test_kernels_compile_to_text_where_it_is_asked_for(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It lies beside machine code, never in its place; what is raised on the way ends the work."""
    folder = cache / "cubin"
    before = {file.name for file in folder.iterdir()}
    ready: list[str] = []

    def stop_after_one(stem: str, arch: str, num_ready: int, num_kernels: int) -> None:
        assert (arch, num_ready) == ("sm_90a", 1)
        assert num_kernels == len(list(Path("cuda").glob("*.cu")))
        ready.append(stem)
        raise InterruptedError

    monkeypatch.setenv("SPECPILOT_KERNEL_CODE", "ptx")
    with pytest.raises(InterruptedError):
        _core.compile_kernels(["sm_90a"], folder, stop_after_one)
    (stem,) = ready
    added = {file.name for file in folder.iterdir()} - before
    assert added
    # What had begun is done; with a core for each kernel that may be all.
    if (os.cpu_count() or 1) < 16:
        assert len(added) < len(list(Path("cuda").glob("*.cu")))
    files = {file.suffix: file.read_bytes() for file in folder.glob(f"{stem}-sm_90a-*")}
    assert files.keys() == {".ptx", ".cubin"}
    # Behind a checksum.
    text = files[".ptx"][32:]
    assert b".target sm_90a" in text
    assert text.endswith(b"\0")
    assert files[".cubin"][32:].startswith(b"\x7fELF")
    monkeypatch.setenv("SPECPILOT_KERNEL_CODE", "sass")
    with pytest.raises(DeviceError, match='form "sass": expected SPECPILOT_KERNEL_CODE to be cubin or ptx'):
        _core.compile_kernels(["sm_90a"], folder)


def test_an_unknown_architecture_is_refused() -> None:
    with pytest.raises(DeviceError, match="no kernels for sm_70: expected one of sm_80, sm_90a, sm_120"):
        _core.compile_kernels(["sm_70"])


@pytest.fixture
def compiled_for(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """A machine with one GPU; what kernels are compiled for there."""
    calls: list[list[str]] = []
    monkeypatch.setattr(_core, "cuda_gpus", lambda: [{"name": "A GPU", "arch": "sm_90a"}])
    monkeypatch.setattr(_core, "compile_kernels", lambda arches, **_: calls.append(arches))
    monkeypatch.setattr(_core, "cuda_compiler_version", lambda: (13, 0))
    return calls


@pytest.mark.parametrize(
    ("device", "expected"), [("auto", [["sm_90a"]]), ("cuda:0", [["sm_90a"]]), ("cuda:1", []), ("cpu", [])]
)
def test_kernels_are_compiled_for_the_gpu_that_is_used(
    device: str, expected: list[list[str]], compiled_for: list[list[str]]
) -> None:
    _cuda.prepare(device)
    assert compiled_for == expected


def test_auto_leaves_a_gpu_without_a_compiler_alone(
    compiled_for: list[list[str]], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """README's commands install no compiler, and must work beside a GPU too."""

    def is_missing() -> None:
        raise DeviceError("NVRTC was not found; install it with: pip install 'specpilot-rs[cuda]'")

    monkeypatch.setattr(_core, "cuda_compiler_version", is_missing)
    _cuda.prepare("auto")
    assert not compiled_for
    assert "A GPU is left alone: NVRTC was not found" in caplog.text
    with pytest.raises(DeviceError, match="specpilot-rs"):
        _cuda.prepare("cuda:0")


@pytest.mark.skipif(Path("/dev/nvidiactl").exists(), reason="there is a driver")
def test_a_machine_without_gpus_says_so() -> None:
    with pytest.raises(DeviceError, match=r"no CUDA driver: .*; install NVIDIA's driver or use device"):
        _core.num_cuda_devices()
