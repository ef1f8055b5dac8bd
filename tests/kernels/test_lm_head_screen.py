"""Screened LM head: the dense ids on every draw, and bounds that hold in exact rational arithmetic."""

import itertools
from fractions import Fraction

import numpy as np
import pytest
from specpilot_rs._core import kernels

from tests.kernels.bfloat16 import from_bits, to_bits

NUM_ROWS = 1000


def dense(x, weight, masked):
    return kernels.greedy_argmax(kernels.bf16_matmul(x, weight), masked)


def screen(x, weight, masked=None):
    masked = [[]] * len(x) if masked is None else masked
    ids, best, survivors, fell_back, _ = kernels.lm_head_screen(x, weight, masked)
    dense_ids, dense_best = dense(x, weight, masked)
    np.testing.assert_array_equal(ids, dense_ids)
    finite = np.isfinite(dense_best)
    np.testing.assert_array_equal(best[finite], dense_best[finite])
    assert not np.isfinite(best[~finite]).any()
    return ids, survivors, fell_back


def normal(rng, *shape):
    return rng.standard_normal(shape).astype(np.float32)


def plain(rng, n, k):
    return to_bits(normal(rng, n, k))


def heavy_tailed(rng, n, k):
    return to_bits(rng.standard_t(1.5, (n, k)).astype(np.float32))


def equal_up_to_one_bit(rng, n, k):
    weight = np.repeat(plain(rng, 1, k), n, 0)
    weight[np.arange(n), rng.integers(0, k, n)] ^= 1
    return weight


