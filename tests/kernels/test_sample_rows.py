"""Sampled rows: filters and draws by an oracle in plain Python, shares of draws by exact probabilities."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from specpilot_rs._core import kernels

from tests.sampling_oracle import WORD, chi_square, chi_square_bound, draw, kept, philox4x32


def sample(logits, samplers, masked=None):
    logits = np.atleast_2d(np.asarray(logits, np.float32))
    ids, chosen = kernels.sample_rows(logits, masked or [[]] * len(logits), samplers)
    np.testing.assert_array_equal(chosen, logits[np.arange(len(logits)), ids])
    return ids.tolist()


def drawn(row, count, *, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seed=0, masked=()):
    """Ids drawn at `count` positions."""
    samplers = [(temperature, top_k, top_p, min_p, seed, position) for position in range(count)]
    return sample(np.tile(np.asarray(row, np.float32), (count, 1)), samplers, [list(masked)] * count)


def test_the_oracles_words_are_the_published_ones():
    assert philox4x32((0,) * 4, (0,) * 2) == (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)
    assert philox4x32((WORD,) * 4, (WORD,) * 2) == (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_matches_the_oracle(data):
    vocab_size = data.draw(st.integers(1, 400))
    random = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    row = random.normal(0, data.draw(st.sampled_from([0.1, 1.0, 5.0])), vocab_size).astype(np.float32)
    if data.draw(st.booleans()):
        # Ties within and across the limits, and ids that nobody may draw.
        row = np.round(row).astype(np.float32)
        row[random.random(vocab_size) < 0.1] = -np.inf
        row[random.random(vocab_size) < 0.1] = np.nan
        row[-1] = 0.0
    sampler = (
        data.draw(st.sampled_from([0.01, 0.7, 1.0, 1.7, 30.0])),
        data.draw(st.sampled_from([0, 1, 2, 20, 64, 65, 1000])),
        data.draw(st.sampled_from([1.0, 0.95, 0.5, 1e-9])),
        data.draw(st.sampled_from([0.0, 0.05, 0.3, 1.0])),
        data.draw(st.integers(0, 2**64 - 1)),
        data.draw(st.integers(0, 2**20)),
    )
    masked = data.draw(st.lists(st.integers(0, max(0, vocab_size - 2)), max_size=min(20, vocab_size - 1)))
    assert sample(row, [sampler], [masked]) == [draw(row, masked, sampler)]


@pytest.mark.parametrize("softcap", [None, 5.0, 30.0])
def test_probabilities_are_those_of_shaped_logits(softcap):
    random = np.random.default_rng(3)
    rows = random.normal(0, 8, (200, 50)).astype(np.float32)
    samplers = [(0.7, 20, 0.95, 0.01, 9, position) for position in range(len(rows))]
    ids, chosen = kernels.sample_rows(rows, [[1, 2]] * len(rows), samplers, 0.45, softcap)
    np.testing.assert_array_equal(chosen, rows[np.arange(len(rows)), ids])
    shaped = np.float64(np.float32(0.45)) * rows.astype(np.float64)
    if softcap is not None:
        shaped = softcap * np.tanh(shaped / softcap)
    want = [draw(row, [1, 2], sampler) for row, sampler in zip(shaped, samplers, strict=True)]
    assert ids.tolist() == want
    assert want != [draw(row, [1, 2], sampler) for row, sampler in zip(rows, samplers, strict=True)]


def test_a_nucleus_larger_than_what_is_ranked_first():
    row = np.random.default_rng(1).normal(0, 1, 3000).astype(np.float32)
    for top_p in (0.5, 0.9, 0.999):
        for position in range(4):
            sampler = (1.0, 0, top_p, 0.0, 7, position)
            assert sample(row, [sampler]) == [draw(row, [], sampler)]
        ids, _ = kept(row, [], 1.0, 0, top_p, 0.0)
        assert 64 < len(ids) < 3000


def test_every_kept_id_is_drawn_and_no_other():
    row = [3.0, 1.0, 2.0, 2.0, 0.0, 2.0, -1.0, 3.0]
    assert set(drawn(row, 400, top_k=4)) == {0, 7, 2, 3}
    assert set(drawn(row, 400, top_k=2)) == {0, 7}
    assert set(drawn(row, 400, min_p=0.36)) == {0, 7, 2, 3, 5}
    # e^0, e^0, then three e^-1: the first of these is in as soon as 2 / 3.15... of the rest is not enough.
    assert set(drawn(row, 400, top_k=5, top_p=2.0 / (2 + 3 / math.e) - 1e-9)) == {0, 7}
    assert set(drawn(row, 400, top_k=5, top_p=2.0 / (2 + 3 / math.e) + 1e-9)) == {0, 7, 2}
    assert set(drawn(row, 400, top_k=5, top_p=0.99)) == {0, 7, 2, 3, 5}
    assert set(drawn(row, 400, temperature=1e-300)) == {0, 7}
    assert set(drawn(row, 400, temperature=1e-300, masked=[0, 7])) == {2, 3, 5}
    assert set(drawn(row, 400, temperature=1e300)) == set(range(8))


def test_limits_come_in_vllms_order():
    """`min_p` is judged before `top_k` and `top_p`, and `top_p` is a share of what `top_k` leaves."""
    probabilities = np.array([0.4, 0.3, 0.2, 0.1])
    row = np.log(probabilities)
    # The first has 4/7 of the first two, which is enough, but 0.4 of all four, which is not.
    assert set(drawn(row, 300, top_k=2, top_p=0.55)) == {0}
    assert set(drawn(row, 300, top_p=0.55)) == {0, 1}
    # Dropped first, the last two do not count for the share either.
    assert set(drawn(row, 300, min_p=0.6, top_p=0.55)) == {0}


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.8])
@pytest.mark.parametrize(
    ("top_k", "top_p", "min_p"), [(0, 1.0, 0.0), (7, 1.0, 0.0), (0, 0.8, 0.0), (9, 0.9, 0.1)]
)
def test_shares_of_draws_are_the_probabilities(temperature, top_k, top_p, min_p):
    row = np.random.default_rng(2).normal(0, 1, 16).astype(np.float32)
    ids, scaled = kept(row, [], temperature, top_k, top_p, min_p)
    weights = np.exp([scaled[i] for i in ids])
    draws = drawn(row, 20_000, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=11)
    counts = np.bincount(draws, minlength=16)
    assert counts[ids].sum() == len(draws)
    assert chi_square(counts[ids], weights / weights.sum()) < chi_square_bound(len(ids))


def test_draws_at_two_positions_or_seeds_are_independent():
    row = np.zeros(6)
    for first, second in (
        (drawn(row, 12_001, seed=4)[:-1], drawn(row, 12_001, seed=4)[1:]),
        (drawn(row, 12_000, seed=4), drawn(row, 12_000, seed=5)),
    ):
        pairs = np.zeros((6, 6))
        np.add.at(pairs, (first, second), 1)
        assert chi_square(pairs.ravel(), np.full(36, 1 / 36)) < chi_square_bound(36)


def test_one_kept_id_is_the_greedy_one():
    random = np.random.default_rng(3)
    logits = np.round(random.normal(0, 3, (64, 500)), 1).astype(np.float32)
    masked = [random.integers(0, 500, 30).tolist() for _ in range(64)]
    greedy, _ = kernels.greedy_argmax(logits, masked)
    for limits in ((1.3, 1, 1.0, 0.0), (1.3, 0, 1e-12, 0.0), (0.0, 5, 0.5, 0.1)):
        samplers = [(*limits, 9, position) for position in range(64)]
        assert sample(logits, samplers, masked) == greedy.tolist()


def test_a_row_depends_on_itself_alone():
    """Rows in any number and order, on one thread or several, beside greedy ones."""
    random = np.random.default_rng(4)
    logits = random.normal(0, 2, (40, 4096)).astype(np.float32)
    samplers = [
        ((0.0, 0.9, 1.5)[i % 3], (0, 50)[i % 2], (1.0, 0.9)[i // 2 % 2], (0.0, 0.02)[i // 4 % 2], i, 1000 + i)
        for i in range(40)
    ]
    alone = [sample(logits[i], [samplers[i]])[0] for i in range(40)]
    assert sample(logits, samplers) == alone
    order = random.permutation(40)
    assert sample(logits[order], [samplers[i] for i in order]) == [alone[i] for i in order]


def test_logits_that_are_no_numbers_show():
    for row, want in (
        ([1.0, np.inf, 3.0, np.inf], 1),
        ([np.nan, np.nan], 0),
        ([-np.inf, -np.inf], 0),
    ):
        assert sample(row, [(1.0, 0, 1.0, 0.0, 0, 0)]) == [want]
    assert set(drawn([np.nan, 1.0, -np.inf, 1.0], 200, top_p=0.99)) == {1, 3}
    assert set(drawn([np.nan, 1.0, -np.inf, 1.0], 200)) == {1, 3}


@pytest.mark.parametrize(
    ("sampler", "message"),
    [
        ((-0.5, 0, 1.0, 0.0, 0, 0), "`temperature` must be finite and not negative, got -0.5"),
        ((math.nan, 0, 1.0, 0.0, 0, 0), "temperature"),
        ((math.inf, 0, 1.0, 0.0, 0, 0), "temperature"),
        ((1.0, 0, 0.0, 0.0, 0, 0), "`top_p` must be above 0 and at most 1, got 0"),
        ((1.0, 0, 1.5, 0.0, 0, 0), "top_p"),
        ((1.0, 0, 1.0, -0.1, 0, 0), "min_p"),
        ((1.0, 0, 1.0, math.nan, 0, 0), "min_p"),
    ],
)
def test_samplers_that_mean_nothing_are_refused(sampler, message):
    with pytest.raises(ValueError, match=message):
        sample([1.0, 2.0], [sampler])


def test_shapes_that_do_not_fit_are_refused():
    logits = np.zeros((2, 3), np.float32)
    sampler = (1.0, 0, 1.0, 0.0, 0, 0)
    with pytest.raises(ValueError, match="`samplers` needs at least 2 elements, got 1"):
        kernels.sample_rows(logits, [[], []], [sampler])
    with pytest.raises(ValueError, match="`masked` needs at least 2 elements, got 1"):
        kernels.sample_rows(logits, [[]], [sampler, sampler])
    with pytest.raises(ValueError, match="must be below 3, got 3"):
        kernels.sample_rows(logits, [[], [0, 1, 2]], [sampler, sampler])
