"""RMS norm against float64, over strided heads, and its independence of neighbours."""

import numpy as np
import pytest
from specpilot_rs._core import kernels
from tolerances import assert_close

EPS = 1e-6


def rms_norm(x, weight=None, eps=EPS):
    """Normalises the rows of a 2-D array."""
    num_vectors, width = x.shape
    return kernels.rms_norm(x.reshape(-1), 0, width, num_vectors, width, eps, weight)


def oracle(x, weight=None, eps=EPS):
    x = x.astype(np.float64)
    y = x / np.sqrt((x**2).mean(-1, keepdims=True) + np.float64(np.float32(eps)))
    return y if weight is None else y * weight


def rows(num_vectors, width, seed=0):
    return np.random.default_rng(seed).standard_normal((num_vectors, width)).astype(np.float32)


@pytest.mark.parametrize("width", [1, 15, 16, 17, 128, 256, 5120])
@pytest.mark.parametrize("num_vectors", [0, 1, 3, 64])
def test_matches_the_oracle(num_vectors, width):
    x, weight = rows(num_vectors, width), rows(1, width, 1)[0]
    assert_close("rms_norm", rms_norm(x, weight), oracle(x, weight))
    assert_close("rms_norm", rms_norm(x), oracle(x))


def test_heads_inside_wider_rows():
    # Query heads of rows that hold [query h | gate h] per head: 3 rows, 4 heads of 32.
    x = rows(3 * 4, 64)
    want = oracle(x[:, 32:])
    assert_close("rms_norm", kernels.rms_norm(x.reshape(-1), 32, 64, 12, 32, EPS), want)


@pytest.mark.parametrize("width", [1, 17, 256, 5120])
def test_sums_with_a_residual_are_scaled(width):
    x, weight, residual = rows(5, width), rows(1, width, 1)[0], rows(5, width, 2)
    for factor, given in ((1.0, weight), (0.37, weight), (-2.5, None)):
        got = kernels.rms_norm(x.reshape(-1), 0, width, 5, width, EPS, given, residual, factor)
        normed, factor64 = oracle(x, given), np.float64(np.float32(factor))
        scale = (np.abs(residual) + np.abs(normed)) * abs(factor64)
        assert_close("rms_norm", got, (residual + normed) * factor64, scale)
        alone = kernels.rms_norm(x[3], 0, width, 1, width, EPS, given, residual[3:4], factor)
        np.testing.assert_array_equal(alone[0], got[3])


def test_neighbours_and_their_number_do_not_matter():
    x = rows(64, 5120)
    together = rms_norm(x)
    for r in (0, 17, 63):
        np.testing.assert_array_equal(rms_norm(x[r : r + 1])[0], together[r])


def test_zeros_and_tiny_values_stay_finite():
    x = np.zeros((2, 128), np.float32)
    x[1] = 1e-30
    got = rms_norm(x)
    np.testing.assert_array_equal(got[0], 0.0)
    assert_close("rms_norm", got, oracle(x))


def test_a_source_that_ends_too_early_is_refused():
    with pytest.raises(ValueError, match="`x` needs at least 33 elements, got 32"):
        kernels.rms_norm(np.ones(32, np.float32), 1, 16, 2, 16, EPS)
    with pytest.raises(ValueError, match="`weight` needs at least 16 elements, got 15"):
        kernels.rms_norm(np.ones(32, np.float32), 0, 16, 2, 16, EPS, np.ones(15, np.float32))
