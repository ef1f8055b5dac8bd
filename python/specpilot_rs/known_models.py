"""Targets and drafters that are known to fit each other, and how much of each pair is verified.

Checkpoints of these sizes are not part of any test: golden values are of tiny checkpoints with the same keys,
names and dtypes, formats of tiny drafters in the published layouts.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

GOLDEN = "golden values"
"""A tiny checkpoint of this family gives an independent implementation's logits and text."""
TRAINED = "trained drafts"
"""A small trained drafter of this kind drafts what an independent implementation drafts."""
EQUATIONS = "equations"
"""A tiny file in this layout drafts what the published equations give in float64."""
FORMAT = "format"
"""A tiny file in this layout, if it has any, names and keys alike, loads and changes no token."""


@dataclass(frozen=True)
class KnownPair:
    """A target and one drafter for it."""

    target: str
    drafter: str | None
    method: str
    layout: str
    block_size: int | None
    taps: tuple[int, ...]
    formats: tuple[str, ...]
    """How the target's linear layers may be held."""
    target_verified: str
    drafter_verified: str
    format_tests: tuple[str, ...]
    """For each format the test that its claim stands on, as its runner names it: golden values, or tokens and
    logits equal to those of a format that has them."""
    drafter_test: str
    """Likewise of the drafter."""

    def to_dict(self) -> dict[str, Any]:
        """Returns the pair as JSON-ready values."""
        return asdict(self)


_QWEN_27B, _QWEN_4B = "Qwen/Qwen3.8-27B", "Qwen/Qwen3.5-4B"
_GEMMA, _MUSE = "google/gemma-4-12B-it", "meta-models/Muse-Glimmer-30B"
_LLAMA = "meta-llama/Llama-3.1-8B-Instruct"
_ANY = "any of these"
_GOLDEN = "tests/test_golden.py::test_scores_match_reference"
_LOADS = "tests/test_families.py::test_drafters_of_a_family_change_no_bit"
_LOOKS_UP = "tests/test_families.py::test_prompt_lookup_changes_no_bit"
_FOLLOWS = "tests/test_gemma_drafter.py::test_drafts_follow_the_equations[values of keys]"


def _formats(bf16: str, w12: str, fp8: str | None = None) -> dict[str, str]:
    """Tests of formats, by the tiny checkpoints of a target's kind that have them; `fp8` is a whole test."""
    tests = {"bf16": f"{_GOLDEN}[{bf16}]", "w12": f"{_LOOKS_UP}[{w12}-two-stage-w12]"}
    return tests if fp8 is None else {**tests, "fp8": fp8}


_FORMATS = {
    _QWEN_27B: _formats("qwen3_5_wrapper", "qwen3_5_wrapper", f"{_GOLDEN}[qwen3_5_fp8]"),
    _QWEN_4B: _formats("qwen3_5_text", "qwen3_5_text"),
    _LLAMA: _formats(
        "llama_rope_scaling",
        "llama_rope_parameters",
        "tests/test_compressed_tensors.py::test_scales_of_a_config_give_the_bits_of_their_weights[channel]",
    ),
    _GEMMA: _formats("gemma4_unified", "gemma4_unified"),
    _MUSE: _formats("muse_glimmer", "muse_glimmer"),
    _ANY: _formats("qwen3_5_wrapper", "qwen3_5_wrapper", f"{_GOLDEN}[qwen3_5_fp8]"),
}


def _pair(
    target: str,
    drafter: str | None,
    method: str,
    layout: str,
    block_size: int | None,
    taps: tuple[int, ...],
    verified: str = TRAINED,
    test: str | None = None,
) -> KnownPair:
    return KnownPair(
        target,
        drafter,
        method,
        layout,
        block_size,
        taps,
        tuple(_FORMATS[target]),
        GOLDEN,
        verified,
        tuple(_FORMATS[target].values()),
        test or f"tests/test_golden_drafts.py::test_every_round_drafts_the_same_chain[{method}]",
    )


