"""`specpilot bench`: its options, what it prints and writes, and its exit code.

Like every command it sends data to stdout, progress to stderr, and loads nothing heavy for `--help`. A run
that Ctrl-C or an error ends early still reports the configurations that are complete, and says so.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from specpilot_rs.options import (
    METHODS,
    TREES,
    EngineOptions,
    SamplingParams,
    SpeculativeConfig,
    help_of,
    option_error,
)
from specpilot_rs.output_file import writable
from specpilot_rs.size_argument import METAVAR, parse_sizes

if TYPE_CHECKING:
    from specpilot_rs.bench.acceptance import AcceptanceRun, Configuration
    from specpilot_rs.llm import LLM

_MAX_TOKENS = 128
_USUAL_TREE_NODES = 32
_ROUNDS = 5
_PROMPT_TOKENS = 512


def bench(
    acceptance: Annotated[
        bool, typer.Option("--acceptance", help="Measure how many tokens a pass of the target gives.")
    ] = False,
    presets: Annotated[
        str | None,
        typer.Option(
            help="Time ways to decode against each other: plain, w12, plain-stock, stock, ddtree, specpilot, "
            "fitted, by commas."
        ),
    ] = None,
    ladder: Annotated[
        bool, typer.Option("--ladder", help="Time the parts of the method, each on top of those before.")
    ] = False,
    planted: Annotated[
        str | None,
        typer.Option(
            help="With --presets or --ladder: a made-up model of a published shape instead of --model, whose "
            "drafts are right as often as a stated profile says (modelled acceptance)."
        ),
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds that presets are timed for.")] = _ROUNDS,
    prompt_tokens: Annotated[
        int, typer.Option(min=1, help="Length of a planted model's prompts.")
    ] = _PROMPT_TOKENS,
    device: Annotated[str, typer.Option(help=help_of(EngineOptions, "device"))] = EngineOptions.device,
    model: Annotated[
        str | None, typer.Option("--model", "-m", help="Target: a directory or a hub id.")
    ] = None,
    demo: Annotated[bool, typer.Option("--demo", help="Use the bundled pair instead of --model.")] = False,
    drafter: Annotated[
        list[str] | None,
        typer.Option(
            "--speculative-model",
            "--drafter",
            help="Drafter: a directory, a hub id, or the name of a method without files (ngram, and dflash2 "
            "with --demo). Repeatable.",
        ),
    ] = None,
    prompts: Annotated[
        list[Path] | None,
        typer.Option(help="A prompt set: JSON lines with `prompt` or `prompt_token_ids`. Repeatable."),
    ] = None,
    chat: Annotated[
        bool, typer.Option("--chat", help="Texts are a user's messages, for the model's chat template.")
    ] = False,
    tree: Annotated[
        list[str] | None,
        typer.Option(help=help_of(SpeculativeConfig, "tree") + " Repeatable; all if left out."),
    ] = None,
    tree_nodes: Annotated[
        list[Any] | None,
        typer.Option(
            parser=parse_sizes,
            metavar=METAVAR,
            help=help_of(SpeculativeConfig, "tree_nodes") + " Repeatable.",
        ),
    ] = None,
    q_passes: Annotated[
        list[int] | None, typer.Option(help=help_of(SpeculativeConfig, "q_passes") + " Repeatable.")
    ] = None,
    num_speculative_tokens: Annotated[
        Any,
        typer.Option(
            parser=parse_sizes, metavar=METAVAR, help=help_of(SpeculativeConfig, "num_speculative_tokens")
        ),
    ] = None,
    max_tokens: Annotated[int, typer.Option(help=help_of(SamplingParams, "max_tokens"))] = _MAX_TOKENS,
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help=help_of(SamplingParams, "ignore_eos"))
    ] = False,
    limit: Annotated[
        int | None, typer.Option(min=1, help="Most prompts of each set; all if left out.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the bootstrap over prompts.")] = 0,
    weight_format: Annotated[
        str, typer.Option(help=help_of(EngineOptions, "weight_format"))
    ] = EngineOptions.weight_format,
    max_model_len: Annotated[int | None, typer.Option(help=help_of(EngineOptions, "max_model_len"))] = None,
    num_threads: Annotated[int | None, typer.Option(help=help_of(EngineOptions, "num_threads"))] = None,
    revision: Annotated[str | None, typer.Option(help="Revision of the target on the hub.")] = None,
    output: Annotated[Path | None, typer.Option(help="Write the report here, as JSON.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw the report into this PNG file.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Write JSON for programs.")] = False,
) -> None:
    """Measure what speculation gains. Exit code 1 if a token is not plain decoding's."""
    from specpilot_rs.bench.plot import require_matplotlib

    is_timed = ladder or presets is not None
    if acceptance == is_timed:
        raise option_error("give --acceptance, or --presets or --ladder: one of them is what bench measures")
    if planted is not None and not is_timed:
        raise option_error("--planted goes with --presets or --ladder: its acceptance is made, not measured")
    if [demo, model is not None, planted is not None].count(True) != 1:
        also = ", or --planted NAME" if is_timed else ""
        raise option_error(f"give --model DIRECTORY_OR_HUB_ID, or --demo for the bundled pair{also}")
    _refuse_options_of_the_other(
        "--acceptance" if acceptance else "--presets and --ladder",
        {"--rounds": rounds != _ROUNDS, "--prompt-tokens": prompt_tokens != _PROMPT_TOKENS}
        if acceptance
        else {
            "--chat": chat,
            "--tree": tree,
            "--tree-nodes": tree_nodes,
            "--q-passes": q_passes,
            "--num-speculative-tokens": num_speculative_tokens,
            "--ignore-eos": ignore_eos,
            "--limit": limit,
            "--weight-format": weight_format != EngineOptions.weight_format,
        },
    )
    if is_timed:
        from specpilot_rs.bench.timing_command import TimingSettings, measure_presets

        if len(drafter or []) > 1 or (drafter and planted):
            raise option_error("presets are timed with one drafter, and a planted model comes with its own")
        if plot is not None:
            require_matplotlib()
        timed_files = {
            kind: None if path is None else writable(path) for kind, path in (("json", output), ("png", plot))
        }
        _refuse_to_overwrite(prompts or [], timed_files)
        _find(drafter or [], demo)
        settings_of_timing = TimingSettings(
            presets=presets,
            ladder=ladder,
            planted=planted,
            model=model,
            drafter=_named(drafter[0]) if drafter else {},
            prompts=prompts or [],
            rounds=rounds,
            prompt_tokens=prompt_tokens,
            max_tokens=max_tokens,
            device=device,
            max_model_len=max_model_len,
            num_threads=num_threads,
            revision=revision,
            seed=seed,
        )
        measure_presets(settings_of_timing, timed_files, as_json)
        return
    from specpilot_rs.bench.acceptance import AcceptanceRun, read_prompt_sets

    if not prompts:
        raise option_error("give --prompts FILE, JSON lines with a prompt each")
    drafters = drafter or (["dflash2"] if demo else [])
    if not drafters:
        raise option_error("give --speculative-model DIRECTORY_OR_HUB_ID, or ngram for prompt lookup")
    configurations = _configurations(
        drafters,
        list(itertools.product(q_passes or [0], tree_nodes or [_USUAL_TREE_NODES], tree or TREES)),
        num_speculative_tokens,
    )
    files = {
        kind: None if path is None else writable(path) for kind, path in (("json", output), ("png", plot))
    }
    _refuse_to_overwrite(prompts, files)
    if plot is not None:
        require_matplotlib()

    def open_llm(speculation: SpeculativeConfig | None) -> LLM:
        from specpilot_rs.llm import LLM

        options: dict[str, Any] = {
            "speculative_config": speculation,
            "weight_format": weight_format,
            "device": device,
            "max_model_len": max_model_len,
            "num_threads": num_threads,
            "max_num_seqs": 1,
            "revision": revision,
        }
        return LLM.demo(**options) if model is None else LLM(model, **options)

    prompt_sets = read_prompt_sets(prompts, limit)
    _find(drafters, demo)
    run = AcceptanceRun(
        open_llm=open_llm,
        prompt_sets=prompt_sets,
        configurations=configurations,
        params=SamplingParams(max_tokens=max_tokens, ignore_eos=ignore_eos, detokenize=False),
        as_chat=chat,
    )
    settings = {
        "target": "demo" if model is None else model,
        "weight_format": weight_format,
        "max_tokens": max_tokens,
        "ignore_eos": ignore_eos,
        "chat": chat,
        "limit": limit,
    }
    _measure(run, settings, seed, files, as_json)


