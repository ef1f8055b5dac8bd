"""Which embedding rows drafters of families with embeddings of their own read, against equations in float64.

Gemma multiplies its rows and Muse norms them; what their drafters see of that was decided where these were
trained, and no token of the target shows a mistake.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from . import random_drafters as drafters
from . import speculators_drafters as speculators
from .drafted_chains import Drafted, drafted_chains
from .drafter_oracle import chain_of_eagle3, chain_of_muse_assistant
from .family_speculation import FAMILIES, open_family, prompts
from .gemma_drafter_oracle import Array, rms, widened
from .safetensors_file import read_tensors


def chains_of(family: str, maker: drafters.Maker, directory: Path, num_drafts: int) -> list[Drafted]:
    """What a drafter drafts for prompts of which some are longer than its window."""
    config = {"model": str(directory), "tree": "chain", "num_speculative_tokens": num_drafts}
    llm = open_family(family, speculative_config=config, max_num_seqs=1)
    ids = [prompt["prompt_token_ids"] for prompt in prompts(family)]
    return drafted_chains(llm, [ids[1], ids[-2][:40], ids[-1]], maker.taps)


def assert_drafted(rounds: list[Drafted], chains: list[list[int]], wrong_chains: list[list[int]]) -> None:
    """Chains are an oracle's, and not what it gives of other embedding rows."""
    want = [at.chain for at in rounds]
    assert len(want) > 12
    assert len({token for chain in want for token in chain}) > 12
    assert chains == want
    assert sum(a != b for a, b in zip(wrong_chains, want, strict=True)) > len(want) / 2


def target_table(family: str, name: str) -> Array:
    return widened(read_tensors(FAMILIES / family / "model.safetensors"))[name]


def test_muses_assistant_reads_raw_rows(tmp_path: Path) -> None:
    family = "muse_glimmer"
    maker = drafters.Maker(FAMILIES / family, seed=5)
    drafters.muse_assistant(maker, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    tensors = widened(read_tensors(tmp_path / "model.safetensors"))
    rounds = chains_of(family, maker, tmp_path, drafters.BLOCK - 1)
    raw = target_table(family, "model.language_model.embed_tokens.weight")
    head = target_table(family, "lm_head.weight")
    assert max(len(at.taps) for at in rounds) > config["sliding_window"] + 1

    def chains(embed: Array) -> list[list[int]]:
        # A block has all its rows even where fewer tokens are left to come.
        return [
            chain_of_muse_assistant(tensors, config, embed, head, at.ids, at.taps)[: len(at.chain)]
            for at in rounds
        ]

    # What the target does with them.
    assert_drafted(rounds, chains(raw), chains(rms(raw, eps=1e-5)))


@pytest.mark.parametrize("eps", [1e-6, 0.01])
def test_gemmas_eagle3_reads_rows_without_their_factor(eps: float, tmp_path: Path) -> None:
    """A norm takes factors away but for its epsilon, which has to be large for one to show."""
    family = "gemma4_unified"
    maker = drafters.Maker(FAMILIES / family, seed=5)
    speculators.eagle3_speculators(maker, tmp_path)
    file = tmp_path / "config.json"
    config: dict[str, Any] = json.loads(file.read_text())
    config["transformer_layer_config"]["rms_norm_eps"] = eps
    file.write_text(json.dumps(config))
    stored = read_tensors(tmp_path / "model.safetensors")
    tensors, offsets = widened(stored), np.frombuffer(stored["d2t"][2], "<i8")
    rounds = chains_of(family, maker, tmp_path, 4)
    raw = target_table(family, "model.language_model.embed_tokens.weight")

    def chains(embed: Array) -> list[list[int]]:
        return [
            chain_of_eagle3(tensors, config, offsets, embed, at.ids, at.taps, len(at.chain)) for at in rounds
        ]

    # The target's factor; where none shows, no rows at all.
    factor = np.sqrt(maker.hidden) if eps == 0.01 else 0.0
    assert_drafted(rounds, chains(raw), chains(factor * raw))
