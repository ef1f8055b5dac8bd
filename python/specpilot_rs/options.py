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
import numbers
import operator
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NoReturn, Self, TypeGuard

if TYPE_CHECKING:
    from specpilot_rs.errors import SpecPilotError

METHODS = ("dflash", "dflash2", "dspark", "eagle3", "ngram")
"""Drafters; ngram needs no model."""
TREES = ("chain", "ddtree", "conditional", "spine", "eagle")
"""Tree policies."""


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


_NEUTRAL: Mapping[str, tuple[tuple[Any, ...], str]] = MappingProxyType(
    {
        "tensor_parallel_size": ((1,), "a model runs on one device"),
        "pipeline_parallel_size": ((1,), "a model runs on one device"),
        "data_parallel_size": ((1,), "a model runs on one device"),
        "draft_tensor_parallel_size": ((1, None), "a drafter runs on its target's device"),
        "distributed_executor_backend": ((None,), "a model runs on one device"),
        "trust_remote_code": ((False,), "code of a checkpoint is never run"),
        "tokenizer_mode": (("auto",), "there is one tokenizer"),
        "load_format": (("auto", "safetensors"), "weights are read from safetensors"),
        "quantization": ((None,), "weights keep their bits; weight_format='w12' holds them in 12"),
        "kv_cache_dtype": (("auto",), "keys and values are held as `dtype`"),
        "enforce_eager": ((True, False), "nothing is captured or compiled"),
        "enable_prefix_caching": ((None, False), "prompts share no memory"),
        "enable_lora": ((False,), "adapters are not in this release"),
        "cpu_offload_gb": ((0.0,), "weights stay on their device"),
        "hf_overrides": ((None, {}), "configs are taken as they are"),
        "disable_log_stats": ((True, False), "nothing is logged"),
    }
)
"""vLLM's options without a counterpart here: the values that ask for nothing, and why there is no other."""


