"""`block_conv` against the formula, element by element in float64."""

import numpy as np
import pytest
from specpilot_rs._core import kernels
from tolerances import assert_close


def oracle(x, delta, base, side):
    block_size, num_blocks, width = x.shape
    taps, groups = delta.shape[3:]
    y = np.zeros(x.shape, np.float64)
    for i in range(block_size):
        for b in range(num_blocks):
            for c in range(width):
                for t in range(min(taps, i + 1)):
                    weight = float(base[side, t, c]) + float(delta[i, b, side, t, c // (width // groups)])
                    y[i, b, c] += weight * float(x[i - t, b, c])
    return y


def arrays(rng, block_size, num_blocks, width, taps, group_size):
    def normal(*shape):
        return rng.standard_normal(shape, np.float32)

    x = normal(block_size, num_blocks, width)
    delta = normal(block_size, num_blocks, 2, taps, width // group_size)
    return x, delta, normal(2, taps, width)


SHAPES = [
    (1, 1, 16, 2, 16),
    (16, 1, 32, 2, 16),
    (8, 3, 48, 2, 16),
    (5, 2, 21, 3, 7),
    (3, 2, 6, 4, 1),
    (4, 1, 8, 1, 8),
]


@pytest.mark.parametrize("side", [0, 1])
@pytest.mark.parametrize("shape", SHAPES)
def test_matches_the_formula(shape, side):
    x, delta, base = arrays(np.random.default_rng(0), *shape)
    got = kernels.block_conv(x, delta, base, bool(side))
    assert_close("block_conv", got, oracle(x, delta, base, side))


def test_adds_to_the_residual_stream():
    x, delta, base = arrays(np.random.default_rng(1), 6, 2, 32, 2, 16)
    residual = np.random.default_rng(2).standard_normal(x.shape, np.float32)
    got = kernels.block_conv(x, delta, base, True, residual)
    np.testing.assert_array_equal(got, residual + kernels.block_conv(x, delta, base, True))


def test_the_initial_kernel_is_the_identity():
    x, delta, base = arrays(np.random.default_rng(3), 8, 2, 32, 2, 16)
    base[:, 0], base[:, 1], delta[:] = 1, 0, 0
    np.testing.assert_array_equal(kernels.block_conv(x, delta, base, False), x)


def test_nothing_crosses_blocks_or_runs_backwards():
    x, delta, base = arrays(np.random.default_rng(4), 6, 3, 16, 2, 16)
    before = kernels.block_conv(x, delta, base, False)
    x[2, 1] = np.nan
    after = kernels.block_conv(x, delta, base, False)
    changed = np.isnan(after).all(axis=2)
    assert sorted(map(tuple, np.argwhere(changed))) == [(2, 1), (3, 1)]
    np.testing.assert_array_equal(after[~changed], before[~changed])


def test_bad_arguments_are_refused_by_name():
    x, delta, base = arrays(np.random.default_rng(5), 4, 1, 32, 2, 16)
    with pytest.raises(ValueError, match=r"base.*at least 128.*got 64"):
        kernels.block_conv(x, delta, base[:1].copy(), False)
    with pytest.raises(ValueError, match="width"):
        kernels.block_conv(x[:, :, :31].copy(), delta, base, False)
