"""The command `specpilot`: generate, chat, plan, convert, inspect, precompile, doctor, bench.

Data goes to stdout, logs and progress to stderr. An error is one line, `error: ...`, and exit code 2; Ctrl-C
is exit code 130. `--help` loads neither the extension nor numpy: commands import what they need as they run.
"""

from __future__ import annotations

import sys

try:
    import json
    import os
    from collections.abc import Iterator
    from pathlib import Path
    from typing import TYPE_CHECKING, Annotated, Any

    import typer

    from specpilot_rs.bench.command import bench
    from specpilot_rs.options import (
        EngineOptions,
        SamplingParams,
        SpeculativeConfig,
        help_of,
        option_error,
        request_error,
    )
    from specpilot_rs.output_file import writable, writing
    from specpilot_rs.prompt_input import json_object, open_stdin, prompt_of, read_prompts
    from specpilot_rs.size_argument import METAVAR, parse_sizes
except KeyboardInterrupt:  # `main`, which answers it from then on, is not there yet
    sys.exit(130)

if TYPE_CHECKING:
    from specpilot_rs.llm import LLM
    from specpilot_rs.outputs import RequestOutput

app = typer.Typer(
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Lossless speculative decoding: the target model's own tokens, several per forward.",
)

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

_MAX_TOKENS = 256


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


@app.command()
def generate(
    prompt: Annotated[
        str | None, typer.Argument(help="The prompt; read from stdin, up to its last line break, if omitted.")
    ] = None,
    model: ModelOption = None,
    demo: DemoOption = False,
    file: Annotated[Path | None, typer.Option(help="Read the prompt from this file, as it is.")] = None,
    input_jsonl: Annotated[
        Path | None,
        typer.Option(
            help="Read prompts from JSON lines with `prompt` or, without a text, `prompt_token_ids`; other "
            "keys are kept. Lines written by --output-jsonl will do."
        ),
    ] = None,
    output_jsonl: Annotated[Path | None, typer.Option(help="Write results here, one JSON line each.")] = None,
    as_json: JsonOption = False,
    stream: Annotated[bool, typer.Option("--stream", help="Write text as it is decoded.")] = False,
    max_tokens: MaxTokensOption = _MAX_TOKENS,
    stop: StopOption = None,
    temperature: TemperatureOption = SamplingParams.temperature,
    top_p: TopPOption = SamplingParams.top_p,
    top_k: TopKOption = SamplingParams.top_k,
    min_p: MinPOption = SamplingParams.min_p,
    seed: SeedOption = SamplingParams.seed,
    ignore_eos: IgnoreEosOption = False,
    revision: RevisionOption = None,
    speculative_model: DrafterOption = None,
    method: MethodOption = None,
    tree: TreeOption = None,
    tree_nodes: TreeNodesOption = None,
    num_speculative_tokens: DraftLengthOption = None,
    q_passes: QPassesOption = None,
    speculative_config: SpeculationOption = None,
    no_speculation: PlainOption = False,
    max_model_len: ContextOption = None,
    max_num_seqs: RequestsOption = EngineOptions.max_num_seqs,
    tokenizer: TokenizerOption = None,
    dtype: DtypeOption = EngineOptions.dtype,
    device: DeviceOption = EngineOptions.device,
    weight_format: FormatOption = EngineOptions.weight_format,
    head: HeadOption = EngineOptions.head,
    gpu_memory_utilization: MemoryShareOption = EngineOptions.gpu_memory_utilization,
    num_threads: ThreadsOption = None,
) -> None:
    """Complete a prompt, or a file of prompts."""
    records = read_prompts(prompt, file, input_jsonl)
    if stream and (input_jsonl is not None or output_jsonl is not None):
        raise request_error("--stream writes one completion to stdout; it does not go with JSONL files")
    params = SamplingParams(
        max_tokens=max_tokens,
        stop=stop,
        ignore_eos=ignore_eos,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        seed=seed,
    )
    if output_jsonl is not None:
        output_jsonl = writable(output_jsonl)
    llm = _open(
        model,
        demo,
        _speculation(
            {
                "model": speculative_model,
                "method": method,
                "tree": tree,
                "tree_nodes": tree_nodes,
                "num_speculative_tokens": num_speculative_tokens,
                "q_passes": q_passes,
            },
            speculative_config,
            no_speculation,
        ),
        revision=revision,
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        tokenizer=tokenizer,
        dtype=dtype,
        device=device,
        weight_format=weight_format,
        head=head,
        gpu_memory_utilization=gpu_memory_utilization,
        num_threads=num_threads,
    )
    prompts = [prompt_of(record) for record in records]
    if stream:
        for piece in llm.stream(prompts[0], params):
            if as_json:
                _write_json(
                    {"text": piece.text, "token_ids": piece.token_ids, "finish_reason": piece.finish_reason}
                )
            else:
                typer.echo(piece.text, nl=False)
            if piece.result is not None:
                _report([piece.result])
        if not as_json:
            typer.echo()
        return
    outputs = llm.generate(prompts, params)
    rows = [{**record, **output.to_dict()} for record, output in zip(records, outputs, strict=True)]
    if output_jsonl is not None:
        with writing(output_jsonl) as lines:
            for row in rows:
                lines.write(json.dumps(row).encode() + b"\n")
    elif as_json or input_jsonl is not None:
        for row in rows:
            _write_json(row)
    else:
        typer.echo(outputs[0].outputs[0].text)
    _report(outputs)


