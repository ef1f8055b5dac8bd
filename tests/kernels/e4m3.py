"""E4M3 by the format's definition: values of codes, rounding, weights of codes and scales."""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.kernels.bfloat16 import from_bits, to_bits

Array = np.ndarray[Any, Any]


def e4m3_values() -> Array:
    """Value of every code."""
    code = np.arange(256)
    exponent, mantissa = code >> 3 & 15, code & 7
    magnitude = np.where(exponent == 0, mantissa / 8 * 2.0**-6, (1 + mantissa / 8) * 2.0 ** (exponent - 7.0))
    magnitude[code & 0x7F == 0x7F] = np.nan
    return np.where(code & 0x80, -magnitude, magnitude)


VALUES = e4m3_values()
FINITE = np.sort(VALUES[np.isfinite(VALUES) & (np.arange(256) != 0x80)])
EVEN = {value: code % 2 == 0 for code, value in enumerate(VALUES)}


def round_to_e4m3(x: Array) -> Array:
    """The nearest value, of two the one with an even code."""
    x = np.clip(x, -448, 448)
    high = np.clip(np.searchsorted(FINITE, x), 1, len(FINITE) - 1)
    low_value, high_value = FINITE[high - 1], FINITE[high]
    is_even = np.vectorize(EVEN.get)(low_value).astype(bool)
    low_gap, high_gap = x - low_value, high_value - x
    return np.where((low_gap < high_gap) | ((low_gap == high_gap) & is_even), low_value, high_value)


def quantised_rows(x: Array, group: int = 128) -> Array:
    """What activations become, in float64: BF16, then a scale of `max |x| / 448` a group of columns."""
    x = from_bits(to_bits(x))
    rounded = np.zeros_like(x, np.float64)
    for first in range(0, x.shape[1], group):
        part = x[:, first : first + group]
        scale = np.abs(part).max(1, keepdims=True) / np.float32(448)
        scale = np.where(scale > 0, scale, np.float32(1))
        rounded[:, first : first + group] = round_to_e4m3(part / scale) * scale.astype(np.float64)
    return rounded


def spread(scales: Array, block: tuple[int, int], shape: tuple[int, ...]) -> Array:
    """The scale of every weight."""
    rows, columns = (min(length, size) for length, size in zip(block, shape, strict=True))
    return np.repeat(np.repeat(scales, rows, 0), columns, 1)[: shape[0], : shape[1]]


def dequantised(codes: Array, scales: Array, block: tuple[int, int]) -> Array:
    """BF16 bits of the weights: a product in fp32, rounded once."""
    return to_bits(VALUES[codes].astype(np.float32) * spread(scales, block, codes.shape))