def duplicated(rng, n, k):
    return np.ascontiguousarray(plain(rng, max(1, n // 8), k)[rng.integers(0, max(1, n // 8), n)])


def tiny(rng, n, k):
    return to_bits(normal(rng, n, k) * np.float32(2.0**-130))


def huge(rng, n, k):
    return to_bits(normal(rng, n, k) * np.float32(2.0**110))


def with_nan_and_infinity(rng, n, k):
    weight = plain(rng, n, k)
    at = rng.integers(0, weight.size, max(1, n // 20))
    weight.flat[at] = rng.choice(np.array([0x7FC0, 0x7F80, 0xFF80, 0x7F7F], np.uint16), len(at))
    return weight


HEADS = [plain, heavy_tailed, equal_up_to_one_bit, duplicated, tiny, huge, with_nan_and_infinity]


def activations(rng, weight):
    """Rows of every kind: plain, outlier, along a row of the head, zero, subnormal, huge, not finite."""
    k = weight.shape[1]
    x = normal(rng, NUM_ROWS, k)
    kinds = rng.integers(0, 20, NUM_ROWS)
    along = from_bits(weight[rng.integers(0, len(weight), NUM_ROWS)])
    is_along = (kinds < 6) & np.isfinite(along).all(1)
    x[is_along] = np.clip(along, -1e37, 1e37)[is_along]
    column = rng.integers(0, k, NUM_ROWS)
    outlier = np.flatnonzero(kinds == 6)
    x[outlier, column[outlier]] *= 1e4
    x[kinds == 7] = 0.0
    x[kinds == 8] *= np.float32(1e-42)
    x[kinds == 9] *= np.float32(1e37)
    odd = np.flatnonzero(kinds == 10)
    x[odd, column[odd]] = rng.choice(np.array([np.nan, np.inf, -np.inf, 3.4e38], np.float32), len(odd))
    return x


@pytest.mark.parametrize("head", HEADS)
def test_ids_are_the_dense_ones_on_random_draws(head):
    for seed in range(15):
        rng = np.random.default_rng(seed)
        n, k = int(rng.integers(2, 500)), int(rng.integers(1, 90))
        weight = head(rng, n, k)
        x = activations(rng, weight)
        winners, _, _ = screen(x, weight)
        # Once more with the winner hidden, and some other ids.
        masked = [[int(w), *rng.integers(0, n, min(n // 4, 9)).tolist()] for w in winners]
        masked = [ids if len(set(ids)) < n else [] for ids in masked]
        screen(x, weight, masked)


def test_a_wide_head_keeps_few_survivors():
    rng = np.random.default_rng(0)
    weight = plain(rng, 4000, 512)
    x = normal(rng, 64, 512)
    _, survivors, fell_back = screen(x, weight)
    assert not fell_back.any()
    assert survivors.mean() < 15
    clear = x + from_bits(weight[rng.integers(0, 4000, 64)]) * np.float32(0.4)
    _, survivors, _ = screen(clear, weight)
    assert survivors.mean() < 1.2


def test_the_lowest_of_equal_rows_wins_and_masks_pass_it_on():
    rng = np.random.default_rng(1)
    weight = plain(rng, 300, 64)
    best = to_bits(from_bits(weight[:1]) * np.float32(2))
    weight[[7, 90, 250]] = best
    x = from_bits(best)
    for masked, winner in (([], 7), ([7], 90), ([90, 7], 250)):
        ids, survivors, fell_back = screen(x, weight, [masked])
        assert (ids[0], survivors[0], fell_back[0]) == (winner, 3 - len(masked), False)


def test_when_every_row_survives_the_dense_path_decides():
    weight = np.repeat(plain(np.random.default_rng(2), 1, 40), 5000, 0)
    ids, survivors, fell_back = screen(from_bits(weight[:1]), weight, [[0, 1, 2]])
    assert (ids[0], survivors[0], fell_back[0]) == (3, 4997, True)


@pytest.mark.parametrize("value", [0.0, np.nan, np.inf, -np.inf, 3e38])
def test_rows_without_a_bound_take_the_dense_path_alone(value):
    rng = np.random.default_rng(3)
    weight = plain(rng, 200, 50)
    x = normal(rng, 3, 50)
    x[1] = value
    _, survivors, fell_back = screen(x, weight)
    assert fell_back.tolist() == [False, True, False]
    assert survivors[1] == 0


def test_a_channel_that_is_not_finite_is_always_looked_at():
    rng = np.random.default_rng(4)
    weight = plain(rng, 200, 50)
    weight[17, 3] = 0x7F80
    x = np.abs(normal(rng, 2, 50))
    x[1, 3] = -1.0
    ids, _, fell_back = screen(x, weight)
    assert ids[0] == 17
    assert ids[1] != 17
    assert not fell_back.any()


def test_gaps_are_those_of_the_dense_logits():
    rng = np.random.default_rng(5)
    weight = plain(rng, 700, 96)
    x = normal(rng, 50, 96)
    masked = [rng.integers(0, 700, 5).tolist() for _ in x]
    ids, _, _, _, gaps = kernels.lm_head_screen(x, weight, masked, with_gap=True)
    logits = kernels.bf16_matmul(x, weight)
    for row, ids_of_row in enumerate(masked):
        logits[row, ids_of_row] = -np.inf
    largest = np.sort(logits, 1)
    np.testing.assert_array_equal(gaps, largest[:, -1] - largest[:, -2])
    np.testing.assert_array_equal(ids, logits.argmax(1))


def fractions(values):
    return [Fraction(float(value)) for value in values]


@pytest.mark.parametrize(
    ("head", "k"),
    [
        *itertools.product([plain, heavy_tailed, equal_up_to_one_bit, tiny, huge], [1, 37, 300, 600]),
        (plain, 5120),
    ],
)
def test_bounds_hold_in_exact_arithmetic(head, k):
    """Errors of codes and of summation, each against its own bound, with no rounding in the check."""
    n, num_rows = 12, 4
    rng = np.random.default_rng(k)
    weight = head(rng, n, k)
    x = normal(rng, num_rows, k)
    x[1] = from_bits(weight[3])
    x[2, 0] *= 1e3
    x[3] *= np.float32(1e-30)
    if head is huge:
        x[1] = 1.0
    intervals = kernels.lm_head_intervals(x, weight).reshape(num_rows, n, 3)
    logits = kernels.bf16_matmul(x, weight)
    rows_of_weight = [fractions(row) for row in from_bits(weight)]
    for row in range(num_rows):
        activation = fractions(x[row])
        for channel in range(n):
            exact = sum(w * a for w, a in zip(rows_of_weight[channel], activation, strict=True))
            centre, screen_bound, order_bound = fractions(intervals[row, channel])
            logit = Fraction(float(logits[row, channel]))
            assert abs(exact - centre) <= screen_bound
            assert abs(logit - exact) <= order_bound


def test_the_coding_bound_is_reached():
    # Activations along the residual are the worst case of Cauchy-Schwarz: half the bound would not hold.
    rng = np.random.default_rng(6)
    weight = plain(rng, 16, 128)
    values = from_bits(weight).astype(np.float64)
    scale = (np.abs(values).max(1, keepdims=True) / 127).astype(np.float32).astype(np.float64)
    residual = values - scale * np.rint(values / scale)
    intervals = kernels.lm_head_intervals(residual.astype(np.float32), weight).reshape(16, 16, 3)
    own = intervals[np.arange(16), np.arange(16)]
    exact = np.einsum("ik,ik->i", residual.astype(np.float32).astype(np.float64), values)
    assert (np.abs(exact - own[:, 0]) > 0.95 * own[:, 1]).all()


def test_masking_every_id_is_refused():
    with pytest.raises(ValueError, match="must be below 3, got 3"):
        kernels.lm_head_screen(
            np.ones((1, 2), np.float32), plain(np.random.default_rng(0), 3, 2), [[2, 1, 0]]
        )


def test_wrong_width_is_refused():
    with pytest.raises(ValueError, match="`x` needs at least 18 elements, got 16"):
        kernels.lm_head_screen(np.ones((2, 8), np.float32), plain(np.random.default_rng(0), 3, 9), [[], []])


@pytest.mark.parametrize("num_rows", [1, 2, 5, 33])
@pytest.mark.parametrize("weights", [plain, heavy_tailed, duplicated, equal_up_to_one_bit])
def test_estimates_choose_by_the_codes_alone(weights, num_rows):
    """The first of the largest centres of the bounds, whatever the exact logits are."""
    rng = np.random.default_rng([num_rows, 3])
    n, k = 300, 70
    weight, x = weights(rng, n, k), normal(rng, num_rows, k)
    masked = [list(map(int, rng.integers(0, n, 5))) for _ in range(num_rows)]
    ids, estimates, survivors, fell_back, _ = kernels.lm_head_screen(x, weight, masked, estimates=True)
    centres = kernels.lm_head_intervals(x, weight)[:, 0].reshape(num_rows, n)
    for row, mask in enumerate(masked):
        centres[row, mask] = -np.inf
    np.testing.assert_array_equal(ids, centres.argmax(1))
    np.testing.assert_array_equal(estimates, centres.max(1).astype(np.float32))
    assert not survivors.any()
    assert not fell_back.any()


def test_rows_without_estimates_are_decided_densely():
    rng = np.random.default_rng(8)
    weight, x = plain(rng, 40, 32), normal(rng, 4, 32)
    x[1], x[2, 3] = 0, np.nan
    ids, best, _, fell_back, _ = kernels.lm_head_screen(x, weight, [[], [0, 1], [], []], estimates=True)
    assert fell_back.tolist() == [False, True, True, False]
    assert (ids[1], best[1]) == (2, 0)
    assert not np.isfinite(best[2])


@pytest.mark.parametrize("num_rows", [1, 2, 5, 33])
@pytest.mark.parametrize("head", HEADS)
def test_estimates_of_all_logits_are_the_centres(head, num_rows):
    """To the bit; whatever has no codes is at zero, and leaves the others alone."""
    rng = np.random.default_rng([num_rows, 4])
    n, k = 1003, 70
    weight, x = head(rng, n, k), normal(rng, num_rows, k)
    if head in (huge, with_nan_and_infinity):
        x *= np.float32(1e-20)
    centres = kernels.lm_head_intervals(x, weight)[:, 0].reshape(num_rows, n).astype(np.float32)
    np.testing.assert_array_equal(kernels.lm_head_estimates(x, weight), centres)
    odd = np.insert(x, 0, normal(rng, 3, k), 0)
    odd[0] = 0
    odd[1, 3], odd[2, k - 1] = np.nan, np.inf
    estimates = kernels.lm_head_estimates(odd, weight)
    assert not estimates[:3].any()
    np.testing.assert_array_equal(estimates[3:], centres)


def test_estimates_are_shared_out_among_threads():
    """As many weights as make a scan worth it."""
    rng = np.random.default_rng(9)
    weight, x = plain(rng, 9001, 200), normal(rng, 6, 200)
    estimates = kernels.lm_head_estimates(x, weight)
    centres = kernels.lm_head_intervals(x, weight)[:, 0].reshape(6, -1).astype(np.float32)
    np.testing.assert_array_equal(estimates, centres)
    logits = kernels.bf16_matmul(x, weight)
    assert np.abs(estimates - logits).max() < 0.05 * logits.std()
