"""How well the 8-bit view predicts the exact pass: top-1 agreement on the demo target.

The view's weights are BF16 values themselves: a checkpoint that holds them is a model whose every pass is a
Q pass.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from specpilot_rs import LLM
from specpilot_rs.demo import TARGET_DIR

from . import w12_oracle

NUM_POSITIONS = 5000


@pytest.fixture(scope="module")
def q_view_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo target with the 8-bit view of every matrix that W12 pays for in the matrix's place."""
    directory = Path(shutil.copytree(TARGET_DIR, tmp_path_factory.mktemp("q_view") / "target"))
    num_changed = 0
    for shard in directory.glob("*.safetensors"):
        data = bytearray(shard.read_bytes())
        begin = 8 + int.from_bytes(data[:8], "little")
        for name, entry in json.loads(data[8:begin]).items():
            if "_proj" not in name or entry["dtype"] != "BF16":
                continue
            first, end = (begin + offset for offset in entry["data_offsets"])
            weights = np.frombuffer(data[first:end], np.uint16).reshape(entry["shape"])
            if w12_oracle.reason(weights, w12_oracle.choose_bases(weights)) is None:
                data[first:end] = w12_oracle.q_view(weights).tobytes()
                num_changed += 1
        shard.write_bytes(data)
    assert num_changed == 50
    return directory


def test_top_1_agreement(
    q_view_dir: Path, benchmark_prompts: Callable[[int], list[str]], report: Callable[[str], Any]
) -> None:
    exact = LLM(TARGET_DIR, max_model_len=2048)
    view = LLM(q_view_dir, max_model_len=2048)
    num_positions = num_equal = 0
    for prompt in benchmark_prompts(80):
        ids = exact.get_tokenizer().encode(prompt)
        want, got = exact.score(ids).logits, view.score(ids).logits
        assert (want != got).any()
        num_equal += int((want.argmax(1) == got.argmax(1)).sum())
        num_positions += len(ids)
        if num_positions >= 2 * NUM_POSITIONS:
            break
    agreement = num_equal / num_positions
    report(f"Q view, demo target: top-1 agreement {agreement:.4f} over {num_positions:,} positions")
    assert num_positions >= NUM_POSITIONS
    # Far below this a Q pass would mark paths that the exact pass refuses.
    assert agreement > 0.9
