"""Drafters of a part of the vocabulary: what they draft, and what is said of tables that do not fit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from specpilot_rs import CheckpointError

from . import random_drafters as drafters
from . import speculators_drafters as speculators
from .family_speculation import FAMILIES, PARAMS, open_family, prompts
from .kernels.bfloat16 import from_bits, to_bits
from .safetensors_file import Tensor, Tensors, read_tensors, write_tensors

TARGET = "gemma4_unified"
HEAD = "model.language_model.embed_tokens.weight"


def every_second_row(tensor: Tensor) -> Tensor:
    dtype, [rows, columns], data = tensor
    values = np.frombuffer(data, "<u2").reshape(rows, columns)[::2]
    return dtype, list(values.shape), values.tobytes()


def louder(tensors: Tensors) -> Tensors:
    """Layers that outweigh the embedding, whose own token would be all that is ever drafted."""
    found = {}
    for name, (dtype, shape, data) in tensors.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            data = to_bits(32 * from_bits(np.frombuffer(data, "<u2"))).tobytes()
        found[name] = (dtype, shape, data)
    return found


def drafted(drafter: str) -> dict[Any, list[int]]:
    """The greedy drafts of every round, by request and position; texts are the same whoever drafts."""
    llm = open_family(TARGET, speculative_config={"model": drafter, "tree": "chain"})
    outputs = llm.generate(prompts(TARGET), PARAMS, use_tqdm=False, record_rounds=True)
    return {
        (index, drafting.anchor_position): drafting.greedy_token_ids
        for index, output in enumerate(outputs)
        for drafting in output.rounds
    }


@pytest.mark.parametrize(
    ("write", "follows_drafts"),
    [(speculators.write_dflash, False), (speculators.write_dspark, True)],
    ids=["dflash", "dspark"],
)
def test_drafts_are_the_likeliest_of_the_tokens_that_are_known(
    write: Callable[..., str], follows_drafts: bool, tmp_path: Path
) -> None:
    """Every second token, with the target's own rows: what is likeliest of all and known is drafted."""
    whole, reduced = (drafters.Maker(FAMILIES / TARGET, seed=3) for _ in range(2))
    write(whole, tmp_path / "whole", whole.vocab)
    write(reduced, tmp_path / "reduced", reduced.vocab // 2)
    tensors = louder(whole.tensors)
    tensors["lm_head.weight"] = read_tensors(FAMILIES / TARGET / "model.safetensors")[HEAD]
    write_tensors(tmp_path / "whole" / "model.safetensors", tensors)
    for name in tensors.keys() & {"lm_head.weight", "markov_head.markov_w2.weight"}:
        tensors[name] = every_second_row(tensors[name])
    tensors |= {name: reduced.tensors[name] for name in ("d2t", "t2d")}
    write_tensors(tmp_path / "reduced" / "model.safetensors", tensors)
    of_all, of_half = (drafted(str(tmp_path / name)) for name in ("whole", "reduced"))
    num_equal = num_unknown = 0
    for place in of_all.keys() & of_half.keys():
        for likeliest, token in zip(of_all[place], of_half[place], strict=True):
            assert token % 2 == 0
            if likeliest % 2 == 0:
                assert token == likeliest
                num_equal += 1
                continue
            num_unknown += 1
            if follows_drafts:
                # What comes after another token is another draft.
                break
    assert num_equal > 50
    assert num_unknown > 50
    assert len({token for tokens in of_half.values() for token in tokens}) > 20


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
