"""`specpilot chat`: a conversation over stdin and stdout, one line a turn."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

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
    JsonOption,
    MaxTokensOption,
    MemoryShareOption,
    MethodOption,
    MinPOption,
    ModelOption,
    PlainOption,
    QPassesOption,
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
from specpilot_rs.options import EngineOptions, SamplingParams
from specpilot_rs.prompt_input import json_object, open_stdin

if TYPE_CHECKING:
    from specpilot_rs.llm import LLM


def chat(
    model: ModelOption = None,
    demo: DemoOption = False,
    system: Annotated[str | None, typer.Option(help="A system message.")] = None,
    template_kwargs: Annotated[
        str, typer.Option("--chat-template-kwargs", help="Variables of the chat template, as a JSON object.")
    ] = "{}",
    as_json: JsonOption = False,
    max_tokens: MaxTokensOption = MAX_TOKENS,
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
                    write_json({"role": "assistant", "content": text, **piece.result.to_dict()})
                report([piece.result], before="" if as_json else "\n")
    except KeyboardInterrupt:
        pieces.close()
        typer.echo("\n(stopped)", err=True)
    return text
