"""Gates against float64, with the extremes of the exponential."""

import numpy as np
import pytest
from specpilot_rs._core import kernels
from tolerances import assert_close

KINDS = ["silu", "sigmoid", "gelu_tanh"]


def oracle(kind, x, y):
    x, y = x.astype(np.float64), y.astype(np.float64)
    with np.errstate(over="ignore"):
        sigmoid = 1 / (1 + np.exp(-x))
    if kind == "gelu_tanh":
        # x / 2 * (1 + tanh(u)), without its cancellation.
        with np.errstate(over="ignore"):
            return x / (1 + np.exp(-2 * np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))) * y
    return sigmoid * y if kind == "sigmoid" else x * sigmoid * y


def check(kind, got, want):
    assert_close("gelu_gate" if kind == "gelu_tanh" else "gate", got, want)


def values(num_vectors, width, seed=0):
    return (4 * np.random.default_rng(seed).standard_normal((num_vectors, width))).astype(np.float32)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("width", [1, 16, 31, 768, 17408])
@pytest.mark.parametrize("num_vectors", [0, 1, 5])
def test_matches_the_oracle(kind, num_vectors, width):
    x, y = values(num_vectors, width), values(num_vectors, width, 1)
    got = kernels.gate(kind, x.reshape(-1), 0, width, y)
    check(kind, got, oracle(kind, x, y))


@pytest.mark.parametrize("kind", KINDS)
def test_gate_heads_interleaved_with_query_heads(kind):
    x, y = values(6, 2 * 40), values(6, 40, 1)
    got = kernels.gate(kind, x.reshape(-1), 40, 80, y)
    check(kind, got, oracle(kind, x[:, 40:], y))


@pytest.mark.parametrize("kind", KINDS)
def test_saturated_gates_are_finite(kind):
    x = np.array([[-80, -20, -1e-8, 0.0, 1e-8, 20, 80, 1e4]], np.float32)
    y = np.full_like(x, 3.0)
    check(kind, kernels.gate(kind, x[0], 0, 8, y), oracle(kind, x, y))
    closed = kernels.gate(kind, np.array([-100, -1e4, -1e30], np.float32), 0, 3, np.ones((1, 3), np.float32))
    assert np.isfinite(closed).all()
    assert (np.abs(closed[:, :2]) < 1e-30).all()


def test_neighbours_do_not_matter():
    x, y = values(64, 1024), values(64, 1024, 1)
    together = kernels.gate("silu", x.reshape(-1), 0, 1024, y)
    for r in (0, 31, 63):
        np.testing.assert_array_equal(kernels.gate("silu", x[r], 0, 1024, y[r : r + 1])[0], together[r])


def test_unknown_kind_and_short_source_are_refused():
    y = np.ones((2, 8), np.float32)
    with pytest.raises(ValueError, match="must be silu, sigmoid or gelu_tanh, got gelu"):
        kernels.gate("gelu", np.ones(16, np.float32), 0, 8, y)
    with pytest.raises(ValueError, match="`x` needs at least 17 elements, got 16"):
        kernels.gate("silu", np.ones(16, np.float32), 1, 8, y)
