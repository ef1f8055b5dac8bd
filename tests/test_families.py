"""Each family with the drafters published for it, and what is said of checkpoints that do not fit."""

from __future__ import annotations

import functools
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from specpilot_rs import LLM, CheckpointError, ConfigError, DrafterError

from . import random_drafters as drafters
from .family_speculation import (
    FAMILIES,
    PAIRINGS,
    PARAMS,
    SHAPES,
    assert_identical,
    decode_plainly,
    decode_speculatively,
    every,
    open_family,
    prompts,
    settings,
    speculation,
)
from .safetensors_file import Tensors, read_tensors, write_tensors

ALL_FAMILIES = sorted(directory.name for directory in FAMILIES.iterdir() if directory.is_dir())


@pytest.fixture(scope="module")
def plain() -> Any:
    """Plain decoding of a family, made once."""
    return functools.cache(decode_plainly)


def test_every_family_has_drafters() -> None:
    assert sorted(PAIRINGS) == ALL_FAMILIES


@pytest.mark.parametrize(
    ("family", "drafter"),
    every(lambda family: [(drafter,) for drafter in PAIRINGS[family]]),
    ids=lambda value: getattr(value, "__name__", value),
)
def test_drafters_of_a_family_change_no_bit(
    family: str, drafter: Any, tmp_path: Path, plain: Any, report: Any
) -> None:
    directory = drafter(drafters.Maker(FAMILIES / family), tmp_path / "drafter")
    for shape, weight_format in settings(family):
        config = {"model": directory, **speculation(drafter, shape)}
        llm, outputs = decode_speculatively(family, shape, weight_format, config)
        assert_identical(outputs, plain(family))
    passes = sum(output.metrics.num_target_passes for output in outputs)
    accepted = sum(output.metrics.num_accepted_tokens for output in outputs)
    report(f"{family}, {llm.describe()['drafter']}: {accepted} drafts accepted in {passes} passes")


@pytest.mark.parametrize(("family", "shape", "weight_format"), every(settings))
def test_prompt_lookup_changes_no_bit(family: str, shape: str, weight_format: str, plain: Any) -> None:
    config = {"method": "ngram", "prompt_lookup_min": 1, **speculation(None, shape)}
    _, outputs = decode_speculatively(family, shape, weight_format, config)
    assert_identical(outputs, plain(family))


@pytest.mark.parametrize("weight_format", ["bf16", "w12"])
def test_two_q_passes_change_no_bit(weight_format: str, plain: Any) -> None:
    for family in PAIRINGS:
        config = {"method": "ngram", **speculation(None, SHAPES[-1]), "q_passes": 2}
        _, outputs = decode_speculatively(family, SHAPES[-1], weight_format, config)
        assert_identical(outputs, plain(family))


def test_gemmas_embedding_scale_reaches_its_drafter(tmp_path: Path) -> None:
    """A file that names the target's factor drafts as one that leaves it to the target."""
    family = FAMILIES / "gemma4_unified"
    [prompt] = prompts("gemma4_unified")[2:3]
    drafted = []
    for scale in (None, 8.0, 1.0):
        directory = tmp_path / str(scale)
        drafters.dflash(drafters.Maker(family), directory)
        config = json.loads((directory / "config.json").read_text())
        if scale is not None:
            config["dflash_config"]["input_embedding_scale"] = scale
        (directory / "config.json").write_text(json.dumps(config))
        llm = open_family("gemma4_unified", speculative_config={"model": str(directory), "tree": "chain"})
        [output] = llm.generate([prompt], PARAMS, use_tqdm=False, record_rounds=True)
        drafted.append([tuple(draft.greedy_token_ids) for draft in output.rounds])
    assert drafted[0] == drafted[1] != drafted[2]


def test_an_assistant_without_keys_shapes_logits_as_its_target(tmp_path: Path) -> None:
    """Its head is the target's, and the shape of the logits decides which nodes a tree takes."""
    family = FAMILIES / "muse_glimmer"
    text = json.loads((family / "config.json").read_text())["text_config"]
    keys = ("output_multiplier", "final_logit_softcapping")
    trees = []
    for shape in ({}, {key: text[key] for key in keys}, {"output_multiplier": 2.0}):
        directory = tmp_path / str(len(trees))
        drafters.muse_assistant(drafters.Maker(family), directory)
        config = json.loads((directory / "config.json").read_text())
        (directory / "config.json").write_text(json.dumps({**config, **shape}))
        speculation = {"model": str(directory), "tree": "ddtree", "tree_nodes": 12}
        llm = open_family("muse_glimmer", speculative_config=speculation)
        outputs = llm.generate(prompts("muse_glimmer")[2:], PARAMS, use_tqdm=False, record_rounds=True)
        rounds = [drafting for output in outputs for drafting in output.rounds]
        trees.append([(list(tree.draft_token_ids), list(tree.parents)) for tree in rounds])
    assert trees[0] == trees[1] != trees[2]


