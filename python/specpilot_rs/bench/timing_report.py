"""The report of a timing run: one mapping of JSON values, and its lines for a reader.

Medians over rounds, with percentile-bootstrap intervals over rounds. Ratios are paired: of the two presets in
the same round, whose prompt is the same.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specpilot_rs import __version__
from specpilot_rs.bench.resampling import CONFIDENCE, NUM_RESAMPLES, interval
from specpilot_rs.bench.table import aligned
from specpilot_rs.bench.timing import PresetTiming, Sample, TimingRun

STAGES = (
    "draft",
    "tree",
    "q_forward",
    "q_head",
    "mark",
    "forward",
    "head",
    "commit",
    "context",
    "between",
)
"""Parts of a step in the order of a picture's bars."""

PLANNED = ("weight_format", "head", "draft_head", "tree", "tree_nodes", "q_passes")
"""What a report repeats of the plan."""


def build_timing_report(run: TimingRun, settings: Mapping[str, Any], seed: int) -> dict[str, Any]:
    """Makes the report of what a run has found so far.

    Args:
        run: The run.
        settings: What was asked for, and on what.
        seed: Seed of the resampling.

    Returns:
        Settings, `complete`, `presets`, `ratios` of the last preset to each other, `verify_costs`, `clocks`.
    """
    random = np.random.default_rng(seed)
    return {
        "version": __version__,
        **settings,
        "complete": run.is_complete,
        "num_rounds": min(len(timing.samples) for timing in run.timed),
        "seed": seed,
        "num_resamples": NUM_RESAMPLES,
        "confidence": CONFIDENCE,
        "presets": [_preset(timing, random) for timing in run.timed],
        "ratios": list(_ratios(run.timed, random)),
        "verify_costs": run.costs,
        "clocks": run.clocks,
    }


def _median(values: NDArray[np.float64], random: np.random.Generator) -> dict[str, Any]:
    """Median over rounds with its interval."""
    draws = random.integers(len(values), size=(NUM_RESAMPLES, len(values)))
    return {
        "median": float(np.median(values)),
        "interval": list(interval(np.median(values[draws], axis=1))),
    }


def _rates(samples: Sequence[Sample]) -> NDArray[np.float64]:
    return np.array([item.num_tokens / item.seconds for item in samples])


def _preset(timing: PresetTiming, random: np.random.Generator) -> dict[str, Any]:
    samples = timing.samples
    num_passes = sum(item.num_passes for item in samples)
    preset, plan = timing.preset, timing.plan
    return {
        "name": preset.name,
        "about": preset.about,
        "kernels": preset.kernels,
        **{key: plan[key] for key in PLANNED},
        "is_plain": preset.speculation is None,
        "weight_bytes": plan["weight_bytes"],
        "tokens_per_s": _median(_rates(samples), random),
        "step_ms": _median(np.array([1e3 * item.seconds / item.num_passes for item in samples]), random),
        "tau": sum(item.num_tokens for item in samples) / num_passes,
        "num_passes": num_passes,
        "rows_per_pass": sum(item.num_rows for item in samples) / num_passes,
        "stages_ms": _stages_ms(timing.stage_times),
        "activity_per_step": _activity(timing.stage_times),
        "is_lossless": preset.is_lossless,
        "num_checked_tokens": timing.num_checked_tokens,
        "num_wrong_tokens": timing.num_wrong_tokens,
        "mismatch_rate": timing.mismatch_rate,
        "num_checked_logit_rows": timing.num_checked_logits,
        "num_wrong_logit_rows": timing.num_wrong_logits,
        "rounds": [dataclasses.asdict(item) for item in samples],
    }


def _stages_ms(times: dict[str, Any] | None) -> dict[str, float] | None:
    if times is None or not times["num_steps"]:
        return None
    return {stage: 1e3 * times["seconds"][stage] / times["num_steps"] for stage in STAGES}


def _activity(times: dict[str, Any] | None) -> dict[str, float] | None:
    if times is None or not times["num_steps"]:
        return None
    return {name: count / times["num_steps"] for name, count in times["activity"].items()}


