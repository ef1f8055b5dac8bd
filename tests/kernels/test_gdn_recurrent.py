"""The recurrence token by token against float64, from committed states; states brought over a log."""

import numpy as np
import pytest
from specpilot_rs._core import kernels

from tests.kernels.gated_delta_rule import Cache, Node, ShapeTuple, Token, Weights, run_chain, silu, step

SHAPES: list[ShapeTuple] = [(1, 2, 128, 128, 4), (2, 6, 24, 40, 4), (3, 3, 16, 8, 2)]


def merged(tokens: list[Token]) -> np.ndarray:
    return np.stack([np.concatenate([t.qkv, t.z, t.a, t.b]) for t in tokens])


def gated_norm(shape: ShapeTuple, weights: Weights, y: np.ndarray, tokens: list[Token]) -> np.ndarray:
    """What follows the kernel: the oracle's nodes hold outputs behind it."""
    _, hv, _, dv, _ = shape
    heads = y.astype(np.float64).reshape(len(tokens), hv, dv)
    heads = heads / np.sqrt((heads**2).mean(-1, keepdims=True) + 1e-6) * weights.norm
    return heads.reshape(len(tokens), -1) * silu(np.stack([t.z for t in tokens]).astype(np.float64))


def committed_cache(shape: ShapeTuple, chains: list[list[Node]]) -> Cache:
    """The state of all committed tokens first in each slot's ring."""
    cache = Cache(shape, len(chains))
    for slot, nodes in enumerate(chains):
        cache.fill(slot, nodes, [])
        cache.states[slot, 0] = nodes[-1].state if nodes else 0.0
    return cache


def run(shape: ShapeTuple, weights: Weights, tokens: list[Token], segments: list, cache: Cache, device: str):
    arrays = cache.arrays()
    return kernels.gdn_recurrent(
        shape, merged(tokens), weights.conv, weights.a_log, weights.dt_bias, segments, arrays, device=device
    )


def check_chains(shape: ShapeTuple, rate: float, device: str, tolerance: float) -> None:
    rng = np.random.default_rng(3)
    weights = Weights.random(rng, shape, rate)
    lengths = [(0, 1), (0, 20), (1, 7), (3, 3), (40, 1), (130, 33)]
    chains, segments, tokens, want = [], [], [], []
    for slot, (committed_len, num_rows) in enumerate(lengths):
        committed = run_chain(shape, weights, [Token.random(rng, shape) for _ in range(committed_len)])
        chains.append(committed)
        node = committed[-1] if committed else None
        for _ in range(num_rows):
            tokens.append(Token.random(rng, shape))
            node = step(shape, weights, node, tokens[-1])
            want.append(node)
        segments.append((slot, committed_len, list(range(-1, num_rows - 1))))
    y, qkv, k, d, g = run(shape, weights, tokens, segments, committed_cache(shape, chains), device)
    np.testing.assert_array_equal(qkv, np.stack([t.qkv for t in tokens]))
    got = {"y": gated_norm(shape, weights, y, tokens), "k": k, "d": d, "g": g}
    for name, values in got.items():
        expected = np.stack([getattr(node, name) for node in want])
        atol = tolerance if name in "yd" else 2e-5
        np.testing.assert_allclose(values, expected, rtol=1e-5, atol=atol, err_msg=name)


def check_advance(shape: ShapeTuple, device: str) -> None:
    rng = np.random.default_rng(4)
    weights = Weights.random(rng, shape, -1.0)
    caches, want = [], []
    for _ in range(3):
        nodes = run_chain(shape, weights, [Token.random(rng, shape) for _ in range(170)])
        cache = Cache(shape, 2)
        cache.fill(1, nodes, [])
        cache.states[1, 0] = nodes[119].state
        caches.append(cache)
        want.append(nodes[168].state)
    states = kernels.gdn_recurrent_advance(
        shape, [cache.arrays() for cache in caches], 1, 120, 169, device=device
    )
    for cache, got, expected in zip(caches, states, want, strict=True):
        np.testing.assert_allclose(got[1, 0], expected, rtol=0, atol=2e-5)
        cache.states[1, 0] = got[1, 0]
        np.testing.assert_array_equal(got, cache.states)


@pytest.mark.parametrize("rate", [-6.0, -1.0, 2.5], ids=["weak_decay", "decay", "strong_decay"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_chains_follow_the_recurrence(shape: ShapeTuple, rate: float) -> None:
    check_chains(shape, rate, "cpu", 2e-4)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_states_come_forward_over_the_log(shape: ShapeTuple) -> None:
    check_advance(shape, "cpu")


def test_trees_are_refused() -> None:
    shape = SHAPES[2]
    rng = np.random.default_rng(0)
    weights, tokens = Weights.random(rng, shape, 0.0), [Token.random(rng, shape) for _ in range(3)]
    with pytest.raises(ValueError, match=r"each row must follow the one before it .*, row 2 does not"):
        run(shape, weights, tokens, [(0, 0, [-1, 0, 0])], committed_cache(shape, [[]]), "cpu")


def test_more_than_the_log_holds_is_refused() -> None:
    shape = SHAPES[2]
    arrays = committed_cache(shape, [[]]).arrays()
    with pytest.raises(ValueError, match="`log` needs at least 129 elements, got 128"):
        kernels.gdn_recurrent_advance(shape, [arrays], 0, 0, 129)
