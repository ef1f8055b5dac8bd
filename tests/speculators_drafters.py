"""Drafters of random weights in speculators' format, as its publishers write each method.

All nest the decoder's config and count target layers from the embedding, so that their ids are one larger. A
drafter with a vocabulary of its own brings a head for it and `d2t`, offsets from its ids to the target's.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .random_drafters import BLOCK, RANK, Maker, offsets, sliding


def nested(method: str, num_drafted: int, body: dict[str, Any], **keys: Any) -> dict[str, Any]:
    """A config of this format."""
    return {
        "speculators_model_type": method,
        "draft_vocab_size": num_drafted,
        "transformer_layer_config": body,
        **keys,
    }


def block(maker: Maker, num_drafts: int) -> dict[str, Any]:
    """Keys of all block drafters; `num_drafts` of the block's rows predict."""
    return {
        "block_size": BLOCK,
        "mask_token_id": 4,
        "aux_hidden_state_layer_ids": [tap + 1 for tap in maker.taps],
        "speculators_config": {
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": num_drafts}],
            "default_proposal_method": "greedy",
        },
    }


def tables(maker: Maker, num_drafted: int) -> None:
    """Adds a frozen copy of the embedding and an LM head: a copy too, or that of a reduced vocabulary."""
    maker.add("embed_tokens.weight", maker.vocab, maker.hidden)
    maker.add("lm_head.weight", num_drafted, maker.hidden)
    if num_drafted != maker.vocab:
        offsets(maker, num_drafted)


def markov(maker: Maker, num_drafted: int) -> dict[str, Any]:
    """Adds DSpark's heads: the code of any token before, a correction of those that are drafted."""
    maker.add("markov_head.markov_w1.weight", maker.vocab, RANK, scale=0.7)
    maker.add("markov_head.markov_w2.weight", num_drafted, RANK, scale=0.7)
    maker.add("confidence_head.proj.weight", 1, maker.hidden + RANK)
    maker.add("confidence_head.proj.bias", 1)
    return {
        "markov_rank": RANK,
        "markov_head_type": "vanilla",
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
    }


def eagle3_speculators(maker: Maker, directory: Path) -> str:
    """RedHat's EAGLE-3 for Gemma: the normed feature as residual."""
    num_drafted = maker.vocab // 2
    maker.add("fc.weight", maker.hidden, len(maker.taps) * maker.hidden)
    maker.layer("layers.0", 2 * maker.hidden, with_head_norms=False)
    maker.add("layers.0.hidden_norm.weight", maker.hidden, offset=1.0)
    maker.add("norm.weight", maker.hidden, offset=1.0)
    maker.add("lm_head.weight", num_drafted, maker.hidden)
    offsets(maker, num_drafted)
    config = nested(
        "eagle3",
        num_drafted,
        maker.sizes(num_hidden_layers=1),
        architectures=["Eagle3Speculator"],
        norm_before_residual=True,
        eagle_aux_hidden_state_layer_ids=[tap + 1 for tap in maker.taps],
    )
    return maker.write(directory, config)


def dflash_speculators(maker: Maker, directory: Path) -> str:
    """DFlash over the whole vocabulary."""
    return write_dflash(maker, directory, maker.vocab)


def dflash_speculators_reduced(maker: Maker, directory: Path) -> str:
    """DFlash over half of the vocabulary."""
    return write_dflash(maker, directory, maker.vocab // 2)


def write_dflash(maker: Maker, directory: Path, num_drafted: int) -> str:
    """DFlash that drafts so many ids."""
    maker.backbone()
    tables(maker, num_drafted)
    keys = {"architectures": ["DFlashSpeculator"], **block(maker, BLOCK - 1)}
    return maker.write(directory, nested("dflash", num_drafted, maker.sizes(**sliding(32)), **keys))


def dflash2_speculators(maker: Maker, directory: Path) -> str:
    """DFlash2, which is bidirectional in its block unless the file says otherwise."""
    maker.backbone()
    keys = {"architectures": ["DFlash2Speculator"], **block(maker, BLOCK - 1), **maker.selector()}
    tables(maker, maker.vocab)
    return maker.write(directory, nested("dflash2", maker.vocab, maker.sizes(**sliding(32)), **keys))


def dspark_speculators(maker: Maker, directory: Path) -> str:
    """RedHat's DSpark for Qwen3.6: as many drafts as rows, so that the anchor's row predicts."""
    return write_dspark(maker, directory, maker.vocab, BLOCK)


def dspark_speculators_reduced(maker: Maker, directory: Path) -> str:
    """makora's DSpark for Gemma 4: a draft less than rows, and half of the vocabulary."""
    return write_dspark(maker, directory, maker.vocab // 2)


def write_dspark(maker: Maker, directory: Path, num_drafted: int, num_drafts: int = BLOCK - 1) -> str:
    """DSpark that drafts so many ids, by so many rows of its block."""
    maker.backbone()
    tables(maker, num_drafted)
    heads = markov(maker, num_drafted)
    keys = {"architectures": ["DSparkDraftModel"], **block(maker, num_drafts), **heads}
    return maker.write(directory, nested("dspark", num_drafted, maker.sizes(), **keys))


def dspark_speculators_muse(maker: Maker, directory: Path) -> str:
    """DaoCloud's DSpark for Muse Glimmer: causal windows, embedding and head left to the target."""
    maker.backbone()
    keys = {
        "architectures": ["DSparkDraftModel"],
        "sample_from_anchor": True,
        "sliding_window_non_causal": False,
        **block(maker, BLOCK),
        **markov(maker, maker.vocab),
    }
    body = maker.sizes(**sliding(32), use_sliding_window=True)
    return maker.write(directory, nested("dspark", maker.vocab, body, **keys))
