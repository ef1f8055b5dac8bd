"""Each family with the drafters published for it, in tiny files of their formats.

The drafters are random, so that nearly nothing is accepted: they load, and wrong drafts leave no trace.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from specpilot_rs import LLM, CheckpointError, ConfigError, DrafterError, SamplingParams

from . import random_drafters as drafters
from .conftest import FIXTURES
from .safetensors_file import Tensors, read_tensors, write_tensors

FAMILIES = FIXTURES / "families"
# Published drafters of each family's kind, by format.
PAIRINGS = {
    "qwen3_5_wrapper": (drafters.dflash2, drafters.dspark),
    "qwen3_5_text": (drafters.dflash, drafters.deepspec),
    "llama_rope_scaling": (drafters.eagle3, drafters.dflash),
    "llama_rope_parameters": (drafters.eagle3, drafters.dflash),
    "gemma4_unified": (
        drafters.eagle3_speculators,
        drafters.gemma_dspark,
        drafters.dflash,
        drafters.dflash_speculators,
    ),
    "muse_glimmer": (drafters.muse_assistant, drafters.dflash2),
}
ALL_FAMILIES = sorted(directory.name for directory in FAMILIES.iterdir() if directory.is_dir())
TREES = {
    drafters.dflash: ("chain", "ddtree"),
    drafters.dflash_speculators: ("chain", "ddtree"),
    drafters.muse_assistant: ("chain", "ddtree"),
    drafters.dflash2: ("chain", "conditional"),
    drafters.dspark: ("chain", "conditional"),
    drafters.deepspec: ("chain", "conditional"),
    drafters.gemma_dspark: ("chain", "conditional"),
    drafters.eagle3: ("chain", "conditional"),
    drafters.eagle3_speculators: ("chain", "conditional"),
}
PARAMS = SamplingParams(max_tokens=40, ignore_eos=True)
# (tree or not, Q passes, format)
SETTINGS = ((0, 0, "bf16"), (1, 0, "w12"), (1, 1, "bf16"), (1, 1, "w12"))


def open_family(family: str, **options: Any) -> LLM:
    return LLM(str(FAMILIES / family), skip_tokenizer_init=True, max_model_len=512, **options)


def prompts(family: str) -> list[dict[str, Any]]:
    golden = json.loads((FAMILIES / family / "golden.json").read_text())
    # The last is longer than every window; two more begin inside of it.
    ids = [sequence["input_ids"] for sequence in golden["sequences"]]
    return [{"prompt_token_ids": each} for each in (*ids, ids[-1][:50], ids[-1][:17])]


@pytest.fixture(scope="module")
def plain() -> Any:
    """Plain decoding of a family, one request at a time, made once."""
    made: dict[str, list[Any]] = {}

    def decode(family: str) -> list[Any]:
        if family not in made:
            llm = open_family(family, max_num_seqs=1, weight_format="bf16", head="dense")
            made[family] = llm.generate(prompts(family), PARAMS, use_tqdm=False, record_logits=True)
        return made[family]

    return decode


def assert_identical(outputs: list[Any], want: list[Any]) -> None:
    for output, expected in zip(outputs, want, strict=True):
        assert output.outputs[0].token_ids == expected.outputs[0].token_ids
        for name in ("logits", "residual_l2", "last_residuals"):
            got, right = getattr(output.record, name), getattr(expected.record, name)
            np.testing.assert_array_equal(got.view(np.uint32), right.view(np.uint32), err_msg=name)


@pytest.mark.parametrize(
    ("family", "drafter"),
    [(family, drafter) for family, made in PAIRINGS.items() for drafter in made],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_drafters_of_a_family_change_no_bit(
    family: str, drafter: Any, tmp_path: Path, plain: Any, report: Any
) -> None:
    directory = drafter(drafters.Maker(FAMILIES / family), tmp_path / "drafter")
    for tree, q_passes, weight_format in SETTINGS:
        config = {
            "model": directory,
            "tree": TREES[drafter][tree],
            "tree_nodes": 12,
            "q_passes": q_passes,
            "num_speculative_tokens": 5,
        }
        llm = open_family(family, speculative_config=config, weight_format=weight_format, max_num_seqs=3)
        outputs = llm.generate(prompts(family), PARAMS, use_tqdm=False, record_logits=True)
        assert_identical(outputs, plain(family))
        assert sum(output.metrics.num_draft_tokens for output in outputs) > 0
    passes = sum(output.metrics.num_target_passes for output in outputs)
    accepted = sum(output.metrics.num_accepted_tokens for output in outputs)
    report(f"{family}, {llm.describe()['drafter']}: {accepted} drafts accepted in {passes} passes")


@pytest.mark.parametrize("family", PAIRINGS)
@pytest.mark.parametrize(("tree", "q_passes"), [("chain", 0), ("conditional", 0), ("conditional", 2)])
def test_prompt_lookup_changes_no_bit(family: str, tree: str, q_passes: int, plain: Any) -> None:
    config = {"method": "ngram", "tree": tree, "tree_nodes": 16, "q_passes": q_passes}
    for weight_format in ("bf16", "w12"):
        llm = open_family(family, speculative_config=config, weight_format=weight_format, max_num_seqs=4)
        outputs = llm.generate(prompts(family), PARAMS, use_tqdm=False, record_logits=True)
        assert_identical(outputs, plain(family))
        assert sum(output.metrics.num_draft_tokens for output in outputs) > 0


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


def led_to_one_id(tensors: Tensors) -> None:
    offsets = np.frombuffer(tensors["d2t"][2], "<i8").copy()
    offsets[9] -= 2 * 9 - 2 * 4
    tensors["d2t"] = (*tensors["d2t"][:2], offsets.tobytes())


def with_a_longer_name(tensors: Tensors) -> None:
    tensors["t2dx"] = tensors.pop("t2d")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (led_to_one_id, "`d2t` should lead every row to an id of its own, but rows 4 and 9 both lead to 8"),
        (with_a_longer_name, "1 tensor.*first `t2dx`"),
    ],
)
def test_tables_of_a_reduced_vocabulary_are_checked(
    damage: Callable[[Tensors], None], message: str, tmp_path: Path
) -> None:
    family = "llama_rope_scaling"
    maker = drafters.Maker(FAMILIES / family)
    directory = drafters.eagle3(maker, tmp_path)
    open_family(family, speculative_config={"model": directory})
    damage(maker.tensors)
    write_tensors(tmp_path / "model.safetensors", maker.tensors)
    with pytest.raises(CheckpointError, match=message):
        open_family(family, speculative_config={"model": directory})


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
