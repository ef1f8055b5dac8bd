"""Prompts in chunks of many sizes against the same prompts token by token, on either device."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from specpilot_rs import LLM, SamplingParams

# Tokens of one path, and so the longest chunk that settles nothing on the way.
SEGMENT_ROWS = 64
NUM_TOKENS = 300
RECORDS = ("logits", "residual_l2", "final_norm_l2", "last_residuals", "gdn_state")

OpenWithChunks = Callable[[int], LLM]


def assert_same_record(got: Any, want: Any, name: str) -> None:
    for field in RECORDS:
        one, other = getattr(got, field), getattr(want, field)
        assert (one is None) == (other is None)
        if one is not None:
            np.testing.assert_array_equal(
                one.view(np.uint32), other.view(np.uint32), err_msg=f"{name}: {field}"
            )


def check_scores(open_with_chunks: OpenWithChunks, vocab_size: int, chunks: Sequence[int]) -> None:
    """Scores and continues one prompt: bits must not depend on the chunk, passes must.

    Args:
        open_with_chunks: Opens a model whose passes have up to so many rows.
        vocab_size: Ids to draw from.
        chunks: Sizes to compare with chunks of one token.
    """
    ids = random.Random(vocab_size).choices(range(vocab_size), k=NUM_TOKENS)
    params = SamplingParams(max_tokens=4, ignore_eos=True)
    prompt = [{"prompt_token_ids": ids}]
    token_by_token = open_with_chunks(1)
    want = token_by_token.score(ids)
    [text] = token_by_token.generate(prompt, params, use_tqdm=False, record_logits=True)
    assert text.metrics.num_prompt_passes == NUM_TOKENS
    for chunk in chunks:
        llm = open_with_chunks(chunk)
        assert_same_record(llm.score(ids), want, f"chunks of {chunk}")
        [output] = llm.generate(prompt, params, use_tqdm=False, record_logits=True)
        assert output.metrics.num_prompt_passes == -(-NUM_TOKENS // chunk)
        assert output.outputs[0].token_ids == text.outputs[0].token_ids
        assert_same_record(output.record, text.record, f"after chunks of {chunk}")
