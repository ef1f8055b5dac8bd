"""What a planted drafter should do, from its stated profile alone: draws by Philox, trees by a heap."""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tests.sampling_oracle import random_bits

PLANTED_DRAFT = 2
"""Last word of the counters of planted drafts."""
BLOCK_DRAFTS = 15


def uniform(seed: int, position: int, anchor: int) -> float:
    """The draw for the token at a position in a draft after an anchor."""
    return (random_bits(seed, (position, anchor, 0, PLANTED_DRAFT)) >> 11) / 2**53


def ranks_at(profile: dict[str, Any], script: int, position: int) -> Sequence[float]:
    """Probabilities by rank at a position."""
    is_easy = uniform(profile["seed"] ^ script << 32, position, 2**32 - 1) < profile["easy_share"]
    ranks: Sequence[float] = profile["easy" if is_easy else "hard"]
    return ranks


def rank_of_right(profile: dict[str, Any], script: int, position: int, anchor: int) -> int | None:
    """Rank at which the right token is put; None where it is left out."""
    lot = uniform(profile["seed"] ^ script << 32, position, anchor)
    for rank, probability in enumerate(ranks_at(profile, script, position)):
        if lot < probability:
            return rank
        lot -= probability
    return None


@dataclass(frozen=True)
class Expected:
    """Mean and standard deviation of the drafts that a pass accepts."""

    mean: float
    deviation: float

    def band(self, num_passes: int, num_trees: int = 1) -> tuple[float, float]:
        """Tokens per pass of `num_trees` trees, within four standard errors."""
        tau = num_trees * (self.mean + 1)
        error = 4 * self.deviation * math.sqrt(num_trees / num_passes)
        return tau - error, tau + error


def expected_drafts(profile: dict[str, Any], num_nodes: int, width: int, seed: int = 0) -> Expected:
    """Drafts accepted out of a best-first tree of so many nodes, root not among them; a chain of width 1."""
    random = np.random.default_rng(seed)
    kinds = [np.array(profile["easy"]), np.array(profile["hard"])]
    accepted = []
    for _ in range(3000):
        depths = [kinds[int(random.random() >= profile["easy_share"])] for _ in range(BLOCK_DRAFTS)]
        rights = [int(np.searchsorted(np.cumsum(ranks), random.random(), "right")) for ranks in depths]
        accepted.append(_right_depth(depths, rights, num_nodes, width))
    return Expected(float(np.mean(accepted)), float(np.std(accepted)))


def _right_depth(depths: list[Any], rights: list[int], num_nodes: int, width: int) -> int:
    """How far the right path lies inside the tree."""
    heap: list[tuple[float, int, int, int, bool, float]] = []
    order = itertools.count()

    def offer(above: float, depth: int, rank: int, is_right: bool) -> None:
        if depth < len(depths) and rank < min(width, len(depths[depth])):
            score = above + math.log(depths[depth][rank])
            heapq.heappush(heap, (-score, next(order), depth, rank, is_right, above))

    offer(0.0, 0, 0, True)
    reached = 0
    for _ in range(num_nodes):
        if not heap:
            break
        score, _, depth, rank, is_right, above = heapq.heappop(heap)
        is_here = is_right and rights[depth] == rank
        reached = max(reached, depth + 1 if is_here else 0)
        offer(above, depth, rank + 1, is_right)
        offer(-score, depth + 1, 0, is_here)
    return reached
