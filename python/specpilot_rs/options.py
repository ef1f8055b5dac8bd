"""What can be asked for: engine options, speculation and sampling parameters.

These frozen dataclasses are the only home of defaults and help texts; the command line shows the same ones.
Ranges that depend on a model or device are judged in Rust. Here stand the checks that need neither: unknown
names (answered with the nearest valid one) and parameters of vLLM that this release cannot honour, which are
refused and never silently dropped.

The module does not load the extension, so that help texts are cheap; errors import it when they are raised.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NoReturn, Self

if TYPE_CHECKING:
    from specpilot_rs.errors import SpecPilotError

METHODS = ("dflash", "dflash2")
"""Drafters that this release runs."""
METHODS_PLANNED = ("dspark", "eagle3", "ngram")
TREES = ("chain", "ddtree", "conditional")
"""Tree policies that this release runs."""
TREES_PLANNED = ("spine", "eagle")


def _option(default: Any, help_text: str) -> Any:
    return field(default=default, metadata={"help": help_text})


def help_of(options: type[Any], name: str) -> str:
    """Returns the help text of one field of an options class."""
    return next(str(f.metadata["help"]) for f in dataclasses.fields(options) if f.name == name)


def nearest(name: str, valid: Iterable[str]) -> str:
    """Returns a clause that names the valid name most like `name`, or all of them if none is close."""
    names = sorted(valid)
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    return f"did you mean `{close[0]}`?" if close else f"expected one of {', '.join(f'`{n}`' for n in names)}"


def option_error(message: str) -> SpecPilotError:
    """Builds an `OptionError`, loading the extension that defines it."""
    from specpilot_rs.errors import OptionError

    return OptionError(message)


def request_error(message: str) -> SpecPilotError:
    """Builds a `RequestError`, loading the extension that defines it."""
    from specpilot_rs.errors import RequestError

    return RequestError(message)


def refuse_unknown_options(given: Iterable[str], valid: Iterable[str], where: str) -> None:
    """Raises an `OptionError` if a name in `given` is not in `valid`.

    Args:
        given: Names as the caller wrote them.
        valid: Names that exist.
        where: What has these options, for the message.
    """
    names = list(valid)
    for name in given:
        if name not in names:
            raise option_error(f"{where} has no option `{name}`: {nearest(str(name), names)}")


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """Options of one engine as the caller gave them; the engine resolves them against model and device."""

    dtype: str = _option("auto", "Activations: auto (float32 on the CPU) or float32.")
    device: str = _option("auto", "Where to run: auto or cpu.")
    weight_format: str = _option("auto", "How weights are held: auto (as in the checkpoint) or bf16.")
    head: str = _option(
        "auto",
        "How greedy tokens are found: dense (all logits), screened (an INT8 copy of the LM head picks the "
        "few that could win; same tokens) or auto (screened where that is faster).",
    )
    max_model_len: int | None = _option(
        None, "Most tokens of prompt and output; the model's own limit if omitted."
    )
    max_num_seqs: int = _option(8, "Most requests decoded at once.")
    gpu_memory_utilization: float = _option(0.9, "Share of the device's memory that the engine may take.")
    seed: int = _option(0, "Seed of whatever is random; greedy decoding uses none.")
    num_threads: int | None = _option(None, "Worker threads on the CPU; all cores if omitted.")
    method: str | None = _option(None, "Drafter method; read from the drafter's checkpoint if omitted.")
    num_speculative_tokens: int | None = _option(None, "Drafted positions; the drafter's block if omitted.")
    tree: str | None = _option(None, "Tree policy; the best that the drafter's scores allow if omitted.")
    tree_nodes: int | None = _option(None, "Rows verified at once, root included; 1 is plain decoding.")
    extra_eos_token_ids: tuple[int, ...] = _option((), "End tokens known to the tokenizer only.")

    def __post_init__(self) -> None:
        """Refuses values whose type Rust could not even read."""
        for name in ("dtype", "device", "weight_format", "head"):
            _require(isinstance(getattr(self, name), str), name, "a string", getattr(self, name))
        for name in ("max_model_len", "max_num_seqs", "num_threads"):
            value = getattr(self, name)
            optional = value is None and name != "max_num_seqs"
            _require(optional or (_is_int(value) and value >= 1), name, "an integer of at least 1", value)
        _require(_is_int(self.seed) and 0 <= self.seed < 2**64, "seed", "an integer in 0..2**64", self.seed)
        share = self.gpu_memory_utilization
        _require(
            isinstance(share, int | float) and 0 < share <= 1,
            "gpu_memory_utilization",
            "a number above 0 and at most 1",
            share,
        )


def _require(holds: bool, name: str, expected: str, got: object) -> None:
    if not holds:
        raise option_error(f"option `{name}` should be {expected}, got {got!r}")


def _require_choice(name: str, value: str | None, ready: Sequence[str], planned: Sequence[str]) -> None:
    if value is None or value in ready:
        return
    if value in planned:
        raise option_error(f"{name} {value!r} is not in this release; available: {', '.join(ready)}")
    raise option_error(f"{name} {value!r} is unknown: {nearest(str(value), [*ready, *planned])}")


@dataclass(frozen=True, kw_only=True)
class SpeculativeConfig:
    """How to speculate. `None` in its place means plain decoding."""

    model: str | None = _option(None, "Drafter: a directory or a hub id.")
    method: str | None = _option(
        None, f"Drafter method: {', '.join(METHODS)}; found from the checkpoint if omitted."
    )
    num_speculative_tokens: int | None = _option(None, "Drafted positions; the drafter's block if omitted.")
    revision: str | None = _option(None, "Revision of the drafter on the hub.")
    tree: str | None = _option(None, f"Tree policy: {', '.join(TREES)}.")
    tree_nodes: int | None = _option(None, "Rows verified at once, root included; 1 is plain decoding.")
    q_passes: int = _option(0, "Marking passes before the exact one; this release has none, so only 0.")
    tuning: str = _option(
        "auto", "auto (use a tuned profile where one is known; this release knows none) or off."
    )

    def __new__(cls, **options: Any) -> Self:
        """Refuses unknown options before the dataclass sees them."""
        refuse_unknown_options(options, cls.__dataclass_fields__, "speculative_config")
        return super().__new__(cls)

    def __post_init__(self) -> None:
        """Refuses what no model could honour."""
        _require_choice("method", self.method, METHODS, METHODS_PLANNED)
        _require_choice("tree", self.tree, TREES, TREES_PLANNED)
        for name in ("model", "revision"):
            value = getattr(self, name)
            _require(value is None or isinstance(value, str), name, "a string", value)
        for name in ("num_speculative_tokens", "tree_nodes"):
            value = getattr(self, name)
            _require(
                value is None or (_is_int(value) and value >= 1), name, "an integer of at least 1", value
            )
        _require(
            self.q_passes == 0, "q_passes", "0 (two-stage verification is not in this release)", self.q_passes
        )
        _require(
            self.tuning in ("auto", "off"),
            "tuning",
            '"auto" or "off" (profiles are not in this release)',
            self.tuning,
        )

    @classmethod
    def of(cls, value: Mapping[str, Any] | SpeculativeConfig) -> SpeculativeConfig:
        """Reads a mapping with these fields as keys, as vLLM takes it."""
        if isinstance(value, SpeculativeConfig):
            return value
        if not isinstance(value, Mapping):
            _refuse_config(value)
        return cls(**{str(key): item for key, item in value.items()})


def _refuse_config(value: object) -> NoReturn:
    raise option_error(f"speculative_config should be a mapping or None, got {type(value).__name__}")


_NOT_YET: dict[str, tuple[Any, str]] = {
    "n": (1, "several completions of one prompt need sampling"),
    "temperature": (0.0, "sampling is not in this release; 0 is the lossless greedy mode"),
    "presence_penalty": (0.0, "penalties are not in this release"),
    "frequency_penalty": (0.0, "penalties are not in this release"),
    "repetition_penalty": (1.0, "penalties are not in this release"),
    "logprobs": (None, "log-probabilities are not in this release; record_logits=True gives the logits"),
    "prompt_logprobs": (None, "log-probabilities are not in this release; LLM.score gives the logits"),
    "logit_bias": (None, "changed logits are not in this release"),
    "allowed_token_ids": (None, "changed logits are not in this release"),
    "bad_words": (None, "changed logits are not in this release"),
    "spaces_between_special_tokens": (True, "only the tokenizer's own spacing is in this release"),
}


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How one request is decoded, with vLLM's names; temperature 0, the default, is the lossless mode."""

    n: int = _option(1, "Completions of the prompt; only 1 in this release.")
    temperature: float = _option(0.0, "0 is greedy; nothing else is in this release.")
    top_p: float = _option(1.0, "Nucleus of the distribution, in (0, 1]; no effect on greedy decoding.")
    top_k: int = _option(0, "Most likely tokens kept, 0 or -1 for all; no effect on greedy decoding.")
    min_p: float = _option(0.0, "Least relative probability, in [0, 1]; no effect on greedy decoding.")
    seed: int | None = _option(None, "Seed of the request; greedy decoding uses none.")
    max_tokens: int | None = _option(16, "Most tokens to generate; None: up to the context limit.")
    min_tokens: int = _option(0, "Tokens before which no end token and no stop string ends the output.")
    stop: str | Sequence[str] | None = _option(
        None, "Strings that end the output when its text contains them."
    )
    stop_token_ids: Sequence[int] = _option((), "Tokens that end the output, besides the model's own.")
    ignore_eos: bool = _option(False, "Do not end at the model's end tokens.")
    include_stop_str_in_output: bool = _option(
        False, "Keep the stop string, or the stop token's text, in the text."
    )
    skip_special_tokens: bool = _option(True, "Leave special tokens out of the text.")
    detokenize: bool = _option(True, "Make text of the tokens; without it the text is empty.")
    spaces_between_special_tokens: bool = _option(True, "Only True in this release.")
    logprobs: int | None = _option(None, "Not in this release.")
    prompt_logprobs: int | None = _option(None, "Not in this release.")
    presence_penalty: float = _option(0.0, "Not in this release.")
    frequency_penalty: float = _option(0.0, "Not in this release.")
    repetition_penalty: float = _option(1.0, "Not in this release.")
    logit_bias: Mapping[int, float] | None = _option(None, "Not in this release.")
    allowed_token_ids: Sequence[int] | None = _option(None, "Not in this release.")
    bad_words: Sequence[str] | None = _option(None, "Not in this release.")

    def __new__(cls, **params: Any) -> Self:
        """Refuses unknown parameters before the dataclass sees them."""
        for name in params:
            if name not in cls.__dataclass_fields__:
                raise request_error(
                    f"SamplingParams has no parameter `{name}`: {nearest(name, cls.__dataclass_fields__)}"
                )
        return super().__new__(cls)

    def __post_init__(self) -> None:
        """Brings sequences to tuples and refuses what cannot be honoured."""
        for name, (only, reason) in _NOT_YET.items():
            if getattr(self, name) != only:
                _refuse(name, f"{only!r} ({reason})", getattr(self, name))
        stops = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        if not all(isinstance(text, str) and text for text in stops):
            _refuse("stop", "a non-empty string or several", self.stop)
        ids = tuple(self.stop_token_ids or ())
        if not all(_is_int(token) and 0 <= token < 2**32 for token in ids):
            _refuse("stop_token_ids", "token ids", self.stop_token_ids)
        object.__setattr__(self, "stop", stops)
        object.__setattr__(self, "stop_token_ids", ids)
        self._check_ranges()
        if stops and not self.detokenize:
            _refuse("detokenize", "True when stop strings are given", self.detokenize)

    def _check_ranges(self) -> None:
        if self.max_tokens is not None and not (_is_int(self.max_tokens) and self.max_tokens >= 1):
            _refuse("max_tokens", "an integer of at least 1, or None", self.max_tokens)
        if not (_is_int(self.min_tokens) and self.min_tokens >= 0):
            _refuse("min_tokens", "an integer of at least 0", self.min_tokens)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            _refuse("min_tokens", f"at most max_tokens ({self.max_tokens})", self.min_tokens)
        if not (_is_number(self.top_p) and 0 < self.top_p <= 1):
            _refuse("top_p", "above 0 and at most 1", self.top_p)
        if not (_is_int(self.top_k) and self.top_k >= -1):
            _refuse("top_k", "an integer of at least 1, or 0 or -1 for all", self.top_k)
        if not (_is_number(self.min_p) and 0 <= self.min_p <= 1):
            _refuse("min_p", "in 0..1", self.min_p)
        if not (self.seed is None or _is_int(self.seed)):
            _refuse("seed", "an integer or None", self.seed)
        for name in ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens", "detokenize"):
            if not isinstance(getattr(self, name), bool):
                _refuse(name, "True or False", getattr(self, name))

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """`stop` as a tuple, whichever way it was written."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _refuse(name: str, expected: str, got: object) -> NoReturn:
    raise request_error(f"sampling parameter `{name}` should be {expected}, got {got!r}")
