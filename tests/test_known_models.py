"""The list of known pairs: what it claims fits what is served."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from specpilot_rs import known_models

from tests.test_cli import specpilot


def test_the_command_prints_every_pair():
    text = specpilot("models").stdout.decode()
    listed = json.loads(specpilot("models", "--json").stdout)
    assert len(listed) == len(known_models.PAIRS)
    for pair in listed:
        assert pair["target"] in text
        assert (pair["drafter"] or "-") in text


def test_taps_lie_within_their_targets():
    layers = {"Qwen3.8-27B": 64, "Qwen3.5-4B": 32, "Llama-3.1-8B": 32, "gemma-4-12B": 48, "Muse-Glimmer": 52}
    for pair in known_models.PAIRS:
        [num_layers] = [n for name, n in layers.items() if name in pair.target] or [1]
        # The last layer's output is not tapped.
        assert all(tap < num_layers - 1 for tap in pair.taps)
        assert pair.method in ("dflash", "dflash2", "dspark", "eagle3", "ngram")


def test_every_claim_stands_on_a_test():
    """The tests are there, under the very names; that they pass is their own business."""
    root = Path(__file__).parents[1]
    claims = {test for pair in known_models.PAIRS for test in (*pair.format_tests, pair.drafter_test)}
    files = sorted({test.partition("::")[0] for test in claims})
    listing = subprocess.run(
        [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", *files],
        cwd=root,
        capture_output=True,
        text=True,
        check=True,
    )
    assert claims <= set(listing.stdout.splitlines())
    for pair in known_models.PAIRS:
        # A format's test names it, or is of a checkpoint that is stored so.
        assert len(pair.format_tests) == len(pair.formats)
        for name, test in zip(pair.formats, pair.format_tests, strict=True):
            assert name in test or name == "bf16" or "compressed_tensors" in test


def test_claims_are_of_the_drafters_own_kind():
    for pair in known_models.PAIRS:
        assert pair.target_verified == known_models.GOLDEN
        if pair.drafter_verified == known_models.TRAINED:
            assert pair.drafter_test.endswith(f"[{pair.method}]")
