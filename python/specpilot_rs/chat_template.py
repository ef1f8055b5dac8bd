"""Chat templates: Jinja from a checkpoint, rendered in a sandbox with the globals that published ones use.

In: a template's text, messages and variables. Out: the prompt's text. The template is untrusted: it can
neither change what it is given nor reach Python's internals. Special tokens are variables (`bos_token`,
`eos_token`, ...), and whatever a template writes is the whole prompt: nobody adds tokens to it afterwards.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import Any, NoReturn

from jinja2 import Template, TemplateError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from specpilot_rs.errors import CheckpointError, RequestError
from specpilot_rs.options import nearest, shown


class GenerationBlock(Extension):
    """`{% generation %}` marks text for training; here it is only its body."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it so

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """Returns the nodes between the tags."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes `<`, `>` and `&` for HTML, which models were not trained on.
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationBlock, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


@lru_cache(maxsize=16)
def _compile(source: str) -> Template:
    return _environment().from_string(source)


@lru_cache(maxsize=16)
def _reads_parts(source: str) -> bool:
    """Whether a template walks over the parts of a message's content; others expect a text."""
    tree = _environment().parse(source)
    names = {"content"}  # of macro parameters, and of variables set to a content
    names |= {
        node.target.name
        for node in tree.find_all(nodes.Assign)
        if isinstance(node.target, nodes.Name) and _is_content(node.node, names)
    }
    return any(_is_content(loop.iter, names) for loop in tree.find_all(nodes.For))


def _is_content(node: nodes.Node | None, names: set[str]) -> bool:
    while isinstance(node, nodes.Filter):
        node = node.node
    match node:
        case nodes.Name(name=name):
            return name in names
        case nodes.Getattr(attr="content") | nodes.Getitem(arg=nodes.Const(value="content")):
            return True
    return False


def read_templates(directory: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Returns a checkpoint's templates by name; the one without a name is called "default".

    Args:
        directory: The checkpoint.
        config: Its `tokenizer_config.json`.

    Raises:
        CheckpointError: The config's entry has another form than a text or a list of named texts.
    """
    templates: dict[str, str] = {}
    entry = config.get("chat_template")
    if isinstance(entry, str):
        templates["default"] = entry
    elif isinstance(entry, list):
        for item in entry:
            if not isinstance(item, Mapping) or not {"name", "template"} <= item.keys():
                raise CheckpointError(
                    f"{directory / 'tokenizer_config.json'}: items of `chat_template` should have `name` and "
                    f"`template`, got {shown(item)}"
                )
            templates[str(item["name"])] = str(item["template"])
    elif entry is not None:
        raise CheckpointError(
            f"{directory / 'tokenizer_config.json'}: `chat_template` should be a text or a list, "
            f"got {type(entry).__name__}"
        )
    file = directory / "chat_template.jinja"
    if file.is_file():
        try:
            templates["default"] = file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise CheckpointError(f"{file}: not readable as UTF-8: {error}") from error
    return templates


def choose_template(templates: Mapping[str, str], wanted: str | None) -> str:
    """Returns a template's source: the default, one by its name, or `wanted` itself if it is Jinja.

    Raises:
        RequestError: There is no such template, or none at all.
    """
    if wanted is None:
        if "default" in templates:
            return templates["default"]
        if templates:
            raise RequestError(f"the tokenizer has no default chat template; name one of {sorted(templates)}")
        raise RequestError("the tokenizer has no chat template; pass chat_template or use generate")
    if not isinstance(wanted, str):
        raise RequestError(f"chat_template should be a template's name or Jinja source, got {shown(wanted)}")
    if wanted in templates:
        return templates[wanted]
    if "{" in wanted:
        return wanted
    names = templates or {"default": ""}
    raise RequestError(f"no chat template is named {wanted!r}: {nearest(wanted, names)}")


def render(source: str, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]) -> str:
    """Renders a conversation.

    Args:
        source: The template.
        messages: Mappings with at least `role`. A content is a text or a list of text parts; a template that
            does not walk over parts gets them as one text.
        variables: Other names that the template sees.

    Raises:
        RequestError: The messages have another form, or the template does not compile or refuses them.
    """
    if isinstance(messages, str | Mapping) or not isinstance(messages, Sequence) or not messages:
        raise RequestError("messages should be a non-empty list of {'role': ..., 'content': ...}")
    checked = []
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise RequestError(f"message {index} should be a mapping with a `role`, got {shown(message)}")
        if "content" not in message and "tool_calls" not in message:
            near = nearest("content", [str(key) for key in message])
            raise RequestError(f"message {index} has no `content` ({near})")
        content = message.get("content")
        if isinstance(content, Sequence) and not isinstance(content, str | bytes):
            parts = [_text_part(part, index, number) for number, part in enumerate(content)]
            checked.append({**message, "content": parts})
        else:
            checked.append(dict(message))
    name = f"the chat template {shown(source[:60])}"
    try:
        template = _compile(source)
        if not _reads_parts(source):
            checked = [_with_text(message) for message in checked]
    except Exception as error:  # jinja2 turns it into Python and compiles that: each stage has its own errors
        raise RequestError(f"{name} does not compile: {_cause(error)}") from error
    try:
        return template.render({**variables, "messages": checked})
    except TemplateError as error:
        raise RequestError(f"{name} refused the messages: {error}") from error
    except Exception as error:  # a template is a program and may raise whatever one does
        raise RequestError(f"{name} failed on the messages: {_cause(error)}") from error


def _text_part(part: object, index: int, number: int) -> dict[str, Any]:
    """Returns a part of a content as a mapping with a text."""
    if isinstance(part, str):
        return {"type": "text", "text": part}
    if isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str):
        return dict(part)
    raise RequestError(
        f"message {index}, part {number}: expected {{'type': 'text', 'text': ...}} (only text is read), "
        f"got {shown(part)}"
    )


def _with_text(message: dict[str, Any]) -> dict[str, Any]:
    """Returns a message with the parts of its content as one text, with line breaks between, as vLLM does."""
    content = message.get("content")
    if not isinstance(content, list):
        return message
    return {**message, "content": "\n".join(part["text"] for part in content)}


def _cause(error: Exception) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