def without_neutral(given: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Returns options without those of vLLM that have no counterpart here and ask for nothing.

    Args:
        given: Options as the caller wrote them.
        where: What has these options, for the message.

    Raises:
        OptionError: One of them asks for something.
    """
    kept = {}
    for name, value in given.items():
        if name not in _NEUTRAL:
            kept[name] = value
            continue
        neutral, reason = _NEUTRAL[name]
        if not any(_is_same(value, item) for item in neutral):
            allowed = " or ".join(repr(item) for item in neutral)
            raise option_error(f"{where} option `{name}` should be {allowed} ({reason}), got {shown(value)}")
    return kept


PLANTED_OPTIONS = (
    "device",
    "kernels",
    "weight_format",
    "head",
    "max_model_len",
    "max_num_seqs",
    "max_num_batched_tokens",
    "gpu_memory_utilization",
    "num_threads",
)
"""What `LLM.planted` takes of `EngineOptions`: the rest speaks of files or tokenizers."""
MAX_INTEGER = 2**31 - 1
"""Most that any count may be: far above every real one, and safe in each integer type behind it."""
_MAX_THREADS = 256
_MAX_BATCHED_TOKENS = 8192
_MAX_Q_PASSES = 8
_MAX_TREE_NODES = 64
_MAX_DRAFT_TOKENS = _MAX_TREE_NODES - 1
_MAX_LOOKUP = 64

_Refuse = Callable[[str, str, object], NoReturn]


def as_integer(value: object) -> int | None:
    """Returns an integer of any library as Python's own, or None for all else, truth values included."""
    if isinstance(value, bool) or type(value).__name__ in ("bool", "bool_") or hasattr(value, "__len__"):
        return None
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        return None


def _is_number(value: object) -> TypeGuard[float]:
    """Says whether a value, of any library, is a finite number and no truth value."""
    try:
        return isinstance(value, numbers.Real) and not isinstance(value, bool) and math.isfinite(value)
    except OverflowError:  # an integer beyond all floats
        return False


def _set_integer(
    options: object, name: str, least: int, most: int, refuse: _Refuse, *, optional: bool = False
) -> None:
    """Checks an integer field of a frozen dataclass and makes it Python's own `int`."""
    value = getattr(options, name)
    if optional and value is None:
        return
    number = as_integer(value)
    if number is None or not least <= number <= most:
        refuse(name, f"an integer in {least}..={most}" + (" or None" if optional else ""), value)
    object.__setattr__(options, name, number)


def shown(value: object) -> str:
    """Returns a value for an error message: of a long list the start and the length."""
    if isinstance(value, list | tuple) and len(value) > 8:
        start, end = "[]" if isinstance(value, list) else "()"
        return f"{start}{', '.join(map(shown, value[:4]))}, ... {len(value)} items{end}"
    try:
        text = repr(value)
    except ValueError:  # an integer of more digits than Python prints
        text = f"an {type(value).__name__} too long to print"
    shape = getattr(value, "shape", None)
    size = f" of shape {tuple(shape)}" if isinstance(shape, tuple) else ""
    return text if len(text) <= 200 else f"{text[:200]}...{size}"


def is_text(value: object) -> TypeGuard[str]:
    """Says whether a value is a string that UTF-8 can carry, as any but half a surrogate pair is."""
    if not isinstance(value, str):
        return False
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """Options of one engine as the caller gave them; the engine resolves them against model and device."""

    dtype: str = _option("auto", "Activations: auto or float32, which is the same in this release.")
    device: str = _option(
        "auto", "Where to run: cpu, cuda:N (a GPU), or auto (the first GPU if it can be used, else the CPU)."
    )
    weight_format: str = _option(
        "auto",
        "How the target's linear layers are held: auto (as in the checkpoint), bf16, w12 or fp8 (where the "
        "checkpoint holds it), all with the same bits; fp8_w8a8 rounds activations to FP8 as well, which is "
        "another model with its own text.",
    )
    kernels: str = _option(
        "lossless",
        "What the target runs on: lossless (row-invariant: speculation changes no token) or stock (cuBLASLt "
        "on BF16, a dense head, Gated DeltaNet token by token, drafts as one chain: a baseline for "
        "measurements on a GPU, outside that promise).",
    )
    head: str = _option(
        "auto",
        "How greedy tokens are found: dense (all logits), screened (an INT8 copy of the LM head picks the "
        "few that could win; same tokens) or auto (screened where that is faster).",
    )
    max_model_len: int | None = _option(
        None, "Most tokens of prompt and output; the model's own limit if omitted."
    )
    max_num_seqs: int = _option(8, "Most requests decoded at once.")
    max_num_batched_tokens: int | None = _option(
        None,
        "Most rows of a pass over all requests, and so of a prompt chunk; 256 if omitted, and then 64 of one "
        "prompt on a GPU.",
    )
    gpu_memory_utilization: float = _option(0.9, "Share of the device's memory that the engine may take.")
    seed: int = _option(0, "Seed of requests that sample and bring none of their own.")
    num_threads: int | None = _option(None, "Worker threads on the CPU; all cores if omitted.")
    method: str | None = _option(None, "Drafter method; read from the drafter's checkpoint if omitted.")
    num_speculative_tokens: int | Sequence[int] | None = _option(
        None, "Drafted positions, or those of each draft; the drafter's block if omitted."
    )
    tree: str | None = _option(None, "Tree policy; the best that the drafter's scores allow if omitted.")
    tree_nodes: int | Sequence[int] | None = _option(
        None, "Rows of a tree or of each pass's tree, root included; 1 is plain decoding."
    )
    q_passes: int = _option(0, "Passes through the 8-bit view before the exact one.")
    q_head: str = _option("auto", "LM head of those passes: auto, exact or int8.")
    verify_costs: Sequence[float] | None = _option(
        None, "Cost of a step that verifies 1, 2, ... rows; trees grow while rows pay."
    )
    min_confidence: float = _option(
        0.0, "Chance of acceptance below which a drafter with a confidence head stops; 0: it does not."
    )
    prompt_lookup_min: int | None = _option(None, "Shortest suffix that ngram looks up.")
    prompt_lookup_max: int | None = _option(None, "Longest suffix that ngram looks up.")
    extra_eos_token_ids: tuple[int, ...] = _option((), "End tokens known to the tokenizer only.")

    def __post_init__(self) -> None:
        """Refuses values whose type Rust could not even read."""
        for name in ("dtype", "device", "weight_format", "kernels", "head", "q_head"):
            _require(is_text(getattr(self, name)), name, "a string", getattr(self, name))
        for name, most, optional in (
            ("max_model_len", MAX_INTEGER, True),
            ("max_num_seqs", MAX_INTEGER, False),
            ("max_num_batched_tokens", _MAX_BATCHED_TOKENS, True),
            ("num_threads", _MAX_THREADS, True),
        ):
            _set_integer(self, name, 1, most, _refuse_option, optional=optional)
        _set_integer(self, "q_passes", 0, _MAX_Q_PASSES, _refuse_option)
        _set_integer(self, "seed", 0, MAX_INTEGER, _refuse_option)
        _set_sizes(self)
        share = self.gpu_memory_utilization
        _require(
            _is_number(share) and 0 < share <= 1,
            "gpu_memory_utilization",
            "a number above 0 and at most 1",
            share,
        )
        object.__setattr__(self, "gpu_memory_utilization", float(share))


def _set_sizes(options: EngineOptions | SpeculativeConfig) -> None:
    """Checks what may be one number for all trees or one for each."""
    for name, most in (
        ("num_speculative_tokens", _MAX_DRAFT_TOKENS),
        ("tree_nodes", _MAX_TREE_NODES),
    ):
        value = getattr(options, name)
        sizes = integers_of(value)
        if sizes is None:
            _set_integer(options, name, 1, most, _refuse_option, optional=True)
            continue
        expected = f"an integer in 1..={most}, one for each of the {options.q_passes + 1} trees, or None"
        fits = len(sizes) == options.q_passes + 1 and all(1 <= size <= most for size in sizes)
        _require(fits, name, expected, value)
        object.__setattr__(options, name, tuple(sizes))


def _refuse_option(name: str, expected: str, got: object) -> NoReturn:
    raise option_error(f"option `{name}` should be {expected}, got {shown(got)}")


def _require(holds: bool, name: str, expected: str, got: object) -> None:
    if not holds:
        _refuse_option(name, expected, got)


def _require_choice(name: str, value: str | None, valid: Sequence[str]) -> None:
    _require(value is None or is_text(value), name, "a string", value)
    if value is not None and value not in valid:
        raise option_error(f"{name} {value!r} is unknown: {nearest(value, valid)}")


def _costs_of(value: Sequence[float] | None) -> tuple[float, ...] | None:
    if value is None:
        return None
    costs = _items_of(value)
    if costs and all(_is_number(cost) and cost > 0 for cost in costs):
        return tuple(map(float, costs))
    _refuse_option("verify_costs", "positive costs of steps with 1, 2, ... rows, or None", value)


@dataclass(frozen=True, kw_only=True)
class SpeculativeConfig:
    """How to speculate. `None` in its place means plain decoding."""

    model: str | None = _option(None, "Drafter: a directory or a hub id.")
    method: str | None = _option(
        None, f"Drafter method: {', '.join(METHODS)}; found from the checkpoint if omitted."
    )
    num_speculative_tokens: int | Sequence[int] | None = _option(
        None,
        "Drafted positions, more or fewer than the drafter was trained for; its usual number if omitted. "
        "With q_passes perhaps a list: one number for each draft.",
    )
    revision: str | None = _option(None, "Revision of the drafter on the hub.")
    tree: str | None = _option(None, f"Tree policy: {', '.join(TREES)}.")
    tree_nodes: int | Sequence[int] | None = _option(
        None,
        "Rows verified at once, root included; 1 is plain decoding. With q_passes perhaps a list: one number "
        "for the tree of each pass.",
    )
    verify_costs: Sequence[float] | None = _option(
        None, "Measured cost of a step that verifies 1, 2, ... rows: trees grow only while rows pay."
    )
    min_confidence: float = _option(
        0.0, "Chance of acceptance below which a drafter with a confidence head stops; 0: it does not."
    )
    prompt_lookup_min: int | None = _option(None, "Shortest suffix that ngram looks up; 2 if omitted.")
    prompt_lookup_max: int | None = _option(None, "Longest suffix that ngram looks up; 5 if omitted.")
    q_passes: int = _option(
        0,
        "Passes through the 8-bit view before the exact one: each marks a path, and a draft follows its end.",
    )
    q_head: str = _option(
        "auto",
        "LM head of those passes: int8 (an INT8 copy taken at its word), exact, or auto (int8 where `head` "
        "is screened and so has that copy).",
    )
    tuning: str = _option(
        "auto", "auto (use a tuned profile where one is known; this release knows none) or off."
    )

    def __new__(cls, *positional: Any, **options: Any) -> Self:
        """Refuses unknown options before the dataclass sees them."""
        if positional:
            raise option_error(
                f"SpeculativeConfig takes options by name, as in model=...; got {shown(positional[0])}"
            )
        refuse_unknown_options(options, cls.__dataclass_fields__, "speculative_config")
        return super().__new__(cls)

    def __post_init__(self) -> None:
        """Refuses what no model could honour."""
        _require_choice("method", self.method, METHODS)
        _require_choice("tree", self.tree, TREES)
        _require_choice("q_head", self.q_head, ("auto", "exact", "int8"))
        _require(self.q_head is not None, "q_head", "a string", None)
        if isinstance(self.model, os.PathLike):
            object.__setattr__(self, "model", os.fspath(self.model))
        for name in ("model", "revision"):
            value = getattr(self, name)
            _require(value is None or is_text(value), name, "a string", value)
        _set_integer(self, "q_passes", 0, _MAX_Q_PASSES, _refuse_option)
        _set_sizes(self)
        for name in ("prompt_lookup_min", "prompt_lookup_max"):
            _set_integer(self, name, 1, _MAX_LOOKUP, _refuse_option, optional=True)
            _require(
                getattr(self, name) is None or self.method == "ngram",
                name,
                'left out unless method is "ngram"',
                getattr(self, name),
            )
        for name in ("model", "revision"):
            _require(
                self.method != "ngram" or getattr(self, name) is None,
                name,
                "left out for method ngram, which has none",
                getattr(self, name),
            )
        _require(
            self.model not in METHODS or os.path.isdir(self.model),
            "model",
            "a drafter's directory or hub id; the name of a method is for `method`",
            self.model,
        )
        object.__setattr__(self, "verify_costs", _costs_of(self.verify_costs))
        _require(
            _is_number(self.min_confidence) and 0 <= self.min_confidence < 1,
            "min_confidence",
            "a number from 0 to below 1",
            self.min_confidence,
        )
        object.__setattr__(self, "min_confidence", float(self.min_confidence))
        _require(
            isinstance(self.tuning, str) and self.tuning in ("auto", "off"),
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
        named = {str(key): item for key, item in value.items()}
        return cls(**without_neutral(named, "speculative_config"))


def _refuse_config(value: object) -> NoReturn:
    raise option_error(f"speculative_config should be a mapping or None, got {type(value).__name__}")


_NOT_YET: dict[str, tuple[Any, str]] = {
    "n": (1, "there is one completion per prompt in this release"),
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
    """How one request is decoded, with vLLM's names and ranges.

    Temperature 0, the default, is greedy: a checkpoint's `generation_config.json` sets nothing here. Above 0
    tokens are drawn after the temperature, `min_p`, `top_k` and `top_p`, applied in this order; of tokens
    that tie at a limit those with the lowest ids stay. What is drawn depends on the logits, the seed and the
    position alone, so one seed gives one text, speculating or not, whatever runs beside it. Without a seed
    the draws follow from the `seed` of the `LLM` and the index of the prompt in its call.
    """

    n: int = _option(1, "Completions of the prompt; only 1 in this release.")
    temperature: float = _option(0.0, "0 is greedy; above 0 tokens are drawn, the higher the more evenly.")
    top_p: float = _option(
        1.0, "Share of the probability that the likeliest tokens kept must reach, in (0, 1]."
    )
    top_k: int = _option(0, "Number of the likeliest tokens to draw from; 0 or -1: all.")
    min_p: float = _option(0.0, "Least probability relative to the likeliest token, in [0, 1].")
    seed: int | None = _option(None, "Seed of the draws; from that of the LLM if omitted or -1.")
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

    def __new__(cls, *positional: Any, **params: Any) -> Self:
        """Refuses unknown parameters before the dataclass sees them."""
        if positional:
            raise request_error(
                f"SamplingParams takes parameters by name, as in max_tokens=16; got {shown(positional[0])}"
            )
        for name in params:
            if name not in cls.__dataclass_fields__:
                raise request_error(
                    f"SamplingParams has no parameter `{name}`: {nearest(name, cls.__dataclass_fields__)}"
                )
        return super().__new__(cls)

    def __post_init__(self) -> None:
        """Brings sequences to tuples and refuses what cannot be honoured."""
        for name, (only, reason) in _NOT_YET.items():
            value = getattr(self, name)
            if not _is_same(value, only):
                _refuse(name, f"{only!r} ({reason})", value)
        if not (self.stop is None or isinstance(self.stop, str | Sequence)):
            _refuse("stop", "a string or a list of strings", self.stop)
        stops = self.stop_strings
        if not all(is_text(text) and text for text in stops):
            _refuse("stop", "a non-empty string of valid Unicode or several", self.stop)
        ids = integers_of(() if self.stop_token_ids is None else self.stop_token_ids)
        if ids is None or not all(0 <= token <= MAX_INTEGER for token in ids):
            _refuse("stop_token_ids", "a list of token ids", self.stop_token_ids)
        object.__setattr__(self, "stop", stops)
        object.__setattr__(self, "stop_token_ids", tuple(ids))
        self._check_ranges()
        if stops and not self.detokenize:
            _refuse("detokenize", "True when stop strings are given", self.detokenize)

    def _check_ranges(self) -> None:
        _set_integer(self, "max_tokens", 1, MAX_INTEGER, _refuse, optional=True)
        _set_integer(self, "min_tokens", 0, MAX_INTEGER, _refuse)
        _set_integer(self, "top_k", -1, MAX_INTEGER, _refuse)
        _set_integer(self, "seed", -(2**63), 2**63 - 1, _refuse, optional=True)
        if self.seed == -1:
            object.__setattr__(self, "seed", None)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            _refuse("min_tokens", f"at most max_tokens ({self.max_tokens})", self.min_tokens)
        for name, expected in (
            ("temperature", "a finite number, at least 0"),
            ("top_p", "above 0 and at most 1"),
            ("min_p", "in 0..1"),
        ):
            value = getattr(self, name)
            if not _is_number(value) or value < 0 or (name != "temperature" and value > 1):
                _refuse(name, expected, value)
            object.__setattr__(self, name, float(value))
        if self.top_p == 0:
            _refuse("top_p", "above 0 and at most 1", self.top_p)
        for name in ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens", "detokenize"):
            if not isinstance(getattr(self, name), bool):
                _refuse(name, "True or False", getattr(self, name))

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """`stop` as a tuple, whichever way it was written."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())


def integers_of(items: object) -> list[int] | None:
    """Returns the integers of a list, a tuple or an integer array, or None for anything else."""
    ids = []
    listed = _items_of(items)
    for item in () if listed is None else listed:
        number = as_integer(item)
        if number is None:
            return None
        ids.append(number)
    return None if listed is None else ids


def _items_of(value: object) -> list[Any] | None:
    """Returns the items of a list, a tuple or an array of one dimension, or None for anything else."""
    if isinstance(value, str | bytes | bytearray) or not isinstance(value, Sequence):
        shape = getattr(value, "shape", None)
        if not isinstance(shape, tuple) or len(shape) != 1:
            return None
    items: Iterable[Any] = value  # type: ignore[assignment]
    return list(items)


def _is_same(value: object, only: object) -> bool:
    # Types first: True == 1, and comparing an array gives no single answer.
    if only is None or isinstance(only, bool):
        return value is only
    if isinstance(only, str | dict):
        return type(value) is type(only) and value == only
    if isinstance(only, int):
        return as_integer(value) == only
    return as_integer(value) == only or (_is_number(value) and value == only)


def _refuse(name: str, expected: str, got: object) -> NoReturn:
    raise request_error(f"sampling parameter `{name}` should be {expected}, got {shown(got)}")
