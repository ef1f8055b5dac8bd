"""Requests in flight: who waits for which tokens, their text, and where a stop string ends them.

In: step events of the engine, which decodes all requests at once. Out: tokens and text per request, in order.
Callers in several threads and unfinished streams share one engine: whoever needs tokens steps it and delivers
the events of all. If a step fails or is interrupted its events are lost, so every request in flight is
aborted; the engine stays usable.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from specpilot_rs._core import Engine, EngineOutput, StepEvent
from specpilot_rs.errors import InternalError, RequestError, SpecPilotError
from specpilot_rs.options import SamplingParams
from specpilot_rs.outputs import CompletionOutput, RequestMetrics, RequestOutput, StreamOutput
from specpilot_rs.tokenizer import TextDecoder


@contextlib.contextmanager
def naming(name: str | None) -> Iterator[None]:
    """Makes a `RequestError` say which of several prompts it is about.

    Args:
        name: How to call the prompt; None leaves errors as they are.
    """
    try:
        yield
    except RequestError as error:
        if name is None:
            raise
        raise RequestError(f"{name}: {error}") from error


@dataclass(frozen=True)
class Submission:
    """A checked request that no engine knows yet; `score_only` wants values of its prompt and no tokens."""

    prompt: str | None
    prompt_token_ids: list[int]
    params: SamplingParams
    decoder: TextDecoder | None
    name: str | None = None
    """How errors call the prompt; None if its call has no other."""
    call_index: int = 0
    """Index among the prompts of its call, which draws its tokens if it brings no seed."""
    record_logits: bool = False
    record_rounds: bool = False
    score_only: bool = False


class RunningRequest:
    """One request from its admission to its output."""

    def __init__(self, request_id: int, submission: Submission) -> None:
        """Starts with no tokens."""
        self.request_id = request_id
        self.submission = submission
        self.token_ids: list[int] = []
        self.text = ""
        self.output: RequestOutput | None = None
        self.failure: BaseException | None = None
        self._stop_string: str | None = None
        self._num_streamed_tokens = 0
        self._num_streamed_chars = 0

    @property
    def finished(self) -> bool:
        """Whether the request has ended."""
        return self.output is not None or self.failure is not None

    def raise_failure(self) -> None:
        """Raises if the request could not go on, or was ended by a step that failed in another call.

        Raises:
            RequestError: The request itself could not go on.
            SpecPilotError: Another call's step failed; its error is the cause.
        """
        if isinstance(self.failure, RequestError):
            raise self.failure
        if self.failure is not None:
            raise SpecPilotError(
                f"aborted: another call's step failed ({type(self.failure).__name__}: {self.failure})"
            ) from self.failure

    def receive(self, event: StepEvent) -> int | None:
        """Takes the tokens of a step.

        Returns:
            The number of output tokens at which a stop string completed, if one did.
        """
        params, decoder = self.submission.params, self.submission.decoder
        for index, token_id in enumerate(event.new_token_ids):
            self.token_ids.append(token_id)
            ended_here = event.finish_reason == "stop" and index == len(event.new_token_ids) - 1
            if decoder is None or (ended_here and not params.include_stop_str_in_output):
                continue
            num_chars_before = len(self.text)
            self.text += decoder.push(token_id)
            if len(self.token_ids) > params.min_tokens and self._find_stop(num_chars_before):
                return len(self.token_ids)
        return None

    def _find_stop(self, num_chars_before: int) -> bool:
        """Cuts the text at the leftmost stop string that the characters after `num_chars_before` complete."""
        hits = [
            (start, stop)
            for stop in self.submission.params.stop_strings
            if (start := self.text.find(stop, max(0, num_chars_before - len(stop) + 1))) >= 0
        ]
        if not hits:
            return False
        start, self._stop_string = min(hits, key=lambda hit: hit[0])
        keep = self.submission.params.include_stop_str_in_output
        self.text = self.text[: start + len(self._stop_string) if keep else start]
        return True

    def finish(self, output: EngineOutput) -> None:
        """Takes the engine's final word."""
        if output.failure is not None:
            name = self.submission.name
            self.failure = RequestError(output.failure if name is None else f"{name}: {output.failure}")
        self.token_ids = list(output.token_ids)
        if self.submission.decoder is not None and self._stop_string is None:
            self.text += self.submission.decoder.finish()
        completion = CompletionOutput(
            index=0,
            text=self.text,
            token_ids=self.token_ids,
            finish_reason=output.finish_reason,
            stop_reason=self._stop_string if self._stop_string is not None else output.stop_token_id,
        )
        self.output = RequestOutput(
            request_id=str(self.request_id),
            prompt=self.submission.prompt,
            prompt_token_ids=self.submission.prompt_token_ids,
            outputs=[completion],
            finished=output.finish_reason != "abort",
            metrics=RequestMetrics.of(output.metrics, len(self.token_ids)),
            record=output.record,
            rounds=output.rounds,
        )

    def take_piece(self) -> StreamOutput | None:
        """Returns what came since the last piece, or None if nothing did."""
        num_chars = len(self.text) if self.finished else len(self.text) - self._num_open_chars()
        text = self.text[self._num_streamed_chars : num_chars]
        token_ids = self.token_ids[self._num_streamed_tokens :]
        if not token_ids and not text and not self.finished:
            return None
        self._num_streamed_chars = max(self._num_streamed_chars, num_chars)
        self._num_streamed_tokens = len(self.token_ids)
        reason = self.output.outputs[0].finish_reason if self.output else None
        return StreamOutput(text=text, token_ids=token_ids, finish_reason=reason, result=self.output)

    def _num_open_chars(self) -> int:
        """Length of the longest end of the text that may be the beginning of a stop string."""
        lengths = [
            length
            for stop in self.submission.params.stop_strings
            for length in range(1, min(len(stop), len(self.text) + 1))
            if self.text.endswith(stop[:length])
        ]
        return max(lengths, default=0)