def _refuse_to_overwrite(prompts: Sequence[Path], files: Mapping[str, Path | None]) -> None:
    """Results go to files of their own."""
    taken = {path.resolve() for path in prompts}
    for path in files.values():
        if path is None or not (path.is_file() or not path.exists()):  # devices take any number of writers
            continue
        if path in taken:
            raise option_error(f"{path} is a file of prompts or of other results; write these elsewhere")
        taken.add(path)


def _has_files(drafter: str) -> bool:
    # A directory of a method's name is a drafter like any other.
    return drafter not in METHODS or os.path.isdir(drafter)


def _named(drafter: str) -> dict[str, Any]:
    """A drafter as keys of `SpeculativeConfig`."""
    return {"model" if _has_files(drafter) else "method": drafter}


def _find(drafters: Sequence[str], demo: bool) -> None:
    """Fails where a drafter is not to be had, which is better known before hours of decoding than after."""
    from specpilot_rs.hub import model_directory

    for drafter in drafters:
        if _has_files(drafter):
            model_directory(drafter)
        elif drafter != "ngram" and not (demo and drafter == "dflash2"):
            raise option_error(
                f"{drafter!r} is a method whose drafters have files; give a directory or hub id of one"
            )


def _refuse_options_of_the_other(mode: str, given: Mapping[str, Any]) -> None:
    """Refuses options that `mode` would ignore."""
    ignored = [option for option, value in given.items() if value]
    if ignored:
        raise option_error(f"{', '.join(ignored)}: no option of {mode}; leave it out")


