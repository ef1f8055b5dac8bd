"""FP8 checkpoints: how they are held, and what is said of scales that are missing, odd or of no use."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from specpilot_rs import LLM, CheckpointError, OptionError, SamplingParams

from . import random_drafters as drafters
from .conftest import FIXTURES
from .safetensors_file import Tensors, read_tensors, write_tensors

CASE = FIXTURES / "families" / "qwen3_5_fp8"
PROMPT = {"prompt_token_ids": json.loads((CASE / "golden.json").read_text())["sequences"][2]["input_ids"]}
# The second half says what may follow the first, so prompt lookup has something to draft.
REPEATED = {"prompt_token_ids": PROMPT["prompt_token_ids"] * 2}
PARAMS = SamplingParams(max_tokens=24, ignore_eos=True)
FIRST = "model.language_model.layers.0.mlp.gate_proj.weight"


def open_model(directory: Path, **options: Any) -> LLM:
    return LLM(str(directory), skip_tokenizer_init=True, **options)


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A copy of the fixture that a test may change."""
    return Path(shutil.copytree(CASE, tmp_path / "model"))


def edit(directory: Path, change: Any) -> None:
    file = directory / "model.safetensors"
    tensors = read_tensors(file)
    change(tensors)
    write_tensors(file, tensors)


def scores(llm: LLM) -> np.ndarray[Any, Any]:
    return llm.score(PROMPT["prompt_token_ids"]).logits


def test_whole_activations_give_the_bits_of_dequantised_weights() -> None:
    stored, decoded = open_model(CASE), open_model(CASE, weight_format="bf16")
    assert stored.describe()["weight_format"] == "fp8"
    names = read_tensors(CASE / "model.safetensors")
    converted = [name for name in names if name.endswith("_scale_inv") and not name.startswith("mtp.")]
    assert stored.describe()["num_fp8_matrices"] == len(converted) > 0
    assert decoded.describe()["weight_format"] == "bf16"
    assert stored.describe()["weight_bytes"] < decoded.describe()["weight_bytes"]
    np.testing.assert_array_equal(scores(stored).view(np.uint32), scores(decoded).view(np.uint32))
    named = open_model(CASE, weight_format="fp8")
    np.testing.assert_array_equal(scores(named).view(np.uint32), scores(decoded).view(np.uint32))


def test_w12_of_an_fp8_checkpoint_gives_the_same_bits() -> None:
    encoded = open_model(CASE, weight_format="w12")
    want = scores(open_model(CASE, weight_format="bf16"))
    np.testing.assert_array_equal(scores(encoded).view(np.uint32), want.view(np.uint32))


def test_rounded_activations_are_a_configuration_of_their_own(report: Any) -> None:
    llm = open_model(CASE, weight_format="fp8_w8a8")
    assert llm.describe()["weight_format"] == "fp8_w8a8"
    whole, rounded = scores(open_model(CASE)), scores(llm)
    difference = np.abs(whole - rounded)
    report(f"qwen3_5_fp8, W8A8 against W8A16: mean |logit difference| {difference.mean():.3f}")
    # E4M3 keeps four bits: an error of some percent, far from noise and far from none.
    assert 1e-3 < difference.mean() < 0.3 * whole.std()


@pytest.mark.parametrize("weight_format", ["fp8", "fp8_w8a8", "bf16", "w12"])
@pytest.mark.parametrize("tree", ["chain", "conditional"])
def test_speculation_changes_no_bit(weight_format: str, tree: str) -> None:
    options = {"weight_format": weight_format, "max_model_len": 256}
    plain = open_model(CASE, **options).generate([REPEATED], PARAMS, use_tqdm=False, record_logits=True)[0]
    config = {"method": "ngram", "tree": tree, "tree_nodes": 12, "num_speculative_tokens": 6}
    config |= {"prompt_lookup_min": 1}
    llm = open_model(CASE, speculative_config=config, **options)
    output = llm.generate([REPEATED], PARAMS, use_tqdm=False, record_logits=True)[0]
    assert output.metrics.num_draft_tokens > 0
    assert output.outputs[0].token_ids == plain.outputs[0].token_ids
    for name in ("logits", "residual_l2", "gdn_state"):
        got, want = getattr(output.record, name), getattr(plain.record, name)
        np.testing.assert_array_equal(got.view(np.uint32), want.view(np.uint32))


