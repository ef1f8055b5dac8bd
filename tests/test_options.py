"""Options: one home of defaults, nearest names for unknown ones, and nothing silently ignored."""

from __future__ import annotations

import copy
import dataclasses
import pickle
import re
from typing import Any

import numpy as np
import pytest
from specpilot_rs import LLM
from specpilot_rs.errors import OptionError, RequestError
from specpilot_rs.options import EngineOptions, SamplingParams, SpeculativeConfig, help_of, shown


@pytest.mark.parametrize("options", [EngineOptions, SpeculativeConfig, SamplingParams])
def test_every_field_has_a_help_text_and_a_default(options: type):
    for field in dataclasses.fields(options):
        assert help_of(options, field.name).endswith(".")
        assert field.default is not dataclasses.MISSING


def test_greedy_is_the_default():
    params = SamplingParams()
    assert (params.temperature, params.max_tokens, params.n) == (0.0, 16, 1)


def test_parameters_are_values():
    params = SamplingParams(stop=["x"], stop_token_ids=[1], max_tokens=3)
    assert params == copy.deepcopy(params) == pickle.loads(pickle.dumps(params))
    assert dataclasses.replace(params, max_tokens=4).stop_strings == ("x",)
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.max_tokens = 5  # type: ignore[misc]


@pytest.mark.parametrize(
    ("params", "part"),
    [
        ({"temperature": -0.1}, "`temperature` should be a finite number, at least 0, got -0.1"),
        ({"temperature": float("nan")}, "temperature"),
        ({"temperature": float("inf")}, "temperature"),
        ({"temperature": "warm"}, "temperature"),
        ({"temperature": 10**400}, "temperature"),
        ({"n": 2}, "`n`"),
        ({"logprobs": 5}, "logprobs"),
        ({"prompt_logprobs": 1}, "LLM.score"),
        ({"presence_penalty": 0.1}, "penalties"),
        ({"frequency_penalty": 0.1}, "penalties"),
        ({"repetition_penalty": 1.1}, "penalties"),
        ({"logit_bias": {1: 2.0}}, "logit_bias"),
        ({"allowed_token_ids": [1]}, "allowed_token_ids"),
        ({"bad_words": ["x"]}, "bad_words"),
        ({"spaces_between_special_tokens": False}, "spaces_between_special_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": 2.5}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"min_tokens": -1}, "min_tokens"),
        ({"min_tokens": 17}, "at most max_tokens"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": float("nan")}, "top_p"),
        ({"top_p": 1.01}, "top_p"),
        ({"top_p": None}, "top_p"),
        ({"top_k": 1.5}, "top_k"),
        ({"min_p": -0.01}, "min_p"),
        ({"seed": 1.0}, "seed"),
        ({"seed": 2**63}, "seed"),
        ({"top_k": -2}, "top_k"),
        ({"min_p": 1.5}, "min_p"),
        ({"seed": "x"}, "seed"),
        ({"stop": ""}, "stop"),
        ({"stop": ["a", 1]}, "stop"),
        ({"stop_token_ids": [-1]}, "stop_token_ids"),
        ({"ignore_eos": 1}, "ignore_eos"),
        ({"stop": "x", "detokenize": False}, "detokenize"),
        ({"max_tokens": 2**31}, "max_tokens"),
        ({"max_tokens": 10**5000}, "max_tokens"),
        ({"min_tokens": 2**64}, "min_tokens"),
        ({"top_k": 2**64}, "top_k"),
        ({"seed": 2**64}, "seed"),
        ({"seed": True}, "seed"),
        ({"n": True}, "`n`"),
        ({"temperature": False}, "temperature"),
        ({"temperature": np.zeros(2)}, "temperature"),
        ({"logprobs": np.zeros(2)}, "logprobs"),
        ({"stop": 5}, "stop"),
        ({"stop": {"a": 1}}, "stop"),
        ({"stop": "\ud800"}, "stop"),
        ({"stop_token_ids": 5}, "stop_token_ids"),
        ({"stop_token_ids": 0}, "stop_token_ids"),
        ({"stop_token_ids": {1: 2}}, "stop_token_ids"),
        ({"stop_token_ids": {1}}, "stop_token_ids"),
        ({"stop_token_ids": [True]}, "stop_token_ids"),
        ({"stop_token_ids": np.array([1.5])}, "stop_token_ids"),
        ({"stop_token_ids": np.array([[1]])}, "stop_token_ids"),
        ({"stop_token_ids": [2**31]}, "stop_token_ids"),
    ],
    ids=lambda value: ascii(shown(value))[:60],
)
def test_what_cannot_be_honoured_is_refused(params: dict[str, Any], part: str):
    with pytest.raises(RequestError, match=part) as raised:
        SamplingParams(**params)
    assert raised.value.code == "request"


