"""An acceptance report as text: a table per prompt set, then how trees compare and what positions accept."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from specpilot_rs.bench.report import overall
from specpilot_rs.bench.rounds import CHAIN_ORACLE, ORACLE_POSITIONS, top_oracle

_COLUMNS = (
    "configuration",
    "tau",
    "95 % interval",
    "to the drafter's first",
    "chain oracle",
    *(f"top-16 at {num_positions}" for num_positions in ORACLE_POSITIONS),
    "candidates",
    "rows",
    "wasted",
    "Q agrees",
)
_LEGEND = (
    "tau: tokens per exact pass, prompt passes excluded, with its 95 % interval over prompts",
    "oracles: tau if passes accepted all that drafts hold of the target's text, along the draft's likeliest",
    "path (chain) or through any of 16 candidates of each of the first 8 or 16 positions (top-16)",
    "candidates: per drafted position; rows: verified per pass, root included; wasted: share of them off the",
    "accepted path; Q agrees: share of the tokens marked by Q passes that exact passes accepted",
)
_NUM_POSITIONS_SHOWN = 12


def table(report: Mapping[str, Any]) -> Iterator[str]:
    """Yields the lines of a report."""
    configurations = report["configurations"]
    for index, prompt_set in enumerate(configurations[0]["results"]):
        num_prompts, most = prompt_set["num_prompts"], report["max_tokens"]
        yield f"{prompt_set['set']}: {num_prompts} prompts, up to {most} tokens each"
        rows = [_cells(item["name"], item["results"][index]) for item in configurations]
        yield from aligned([_COLUMNS, *rows])
        yield ""
    if report["policy_differences"]:
        yield "tau of one tree less that of another, same prompts"
        rows = [(item["of"], "less", item["to"], _difference(item)) for item in report["policy_differences"]]
        yield from aligned(rows, num_words=3)
        yield ""
    yield "accepted at position 1, 2, ... in percent; passes that accepted 0, 1, 2, ... drafts"
    yield from aligned([_lengths(item) for item in configurations], num_words=3)
    yield ""
    yield from _LEGEND
    for item in report["skipped"]:
        yield f"skipped {item['name']}: {item['reason']}"


def _cells(name: str, result: Mapping[str, Any]) -> tuple[str, ...]:
    oracles, agreement = result["oracles"], result["q_pass_agreement"]
    low, high = result["interval"]
    return (
        name,
        f"{result['tau']:.3f}",
        f"{low:.3f} to {high:.3f}",
        "-" if result["difference"] is None else _difference(result["difference"]),
        f"{oracles[CHAIN_ORACLE]:.2f}",
        *(f"{oracles[top_oracle(num_positions)]:.2f}" for num_positions in ORACLE_POSITIONS),
        f"{result['candidates_per_position']:.1f}",
        f"{result['rows_per_pass']:.1f}",
        f"{result['wasted_rows']:.1%}",
        "-" if agreement is None else f"{agreement:.1%}",
    )


def _difference(item: Mapping[str, Any]) -> str:
    low, high = item["interval"]
    return f"{item['tau']:+.3f} ({low:+.3f} to {high:+.3f})"


def _lengths(configuration: Mapping[str, Any]) -> tuple[str, ...]:
    result = overall(configuration)
    shares = result["acceptance_by_position"]
    percent = " ".join(f"{100 * share:.0f}" for share in shares[:_NUM_POSITIONS_SHOWN])
    more = " ..." if len(shares) > _NUM_POSITIONS_SHOWN else ""
    return configuration["name"], percent + more, " ".join(map(str, result["accepted_lengths"]))


def aligned(rows: Sequence[Sequence[str]], num_words: int = 1) -> Iterator[str]:
    """Yields rows in columns, the first `num_words` of them flush left and figures flush right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = (
            cell.ljust(width) if i < num_words else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        yield "  ".join(cells).rstrip()
