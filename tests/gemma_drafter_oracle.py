"""A DSpark drafter with Gemma 4's layers, in float64 by its equations alone.

In: the drafter's tensors and config, the target's embedding, taps of the positions before an anchor. Out: the
chain that greedy drafting gives. Each departure from the plain block drafter is a field of `Layers`, so that
a test can take one away and see that it mattered.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .kernels.bfloat16 import from_bits
from .safetensors_file import Tensors

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Layers:
    """What sets the layers apart; the defaults are the published drafter's."""

    norms_behind: bool = True
    scalars: bool = True
    normed_values: bool = True
    score_scale: float = 1.0
    turning_share: float = 0.25
    gelu: bool = True
    caps_before_correction: bool = True


def widened(tensors: Tensors) -> dict[str, Array]:
    """BF16 tensors as float64."""
    return {
        name: from_bits(np.frombuffer(data, np.uint16)).astype(np.float64).reshape(shape)
        for name, (dtype, shape, data) in tensors.items()
        if dtype == "BF16"
    }


def rms(x: Array, weight: Array | None = None, eps: float = 1e-6) -> Array:
    y = x / np.sqrt((x * x).mean(-1, keepdims=True) + eps)
    return y if weight is None else y * weight


@dataclass
class Oracle:
    """The drafter, for a target whose LM head is its embedding `embed` `[V, H]`."""

    tensors: dict[str, Array]
    config: dict[str, Any]
    embed: Array
    layers: Layers = field(default_factory=Layers)

    def draft(self, taps: Array, anchor_token: int, num_tokens: int) -> list[int]:
        """The chain after an anchor behind the positions of `taps` `[T, taps * H]`."""
        w, config = self.tensors, self.config
        start, hidden = len(taps), config["hidden_size"]
        context = rms(taps @ w["fc.weight"].T, w["hidden_norm.weight"])
        ids = [anchor_token] + [config["mask_token_id"]] * (num_tokens - 1)
        x = self.embed[ids] * np.sqrt(hidden)
        for index in range(config["num_hidden_layers"]):
            x = self.layer(f"layers.{index}", context, x, start)
        logits = self.embed @ rms(x, w["norm.weight"]).T
        cap = config["final_logit_softcapping"]
        chain, before = [], anchor_token
        for row in logits.T:
            correction = w["markov_head.markov_w2.weight"] @ w["markov_head.markov_w1.weight"][before]
            early = self.layers.caps_before_correction
            scores = cap * np.tanh(row / cap) + correction if early else row + correction
            before = int(scores.argmax())
            chain.append(before)
        return chain

    def layer(self, prefix: str, context: Array, x: Array, start: int) -> Array:
        w = {name[len(prefix) + 1 :]: t for name, t in self.tensors.items() if name.startswith(prefix)}
        attended = self.attend(w, context, rms(x, w["input_layernorm.weight"]), start)
        x = x + self.behind(attended @ w["self_attn.o_proj.weight"].T, w["post_attention_layernorm.weight"])
        y = rms(x, w["pre_feedforward_layernorm.weight"])
        gate, up = y @ w["mlp.gate_proj.weight"].T, y @ w["mlp.up_proj.weight"].T
        if self.layers.gelu:
            gate = gate / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3)))
        else:
            gate = gate / (1 + np.exp(-gate))
        mlp = (gate * up) @ w["mlp.down_proj.weight"].T
        x = x + self.behind(mlp, w["post_feedforward_layernorm.weight"])
        return x * w["layer_scalar"] if self.layers.scalars else x

    def behind(self, y: Array, weight: Array) -> Array:
        return rms(y, weight) if self.layers.norms_behind else y

    def attend(self, w: dict[str, Array], context: Array, y: Array, start: int) -> Array:
        heads, width = self.config["num_attention_heads"], self.config["global_head_dim"]
        rows = np.concatenate([context, y])
        q = (y @ w["self_attn.q_proj.weight"].T).reshape(len(y), heads, width)
        k = (rows @ w["self_attn.k_proj.weight"].T).reshape(len(rows), -1, width)
        v = k
        if "self_attn.v_proj.weight" in w:
            v = (rows @ w["self_attn.v_proj.weight"].T).reshape(k.shape)
        if self.layers.normed_values:
            v = rms(v)
        positions = np.arange(len(rows))
        q = self.turned(rms(q, w["self_attn.q_norm.weight"]), positions[start:])
        k = self.turned(rms(k, w["self_attn.k_norm.weight"]), positions)
        group = heads // k.shape[1]
        out = np.empty_like(q)
        for head in range(heads):
            scores = self.layers.score_scale * q[:, head] @ k[:, head // group].T
            weights = np.exp(scores - scores.max(1, keepdims=True))
            out[:, head] = weights / weights.sum(1, keepdims=True) @ v[:, head // group]
        return out.reshape(len(y), -1)

    def turned(self, x: Array, positions: Array) -> Array:
        """Pairs (j, j + width / 2), of which the first share turns."""
        width = x.shape[-1]
        pair = np.arange(width // 2)
        theta = self.config["rope_parameters"]["full_attention"]["rope_theta"]
        turns = pair < int(width * self.layers.turning_share / 2)
        angles = np.outer(positions, np.where(turns, theta ** (-2 * pair / width), 0))[:, None]
        a, b = x[..., : width // 2], x[..., width // 2 :]
        return np.concatenate(
            [a * np.cos(angles) - b * np.sin(angles), b * np.cos(angles) + a * np.sin(angles)], -1
        )
