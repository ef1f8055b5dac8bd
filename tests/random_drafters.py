"""Drafters of random weights in the exact formats of published ones, for any target."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from .kernels.bfloat16 import to_bits
from .safetensors_file import Tensors, write_tensors

HEADS, KV_HEADS, HEAD_DIM, INTERMEDIATE = 4, 2, 16, 48
BLOCK, NUM_LAYERS, RANK = 6, 2, 8


class Maker:
    """Writes a drafter for the target in a directory."""

    def __init__(self, target: Path, seed: int = 0) -> None:
        config = json.loads((target / "config.json").read_text())
        text = config.get("text_config", config)
        self.text = text
        self.hidden, self.vocab = text["hidden_size"], text["vocab_size"]
        self.num_layers = text["num_hidden_layers"]
        self.taps = list(range(min(3, self.num_layers - 1)))
        self.rng = np.random.default_rng(seed)
        self.tensors: Tensors = {}

    def add(self, name: str, *shape: int, scale: float = 0.1, offset: float = 0.0) -> None:
        """Adds a BF16 tensor of random values."""
        values = offset + scale * self.rng.standard_normal(shape)
        self.tensors[name] = ("BF16", list(shape), to_bits(values).tobytes())

    def layer(self, prefix: str, inputs: int, with_head_norms: bool = True) -> None:
        """Adds a decoder layer whose attention reads rows of `inputs`."""
        self.add(f"{prefix}.input_layernorm.weight", self.hidden, offset=1.0)
        self.add(f"{prefix}.post_attention_layernorm.weight", self.hidden, offset=1.0)
        for name, heads in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS)):
            self.add(f"{prefix}.self_attn.{name}_proj.weight", heads * HEAD_DIM, inputs)
        self.add(f"{prefix}.self_attn.o_proj.weight", self.hidden, HEADS * HEAD_DIM)
        if with_head_norms:
            for name in ("q_norm", "k_norm"):
                self.add(f"{prefix}.self_attn.{name}.weight", HEAD_DIM, offset=1.0)
        self.add(f"{prefix}.mlp.gate_proj.weight", INTERMEDIATE, self.hidden)
        self.add(f"{prefix}.mlp.up_proj.weight", INTERMEDIATE, self.hidden)
        self.add(f"{prefix}.mlp.down_proj.weight", self.hidden, INTERMEDIATE)

    def backbone(self, fc: str = "fc", hidden_norm: str = "hidden_norm") -> None:
        """Adds what all block drafters have."""
        self.add(f"{fc}.weight", self.hidden, len(self.taps) * self.hidden)
        self.add(f"{hidden_norm}.weight", self.hidden, offset=1.0)
        self.add("norm.weight", self.hidden, offset=1.0)
        for index in range(NUM_LAYERS):
            self.layer(f"layers.{index}", self.hidden)

    def selector(self) -> dict[str, Any]:
        """Adds DFlash2's convolutions and selector; returns their sizes as config keys."""
        for index in range(NUM_LAYERS):
            for conv in ("attention_conv", "mlp_conv"):
                prefix = f"layers.{index}.{conv}"
                self.add(f"{prefix}.base_kernel", 2, 2, self.hidden)
                self.add(f"{prefix}.kernel_projection.weight", 4 * self.hidden // 16, self.hidden)
        self.add("candidate_selector.hidden_projection.weight", RANK, self.hidden)
        for side in ("predecessor", "successor"):
            self.add(f"candidate_selector.{side}_codebook", self.vocab, RANK)
        return {"conv_kernel_size": 2, "conv_group_size": 16, "selector_rank": RANK, "selector_top_k": 16}

    def sizes(self, **keys: Any) -> dict[str, Any]:
        """A decoder's config keys."""
        return {
            "hidden_size": self.hidden,
            "intermediate_size": INTERMEDIATE,
            "num_hidden_layers": NUM_LAYERS,
            "num_attention_heads": HEADS,
            "num_key_value_heads": KV_HEADS,
            "head_dim": HEAD_DIM,
            "rms_norm_eps": 1e-6,
            "vocab_size": self.vocab,
            "max_position_embeddings": 4096,
            "hidden_act": "silu",
            "attention_bias": False,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
            **keys,
        }

    def write(self, directory: Path, config: dict[str, Any]) -> str:
        """Writes the drafter; returns where."""
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "config.json").write_text(json.dumps(config))
        write_tensors(directory / "model.safetensors", self.tensors)
        return str(directory)


