"""FP8 on a GPU: W8A16 has the bits of BF16 weights, W8A8 those of a row alone and the host's values."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from specpilot_rs._core import kernels

from tests.kernels.bfloat16 import from_bits, to_bits
from tests.kernels.e4m3 import VALUES, dequantised, quantised_rows, spread

Array = np.ndarray[Any, Any]
ROW_COUNTS = [1, 2, 7, 8, 9, 16, 17, 31, 32, 33, 63, 64]
SHAPES = [(16, 128), (109, 250), (333, 1000), (48, 2560), (272, 5120), (160, 6144), (96, 17408)]
BLOCKS = {"block": (128, 128), "channel": (1, 1 << 20), "tensor": (1 << 20, 1 << 20)}
# Scales of 24 bits, of BF16, and of BF16 with zeros and products that leave its normal numbers.
SCALES = ["whole", "short", "extreme"]
# Tensor cores drop what lies 13 bits or more below the largest of the 32 products that they add at a time.
W8A8_SHARE = 2.0**-11


def codes_of(rng: np.random.Generator, n: int, k: int) -> Array:
    codes = rng.integers(0, 256, (n, k), dtype=np.uint8)
    codes[codes & 0x7F == 0x7F] = 0
    return codes


def scales_of(rng: np.random.Generator, block: tuple[int, int], n: int, k: int, kind: str) -> Array:
    grid = (-(-n // block[0]), -(-k // block[1]))
    scales = (0.002 + 0.01 * rng.random(grid)).astype(np.float32)
    if kind == "extreme":
        scales *= rng.choice(np.float32([2.0**-122, 2.0**-60, 2.0**20, 2.0**125]), grid)
        scales.flat[::3] = 0
    if kind != "whole":
        scales = (scales.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)
    return scales


def assert_same(got: Array, want: Array) -> None:
    """Bit for bit; a value that is no number is one of many patterns."""
    np.testing.assert_array_equal(np.isnan(got), np.isnan(want))
    np.testing.assert_array_equal(np.nan_to_num(got).view(np.uint32), np.nan_to_num(want).view(np.uint32))


@pytest.mark.parametrize("kind", SCALES)
@pytest.mark.parametrize("block", BLOCKS.values(), ids=BLOCKS)
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_whole_activations_give_the_bits_of_dequantised_weights(
    n: int, k: int, block: tuple[int, int], kind: str
) -> None:
    rng = np.random.default_rng([n, k, len(kind)])
    codes, scales = codes_of(rng, n, k), scales_of(rng, block, n, k, kind)
    x = rng.normal(size=(64, k)).astype(np.float32)
    x[3] *= 1e30
    x[5, ::2] = -x[5, 1::2]
    want = kernels.bf16_matmul(x, dequantised(codes, scales, block), device="cuda")
    assert kind == "extreme" or np.isfinite(want[:3]).all()
    for num_rows in ROW_COUNTS:
        first = (64 - num_rows) // 2
        rows = slice(first, first + num_rows)
        assert_same(kernels.fp8_matmul(x[rows], codes, scales, block, device="cuda"), want[rows])
    residual = rng.normal(size=(9, n)).astype(np.float32)
    added = kernels.fp8_matmul(x[:9], codes, scales, block, residual=residual, device="cuda")
    assert_same(added, residual + want[:9])


def test_every_code_is_decoded() -> None:
    """A column of each code in each place of a super-tile, told apart by what it is multiplied with."""
    codes = np.arange(256, dtype=np.uint8)
    codes[codes & 0x7F == 0x7F] = 0
    matrix = np.stack([np.roll(codes, shift) for shift in range(256)])
    for scale in (np.float32(1), np.float32(1 / 3)):
        scales = np.full((2, 2), scale)
        eye = np.eye(256, dtype=np.float32)
        weights = (VALUES[matrix].astype(np.float32) * scale).astype(np.float32)
        for first in range(0, 256, 64):
            got = kernels.fp8_matmul(eye[first : first + 64], matrix, scales, (128, 128), device="cuda")
            np.testing.assert_array_equal(got, from_bits(to_bits(weights.T[first : first + 64])))


@pytest.mark.parametrize("quantised", [False, True])
@pytest.mark.parametrize("k", [250, 2560, 5120, 17408])
def test_matrices_multiplied_together_keep_their_bits(k: int, quantised: bool) -> None:
    rng = np.random.default_rng([k, quantised])
    block = (128, 128)
    # The third keeps the launch that it is in from short scales; there is more than one launch.
    kinds = {47: "short", 160: "short", 96: "whole", 17: "short", 2100: "short", 31: "short"}
    matrices = []
    for n, kind in kinds.items():
        matrices.append((codes_of(rng, n, k), scales_of(rng, block, n, k, kind)))
    x = rng.normal(size=(64, k)).astype(np.float32)
    alone = [kernels.fp8_matmul(x, *matrix, block, quantised, device="cuda") for matrix in matrices]
    for num_rows in (1, 9, 20, 32, 64):
        together = kernels.fp8_matmul_together(x[:num_rows], matrices, block, quantised, device="cuda")
        for got, whole in zip(together, alone, strict=True):
            assert_same(got, whole[:num_rows])


def test_codes_that_are_no_numbers_stay_in_their_channel() -> None:
    rng = np.random.default_rng(3)
    codes = codes_of(rng, 40, 5120)
    codes[[7, 9, 17, 30], [11, 5119, 2600, 64]] = [0x7F, 0xFF, 0x7F, 0xFF]
    x = rng.normal(size=(33, 5120)).astype(np.float32)
    for kind in ("whole", "short"):
        scales = scales_of(rng, (128, 128), 40, 5120, kind)
        for quantised in (False, True):
            got = kernels.fp8_matmul(x, codes, scales, (128, 128), quantised, device="cuda")
            assert np.isnan(got[:, [7, 9, 17, 30]]).all()
            assert np.isfinite(np.delete(got, [7, 9, 17, 30], 1)).all()


@pytest.mark.parametrize("block", BLOCKS.values(), ids=BLOCKS)
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_quantised_activations_match_the_oracle_and_the_host(
    n: int, k: int, block: tuple[int, int], report: Any
) -> None:
    rng = np.random.default_rng([n, k])
    codes, scales = codes_of(rng, n, k), scales_of(rng, block, n, k, "whole")
    x = rng.normal(size=(64, k)).astype(np.float32)
    x[3] *= 1e30
    x[5, ::2] = -x[5, 1::2]
    x[7, :128] = 0
    x[8] *= 1e-4
    # The smallest that BF16 has: their scale is far from exact.
    x[9, :128] = np.float32(2.0**-133) * np.arange(128)
    full = kernels.fp8_matmul(x, codes, scales, block, quantised=True, device="cuda")
    weights = VALUES[codes] * spread(scales, block, codes.shape).astype(np.float64)
    rounded = quantised_rows(x)
    size = np.abs(rounded) @ np.abs(weights).T
    error = np.abs(full - rounded @ weights.T)
    host = kernels.fp8_matmul(x, codes, scales, block, quantised=True)
    share = error[size > 1e-30] / size[size > 1e-30]
    report(
        f"fp8_w8a8 {n} x {k}: off by {share.max():.1e} of the sum of magnitudes, mostly {share.mean():.1e}"
    )
    # Scales of the smallest groups lie below the numbers that fp32 has in full precision.
    bound = W8A8_SHARE * size + np.finfo(np.float32).tiny
    assert (error <= bound).all()
    assert (np.abs(full - host) <= bound).all()
    for num_rows in ROW_COUNTS:
        first = (64 - num_rows) // 2
        rows = slice(first, first + num_rows)
        assert_same(kernels.fp8_matmul(x[rows], codes, scales, block, True, device="cuda"), full[rows])


def test_small_whole_numbers_are_multiplied_exactly() -> None:
    """Sums that any accumulator holds: every place, group and scale must be the right one."""
    rng = np.random.default_rng(11)
    n, k = 304, 1000
    number_codes = np.uint8([0x00, 0x38, 0x40, 0xB8, 0xC0])  # 0, 1, 2, -1, -2
    codes = number_codes[rng.integers(0, 5, (n, k))]
    scales = np.exp2(rng.integers(-2, 3, (3, 8))).astype(np.float32)
    x = rng.integers(-7, 8, (64, k)).astype(np.float32)
    # The largest of a group is 448 times a power of two, its scale.
    steps = np.exp2(rng.integers(-3, 4, (64, 8)))
    x *= 64 * np.repeat(steps, 128, 1)[:, :k]
    x[:, ::128] = 448 * steps
    x[:, ::128] *= rng.choice([-1, 1], (64, 8))
    weights = VALUES[codes] * spread(scales, (128, 128), codes.shape)
    want = (x.astype(np.float64) @ weights.T).astype(np.float32)
    got = kernels.fp8_matmul(x, codes, scales, (128, 128), True, device="cuda")
    np.testing.assert_array_equal(got, want)


def test_values_that_are_no_numbers_stay_in_their_row() -> None:
    rng = np.random.default_rng(5)
    codes = codes_of(rng, 48, 1000)
    scales = scales_of(rng, (128, 128), 48, 1000, "whole")
    x = rng.normal(size=(40, 1000)).astype(np.float32)
    x[2, 7], x[11, 999], x[33, 500] = np.nan, np.inf, -np.inf
    got = kernels.fp8_matmul(x, codes, scales, (128, 128), True, device="cuda")
    host = kernels.fp8_matmul(x, codes, scales, (128, 128), True)
    assert np.isnan(got[[2, 11, 33]]).all()
    np.testing.assert_array_equal(np.isnan(got), np.isnan(host))


def test_blocks_that_a_note_cannot_hold_are_refused() -> None:
    codes, x = np.zeros((64, 256), np.uint8), np.zeros((1, 256), np.float32)
    with pytest.raises(ValueError, match="`block_columns` must be 64, got 32"):
        kernels.fp8_matmul(x, codes, np.ones((4, 8), np.float32), (16, 32), device="cuda")
    with pytest.raises(ValueError, match="`block_rows` must be 16, got 8"):
        kernels.fp8_matmul(x, codes, np.ones((8, 2), np.float32), (8, 128), device="cuda")
