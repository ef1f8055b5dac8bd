"""The CUDA matmuls: bits across row counts, formats and places; values against float64 and the host."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
from specpilot_rs import DeviceError
from specpilot_rs._core import kernels

from tests.kernels.bfloat16 import from_bits, to_bits

ROW_COUNTS = [1, 2, 7, 8, 9, 16, 17, 31, 32, 33, 63, 64]
# Channels and columns: one tile, padding on both sides, several tiles a block; one octet, two, four, eight of
# uneven slices.
SHAPES = [(16, 128), (109, 250), (333, 1000), (4240, 600), (48, 2560), (272, 5120), (160, 6144), (96, 17408)]


def weights(rng: np.random.Generator, n: int, k: int, escape_rate: float) -> np.ndarray:
    values = rng.normal(size=(n, k)) * np.exp(0.35 * rng.normal(size=(n, 1))) * 0.02
    small = rng.random((n, k)) < escape_rate
    large = rng.random((n, k)) < escape_rate / 10
    return to_bits(
        np.where(small, values * 2.0**-14, np.where(large, values * 64, values)).astype(np.float32)
    )


@pytest.mark.parametrize(("n", "k"), SHAPES)
@pytest.mark.parametrize("escape_rate", [0.0, 4e-4, 4e-3])
def test_a_row_has_one_result(n: int, k: int, escape_rate: float) -> None:
    rng = np.random.default_rng([n, k, int(escape_rate * 1e6)])
    weight = weights(rng, n, k, escape_rate)
    x = rng.normal(size=(64, k)).astype(np.float32)
    x[3] *= 1e30  # outliers
    x[5, ::2] = -x[5, 1::2]  # cancels
    full = kernels.w12_matmul(x, weight, device="cuda")
    rounded = from_bits(to_bits(x)).astype(np.float64)
    want = rounded @ from_bits(weight).astype(np.float64).T
    scale = np.abs(rounded) @ np.abs(from_bits(weight).astype(np.float64)).T
    assert np.all(np.abs(full - want) <= 2e-6 * scale + 1e-30)
    np.testing.assert_array_equal(full, kernels.bf16_matmul(x, weight, device="cuda"))
    coarse = kernels.w12_matmul(x, weight, q_view=True, device="cuda")
    for num_rows in ROW_COUNTS:
        first = (64 - num_rows) // 2
        rows = slice(first, first + num_rows)
        for got, whole in [
            (kernels.w12_matmul(x[rows], weight, device="cuda"), full),
            (kernels.bf16_matmul(x[rows], weight, device="cuda"), full),
            (kernels.w12_matmul(x[rows], weight, q_view=True, device="cuda"), coarse),
        ]:
            np.testing.assert_array_equal(got, whole[rows])


# Channels, columns, rows; the last two have enough octets for cuts through them.
MANY_ROWS = [(109, 250, 300), (333, 1000, 300), (272, 5120, 300), (160, 6144, 300), (96, 17408, 300)]
MANY_ROWS += [(17300, 600, 96), (8700, 2624, 96)]


def in_chunks(multiply: Callable[[np.ndarray], np.ndarray], x: np.ndarray) -> np.ndarray:
    """Products of 8 rows at a time, which mma.sync multiplies on every GPU."""
    return np.concatenate([multiply(x[first : first + 8]) for first in range(0, len(x), 8)])


@pytest.mark.parametrize(("n", "k", "most"), MANY_ROWS)
def test_many_rows_have_the_bits_of_few(n: int, k: int, most: int) -> None:
    rng = np.random.default_rng([n, k])
    weight = weights(rng, n, k, 4e-4)
    weight[5:40:7] = weights(rng, 5, k, 2e-2)  # crowded with escapes
    x = rng.normal(size=(most, k)).astype(np.float32)
    x[3::50] *= 1e30  # outliers
    x[5::50, : k // 2] = -x[5::50, k // 2 :]
    weight[7, : k // 2] = weight[7, k // 2 :]  # cancels
    for multiply in (
        partial(kernels.w12_matmul, weight=weight, device="cuda"),
        partial(kernels.bf16_matmul, weight=weight, device="cuda"),
        partial(kernels.w12_matmul, weight=weight, q_view=True, device="cuda"),
    ):
        want = in_chunks(multiply, x)
        for num_rows in (9, 16, 17, 32, 33, 40, 48, 64, 65, 96, 128, 136, 200, 256, 300):
            if num_rows > most:
                break
            first = (most - num_rows) // 2
            got = multiply(x[first : first + num_rows])
            np.testing.assert_array_equal(got.view(np.uint32), want[first : first + num_rows].view(np.uint32))


# With 5120 columns there are two octets, and sums that are no numbers pass between blocks.
@pytest.mark.parametrize("k", [1024, 5120])
def test_many_rows_at_the_ends_of_the_range_have_the_bits_of_few(k: int) -> None:
    rng = np.random.default_rng(17)
    weight = weights(rng, 60, k, 4e-4)
    weight[:20] &= 0x7FFF  # of one sign, so that a row of one sign may give zeros of the other
    x = rng.normal(size=(64, k)).astype(np.float32)
    x[::8] = -0.0
    x[1::8] = -1e-40 * np.abs(x[1::8])  # subnormal, in products less than that
    x[2::8] = 5e37 * np.abs(x[2::8])  # overflows in channels of one sign
    x[3::8, 700] = np.inf
    x[4::8, 3] = np.nan
    for multiply in (
        partial(kernels.w12_matmul, weight=weight, device="cuda"),
        partial(kernels.bf16_matmul, weight=weight, device="cuda"),
        partial(kernels.w12_matmul, weight=weight, q_view=True, device="cuda"),
    ):
        want = in_chunks(multiply, x)
        assert np.isinf(want[2::8]).any()
        assert np.isinf(want[3::8]).any()
        assert np.isnan(want[4::8]).all()
        assert not np.isnan(want[::8]).any()
        for num_rows in (24, 40, 64):
            got = multiply(x[:num_rows])
            some = want[:num_rows]
            np.testing.assert_array_equal(np.isnan(got), np.isnan(some))
            there = ~np.isnan(some)
            np.testing.assert_array_equal(got.view(np.uint32)[there], some.view(np.uint32)[there])


@pytest.mark.parametrize("k", [5120, 17408])
def test_many_rows_of_matrices_multiplied_together(k: int) -> None:
    rng = np.random.default_rng([k, 3])
    stacked = [(weights(rng, n, k, 4e-4), "w12") for n in (47, 16, 160, 31)]
    stacked += [(weights(rng, n, k, 0.0), "bf16") for n in (96, 17)]
    x = rng.normal(size=(150, k)).astype(np.float32)
    for q_view in (False, True):
        kernel = {"w12": partial(kernels.w12_matmul, q_view=q_view), "bf16": kernels.bf16_matmul}
        alone = [
            in_chunks(partial(kernel[name], weight=weight, device="cuda"), x) for weight, name in stacked
        ]
        for num_rows in (33, 64, 65, 150):
            together = kernels.multiply_together(x[:num_rows], stacked, q_view=q_view, device="cuda")
            for got, whole in zip(together, alone, strict=True):
                np.testing.assert_array_equal(got.view(np.uint32), whole[:num_rows].view(np.uint32))


def test_many_rows_are_added_to_the_residual() -> None:
    rng = np.random.default_rng(11)
    weight = weights(rng, 300, 5120, 4e-4)
    x = rng.normal(size=(129 + 64, 5120)).astype(np.float32)
    residual = rng.normal(size=(len(x), 300)).astype(np.float32)
    plain = kernels.w12_matmul(x, weight, device="cuda")
    added = kernels.w12_matmul(x, weight, residual, device="cuda")
    np.testing.assert_array_equal(added, residual + plain)


# Channels of matrices multiplied together, with their formats; the last has more than one launch takes.
TOGETHER = [
    [(47, "w12"), (16, "w12"), (160, "w12")],
    [(2048, "bf16"), (96, "bf16"), (17, "bf16")],
    [(96, "w12"), (48, "bf16"), (48, "bf16"), (2100, "w12")],
    [(16, "w12")] * 3 + [(15, "w12"), (45, "w12"), (31, "w12")],
]


@pytest.mark.parametrize("matrices", TOGETHER)
@pytest.mark.parametrize("k", [250, 2560, 5120, 17408])
def test_matrices_multiplied_together_keep_their_bits(matrices: list[tuple[int, str]], k: int) -> None:
    rng = np.random.default_rng([k, len(matrices)])
    # The second is crowded with escapes, so that notes of more than one matrix point to lists of their own.
    stacked = [(weights(rng, n, k, (4e-4, 4e-3)[i % 2]), name) for i, (n, name) in enumerate(matrices)]
    x = rng.normal(size=(64, k)).astype(np.float32)
    kernel = {"w12": kernels.w12_matmul, "bf16": kernels.bf16_matmul}
    alone = [kernel[name](x, weight, device="cuda") for weight, name in stacked]
    coarse = [
        kernels.w12_matmul(x, weight, q_view=True, device="cuda") if name == "w12" else exact
        for (weight, name), exact in zip(stacked, alone, strict=True)
    ]
    for num_rows in (1, 9, 20, 32, 64):
        for want, q_view in ((alone, False), (coarse, True)):
            together = kernels.multiply_together(x[:num_rows], stacked, q_view=q_view, device="cuda")
            for got, whole in zip(together, want, strict=True):
                np.testing.assert_array_equal(got, whole[:num_rows])


def test_views_and_residual_agree_with_the_host() -> None:
    rng = np.random.default_rng(7)
    weight = weights(rng, 96, 5120, 4e-4)
    x = from_bits(to_bits(rng.normal(size=(9, 5120)).astype(np.float32)))
    residual = rng.normal(size=(9, 96)).astype(np.float32)
    for q_view in (False, True):
        plain = kernels.w12_matmul(x, weight, q_view=q_view, device="cuda")
        host = kernels.w12_matmul(x, weight, q_view=q_view)
        np.testing.assert_allclose(plain, host, rtol=0, atol=2e-6 * np.abs(x).sum(axis=1).max())
        added = kernels.w12_matmul(x, weight, residual, q_view=q_view, device="cuda")
        np.testing.assert_array_equal(added, residual + plain)


def test_a_missing_gpu_is_named() -> None:
    with pytest.raises(DeviceError, match=r"GPU 99 does not exist"):
        kernels.bf16_matmul(
            np.ones((1, 64), dtype=np.float32), np.zeros((16, 64), dtype=np.uint16), device="cuda:99"
        )
