"""The demo pair, opened once for all tests that need an engine, and where the test data lie."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from specpilot_rs import LLM

FIXTURES = Path(__file__).parent / "fixtures"


@pytest.fixture(scope="session")
def demo_llm() -> LLM:
    """The bundled pair with its default speculation."""
    return LLM.demo()


@pytest.fixture(scope="session")
def plain_llm() -> LLM:
    """The bundled target alone."""
    return LLM.demo(speculative_config=None)


@pytest.fixture(scope="session")
def golden_cases() -> list[dict[str, Any]]:
    """Prompts with the fp32 continuations of an independent implementation."""
    cases: list[dict[str, Any]] = json.loads((FIXTURES / "demo" / "golden.json").read_bytes())["cases"]
    return cases


@pytest.fixture
def fixtures_dir() -> Path:
    """The folder of test data."""
    return FIXTURES
