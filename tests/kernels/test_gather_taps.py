"""`gather_taps` against numpy indexing, bit for bit."""

import numpy as np
import pytest
from specpilot_rs._core import kernels


@pytest.mark.parametrize("rows", [[0], [6, 2, 2, 0], [], list(range(7))])
@pytest.mark.parametrize("num_taps", [1, 3])
def test_rows_of_all_taps_lie_side_by_side(num_taps, rows):
    taps = list(np.random.default_rng(0).standard_normal((num_taps, 7, 20), np.float32))
    got = kernels.gather_taps(taps, rows)
    want = np.concatenate([tap[np.array(rows, np.int64)] for tap in taps], axis=1)
    np.testing.assert_array_equal(got.view(np.uint32), want.view(np.uint32))


def test_bad_arguments_are_refused_by_name():
    taps = [np.zeros((4, 8), np.float32), np.zeros((3, 8), np.float32)]
    with pytest.raises(ValueError, match=r"taps.*at least 32.*got 24"):
        kernels.gather_taps(taps, [3])
    with pytest.raises(ValueError, match=r"width|taps"):
        kernels.gather_taps([], [0])
