"""The list of known pairs: what it claims fits what is served."""

from __future__ import annotations

import json

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
