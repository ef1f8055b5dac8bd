"""Drafts of a DSpark drafter with Gemma 4's layers, against its equations in float64."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from specpilot_rs import LLM, CheckpointError, ConfigError

from . import random_drafters as drafters
from .conftest import FIXTURES
from .drafted_chains import Drafted, drafted_chains
from .gemma_drafter_oracle import Layers, Oracle, widened
from .safetensors_file import read_tensors, write_tensors

TARGET = FIXTURES / "families" / "gemma4_unified"
NUM_DRAFTED = drafters.BLOCK


def open_pair(drafter: Path, target: Path = TARGET) -> LLM:
    config = {"model": str(drafter), "tree": "chain"}
    return LLM(str(target), skip_tokenizer_init=True, max_model_len=256, speculative_config=config)


def prompts() -> list[list[int]]:
    sequences = json.loads((TARGET / "golden.json").read_text())["sequences"]
    return [sequences[1]["input_ids"], sequences[2]["input_ids"][:9]]


def edit_config(directory: Path, **keys: Any) -> dict[str, Any]:
    file = directory / "config.json"
    config: dict[str, Any] = {**json.loads(file.read_text()), **keys}
    file.write_text(json.dumps(config))
    return config


@pytest.fixture(scope="module", params=[True, False], ids=["values of keys", "values of their own"])
def drafted(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Drafts of a pair with the taps they saw, and an oracle of the drafter."""
    directory = tmp_path_factory.mktemp("drafter")
    maker = drafters.Maker(TARGET, seed=7)
    # The target's own values come from its keys; a drafter of another target may project them.
    maker.text = {**maker.text, "attention_k_eq_v": request.param}
    # Contexts are short here, so pairs have to turn fast.
    rotation = {"rope_type": "proportional", "rope_theta": 30.0, "partial_rotary_factor": 0.25}
    maker.text["rope_parameters"] = {"full_attention": rotation}
    # Low enough to bend logits of this size.
    maker.text["final_logit_softcapping"] = 5.0
    drafters.gemma_dspark(maker, directory)
    llm = open_pair(directory)
    assert "DSpark in DeepSpec format, block 6, first draft from row 0" in llm.describe()["drafter"]
    rounds = drafted_chains(llm, prompts(), maker.taps)
    embed = widened(read_tensors(TARGET / "model.safetensors"))["model.language_model.embed_tokens.weight"]
    config = json.loads((directory / "config.json").read_text())
    oracle = Oracle(widened(read_tensors(directory / "model.safetensors")), config, embed)
    assert len(rounds) > 12
    return oracle, rounds


def chains(oracle: Oracle, rounds: list[Drafted]) -> list[list[int]]:
    # A block has its usual number of rows even where fewer tokens are left to come.
    return [oracle.draft(at.taps, at.ids[-1], NUM_DRAFTED)[: len(at.chain)] for at in rounds]


def test_drafts_follow_the_equations(drafted: Any) -> None:
    oracle, rounds = drafted
    want = [at.chain for at in rounds]
    assert max(map(len, want)) == NUM_DRAFTED
    assert len({token for chain in want for token in chain}) > 20
    assert chains(oracle, rounds) == want


@pytest.mark.parametrize(
    "slip",
    [
        {"norms_behind": False},
        {"scalars": False},
        {"normed_values": False},
        {"score_scale": 64**-0.5},
        {"turning_share": 1.0},
        {"gelu": False},
        {"caps_before_correction": False},
    ],
    ids=lambda slip: next(iter(slip)),
)
def test_every_part_of_a_layer_shows_in_the_drafts(drafted: Any, slip: dict[str, Any]) -> None:
    oracle, rounds = drafted
    assert chains(replace(oracle, layers=Layers(**slip)), rounds) != [at.chain for at in rounds]


def test_files_that_lack_a_part_are_refused(tmp_path: Path) -> None:
    for name in ("layers.1.layer_scalar", "layers.0.pre_feedforward_layernorm.weight"):
        directory = tmp_path / name
        drafters.gemma_dspark(drafters.Maker(TARGET), directory)
        tensors = read_tensors(directory / "model.safetensors")
        del tensors[name]
        write_tensors(directory / "model.safetensors", tensors)
        with pytest.raises(CheckpointError, match=rf"{name}` .*is missing"):
            open_pair(directory)
    for key, value, message in (
        ("global_head_dim", None, "global_head_dim` is missing"),
        ("enable_moe_block", True, "enable_moe_block` should be false"),
        ("hidden_activation", "silu", "hidden_activation` should be"),
    ):
        edit_config(directory, **{key: value})
        with pytest.raises(ConfigError, match=message):
            open_pair(directory)
        drafters.gemma_dspark(drafters.Maker(TARGET), directory)