def test_values_are_shown_but_long_ones_by_their_start():
    nine = list(range(9))
    for short in (nine[:8], (1, [2]), "x" * 198, {"a": [1]}, None, [[], ()]):
        assert shown(short) == repr(short)
    assert shown(nine) == "[0, 1, 2, 3, ... 9 items]"
    assert shown(tuple(nine)) == "(0, 1, 2, 3, ... 9 items)"
    assert shown([nine] * 100_000) == f"[{', '.join([shown(nine)] * 4)}, ... 100000 items]"
    assert shown("x" * 199) == f"'{'x' * 199}..."
    assert re.fullmatch(r"array\(\[0\.0?[0-9., \n]+\.\.\. of shape \(999,\)", shown(np.arange(999) / 1000))
    with pytest.raises(RequestError, match=r"got \[-1, -1, -1, -1, \.\.\. 5000 items\]$"):
        SamplingParams(stop_token_ids=[-1] * 5000)
    with pytest.raises(OptionError, match=r"verify_costs` .* got \[0, 0, 0, 0, \.\.\. 64 items\]$"):
        SpeculativeConfig(verify_costs=[0] * 64)


def test_integers_of_numpy_are_integers():
    params = SamplingParams(
        max_tokens=np.int64(3), temperature=np.float64(0), n=np.int32(1), stop_token_ids=np.array([1, 2])
    )
    assert params == SamplingParams(max_tokens=3, stop_token_ids=[1, 2])
    assert type(params.max_tokens) is int
    assert EngineOptions(num_threads=np.uint8(2)) == EngineOptions(num_threads=2)


def test_numbers_of_numpy_are_numbers():
    assert SamplingParams(temperature=np.float32(0.5), top_p=np.int64(1)) == SamplingParams(temperature=0.5)
    made = SpeculativeConfig(min_confidence=np.float32(0.5), verify_costs=np.array([1, 2], dtype=np.float32))
    assert made == SpeculativeConfig(min_confidence=0.5, verify_costs=[1, np.int64(2)])
    values = (made.min_confidence, *made.verify_costs)
    assert {type(value) for value in (*values, SamplingParams(top_p=np.int64(1)).top_p)} == {float}
    assert EngineOptions(gpu_memory_utilization=np.float32(0.5)) == EngineOptions(gpu_memory_utilization=0.5)


def test_sampling_takes_the_ranges_of_vllm():
    for params in (
        {"temperature": 2},
        {"temperature": np.float64(0.5)},
        {"top_p": 1},
        {"top_k": -1},
        {"min_p": 1},
        {"seed": -(2**63)},
        {"seed": np.int64(5)},
    ):
        made = SamplingParams(**params)
        assert {name: getattr(made, name) for name in params} == params
    assert SamplingParams(seed=-1).seed is None
    assert type(SamplingParams(temperature=2).temperature) is float


def test_parameters_go_by_name():
    with pytest.raises(RequestError, match="by name"):
        SamplingParams(5)  # type: ignore[misc]
    with pytest.raises(OptionError, match="by name"):
        SpeculativeConfig("x")  # type: ignore[misc]


@pytest.mark.parametrize(
    ("wrong", "right"),
    [("temprature", "temperature"), ("max_token", "max_tokens"), ("stop_ids", "stop_token_ids")],
)
def test_an_unknown_parameter_names_the_nearest(wrong: str, right: str):
    with pytest.raises(RequestError, match=f"no parameter `{wrong}`: did you mean `{right}`"):
        SamplingParams(**{wrong: 1})


