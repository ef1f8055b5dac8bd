"""The acceptance report: counts of a run as one mapping of JSON values, the same for the same seed.

Per configuration and prompt set: tau (tokens committed per exact pass: sums over prompts, prompt passes
excluded) with its bootstrap interval, the difference to the drafter's first configuration, acceptance by
position, accepted lengths, oracles, wasted rows, and how far Q passes and exact passes agree. Differences
between tree policies of one drafter, size and number of Q passes follow. Differences are paired by prompt.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from specpilot_rs import __version__
from specpilot_rs.bench.acceptance import ALL_SETS, AcceptanceRun, ConfigurationCounts
from specpilot_rs.bench.resampling import CONFIDENCE, NUM_RESAMPLES, Resampling, interval
from specpilot_rs.bench.rounds import ORACLES, PromptCounts, ratio

_NUM_DIGITS = 4


def build_report(run: AcceptanceRun, settings: Mapping[str, Any], seed: int) -> dict[str, Any]:
    """Makes the report of what a run has found so far.

    Args:
        run: The run.
        settings: What was asked for, as the report should tell it.
        seed: Seed of the resampling.

    Returns:
        Settings, `complete`, `prompt_sets`, `configurations` with one item in `results` per set (and one for
        all sets together, if there are several), `policy_differences`, `skipped` and `mismatches`.
    """
    sets = _prompts_of_sets(run)
    resamplings = {name: Resampling(len(places), seed) for name, places in sets.items()}
    rows = [_Row(result, sets, resamplings) for result in run.results]
    baselines: dict[str, _Row] = {}
    configurations = []
    for row in rows:
        baseline = baselines.setdefault(row.drafter, row)
        configurations.append(_configuration(row, None if baseline is row else baseline))
    return {
        "version": __version__,
        **settings,
        "complete": run.is_complete,
        "seed": seed,
        "num_resamples": NUM_RESAMPLES,
        "confidence": CONFIDENCE,
        "prompt_sets": [{"name": item.name, "num_prompts": len(item.prompts)} for item in run.prompt_sets],
        "configurations": configurations,
        "policy_differences": list(_policy_differences(rows)),
        "skipped": [dataclasses.asdict(item) for item in run.skipped],
        "mismatches": [dataclasses.asdict(item) for item in run.mismatches],
    }


def report_text(report: Mapping[str, Any]) -> str:
    """Returns the report as JSON with a line per item of its lists: small files, readable diffs."""
    parts = []
    for key, value in report.items():
        text = json.dumps(value)
        if isinstance(value, list) and value:
            text = "[\n" + ",\n".join(json.dumps(item, separators=(",", ":")) for item in value) + "\n]"
        parts.append(f"{json.dumps(key)}: {text}")
    return "{\n" + ",\n".join(parts) + "\n}\n"


def overall(configuration: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns a configuration's result over all prompts."""
    result: Mapping[str, Any] = configuration["results"][-1]
    return result


def _prompts_of_sets(run: AcceptanceRun) -> dict[str, list[int]]:
    """Names of the sets, `all` last if there are several, and the places of their prompts among all."""
    ends = list(itertools.accumulate(len(item.prompts) for item in run.prompt_sets))
    starts = [0, *ends[:-1]]
    sets = {
        item.name: list(range(start, end))
        for item, start, end in zip(run.prompt_sets, starts, ends, strict=True)
    }
    return sets if len(sets) == 1 else {**sets, ALL_SETS: list(range(ends[-1]))}


class _Row:
    """One configuration with its resampled taus."""

    def __init__(
        self,
        result: ConfigurationCounts,
        sets: Mapping[str, Sequence[int]],
        resamplings: Mapping[str, Resampling],
    ) -> None:
        self.name = result.name
        self.drafter = result.configuration.drafter
        self.plan = result.plan
        # Chains are shorter than what was asked for, so the asking says which trees are of a size.
        self.size = (
            self.drafter,
            result.configuration.speculation.tree_nodes,
            result.plan["q_passes"],
            result.plan["num_speculative_tokens"],
        )
        everything = list(itertools.chain.from_iterable(result.counts))
        self.prompts = {name: [everything[place] for place in places] for name, places in sets.items()}
        self.totals = {name: PromptCounts.total(prompts) for name, prompts in self.prompts.items()}
        self.resampled = {
            name: resamplings[name].ratios(
                [prompt.num_tokens for prompt in prompts], [prompt.num_passes for prompt in prompts]
            )
            for name, prompts in self.prompts.items()
        }

    def tau(self, name: str) -> float:
        """Tokens per pass on one set."""
        return ratio(self.totals[name].num_tokens, self.totals[name].num_passes, 1.0)

    def difference(self, other: _Row, name: str) -> dict[str, Any]:
        """How much more tokens per pass this has than another, on one set."""
        return {
            "to": other.name,
            "tau": _rounded(self.tau(name) - other.tau(name)),
            "interval": _rounded_all(interval(self.resampled[name] - other.resampled[name])),
        }


def _configuration(row: _Row, baseline: _Row | None) -> dict[str, Any]:
    plan = row.plan
    return {
        "name": row.name,
        "drafter": row.drafter,
        **{key: plan[key] for key in ("method", "tree", "tree_nodes", "q_passes", "num_speculative_tokens")},
        "results": [_result(row, name, baseline) for name in row.prompts],
        "tokens_and_passes": {
            name: [[prompt.num_tokens, prompt.num_passes] for prompt in prompts]
            for name, prompts in row.prompts.items()
            if name != ALL_SETS
        },
    }


def _result(row: _Row, name: str, baseline: _Row | None) -> dict[str, Any]:
    total = row.totals[name]
    oracles = zip(ORACLES, total.oracle_tokens, strict=True)
    agreement = None
    if row.plan["q_passes"]:
        agreement = _rounded(ratio(total.num_accepted_marks, total.num_marked_tokens, 1.0))
    return {
        "set": name,
        "num_prompts": len(row.prompts[name]),
        "num_tokens": total.num_tokens,
        "num_passes": total.num_passes,
        "tau": _rounded(row.tau(name)),
        "interval": _rounded_all(interval(row.resampled[name])),
        "difference": None if baseline is None else row.difference(baseline, name),
        "oracles": {
            oracle: _rounded(ratio(num_tokens, total.num_passes, 1.0)) for oracle, num_tokens in oracles
        },
        "candidates_per_position": _rounded(ratio(total.num_candidates, total.num_candidate_positions, 0.0)),
        "rows_per_pass": _rounded(ratio(total.num_rows, total.num_passes, 1.0)),
        "wasted_rows": _rounded(total.wasted_rows),
        "q_pass_agreement": agreement,
        "acceptance_by_position": _rounded_all(total.acceptance_by_position),
        "accepted_lengths": list(total.accepted_lengths),
    }


def _policy_differences(rows: Sequence[_Row]) -> Iterator[dict[str, Any]]:
    """Each policy against every earlier one of its drafter, size and Q passes, over all prompts."""
    for index, row in enumerate(rows):
        for earlier in rows[:index]:
            if earlier.size == row.size:
                yield {"of": row.name, **row.difference(earlier, list(row.prompts)[-1])}


def _rounded(value: float) -> float:
    return round(value, _NUM_DIGITS)


def _rounded_all(values: Sequence[float]) -> list[float]:
    return [_rounded(value) for value in values]
