"""Doctor's verdict is loading's: it fails exactly where an engine does not open."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from specpilot_rs import LLM, SpecPilotError, doctor
from specpilot_rs.demo import DFLASH2_DIR, TARGET_DIR

from . import random_drafters as drafters
from . import speculators_drafters as speculators
from .conftest import FIXTURES
from .safetensors_file import Tensors, read_tensors, write_tensors

FAMILIES = FIXTURES / "families"
FAMILY_NAMES = sorted(directory.name for directory in FAMILIES.iterdir() if directory.is_dir())
# Each format with a target that it is published for.
FORMATS = [
    (drafters.dflash, "qwen3_5_text"),
    (drafters.dflash2, "qwen3_5_wrapper"),
    (drafters.dspark, "qwen3_5_wrapper"),
    (drafters.deepspec, "qwen3_5_text"),
    (drafters.eagle3, "llama_rope_scaling"),
    (speculators.eagle3_speculators, "gemma4_unified"),
    (speculators.dflash_speculators, "gemma4_unified"),
    (speculators.dflash_speculators_reduced, "qwen3_5_text"),
    (speculators.dflash2_speculators, "qwen3_5_wrapper"),
    (speculators.dspark_speculators, "qwen3_5_wrapper"),
    (speculators.dspark_speculators_reduced, "gemma4_unified"),
    (speculators.dspark_speculators_muse, "muse_glimmer"),
    (drafters.gemma_dspark, "gemma4_unified"),
    (drafters.muse_assistant, "muse_glimmer"),
]
Change = Callable[[dict[str, Any]], object]


def failures(directory: Path) -> list[str]:
    """All but the tokenizer's, which no fixture has; see `test_tokenizers_are_judged_as_in_loading`."""
    found = [f for f in doctor.examine(directory) if f.what != "tokenizer"]
    return [f"{f.what}: {f.message}" for f in found if f.level is doctor.Level.FAIL]


def opens(target: Path, drafter: Path | None = None) -> bool:
    config = None if drafter is None else {"model": str(drafter)}
    try:
        LLM(str(target), skip_tokenizer_init=True, max_model_len=128, speculative_config=config)
    except SpecPilotError:
        return False
    return True


def edit_json(file: Path, change: Change) -> None:
    config = json.loads(file.read_text())
    change(config)
    file.write_text(json.dumps(config))


def edit_tensors(directory: Path, change: Callable[[Tensors], object]) -> None:
    file = directory / "model.safetensors"
    tensors = read_tensors(file)
    change(tensors)
    write_tensors(file, tensors)


@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_every_family_passes(family: str) -> None:
    assert failures(FAMILIES / family) == []
    assert opens(FAMILIES / family)


@pytest.mark.parametrize(("make", "family"), FORMATS, ids=lambda value: getattr(value, "__name__", value))
def test_every_drafter_format_passes(make: Any, family: str, tmp_path: Path) -> None:
    make(drafters.Maker(FAMILIES / family), tmp_path)
    assert failures(tmp_path) == []
    assert opens(FAMILIES / family, tmp_path)


def without(directory: Path) -> None:
    (directory / "tokenizer.json").unlink()


def cut(directory: Path) -> None:
    file = directory / "tokenizer.json"
    file.write_bytes(file.read_bytes()[:1000])


def of_no_json(directory: Path) -> None:
    (directory / "tokenizer_config.json").write_text("{")


def with_half_a_character(directory: Path) -> None:
    edit_json(directory / "tokenizer_config.json", lambda config: config.update(eos_token="\ud800"))


@pytest.mark.parametrize("damage", [None, without, cut, of_no_json, with_half_a_character])
def test_tokenizers_are_judged_as_in_loading(damage: Callable[[Path], None] | None, tmp_path: Path) -> None:
    directory = Path(shutil.copytree(TARGET_DIR, tmp_path / "model"))
    if damage is not None:
        damage(directory)
    [finding] = [f for f in doctor.examine(directory) if f.what == "tokenizer"]
    if damage is None:
        LLM(str(directory), max_model_len=128)
        assert finding.level is doctor.Level.OK
    else:
        with pytest.raises(SpecPilotError) as refusal:
            LLM(str(directory), max_model_len=128)
        assert (finding.level, finding.message) == (doctor.Level.FAIL, str(refusal.value))
        assert finding.fix is not None
        assert "skip_tokenizer_init=True" in finding.fix
    assert failures(directory) == []
    assert opens(directory)


