"""AppendKv against slice assignment: bitwise, nothing else touched."""

import numpy as np
import pytest
from specpilot_rs._core import kernels


@pytest.mark.parametrize("first_position", [0, 1, 60, 63, 64, 127])
@pytest.mark.parametrize(("kv_heads", "head_dim"), [(1, 128), (3, 20)])
def test_rows_land_on_their_pages(first_position: int, kv_heads: int, head_dim: int) -> None:
    rng = np.random.default_rng(first_position)
    k_tail, v_tail = rng.normal(size=(2, 40, kv_heads, head_dim)).astype(np.float32)
    k_pages, v_pages = rng.normal(size=(2, 5, kv_heads, 64, head_dim)).astype(np.float32)
    page_table = np.array([3, 0, 4], dtype=np.uint32)
    rows = rng.permutation(40)[:17].astype(np.uint32)

    k, v = kernels.append_kv(k_tail, v_tail, rows, first_position, page_table, k_pages, v_pages)

    for got, tail, want in [(k, k_tail, k_pages.copy()), (v, v_tail, v_pages.copy())]:
        for i, row in enumerate(rows):
            position = first_position + i
            want[page_table[position // 64], :, position % 64] = tail[row]
        np.testing.assert_array_equal(got, want)


def test_a_short_page_table_is_refused() -> None:
    tail = np.zeros((2, 1, 4), dtype=np.float32)
    pages = np.zeros((1, 1, 64, 4), dtype=np.float32)
    table = np.zeros(1, dtype=np.uint32)
    rows = np.arange(2, dtype=np.uint32)
    with pytest.raises(ValueError, match="`pages` needs at least 2 elements, got 1"):
        kernels.append_kv(tail, tail, rows, 63, table, pages, pages)
