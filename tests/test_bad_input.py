"""Bad input of every kind gives a typed error that says what is wrong, and the engine stays usable."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from specpilot_rs import LLM, SamplingParams, SpecPilotError, _core
from specpilot_rs.demo import DFLASH2_DIR, TARGET_DIR
from specpilot_rs.errors import CheckpointError, ConfigError, DrafterError, OptionError, RequestError
from specpilot_rs.options import shown

PROMPT = "def add(a, b):\n"
PARAMS = SamplingParams(max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def expected(demo_llm: LLM) -> list[int]:
    return demo_llm.generate(PROMPT, PARAMS)[0].outputs[0].token_ids


@pytest.fixture(autouse=True)
def still_usable(demo_llm: LLM, expected: list[int]) -> Iterator[None]:
    """After each test the engine holds no request and gives the tokens that it gave before."""
    yield
    assert not demo_llm._engine.has_unfinished()
    assert demo_llm.generate(PROMPT, PARAMS)[0].outputs[0].token_ids == expected


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("", "empty"),
        ({"prompt_token_ids": []}, "empty"),
        ({"prompt": ""}, "empty"),
        ({"prompt_token_ids": [5] * 5000}, "max_model_len 4096"),
        ({"prompt_token_ids": [5] * 4096}, "max_model_len 4096"),
        ("word " * 5000, "max_model_len 4096"),
        ("half a pair \ud83d", "not valid Unicode"),
        ({"prompt_token_ids": [5, 8192]}, "prompt token 1 is 8192, outside the vocabulary of 8192"),
        ({"prompt_token_ids": [-1]}, "prompt token 0 is -1"),
        ({"prompt_token_ids": [2**40]}, "outside the vocabulary"),
        ({"prompt_token_ids": ["a"]}, "integers"),
        ({"prompt_token_ids": ["a"] * 5000}, r"got list \['a', 'a', 'a', 'a', \.\.\. 5000 items\]$"),
        ({"prompt_token_ids": [1.5]}, "integers"),
        ({"prompt_token_ids": 7}, "integers"),
        ({"prompt_token_ids": "abc"}, "token ids"),
        ({"prompt_token_ids": [True]}, "integers"),
        ({"prompt_token_ids": {5, 6}}, "integers"),
        ({"prompt_token_ids": [10**5000]}, "outside the vocabulary"),
        ({"prompt_token_ids": np.array([1.5])}, "integers"),
        ({"prompt_token_ids": np.array([True])}, "integers"),
        ({"promt": "x"}, "did you mean 'prompt'|did you mean `prompt`"),
        ({"prompt": "x", "prompt_token_ids": [1]}, "one of"),
        ({"prompt": b"x"}, "should be a text"),
        ({}, "one of"),
        (7, "list"),
        ([7], "a text or a mapping"),
    ],
    ids=lambda value: ascii(shown(value))[:40],
)
def test_prompts(demo_llm: LLM, prompt: Any, message: str):
    with pytest.raises(RequestError, match=message) as raised:
        demo_llm.generate(prompt, PARAMS)
    assert raised.value.code == "request"


def test_token_ids_of_numpy_are_token_ids(demo_llm: LLM):
    outputs = demo_llm.generate(
        [{"prompt_token_ids": ids} for ids in ([5, 6], np.array([5, 6]), [np.int64(5), np.uint8(6)])], PARAMS
    )
    assert len({tuple(output.outputs[0].token_ids) for output in outputs}) == 1


def test_the_longest_prompt_leaves_room_for_one_token(demo_llm: LLM):
    llm = LLM.demo(max_model_len=32)
    output = llm.generate({"prompt_token_ids": [5] * 31}, PARAMS)[0]
    assert (len(output.outputs[0].token_ids), output.outputs[0].finish_reason) == (1, "length")
    with pytest.raises(RequestError, match="max_model_len 32"):
        llm.generate({"prompt_token_ids": [5] * 32}, PARAMS)
    assert demo_llm.describe()["max_model_len"] == 4096


def test_streams_are_checked_when_they_are_asked_for(demo_llm: LLM):
    with pytest.raises(RequestError, match="did you mean"):
        demo_llm.stream({"promt": "x"})
    with pytest.raises(RequestError, match="empty"):
        next(demo_llm.stream(""))


@pytest.mark.parametrize("token_ids", [[], [8192], [-1], [5] * 4097])
def test_scores(demo_llm: LLM, token_ids: list[int]):
    with pytest.raises(RequestError):
        demo_llm.score(token_ids)


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"temperature": -0.5}, "temperature"),
        ({"tempature": 0}, "temperature"),
    ],
)
def test_parameters(params: dict[str, Any], message: str):
    with pytest.raises(RequestError, match=message):
        SamplingParams(**params)


def test_as_many_parameters_as_prompts(demo_llm: LLM):
    with pytest.raises(RequestError, match="one per prompt"):
        demo_llm.generate([PROMPT, PROMPT], [PARAMS])
    with pytest.raises(RequestError, match="SamplingParams"):
        demo_llm.generate([PROMPT], [{"max_tokens": 3}])  # type: ignore[list-item]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tokeniser": "x"}, "did you mean `tokenizer`"),
        ({"dtype": "float64"}, "dtype"),
        ({"device": "tpu"}, "device"),
        ({"device": "cuda:first"}, "auto, cpu, cuda or cuda:N"),
        ({"weight_format": "w13"}, "weight_format"),
        ({"head": "sparse"}, "head"),
        ({"max_model_len": 5000}, "max_model_len"),
        ({"speculative_config": {"method": "dflash2", "tree_nodes": 65}}, "tree_nodes"),
        ({"speculative_config": {"tre": "chain"}}, "did you mean `tree`"),
    ],
    ids=lambda value: str(value)[:50],
)
def test_options(options: dict[str, Any], message: str):
    with pytest.raises(OptionError, match=message):
        LLM.demo(**options)


def test_too_many_draft_tokens():
    with pytest.raises((DrafterError, OptionError), match="num_speculative_tokens"):
        LLM.demo(speculative_config={"method": "dflash2", "num_speculative_tokens": 99})


def test_a_tree_that_the_drafter_cannot_score(fixtures_dir: Path):
    config = {"model": str(fixtures_dir / "demo" / "dflash"), "tree": "conditional"}
    with pytest.raises(DrafterError, match="parent-conditional"):
        LLM.demo(speculative_config=config)


def test_a_method_that_the_checkpoint_is_not(fixtures_dir: Path):
    config = {"model": str(fixtures_dir / "demo" / "dflash"), "method": "dflash2"}
    with pytest.raises(DrafterError, match='asks for method "dflash2"'):
        LLM.demo(speculative_config=config)


@pytest.mark.parametrize(
    "config", [{"model": "dflash"}, {"model": "eagle3"}, {"method": "dflash2"}, {"method": "ngram"}]
)
def test_a_confidence_that_no_head_estimates(config: dict[str, Any], fixtures_dir: Path):
    if "model" in config:
        config = {"model": str(fixtures_dir / "demo" / config["model"])}
    with pytest.raises(DrafterError, match=r"confidence head, which this .* drafter does not have"):
        LLM.demo(speculative_config={**config, "min_confidence": 0.5})


@pytest.mark.parametrize("tree_nodes", [1, [1, 16]])
def test_a_q_pass_over_no_draft(tree_nodes: Any):
    with pytest.raises(OptionError, match="a tree in which a Q pass marks a path"):
        LLM.demo(speculative_config={"method": "dflash2", "q_passes": 1, "tree_nodes": tree_nodes})


def test_a_block_of_a_whole_path_drafts_all_but_the_anchor(fixtures_dir: Path, tmp_path: Path):
    drafter = copy_of(fixtures_dir / "demo" / "dspark", tmp_path)
    config = json.loads((drafter / "config.json").read_text())
    config["dflash_config"]["block_size"] = 64
    (drafter / "config.json").write_text(json.dumps(config))
    llm = LLM.demo(speculative_config={"model": str(drafter)})
    assert llm.describe()["num_speculative_tokens"] == 63


def test_a_tap_is_named_as_the_layer_that_it_is(fixtures_dir: Path, tmp_path: Path):
    drafter = copy_of(fixtures_dir / "demo" / "eagle3", tmp_path)
    config = json.loads((drafter / "config.json").read_text())
    config["eagle_aux_hidden_state_layer_ids"] = [2, 5, 8]
    (drafter / "config.json").write_text(json.dumps(config))
    with pytest.raises(DrafterError, match="reads what target layer 7, counted from 0, puts out"):
        LLM.demo(speculative_config={"model": str(drafter)})


def test_a_drafter_of_another_target(fixtures_dir: Path):
    target = fixtures_dir / "families" / "qwen3_5_text"
    with pytest.raises(DrafterError) as raised:
        LLM(target, skip_tokenizer_init=True, speculative_config={"model": str(DFLASH2_DIR)})
    assert str(DFLASH2_DIR) in str(raised.value)
    assert "qwen3_5_text" in str(raised.value)


def test_a_drafter_that_is_not_served(fixtures_dir: Path, tmp_path: Path):
    drafter = copy_of(fixtures_dir / "demo" / "dspark", tmp_path)
    config = json.loads((drafter / "config.json").read_text())
    config["architectures"] = ["MedusaModel"]
    (drafter / "config.json").write_text(json.dumps(config))
    with pytest.raises(SpecPilotError, match=r"MedusaModel.*is not supported; supported: DFlash"):
        LLM.demo(speculative_config={"model": str(drafter)})


def copy_of(directory: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(directory, tmp_path / directory.name))


@pytest.mark.parametrize("num_bytes", [0, 7, 100, 2_000_000])
def test_a_truncated_shard_is_named(tmp_path: Path, num_bytes: int):
    directory = copy_of(TARGET_DIR, tmp_path)
    shard = directory / "model-00002-of-00002.safetensors"
    with shard.open("r+b") as file:
        file.truncate(num_bytes)
    with pytest.raises(CheckpointError, match=shard.name):
        LLM(directory)


def test_a_missing_shard_is_named(tmp_path: Path):
    directory = copy_of(TARGET_DIR, tmp_path)
    (directory / "model-00001-of-00002.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model-00001-of-00002\.safetensors"):
        LLM(directory)


def test_a_directory_without_weights(tmp_path: Path):
    directory = copy_of(TARGET_DIR, tmp_path)
    for file in directory.glob("model*"):
        file.unlink()
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        LLM(directory)


def test_a_directory_without_tokenizer(fixtures_dir: Path):
    directory = fixtures_dir / "families" / "qwen3_5_text"
    with pytest.raises(CheckpointError, match="skip_tokenizer_init=True"):
        LLM(directory)
    output = LLM(directory, skip_tokenizer_init=True).generate({"prompt_token_ids": [1, 2, 3]})[0]
    assert output.outputs[0].token_ids


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("architectures", ["GPT2LMHeadModel"]),
        ("hidden_size", None),
        ("hidden_size", 257),
        ("num_hidden_layers", 9),
        ("vocab_size", 4096),
        ("head_dim", "128"),
        ("rms_norm_eps", 0),
    ],
)
def test_a_config_that_does_not_fit(tmp_path: Path, key: str, value: Any):
    directory = copy_of(TARGET_DIR, tmp_path)
    file = directory / "config.json"
    config = json.loads(file.read_bytes())
    config[key] = value
    if value is None:
        del config[key]
    file.write_text(json.dumps(config), encoding="utf-8")
    with pytest.raises((ConfigError, CheckpointError)):
        LLM(directory)


def test_a_config_that_is_no_json(tmp_path: Path):
    directory = copy_of(TARGET_DIR, tmp_path)
    (directory / "config.json").write_text("{", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"config\.json"):
        LLM(directory)


def test_a_directory_that_is_not_there(tmp_path: Path):
    with pytest.raises(CheckpointError, match="no such directory"):
        LLM(tmp_path / "nothing")


def with_bits(directory: Path, copy: Path, tensor: str, index: int, bits: int) -> Path:
    """A copy of a checkpoint whose BF16 `tensor` holds other bits at one place."""
    shutil.copytree(directory, copy)
    for shard in copy.glob("*.safetensors"):
        data = bytearray(shard.read_bytes())
        begin = 8 + int.from_bytes(data[:8], "little")
        if (entry := json.loads(data[8:begin]).get(tensor)) is not None:
            at = begin + entry["data_offsets"][0] + 2 * index
            data[at : at + 2] = bits.to_bytes(2, "little")
            shard.write_bytes(data)
            return copy
    raise AssertionError(tensor)


@pytest.mark.parametrize("weight_format", ["bf16", "w12"])
@pytest.mark.parametrize(
    ("part", "tensor", "index", "bits", "shown"),
    [
        ("target", "model.norm.weight", 3, 0x7FC0, "NaN at index 3"),
        ("target", "model.layers.6.mlp.down_proj.weight", 5000, 0xFFC1, "NaN at index 5000"),
        ("target", "model.layers.3.self_attn.k_proj.weight", 0, 0x7F80, "inf at index 0"),
        ("drafter", "fc.weight", 70_000, 0xFF80, "-inf at index 70000"),
        ("drafter", "layers.1.input_layernorm.weight", 0, 0x7FC0, "NaN at index 0"),
    ],
)
def test_weights_that_are_no_numbers_are_named(
    part: str, tensor: str, index: int, bits: int, shown: str, weight_format: str, tmp_path: Path
):
    """They would make every logit NaN, or every draft wrong."""
    target, drafter = TARGET_DIR, DFLASH2_DIR
    if part == "target":
        target = with_bits(target, tmp_path / "copy", tensor, index, bits)
    else:
        drafter = with_bits(drafter, tmp_path / "copy", tensor, index, bits)
    with pytest.raises(CheckpointError, match=rf"`{tensor}` should hold finite numbers, got {shown}$"):
        LLM(target, speculative_config={"model": str(drafter)}, weight_format=weight_format)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", ["model.safetensors", "model.safetensors.index.json"])
def test_a_pipe_in_place_of_weights_is_not_waited_for(name: str, tmp_path: Path):
    shutil.copy(TARGET_DIR / "config.json", tmp_path)
    os.mkfifo(tmp_path / name)
    with pytest.raises(SpecPilotError, match="found neither"):
        LLM(tmp_path, skip_tokenizer_init=True)
    with pytest.raises(SpecPilotError, match="regular file"):
        _core.inspect_weights(tmp_path / name)
