"""Where a text ends and what of it may be streamed, against a search that tries everything.

Scripted tokens stand in for a model, so that stop strings often overlap, nest and end inside tokens.
"""

from __future__ import annotations

import itertools
import random
from types import SimpleNamespace
from typing import Any

import pytest
from specpilot_rs import SamplingParams
from specpilot_rs.running import RunningRequest, Submission

STOPS = ["ab", "ba", "aab", "abab", "b", "bbbb", "cab", "c"]


class Spelled:
    """A decoder whose token ids are places in a list of texts."""

    def __init__(self, texts: list[str]) -> None:
        self.texts = texts

    def push(self, token_id: int) -> str:
        return self.texts[token_id]

    def finish(self) -> str:
        return ""


def running(texts: list[str], **params: Any) -> RunningRequest:
    decoder: Any = Spelled(texts)
    return RunningRequest(0, Submission(None, [0], SamplingParams(max_tokens=None, **params), decoder))


def event(token_ids: list[int], finish_reason: str | None = None) -> Any:
    return SimpleNamespace(request_id=0, new_token_ids=token_ids, finish_reason=finish_reason)


def first_stop(texts: list[str], stops: list[str], min_tokens: int) -> tuple[int, int, str] | None:
    """Number of tokens, place and string of the first stop; of several in one token the leftmost."""
    for count in range(min_tokens + 1, len(texts) + 1):
        text, before = "".join(texts[:count]), len("".join(texts[: count - 1]))
        for start in range(len(text)):
            for stop in stops:
                end = start + len(stop)
                if text[start:end] == stop and end > before:
                    return count, start, stop
    return None


def certain_text(text: str, stops: list[str]) -> str:
    """The longest beginning of a text without stops that no continuation can take back."""
    for length in range(len(text) + 1):
        rest = text[length:]
        if rest and any(stop.startswith(rest) for stop in stops):
            return text[:length]
    return text


def random_case(seed: int) -> tuple[list[str], list[str], list[list[int]]]:
    """Texts of tokens, stop strings, and token ids of successive steps."""
    chance = random.Random(seed)
    texts = ["".join(chance.choices("abbc" if seed % 3 else "aab", k=chance.randrange(4))) for _ in range(12)]
    stops = chance.sample(STOPS, chance.randrange(1, 4))
    ids, steps = list(range(len(texts))), []
    while ids:
        size = chance.randrange(1, 5)
        steps.append(ids[:size])
        ids = ids[size:]
    return texts, stops, steps


@pytest.mark.parametrize("keep", [False, True])
def test_the_leftmost_stop_string_cuts_the_text(keep: bool):
    stopped = 0
    for seed in range(600):
        texts, stops, steps = random_case(seed)
        min_tokens = seed % 4
        request = running(texts, stop=stops, min_tokens=min_tokens, include_stop_str_in_output=keep)
        cut = next((n for step in steps if (n := request.receive(event(step))) is not None), None)
        want = first_stop(texts, stops, min_tokens)
        if want is None:
            assert (cut, request.text) == (None, "".join(texts))
            continue
        stopped += 1
        count, start, stop = want
        end = start + (len(stop) if keep else 0)
        assert (cut, request.text, request._stop_string) == (count, "".join(texts)[:end], stop)
    assert stopped > 300


def test_a_stream_holds_back_what_may_become_a_stop_string_and_no_more():
    held = 0
    for seed in range(600):
        texts, stops, steps = random_case(seed)
        request, streamed = running(texts, stop=stops), ""
        for step in steps:
            if request.receive(event(step)) is not None:
                break
            piece = request.take_piece()
            assert piece is not None
            assert piece.token_ids == step
            streamed += piece.text
            assert streamed == certain_text(request.text, stops)
            held += streamed != request.text
        assert request.text.startswith(streamed)
    assert held > 100


def test_of_two_stop_strings_in_one_token_the_leftmost_counts_whatever_their_order():
    for stops in itertools.permutations(["d", "b", "x"]):
        request = running(["a", "abcd"], stop=list(stops))
        assert request.receive(event([0, 1])) == 2
        assert (request.text, request._stop_string) == ("aa", "b")


@pytest.mark.parametrize("keep", [False, True])
def test_the_text_of_a_stop_token_is_left_out_or_kept(keep: bool):
    request = running(["a", "b", "end"], include_stop_str_in_output=keep)
    assert request.receive(event([0])) is None
    assert request.receive(event([1, 2], "stop")) is None
    assert request.text == ("abend" if keep else "ab")
    # At the limit, the last token is as good as any.
    request = running(["a", "b", "end"], include_stop_str_in_output=keep)
    assert request.receive(event([0, 1, 2], "length")) is None
    assert request.text == "abend"