def _ratios(timings: Sequence[PresetTiming], random: np.random.Generator) -> Iterator[dict[str, Any]]:
    *others, last = timings
    for other in others:
        block = other.samples[0].block
        own = [sample for sample in last.samples if sample.block == block]
        if not own:
            continue
        num_rounds = min(len(own), len(other.samples))
        ratios = _rates(own[:num_rounds]) / _rates(other.samples[:num_rounds])
        yield {"of": last.preset.name, "to": other.preset.name, **_median(ratios, random)}


def timing_lines(report: Mapping[str, Any]) -> Iterator[str]:
    """Yields the lines of a report."""
    acceptance = "modelled acceptance" if report["acceptance"] == "modelled" else "measured acceptance"
    length = report["prompt_tokens"]
    prompts = "prompts as given" if length is None else f"prompts of {length} tokens"
    yield (
        f"{report['target']} on {report['gpu'] or report['device']}: {report['num_rounds']} rounds, "
        f"{prompts}, outputs of {report['max_tokens']} tokens; {acceptance}"
    )
    if report["profile"] is not None:
        profile = report["profile"]
        yield (
            f"modelled acceptance, profile {profile['name']!r}: {profile['easy_share']:.0%} of positions are "
            f"easy; the right token is the first candidate at {profile['easy'][0]:.1%} of these and at "
            f"{profile['hard'][0]:.1%} of the others"
        )
    columns = (
        "preset",
        "weights",
        "head",
        "tokens/s",
        "95 % interval",
        "tau",
        "step ms",
        "ids differ",
        "rows differ",
    )
    yield from aligned([columns, *(_cells(item) for item in report["presets"])], num_words=3)
    yield ""
    if report["ratios"]:
        rows = [
            (
                item["of"],
                "to",
                item["to"],
                f"{item['median']:.2f}x",
                f"{item['interval'][0]:.2f} to {item['interval'][1]:.2f}",
            )
            for item in report["ratios"]
        ]
        yield "tokens/s of one preset over another's, same prompts"
        yield from aligned(rows, num_words=3)
        yield ""
    if any(item["stages_ms"] for item in report["presets"]):
        yield "milliseconds of a step by stage, each waited for on its own"
        header = ("preset", *STAGES, "sum")
        shown = [item for item in report["presets"] if item["stages_ms"]]
        yield from aligned([header, *(_stage_cells(item) for item in shown)])
        yield ""
    for engine, rows in report["verify_costs"].items():
        yield f"milliseconds of an exact pass by its rows, {engine}: layers + LM head"
        cells = [(str(row["rows"]), f"{row['forward_ms']:.2f} + {row['head_ms']:.2f}") for row in rows]
        yield "  ".join(": ".join(cell) for cell in cells)
    if report["clocks"]:
        yield "GPU before each round: " + "; ".join(
            f"{item['clocks.sm']:.0f}/{item['clocks.mem']:.0f} MHz, {item['power.draw']:.0f} W"
            for item in report["clocks"]
        )
    elif report["gpu"] is not None:
        yield "no GPU clocks: nvidia-smi says nothing here"


def _cells(item: Mapping[str, Any]) -> tuple[str, ...]:
    low, high = item["tokens_per_s"]["interval"]
    return (
        item["name"],
        item["weight_format"],
        item["head"],
        f"{item['tokens_per_s']['median']:.1f}",
        f"{low:.1f} to {high:.1f}",
        f"{item['tau']:.2f}",
        f"{item['step_ms']['median']:.3f}",
        f"{item['num_wrong_tokens']} of {item['num_checked_tokens']}"
        if item["is_lossless"]
        else f"rate {item['mismatch_rate']:.2%}",
        f"{item['num_wrong_logit_rows']} of {item['num_checked_logit_rows']}" if item["is_lossless"] else "-",
    )


def _stage_cells(item: Mapping[str, Any]) -> tuple[str, ...]:
    stages = item["stages_ms"]
    return (item["name"], *(f"{stages[stage]:.3f}" for stage in STAGES), f"{sum(stages.values()):.3f}")
