"""Rows that kernels leave for a matmul: their fp32 results rounded once, and the products of such rows."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
from specpilot_rs._core import kernels

from tests.kernels.bfloat16 import from_bits, to_bits

GPU = {"device": "cuda"}
# Whole super-tiles, a part of one, and what is read in quads, in pairs and alone.
WIDTHS = [1, 15, 18, 64, 100, 512, 513, 1000, 5120, 17408]


def normal(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def rounded(values: np.ndarray) -> np.ndarray:
    return from_bits(to_bits(values))


def assert_same(got: np.ndarray, want: np.ndarray) -> None:
    np.testing.assert_array_equal(got.view(np.uint32), want.view(np.uint32))


@pytest.mark.parametrize("width", WIDTHS)
def test_norms(width: int) -> None:
    args = (normal(1, 33, width).ravel(), 0, width, 33, width, 1e-6)
    for weight in (None, normal(2, width)):
        want = rounded(kernels.rms_norm(*args, weight, **GPU))
        assert_same(kernels.rms_norm(*args, weight, for_matmul=True, **GPU), want)


@pytest.mark.parametrize("kind", ["silu", "sigmoid", "gelu_tanh"])
@pytest.mark.parametrize(("per_row", "width"), [(1, 17408), (1, 1000), (24, 256), (3, 21), (5, 18), (2, 1)])
def test_gates(kind: str, per_row: int, width: int) -> None:
    # With more than 8 rows Hopper's matmuls want them arranged.
    cases = [(7, 0, width), (19, width, 2 * width), (19, 3, width + 7)]
    for num_rows, offset, stride in cases:
        num_vectors = num_rows * per_row
        x, values = 4 * normal(3, num_vectors * stride + offset), normal(4, num_vectors, width)
        args = (kind, x, offset, stride, values, per_row)
        want = rounded(kernels.gate(*args, **GPU))
        assert_same(kernels.gate(*args, for_matmul=True, **GPU), want)


@pytest.mark.parametrize(("block_size", "blocks", "width", "group"), [(16, 3, 256, 16), (5, 2, 21, 7)])
def test_convolutions(block_size: int, blocks: int, width: int, group: int) -> None:
    args = (
        normal(5, block_size, blocks, width),
        normal(6, block_size, blocks, 2, 2, width // group),
        normal(7, 2, 2, width),
        False,
    )
    want = rounded(kernels.block_conv(*args, **GPU))
    assert_same(kernels.block_conv(*args, for_matmul=True, **GPU), want)


@pytest.mark.parametrize("num_rows", [1, 5, 9, 40])
@pytest.mark.parametrize("shape", [(2, 6, 128, 128, 4), (2, 6, 24, 40, 4), (3, 3, 16, 16, 2)])
def test_gated_delta_outputs(shape: tuple[int, int, int, int, int], num_rows: int) -> None:
    key_heads, value_heads, key_dim, value_dim, taps = shape
    channels, values_len = 2 * key_heads * key_dim + value_heads * value_dim, value_heads * value_dim
    cache = (
        normal(8, 1, 3, value_heads, key_dim, value_dim),
        normal(9, 1, 128, key_heads * key_dim),
        normal(10, 1, 128, values_len),
        -np.abs(normal(11, 1, 128, value_heads)),
        normal(12, 1, taps, channels),
    )
    rows = [normal(13 + i, num_rows, n) for i, n in enumerate((channels, values_len, *[value_heads] * 2))]
    weights = [normal(20, channels, taps), *normal(21, 2, value_heads), normal(22, value_dim)]
    parents = list(range(-1, num_rows - 1))
    args = (shape, *rows, *weights, 1e-6, [(0, 7, parents)], cache)
    want = kernels.gdn_wy(*args, **GPU)
    got = kernels.gdn_wy(*args, for_matmul=True, **GPU)
    assert np.isfinite(want[0]).all()
    assert_same(got[0], rounded(want[0]))
    for left, right in zip(got[1:], want[1:], strict=True):
        assert_same(left, right)


@pytest.mark.parametrize("device", [{}, GPU], ids=["cpu", "cuda"])
@pytest.mark.parametrize("width", [15, 100, 250, 2560, 5120])
def test_products_are_those_of_fp32_rows(width: int, device: dict[str, Any]) -> None:
    x, norm = normal(30, 40, width), normal(31, width)
    weights = [(to_bits(normal(32 + i, 48, width)), "bf16") for i in range(2)]
    for num_rows in (1, 9, 40):
        rows = x[:num_rows]
        normed = kernels.rms_norm(rows.ravel(), 0, width, num_rows, width, 1e-6, norm, **device)
        want = kernels.multiply_together(normed, weights, **device)
        got = kernels.multiply_together(rows, weights, norm=norm, eps=1e-6, **device)
        for left, right in zip(got, want, strict=True):
            assert_same(left, right)


def in_chunks(multiply: Callable[[np.ndarray], list[np.ndarray]], x: np.ndarray) -> list[np.ndarray]:
    """Products of 8 rows at a time, which mma.sync multiplies on every GPU."""
    chunks = [multiply(x[first : first + 8]) for first in range(0, len(x), 8)]
    return [np.concatenate(parts) for parts in zip(*chunks, strict=True)]


# Channels, columns, rows. Of 136 rows W12 leaves 8 to mma.sync. The next three are more units than clusters,
# on the emulated GPU or on a whole one: these take whole units in turn, or cut one in two if they are odd.
# The next gives work to half of a whole GPU's clusters, without which mma.sync would take up to 32 rows.
# In the last two, on ten multiprocessors, units are complete before the run that brings the last octet ends.
MANY_ROWS = [(48, 600, (17, 33, 136, 150)), (48, 5120, (9, 24, 40, 64)), (48, 5130, (300,))]
MANY_ROWS += [(528, 600, (256, 300)), (4096, 600, (2048,)), (1112, 600, (13, 40, 65))]
MANY_ROWS += [(17000, 512, (9, 17, 32)), (48, 10300, (13, 40)), (1112, 2624, (13, 40))]


@pytest.mark.parametrize(("channels", "width", "row_counts"), MANY_ROWS)
def test_products_of_many_rows_are_those_of_few(
    channels: int, width: int, row_counts: tuple[int, ...]
) -> None:
    rows, norm = normal(40, max(row_counts), width), normal(41, width)
    weights = [(to_bits(normal(42 + i, channels, width)), name) for i, name in enumerate(("bf16", "w12"))]
    for q_view in (False, True):
        multiply = partial(
            kernels.multiply_together, weights=weights, q_view=q_view, norm=norm, eps=1e-6, **GPU
        )
        want = in_chunks(multiply, rows)
        for num_rows in row_counts:
            # Rows of their own, and the first of more.
            for got in (multiply(rows[:num_rows]), multiply(rows, num_rows=num_rows)):
                for left, right in zip(got, want, strict=True):
                    assert_same(left, right[:num_rows])


def test_parts_of_rows_are_refused() -> None:
    with pytest.raises(ValueError, match="`num_vectors` must be 6, got 5"):
        kernels.gate("silu", normal(1, 40), 0, 8, normal(2, 5, 8), 3, **GPU)
