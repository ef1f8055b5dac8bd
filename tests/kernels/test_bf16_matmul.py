"""BF16 matmul against a float64 product, and the promise that a row never depends on other rows."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from specpilot_rs._core import kernels
from tolerances import assert_close

from tests.kernels.bfloat16 import from_bits, to_bits

K_BLOCK = 256


def problem(num_rows, out_features, in_features, seed=0):
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((num_rows, in_features)).astype(np.float32)
    return x, to_bits(rng.standard_normal((out_features, in_features)))


def check(x, weight):
    got = kernels.bf16_matmul(x, weight)
    w = from_bits(weight).astype(np.float64)
    want = x.astype(np.float64) @ w.T
    assert_close("bf16_matmul", got, want, scale=np.abs(x).astype(np.float64) @ np.abs(w).T)


@pytest.mark.parametrize("num_rows", [1, 2, 3, 4, 5, 8, 9, 13, 32, 64, 65, 131])
@pytest.mark.parametrize(
    ("out_features", "in_features"), [(256, 256), (768, 256), (37, 300), (1, 1), (16, 257)]
)
def test_matches_the_oracle(num_rows, out_features, in_features):
    check(*problem(num_rows, out_features, in_features))


@pytest.mark.parametrize("in_features", [K_BLOCK - 1, K_BLOCK, K_BLOCK + 1, 3 * K_BLOCK - 1])
def test_k_that_does_not_fill_its_last_block(in_features):
    check(*problem(7, 33, in_features))


@settings(max_examples=40, deadline=None)
@given(
    num_rows=st.integers(1, 80),
    out_features=st.integers(1, 200),
    in_features=st.integers(1, 600),
    seed=st.integers(0, 2**32 - 1),
    data=st.data(),
)
def test_any_subset_of_rows_in_any_order_gives_the_same_bits(num_rows, out_features, in_features, seed, data):
    x, weight = problem(num_rows, out_features, in_features, seed)
    everything = kernels.bf16_matmul(x, weight)
    rows = data.draw(st.lists(st.integers(0, num_rows - 1), min_size=1, max_size=num_rows))
    some = kernels.bf16_matmul(np.ascontiguousarray(x[rows]), weight)
    np.testing.assert_array_equal(some.view(np.uint32), everything[rows].view(np.uint32))


def test_a_row_of_nan_stays_alone():
    x, weight = problem(13, 48, 300)
    clean = kernels.bf16_matmul(x, weight)
    x[4] = np.nan
    x[9, 7] = np.inf
    dirty = kernels.bf16_matmul(x, weight)
    others = [r for r in range(13) if r not in (4, 9)]
    np.testing.assert_array_equal(dirty[others].view(np.uint32), clean[others].view(np.uint32))
    assert np.isnan(dirty[4]).all()
    assert not np.isfinite(dirty[9]).any()


def test_order_of_summation_is_the_documented_one():
    # In fp32, 2^24 + 1 + 1 is 2^24 one by one, but blocks are summed apart: 2^24 + (1 + 1).
    x = np.zeros((1, 2 * K_BLOCK), np.float32)
    x[0, 0] = 2.0**24
    weight = to_bits(np.ones((1, 2 * K_BLOCK)))
    x[0, 1:3] = 1.0
    assert kernels.bf16_matmul(x, weight)[0, 0] == 2.0**24
    x[0, 1:3] = 0.0
    x[0, K_BLOCK : K_BLOCK + 2] = 1.0
    assert kernels.bf16_matmul(x, weight)[0, 0] == 2.0**24 + 2


def test_residual_is_added_to_the_finished_sum():
    x, weight = problem(5, 40, 300)
    residual = np.random.default_rng(1).standard_normal((5, 40)).astype(np.float32)
    got = kernels.bf16_matmul(x, weight, residual)
    np.testing.assert_array_equal(got, residual + kernels.bf16_matmul(x, weight))


def test_extreme_weights_are_widened_exactly():
    bits = np.array([[0x0001], [0x8001], [0x7F7F], [0x0000], [0x8000], [0x7F80]], np.uint16)
    got = kernels.bf16_matmul(np.ones((1, 1), np.float32), bits)
    np.testing.assert_array_equal(got[0], from_bits(bits)[:, 0])


def test_wrong_width_is_refused():
    x, weight = problem(2, 8, 16)
    with pytest.raises(ValueError, match="must have 16 columns, got 15"):
        kernels.bf16_matmul(np.ascontiguousarray(x[:, :15]), weight)