def _configurations(
    drafters: Sequence[str],
    shapes: Sequence[tuple[int, Any, str]],
    num_speculative_tokens: Any,
) -> list[Configuration]:
    """Every drafter with every shape of trees: Q passes, nodes, policy."""
    from specpilot_rs.bench.acceptance import Configuration

    configurations = []
    for name, drafter in zip(_short_names(drafters), drafters, strict=True):
        for q_passes, tree_nodes, tree in shapes:
            speculation = SpeculativeConfig(
                **_named(drafter),
                tree=tree,
                tree_nodes=tree_nodes,
                q_passes=q_passes,
                num_speculative_tokens=num_speculative_tokens,
            )
            configurations.append(Configuration(name, speculation))
    return configurations


def _short_names(drafters: Sequence[str]) -> list[str]:
    """The last part of each name where that tells them apart."""
    if len(set(drafters)) < len(drafters):
        raise option_error(f"each drafter should be given once, got {', '.join(drafters)}")
    short = [Path(drafter).name or drafter for drafter in drafters]
    return short if len(set(short)) == len(short) else list(drafters)


def _measure(
    run: AcceptanceRun,
    settings: dict[str, Any],
    seed: int,
    files: dict[str, Path | None],
    as_json: bool,
) -> None:
    """Runs, and publishes whatever is complete when the run ends, however it does."""
    from specpilot_rs.bench.progress import StderrProgress
    from specpilot_rs.errors import SpecPilotError

    stopped: BaseException | None = None
    with StderrProgress() as progress:
        run.progress = progress
        try:
            run.measure()
        except (KeyboardInterrupt, SpecPilotError) as error:
            stopped = error
    if run.results:
        _publish(run, settings, seed, files, as_json)
    for item in run.mismatches:
        typer.echo(
            f"NOT LOSSLESS: {item.configuration}, {item.prompt_set}, prompt {item.prompt}: output token "
            f"{item.index} should be {item.expected}, got {item.got}",
            err=True,
        )
    if stopped is not None:
        num_done = len(run.results) + len(run.skipped)
        typer.echo(f"stopped after {num_done} of {len(run.configurations)} configurations", err=True)
        raise stopped
    if not run.results:
        reasons = "; ".join(f"{item.name}: {item.reason}" for item in run.skipped)
        raise option_error(f"no configuration can be measured: {reasons}")
    if run.mismatches:
        raise typer.Exit(1)


def _publish(
    run: AcceptanceRun,
    settings: dict[str, Any],
    seed: int,
    files: dict[str, Path | None],
    as_json: bool,
) -> None:
    from specpilot_rs.bench.plot import draw
    from specpilot_rs.bench.publishing import publish
    from specpilot_rs.bench.report import build_report
    from specpilot_rs.bench.table import table

    publish(build_report(run, settings, seed), files, as_json, draw=draw, lines=table)
