"""W12 gives the bits of BF16: whole engines on converted checkpoints, and on weights converted at load."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from specpilot_rs import LLM, SamplingParams
from specpilot_rs.convert import convert
from specpilot_rs.demo import DFLASH2_DIR, TARGET_DIR
from specpilot_rs.errors import CheckpointError, DrafterError, SpecPilotError
from specpilot_rs.outputs import RequestOutput
from specpilot_rs.weight_report import inspect

from .conftest import FIXTURES

FAMILIES = FIXTURES / "families"
CASES = ("llama_rope_parameters", "llama_rope_scaling", "qwen3_5_text", "qwen3_5_wrapper")
PARAMS = SamplingParams(max_tokens=48, ignore_eos=True)
BF16 = {"weight_format": "bf16"}
# The demo target's linear layers: 6 Gated DeltaNet layers of 3 + 5, 2 attention layers of 3 + 4 matrices.
NUM_DEMO_MATRICES = 62
# in_proj_a and in_proj_b have 2 rows, which padding to 16 makes larger than BF16.
NUM_DEMO_W12 = 50


@pytest.fixture(scope="module")
def demo_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return convert(TARGET_DIR, tmp_path_factory.mktemp("demo") / "target").directory


@pytest.fixture(scope="module")
def drafter_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return convert(DFLASH2_DIR, tmp_path_factory.mktemp("demo") / "dflash2").directory


@pytest.fixture(scope="module")
def prompts(benchmark_prompts: Any) -> list[str]:
    return benchmark_prompts(4)


@pytest.fixture(scope="module")
def plain(prompts: list[str]) -> list[RequestOutput]:
    """Plain decoding of the BF16 checkpoint."""
    llm = LLM(TARGET_DIR, max_model_len=2048)
    plan = llm.describe()
    assert (plan["weight_format"], plan["num_w12_matrices"], plan["weight_check"]) == ("bf16", 0, None)
    return llm.generate(prompts, PARAMS, use_tqdm=False, record_logits=True)


def assert_same_bits(outputs: list[RequestOutput], expected: list[RequestOutput]) -> None:
    for output, want in zip(outputs, expected, strict=True):
        assert output.outputs[0].token_ids == want.outputs[0].token_ids
        assert output.record is not None
        assert want.record is not None
        for name in ("logits", "residual_l2", "final_norm_l2", "last_residuals", "gdn_state"):
            got, expect = getattr(output.record, name), getattr(want.record, name)
            assert (got is None) == (expect is None), name
            if got is not None:
                np.testing.assert_array_equal(got.view(np.uint32), expect.view(np.uint32), err_msg=name)


@pytest.mark.parametrize("weight_format", ["auto", "w12", "bf16"])
@pytest.mark.parametrize("converted", [True, False], ids=["w12-files", "bf16-files"])
def test_plain_decoding(
    weight_format: str,
    converted: bool,
    demo_dir: Path,
    prompts: list[str],
    plain: list[RequestOutput],
    report: Any,
) -> None:
    directory = demo_dir if converted else TARGET_DIR
    llm = LLM(directory, weight_format=weight_format, max_model_len=2048)
    plan = llm.describe()
    held = "w12" if weight_format == "w12" or (converted and weight_format == "auto") else "bf16"
    assert plan["weight_format"] == held
    assert plan["num_w12_matrices"] == (NUM_DEMO_W12 if held == "w12" else 0)
    check = plan["weight_check"]
    if not converted and held == "bf16":
        assert check is None
    else:
        # A converted directory vouches for every tensor; on the fly only what is encoded is compared.
        assert check["num_tensors"] == (108 if converted else NUM_DEMO_W12)
        assert check["thread_seconds"] > 0
        report(
            f"weights proved at load, {'w12' if converted else 'bf16'} files as {weight_format}: "
            f"{check['num_bytes'] / 1e6:.1f} MB, {check['gb_per_thread_second']:.2f} GB/s a thread"
        )
    outputs = llm.generate(prompts, PARAMS, use_tqdm=False, record_logits=True)
    assert_same_bits(outputs, plain)


@pytest.mark.parametrize("tree_nodes", [1, 7, 32, 64])
def test_speculation(
    tree_nodes: int, demo_dir: Path, drafter_dir: Path, prompts: list[str], plain: list[RequestOutput]
) -> None:
    drafted = {}
    for target, drafter in ((demo_dir, drafter_dir), (demo_dir, DFLASH2_DIR), (TARGET_DIR, DFLASH2_DIR)):
        config = {"model": str(drafter), "tree_nodes": tree_nodes}
        llm = LLM(target, speculative_config=config, max_model_len=2048)
        outputs = llm.generate(prompts, PARAMS, use_tqdm=False, record_logits=True, record_rounds=True)
        assert_same_bits(outputs, plain)
        # The drafter's bits are the same too, and so is every draft.
        drafted[target, drafter] = [
            (r.draft_token_ids, r.parents, r.num_accepted) for o in outputs for r in o.rounds or ()
        ]
    first, *others = drafted.values()
    assert first
    assert all(rounds == first for rounds in others)


def test_the_drafter_is_held_as_its_files_are(drafter_dir: Path, demo_dir: Path) -> None:
    with pytest.raises(DrafterError):
        LLM(TARGET_DIR, speculative_config={"model": str(demo_dir)})
    for directory in (drafter_dir, DFLASH2_DIR):
        with pytest.raises(SpecPilotError, match="is a drafter, expected a target") as raised:
            LLM(directory, skip_tokenizer_init=True)
        assert raised.value.code == "config"


@pytest.fixture(scope="module")
def small_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return convert(FAMILIES / "qwen3_5_wrapper", tmp_path_factory.mktemp("small") / "model").directory


@pytest.mark.parametrize("part", ["plane8", "plane4", "base", "counts", "escapes"])
def test_a_flipped_bit_leaves_no_engine(part: str, small_dir: Path, tmp_path: Path) -> None:
    """Of a matrix that has escapes, so that every part has a bit to flip."""
    [tensor, *_] = [row["name"] for row in inspect(small_dir) if row["escapes"]]
    directory = Path(shutil.copytree(small_dir, tmp_path / "damaged"))
    [shard] = directory.glob("*.safetensors")
    data = bytearray(shard.read_bytes())
    begin = 8 + int.from_bytes(data[:8], "little")
    first, end = json.loads(data[8:begin])[f"{tensor}.w12_{part}"]["data_offsets"]
    data[begin + (first + end) // 2] ^= 1
    shard.write_bytes(data)
    for weight_format in ("auto", "bf16", "w12"):
        with pytest.raises(CheckpointError, match=re.escape(f"tensor `{tensor}`")) as raised:
            LLM(directory, skip_tokenizer_init=True, weight_format=weight_format)
        assert shard.name in str(raised.value)
        assert raised.value.code == "checkpoint"


@pytest.mark.parametrize("case", CASES)
def test_families(case: str, tmp_path: Path, report: Any) -> None:
    made = convert(FAMILIES / case, tmp_path / case)
    golden = json.loads((FAMILIES / case / "golden.json").read_bytes())
    before = LLM(FAMILIES / case, skip_tokenizer_init=True)
    after = LLM(made.directory, skip_tokenizer_init=True)
    on_the_fly = LLM(FAMILIES / case, skip_tokenizer_init=True, weight_format="w12")
    num_w12 = [llm.describe()["num_w12_matrices"] for llm in (before, after, on_the_fly)]
    assert num_w12 == [0, made.num_w12, made.num_w12]
    report(f"{case}: {made.num_w12} matrices W12, {len(made.kept_bf16)} stay BF16")
    for sequence in golden["sequences"]:
        want = sequence["fp32"]
        expected = before.score(sequence["input_ids"])
        for llm in (after, on_the_fly):
            got = llm.score(sequence["input_ids"])
            np.testing.assert_array_equal(got.logits.view(np.uint32), expected.logits.view(np.uint32))
            np.testing.assert_array_equal(
                got.residual_l2.view(np.uint32), expected.residual_l2.view(np.uint32)
            )
            difference = np.abs(got.logits[-1] - np.array(want["last_logits"], np.float32)).max()
            assert difference <= golden["tolerance"]["logits_abs"]
            ids = want["greedy"]["ids"]
            params = SamplingParams(max_tokens=len(ids), ignore_eos=True)
            output = llm.generate([{"prompt_token_ids": sequence["input_ids"]}], params, use_tqdm=False)[0]
            assert list(output.outputs[0].token_ids) == ids
