"""The command `specpilot`: generate, chat, plan, convert, inspect, precompile, doctor, bench.

Data goes to stdout, logs and progress to stderr. An error is one line, `error: ...`, and exit code 2; Ctrl-C
is exit code 130. `--help` loads neither the extension nor numpy: commands import what they need as they run.
"""

from __future__ import annotations

import sys

try:
    import os
    from typing import Annotated

    import typer

    from specpilot_rs.bench.command import bench
    from specpilot_rs.cli.chat_command import chat
    from specpilot_rs.cli.generate_command import generate
    from specpilot_rs.cli.model_commands import convert, doctor, inspect, models, plan, precompile
except KeyboardInterrupt:  # `main`, which answers it from then on, is not there yet
    sys.exit(130)

app = typer.Typer(
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Lossless speculative decoding: the target model's own tokens, several per forward.",
)


@app.callback(invoke_without_command=True)
def _root(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    if version:
        from specpilot_rs import __version__

        typer.echo(__version__)
        raise typer.Exit
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


for command in (generate, chat, plan, convert, inspect, precompile, models, doctor, bench):
    app.command()(command)


def main() -> None:
    """Runs the command line and exits."""
    try:
        code = app(standalone_mode=False)
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:
        # The reader has left; flushing at exit would say so again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except Exception as error:
        if type(error).__name__ == "Abort":  # what click makes of Ctrl-C
            sys.exit(130)
        typer.echo(f"error: {_message_of(error)}", err=True)
        sys.exit(2)
    sys.exit(code if isinstance(code, int) else 0)


def _message_of(error: Exception) -> str:
    # Usage errors come from whichever click typer brings along, so they are known by their method.
    usage = getattr(error, "format_message", None)
    text = " ".join(str(error if usage is None else usage()).split())
    core = sys.modules.get("specpilot_rs._core")
    if usage is not None or isinstance(error, OSError) or (core and isinstance(error, core.SpecPilotError)):
        return text
    return f"{type(error).__name__}: {text}"
