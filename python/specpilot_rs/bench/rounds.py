"""What one request's passes drafted, accepted and could have accepted.

In: an output recorded with `record_rounds=True`. Out: counts that add up over requests. All lengths count
committed tokens: accepted drafts and the target's own next one, cut where the output ends.

Oracles say how far the target's own continuation lies inside a draft, at the anchors that the passes really
had: *chain* follows the draft's greedy walk; *top-16 at n positions* a tree of every path through the 16
likeliest tokens of each of the first n positions. After Q passes the draft is the last one, behind the marked
path, and counts only where that path holds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from specpilot_rs.outputs import RequestOutput, RoundRecord

NUM_CANDIDATES = 16
"""Candidates of a position that oracles look at."""
ORACLE_POSITIONS = (8, 16)
"""How many positions the top-16 oracles see."""
CHAIN_ORACLE = "chain"


def top_oracle(num_positions: int) -> str:
    """Returns the name of the oracle that sees so many positions."""
    return f"top{NUM_CANDIDATES}_at_{num_positions}"


ORACLES = (CHAIN_ORACLE, *map(top_oracle, ORACLE_POSITIONS))
"""Names of all oracles."""


@dataclass(frozen=True)
class PromptCounts:
    """Counts of one request, or of several added up.

    Attributes:
        num_tokens: Tokens that exact passes committed; the first one of an output comes from its prompt.
        num_passes: Exact passes, prompt passes excluded.
        num_draft_tokens: Rows verified beside the roots.
        num_accepted_tokens: Those of them that became output.
        num_marked_tokens: Tokens that Q passes marked.
        num_accepted_marks: Those of them that were accepted.
        accepted_lengths: Item i counts the passes that accepted i drafts.
        drafted_at: Passes with a draft at position 1, 2, ...
        oracle_tokens: Tokens that the passes would have committed, by oracle.
        num_candidates: Candidates in all positions of all drafts, at most 16 of each.
        num_candidate_positions: Those positions.
    """

    num_tokens: int
    num_passes: int
    num_draft_tokens: int
    num_accepted_tokens: int
    num_marked_tokens: int
    num_accepted_marks: int
    accepted_lengths: tuple[int, ...]
    drafted_at: tuple[int, ...]
    oracle_tokens: tuple[int, ...]
    num_candidates: int
    num_candidate_positions: int

    @classmethod
    def of(cls, output: RequestOutput) -> PromptCounts:
        """Counts one output.

        Args:
            output: Recorded with its rounds.
        """
        sequence = output.prompt_token_ids + output.outputs[0].token_ids
        rounds = output.rounds or []
        metrics = output.metrics
        drafts = [drafted.candidate_token_ids for drafted in rounds]
        return cls(
            num_tokens=max(metrics.num_output_tokens - 1, 0),
            num_passes=metrics.num_target_passes,
            num_draft_tokens=metrics.num_draft_tokens,
            num_accepted_tokens=metrics.num_accepted_tokens,
            num_marked_tokens=metrics.num_marked_tokens,
            num_accepted_marks=metrics.num_accepted_marks,
            accepted_lengths=tuple(metrics.acceptance_histogram),
            drafted_at=_added(*((1,) * tree_depth(drafted.parents) for drafted in rounds)),
            oracle_tokens=_added(
                (0,) * len(ORACLES),
                *(oracle_tokens(drafted, sequence[drafted.anchor_position + 1 :]) for drafted in rounds),
            ),
            num_candidates=sum(len(tokens) for draft in drafts for tokens in draft),
            num_candidate_positions=sum(map(len, drafts)),
        )

    @classmethod
    def total(cls, counts: Sequence[PromptCounts]) -> PromptCounts:
        """Adds up counts, of which there must be one."""
        names = cls.__dataclass_fields__
        columns = {name: [getattr(item, name) for item in counts] for name in names}
        sums: dict[str, Any] = {
            name: _added(*values) if isinstance(values[0], tuple) else sum(values)
            for name, values in columns.items()
        }
        return cls(**sums)

    @property
    def acceptance_by_position(self) -> list[float]:
        """Share of the passes with a draft at position 1, 2, ... that accepted it."""
        return [
            sum(self.accepted_lengths[position:]) / num_drafted
            for position, num_drafted in enumerate(self.drafted_at, start=1)
        ]

    @property
    def num_rows(self) -> int:
        """Rows that exact passes verified, roots included."""
        return self.num_passes + self.num_draft_tokens

    @property
    def wasted_rows(self) -> float:
        """Share of the verified rows that no accepted path went through."""
        return ratio(self.num_draft_tokens - self.num_accepted_tokens, self.num_rows, 0.0)


def ratio(numerator: int, denominator: int, otherwise: float) -> float:
    """Returns a quotient, or what stands for it where nothing was counted."""
    return numerator / denominator if denominator else otherwise


def tree_depth(parents: Sequence[int]) -> int:
    """Returns the length of a tree's longest branch; -1 is the root as parent."""
    depths: list[int] = []
    for parent in parents:
        depths.append(1 if parent < 0 else depths[parent] + 1)
    return max(depths, default=0)


def oracle_tokens(drafted: RoundRecord, continuation: Sequence[int]) -> tuple[int, ...]:
    """Returns the tokens that a pass would have committed, by the oracles of `ORACLES`.

    Args:
        drafted: What the pass had.
        continuation: The target's own tokens after its anchor, to the end of the output.
    """
    marked = drafted.draft_token_ids[: drafted.num_marked]
    num_right_marks = _num_inside([[token] for token in marked], continuation)
    if num_right_marks < len(marked):
        reached = [num_right_marks] * len(ORACLES)
    else:
        rest = continuation[len(marked) :]
        candidates = [tokens[:NUM_CANDIDATES] for tokens in drafted.candidate_token_ids]
        inside = [_num_inside([[token] for token in drafted.greedy_token_ids], rest)]
        inside += [_num_inside(candidates[:num_positions], rest) for num_positions in ORACLE_POSITIONS]
        reached = [len(marked) + num_tokens for num_tokens in inside]
    return tuple(min(num_accepted + 1, len(continuation)) for num_accepted in reached)


def _num_inside(candidates: Sequence[Sequence[int]], continuation: Sequence[int]) -> int:
    """Returns how many tokens of `continuation`, from the first on, are among those of their position."""
    for index, (tokens, token) in enumerate(zip(candidates, continuation, strict=False)):
        if token not in tokens:
            return index
    return min(len(candidates), len(continuation))


def _added(*counts: tuple[int, ...]) -> tuple[int, ...]:
    """Adds tuples item by item; short ones have zeros at the end."""
    length = max(map(len, counts), default=0)
    return tuple(sum(item[i] for item in counts if i < len(item)) for i in range(length))
