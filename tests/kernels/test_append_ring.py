"""AppendRing against slice assignment: bitwise, nothing else touched."""

import numpy as np
import pytest
from specpilot_rs._core import kernels


@pytest.mark.parametrize("first_position", [0, 3, 7, 100])
@pytest.mark.parametrize(("ring_len", "row_len"), [(4, 33), (40, 1)])
def test_rows_land_in_their_lanes(first_position: int, ring_len: int, row_len: int) -> None:
    rng = np.random.default_rng(first_position)
    tail = rng.normal(size=(30, row_len)).astype(np.float32)
    rings = rng.normal(size=(3, ring_len, row_len)).astype(np.float32)
    rows = rng.permutation(30)[:11].astype(np.uint32)

    got = kernels.append_ring(tail, rows, first_position, 1, rings)

    want = rings.copy()
    for i, row in enumerate(rows):
        want[1, (first_position + i) % ring_len] = tail[row]
    np.testing.assert_array_equal(got, want)


def test_a_row_outside_the_tail_is_refused() -> None:
    tail, rings = np.zeros((2, 4), dtype=np.float32), np.zeros((1, 3, 4), dtype=np.float32)
    with pytest.raises(ValueError, match="`tail` needs at least 12 elements, got 8"):
        kernels.append_ring(tail, np.array([2], dtype=np.uint32), 0, 0, rings)
