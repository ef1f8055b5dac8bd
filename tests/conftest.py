"""Fixtures shared by all tests: the demo pair, test data, benchmark prompts, lines for the closing report."""

import json
import os
from pathlib import Path

import pytest
from specpilot_rs import LLM

FIXTURES = Path(__file__).parent / "fixtures"
PROMPT_SETS = ("gsm8k", "humaneval", "mbpp", "mt_bench", "spec_bench")
# Ways to speculate on the demo target, and the trees that each drafter's scores allow.
DRAFTERS = {
    "dflash": {"model": str(FIXTURES / "demo" / "dflash")},
    "dflash2": {"method": "dflash2"},
    "dspark": {"model": str(FIXTURES / "demo" / "dspark")},
    "eagle3": {"model": str(FIXTURES / "demo" / "eagle3")},
    "ngram": {"method": "ngram"},
}
TREES = {
    "dflash": ("chain", "ddtree", "spine", "eagle"),
    "dflash2": ("chain", "ddtree", "conditional", "spine", "eagle"),
    "dspark": ("chain", "ddtree", "conditional", "spine", "eagle"),
    "eagle3": ("chain", "conditional", "spine", "eagle"),
    "ngram": ("chain", "conditional", "spine", "eagle"),
}
REPORT = pytest.StashKey[list[str]]()


def pytest_configure(config):
    # Most tests hold fp32 values of the host backend, and `auto` would take a GPU that is there: it is
    # hidden unless its own tests are asked for by their folder (`make test-cuda`).
    folder = Path(__file__).parent / "cuda"
    asked = [Path(argument.split("::")[0]).resolve() for argument in config.args]
    if not asked or not all(path.is_relative_to(folder) for path in asked):
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    config.stash[REPORT] = []


def pytest_sessionfinish(session):
    # A worker of pytest-xdist hands its lines to the process that reports.
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["measured"] = session.config.stash[REPORT]


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node):
    node.config.stash[REPORT] += getattr(node, "workeroutput", {}).get("measured", [])


def pytest_terminal_summary(terminalreporter, config):
    lines = config.stash[REPORT]
    if lines:
        terminalreporter.section("measured")
        for line in lines:
            terminalreporter.write_line(line)


@pytest.fixture(scope="session")
def report(pytestconfig):
    """A function that adds a line to the report printed after all tests."""
    return pytestconfig.stash[REPORT].append


@pytest.fixture(scope="session")
def benchmark_prompts():
    """A function giving the first `count` prompts of each benchmark set, in the demo model's chat format."""

    def load(count):
        prompts = []
        for name in PROMPT_SETS:
            lines = (FIXTURES / "prompts" / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
            prompts += [f"Question: {json.loads(line)['prompt']}\nAnswer:" for line in lines[:count]]
        return prompts

    return load


@pytest.fixture(scope="session")
def demo_llm():
    """The bundled pair with its default speculation."""
    return LLM.demo()


@pytest.fixture(scope="session")
def plain_llm():
    """The bundled target alone."""
    return LLM.demo(speculative_config=None)


@pytest.fixture(scope="session")
def golden_cases():
    """Prompts with the fp32 continuations of an independent implementation."""
    return json.loads((FIXTURES / "demo" / "golden.json").read_bytes())["cases"]


@pytest.fixture
def fixtures_dir():
    """The folder of test data."""
    return FIXTURES
