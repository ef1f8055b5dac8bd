"""The screened LM head on CUDA: ids and logits of the dense path there, on every draw, by both scans."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from specpilot_rs._core import kernels

from tests.kernels.bfloat16 import from_bits, to_bits
from tests.kernels.test_lm_head_screen import HEADS, activations, normal, plain

GPU = {"device": "cuda"}
Head = Callable[[np.random.Generator, int, int], np.ndarray]


def dense(x: np.ndarray, weight: np.ndarray, masked: list[list[int]]) -> tuple[np.ndarray, np.ndarray]:
    return kernels.greedy_argmax(kernels.bf16_matmul(x, weight, **GPU), masked, **GPU)


def screen(
    x: np.ndarray, weight: np.ndarray, masked: list[list[int]] | None = None, scan: str = "auto"
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    masked = [[]] * len(x) if masked is None else masked
    ids, best, survivors, fell_back, _ = kernels.lm_head_screen(x, weight, masked, scan=scan, **GPU)
    dense_ids, dense_best = dense(x, weight, masked)
    np.testing.assert_array_equal(ids, dense_ids)
    finite = np.isfinite(dense_best)
    np.testing.assert_array_equal(best[finite], dense_best[finite])
    assert not np.isfinite(best[~finite]).any()
    return ids, survivors, fell_back


def small(rng: np.random.Generator, n: int, k: int) -> np.ndarray:
    return to_bits(normal(rng, n, k) * np.float32(2.0**-20))


@pytest.mark.parametrize("scan", ["auto", "mma"])
@pytest.mark.parametrize("head", [*HEADS, small])
def test_ids_are_the_dense_ones_on_random_draws(head: Head, scan: str) -> None:
    for seed in range(7):
        rng = np.random.default_rng([seed, len(scan)])
        n, k = int(rng.integers(2, 700)), int(rng.integers(1, 400))
        weight = head(rng, n, k)
        x = activations(rng, weight)
        winners, _, _ = screen(x, weight, scan=scan)
        # Once more with the winner hidden, and some other ids.
        masked = [[int(w), *rng.integers(0, n, min(n // 4, 9)).tolist()] for w in winners]
        masked = [ids if len(set(ids)) < n else [] for ids in masked]
        screen(x, weight, masked, scan)


@pytest.mark.parametrize("scan", ["auto", "mma"])
@pytest.mark.parametrize(
    ("n", "k", "num_rows"),
    [
        (8000, 5120, 32),
        (8000, 5120, 16),
        (8000, 5120, 7),
        (9000, 4096, 40),
        (3000, 8192, 33),
        (2000, 17408, 9),
    ],
)
def test_wide_heads_with_near_ties(n: int, k: int, num_rows: int, scan: str) -> None:
    rng = np.random.default_rng([n, k, num_rows])
    weight = to_bits(normal(rng, n, k) * 0.02)
    # Some channels have twins that differ by a bit or not at all, far away and side by side.
    twins = rng.permutation(n)[: n // 4].reshape(2, -1)
    weight[twins[1]] = weight[twins[0]]
    weight[twins[1][::2], rng.integers(0, k, len(twins[1][::2]))] ^= 1
    x = normal(rng, num_rows, k)
    x[:, rng.integers(0, k, 8)] *= 30  # outliers, as hidden states have
    clear = np.arange(num_rows) % 3 > 0
    x[clear] += 20 * from_bits(weight[rng.choice(twins[0], num_rows)])[clear]
    ids, survivors, fell_back = screen(x, weight, scan=scan)
    # Rows of mere noise may leave too many; whatever is decided by survivors has at most so many.
    assert not fell_back[clear].any()
    assert (survivors[clear] <= 4).all()
    assert survivors[~fell_back].max() <= most_survivors(n)
    for first, count in [(0, 1), (3, 2), (num_rows - 7, 7)]:
        rows = slice(first, first + count)
        alone, counts, _ = screen(x[rows].copy(), weight, scan=scan)
        np.testing.assert_array_equal(alone, ids[rows])
        np.testing.assert_array_equal(counts, survivors[rows])


def most_survivors(vocab_size: int) -> int:
    return max(vocab_size // 32, 64)


def test_both_scans_keep_the_same_channels() -> None:
    rng = np.random.default_rng(3)
    weight, x = plain(rng, 3000, 700), normal(rng, 64, 700)
    _, survivors, _ = screen(x, weight)
    _, by_mma, _ = screen(x, weight, scan="mma")
    np.testing.assert_array_equal(survivors, by_mma)
    host = kernels.lm_head_screen(from_bits(to_bits(x)), weight, [[]] * 64)[2]
    # The bounds are the host's but for the error of the order, which is thousands of times smaller.
    assert abs(survivors.sum() - host.sum()) <= 0.02 * host.sum()


def test_sums_err_no_more_than_bounds_assume() -> None:
    """The exact product against float64: equal signs, steep and cancelling terms err most."""
    rng = np.random.default_rng(4)
    worst = 0.0
    for k in (64, 640, 5120, 17408):
        w, x = np.abs(normal(rng, 256, k)), np.abs(normal(rng, 64, k))
        w[:64] *= np.exp2(rng.integers(-12, 12, (64, k)))
        x[:16] *= np.exp2(rng.integers(-12, 12, (16, k)))
        w[64:128, ::2] *= -1
        w[128:160] = np.sort(w[128:160])
        w[160:192] = -np.sort(-w[160:192])
        bits = to_bits(w.astype(np.float32))
        weight, rows = from_bits(bits).astype(np.float64), from_bits(to_bits(x)).astype(np.float64)
        got = kernels.bf16_matmul(x.astype(np.float32), bits, **GPU)
        size = np.abs(rows) @ np.abs(weight).T
        slice_tiles = -(-k // 64) / 8
        octets = 1
        while slice_tiles > 5:
            slice_tiles, octets = slice_tiles / 2, octets * 2
        bound = 18 * 4 * np.ceil(slice_tiles) * 2.0**-23 + (8 + octets) * 2.0**-24
        error = np.abs(got - rows @ weight.T) / size
        assert error.max() <= bound
        worst = max(worst, error.max() / bound)
    print(f"largest error of a sum: {worst:.3f} of the bound")


def test_masks_and_equal_rows() -> None:
    rng = np.random.default_rng(5)
    weight = plain(rng, 300, 64)
    best = to_bits(from_bits(weight[:1]) * np.float32(2))
    weight[[7, 90, 250]] = best
    x = from_bits(best)
    for masked, winner in (([], 7), ([7], 90), ([90, 7], 250)):
        ids, survivors, fell_back = screen(x, weight, [masked])
        assert ids.tolist() == [winner]
        assert not fell_back.any()
        assert survivors[0] >= 3 - len(masked)
    equal = np.repeat(plain(rng, 1, 64), 5000, 0)
    ids, survivors, fell_back = screen(normal(rng, 3, 64), equal)
    assert ids.tolist() == [0] * 3
    assert fell_back.all()
    assert (survivors == 5000).all()


def test_gaps_are_those_of_the_logits() -> None:
    rng = np.random.default_rng(6)
    weight, x = plain(rng, 500, 96), normal(rng, 9, 96)
    logits = np.sort(kernels.bf16_matmul(x, weight, **GPU), axis=1)
    _, best, _, _, gaps = kernels.lm_head_screen(x, weight, [[]] * 9, with_gap=True, **GPU)
    assert gaps is not None
    np.testing.assert_array_equal(gaps, logits[:, -1] - logits[:, -2])
    np.testing.assert_array_equal(best, logits[:, -1])


def estimates_of(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """What the codes say, operation by operation as the device does: integer sums, then products in fp32."""
    one, most = np.float32(1), np.float32(255 * 127 + 127)
    rows, channels = from_bits(to_bits(x)), from_bits(weight)
    scale = (np.abs(channels).max(1).astype(np.float64) / 127).astype(np.float32)
    with np.errstate(divide="ignore", invalid="ignore"):
        codes = np.clip(np.rint(channels * (1 / scale.astype(np.float64)[:, None])), -127, 127)
        step = (np.abs(rows).max(1).astype(np.float64) / float(most)).astype(np.float32)
        terms = np.clip(np.rint(rows * (one / step)[:, None]), -most, most)
    # An undefined code is one of a channel or a row of zeros.
    codes, terms = (np.nan_to_num(values).astype(np.int64) for values in (codes, terms))
    return scale * (terms @ codes.T).astype(np.float32) * step[:, None]


@pytest.mark.parametrize("scan", ["auto", "mma"])
@pytest.mark.parametrize(
    ("n", "k", "num_rows"),
    [
        (203, 300, 5),
        (130, 700, 16),
        (70, 512, 40),
        (150, 5120, 20),
        (150, 5120, 40),
        (8000, 5120, 30),
        (3000, 8192, 33),
    ],
)
def test_estimates_of_all_logits(n: int, k: int, num_rows: int, scan: str) -> None:
    """To the bit, near the logits, and of each row alone; what has no codes is at zero."""
    rng = np.random.default_rng([n, k, num_rows, 2])
    weight, x = plain(rng, n, k), normal(rng, num_rows, k)
    weight[[0, n - 1]] = 0
    x[num_rows // 2] *= np.float32(1e-6)
    estimates = kernels.lm_head_estimates(x, weight, scan=scan, **GPU)
    np.testing.assert_array_equal(estimates, estimates_of(x, weight))
    logits = from_bits(to_bits(x)).astype(np.float64) @ from_bits(weight).astype(np.float64).T
    assert (np.abs(estimates - logits).max(1) < 0.05 * logits.std(1)).all()
    last = kernels.lm_head_estimates(x[-3:].copy(), weight, scan=scan, **GPU)
    np.testing.assert_array_equal(last.view(np.uint32), estimates[-3:].view(np.uint32))
    odd = x.copy()
    odd[0], odd[1, 7], odd[2, k - 1] = 0, np.nan, -np.inf
    others = kernels.lm_head_estimates(odd, weight, scan=scan, **GPU)
    assert not others[:3].any()
    np.testing.assert_array_equal(others[3:].view(np.uint32), estimates[3:].view(np.uint32))


@pytest.mark.parametrize("scan", ["auto", "mma"])
@pytest.mark.parametrize("head", [*HEADS, small])
def test_estimates_are_always_numbers(head: Head, scan: str) -> None:
    rng = np.random.default_rng(11)
    weight = head(rng, 100, 90)
    x = activations(rng, weight)[:150]
    assert np.isfinite(kernels.lm_head_estimates(x, weight, scan=scan, **GPU)).all()
