"""The bar on stderr while `LLM.generate` and `LLM.chat` run.

In: the requests of one call, which grow as steps commit tokens. Out: a bar over the tokens that may still
come, which shrinks to those that did; nothing if stderr is no terminal.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from tqdm import tqdm

from specpilot_rs.running import RunningRequest


class ProgressBar:
    """A context in which a bar stands."""

    def __init__(self, requests: Sequence[RunningRequest], max_model_len: int, use_tqdm: bool) -> None:
        self._requests = requests
        self._num_most = [_most_tokens(request, max_model_len) for request in requests]
        self._bar = tqdm(
            total=sum(self._num_most),
            desc="Generating",
            unit="tok",
            file=sys.stderr,
            disable=not (use_tqdm and sys.stderr.isatty()),
            dynamic_ncols=True,
        )

    def __enter__(self) -> ProgressBar:
        """Returns itself; the bar is there already."""
        return self

    def __exit__(self, *_: object) -> None:
        """Leaves the bar as it stands."""
        self._bar.close()

    def update(self) -> None:
        """Counts the tokens that there are by now."""
        if self._bar.disable:
            return
        self._bar.total = sum(
            len(request.token_ids) if request.finished else most
            for request, most in zip(self._requests, self._num_most, strict=True)
        )
        num_done = sum(request.finished for request in self._requests)
        self._bar.set_postfix_str(f"{num_done}/{len(self._requests)} prompts", refresh=False)
        self._bar.update(sum(len(request.token_ids) for request in self._requests) - self._bar.n)


def _most_tokens(request: RunningRequest, max_model_len: int) -> int:
    room = max_model_len - len(request.submission.prompt_token_ids)
    asked = request.submission.params.max_tokens
    return room if asked is None else min(asked, room)
