"""What sampling should do, in plain Python: noise, limits, the draw, and how far counts may stray."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

WORD = 2**32 - 1

Sampler = tuple[float, int, float, float, int, int]
"""Temperature, top_k, top_p, min_p, seed, position."""


def philox4x32(counter: tuple[int, ...], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """Philox 4x32-10 on Python's integers."""
    (c0, c1, c2, c3), (k0, k1) = counter, key
    for _ in range(10):
        first, second = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (second >> 32) ^ c1 ^ k0, second & WORD, (first >> 32) ^ c3 ^ k1, first & WORD
        k0, k1 = (k0 + 0x9E3779B9) & WORD, (k1 + 0xBB67AE85) & WORD
    return c0, c1, c2, c3


def random_bits(seed: int, counter: tuple[int, ...]) -> int:
    """The first 64 of the bits of a counter."""
    low, high, *_ = philox4x32(counter, (seed & WORD, seed >> 32))
    return high << 32 | low


def gumbel(seed: int, position: int, token: int) -> float:
    u = ((random_bits(seed, (token, position, 0, 0)) >> 12) + 0.5) / 2**52
    return -math.log(-math.log(u))


def kept(
    row: Sequence[float], masked: Sequence[int], temperature: float, top_k: int, top_p: float, min_p: float
) -> tuple[list[int], dict[int, float]]:
    """Ids that may be drawn, best first, and their scaled logits."""
    ids = [i for i in set(range(len(row))) - set(masked) if row[i] > -math.inf]
    ids.sort(key=lambda i: (-row[i], i))
    largest = float(row[ids[0]])
    scaled = {i: (float(row[i]) - largest) / temperature for i in ids}
    ids = [i for i in ids if math.exp(scaled[i]) >= min_p]
    if top_k > 0:
        ids = ids[:top_k]
    if top_p < 1:
        weights = [math.exp(scaled[i]) for i in ids]
        goal = top_p * sum(weights)
        better = itertools.accumulate(weights, initial=0.0)
        ids = [i for i, mass in zip(ids, better, strict=False) if mass < goal]
    return ids, scaled


def draw(row: Sequence[float], masked: Sequence[int], sampler: Sampler) -> int:
    """The token of a row."""
    *limits, seed, position = sampler
    ids, scaled = kept(row, masked, *limits)  # type: ignore[arg-type]
    return max(ids, key=lambda i: (scaled[i] + gumbel(seed, position, i), -i))


def chi_square(counts: NDArray[np.float64], probabilities: NDArray[np.float64]) -> float:
    """Pearson's statistic of counts."""
    expected = probabilities * counts.sum()
    return float((np.square(counts - expected) / expected).sum())


def chi_square_bound(num_cells: int) -> float:
    """Five standard deviations above the mean of what `chi_square` gives for the right probabilities."""
    freedom = num_cells - 1
    return freedom + 5 * math.sqrt(2 * freedom)
