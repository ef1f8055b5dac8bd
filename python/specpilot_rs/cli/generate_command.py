"""`specpilot generate`: completes one prompt, or a file of prompts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from specpilot_rs.cli.answers import report, write_json
from specpilot_rs.cli.flags import (
    MAX_TOKENS,
    ContextOption,
    DemoOption,
    DeviceOption,
    DrafterOption,
    DraftLengthOption,
    DtypeOption,
    FormatOption,
    HeadOption,
    IgnoreEosOption,
    JsonOption,
    MaxTokensOption,
    MemoryShareOption,
    MethodOption,
    MinPOption,
    ModelOption,
    PlainOption,
    QPassesOption,
    RequestsOption,
    RevisionOption,
    SeedOption,
    SpeculationOption,
    StopOption,
    TemperatureOption,
    ThreadsOption,
    TokenizerOption,
    TopKOption,
    TopPOption,
    TreeNodesOption,
    TreeOption,
    open_llm,
    speculation_of,
)
from specpilot_rs.options import EngineOptions, SamplingParams, request_error
from specpilot_rs.output_file import writable, writing
from specpilot_rs.prompt_input import prompt_of, read_prompts


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
    max_tokens: MaxTokensOption = MAX_TOKENS,
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
    llm = open_llm(
        model,
        demo,
        speculation_of(
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
                write_json(
                    {"text": piece.text, "token_ids": piece.token_ids, "finish_reason": piece.finish_reason}
                )
            else:
                typer.echo(piece.text, nl=False)
            if piece.result is not None:
                report([piece.result])
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
            write_json(row)
    else:
        typer.echo(outputs[0].outputs[0].text)
    report(outputs)