def sliding(window: int) -> dict[str, Any]:
    return {"layer_types": ["sliding_attention"] * NUM_LAYERS, "sliding_window": window}


def dflash(maker: Maker, directory: Path) -> str:
    """z-lab: four sliding layers and a full one, no flag of causality."""
    maker.backbone()
    layers = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 32}
    block = {"block_size": BLOCK, "mask_token_id": 4, "target_layer_ids": maker.taps}
    config = maker.sizes(**layers, num_target_layers=maker.num_layers, dflash_config=block)
    return maker.write(directory, {"architectures": ["DFlashDraftModel"], **config})


def dflash2(maker: Maker, directory: Path) -> str:
    """z-lab's second: convolutions and a selector, all layers sliding and bidirectional."""
    maker.backbone()
    block = {
        "block_size": BLOCK,
        "mask_token_id": 4,
        "target_layer_ids": maker.taps,
        **maker.selector(),
        "final_logit_softcapping": 20.0,
        "output_multiplier": 0.45,
    }
    config = maker.sizes(**sliding(32), is_causal=False, dflash_config=block)
    return maker.write(directory, {"architectures": ["DFlash2DraftModel"], **config})


def muse_assistant(maker: Maker, directory: Path) -> str:
    """Muse's own naming: flat keys, an encoder, no size of the vocabulary."""
    maker.backbone("encoder.fc", "encoder.output_norm_enc")
    config = maker.sizes(
        **sliding(32),
        is_causal=False,
        model_type="muse_glimmer_assistant",
        block_size=BLOCK,
        mask_token_id=4,
        target_layer_ids=maker.taps,
    )
    del config["vocab_size"]
    return maker.write(directory, {"architectures": ["MuseGlimmerAssistantModel"], **config})


def dspark(maker: Maker, directory: Path) -> str:
    """SpecForge, as RadixArk publishes it: YaRN that applies, Markov and confidence heads."""
    maker.backbone()
    maker.add("markov_head.markov_w1.weight", maker.vocab, RANK)
    maker.add("markov_head.markov_w2.weight", maker.vocab, RANK)
    maker.add("confidence_head.proj.weight", 1, maker.hidden + RANK)
    maker.add("confidence_head.proj.bias", 1)
    block = {
        "block_size": BLOCK,
        "mask_token_id": 4,
        "target_layer_ids": maker.taps,
        "projector_type": "dspark",
        "markov_rank": RANK,
        "markov_head_type": "vanilla",
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
    }
    yarn = {
        "rope_type": "yarn",
        "rope_theta": 1e7,
        "factor": 32.0,
        "original_max_position_embeddings": 64,
    }
    config = maker.sizes(rope_parameters=yarn, dflash_config=block)
    return maker.write(directory, {"architectures": ["DSparkDraftModel"], **config})


def deepspec(maker: Maker, directory: Path) -> str:
    """DeepSpec: keys beside the target's own, frozen copies of embedding and head."""
    maker.backbone()
    maker.add("embed_tokens.weight", maker.vocab, maker.hidden)
    maker.add("lm_head.weight", maker.vocab, maker.hidden)
    maker.add("markov_head.markov_w1.weight", maker.vocab, RANK)
    maker.add("markov_head.markov_w2.weight", maker.vocab, RANK)
    config = maker.sizes(
        block_size=BLOCK,
        mask_token_id=4,
        target_layer_ids=maker.taps,
        markov_rank=RANK,
        markov_head_type="vanilla",
        enable_confidence_head=False,
        layer_types=["full_attention"] * NUM_LAYERS,
    )
    return maker.write(directory, {"architectures": ["Qwen3DSparkModel"], **config})


