"""Commands around generating: plan, convert, inspect, precompile, models, doctor.

They look at models and machines, or write files that an engine reads later.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from specpilot_rs.cli.answers import write_json
from specpilot_rs.cli.flags import (
    BatchedTokensOption,
    ContextOption,
    DeviceOption,
    HeadOption,
    JsonOption,
    MemoryShareOption,
    RequestsOption,
    RevisionOption,
)
from specpilot_rs.options import EngineOptions, SpeculativeConfig, help_of, option_error


def plan(
    model: Annotated[str, typer.Argument(help="Target: a directory or a hub id; its config is enough.")],
    drafter: Annotated[str | None, typer.Option(help=help_of(SpeculativeConfig, "model"))] = None,
    memory: Annotated[
        str | None,
        typer.Option(help="The device's memory: 80GB, 80GiB, ...; what it has available if omitted."),
    ] = None,
    device: DeviceOption = "cpu",
    max_model_len: ContextOption = None,
    max_num_seqs: RequestsOption = EngineOptions.max_num_seqs,
    max_num_batched_tokens: BatchedTokensOption = EngineOptions.max_num_batched_tokens,
    gpu_memory_utilization: MemoryShareOption = EngineOptions.gpu_memory_utilization,
    head: HeadOption = EngineOptions.head,
    as_json: JsonOption = False,
) -> None:
    """Show what an engine would hold, as BF16, W12 and FP8, and the context that fits beside it."""
    from specpilot_rs.plan_report import plan_memory, render

    planned = plan_memory(
        model,
        drafter=drafter,
        memory=memory,
        device=device,
        options=EngineOptions(
            head=head,
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            gpu_memory_utilization=gpu_memory_utilization,
        ),
    )
    if as_json:
        write_json(planned)
    else:
        typer.echo(render(planned))
    if planned["shortfall"] is not None:
        raise option_error(planned["shortfall"])


def convert(
    model: Annotated[str, typer.Argument(help="A target or drafter in BF16: a directory or a hub id.")],
    out: Annotated[str, typer.Argument(help="The directory to write; absent or empty.")],
    weight_format: Annotated[str, typer.Option(help="Format of the linear layers: w12.")] = "w12",
    revision: RevisionOption = None,
    as_json: JsonOption = False,
) -> None:
    """Write a model in a smaller format that decodes to the same bits. A stopped run goes on where it was."""
    from specpilot_rs.convert import convert as run

    try:
        made = run(model, out, weight_format, revision=revision)
    except KeyboardInterrupt:
        place = Path(out).expanduser().resolve()
        partial = place.with_name(f"{place.name}.partial")
        if partial.exists():
            typer.echo(f"stopped; what is done is in {partial}, and the same command goes on there", err=True)
        raise
    if as_json:
        write_json(made.to_dict())
        return
    typer.echo(
        f"{out}: {made.num_w12} of {made.num_tensors} tensors in W12, {made.source_bytes:,} bytes before, "
        f"{made.bytes:,} after ({made.bytes / max(made.source_bytes, 1):.1%})"
    )
    if made.kept_bf16:
        typer.echo(f"{len(made.kept_bf16)} linear layers stay BF16, as W12 does not pay for them", err=True)
    if made.num_shards_found:
        typer.echo(f"{made.num_shards_found} shards were there from an earlier run", err=True)


def inspect(
    path: Annotated[Path, typer.Argument(help="A model directory or a safetensors file.")],
    as_json: JsonOption = False,
) -> None:
    """Show how each tensor of a checkpoint is stored: format, escapes, bits per weight, bytes."""
    from specpilot_rs.weight_report import inspect as read
    from specpilot_rs.weight_report import table

    rows = read(path)
    if as_json:
        write_json({"tensors": rows})
        return
    for line in table(rows):
        typer.echo(line)


def precompile(
    arch: Annotated[
        list[str] | None,
        typer.Option(help="sm_80, sm_90a or sm_120. Repeatable; all of them if left out."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Compile the CUDA kernels into the cache, so that the first start is quick. Needs no GPU."""
    from specpilot_rs import _core, _cuda

    _cuda.preload()
    results = _core.compile_kernels(
        arch or ["sm_80", "sm_90a", "sm_120"],
        on_progress=lambda stem, name, num_ready, num_kernels: typer.echo(
            f"{num_ready} of {num_kernels}: {stem} for {name}", err=True
        ),
    )
    if as_json:
        write_json([{key: value for key, value in result.items() if key != "log"} for result in results])
    else:
        for result in results:
            state = "was there" if result["was_cached"] else "compiled"
            typer.echo(f"{result['stem']} for {result['arch']}: {state}, {result['num_bytes']} bytes")


def models(as_json: JsonOption = False) -> None:
    """List known targets with the drafters published for them, and what of each is verified how."""
    from specpilot_rs.known_models import PAIRS, table

    if as_json:
        write_json([pair.to_dict() for pair in PAIRS])
        return
    for line in table():
        typer.echo(line)


def doctor(
    model: Annotated[
        str | None, typer.Argument(help="A model to look at as well: a directory or a hub id.")
    ] = None,
    revision: RevisionOption = None,
    as_json: JsonOption = False,
) -> None:
    """Check the environment and, given one, a model. Exit code 1 if something would fail."""
    from specpilot_rs.doctor import Level, examine

    findings = examine(model, revision)
    if as_json:
        write_json([finding.to_dict() for finding in findings])
    else:
        for finding in findings:
            line = f"{finding.level.value:<4} {finding.what}: {finding.message}"
            # Names from damaged files may hold what no terminal can show.
            typer.echo(line.encode(errors="backslashreplace").decode())
            if finding.fix:
                typer.echo(f"     fix: {finding.fix}")
    if any(finding.level is Level.FAIL for finding in findings):
        raise typer.Exit(1)
