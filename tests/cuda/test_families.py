"""Every family on a GPU: speculation of any kind, over weights of any format, changes no bit."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.family_speculation import (
    FAMILIES,
    PAIRINGS,
    assert_identical,
    decode_plainly,
    decode_speculatively,
    every,
    settings,
    speculation,
)
from tests.random_drafters import Maker

DEVICE = "cuda:0"


def cover(family: str) -> list[tuple[Any, ...]]:
    """Every shape with every format; every drafter of the family with some of them."""
    published = PAIRINGS[family]
    return [(published[i % len(published)], *setting) for i, setting in enumerate(settings(family))]


@pytest.fixture(scope="module")
def plain() -> Any:
    """Plain decoding of a family on the GPU, made once."""
    return functools.cache(functools.partial(decode_plainly, device=DEVICE))


def test_every_drafter_has_its_turn() -> None:
    assert all({case[0] for case in cover(family)} == set(made) for family, made in PAIRINGS.items())


@pytest.mark.parametrize(
    ("family", "drafter", "shape", "weight_format"),
    every(cover),
    ids=lambda value: getattr(value, "__name__", value),
)
def test_wrong_drafts_change_no_bit(
    family: str, drafter: Callable[..., str], shape: str, weight_format: str, tmp_path: Path, plain: Any
) -> None:
    directory = drafter(Maker(FAMILIES / family), tmp_path)
    config = {"model": directory, **speculation(drafter, shape)}
    _, outputs = decode_speculatively(family, shape, weight_format, config, device=DEVICE)
    assert_identical(outputs, plain(family))


@pytest.mark.parametrize(("family", "shape", "weight_format"), every(settings))
def test_prompt_lookup_changes_no_bit(family: str, shape: str, weight_format: str, plain: Any) -> None:
    config = {"method": "ngram", "prompt_lookup_min": 1, **speculation(None, shape)}
    _, outputs = decode_speculatively(family, shape, weight_format, config, device=DEVICE)
    assert_identical(outputs, plain(family))
