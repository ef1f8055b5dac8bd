"""Every command and example of README.md runs as printed."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import specpilot_rs

ROOT = Path(__file__).parent.parent
DEMO = Path(specpilot_rs.__file__).parent / "demo"


def blocks(language):
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE)


def commands():
    lines = [line.split("  #")[0].strip() for block in blocks("sh") for line in block.splitlines()]
    # The two `make` commands are what CI itself runs.
    return [line for line in lines if line and not line.startswith("make ")]


def test_readme_holds_examples():
    assert len(blocks("python")) >= 1
    assert len(commands()) >= 4


@pytest.mark.parametrize("code", blocks("python"))
def test_python_examples_run(code):
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip()


@pytest.mark.parametrize("command", commands())
def test_commands_run(command, tmp_path):
    (tmp_path / "prompts.jsonl").write_text(json.dumps({"prompt": "def add(a, b):"}) + "\n")
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    places = {"TARGET": str(DEMO / "target"), "DRAFTER": str(DEMO / "dflash2"), "PATH": path}
    result = subprocess.run(
        ["bash", "-c", command],
        input="What is 2 + 3?\n",
        capture_output=True,
        text=True,
        timeout=120,
        cwd=tmp_path,
        env={**os.environ, **places},
    )
    assert result.returncode == 0, result.stderr
    if "--output-jsonl" in command:
        assert json.loads((tmp_path / "out.jsonl").read_text())["text"]
    else:
        assert result.stdout.strip()
