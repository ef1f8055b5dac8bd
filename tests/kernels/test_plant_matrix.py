"""plant_matrix against the same function written with numpy, and what its matrices are like."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray
from specpilot_rs import _core

from tests.kernels.e4m3 import round_to_e4m3

kernels = _core.kernels
U64 = np.uint64
SALT = U64(0x9E3779B97F4A7C15)
LAYER_SHAPES = [(48, 64), (33, 130), (7, 5), (16, 320)]


def mix(z: NDArray[np.uint64]) -> NDArray[np.uint64]:
    with np.errstate(over="ignore"):
        z = (z ^ (z >> U64(30))) * U64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> U64(27))) * U64(0x94D049BB133111EB)
    return z ^ (z >> U64(31))


def row_keys(seed: int, rows: NDArray[np.uint64]) -> NDArray[np.uint64]:
    return mix((U64(seed) << U64(32)) ^ rows)


def cells(seed: int, rows: NDArray[np.uint64], num_columns: int) -> NDArray[np.uint64]:
    return mix(row_keys(seed, rows)[:, None] ^ np.arange(num_columns, dtype=np.uint64)[None])


def centred(bits: NDArray[np.uint64]) -> NDArray[np.int64]:
    lanes = [(bits >> U64(16 * lane)) & U64(0xFFFF) for lane in range(4)]
    return 2 * sum(lane.astype(np.int64) for lane in lanes) - 262139


def to_bf16(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    bits = values.astype(np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def row_units(seed: int, num_rows: int, deviation: float) -> NDArray[np.float32]:
    spread = mix(row_keys(seed, np.arange(num_rows, dtype=np.uint64)) ^ SALT)
    factor = 65536 + (spread & U64(0xFFFF)) + ((spread >> U64(16)) & U64(0xFFFF))
    unit = np.float32(deviation / 75674.43) * (factor.astype(np.float32) / np.float32(131072))
    return unit.astype(np.float32)


def fp8_scales(seed: int, num_rows: int, deviation: float) -> NDArray[np.uint16]:
    return to_bf16(row_units(seed, num_rows, deviation) * np.float32(585.125))


def layer_oracle(seed: int, shape: tuple[int, int], deviation: float) -> NDArray[np.uint16]:
    rows = np.arange(shape[0], dtype=np.uint64)
    bits = cells(seed, rows, shape[1])
    weights = centred(bits).astype(np.float32) * row_units(seed, shape[0], deviation)[:, None]
    lot = mix(bits) & U64(0xFFFFF)
    weights = np.where(lot < 300, weights * np.float32(2.0**-14), weights)
    weights = np.where((lot >= 300) & (lot < 320), weights * np.float32(64), weights)
    return to_bf16(weights)


def floats(bits: NDArray[np.uint16]) -> NDArray[np.float32]:
    return (bits.astype(np.uint32) << 16).view(np.float32)


@pytest.mark.parametrize("shape", LAYER_SHAPES)
@pytest.mark.parametrize("seed", [0, 1, 4_000_000_000])
def test_layers_are_the_oracles(shape: tuple[int, int], seed: int) -> None:
    got = kernels.plant_matrix(seed, shape, 0.02, "layer")
    np.testing.assert_array_equal(got, layer_oracle(seed, shape, 0.02))


def test_tables_are_the_oracles() -> None:
    got = kernels.plant_matrix(3, (50, 70), 1.0, "table")
    expected = centred(cells(3, np.arange(50, dtype=np.uint64), 70)).astype(np.float32)
    np.testing.assert_array_equal(got, to_bf16(expected * np.float32(1 / 75674.43)))


def test_layers_are_of_the_stated_size_and_escape_at_the_stated_rate() -> None:
    bits = kernels.plant_matrix(9, (512, 4096), 0.02, "layer")
    weights = floats(bits).astype(np.float64)
    deviations = np.sqrt(np.mean(np.minimum(np.abs(weights), 0.2) ** 2, axis=1))
    # Rows are 0.5 to 1.5 times as large, a triangle about 1.
    assert 0.019 < deviations.mean() < 0.0215
    assert 0.0095 < deviations.min() < 0.012
    assert 0.028 < deviations.max() < 0.032
    encoded = _core.w12.encode(bits)
    rate = encoded["num_escapes"] / bits.size
    assert 2.5e-4 < rate < 4.5e-4


def test_a_head_finds_the_first_successor_of_every_row() -> None:
    n, k, strides = 300, 256, [41, 97]
    table = floats(kernels.plant_matrix(5, (n, k), 1.0, "table")).astype(np.float64)
    head = floats(kernels.plant_matrix(6, (n, k), 0.1, (5, strides, 0.5))).astype(np.float64)
    logits = table @ head.T
    order = np.argsort(-logits, axis=1)
    tokens = np.arange(n)
    assert (order[:, 0] == (tokens + strides[0]) % n).mean() > 0.97
    rank_of_second = np.argmax(order == ((tokens + strides[1]) % n)[:, None], axis=1)
    assert np.median(rank_of_second) == 1


@pytest.mark.parametrize("shape", [(48, 64), (33, 130)])
def test_both_formats_multiply_by_the_same_numbers(shape: tuple[int, int]) -> None:
    x = np.random.default_rng(0).standard_normal((5, shape[1])).astype(np.float32)
    expected = kernels.bf16_matmul(x, layer_oracle(11, shape, 0.02))
    for weight_format in ("bf16", "w12"):
        got = kernels.planted_matmul(x, 11, shape[0], 0.02, weight_format)
        np.testing.assert_array_equal(got.view(np.uint32), expected.view(np.uint32))


def test_fp8_rounds_the_same_numbers_with_a_scale_for_each_row() -> None:
    shape = (128, 256)
    x = np.random.default_rng(0).standard_normal((5, 256)).astype(np.float32)
    weights = floats(layer_oracle(11, shape, 0.02))
    scales = floats(fp8_scales(11, 128, 0.02))[:, None]
    codes = round_to_e4m3((weights / scales).astype(np.float32)).astype(np.float32)
    expected = kernels.bf16_matmul(x, to_bf16(codes * scales))
    got = kernels.planted_matmul(x, 11, 128, 0.02, "fp8")
    np.testing.assert_array_equal(got.view(np.uint32), expected.view(np.uint32))
    # Outliers beyond the largest number are cut; all others are within half a step of four bits.
    inside = np.abs(weights) <= 448 * scales
    assert inside.mean() > 0.999
    error = np.abs(codes * scales - weights)
    assert (error <= np.maximum(np.abs(weights) / 16, scales * 2.0**-10))[inside].all()
    rounded = kernels.planted_matmul(x, 11, 128, 0.02, "fp8_w8a8")
    assert 0 < np.abs(rounded - got).max() < 0.1 * np.abs(got).max()
    # A shape that is not of whole blocks stays BF16.
    small = kernels.planted_matmul(x[:, :64].copy(), 11, 48, 0.02, "fp8")
    np.testing.assert_array_equal(
        small, kernels.bf16_matmul(x[:, :64].copy(), layer_oracle(11, (48, 64), 0.02))
    )


def test_unknown_kinds_are_refused() -> None:
    with pytest.raises(ValueError, match='no kind "lawyer"'):
        kernels.plant_matrix(0, (1, 1), 1.0, "lawyer")
    with pytest.raises(ValueError, match="out_features"):
        kernels.plant_matrix(0, (0, 1), 1.0, "layer")
