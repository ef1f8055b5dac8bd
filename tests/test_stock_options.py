"""Stock kernels are a GPU's, on BF16 with a dense head and one chain; anything else is refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from specpilot_rs import LLM, OptionError

FAMILIES = Path(__file__).parent / "fixtures" / "families"


def test_the_cpu_has_none() -> None:
    with pytest.raises(OptionError, match=r'`device` should be a GPU with kernels "stock", got "cpu"'):
        LLM.demo(None, device="cpu", kernels="stock")


@pytest.mark.parametrize("family", ["gemma4_unified", "muse_glimmer"])
def test_families_with_more_than_stock_kernels_know_are_refused(family: str) -> None:
    """Before the device: no GPU is looked for."""
    with pytest.raises(OptionError, match=r'`kernels` should be "lossless" for \w+, got "stock"'):
        LLM(str(FAMILIES / family), device="cuda:0", kernels="stock", skip_tokenizer_init=True)


def test_an_unknown_set_is_named() -> None:
    with pytest.raises(OptionError, match=r'`kernels` should be one of lossless, stock, got "cublas"'):
        LLM.demo(None, kernels="cublas")
    with pytest.raises(OptionError, match=r"`kernels` should be a string, got 1"):
        LLM.demo(None, kernels=1)


def test_the_usual_kernels_say_that_they_are_lossless() -> None:
    plan = LLM.demo(None, device="cpu", max_model_len=256).describe()
    assert (plan["kernels"], plan["lossless"]) == ("lossless", True)


@pytest.mark.parametrize(
    ("options", "speculation", "message"),
    [
        (
            {"weight_format": "w12"},
            None,
            '`weight_format` should be auto or bf16 with kernels "stock"',
        ),
        ({"head": "screened"}, None, '`head` should be auto or dense with kernels "stock", got "screened"'),
        ({}, {"tree": "ddtree"}, '`tree` should be chain with kernels "stock", got "ddtree"'),
        ({}, {"q_passes": 1}, '`q_passes` should be 0 with kernels "stock", got 1'),
    ],
    ids=["w12", "screened", "tree", "q_passes"],
)
def test_what_stock_engines_do_not_have_is_refused(
    options: dict[str, Any], speculation: dict[str, Any] | None, message: str
) -> None:
    """Options come before the device: no GPU is looked for."""
    drafts = None if speculation is None else {"method": "dflash2", **speculation}
    with pytest.raises(OptionError) as error:
        LLM.demo(drafts, device="cuda:0", kernels="stock", **options)
    assert message in str(error.value)
