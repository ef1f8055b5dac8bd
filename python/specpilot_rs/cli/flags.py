"""Flags that several commands share, and the `LLM` that they open.

In: what typer parsed. Out: an `LLM`, or the typed error of whatever is wrong. Importing this loads neither
the extension nor numpy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from specpilot_rs.options import EngineOptions, SamplingParams, SpeculativeConfig, help_of, request_error
from specpilot_rs.prompt_input import json_object
from specpilot_rs.size_argument import METAVAR, parse_sizes

if TYPE_CHECKING:
    from specpilot_rs.llm import LLM

ModelOption = Annotated[str | None, typer.Option("--model", "-m", help="Target: a directory or a hub id.")]
DemoOption = Annotated[bool, typer.Option("--demo", help="Use the bundled pair instead of --model.")]
TokenizerOption = Annotated[str | None, typer.Option(help="Another tokenizer: a directory or a hub id.")]
DtypeOption = Annotated[str, typer.Option(help=help_of(EngineOptions, "dtype"))]
DeviceOption = Annotated[str, typer.Option(help=help_of(EngineOptions, "device"))]
RequestsOption = Annotated[int, typer.Option(help=help_of(EngineOptions, "max_num_seqs"))]
RevisionOption = Annotated[str | None, typer.Option(help="Revision of the target on the hub.")]
DrafterOption = Annotated[
    str | None, typer.Option("--speculative-model", help=help_of(SpeculativeConfig, "model"))
]
MethodOption = Annotated[str | None, typer.Option(help=help_of(SpeculativeConfig, "method"))]
TreeOption = Annotated[str | None, typer.Option(help=help_of(SpeculativeConfig, "tree"))]
TreeNodesOption = Annotated[
    Any, typer.Option(parser=parse_sizes, metavar=METAVAR, help=help_of(SpeculativeConfig, "tree_nodes"))
]
DraftLengthOption = Annotated[
    Any,
    typer.Option(
        parser=parse_sizes, metavar=METAVAR, help=help_of(SpeculativeConfig, "num_speculative_tokens")
    ),
]
QPassesOption = Annotated[int | None, typer.Option(help=help_of(SpeculativeConfig, "q_passes"))]
SpeculationOption = Annotated[
    str | None,
    typer.Option(
        "--speculative-config",
        help="Keys of speculative_config as a JSON object, those without a flag among them.",
    ),
]
PlainOption = Annotated[bool, typer.Option("--no-speculation", help="Decode plainly.")]
ContextOption = Annotated[int | None, typer.Option(help=help_of(EngineOptions, "max_model_len"))]
BatchedTokensOption = Annotated[
    int | None, typer.Option(help=help_of(EngineOptions, "max_num_batched_tokens"))
]
FormatOption = Annotated[str, typer.Option(help=help_of(EngineOptions, "weight_format"))]
HeadOption = Annotated[str, typer.Option(help=help_of(EngineOptions, "head"))]
MemoryShareOption = Annotated[float, typer.Option(help=help_of(EngineOptions, "gpu_memory_utilization"))]
ThreadsOption = Annotated[int | None, typer.Option(help=help_of(EngineOptions, "num_threads"))]
MaxTokensOption = Annotated[int, typer.Option(help=help_of(SamplingParams, "max_tokens"))]
StopOption = Annotated[list[str] | None, typer.Option(help=help_of(SamplingParams, "stop") + " Repeatable.")]
TemperatureOption = Annotated[float, typer.Option(help=help_of(SamplingParams, "temperature"))]
TopPOption = Annotated[float, typer.Option(help=help_of(SamplingParams, "top_p"))]
TopKOption = Annotated[int, typer.Option(help=help_of(SamplingParams, "top_k"))]
MinPOption = Annotated[float, typer.Option(help=help_of(SamplingParams, "min_p"))]
SeedOption = Annotated[int | None, typer.Option(help=help_of(SamplingParams, "seed"))]
IgnoreEosOption = Annotated[bool, typer.Option("--ignore-eos", help=help_of(SamplingParams, "ignore_eos"))]
JsonOption = Annotated[bool, typer.Option("--json", help="Write JSON for programs.")]

MAX_TOKENS = 256


def open_llm(model: str | None, demo: bool, speculation: dict[str, Any] | None, **options: Any) -> LLM:
    """Opens what --model or --demo names, and says on stderr what loading proved about the weights.

    Args:
        model: --model.
        demo: --demo.
        speculation: What `speculation_of` gave.
        **options: Further options of `LLM`.

    Raises:
        SpecPilotError: Both or none are given, or loading failed.
    """
    from specpilot_rs.errors import OptionError
    from specpilot_rs.llm import LLM

    if demo and model is not None:
        raise OptionError("--demo brings its own target; leave --model out, or leave out --demo")
    if not demo and model is None:
        raise OptionError("give --model DIRECTORY_OR_HUB_ID, or --demo for the bundled pair")
    if not demo:
        assert model is not None
        llm = LLM(model, speculative_config=speculation or None, **options)
        _report_check(llm.describe()["weight_check"])
        return llm
    if options.pop("revision") is not None:
        raise OptionError("--revision applies to hub ids, not to the bundled pair")
    return LLM.demo(speculative_config=speculation, **options)


def _report_check(check: dict[str, Any] | None) -> None:
    if check is not None:
        typer.echo(
            f"weights: {check['num_tensors']} tensors, {check['num_bytes'] / 1e6:,.1f} MB, proved to be the "
            f"original bits in {check['thread_seconds']:.2f} s of thread time "
            f"({check['gb_per_thread_second']:.2f} GB/s a thread)",
            err=True,
        )


def speculation_of(flags: dict[str, Any], text: str | None, plain: bool) -> dict[str, Any] | None:
    """Returns `speculative_config` as its flags and --speculative-config say; None for plain decoding.

    Args:
        flags: Keys by name; None where the flag was left out.
        text: --speculative-config.
        plain: --no-speculation.

    Raises:
        RequestError: A key is given twice, or beside --no-speculation.
    """
    config = {} if text is None else json_object(text, "--speculative-config")
    for name, value in flags.items():
        if value is None:
            continue
        if name in config:
            raise request_error(f"`{name}` is given by its flag and in --speculative-config; give it once")
        config[name] = value
    if plain and config:
        raise request_error(f"--no-speculation does not go with {', '.join(config)}")
    return None if plain else config