@pytest.fixture(scope="module")
def random_drafter(tmp_path_factory: pytest.TempPathFactory) -> str:
    """DFlash2 of random weights: nearly all it drafts is wrong."""
    return drafters.dflash2(drafters.Maker(CASE), tmp_path_factory.mktemp("drafter"))


@pytest.mark.parametrize("weight_format", ["fp8", "fp8_w8a8"])
def test_wrong_drafts_change_no_bit(weight_format: str, random_drafter: str) -> None:
    options = {"weight_format": weight_format, "max_model_len": 256}
    prompts = [PROMPT, {"prompt_token_ids": PROMPT["prompt_token_ids"][:31]}]
    plain = open_model(CASE, **options).generate(prompts, PARAMS, use_tqdm=False, record_logits=True)
    for tree in ("chain", "conditional"):
        config = {"model": random_drafter, "tree": tree, "tree_nodes": 12, "num_speculative_tokens": 5}
        llm = open_model(CASE, speculative_config=config, max_num_seqs=2, **options)
        outputs = llm.generate(prompts, PARAMS, use_tqdm=False, record_logits=True)
        assert sum(output.metrics.num_draft_tokens for output in outputs) > 0
        for output, want in zip(outputs, plain, strict=True):
            assert output.outputs[0].token_ids == want.outputs[0].token_ids
            for name in ("logits", "residual_l2", "gdn_state"):
                got, right = getattr(output.record, name), getattr(want.record, name)
                np.testing.assert_array_equal(got.view(np.uint32), right.view(np.uint32))


@pytest.mark.parametrize("weight_format", ["auto", "fp8", "fp8_w8a8"])
def test_matrices_without_a_q_view_allow_no_q_pass(weight_format: str) -> None:
    config = {"method": "ngram", "q_passes": 1}
    with pytest.raises(OptionError, match=r"`q_passes` should be 0 with FP8 matrices.*, got 1"):
        open_model(CASE, speculative_config=config, weight_format=weight_format, max_model_len=256)
    llm = open_model(CASE, speculative_config=config, weight_format="w12", max_model_len=256)
    assert llm.describe()["q_passes"] == 1


def scale_of(tensors: Tensors) -> tuple[str, np.ndarray[Any, Any]]:
    """The first matrix's scales as float32."""
    _, shape, data = tensors[f"{FIRST}_scale_inv"]
    bits = np.frombuffer(data, np.uint16).astype(np.uint32) << 16
    return f"{FIRST}_scale_inv", bits.view(np.float32).reshape(shape)


def test_scales_may_be_float32(copy: Path) -> None:
    def widen(tensors: Tensors) -> None:
        for name, (dtype, shape, data) in tensors.items():
            if name.endswith("_scale_inv"):
                assert dtype == "BF16"
                bits = np.frombuffer(data, np.uint16).astype("<u4") << 16
                tensors[name] = ("F32", shape, bits.tobytes())

    edit(copy, widen)
    np.testing.assert_array_equal(scores(open_model(copy)), scores(open_model(CASE)))


@pytest.mark.parametrize("shape", [[], [1], "rows", "column"])
def test_scales_of_tensors_and_channels(copy: Path, shape: Any) -> None:
    """As compressed-tensors stores them; block scales of the same values are the reference."""
    reference = copy.parent / "reference"
    shutil.copytree(copy, reference)
    rng = np.random.default_rng(0)

    def rescale(tensors: Tensors, as_blocks: bool) -> None:
        rows, columns = tensors[FIRST][1]
        num_scales = rows if shape in ("rows", "column") else 1
        values = (0.01 + 0.01 * rng.random(num_scales)).astype("<f4")
        name, blocks = scale_of(tensors)
        del tensors[name]
        if not as_blocks:
            stored = {"rows": [rows], "column": [rows, 1]}.get(str(shape), shape)
            tensors[f"{FIRST}_scale"] = ("F32", stored, values.tobytes())
            tensors[FIRST.replace("weight", "input_scale")] = ("F32", [1], np.float32(0.5).tobytes())
            return
        # The weights themselves, rounded as the kernel rounds them.
        codes = np.frombuffer(tensors[FIRST][2], np.uint8).reshape(rows, columns)
        weights = E4M3[codes].astype(np.float32) * values.reshape(-1, 1)
        bits = weights.view(np.uint32).astype(np.uint64)
        rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2")
        tensors[FIRST] = ("BF16", [rows, columns], rounded.tobytes())
        assert blocks.size > 0

    edit(copy, lambda tensors: rescale(tensors, as_blocks=False))
    rng = np.random.default_rng(0)
    edit(reference, lambda tensors: rescale(tensors, as_blocks=True))
    np.testing.assert_array_equal(
        scores(open_model(copy)).view(np.uint32), scores(open_model(reference)).view(np.uint32)
    )