def gemma_dspark(maker: Maker, directory: Path) -> str:
    """DeepSpec for Gemma 4: the target's text config, norms on both sides, values made of keys."""
    text, hidden = maker.text, maker.hidden
    head_dim, inter = text["global_head_dim"], text["intermediate_size"]
    shares_keys = text["attention_k_eq_v"]
    kv_heads = text["num_global_key_value_heads" if shares_keys else "num_key_value_heads"]
    heads = text["num_attention_heads"]
    maker.add("fc.weight", hidden, len(maker.taps) * hidden)
    for name in ("hidden_norm", "norm"):
        maker.add(f"{name}.weight", hidden, offset=1.0)
    for index in range(NUM_LAYERS):
        prefix = f"layers.{index}"
        norms = ("input", "post_attention", "pre_feedforward", "post_feedforward")
        for name in norms:
            maker.add(f"{prefix}.{name}_layernorm.weight", hidden, offset=1.0)
        maker.add(f"{prefix}.layer_scalar", 1, offset=0.5)
        maker.add(f"{prefix}.self_attn.q_proj.weight", heads * head_dim, hidden)
        for name in ("k",) if shares_keys else ("k", "v"):
            maker.add(f"{prefix}.self_attn.{name}_proj.weight", kv_heads * head_dim, hidden)
        maker.add(f"{prefix}.self_attn.o_proj.weight", hidden, heads * head_dim)
        for name in ("q_norm", "k_norm"):
            maker.add(f"{prefix}.self_attn.{name}.weight", head_dim, scale=0.05, offset=0.4)
        for name in ("gate", "up"):
            maker.add(f"{prefix}.mlp.{name}_proj.weight", inter, hidden, scale=0.3)
        maker.add(f"{prefix}.mlp.down_proj.weight", hidden, inter)
    maker.add("embed_tokens.weight", maker.vocab, hidden)
    maker.add("lm_head.weight", maker.vocab, hidden)
    maker.add("markov_head.markov_w1.weight", maker.vocab, RANK, scale=0.7)
    maker.add("markov_head.markov_w2.weight", maker.vocab, RANK, scale=0.7)
    maker.add("confidence_head.proj.weight", 1, hidden + RANK)
    maker.add("confidence_head.proj.bias", 1)
    config = {
        **text,
        "architectures": ["Gemma4DSparkModel"],
        "target_model_type": "gemma4_unified",
        "target_text_model_type": text["model_type"],
        "num_target_layers": maker.num_layers,
        "num_hidden_layers": NUM_LAYERS,
        "layer_types": ["full_attention"] * NUM_LAYERS,
        "tie_word_embeddings": False,
        "block_size": BLOCK,
        "mask_token_id": 4,
        "target_layer_ids": maker.taps,
        "num_anchors": 512,
        "markov_rank": RANK,
        "markov_head_type": "vanilla",
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
    }
    return maker.write(directory, config)


def offsets(maker: Maker, num_drafted: int) -> None:
    """Adds the tables of a reduced vocabulary: every second id."""
    steps = np.arange(num_drafted, dtype="<i8")
    maker.tensors["d2t"] = ("I64", [num_drafted], steps.tobytes())
    reached = np.zeros(maker.vocab, np.uint8)
    reached[2 * steps] = 1
    maker.tensors["t2d"] = ("BOOL", [maker.vocab], reached.tobytes())


def eagle3(maker: Maker, directory: Path) -> str:
    """EAGLE's own names, a reduced vocabulary, layers counted from the embedding's output."""
    num_drafted = maker.vocab // 2
    maker.add("fc.weight", maker.hidden, len(maker.taps) * maker.hidden)
    maker.layer("midlayer", 2 * maker.hidden, with_head_norms=False)
    maker.add("midlayer.hidden_norm.weight", maker.hidden, offset=1.0)
    maker.add("norm.weight", maker.hidden, offset=1.0)
    maker.add("lm_head.weight", num_drafted, maker.hidden)
    offsets(maker, num_drafted)
    config = maker.sizes(
        num_hidden_layers=1,
        draft_vocab_size=num_drafted,
        eagle_aux_hidden_state_layer_ids=[tap + 1 for tap in maker.taps],
        max_position_embeddings=2048,
    )
    return maker.write(directory, {"architectures": ["LlamaForCausalLMEagle3"], **config})