@pytest.mark.parametrize("damage", [without, cut])
def test_a_drafters_tokenizer_is_nobodys(damage: Callable[[Path], None], tmp_path: Path) -> None:
    directory = Path(shutil.copytree(DFLASH2_DIR, tmp_path / "drafter"))
    shutil.copy(TARGET_DIR / "tokenizer.json", directory)
    damage(directory)
    assert {finding.level for finding in doctor.examine(directory)} == {doctor.Level.OK}
    assert opens(TARGET_DIR, directory)


def test_values_are_left_to_loading(tmp_path: Path) -> None:
    directory = Path(shutil.copytree(FAMILIES / "llama_rope_scaling", tmp_path / "model"))

    def fill(tensors: Tensors) -> None:
        _, shape, _ = tensors["model.norm.weight"]
        tensors["model.norm.weight"] = ("BF16", shape, b"\xc0\x7f" * shape[0])

    edit_tensors(directory, fill)
    [finding] = [f for f in doctor.examine(directory) if f.what == "weights"]
    assert finding.level is doctor.Level.OK
    assert "only loading looks at values" in finding.message
    with pytest.raises(SpecPilotError, match=r"`model.norm.weight` should hold finite numbers, got NaN"):
        LLM(str(directory), skip_tokenizer_init=True)


BROKEN_TARGETS: list[tuple[str, str, Change]] = [
    ("llama_rope_scaling", "head_dim", lambda c: c.update(head_dim=7)),
    ("llama_rope_scaling", "rope_theta", lambda c: c.pop("rope_theta")),
    ("llama_rope_scaling", "rms_norm_eps", lambda c: c.update(rms_norm_eps=1e-60)),
    (
        "llama_rope_scaling",
        "quantization_config",
        lambda c: c.update(quantization_config={"quant_method": "awq"}),
    ),
    ("llama_rope_scaling", "attention_bias", lambda c: c.update(attention_bias=True)),
    ("llama_rope_scaling", "num_key_value_heads", lambda c: c.update(num_key_value_heads=5)),
    ("llama_rope_scaling", "hidden_size", lambda c: c.update(hidden_size="many")),
    ("gemma4_unified", "per_layer_config.6", lambda c: c["text_config"].update(per_layer_config={"6": {}})),
    (
        "gemma4_unified",
        "per_layer_config.five",
        lambda c: c["text_config"].update(per_layer_config={"five": {}}),
    ),
    ("gemma4_unified", "global_head_dim", lambda c: c["text_config"].update(global_head_dim=63)),
    ("gemma4_unified", "num_kv_shared_layers", lambda c: c["text_config"].update(num_kv_shared_layers=2)),
    (
        "gemma4_unified",
        "num_global_key_value_heads",
        lambda c: c["text_config"].update(num_global_key_value_heads=3),
    ),
    ("muse_glimmer", "layer_rope_theta", lambda c: c["text_config"].update(layer_rope_theta=[1e60] * 4)),
    ("muse_glimmer", "qk_scale_factor", lambda c: c["text_config"].update(qk_scale_factor=1e39)),
    ("qwen3_5_text", "layer_types", lambda c: c.update(layer_types=["full_attention"])),
]


@pytest.mark.parametrize(
    ("family", "key", "change"), BROKEN_TARGETS, ids=[f"{case[0]}-{case[1]}" for case in BROKEN_TARGETS]
)
def test_broken_configs_fail_by_their_key(family: str, key: str, change: Change, tmp_path: Path) -> None:
    directory = Path(shutil.copytree(FAMILIES / family, tmp_path / "model"))
    edit_json(directory / "config.json", change)
    [failure, *_] = failures(directory)
    assert failure.startswith("config.json: ")
    assert f"{key}`" in failure
    assert not opens(directory)
    # What nobody could look at is not said to fit, or to be missing.
    found = {finding.what: finding.message for finding in doctor.examine(directory)}
    assert "not compared" in found["weights"]
    assert "tokenizer" not in found


