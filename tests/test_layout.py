"""House rules that a reader relies on: imports point down, kernels have their partners, files stay small."""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path

import pytest

from .cuda.emulated import CANNOT, LONG, PARTS
from .cuda.sanitizer import GROUPS

ROOT = Path(__file__).parent.parent
RUST = ROOT / "rust"

# Lower numbers lie deeper. A module imports only deeper ones and its own parts.
DEPTH = {
    "python": 9,
    "engine": 8,
    "plan": 7,
    "convert": 7,
    "scheduler": 6,
    "step": 5,
    "planted": 4.5,
    "drafter": 4,
    "model": 3,
    "weights": 2,
    "cache": 2,
    "kernels": 1.5,
    "device": 1,
    "stream": 0.5,
    "request": 0.4,
    "options": 0.4,
    "error": 0,
}
BANNED = {"util", "utils", "common", "misc", "helper", "helpers", "manager", "mixin", "base", "stuff"}
MAX_LINES = 600
SOURCES = sorted(
    path
    for folder in ("rust", "cuda", "python", "tests", "benches", "emulator")
    for path in (ROOT / folder).rglob("*")
    if path.suffix in {".rs", ".cu", ".cuh", ".py", ".pyi"}
)


def rust_code(file: Path) -> str:
    """Text of a Rust file without comments."""
    return re.sub(r"//[^\n]*|/\*.*?\*/", "", file.read_text(encoding="utf-8"), flags=re.DOTALL)


def top_module(file: Path) -> str:
    """The module right below the crate that a file belongs to."""
    return file.relative_to(RUST).parts[0].removesuffix(".rs")


def imported_modules(code: str) -> set[str]:
    """Modules right below the crate that code names, in `use` groups or in paths."""
    named = set(re.findall(r"\bcrate::(\w+)", code))
    for group in re.findall(r"\buse\s+crate::\{(.*?)\};", code, flags=re.DOTALL):
        flat = group
        while "{" in flat:
            flat = re.sub(r"\{[^{}]*\}", "", flat)
        named |= {match for item in flat.split(",") if (match := item.strip().split("::")[0].split(" ")[0])}
    return {
        name for name in named if name in DEPTH or (RUST / name).is_dir() or (RUST / f"{name}.rs").is_file()
    }


def test_imports_point_down():
    wrong = []
    for file in RUST.rglob("*.rs"):
        own = top_module(file)
        # Unit tests may stand on what lies above the code they test.
        if own == "lib" or file.name == "tests.rs":
            continue
        assert own in DEPTH, f"{file}: say in DEPTH where module `{own}` lies"
        for other in imported_modules(rust_code(file)) - {own}:
            assert other in DEPTH, f"{file}: say in DEPTH where module `{other}` lies"
            if DEPTH[other] >= DEPTH[own]:
                wrong.append(f"{file.relative_to(ROOT)}: `{own}` imports `{other}`")
    assert not wrong


def test_the_import_search_sees_every_form():
    code = "use crate::error::E; use crate::{device::{Buffer, Device}, kernels}; fn f() { crate::model::g() }"
    assert imported_modules(code) == {"error", "device", "kernels", "model"}


def test_only_the_binding_knows_python():
    wrong = [
        str(file.relative_to(ROOT))
        for file in RUST.rglob("*.rs")
        if top_module(file) != "python" and re.search(r"\bpyo3\b|\bnumpy::", rust_code(file))
    ]
    assert not wrong


def test_only_kernels_look_into_the_memory_of_the_host():
    """Everything above them asks a buffer for a copy, so that it works wherever the buffer lies."""
    looking = re.compile(r"\.host(?:_mut)?\(\)")
    wrong = [
        str(file.relative_to(ROOT))
        for file in RUST.rglob("*.rs")
        if top_module(file) not in ("kernels", "device")
        and file.name != "tests.rs"
        and file.parent.name != "kernels"
        and looking.search(rust_code(file))
    ]
    assert not wrong


def kernel_stems() -> list[str]:
    return sorted(
        file.stem
        for file in (RUST / "kernels").glob("*.rs")
        if re.search(r"\bimpl\s+Kernel\s+for\b", rust_code(file))
    )