_QWEN_TAPS, _MUSE_TAPS = (1, 8, 15, 22, 29), (1, 13, 25, 37, 49)
_ASSISTANT = f"{_LOADS}[muse_glimmer-muse_assistant]"
_GEMMA_EAGLE = f"{_LOADS}[gemma4_unified-eagle3_speculators]"

PAIRS = (
    _pair(_QWEN_27B, "z-lab/Qwen3.8-27B-DFlash2", "dflash2", "z-lab", 8, (5, 19, 33, 47, 61)),
    _pair(_QWEN_27B, "RadixArk/Qwen3.8-27B-DSpark", "dspark", "SpecForge", 7, ()),
    _pair(_QWEN_4B, "z-lab/Qwen3.5-4B-DFlash", "dflash", "z-lab", 16, _QWEN_TAPS),
    _pair(_LLAMA, "z-lab's DFlash of this target (UltraChat)", "dflash", "z-lab", 10, _QWEN_TAPS),
    _pair(_LLAMA, "EAGLE-3 as LlamaForCausalLMEagle3, BF16", "eagle3", "EAGLE", None, (1, 15, 28)),
    _pair(
        _GEMMA,
        "DeepSpec's DSpark of this target",
        "dspark",
        "DeepSpec",
        7,
        (5, 17, 29, 41, 46),
        EQUATIONS,
        _FOLLOWS,
    ),
    _pair(
        _GEMMA,
        "EAGLE-3 in speculators format, BF16",
        "eagle3",
        "speculators",
        None,
        (1, 23, 44),
        FORMAT,
        _GEMMA_EAGLE,
    ),
    _pair(
        _MUSE,
        "meta-models/Muse-Glimmer-30B-assistant",
        "dflash",
        "Muse assistant",
        16,
        _MUSE_TAPS,
        FORMAT,
        _ASSISTANT,
    ),
    _pair(
        _MUSE,
        "Muse-Glimmer-30B-DFlash2",
        "dflash2",
        "z-lab",
        16,
        _MUSE_TAPS,
        FORMAT,
        f"{_LOADS}[muse_glimmer-dflash2]",
    ),
    _pair(
        _MUSE,
        "DaoCloud/Muse-Glimmer-30B-DSpark",
        "dspark",
        "speculators",
        15,
        (),
        FORMAT,
        f"{_LOADS}[muse_glimmer-dspark_speculators_muse]",
    ),
    _pair(_ANY, None, "ngram", "no files", None, (), FORMAT, f"{_LOOKS_UP}[qwen3_5_wrapper-tree-bf16]"),
)
"""Taps are 0-based layer outputs; none where the publisher's file says them and nobody else."""


def table() -> list[str]:
    """Returns the pairs as lines of a table, and what its words mean."""
    rows = [("target", "drafter", "method", "layout", "block", "taps", "formats", "target by", "drafter by")]
    for pair in PAIRS:
        rows.append(
            (
                pair.target,
                pair.drafter or "-",
                pair.method,
                pair.layout,
                str(pair.block_size or "-"),
                " ".join(map(str, pair.taps)) or "-",
                " ".join(pair.formats),
                pair.target_verified,
                pair.drafter_verified,
            )
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
    notes = [
        f"{GOLDEN}: a tiny checkpoint of the family gives an independent implementation's logits and text",
        f"{TRAINED}: a small trained drafter of the kind drafts as an independent implementation does",
        f"{EQUATIONS}: a tiny file of the layout drafts what the published equations give",
        f"{FORMAT}: a tiny file of the layout, where there are files, loads and changes no token",
        "formats: how linear layers may be held; W12 and FP8 give their BF16 weights' bits (FP8: as stored)",
        "all on tiny files; shapes of the real ones are planted on a GPU (specpilot bench --planted)",
    ]
    return [lines[0], "-" * max(map(len, lines)), *lines[1:], "", *notes]
