"""`specpilot bench --presets` and `--ladder`: opens what is asked for, measures, publishes.

Whatever is complete when a run ends, however it does, is published.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import typer

from specpilot_rs import _core
from specpilot_rs.bench.presets import LADDER, Preset, presets_named, with_ladder
from specpilot_rs.bench.progress import StderrProgress
from specpilot_rs.bench.publishing import publish
from specpilot_rs.bench.timing import TimingRun
from specpilot_rs.bench.timing_plot import draw_timing
from specpilot_rs.bench.timing_report import build_timing_report, timing_lines
from specpilot_rs.errors import SpecPilotError
from specpilot_rs.options import SpeculativeConfig, option_error
from specpilot_rs.prompt_input import prompt_of, read_jsonl

if TYPE_CHECKING:
    from specpilot_rs.llm import LLM

_ROOM_TOKENS = 64
"""Positions beyond prompt and output that trees may take."""


@dataclass(frozen=True)
class TimingSettings:
    """What `specpilot bench` was asked for.

    Attributes:
        presets: Names, with commas between; None for the ladder alone.
        ladder: Whether to measure the ladder, too.
        planted: Name of a planted model.
        model: Directory or hub id of the target; None for the bundled pair or a planted model.
        drafter: Its drafter, as `model` or `method`; empty for what comes with the target.
        prompts: Files of prompts; none for planted ones, or the demo's own.
        rounds: Rounds after the warm-up.
        prompt_tokens: Length of planted prompts.
        max_tokens: Length of outputs.
        device: Where to run.
        max_model_len: Context limit; None for what prompts and outputs need, where that is known.
        num_threads: Worker threads.
        revision: Revision of the target on the hub.
        seed: Seed of planted prompts and of the resampling.
    """

    presets: str | None
    ladder: bool
    planted: str | None
    model: str | None
    drafter: Mapping[str, str]
    prompts: Sequence[Path]
    rounds: int
    prompt_tokens: int
    max_tokens: int
    device: str
    max_model_len: int | None
    num_threads: int | None
    revision: str | None
    seed: int

    def chosen(self) -> list[Preset]:
        """Returns the presets."""
        if self.presets is None:
            return list(LADDER)
        presets = presets_named([name.strip() for name in self.presets.split(",")])
        return with_ladder(presets) if self.ladder else presets


def measure_presets(settings: TimingSettings, files: Mapping[str, Path | None], as_json: bool) -> None:
    """Measures presets; exit code 1 if a token or a logit is not plain decoding's.

    Args:
        settings: What was asked for.
        files: Where to write JSON and PNG.
        as_json: Whether to print JSON.
    """
    presets = settings.chosen()
    if settings.max_tokens < 2:
        raise option_error(
            f"--max-tokens should be at least 2, the first coming with the prompt, got {settings.max_tokens}"
        )
    if len(presets) > 1 and not presets[-1].is_lossless:
        raise option_error(
            f"--presets: {presets[-1].name} should not be the last, which the others are compared with"
        )
    if settings.planted is not None and settings.planted not in _core.PLANTED_NAMES:
        raise option_error(
            f"--planted should be one of {', '.join(_core.PLANTED_NAMES)}, got {settings.planted!r}"
        )
    run = TimingRun(
        open_llm=lambda *shape: _open(settings, *shape),
        drafter=_drafter(settings),
        prompts=_prompts(settings),
        presets=presets,
        max_tokens=settings.max_tokens,
        is_planted=settings.planted is not None,
    )
    stopped: BaseException | None = None
    with StderrProgress() as progress:
        run.progress = progress
        try:
            run.measure()
        except (KeyboardInterrupt, SpecPilotError) as error:
            stopped = error
    if run.timed:
        _publish(run, settings, files, as_json)
    if stopped is not None:
        typer.echo(
            f"stopped after {run.num_whole_rounds} of {run.num_rounds} rounds; only these are reported",
            err=True,
        )
    is_wrong = False
    for timing in run.timings:
        if timing.preset.is_lossless and (timing.num_wrong_tokens or timing.num_wrong_logits):
            is_wrong = True
            typer.echo(
                f"NOT LOSSLESS: {timing.preset.name}: {timing.num_wrong_tokens} tokens and "
                f"{timing.num_wrong_logits} rows of logits are not plain decoding's",
                err=True,
            )
    if stopped is not None:
        raise stopped
    if is_wrong:
        raise typer.Exit(1)


def _drafter(settings: TimingSettings) -> dict[str, Any]:
    if settings.planted is not None:
        return {}
    if settings.drafter:
        return dict(settings.drafter)
    return {"method": "dflash2"} if settings.model is None else {}


def _open(settings: TimingSettings, preset: Preset, head: str, speculation: SpeculativeConfig | None) -> LLM:
    from specpilot_rs.llm import LLM

    options: dict[str, Any] = {
        "speculative_config": speculation,
        "kernels": preset.kernels,
        "weight_format": preset.weight_format,
        "head": head,
        "device": settings.device,
        "max_model_len": settings.max_model_len,
        "max_num_seqs": 1,
        "num_threads": settings.num_threads,
    }
    if settings.planted is not None:
        if settings.max_model_len is None:
            options["max_model_len"] = settings.prompt_tokens + settings.max_tokens + _ROOM_TOKENS
        return LLM.planted(settings.planted, **options)
    if settings.model is None:
        return LLM.demo(**options)
    return LLM(settings.model, revision=settings.revision, **options)


def _prompts(settings: TimingSettings) -> list[dict[str, Any]]:
    """One prompt a round; of a file's, in turn."""
    if settings.planted is not None:
        if settings.prompts:
            raise option_error("--planted makes its own prompts; leave --prompts out")
        # Every planted vocabulary has more ids than this.
        ids = np.random.default_rng(settings.seed).integers(
            2000, size=(settings.rounds, settings.prompt_tokens)
        )
        return [{"prompt_token_ids": row.tolist()} for row in ids]
    records = [prompt_of(record) for file in settings.prompts for record in read_jsonl(file)]
    if not records:
        if settings.model is not None:
            raise option_error("give --prompts FILE, JSON lines with a prompt each")
        from specpilot_rs.demo.__main__ import PROMPTS

        records = [{"prompt": text} for text in PROMPTS]
    return [records[number % len(records)] for number in range(settings.rounds)]


def _publish(
    run: TimingRun, settings: TimingSettings, files: Mapping[str, Path | None], as_json: bool
) -> None:
    plan = run.facts
    is_planted = settings.planted is not None
    facts = {
        "target": f"planted {settings.planted}" if is_planted else settings.model or "demo",
        "planted": settings.planted,
        "acceptance": "modelled" if is_planted else "measured",
        "profile": _core.planted_acceptance() if is_planted else None,
        "drafter": plan["drafter"],
        "device": plan["device"],
        "gpu": plan["gpu"],
        "num_parameters": plan["num_parameters"],
        "prompt_tokens": settings.prompt_tokens if is_planted else None,
        "max_tokens": settings.max_tokens,
    }
    report = build_timing_report(run, facts, settings.seed)
    publish(report, files, as_json, draw=draw_timing, lines=timing_lines)