class RunningRequests:
    """All requests that one engine works on."""

    def __init__(self, engine: Engine) -> None:
        """Starts with none."""
        self._engine = engine
        self._by_id: dict[int, RunningRequest] = {}
        self._lock = threading.RLock()

    def submit(self, submissions: Sequence[Submission], admitted: list[RunningRequest]) -> None:
        """Hands requests to the engine: all of them, or none if it refuses one.

        No step can come in between, so a refusal in the middle leaves nothing decoded and nothing queued.

        Args:
            submissions: The requests.
            admitted: Gets each request as soon as the engine knows it, so that whoever is interrupted at any
                point can abort them.
        """
        with self._lock:
            try:
                for submission in submissions:
                    with naming(submission.name):
                        request_id = self._add(submission)
                    request = RunningRequest(request_id, submission)
                    self._by_id[request_id] = request
                    admitted.append(request)
            except BaseException:
                self.abort(admitted)
                raise

    def check(self, submission: Submission) -> None:
        """Raises if the engine would refuse a request for tokens; nothing is queued.

        Raises:
            RequestError: It would.
        """
        self._engine.check_request(submission.prompt_token_ids, submission.params)

    def _add(self, submission: Submission) -> int:
        if submission.score_only:
            return self._engine.add_score_request(submission.prompt_token_ids)
        return self._engine.add_request(
            submission.prompt_token_ids,
            submission.params,
            submission.record_logits,
            submission.record_rounds,
            submission.call_index,
        )

    def advance(self, wanted: Sequence[RunningRequest]) -> None:
        """Makes one decode step, unless all of `wanted` are finished: another thread may have made it."""
        with self._lock:
            if all(request.finished for request in wanted):
                return
            try:
                events = self._engine.step()
                for event in events:
                    self._deliver(event)
            except BaseException as error:
                # Whoever else waits for these requests must learn why they ended.
                self.abort(list(self._by_id.values()), error)
                raise
            if not events:
                self.abort(list(self._by_id.values()))
                raise SpecPilotError(
                    f"the engine has nothing left to do, but {len(wanted)} requests wait for it"
                )

    def _deliver(self, event: StepEvent) -> None:
        request = self._by_id.get(event.request_id)
        if request is None:
            # Its submission was interrupted between the engine's answer and our note of it.
            with contextlib.suppress(RequestError):
                self._engine.abort(event.request_id)
                self._engine.take_output(event.request_id)
            return
        num_tokens = request.receive(event)
        if num_tokens is not None:
            self._engine.stop_at(event.request_id, num_tokens)
        if num_tokens is not None or event.finish_reason is not None:
            request.finish(self._engine.take_output(event.request_id))
            del self._by_id[event.request_id]

    def abort(self, requests: Sequence[RunningRequest], failure: BaseException | None = None) -> None:
        """Ends requests that are not finished; their output so far remains readable, with reason "abort".

        Args:
            requests: Those to end.
            failure: What ended them, for callers that did not see it themselves.
        """
        with self._lock:
            for request in requests:
                if self._by_id.pop(request.request_id, None) is None:
                    continue
                # A closed engine has nothing to hand back; what closed it is on its way to the caller.
                request.failure = failure
                with contextlib.suppress(InternalError):
                    self._engine.abort(request.request_id)
                    request.finish(self._engine.take_output(request.request_id))
