"""FP8 matmul: W8A16 against `bf16_matmul` on dequantised weights bit for bit, W8A8 against float64."""

import numpy as np
import pytest
from specpilot_rs._core import kernels
from tolerances import assert_close

from tests.kernels.e4m3 import VALUES, dequantised, quantised_rows, spread

GROUP = 128


def problem(num_rows, n, k, block, seed=0):
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((num_rows, k)).astype(np.float32)
    codes = rng.integers(0, 256, (n, k), dtype=np.uint8)
    codes[codes & 0x7F == 0x7F] = 0
    grid = (-(-n // block[0]), -(-k // block[1]))
    return x, codes, (0.002 + 0.01 * rng.random(grid)).astype(np.float32)


BLOCKS = {"block": (128, 128), "channel": (1, 2048), "tensor": (2048, 2048)}


@pytest.mark.parametrize("block", BLOCKS.values(), ids=BLOCKS)
@pytest.mark.parametrize("num_rows", [1, 2, 5, 16, 65])
@pytest.mark.parametrize(("n", "k"), [(256, 256), (37, 300), (130, 517), (1, 1)])
def test_whole_activations_give_the_bits_of_dequantised_weights(num_rows, n, k, block):
    x, codes, scales = problem(num_rows, n, k, block)
    got = kernels.fp8_matmul(x, codes, scales, block)
    want = kernels.bf16_matmul(x, dequantised(codes, scales, block))
    np.testing.assert_array_equal(got.view(np.uint32), want.view(np.uint32))
    residual = np.random.default_rng(1).standard_normal((num_rows, n)).astype(np.float32)
    added = kernels.fp8_matmul(x, codes, scales, block, residual=residual)
    np.testing.assert_array_equal(added, residual + got)


@pytest.mark.parametrize("block", BLOCKS.values(), ids=BLOCKS)
@pytest.mark.parametrize("num_rows", [1, 3, 33])
@pytest.mark.parametrize(("n", "k"), [(256, 256), (37, 300), (40, 1024)])
def test_quantised_activations_match_the_oracle(num_rows, n, k, block):
    x, codes, scales = problem(num_rows, n, k, block)
    x[0, :GROUP] = 0
    x[-1] *= 1e-4
    got = kernels.fp8_matmul(x, codes, scales, block, quantised=True)
    weights = VALUES[codes] * spread(scales, block, codes.shape).astype(np.float64)
    rounded = quantised_rows(x)
    want = rounded @ weights.T
    assert_close("fp8_matmul", got, want, scale=np.abs(rounded) @ np.abs(weights).T)
    # Another function of the input, not a rounding of the same one.
    whole = kernels.fp8_matmul(x, codes, scales, block)
    assert np.abs(got - whole).max() > 1e-3 * np.abs(whole).max()


def test_the_smallest_groups_keep_their_sign_or_are_zeros():
    """What BF16 rounds to zero, and its smallest values: their scale `max |x| / 448` is far from exact."""
    smallest = 2.0**-133
    x, codes, scales = problem(5, 40, 300, (128, 128))
    x[:, :GROUP] = np.float32([0, smallest / 2**16, smallest / 2, smallest, 3 * smallest])[:, None]
    x[:, :GROUP:3] = 0
    x[:, 1:GROUP:3] *= -1
    got = kernels.fp8_matmul(x, codes, scales, (128, 128), quantised=True)
    weights = VALUES[codes] * spread(scales, (128, 128), codes.shape).astype(np.float64)
    rounded = quantised_rows(x)
    assert (rounded[:3, :GROUP] == 0).all()
    assert (rounded[3:, 1] < 0).all()
    assert_close("fp8_matmul", got, rounded @ weights.T, scale=np.abs(rounded) @ np.abs(weights).T)


@pytest.mark.parametrize("quantised", [False, True])
def test_rows_do_not_see_each_other(quantised):
    x, codes, scales = problem(70, 200, 400, (128, 128))
    together = kernels.fp8_matmul(x, codes, scales, (128, 128), quantised)
    for rows in ([0], [69], [5, 3, 5], range(20, 53)):
        some = kernels.fp8_matmul(np.ascontiguousarray(x[list(rows)]), codes, scales, (128, 128), quantised)
        np.testing.assert_array_equal(some.view(np.uint32), together[list(rows)].view(np.uint32))


def test_codes_that_are_no_numbers_stay_in_their_channel():
    x, codes, scales = problem(3, 40, 300, (128, 128))
    codes[7, 11] = 0x7F
    codes[9, 12] = 0xFF
    for quantised in (False, True):
        got = kernels.fp8_matmul(x, codes, scales, (128, 128), quantised)
        assert np.isnan(got[:, [7, 9]]).all()
        assert np.isfinite(np.delete(got, [7, 9], 1)).all()


def test_groups_across_scales_are_refused():
    x, codes, scales = problem(1, 16, 256, (16, 64))
    with pytest.raises(ValueError, match="block_columns"):
        kernels.fp8_matmul(x, codes, scales, (16, 64), quantised=True)
    with pytest.raises(ValueError, match="`scales` shape"):
        kernels.fp8_matmul(x, codes, scales[:, :1].copy(), (16, 64))
