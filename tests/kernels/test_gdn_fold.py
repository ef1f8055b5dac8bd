"""GdnFold against the state the sequential recurrence reaches."""

import numpy as np
import pytest
from gated_delta_rule import Cache, ShapeTuple, Token, Weights, run_chain
from specpilot_rs._core import kernels

SHAPES: list[ShapeTuple] = [(1, 2, 128, 128, 4), (2, 6, 24, 40, 4), (3, 3, 16, 8, 2)]


@pytest.mark.parametrize("anchor", [0, 32, 64, 160])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("rate", [-6.0, 2.5], ids=["weak_decay", "strong_decay"])
def test_the_next_anchor_follows_the_recurrence(shape: ShapeTuple, rate: float, anchor: int) -> None:
    rng = np.random.default_rng(anchor)
    weights = Weights.random(rng, shape, rate)
    nodes = run_chain(shape, weights, [Token.random(rng, shape) for _ in range(anchor + 50)])
    cache = Cache(shape, 2)
    cache.fill(1, nodes, [anchor])

    states = kernels.gdn_fold(shape, cache.arrays(), 1, anchor)

    following = (anchor // 32 + 1) % 3
    np.testing.assert_allclose(states[1, following], nodes[anchor + 31].state, rtol=0, atol=2e-5)
    cache.states[1, following] = states[1, following]
    np.testing.assert_array_equal(states, cache.states)


def test_an_anchor_between_intervals_is_refused() -> None:
    shape = SHAPES[2]
    with pytest.raises(ValueError, match="`anchor` must be 64, got 33"):
        kernels.gdn_fold(shape, Cache(shape, 1).arrays(), 0, 33)
