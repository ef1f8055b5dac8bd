"""FP8 as compressed-tensors writes it: a scale for a matrix or for each of its channels, told by the config.

Here a BF16 fixture is compressed by the definition of E4M3 alone; what that rounds its weights to is the
reference, as a BF16 checkpoint.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from specpilot_rs import LLM, ConfigError, doctor

from .conftest import FIXTURES
from .kernels.bfloat16 import from_bits, to_bits
from .kernels.e4m3 import VALUES, round_to_e4m3
from .safetensors_file import Tensor, Tensors, read_tensors, write_tensors

CASE = FIXTURES / "families" / "llama_rope_parameters"
IDS = json.loads((CASE / "golden.json").read_text())["sequences"][2]["input_ids"]
CODES = {value: code for code, value in enumerate(VALUES) if code != 0x80}


def arguments(strategy: str, *, dynamic: bool) -> dict[str, Any]:
    """One entry of the config, with the keys that the library writes."""
    return {
        "actorder": None,
        "block_structure": None,
        "dynamic": dynamic,
        "group_size": None,
        "num_bits": 8,
        "observer": None if dynamic else "minmax",
        "observer_kwargs": {},
        "strategy": strategy,
        "symmetric": True,
        "type": "float",
    }


def quantization(strategy: str) -> dict[str, Any]:
    """Scales of tensors come with scales of activations that are known before, those of channels without."""
    is_tensor = strategy == "tensor"
    group = {
        "input_activations": arguments("tensor" if is_tensor else "token", dynamic=not is_tensor),
        "output_activations": None,
        "targets": ["Linear"],
        "weights": arguments(strategy, dynamic=False),
    }
    return {
        "config_groups": {"group_0": group},
        "format": "float-quantized",
        "global_compression_ratio": 1.4,
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
    }


def compress(tensor: Tensor, strategy: str) -> tuple[Tensor, Tensor, Tensor]:
    """A matrix in FP8, its scales, and the BF16 weights that they stand for."""
    _, shape, data = tensor
    weights = from_bits(np.frombuffer(data, "<u2")).reshape(shape)
    largest = np.abs(weights).max(axis=1 if strategy == "channel" else None, keepdims=True)
    # Tensors have their scale in a vector of one, channels in a column.
    scales = (largest / np.float32(448)).astype("<f4").reshape((-1, 1) if strategy == "channel" else (1,))
    values = round_to_e4m3(weights / scales)
    codes = np.vectorize(CODES.get, otypes=[np.uint8])(values)
    decoded = to_bits(values.astype(np.float32) * scales).astype("<u2")
    return (
        ("F8_E4M3", shape, codes.tobytes()),
        ("F32", list(scales.shape), scales.tobytes()),
        ("BF16", shape, decoded.tobytes()),
    )


def write(directory: Path, tensors: Tensors, config: dict[str, Any]) -> Path:
    shutil.copytree(CASE, directory)
    write_tensors(directory / "model.safetensors", tensors)
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def compressed(root: Path, strategy: str) -> tuple[Path, Path, int]:
    """The fixture in FP8, the same as BF16, and how many matrices were compressed."""
    config = json.loads((CASE / "config.json").read_text())
    stored: Tensors = {}
    decoded: Tensors = {}
    for name, tensor in read_tensors(CASE / "model.safetensors").items():
        stored[name] = decoded[name] = tensor
        if name.endswith("_proj.weight"):
            stored[name], stored[f"{name}_scale"], decoded[name] = compress(tensor, strategy)
            if strategy == "tensor":
                scale = np.float32(0.02).tobytes()
                stored[name.replace("weight", "input_scale")] = ("F32", [1], scale)
    num_matrices = sum(name.endswith("weight_scale") for name in stored)
    config_of_both = {**config, "quantization_config": quantization(strategy)}
    return (
        write(root / "stored", stored, config_of_both),
        write(root / "decoded", decoded, config),
        num_matrices,
    )


def scores(directory: Path, **options: Any) -> np.ndarray[Any, Any]:
    return LLM(str(directory), skip_tokenizer_init=True, **options).score(IDS).logits


@pytest.mark.parametrize("strategy", ["tensor", "channel"])
def test_scales_of_a_config_give_the_bits_of_their_weights(strategy: str, tmp_path: Path) -> None:
    stored, decoded, num_matrices = compressed(tmp_path, strategy)
    facts = LLM(str(stored), skip_tokenizer_init=True).describe()
    assert facts["weight_format"] == "fp8"
    assert facts["num_fp8_matrices"] == num_matrices == 28
    want = scores(decoded)
    for weight_format in ("auto", "fp8", "bf16", "w12"):
        got = scores(stored, weight_format=weight_format)
        np.testing.assert_array_equal(got.view(np.uint32), want.view(np.uint32), err_msg=weight_format)
    # Rounded and not scrambled: E4M3 keeps four bits of a weight.
    whole = scores(CASE)
    assert 0 < np.abs(want - whole).mean() < 0.2 * whole.std()
    findings = {finding.what: finding.level for finding in doctor.examine(stored)}
    assert findings["config.json"] == findings["weights"] == doctor.Level.OK


def test_quantised_keys_and_values_name_their_key(tmp_path: Path) -> None:
    """As published: the key with its scheme, and scales of every layer's keys and values."""
    stored, _, _ = compressed(tmp_path, "channel")
    tensors = read_tensors(stored / "model.safetensors")
    for name in [name for name in tensors if name.endswith(("k_proj.weight", "v_proj.weight"))]:
        scale = name.replace("_proj.weight", "_scale")
        tensors[scale] = ("BF16", [1], to_bits(np.array([0.03])).tobytes())
    write_tensors(stored / "model.safetensors", tensors)
    config = json.loads((stored / "config.json").read_text())
    config["quantization_config"]["kv_cache_scheme"] = arguments("tensor", dynamic=False)
    (stored / "config.json").write_text(json.dumps(config))
    message = "`quantization_config.kv_cache_scheme` should be null or left out: keys and values are held as"
    with pytest.raises(ConfigError, match=message):
        LLM(str(stored), skip_tokenizer_init=True)
    [found] = [finding for finding in doctor.examine(stored) if finding.what == "config.json"]
    assert found.level is doctor.Level.FAIL
    assert message in found.message


@pytest.mark.parametrize("name", ["int-quantized", "pack-quantized", "marlin-24", None])
def test_other_layouts_of_the_library_name_themselves(name: str | None, tmp_path: Path) -> None:
    config = json.loads((CASE / "config.json").read_text())
    config["quantization_config"] = {**quantization("channel"), "format": name}
    (tmp_path / "config.json").write_text(json.dumps(config))
    message = "`quantization_config.format` is missing" if name is None else f"compressed-tensors {name}"
    with pytest.raises(ConfigError, match=message):
        LLM(str(tmp_path), skip_tokenizer_init=True)