def test_formats_that_are_not_served_name_themselves(tmp_path: Path) -> None:
    maker = drafters.Maker(FAMILIES / "gemma4_unified")
    drafters.deepspec(maker, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["architectures"] = ["Gemma3DSparkModel"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(DrafterError, match=r"Gemma3DSparkModel.*Gemma4DSparkModel"):
        open_family("gemma4_unified", speculative_config={"model": str(tmp_path)})


PREFIX = "model.language_model.layers.1."


def named(tensors: Tensors, part: str) -> str:
    """The tensor of layer 1 whose name ends in `part`, whatever the family's prefix is."""
    [name] = [name for name in tensors if name.endswith(f".layers.1.{part}") and "visi" not in name]
    return name


def renamed(tensors: Tensors) -> None:
    name = named(tensors, "post_attention_layernorm.weight")
    tensors[name.replace("layernorm", "norm")] = tensors.pop(name)


def dropped(tensors: Tensors) -> None:
    del tensors[named(tensors, "mlp.down_proj.weight")]


def transposed(tensors: Tensors) -> None:
    name = named(tensors, "mlp.up_proj.weight")
    dtype, shape, data = tensors[name]
    width = len(data) // int(np.prod(shape))
    values = np.frombuffer(data, f"V{width}").reshape(shape).T
    tensors[name] = (dtype, list(values.shape), values.tobytes())


def of_another_dtype(tensors: Tensors) -> None:
    name = named(tensors, "mlp.up_proj.weight")
    _, shape, _ = tensors[name]
    tensors[name] = ("F16", shape, bytes(2 * int(np.prod(shape))))


@pytest.mark.parametrize("family", ALL_FAMILIES)
@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (
            renamed,
            r"layers.1.post_attention_layernorm.weight` .* missing; the checkpoint has .*attention_norm",
        ),
        (dropped, r"layers.1.mlp.down_proj.weight` with shape \[\d+, \d+\] is missing$"),
        (transposed, r"up_proj.weight` should have shape \[(\d+), (\d+)\], got \[\2, \1\]"),
        (of_another_dtype, "up_proj.weight` should have dtype BF16, W12 or F8_E4M3, got F16"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_damaged_checkpoints_say_what_is_wrong(
    tmp_path: Path, family: str, damage: Any, message: str
) -> None:
    shutil.copytree(FAMILIES / family, tmp_path / "model")
    shards = sorted((tmp_path / "model").glob("*.safetensors"))
    tensors = {name: tensor for shard in shards for name, tensor in read_tensors(shard).items()}
    damage(tensors)
    for shard in shards:
        shard.unlink()
    (tmp_path / "model" / "model.safetensors.index.json").unlink(missing_ok=True)
    write_tensors(tmp_path / "model" / "model.safetensors", tensors)
    with pytest.raises(CheckpointError, match=message):
        LLM(str(tmp_path / "model"), skip_tokenizer_init=True)


def test_packed_weights_name_their_quantisation(tmp_path: Path) -> None:
    shutil.copytree(FAMILIES / "muse_glimmer", tmp_path / "model")
    file = tmp_path / "model" / "model.safetensors"
    for part, scheme in (("qweight", "GPTQ or AWQ"), ("weight_scale_2", "NVFP4")):
        tensors = read_tensors(file)
        name = f"{PREFIX}mlp.up_proj.{part}"
        tensors[name] = ("I32", [1], bytes(4))
        copy = tmp_path / part
        shutil.copytree(tmp_path / "model", copy)
        write_tensors(copy / "model.safetensors", tensors)
        with pytest.raises(CheckpointError, match=f"{part}` is part of {scheme} weights"):
            LLM(str(copy), skip_tokenizer_init=True)


@pytest.mark.parametrize(
    ("quantization", "message"),
    [
        ({"quant_method": "gptq", "bits": 4}, "says gptq, which is not supported"),
        ({"quant_method": "awq"}, "says awq, which is not supported"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "says modelopt NVFP4"),
        (
            {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"},
            "says compressed-tensors nvfp4-pack-quantized",
        ),
        ({"quant_method": "fp8", "fmt": "e5m2"}, 'fmt` should be "e4m3", got "e5m2"'),
        ({"quant_method": "fp8", "weight_block_size": [64, 64]}, r"weight_block_size` should be \[128,128\]"),
    ],
)
def test_other_quantisations_name_themselves(
    tmp_path: Path, quantization: dict[str, Any], message: str
) -> None:
    config = json.loads((FAMILIES / "llama_rope_scaling" / "config.json").read_text())
    config["quantization_config"] = quantization
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=message):
        LLM(str(tmp_path), skip_tokenizer_init=True)
