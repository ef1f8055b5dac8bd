"""Prompts and parameters as a caller gives them, checked before the engine sees the first one.

In: texts, mappings or token ids, and sampling parameters for one or for all. Out: `Submission`s whose ids lie
in the vocabulary and whose text can be decoded, or a `RequestError` that says what was expected and got.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from specpilot_rs.errors import RequestError
from specpilot_rs.options import SamplingParams, integers_of, nearest, shown
from specpilot_rs.running import Submission
from specpilot_rs.tokenizer import TextDecoder, Tokenizer

Prompt = str | Mapping[str, Any]


class PromptReader:
    """Makes submissions for one model."""

    def __init__(self, tokenizer: Tokenizer | None, vocab_size: int) -> None:
        """Reads for a vocabulary of `vocab_size` ids; without a tokenizer only ids can be read."""
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size

    def submission(self, prompt: Prompt, params: SamplingParams, **details: Any) -> Submission:
        """Reads a prompt.

        Args:
            prompt: A text, `{"prompt": text}` or `{"prompt_token_ids": ids}`.
            params: How to decode.
            **details: Further fields of `Submission`.

        Raises:
            RequestError: It is none of these, or cannot be served.
        """
        if isinstance(prompt, str):
            return self.submission_of_tokens(prompt, self._encode(prompt), params, **details)
        if not isinstance(prompt, Mapping):
            raise RequestError(f"a prompt should be a text or a mapping, got {type(prompt).__name__}")
        for key in prompt:
            if key not in ("prompt", "prompt_token_ids"):
                raise RequestError(
                    f"a prompt has no key {key!r}: {nearest(str(key), ('prompt', 'prompt_token_ids'))}"
                )
        if len(prompt) != 1:
            raise RequestError(
                f"a prompt should hold one of `prompt` and `prompt_token_ids`, got {len(prompt)}"
            )
        if "prompt_token_ids" in prompt:
            return self.submission_of_tokens(None, prompt["prompt_token_ids"], params, **details)
        if not isinstance(prompt["prompt"], str):
            raise RequestError(f"`prompt` should be a text, got {type(prompt['prompt']).__name__}")
        return self.submission_of_tokens(prompt["prompt"], self._encode(prompt["prompt"]), params, **details)

    def _encode(self, text: str) -> list[int]:
        if self._tokenizer is None:
            raise RequestError("a text prompt needs a tokenizer; give `prompt_token_ids`")
        return self._tokenizer.encode(text)

    def submission_of_tokens(
        self, text: str | None, token_ids: Sequence[int], params: SamplingParams, **details: Any
    ) -> Submission:
        """Reads a prompt whose `text`, if it had one, is encoded already.

        Raises:
            RequestError: The ids or the parameters cannot be served.
        """
        if params.stop_strings and self._tokenizer is None:
            raise RequestError("stop strings need a tokenizer; give stop_token_ids")
        checked = self.checked_ids(token_ids)
        decoder = None
        if self._tokenizer is not None and params.detokenize:
            decoder = TextDecoder(self._tokenizer, skip_special_tokens=params.skip_special_tokens)
        return Submission(text, checked, params, decoder, **details)

    def checked_ids(self, token_ids: Sequence[int], name: str = "prompt_token_ids") -> list[int]:
        """Returns token ids as a list.

        Args:
            token_ids: What a caller gave.
            name: The argument that errors are about.

        Raises:
            RequestError: They are no integers, or one lies outside the vocabulary.
        """
        checked = integers_of(token_ids)
        if checked is None:
            raise RequestError(
                f"{name} should be token ids, a list or array of integers, "
                f"got {type(token_ids).__name__} {shown(token_ids)}"
            )
        one = name.removesuffix("_ids").replace("_", " ")
        for index, token in enumerate(checked):
            if not 0 <= token < self._vocab_size:
                raise RequestError(
                    f"{one} {index} is {shown(token)}, outside the vocabulary of {self._vocab_size}"
                )
        return checked


def as_list(items: Any, name: str) -> list[Any]:
    """Returns a sequence that is neither a text nor a mapping as a list.

    Raises:
        RequestError: It is something else; `name` is what the error calls it.
    """
    if isinstance(items, str | bytes | Mapping) or not isinstance(items, Sequence):
        raise RequestError(f"{name} should be a list, got {type(items).__name__}")
    return list(items)


def params_for(
    params: SamplingParams | Sequence[SamplingParams] | None, num_prompts: int
) -> list[SamplingParams]:
    """Returns one `SamplingParams` for each prompt.

    Args:
        params: One for all, one per prompt, or None for the defaults.
        num_prompts: How many prompts there are.

    Raises:
        RequestError: They are of another number or kind.
    """
    if params is None:
        return [SamplingParams()] * num_prompts
    if isinstance(params, SamplingParams):
        return [params] * num_prompts
    several = as_list(params, "sampling_params")
    if len(several) != num_prompts:
        raise RequestError(
            f"sampling_params should be one or {num_prompts}, one per prompt, got {len(several)}"
        )
    for item in several:
        if not isinstance(item, SamplingParams):
            raise RequestError(f"sampling_params should hold SamplingParams, got {type(item).__name__}")
    return several
