"""Matmuls of many rows, as prompts bring them, have the bits of those of few rows."""

from __future__ import annotations

import numpy as np
import pytest
from specpilot_rs._core import kernels

from tests.cuda.test_matmul import SHAPES, weights
from tests.kernels.bfloat16 import to_bits

MANY = 200
FEW = 32


def in_pieces(multiply, x: np.ndarray) -> np.ndarray:
    """Rows a few at a time: what decoding takes."""
    return np.concatenate([multiply(x[first : first + FEW]) for first in range(0, len(x), FEW)])


def rows(rng: np.random.Generator, k: int) -> np.ndarray:
    x = rng.normal(size=(MANY, k)).astype(np.float32)
    x[3] *= 1e30  # outliers
    x[70, ::7] *= 1e20
    x[5, ::2] = -x[5, 1::2]  # cancels
    x[199, : k // 2] = -x[199, k // 2 : k // 2 * 2]
    return x


@pytest.mark.parametrize(("n", "k"), SHAPES)
@pytest.mark.parametrize("escape_rate", [0.0, 4e-4, 4e-3])
def test_many_rows_have_the_bits_of_few(n: int, k: int, escape_rate: float) -> None:
    rng = np.random.default_rng([n, k, 1])
    weight, x = weights(rng, n, k, escape_rate), rows(rng, k)
    residual = rng.normal(size=(MANY, n)).astype(np.float32)
    want = in_pieces(lambda part: kernels.w12_matmul(part, weight, device="cuda"), x)
    for num_rows in (64, 65, 129, MANY):
        for got in (
            kernels.w12_matmul(x[:num_rows], weight, device="cuda"),
            kernels.bf16_matmul(x[:num_rows], weight, device="cuda"),
        ):
            np.testing.assert_array_equal(got, want[:num_rows])
    added = kernels.w12_matmul(x, weight, residual, device="cuda")
    np.testing.assert_array_equal(added, residual + want)
    coarse = in_pieces(lambda part: kernels.w12_matmul(part, weight, q_view=True, device="cuda"), x)
    np.testing.assert_array_equal(kernels.w12_matmul(x, weight, q_view=True, device="cuda"), coarse)


@pytest.mark.parametrize("k", [250, 5120])
def test_cancelling_weights(k: int) -> None:
    rng = np.random.default_rng(k)
    values = rng.normal(size=(48, k)).astype(np.float32)
    values[:, 1::2] = values[:, : k // 2 * 2 : 2]
    x = rows(rng, k)
    x[:, 1::2] = -x[:, : k // 2 * 2 : 2]
    weight = to_bits(values)
    want = in_pieces(lambda part: kernels.bf16_matmul(part, weight, device="cuda"), x)
    np.testing.assert_array_equal(kernels.bf16_matmul(x, weight, device="cuda"), want)
