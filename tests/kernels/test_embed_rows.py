"""Embedding rows: exact copies of table rows, widened."""

import numpy as np
import pytest
from specpilot_rs._core import kernels

from tests.kernels.bfloat16 import from_bits


def table(vocab_size, hidden_size):
    # Every bit pattern may occur in a table, NaN payloads included.
    return np.random.default_rng(0).integers(0, 2**16, (vocab_size, hidden_size), dtype=np.uint16)


@pytest.mark.parametrize(("vocab_size", "hidden_size"), [(1, 1), (37, 20), (8192, 256)])
def test_rows_are_exact_copies(vocab_size, hidden_size):
    weights = table(vocab_size, hidden_size)
    ids = np.random.default_rng(1).integers(0, vocab_size, 70, dtype=np.uint32)
    ids[:2] = [0, vocab_size - 1]
    got = kernels.embed_rows(weights, ids)
    np.testing.assert_array_equal(got.view(np.uint32), from_bits(weights)[ids].view(np.uint32))


def test_rows_are_scaled_with_one_rounding():
    weights = table(40, 20) & 0xBFFF  # no NaN, no overflow
    ids = np.arange(40, dtype=np.uint32)
    scale = np.float32(59.329)
    got = kernels.embed_rows(weights, ids, scale)
    np.testing.assert_array_equal(got, from_bits(weights) * scale)


def test_no_tokens_give_no_rows():
    assert kernels.embed_rows(table(4, 8), np.empty(0, np.uint32)).shape == (0, 8)


@pytest.mark.parametrize("bad", [37, 48, 2**32 - 1])
def test_ids_outside_the_vocabulary_are_refused_even_inside_the_padding(bad):
    # 37 rows are stored in 3 tiles of 16: ids up to 47 would read padding.
    with pytest.raises(ValueError, match=f"`token_ids` must be below 37, got {bad}"):
        kernels.embed_rows(table(37, 8), np.array([0, bad], np.uint32))
