"""The CUDA matmuls: bits across row counts, formats and places; values against float64 and the host."""

from __future__ import annotations

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
