"""Greedy argmax: exact, by a scan in plain Python."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from specpilot_rs._core import kernels


def oracle(row, masked):
    allowed = [i for i in range(len(row)) if i not in set(masked)]
    best = allowed[0]
    largest = -np.inf
    for i in allowed:
        if row[i] > largest:
            best, largest = i, row[i]
    return best


def argmax(logits, masked=None):
    logits = np.atleast_2d(np.asarray(logits, np.float32))
    ids, best = kernels.greedy_argmax(logits, masked or [[]] * len(logits))
    np.testing.assert_array_equal(best, logits[np.arange(len(logits)), ids])
    return ids.tolist()


def test_lowest_id_wins_ties_within_and_across_vectors():
    row = np.zeros(300, np.float32)
    row[[5, 20, 64, 65, 299]] = 2.0
    assert argmax(row) == [5]
    assert argmax(row, [[5]]) == [20]
    assert argmax(row, [[20, 5, 64]]) == [65]


def test_zeros_of_either_sign_tie():
    assert argmax([-1.0, -0.0, 0.0]) == [1]
    assert argmax([-1.0, 0.0, -0.0]) == [1]


def test_nan_never_wins():
    row = np.full(200, np.nan, np.float32)
    row[130] = -1e30
    assert argmax(row) == [130]
    row[130] = -np.inf
    assert argmax(row) == [0]
    row[3:] = np.linspace(0, 1, 197)
    assert argmax(row) == [199]


def test_nothing_above_minus_infinity_gives_the_lowest_unmasked_id():
    row = np.full(100, -np.inf, np.float32)
    assert argmax(row) == [0]
    assert argmax(row, [[1, 0, 2]]) == [3]


def test_infinity_wins():
    assert argmax([1.0, np.inf, 3e38, np.inf]) == [1]


def test_masks_may_repeat_ids_come_in_any_order_and_exceed_the_vocabulary():
    assert argmax([5.0, 4.0, 3.0, 2.0], [[1, 0, 1, 0, 4, 2**32 - 1]]) == [2]


def test_each_row_has_its_own_mask():
    logits = np.tile(np.arange(50, dtype=np.float32), (3, 1))
    assert argmax(logits, [[], [49], [48, 49]]) == [49, 48, 47]


def test_masking_every_id_is_refused():
    with pytest.raises(ValueError, match="must be below 3, got 3"):
        argmax([1.0, 2.0, 3.0], [[2, 1, 0, 0]])


def test_a_missing_mask_is_refused():
    with pytest.raises(ValueError, match="`masked` needs at least 2 elements, got 1"):
        kernels.greedy_argmax(np.zeros((2, 4), np.float32), [[]])


def test_rows_shared_out_among_threads():
    logits = np.random.default_rng(0).standard_normal((33, 8192)).astype(np.float32)
    assert argmax(logits) == logits.argmax(1).tolist()


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_matches_the_scan_on_rows_full_of_ties_and_oddities(data):
    vocab_size = data.draw(st.integers(1, 300))
    seed = data.draw(st.integers(0, 2**32 - 1))
    pool = np.array([-np.inf, np.nan, -1.0, -0.0, 0.0, 1.0, 1.0, 2.0], np.float32)
    row = pool[np.random.default_rng(seed).integers(0, data.draw(st.integers(1, 8)), vocab_size)]
    masked = data.draw(st.lists(st.integers(0, vocab_size - 1), max_size=min(20, vocab_size - 1)))
    assert argmax(row, [masked]) == [oracle(row, masked)]