@app.command()
def chat(
    model: ModelOption = None,
    demo: DemoOption = False,
    system: Annotated[str | None, typer.Option(help="A system message.")] = None,
    template_kwargs: Annotated[
        str, typer.Option("--chat-template-kwargs", help="Variables of the chat template, as a JSON object.")
    ] = "{}",
    as_json: JsonOption = False,
    max_tokens: MaxTokensOption = _MAX_TOKENS,
    stop: StopOption = None,
    temperature: TemperatureOption = SamplingParams.temperature,
    top_p: TopPOption = SamplingParams.top_p,
    top_k: TopKOption = SamplingParams.top_k,
    min_p: MinPOption = SamplingParams.min_p,
    seed: SeedOption = SamplingParams.seed,
    revision: RevisionOption = None,
    speculative_model: DrafterOption = None,
    method: MethodOption = None,
    tree: TreeOption = None,
    tree_nodes: TreeNodesOption = None,
    num_speculative_tokens: DraftLengthOption = None,
    q_passes: QPassesOption = None,
    speculative_config: SpeculationOption = None,
    no_speculation: PlainOption = False,
    max_model_len: ContextOption = None,
    tokenizer: TokenizerOption = None,
    dtype: DtypeOption = EngineOptions.dtype,
    device: DeviceOption = EngineOptions.device,
    weight_format: FormatOption = EngineOptions.weight_format,
    head: HeadOption = EngineOptions.head,
    gpu_memory_utilization: MemoryShareOption = EngineOptions.gpu_memory_utilization,
    num_threads: ThreadsOption = None,
) -> None:
    """Talk to a model: one line of stdin is one turn. /reset forgets the conversation, /exit ends."""
    from specpilot_rs.errors import RequestError

    variables = json_object(template_kwargs, "--chat-template-kwargs")
    params = SamplingParams(
        max_tokens=max_tokens,
        stop=stop,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        seed=seed,
    )
    llm = _open(
        model,
        demo,
        _speculation(
            {
                "model": speculative_model,
                "method": method,
                "tree": tree,
                "tree_nodes": tree_nodes,
                "num_speculative_tokens": num_speculative_tokens,
                "q_passes": q_passes,
            },
            speculative_config,
            no_speculation,
        ),
        revision=revision,
        max_model_len=max_model_len,
        max_num_seqs=1,
        tokenizer=tokenizer,
        dtype=dtype,
        device=device,
        weight_format=weight_format,
        head=head,
        gpu_memory_utilization=gpu_memory_utilization,
        num_threads=num_threads,
    )
    opening = [] if system is None else [{"role": "system", "content": system}]
    messages = list(opening)
    interactive = open_stdin().isatty()
    for line in _turns(interactive):
        if line == "/exit":
            break
        if line == "/reset":
            messages = list(opening)
            continue
        messages.append({"role": "user", "content": line})
        try:
            answer = _answer(llm, messages, params, variables, as_json)
        except RequestError as error:
            if not interactive:
                raise
            typer.echo(f"error: {error}", err=True)
            messages.pop()
            continue
        messages.append({"role": "assistant", "content": answer})


@app.command()
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
    gpu_memory_utilization: MemoryShareOption = EngineOptions.gpu_memory_utilization,
    head: HeadOption = EngineOptions.head,
    as_json: JsonOption = False,
) -> None:
    """Show what an engine would hold, as BF16 and as W12, and the context that fits beside it."""
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
            gpu_memory_utilization=gpu_memory_utilization,
        ),
    )
    if as_json:
        _write_json(planned)
    else:
        typer.echo(render(planned))
    if planned["shortfall"] is not None:
        raise option_error(planned["shortfall"])