BROKEN_DRAFTERS: list[tuple[Any, str, str, Change]] = [
    (
        drafters.dflash,
        "qwen3_5_text",
        "target_layer_ids",
        lambda c: c["dflash_config"].pop("target_layer_ids"),
    ),
    (drafters.dflash, "qwen3_5_text", "block_size", lambda c: c["dflash_config"].update(block_size=1)),
    (
        drafters.dspark,
        "qwen3_5_wrapper",
        "markov_head_type",
        lambda c: c["dflash_config"].update(markov_head_type=1),
    ),
    (
        speculators.eagle3_speculators,
        "gemma4_unified",
        "norm_before_residual",
        lambda c: c.pop("norm_before_residual"),
    ),
    (
        speculators.dflash_speculators,
        "gemma4_unified",
        "speculators peagle",
        lambda c: c.update(speculators_model_type="peagle"),
    ),
    (drafters.muse_assistant, "muse_glimmer", "mask_token_id", lambda c: c.update(mask_token_id=-1)),
    (drafters.gemma_dspark, "gemma4_unified", "global_head_dim", lambda c: c.pop("global_head_dim")),
]


@pytest.mark.parametrize(
    ("make", "family", "part", "change"), BROKEN_DRAFTERS, ids=[case[2] for case in BROKEN_DRAFTERS]
)
def test_broken_drafter_configs_fail(
    make: Any, family: str, part: str, change: Change, tmp_path: Path
) -> None:
    make(drafters.Maker(FAMILIES / family), tmp_path)
    edit_json(tmp_path / "config.json", change)
    [failure, *_] = failures(tmp_path)
    assert part in failure
    assert not opens(FAMILIES / family, tmp_path)


def extra(tensors: Tensors) -> None:
    tensors["model.something.weight"] = ("BF16", [1], bytes(2))


def narrow(tensors: Tensors) -> None:
    name = next(name for name in tensors if name.endswith("up_proj.weight"))
    _, shape, _ = tensors[name]
    tensors[name] = ("F16", shape, bytes(2 * int(np.prod(shape))))


def vision_in_half(tensors: Tensors) -> None:
    tensors["model.visual.more.weight"] = ("F16", [1], bytes(2))


def without_scale(tensors: Tensors) -> None:
    del tensors[next(name for name in tensors if name.endswith("proj.weight_scale_inv"))]


@pytest.mark.parametrize(
    ("family", "change", "part"),
    [
        ("llama_rope_scaling", extra, "does not use, first `model.something.weight`"),
        ("llama_rope_scaling", narrow, "should have dtype BF16, W12 or F8_E4M3, got F16"),
        ("llama_rope_scaling", vision_in_half, "does not use"),
        ("qwen3_5_wrapper", vision_in_half, None),
        ("qwen3_5_fp8", without_scale, "should have a scale"),
        ("qwen3_5_fp8", extra, "does not use"),
    ],
)
def test_tensors_are_judged_as_in_loading(family: str, change: Any, part: str | None, tmp_path: Path) -> None:
    directory = Path(shutil.copytree(FAMILIES / family, tmp_path / "model"))
    edit_tensors(directory, change)
    found = failures(directory)
    assert [part in failure for failure in found if part] == ([] if part is None else [True])
    assert opens(directory) == (part is None)


def test_a_drafter_in_fp8_says_what_it_may_be(tmp_path: Path) -> None:
    family = FAMILIES / "qwen3_5_text"
    drafters.dflash(drafters.Maker(family), tmp_path)

    def quantise(tensors: Tensors) -> None:
        _, shape, _ = tensors["fc.weight"]
        tensors["fc.weight"] = ("F8_E4M3", shape, bytes(int(np.prod(shape))))
        tensors["fc.weight_scale_inv"] = ("BF16", [1], bytes(2))

    edit_tensors(tmp_path, quantise)
    [failure] = failures(tmp_path)
    assert "`fc.weight` should have dtype BF16 or W12, got F8_E4M3" in failure
    with pytest.raises(SpecPilotError, match="should have dtype BF16 or W12, got F8_E4M3"):
        LLM(str(family), skip_tokenizer_init=True, speculative_config={"model": str(tmp_path)})
