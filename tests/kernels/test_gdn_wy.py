"""GdnWy against the sequential recurrence with a copied state per tree node."""

import numpy as np
import pytest
from gated_delta_rule import Cache, ShapeTuple, Token, Weights, run_chain, step
from specpilot_rs._core import kernels

SHAPES: list[ShapeTuple] = [(1, 2, 128, 128, 4), (2, 6, 24, 40, 4), (3, 3, 16, 8, 2)]


def anchor_of(position: int) -> int:
    return max(0, 32 * ((position - 64) // 32))


def test_anchors_follow_the_formula() -> None:
    for position in range(700):
        assert kernels.gdn_anchor_of(position) == anchor_of(position)


def random_parents(rng: np.random.Generator, num_rows: int) -> list[int]:
    return [int(rng.integers(max(-1, row - 5), row)) for row in range(num_rows)]


@pytest.mark.parametrize("rate", [-6.0, -1.0, 2.5], ids=["weak_decay", "decay", "strong_decay"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_trees_follow_the_recurrence(shape: ShapeTuple, rate: float) -> None:
    rng = np.random.default_rng(3)
    weights = Weights.random(rng, shape, rate)
    lengths = [(0, 1), (0, 40), (1, 7), (2, 3), (63, 20), (64, 1), (95, 30), (96, 12), (127, 64), (300, 33)]
    cache = Cache(shape, len(lengths))
    segments, tokens, want = [], [], []
    for slot, (committed_len, num_rows) in enumerate(lengths):
        committed = run_chain(shape, weights, [Token.random(rng, shape) for _ in range(committed_len)])
        parents = random_parents(rng, num_rows)
        nodes = []
        depths: list[int] = []
        for parent in parents:
            before = nodes[parent] if parent >= 0 else (committed[-1] if committed else None)
            tokens.append(Token.random(rng, shape))
            nodes.append(step(shape, weights, before, tokens[-1]))
            depths.append(depths[parent] + 1 if parent >= 0 else 0)
        anchors = sorted({anchor_of(committed_len + depth) for depth in depths})
        cache.fill(slot, committed, anchors)
        segments.append((slot, committed_len, parents))
        want += nodes

    columns = [np.stack([getattr(token, name) for token in tokens]) for name in ("qkv", "z", "a", "b")]
    got = kernels.gdn_wy(
        shape,
        *columns,
        weights.conv,
        weights.a_log,
        weights.dt_bias,
        weights.norm,
        1e-6,
        segments,
        cache.arrays(),
    )

    tolerances = {"y": 5e-5, "k": 1e-6, "d": 2e-5, "g": 1e-5}
    for (name, atol), values in zip(tolerances.items(), got, strict=True):
        expected = np.stack([getattr(node, name) for node in want])
        np.testing.assert_allclose(values, expected, rtol=1e-6, atol=atol, err_msg=name)


def test_a_cache_without_the_slot_is_refused() -> None:
    shape = SHAPES[2]
    rng = np.random.default_rng(0)
    weights, token = Weights.random(rng, shape, 0.0), Token.random(rng, shape)
    columns = [getattr(token, name)[None] for name in ("qkv", "z", "a", "b")]
    arrays = Cache(shape, 2).arrays()
    with pytest.raises(ValueError, match=r"`cache\.states` needs at least 3456 elements, got 2304"):
        kernels.gdn_wy(
            shape,
            *columns,
            weights.conv,
            weights.a_log,
            weights.dt_bias,
            weights.norm,
            1e-6,
            [(2, 0, [-1])],
            arrays,
        )
