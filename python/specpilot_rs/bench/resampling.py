"""How sure a ratio of sums is: the percentile bootstrap over prompts.

A prompt is the unit that was drawn; passes of one prompt are alike. So prompts are drawn again, with
replacement, and each draw gives sums over its prompts and their ratio. All ratios of one set of prompts come
from the same draws: differences between configurations are paired, and what a prompt does to both cancels.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

NUM_RESAMPLES = 10_000
CONFIDENCE = 0.95


class Resampling:
    """Draws of one set of prompts."""

    def __init__(self, num_prompts: int, seed: int, num_resamples: int = NUM_RESAMPLES) -> None:
        """Draws them.

        Args:
            num_prompts: Prompts in the set.
            seed: The same seed gives the same draws.
            num_resamples: How often the set is drawn.
        """
        shares = np.full(num_prompts, 1 / num_prompts)
        # [resamples, prompts]: how often each prompt is in each draw, which is all that sums need.
        self._times_drawn = np.random.default_rng(seed).multinomial(num_prompts, shares, size=num_resamples)

    def ratios(self, numerators: Sequence[int], denominators: Sequence[int]) -> NDArray[np.float64]:
        """Returns the ratio of sums of each draw; 1, as of plain decoding, where there is nothing below.

        Args:
            numerators: One per prompt.
            denominators: One per prompt.
        """
        above = self._times_drawn @ np.asarray(numerators)
        below = self._times_drawn @ np.asarray(denominators)
        ratios: NDArray[np.float64] = np.divide(above, below, out=np.ones(len(above)), where=below > 0)
        return ratios


def interval(values: NDArray[np.float64], confidence: float = CONFIDENCE) -> tuple[float, float]:
    """Returns the limits between which the middle `confidence` of resampled values lies."""
    tail = (1 - confidence) / 2
    low, high = np.quantile(values, [tail, 1 - tail])
    return float(low), float(high)
