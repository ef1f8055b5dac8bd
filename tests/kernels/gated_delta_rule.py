"""The Gated DeltaNet recurrence in float64, from the sequential formulas: the oracle of two kernels' tests.

Every node of a tree carries a full copy of its state, which is what the kernels avoid.
"""

from dataclasses import dataclass

import numpy as np

LOG_POSITIONS, STATE_RING, FOLD_INTERVAL = 128, 3, 32

ShapeTuple = tuple[int, int, int, int, int]


@dataclass
class Weights:
    """Random weights; ``rate`` is the centre of A_log."""

    conv: np.ndarray
    a_log: np.ndarray
    dt_bias: np.ndarray
    norm: np.ndarray

    @classmethod
    def random(cls, rng: np.random.Generator, shape: ShapeTuple, rate: float) -> "Weights":
        hk, hv, dk, dv, taps = shape
        return cls(
            conv=rng.normal(size=(2 * hk * dk + hv * dv, taps)).astype(np.float32) * 0.5,
            a_log=(rate + rng.normal(size=hv) * 0.3).astype(np.float32),
            dt_bias=rng.normal(size=hv).astype(np.float32),
            norm=rng.normal(size=dv).astype(np.float32),
        )


@dataclass
class Token:
    """Projections of one token."""

    qkv: np.ndarray
    z: np.ndarray
    a: np.ndarray
    b: np.ndarray

    @classmethod
    def random(cls, rng: np.random.Generator, shape: ShapeTuple) -> "Token":
        hk, hv, dk, dv, _ = shape
        sizes = (2 * hk * dk + hv * dv, hv * dv, hv, hv)
        return cls(*(rng.normal(size=size).astype(np.float32) * 1.5 for size in sizes))


@dataclass
class Node:
    """State after a token, and what the token gave."""

    state: np.ndarray  # [Hv, Dk, Dv]
    inputs: list[np.ndarray]  # pre-convolution inputs of all tokens so far
    y: np.ndarray
    k: np.ndarray
    d: np.ndarray
    g: np.ndarray


def silu(x: np.ndarray) -> np.ndarray:
    return x / (1 + np.exp(-x))


def step(shape: ShapeTuple, weights: Weights, before: Node | None, token: Token) -> Node:
    """One token of the recurrence behind ``before`` (nothing when ``None``)."""
    hk, hv, dk, dv, taps = shape
    state = np.zeros((hv, dk, dv)) if before is None else before.state.copy()
    inputs = ([] if before is None else before.inputs) + [token.qkv.astype(np.float64)]
    window = np.array(inputs[-taps:])
    conv = silu((window * weights.conv.astype(np.float64).T[-len(window) :]).sum(axis=0))
    q, k, v = np.split(conv, [hk * dk, 2 * hk * dk])
    q, k = (
        x.reshape(hk, dk) / np.sqrt((x.reshape(hk, dk) ** 2).sum(-1, keepdims=True) + 1e-6) for x in (q, k)
    )
    q = (q / np.sqrt(dk)).repeat(hv // hk, axis=0)
    k_heads = k.repeat(hv // hk, axis=0)
    x = token.a.astype(np.float64) + weights.dt_bias
    g = -np.exp(weights.a_log.astype(np.float64)) * np.logaddexp(0, x)
    beta = 1 / (1 + np.exp(-token.b.astype(np.float64)))
    state *= np.exp(g)[:, None, None]
    d = beta[:, None] * (v.reshape(hv, dv) - np.einsum("hkv,hk->hv", state, k_heads))
    state += k_heads[:, :, None] * d[:, None, :]
    o = np.einsum("hkv,hk->hv", state, q)
    o /= np.sqrt((o**2).mean(-1, keepdims=True) + 1e-6)
    y = (o * weights.norm).ravel() * silu(token.z.astype(np.float64))
    return Node(state, inputs, y, k.ravel(), d.ravel(), g)


def run_chain(shape: ShapeTuple, weights: Weights, tokens: list[Token]) -> list[Node]:
    """All tokens one after another."""
    nodes: list[Node] = []
    for token in tokens:
        nodes.append(step(shape, weights, nodes[-1] if nodes else None, token))
    return nodes


class Cache:
    """The kernels' committed state, filled from a chain of nodes; what is not set is NaN."""

    def __init__(self, shape: ShapeTuple, num_slots: int) -> None:
        hk, hv, dk, dv, taps = shape
        self.states = np.full((num_slots, STATE_RING, hv, dk, dv), np.nan, dtype=np.float32)
        self.log_k = np.full((num_slots, LOG_POSITIONS, hk * dk), np.nan, dtype=np.float32)
        self.log_d = np.full((num_slots, LOG_POSITIONS, hv * dv), np.nan, dtype=np.float32)
        self.log_g = np.full((num_slots, LOG_POSITIONS, hv), np.nan, dtype=np.float32)
        self.conv = np.full((num_slots, taps, 2 * hk * dk + hv * dv), np.nan, dtype=np.float32)

    def fill(self, slot: int, nodes: list[Node], anchors: list[int]) -> None:
        """Writes the state before each anchor, and the log and inputs of the last positions."""
        for anchor in anchors:
            state = nodes[anchor - 1].state if anchor else 0.0
            self.states[slot, anchor // FOLD_INTERVAL % STATE_RING] = state
        for position, node in list(enumerate(nodes))[-LOG_POSITIONS:]:
            at = position % LOG_POSITIONS
            self.log_k[slot, at], self.log_d[slot, at], self.log_g[slot, at] = node.k, node.d, node.g
            self.conv[slot, position % self.conv.shape[1]] = node.inputs[position]

    def arrays(self) -> tuple[np.ndarray, ...]:
        return (self.states, self.log_k, self.log_d, self.log_g, self.conv)