def e4m3_values() -> np.ndarray[Any, Any]:
    code = np.arange(256)
    exponent, mantissa = code >> 3 & 15, code & 7
    magnitude = np.where(exponent == 0, mantissa / 8 * 2.0**-6, (1 + mantissa / 8) * 2.0 ** (exponent - 7.0))
    return np.where(code & 0x80, -magnitude, magnitude)


E4M3 = e4m3_values()


def remove_scale(tensors: Tensors) -> None:
    del tensors[f"{FIRST}_scale_inv"]


def double_scale(tensors: Tensors) -> None:
    tensors[f"{FIRST}_scale"] = tensors[f"{FIRST}_scale_inv"]


def odd_scale(tensors: Tensors) -> None:
    tensors[f"{FIRST}_scale_inv"] = ("F32", [5], np.ones(5, "<f4").tobytes())


def infinite_scale(tensors: Tensors) -> None:
    name, values = scale_of(tensors)
    tensors[name] = ("F32", list(values.shape), np.full(values.shape, np.inf, "<f4").tobytes())


def strange_scale(tensors: Tensors) -> None:
    name, values = scale_of(tensors)
    tensors[name] = ("U8", list(values.shape), bytes(values.size))


def useless_scale(tensors: Tensors) -> None:
    _, shape, _ = tensors[FIRST]
    tensors[FIRST] = ("BF16", shape, bytes(2 * shape[0] * shape[1]))


def orphaned_scale(tensors: Tensors) -> None:
    tensors["model.language_model.layers.0.mlp.gate.weight_scale_inv"] = ("F32", [1], bytes(4))


REFUSALS = [
    (remove_scale, "should have a scale, `.*weight_scale_inv` or `.*weight_scale`, got neither"),
    (double_scale, "should have a scale, .* got both"),
    (odd_scale, r"should have a scale `.*` of shape \[\], \[1\], \[\d+, 1\] or \[\d+, \d+\], got \[5\]"),
    (infinite_scale, "should have finite scales in .*, got inf"),
    (strange_scale, "should have dtype BF16 or F32, got U8"),
    (useless_scale, "scales `.*gate_proj.weight`, which should have dtype F8_E4M3, got BF16"),
    (
        orphaned_scale,
        r"1 tensor\(s\) that this architecture does not use, first `.*mlp.gate.weight_scale_inv`",
    ),
]


@pytest.mark.parametrize(("change", "message"), REFUSALS, ids=[change.__name__ for change, _ in REFUSALS])
def test_scales_that_do_not_fit_are_refused(copy: Path, change: Any, message: str) -> None:
    edit(copy, change)
    with pytest.raises(CheckpointError, match=message):
        open_model(copy)


def test_fp8_of_a_checkpoint_without_is_refused() -> None:
    with pytest.raises(OptionError, match="auto, bf16 or w12, as the checkpoint holds no FP8"):
        open_model(FIXTURES / "families" / "qwen3_5_text", weight_format="fp8")


@pytest.mark.parametrize("weight_format", ["auto", "w12", "bf16"])
def test_codes_that_are_no_numbers_are_named(weight_format: str, copy: Path) -> None:
    def damage(tensors: Tensors) -> None:
        dtype, shape, data = tensors[FIRST]
        tensors[FIRST] = (dtype, shape, data[:777] + b"\xff" + data[778:])

    edit(copy, damage)
    with pytest.raises(
        CheckpointError, match=rf"`{FIRST}` should hold finite numbers, got NaN at index 777$"
    ):
        open_model(copy, weight_format=weight_format)
