"""Rotary embedding against float64 rotations of the fp32 angles."""

import numpy as np
import pytest
from specpilot_rs._core import kernels
from tolerances import assert_close


def inverse_frequencies(rotary_dim, theta=1e7):
    return (theta ** (-np.arange(0, rotary_dim, 2) / rotary_dim)).astype(np.float32)


def heads(num_rows, num_heads, head_dim, seed=0):
    return np.random.default_rng(seed).standard_normal((num_rows, num_heads, head_dim)).astype(np.float32)


def oracle(x, positions, frequencies, pair_offset):
    # The angle is rounded to fp32 as in the published models; everything after it is exact.
    angles = (positions.astype(np.float32)[:, None] * frequencies).astype(np.float64)[:, None, :]
    y = x.astype(np.float64)
    first, second = slice(0, len(frequencies)), slice(pair_offset, pair_offset + len(frequencies))
    a, b = y[..., first].copy(), y[..., second].copy()
    y[..., first] = a * np.cos(angles) - b * np.sin(angles)
    y[..., second] = b * np.cos(angles) + a * np.sin(angles)
    return y


@pytest.mark.parametrize(
    ("num_heads", "head_dim", "rotary_dim"), [(2, 128, 128), (24, 256, 64), (1, 6, 6), (3, 40, 2)]
)
def test_matches_the_oracle(num_heads, head_dim, rotary_dim):
    x = heads(9, num_heads, head_dim)
    positions = np.array([0, 1, 2, 63, 64, 1000, 32_767, 131_071, 262_143], np.uint32)
    frequencies = inverse_frequencies(rotary_dim)
    got = kernels.rope(x, positions, frequencies, rotary_dim // 2)
    assert_close("rope", got, oracle(x, positions, frequencies, rotary_dim // 2))


def test_partial_rotary_leaves_the_rest_alone():
    x = heads(4, 2, 256)
    got = kernels.rope(x, np.arange(4, dtype=np.uint32) + 7, inverse_frequencies(64), 32)
    np.testing.assert_array_equal(got[..., 64:], x[..., 64:])
    # The fastest pair has turned by at least 7 radians; slow ones may round to no change.
    assert (got[..., [0, 32]] != x[..., [0, 32]]).all()


def test_pairs_half_a_head_apart_with_fewer_frequencies():
    x = heads(3, 2, 64)
    positions = np.array([5, 6, 900], np.uint32)
    frequencies = inverse_frequencies(16)
    got = kernels.rope(x, positions, frequencies, 32)
    assert_close("rope", got, oracle(x, positions, frequencies, 32))
    np.testing.assert_array_equal(got[..., 8:32], x[..., 8:32])
    np.testing.assert_array_equal(got[..., 40:], x[..., 40:])


def test_position_zero_changes_nothing():
    x = heads(2, 3, 32)
    np.testing.assert_array_equal(kernels.rope(x, np.zeros(2, np.uint32), inverse_frequencies(32), 16), x)


def test_rows_of_one_position_agree_wherever_they_stand():
    x = np.repeat(heads(1, 24, 256), 70, axis=0)
    positions = np.full(70, 4711, np.uint32)
    got = kernels.rope(x, positions, inverse_frequencies(64), 32)
    alone = kernels.rope(x[:1].copy(), positions[:1], inverse_frequencies(64), 32)
    np.testing.assert_array_equal(got, np.repeat(alone, 70, axis=0))


def test_overlapping_or_outlying_pairs_are_refused():
    x, positions = heads(1, 1, 32), np.zeros(1, np.uint32)
    with pytest.raises(ValueError, match="`pair_offset` needs at least 16 elements, got 15"):
        kernels.rope(x, positions, inverse_frequencies(32), 15)
    with pytest.raises(ValueError, match="`head_dim` needs at least 33 elements, got 32"):
        kernels.rope(x, positions, inverse_frequencies(32), 17)


def test_norms_first_where_asked():
    frequencies, positions = inverse_frequencies(64), np.array([3, 700], np.uint32)
    q, k, weight = heads(2, 4, 512), heads(2, 1, 256, 1), heads(1, 1, 256, 2).ravel()
    got = kernels.normed_rope([(q, weight), (k, None)], 256, 1e-6, positions, frequencies, 32)
    for x, by, turned in ((q, weight, got[0]), (k, None, got[1])):
        num_heads, stride = x.shape[1:]
        normed = kernels.rms_norm(x.ravel(), 0, stride, 2 * num_heads, 256, 1e-6, by)
        normed = normed.reshape(2, num_heads, 256)
        np.testing.assert_array_equal(turned, kernels.rope(normed, positions, frequencies, 32))
    only_normed = kernels.normed_rope([(k, weight)], 256, 1e-6, positions)
    args = (0, 256, 2, 256, 1e-6, weight)
    np.testing.assert_array_equal(only_normed[0].reshape(2, 256), kernels.rms_norm(k.ravel(), *args))
