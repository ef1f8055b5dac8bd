"""Rounding to BF16 after norms and gates, against float64; plain rounding against the bits."""

import numpy as np
import pytest
from specpilot_rs._core import kernels


def to_bf16(x: np.ndarray) -> np.ndarray:
    """Bits of the nearest BF16, ties to even."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def widened(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)


def gate_of(kind: str, x: np.ndarray) -> np.ndarray:
    x = x.astype(np.float64)
    with np.errstate(over="ignore"):
        sigmoid = 1 / (1 + np.exp(-x))
        if kind == "gelu_tanh":
            return x / (1 + np.exp(-2 * np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))
    return x * sigmoid if kind == "silu" else sigmoid


def normed(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    x = x.astype(np.float64)
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * weight


def assert_rounded(got: np.ndarray, want: np.ndarray, arithmetic: float = 4e-6) -> None:
    """Half a spacing of BF16, and the relative error that `arithmetic` in fp32 before it may make.

    Gates whose exponential overflows are zero: with the values here, what belongs there is below 1e-36.
    """
    error = np.abs(widened(got) - want)
    assert (error <= np.abs(want) * (2.0**-8 + arithmetic) + 1e-36).all(), error.max()


def values(*shape: int, seed: int = 0) -> np.ndarray:
    return (3 * np.random.default_rng(seed).standard_normal(shape)).astype(np.float32)


@pytest.mark.parametrize("width", [1, 31, 256, 5120])
@pytest.mark.parametrize("num_vectors", [0, 1, 5])
def test_plain_rows_are_rounded_to_nearest_even(num_vectors: int, width: int) -> None:
    x = values(num_vectors, width)
    if x.size:
        x.flat[0] = np.array(0x3F808000, np.uint32).view(np.float32)  # halfway, to even: down
    got = kernels.round_rows(x.ravel(), (0, 1, 0, width), num_vectors, width)
    np.testing.assert_array_equal(got, to_bf16(x))


@pytest.mark.parametrize("width", [7, 128, 512, 5120, 17408])
def test_normed(width: int) -> None:
    x, weight = values(3, width), values(width, seed=1)
    got = kernels.round_rows(x.ravel(), (0, 1, 0, width), 3, width, weight=weight, eps=1e-6)
    assert_rounded(got, normed(x, weight, 1e-6))


@pytest.mark.parametrize("kind", ["silu", "sigmoid", "gelu_tanh"])
def test_halves_of_a_merged_projection(kind: str) -> None:
    merged, width = values(4, 2 * 40), 40
    flat, stride = merged.ravel(), 2 * width
    places, gate_places = (width, 1, 0, stride), (0, 1, 0, stride)
    got = kernels.round_rows(flat, places, 4, width, gates=flat, gate_places=gate_places, kind=kind)
    assert_rounded(got, gate_of(kind, merged[:, :width]) * merged[:, width:])


def test_normed_heads_gated_by_a_part_of_longer_rows() -> None:
    rows, heads, width, longer = 3, 6, 16, 200
    x, gates, weight = values(rows, heads, width), values(rows, longer, seed=1), values(width, seed=2)
    got = kernels.round_rows(
        x.ravel(),
        (0, heads, width, heads * width),
        rows * heads,
        width,
        weight=weight,
        eps=1e-6,
        gates=gates.ravel(),
        gate_places=(20, heads, width, longer),
    )
    own = gates[:, 20 : 20 + heads * width].reshape(rows, heads, width)
    want = normed(x, weight, 1e-6) * gate_of("silu", own)
    assert_rounded(got, want.reshape(rows * heads, width))


def test_saturated_gates_are_finite() -> None:
    gates = np.array([-1e4, -80, 0, 80, 1e4], np.float32)
    got = kernels.round_rows(
        np.ones(5, np.float32), (0, 1, 0, 5), 1, 5, gates=gates, gate_places=(0, 1, 0, 5), kind="sigmoid"
    )
    np.testing.assert_array_equal(widened(got)[0, [0, 2, 3, 4]], [0, 0.5, 1, 1])


def test_short_buffers_and_unknown_gates_are_refused() -> None:
    x = np.ones(15, np.float32)
    with pytest.raises(ValueError, match="`x` needs at least 16 elements, got 15"):
        kernels.round_rows(x, (0, 1, 0, 8), 2, 8)
    with pytest.raises(ValueError, match="`gates` needs at least 9 elements, got 8"):
        kernels.round_rows(x, (0, 1, 0, 8), 1, 8, gates=x[:8], gate_places=(1, 1, 0, 8))
    with pytest.raises(ValueError, match="`weight` needs at least 8 elements, got 7"):
        kernels.round_rows(x, (0, 1, 0, 8), 1, 8, weight=x[:7])
    with pytest.raises(ValueError, match="must be silu, sigmoid or gelu_tanh, got gelu"):
        kernels.round_rows(x, (0, 1, 0, 8), 1, 8, kind="gelu")
