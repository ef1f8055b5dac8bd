"""DFlash and EAGLE-3 with Qwen3's and Llama's layers, in float64 by their equations alone.

In: a drafter's tensors and config, the target's tables as the drafter is to see them, taps of the positions
before an anchor. Out: the chain that greedy drafting gives. Which embedding rows a drafter reads is left to
the caller: it is what tests of a family's drafters are about.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from .gemma_drafter_oracle import Array, rms


@dataclass
class Layer:
    """A decoder layer's tensors by their names within it, and its sizes."""

    tensors: dict[str, Array]
    config: dict[str, Any]

    def norm(self, x: Array, name: str) -> Array:
        return rms(x, self.tensors[f"{name}.weight"], self.config["rms_norm_eps"])

    def heads(self, x: Array, name: str, positions: Array | None) -> Array:
        """Projects `x` and, at `positions`, norms and turns the heads: pairs (j, j + width / 2)."""
        width = self.config["head_dim"]
        rows = (x @ self.tensors[f"self_attn.{name}_proj.weight"].T).reshape(len(x), -1, width)
        if positions is None:
            return rows
        if f"self_attn.{name}_norm.weight" in self.tensors:
            rows = self.norm(rows, f"self_attn.{name}_norm")
        theta = self.config["rope_parameters"]["rope_theta"]
        angles = np.outer(positions, theta ** (-2 * np.arange(width // 2) / width))[:, None]
        a, b = rows[..., : width // 2], rows[..., width // 2 :]
        return np.concatenate(
            [a * np.cos(angles) - b * np.sin(angles), b * np.cos(angles) + a * np.sin(angles)], -1
        )

    def attend(self, q: Array, k: Array, v: Array, sees: Array) -> Array:
        """Softmax attention of heads `[rows, heads, width]` over what a row `sees`, and its projection."""
        group = q.shape[1] // k.shape[1]
        out = np.empty_like(q)
        for head in range(q.shape[1]):
            scores = q[:, head] @ k[:, head // group].T / np.sqrt(q.shape[2])
            scores = np.where(sees, scores, -np.inf)
            weights = np.exp(scores - scores.max(1, keepdims=True))
            out[:, head] = weights / weights.sum(1, keepdims=True) @ v[:, head // group]
        return out.reshape(len(q), -1) @ self.tensors["self_attn.o_proj.weight"].T

    def mlp(self, x: Array) -> Array:
        gate, up, down = (self.tensors[f"mlp.{name}_proj.weight"] for name in ("gate", "up", "down"))
        y = self.norm(x, "post_attention_layernorm")
        return (y @ gate.T / (1 + np.exp(-(y @ gate.T))) * (y @ up.T)) @ down.T


def layer_of(tensors: dict[str, Array], prefix: str, config: dict[str, Any]) -> Layer:
    """The layer whose tensors' names begin with `prefix`."""
    own = {name[len(prefix) + 1 :]: t for name, t in tensors.items() if name.startswith(f"{prefix}.")}
    return Layer(own, config)


def chain_of_muse_assistant(
    tensors: dict[str, Array], config: dict[str, Any], embed: Array, head: Array, ids: list[int], taps: Array
) -> list[int]:
    """DFlash by Muse's names: a bidirectional block behind windows, whose rows but the first draft."""
    block, eps = config["block_size"], config["rms_norm_eps"]
    context = rms(taps @ tensors["encoder.fc.weight"].T, tensors["encoder.output_norm_enc.weight"], eps)
    start = len(context)
    positions = np.arange(start + block)
    distances = positions[start:, None] - positions
    sees = (positions >= start) | (distances < config["sliding_window"])
    x = embed[[ids[-1]] + [config["mask_token_id"]] * (block - 1)]
    for index in range(config["num_hidden_layers"]):
        layer = layer_of(tensors, f"layers.{index}", config)
        y = layer.norm(x, "input_layernorm")
        rows = np.concatenate([context, y])
        q, k = layer.heads(y, "q", positions[start:]), layer.heads(rows, "k", positions)
        x = x + layer.attend(q, k, layer.heads(rows, "v", None), sees)
        x = x + layer.mlp(x)
    logits = rms(x, tensors["norm.weight"], eps) @ head.T
    return [int(token) for token in logits[1:].argmax(1)]


def chain_of_eagle3(
    tensors: dict[str, Array],
    config: dict[str, Any],
    offsets: Array,
    embed: Array,
    ids: list[int],
    taps: Array,
    num_tokens: int,
) -> list[int]:
    """EAGLE-3 whose normed feature starts the residual: a feature beside the token after it, per position."""
    body = config["transformer_layer_config"]
    layer = layer_of(tensors, "layers.0", body)
    features = taps @ tensors["fc.weight"].T
    tokens, chain = ids[1:], []
    while len(chain) < num_tokens:
        positions = np.arange(len(features))
        normed = layer.norm(features, "hidden_norm")
        rows = np.concatenate([layer.norm(embed[tokens], "input_layernorm"), normed], 1)
        q, k = layer.heads(rows[-1:], "q", positions[-1:]), layer.heads(rows, "k", positions)
        h = normed[-1:] + layer.attend(q, k, layer.heads(rows, "v", None), np.full((1, len(rows)), True))
        h = h + layer.mlp(h)
        logits = tensors["lm_head.weight"] @ rms(h[0], tensors["norm.weight"], body["rms_norm_eps"])
        likeliest = int(logits.argmax())
        chain.append(likeliest + int(offsets[likeliest]))
        features, tokens = np.concatenate([features, h]), [*tokens, chain[-1]]
    return chain
