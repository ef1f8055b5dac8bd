"""Rows into pages and rings on CUDA: the host's bits, nothing else touched."""

from __future__ import annotations

import numpy as np
import pytest
from specpilot_rs._core import kernels

GPU = {"device": "cuda"}


@pytest.mark.parametrize(("kv_heads", "head_dim"), [(1, 128), (4, 256), (3, 20), (2, 5)])
@pytest.mark.parametrize("num_rows", [0, 1, 17, 64])
def test_pages(kv_heads: int, head_dim: int, num_rows: int) -> None:
    rng = np.random.default_rng([kv_heads, num_rows])
    k_tail, v_tail = rng.normal(size=(2, 70, kv_heads, head_dim)).astype(np.float32)
    k_pages, v_pages = rng.normal(size=(2, 5, kv_heads, 64, head_dim)).astype(np.float32)
    rows = rng.permutation(70)[:num_rows].astype(np.uint32)
    table = np.array([3, 0, 4], dtype=np.uint32)
    for first_position in (0, 60, 64, 127):
        args = (k_tail, v_tail, rows, first_position, table, k_pages, v_pages)
        for got, want in zip(kernels.append_kv(*args, **GPU), kernels.append_kv(*args), strict=True):
            np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize(("ring_len", "row_len"), [(4, 33), (4, 10240), (128, 2048), (40, 1)])
@pytest.mark.parametrize("num_rows", [0, 1, 5, 64])
def test_rings(ring_len: int, row_len: int, num_rows: int) -> None:
    rng = np.random.default_rng([ring_len, num_rows])
    tail = rng.normal(size=(70, row_len)).astype(np.float32)
    rings = rng.normal(size=(3, ring_len, row_len)).astype(np.float32)
    rows = rng.permutation(70)[:num_rows].astype(np.uint32)
    for first_position in (0, 3, 1000):
        args = (tail, rows, first_position, 1, rings)
        np.testing.assert_array_equal(kernels.append_ring(*args, **GPU), kernels.append_ring(*args))