@app.command()
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
        _write_json(made.to_dict())
        return
    typer.echo(
        f"{out}: {made.num_w12} of {made.num_tensors} tensors in W12, {made.source_bytes:,} bytes before, "
        f"{made.bytes:,} after ({made.bytes / max(made.source_bytes, 1):.1%})"
    )
    if made.kept_bf16:
        typer.echo(f"{len(made.kept_bf16)} linear layers stay BF16, as W12 does not pay for them", err=True)
    if made.num_shards_found:
        typer.echo(f"{made.num_shards_found} shards were there from an earlier run", err=True)


@app.command()
def inspect(
    path: Annotated[Path, typer.Argument(help="A model directory or a safetensors file.")],
    as_json: JsonOption = False,
) -> None:
    """Show how each tensor of a checkpoint is stored: format, escapes, bits per weight, bytes."""
    from specpilot_rs.weight_report import inspect as read
    from specpilot_rs.weight_report import table

    rows = read(path)
    if as_json:
        _write_json({"tensors": rows})
        return
    for line in table(rows):
        typer.echo(line)


@app.command()
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
        on_progress=lambda stem, name: typer.echo(f"{stem} for {name} ...", err=True),
    )
    if as_json:
        _write_json([{key: value for key, value in result.items() if key != "log"} for result in results])
    else:
        for result in results:
            state = "was there" if result["was_cached"] else "compiled"
            typer.echo(f"{result['stem']} for {result['arch']}: {state}, {result['num_bytes']} bytes")


@app.command()
def models(as_json: JsonOption = False) -> None:
    """List known targets with the drafters published for them, and what of each is verified how."""
    from specpilot_rs.known_models import PAIRS, table

    if as_json:
        _write_json([pair.to_dict() for pair in PAIRS])
        return
    for line in table():
        typer.echo(line)


@app.command()
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
        _write_json([finding.to_dict() for finding in findings])
    else:
        for finding in findings:
            line = f"{finding.level.value:<4} {finding.what}: {finding.message}"
            # Names from damaged files may hold what no terminal can show.
            typer.echo(line.encode(errors="backslashreplace").decode())
            if finding.fix:
                typer.echo(f"     fix: {finding.fix}")
    if any(finding.level is Level.FAIL for finding in findings):
        raise typer.Exit(1)


app.command()(bench)


def _open(model: str | None, demo: bool, speculation: dict[str, Any] | None, **options: Any) -> LLM:
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


def _speculation(flags: dict[str, Any], text: str | None, plain: bool) -> dict[str, Any] | None:
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


def _turns(interactive: bool) -> Iterator[str]:
    from specpilot_rs.tokenizer import decode_utf8

    while True:
        if interactive:
            typer.echo("> ", err=True, nl=False)
        data = open_stdin().buffer.readline()
        if not data:
            return
        line = decode_utf8(data, "stdin").strip()
        if line:
            yield line


def _answer(
    llm: LLM,
    messages: list[dict[str, str]],
    params: SamplingParams,
    variables: dict[str, Any],
    as_json: bool,
) -> str:
    _, token_ids = llm.get_tokenizer().encode_chat(messages, chat_template_kwargs=variables)
    text = ""
    pieces = llm.stream({"prompt_token_ids": token_ids}, params)
    try:
        for piece in pieces:
            text += piece.text
            if not as_json:
                typer.echo(piece.text, nl=False)
            if piece.result is not None:
                if as_json:
                    _write_json({"role": "assistant", "content": text, **piece.result.to_dict()})
                _report([piece.result], before="" if as_json else "\n")
    except KeyboardInterrupt:
        pieces.close()
        typer.echo("\n(stopped)", err=True)
    return text


def _write_json(value: Any) -> None:
    # ASCII, so that no string (half a surrogate pair) and no terminal can make it fail.
    typer.echo(json.dumps(value))


def _report(outputs: list[RequestOutput], before: str = "") -> None:
    from specpilot_rs.outputs import tokens_per_pass

    num_tokens = sum(output.metrics.num_output_tokens for output in outputs)
    num_passes = sum(output.metrics.num_target_passes for output in outputs)
    # A prompt's own pass gives the first token of its output, and is not among these passes.
    num_later = sum(max(0, output.metrics.num_output_tokens - 1) for output in outputs)
    typer.echo(before, nl=False)
    typer.echo(
        f"{num_tokens} tokens, {num_later} of them in {num_passes} target passes after those of prompts "
        f"({tokens_per_pass(outputs):.2f} per pass)",
        err=True,
    )


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


if __name__ == "__main__":
    main()
