"""What comes back: vLLM's output shapes plus the metrics of speculation.

A `RequestOutput` holds one prompt and its completion; `StreamOutput` is one piece of it as it is decoded.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from specpilot_rs._core import EngineMetrics, RoundRecord, ScoreRecord

__all__ = [
    "CompletionOutput",
    "RequestMetrics",
    "RequestOutput",
    "RoundRecord",
    "ScoreRecord",
    "StreamOutput",
    "tokens_per_pass",
]


@dataclass(frozen=True)
class RequestMetrics:
    """Counters and times of one request; they count emitted tokens only.

    Attributes:
        num_output_tokens: Tokens emitted.
        num_prompt_passes: Forwards that read the prompt.
        num_target_passes: Exact forwards of the target while decoding, prompt passes excluded.
        num_draft_tokens: Tokens drafted and verified.
        num_accepted_tokens: Drafted tokens that became output.
        num_q_passes: Passes that marked a path before an exact one.
        num_marked_tokens: Tokens of the paths that exact passes were given.
        num_accepted_marks: Those among them that were accepted.
        num_screened_rows: Rows whose token the screened LM head found; 0 with the dense head.
        num_screen_survivors: Vocabulary entries that these rows had to multiply exactly.
        num_screen_fallbacks: Rows among them that took the dense head after all.
        acceptance_histogram: Item i counts the passes that accepted i drafted tokens.
        per_position_acceptance: Share of passes with a draft at position i that accepted it.
        time_to_first_token_s: Seconds from submission to the first token.
        decode_time_s: Seconds from the first token to the last.
    """

    num_output_tokens: int
    num_prompt_passes: int
    num_target_passes: int
    num_draft_tokens: int
    num_accepted_tokens: int
    num_q_passes: int
    num_marked_tokens: int
    num_accepted_marks: int
    num_screened_rows: int
    num_screen_survivors: int
    num_screen_fallbacks: int
    acceptance_histogram: list[int]
    per_position_acceptance: list[float]
    time_to_first_token_s: float
    decode_time_s: float

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens per exact forward, its own token (the bonus) included; 1.0 is plain decoding."""
        if self.num_target_passes == 0:
            return 1.0
        # The prompt's last row gave the first token.
        return (self.num_output_tokens - 1) / self.num_target_passes

    @classmethod
    def of(cls, metrics: EngineMetrics, num_output_tokens: int) -> RequestMetrics:
        """Reads the engine's counters."""
        positions = zip(metrics.per_position_accepted, metrics.per_position_draft, strict=True)
        return cls(
            num_output_tokens=num_output_tokens,
            num_prompt_passes=metrics.num_prompt_passes,
            num_target_passes=metrics.num_target_passes,
            num_draft_tokens=metrics.num_draft_tokens,
            num_accepted_tokens=metrics.num_accepted_tokens,
            num_q_passes=metrics.num_q_passes,
            num_marked_tokens=metrics.num_marked_tokens,
            num_accepted_marks=metrics.num_accepted_marks,
            num_screened_rows=metrics.num_screened_rows,
            num_screen_survivors=metrics.num_screen_survivors,
            num_screen_fallbacks=metrics.num_screen_fallbacks,
            acceptance_histogram=list(metrics.acceptance_histogram),
            per_position_acceptance=[
                accepted / drafted if drafted else 0.0 for accepted, drafted in positions
            ],
            time_to_first_token_s=metrics.time_to_first_token_s,
            decode_time_s=metrics.decode_time_s,
        )

    def to_dict(self) -> dict[str, Any]:
        """Returns all figures as JSON-ready values."""
        return {**dataclasses.asdict(self), "mean_acceptance_length": self.mean_acceptance_length}


@dataclass(frozen=True)
class CompletionOutput:
    """One completion.

    Attributes:
        index: Always 0: a request has one completion in this release.
        text: The text, empty without a tokenizer.
        token_ids: The tokens, the one that ended the output included.
        finish_reason: "stop" (end token, stop token or stop string), "length" or "abort".
        stop_reason: The stop string or stop token id that ended it; None for the model's end tokens.
        cumulative_logprob: None: log-probabilities are not in this release.
        logprobs: None, as above.
    """

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str
    stop_reason: int | str | None = None
    cumulative_logprob: float | None = None
    logprobs: None = None


@dataclass(frozen=True)
class RequestOutput:
    """One prompt and what was generated for it.

    Attributes:
        request_id: The engine's number of the request.
        prompt: The prompt's text; None if it came as token ids.
        prompt_token_ids: The prompt's tokens.
        outputs: One completion.
        finished: True once the request has ended.
        metrics: Counters and times.
        record: Logits of the generated positions, with `record_logits=True`.
        rounds: What was drafted in each round, with `record_rounds=True`.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestMetrics
    record: ScoreRecord | None = None
    rounds: list[RoundRecord] | None = None

    def to_dict(self) -> dict[str, Any]:
        """Returns prompt, completion and metrics as one flat, JSON-ready mapping."""
        completion = self.outputs[0]
        return {
            "prompt": self.prompt,
            "prompt_token_ids": self.prompt_token_ids,
            "text": completion.text,
            "token_ids": completion.token_ids,
            "finish_reason": completion.finish_reason,
            "stop_reason": completion.stop_reason,
            "metrics": self.metrics.to_dict(),
        }


@dataclass(frozen=True)
class StreamOutput:
    """A piece of a completion.

    Attributes:
        text: Text that became certain with these tokens; never half a character or half a stop string.
        token_ids: Tokens since the piece before. A stop string that completes inside a step cuts them.
        finish_reason: As in `CompletionOutput`; None while decoding.
        result: The whole output, with the last piece only.
    """

    text: str
    token_ids: list[int]
    finish_reason: str | None = None
    result: RequestOutput | None = None


def tokens_per_pass(outputs: Sequence[RequestOutput]) -> float:
    """Returns the tokens of all outputs over their exact forwards; 1.0 if there was no forward.

    Prompt passes and the first token of each output, which they give, are left out.
    """
    num_passes = sum(output.metrics.num_target_passes for output in outputs)
    num_tokens = sum(max(0, output.metrics.num_output_tokens - 1) for output in outputs)
    return num_tokens / num_passes if num_passes else 1.0
