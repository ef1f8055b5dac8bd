"""Requests that come at random steps beside others, one of them withdrawn: a server's day."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import numpy as np
from specpilot_rs import LLM, SamplingParams


@dataclass(frozen=True)
class Arrival:
    """A prompt, by its place in a list, and how many tokens are asked of it."""

    index: int
    max_tokens: int


def check_arrivals(
    llm: LLM, prompts: list[str], arrivals: list[Arrival], doomed: int, plain: list[Any], order: random.Random
) -> None:
    """Runs requests as they come, aborts prompt `doomed` once it has tokens, compares with plain decoding.

    Args:
        llm: What decodes.
        prompts: Their texts.
        arrivals: What is asked, the last one first.
        doomed: Index of the prompt that is aborted.
        plain: Outputs of plain decoding of `prompts`, at least as long, with their logits.
        order: Says before which step a request comes.
    """
    engine, waiting = llm._engine, list(arrivals)
    running: dict[int, Arrival] = {}
    finished: dict[Arrival, Any] = {}
    while waiting or engine.has_unfinished():
        if waiting and (order.random() < 0.4 or not engine.has_unfinished()):
            arrival = waiting.pop()
            ids = llm.get_tokenizer().encode(prompts[arrival.index])
            params = SamplingParams(max_tokens=arrival.max_tokens, ignore_eos=True)
            running[engine.add_request(ids, params, True, False)] = arrival
        for event in engine.step():
            arrival = running[event.request_id]
            if arrival.index == doomed and event.new_token_ids:
                engine.abort(event.request_id)
                engine.take_output(event.request_id)
            elif event.finish_reason:
                finished[arrival] = engine.take_output(event.request_id)
    assert sorted([*(a.index for a in finished), doomed]) == sorted(a.index for a in arrivals)
    for arrival, output in finished.items():
        want = plain[arrival.index]
        assert output.token_ids == want.outputs[0].token_ids[: arrival.max_tokens]
        logits = want.record.logits[: arrival.max_tokens]
        np.testing.assert_array_equal(output.record.logits.view(np.uint32), logits.view(np.uint32))
