"""Shaped logits against float64."""

import numpy as np
import pytest
from specpilot_rs._core import kernels
from tolerances import assert_close

SHAPES = [(1.0, None), (0.25, None), (1.0, 30.0), (0.19611613513818404, 20.0)]


def logits_of(num_rows, vocab_size):
    values = 20 * np.random.default_rng(0).standard_normal((num_rows, vocab_size))
    values[:, :4] = [0.0, 1e4, -1e4, 1e-6]
    return values.astype(np.float32)


def oracle(logits, multiplier, softcap):
    scaled = logits.astype(np.float64) * np.float32(multiplier).astype(np.float64)
    return scaled if softcap is None else softcap * np.tanh(scaled / softcap)


@pytest.mark.parametrize(("multiplier", "softcap"), SHAPES)
@pytest.mark.parametrize("vocab_size", [5, 33, 4096])
def test_matches_the_oracle(multiplier, softcap, vocab_size):
    logits = logits_of(3, vocab_size)
    got = kernels.shape_logits(logits, multiplier, softcap)
    assert_close("shape_logits", got, oracle(logits, multiplier, softcap))
    if softcap is not None:
        assert np.abs(got).max() <= softcap


def test_neighbours_do_not_matter():
    logits = logits_of(4, 1000)
    together = kernels.shape_logits(logits, 0.5, 20.0)
    for row in range(4):
        np.testing.assert_array_equal(
            kernels.shape_logits(logits[row : row + 1], 0.5, 20.0)[0], together[row]
        )
