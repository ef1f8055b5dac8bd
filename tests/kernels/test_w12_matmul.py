"""W12 matmul: the bits of the BF16 matmul, the Q view against its definition, and how far that is off."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from specpilot_rs._core import kernels
from tolerances import assert_close

from tests.kernels.bfloat16 import from_bits, to_bits
from tests.w12_oracle import q_view


def problem(num_rows, out_features, in_features, seed=0, num_escapes=0):
    """Activations and Gaussian weights, some of them moved out of their windows, above and below."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((num_rows, in_features)).astype(np.float32)
    weight = to_bits(rng.standard_normal((out_features, in_features)) * 0.02)
    places = rng.choice(weight.size, num_escapes, replace=False)
    weight.reshape(-1)[places] = to_bits(rng.choice([3e3, -2e2, 1e-9, -1e-12, 0.0, -0.0], num_escapes))
    return x, weight


def q_weights(weight):
    """The 8-bit view as float64."""
    return from_bits(q_view(weight)).astype(np.float64)


def same_bits(got, want):
    np.testing.assert_array_equal(got.view(np.uint32), want.view(np.uint32))


SHAPES = [(256, 256), (768, 256), (47, 300), (16, 704), (130, 1000)]


@pytest.mark.parametrize("num_rows", [1, 2, 3, 4, 5, 8, 13, 32, 64, 65, 131, 256])
@pytest.mark.parametrize(("out_features", "in_features"), SHAPES)
def test_exact_mode_matches_oracle_and_bf16_matmul(num_rows, out_features, in_features):
    x, weight = problem(num_rows, out_features, in_features, num_escapes=out_features * in_features // 150)
    got = kernels.w12_matmul(x, weight)
    same_bits(got, kernels.bf16_matmul(x, weight))
    w = from_bits(weight).astype(np.float64)
    scale = np.abs(x).astype(np.float64) @ np.abs(w).T
    assert_close("w12_matmul", got, x.astype(np.float64) @ w.T, scale=scale)


@pytest.mark.parametrize("num_rows", [1, 2, 4, 7, 64, 70])
@pytest.mark.parametrize(("out_features", "in_features"), SHAPES)
def test_q_view_matches_its_definition(num_rows, out_features, in_features):
    x, weight = problem(num_rows, out_features, in_features, num_escapes=out_features * in_features // 150)
    got = kernels.w12_matmul(x, weight, q_view=True)
    w = q_weights(weight)
    scale = np.abs(x).astype(np.float64) @ np.abs(w).T
    assert_close("w12_matmul", got, x.astype(np.float64) @ w.T, scale=scale)


@settings(max_examples=60, deadline=None)
@given(
    num_rows=st.integers(1, 80),
    out_features=st.sampled_from([16, 32, 47, 63, 95, 144, 199]),
    in_features=st.integers(600, 900),
    num_escapes=st.integers(0, 80),
    seed=st.integers(0, 2**32 - 1),
    view=st.booleans(),
    data=st.data(),
)
def test_any_subset_of_rows_gives_the_same_bits(
    num_rows, out_features, in_features, num_escapes, seed, view, data
):
    x, weight = problem(num_rows, out_features, in_features, seed, num_escapes)
    everything = kernels.w12_matmul(x, weight, q_view=view)
    if not view:
        same_bits(everything, kernels.bf16_matmul(x, weight))
    rows = data.draw(st.lists(st.integers(0, num_rows - 1), min_size=1, max_size=num_rows))
    same_bits(kernels.w12_matmul(np.ascontiguousarray(x[rows]), weight, q_view=view), everything[rows])


@pytest.mark.parametrize("view", [False, True])
def test_residual_is_added_to_the_finished_sum(view):
    x, weight = problem(5, 48, 320, num_escapes=50)
    residual = np.random.default_rng(1).standard_normal((5, 48)).astype(np.float32)
    got = kernels.w12_matmul(x, weight, residual, q_view=view)
    same_bits(got, residual + kernels.w12_matmul(x, weight, q_view=view))


def test_a_row_of_nan_stays_alone():
    x, weight = problem(13, 48, 320, num_escapes=20)
    clean = kernels.w12_matmul(x, weight)
    x[4] = np.nan
    x[9, 7] = np.inf
    dirty = kernels.w12_matmul(x, weight)
    others = [r for r in range(13) if r not in (4, 9)]
    same_bits(dirty[others], clean[others])
    assert np.isnan(dirty[4]).all()


@pytest.mark.parametrize("scale", [1e-38, 1e-30, 1e30])
@pytest.mark.parametrize("base", [1, 20, 200, 239])
def test_products_at_the_ends_of_the_range(scale, base):
    rng = np.random.default_rng(2)
    x = (rng.standard_normal((3, 320)) * scale).astype(np.float32)
    weight = (base + rng.integers(0, 16, (32, 320)) << 7 | rng.integers(0, 128, (32, 320))).astype(np.uint16)
    same_bits(kernels.w12_matmul(x, weight), kernels.bf16_matmul(x, weight))


def test_relative_error_of_the_q_view_on_gaussian_weights(report):
    x, weight = problem(32, 1024, 5120, seed=3)
    exact = kernels.w12_matmul(x, weight).astype(np.float64)
    view = kernels.w12_matmul(x, weight, q_view=True).astype(np.float64)
    error = np.linalg.norm(view - exact) / np.linalg.norm(exact)
    report(f"Q view: relative error of the matmul {error:.4f}")
    assert 0.0258 < error < 0.0278


def test_matrices_that_stay_bf16_and_wrong_widths_are_refused():
    x, weight = problem(2, 16, 640)
    with pytest.raises(ValueError, match="must have 640 columns, got 639"):
        kernels.w12_matmul(np.ascontiguousarray(x[:, :639]), weight)
    weight[3, 5] = 0x7F80
    with pytest.raises(ValueError, match="channel 3 holds NaN or infinity"):
        kernels.w12_matmul(x, weight)


@pytest.mark.parametrize("formats", [["w12"], ["w12", "w12"], ["bf16", "w12", "bf16"], ["w12"] * 6])
@pytest.mark.parametrize("view", [False, True])
def test_matrices_multiplied_together_keep_their_bits(formats, view):
    matrices = [(problem(7, 31 * i + 47, 300, i, num_escapes=30)[1], name) for i, name in enumerate(formats)]
    x, _ = problem(7, 1, 300)
    together = kernels.multiply_together(x, matrices, q_view=view)
    for got, (weight, name) in zip(together, matrices, strict=True):
        want = kernels.w12_matmul(x, weight, q_view=view) if name == "w12" else kernels.bf16_matmul(x, weight)
        same_bits(got, want)