@pytest.mark.parametrize(
    ("config", "part"),
    [
        ({"modle": "x"}, "did you mean `model`"),
        ({"num_spec_tokens": 4}, "did you mean `num_speculative_tokens`"),
        ({"zzz": 4}, "expected one of `method`, `min_confidence`, `model`"),
        ({"method": "dflsh2"}, "did you mean `dflash2`"),
        ({"method": "eagle"}, "did you mean `eagle3`"),
        ({"method": "ngram", "model": "x"}, "left out for method ngram"),
        ({"method": "eagle3", "prompt_lookup_max": 3}, "prompt_lookup_max"),
        ({"method": "ngram", "prompt_lookup_min": 0}, "prompt_lookup_min"),
        ({"verify_costs": []}, "verify_costs"),
        ({"verify_costs": [1.0, -1.0]}, "verify_costs"),
        ({"verify_costs": "12"}, "verify_costs"),
        ({"min_confidence": 1.0}, "min_confidence"),
        ({"min_confidence": float("nan")}, "min_confidence"),
        ({"tree": "chian"}, "did you mean `chain`"),
        ({"tree": "spin"}, "did you mean `spine`"),
        ({"q_passes": 9}, "q_passes"),
        ({"tuning": "my.profile.toml"}, "tuning"),
        ({"tree_nodes": 0}, "tree_nodes"),
        ({"tree_nodes": "32"}, "tree_nodes"),
        ({"num_speculative_tokens": 0}, "num_speculative_tokens"),
        ({"model": 3}, "model"),
        ({"revision": "\ud800"}, "revision"),
        ({"tree": ["chain"]}, "tree"),
        ({"method": 5}, "method"),
        ({"tree_nodes": 65}, "tree_nodes"),
        ({"num_speculative_tokens": 2**64}, "num_speculative_tokens"),
        ({"q_passes": False}, "q_passes"),
        ({"num_speculative_tokens": 64}, "1..=63"),
        ({"method": "ngram", "revision": "main"}, "left out for method ngram"),
        ({"model": "ngram"}, "is for `method`"),
        ({"verify_costs": np.ones((2, 2))}, "verify_costs"),
        ({"verify_costs": [np.True_]}, "verify_costs"),
        ({"min_confidence": np.float32(1)}, "min_confidence"),
    ],
    ids=lambda value: ascii(value),
)
def test_speculation_that_cannot_be_had_is_refused(config: dict[str, Any], part: str):
    with pytest.raises(OptionError, match=part) as raised:
        SpeculativeConfig.of(config)
    assert raised.value.code == "option"


def test_speculation_must_be_a_mapping():
    with pytest.raises(OptionError, match="mapping"):
        SpeculativeConfig.of("dflash2")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "part"),
    [
        ({"max_model_length": 5}, "did you mean `max_model_len`"),
        ({"speculative_cfg": None}, "did you mean `speculative_config`"),
        ({"max_num_seqs": 0}, "max_num_seqs"),
        ({"max_model_len": "long"}, "max_model_len"),
        ({"gpu_memory_utilization": 1.5}, "gpu_memory_utilization"),
        ({"quantization": "w12"}, "weight_format='w12'"),
        ({"seed": -1}, "seed"),
        ({"device": 0}, "device"),
        ({"profile": "x.toml"}, "profile"),
        ({"num_threads": 0}, "num_threads"),
        ({"num_threads": 257}, "num_threads"),
        ({"max_num_seqs": 2**64}, "max_num_seqs"),
        ({"max_model_len": 2**31}, "max_model_len"),
        ({"max_num_batched_tokens": 0}, "max_num_batched_tokens"),
        ({"max_num_batched_tokens": 8193}, "max_num_batched_tokens"),
        ({"seed": 2**64}, "seed"),
        ({"gpu_memory_utilization": True}, "gpu_memory_utilization"),
        ({"dtype": "\ud800"}, "dtype"),
        ({"skip_tokenizer_init": "yes"}, "skip_tokenizer_init"),
    ],
    ids=lambda value: ascii(value),
)
def test_engine_options_are_checked_before_anything_is_read(options: dict[str, Any], part: str):
    with pytest.raises(OptionError, match=part):
        LLM("/no/such/directory", **options)


def test_only_the_bundled_method_needs_no_model():
    with pytest.raises(OptionError, match="`model`"):
        LLM.demo(speculative_config={"method": "dflash"})
    with pytest.raises(OptionError, match="`model`"):
        LLM("/no/such/directory", speculative_config={"tree": "chain"})


def test_options_of_vllm_that_ask_for_nothing_are_taken():
    llm = LLM.demo(
        speculative_config={"method": "dflash2", "draft_tensor_parallel_size": 1},
        tensor_parallel_size=1,
        pipeline_parallel_size=1,
        trust_remote_code=False,
        tokenizer_mode="auto",
        load_format="safetensors",
        quantization=None,
        kv_cache_dtype="auto",
        enforce_eager=True,
        enable_prefix_caching=None,
        cpu_offload_gb=0.0,
        hf_overrides={},
    )
    assert llm.describe()["method"] == "dflash2"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("tensor_parallel_size", 2),
        ("tensor_parallel_size", True),
        ("trust_remote_code", True),
        ("trust_remote_code", 0),
        ("quantization", "awq"),
        ("kv_cache_dtype", "fp8"),
        ("enforce_eager", "no"),
        ("hf_overrides", {"a": 1}),
        ("load_format", ["auto"]),
    ],
)
def test_options_of_vllm_that_ask_for_something_are_refused_by_name(name: str, value: Any):
    with pytest.raises(OptionError, match=f"LLM option `{name}` should be .*got"):
        LLM.demo(**{name: value})


def test_a_drafter_on_its_own_devices_is_refused_by_name():
    with pytest.raises(OptionError, match="speculative_config option `draft_tensor_parallel_size`"):
        LLM.demo(speculative_config={"draft_tensor_parallel_size": 2})