def test_there_are_kernels():
    assert kernel_stems()


@pytest.mark.parametrize("stem", kernel_stems())
def test_a_kernel_has_its_test_and_bench(stem: str):
    bench_list = ROOT / "benches" / "kernels" / "main.rs"
    assert (ROOT / "tests" / "kernels" / f"test_{stem}.py").is_file()
    assert (ROOT / "benches" / "kernels" / f"{stem}.rs").is_file()
    assert re.search(rf"\bmod {stem};", bench_list.read_text(encoding="utf-8"))


@pytest.mark.parametrize("stem", sorted(file.stem for file in (ROOT / "cuda").glob("*.cu")) or [None])
def test_device_code_has_its_partners(stem: str | None):
    if stem is not None:
        assert stem in kernel_stems()


def test_kernel_tests_and_benches_have_their_kernel():
    stems = set(kernel_stems())
    tests = {file.stem.removeprefix("test_") for file in (ROOT / "tests" / "kernels").glob("test_*.py")}
    benches = {file.stem for file in (ROOT / "benches" / "kernels").glob("*.rs")} - {"main"}
    assert tests <= stems
    assert benches <= stems


def test_the_sanitizer_sees_every_kernel():
    assert {stem for group in GROUPS for stem in group.stems} == {
        file.stem for file in (ROOT / "cuda").glob("*.cu")
    }
    for group in GROUPS:
        code = (ROOT / "tests" / "cuda" / group.file).read_text(encoding="utf-8")
        absent = [test for test in group.tests if f"def {test.split('[')[0]}(" not in code]
        assert not absent, group.file


def test_every_test_of_a_gpu_is_emulated_or_named():
    """Small cases run everywhere; a test none of whose cases do is in a list that says why."""
    tests = {
        f"{file.name}::{name}"
        for file in (ROOT / "tests" / "cuda").glob("test_*.py")
        for name in re.findall(r"^def (test_\w+)", file.read_text(encoding="utf-8"), flags=re.MULTILINE)
    }
    run = {test.split("[")[0] for part in PARTS for test in part.tests}
    unable = {test for name in CANNOT for test in tests if test.startswith(name.split("[")[0])}
    assert run <= tests
    assert run.isdisjoint(LONG)
    assert tests == run | set(LONG) | unable


def test_files_stay_small():
    long = {
        str(path.relative_to(ROOT)): num_lines
        for path in SOURCES
        if (num_lines := len(path.read_text(encoding="utf-8").splitlines())) > MAX_LINES
    }
    assert not long


def test_names_say_something():
    files = [path for path in SOURCES if BANNED & set(re.split(r"[_.]", path.stem.lower()))]
    folders = {
        part for path in SOURCES for part in path.relative_to(ROOT).parts[:-1] if part.lower() in BANNED
    }
    types = [
        (path.name, name)
        for path in SOURCES
        for name in re.findall(
            r"^\s*(?:pub(?:\(\w+\))?\s+)?(?:struct|enum|trait|class)\s+(\w+)",
            path.read_text(encoding="utf-8"),
            flags=re.MULTILINE,
        )
        if BANNED & {word.lower() for word in re.findall(r"[A-Z][a-z0-9]+", name)}
    ]
    assert (files, folders, types) == ([], set(), [])


def test_nothing_is_left_to_do():
    # Spelt with a class, so that this file does not hold what it looks for.
    marker = re.compile(r"\b(?:T[O]DO|F[I]XME|H[A]CK|t[o]do!|u[n]implemented!)")
    assert not [
        str(path.relative_to(ROOT)) for path in SOURCES if marker.search(path.read_text(encoding="utf-8"))
    ]


def test_modules_open_with_their_purpose():
    bare = defaultdict(list)
    for path in SOURCES:
        text = path.read_text(encoding="utf-8").lstrip()
        if (path.suffix == ".rs" and not text.startswith("//!")) or (
            path.suffix == ".py" and text and not text.startswith(('"""', 'r"""'))
        ):
            bare[path.suffix].append(str(path.relative_to(ROOT)))
    assert not bare
