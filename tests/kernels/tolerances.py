"""How far a kernel may be from its float64 oracle: one line per kernel, and the comparison that applies it.

Kernels whose results are integers or copies have no line: they are compared exactly.
"""

from typing import NamedTuple

import numpy as np


class Tolerance(NamedTuple):
    """A result passes when `|got - want| <= absolute + relative * |want|`."""

    absolute: float
    relative: float


TOLERANCES = {
    # Scaled by the sum of |x * w| (see the test), for sums may cancel.
    "bf16_matmul": Tolerance(absolute=0.0, relative=2e-6),
    # Likewise, but an escaped weight may dwarf the others, which then all round at its product's size.
    "w12_matmul": Tolerance(absolute=0.0, relative=4e-6),
    # Likewise; of W8A8, whose products are exact and whose groups are summed apart.
    "fp8_matmul": Tolerance(absolute=0.0, relative=2e-6),
    "rms_norm": Tolerance(absolute=1e-30, relative=1e-6),
    # A few roundings of values of the size of x; the angle itself is an fp32 product in the oracle too.
    "rope": Tolerance(absolute=1e-6, relative=1e-6),
    "gate": Tolerance(absolute=1e-37, relative=2e-6),
    # Of a large negative input the exponent is some tens; its last bit is as many ulp of a value near 0.
    "gelu_gate": Tolerance(absolute=1e-6, relative=2e-6),
    # Averages of values near 1; scores of some tens lose a few ulp before the exponential.
    "draft_block": Tolerance(absolute=3e-6, relative=3e-5),
    "block_conv": Tolerance(absolute=2e-6, relative=2e-6),
    # Log-probabilities: an error of a logit of some tens passes through unscaled.
    # Of values up to the cap, which is what the formula takes a difference from.
    "shape_logits": Tolerance(absolute=1e-5, relative=1e-6),
    "draft_select": Tolerance(absolute=3e-5, relative=0.0),
}


def assert_close(kernel: str, got: np.ndarray, want: np.ndarray, scale: np.ndarray | None = None) -> None:
    """Compares with the kernel's tolerance; shapes, NaN and infinities must agree exactly.

    Args:
        kernel: A key of `TOLERANCES`.
        got: The kernel's result.
        want: The oracle's, in float64.
        scale: What the relative part refers to; `|want|` by default.
    """
    assert got.shape == want.shape
    finite = np.isfinite(want)
    np.testing.assert_array_equal(got[~finite].astype(np.float64), want[~finite])
    assert np.isfinite(got[finite]).all(), "an element that should be finite is not"
    absolute, relative = TOLERANCES[kernel]
    size = np.abs(want) if scale is None else scale
    error = np.abs(got[finite].astype(np.float64) - want[finite])
    excess = error - (absolute + relative * size[finite])
    worst = int(np.argmax(excess)) if excess.size else 0
    assert excess.size == 0 or excess[worst] <= 0, (
        f"{kernel}: element {np.argwhere(finite)[worst].tolist()} is {got[finite][worst]!r}, "
        f"should be {want[finite][worst]!r}"
    )
