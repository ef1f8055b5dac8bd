"""Where the command line's prompts come from: arguments, files, JSON lines and standard input.

Every failure is a `RequestError` that names the file and, of JSON lines, the line.
"""

from __future__ import annotations

import itertools
import json
import re
import sys
from pathlib import Path
from typing import Any, TextIO

from specpilot_rs.options import request_error


def read_prompts(prompt: str | None, file: Path | None, input_jsonl: Path | None) -> list[dict[str, Any]]:
    """Returns the prompts of a call, a record each: the argument, or what a file or standard input holds."""
    if sum(source is not None for source in (prompt, file, input_jsonl)) > 1:
        raise request_error("give one of PROMPT, --file and --input-jsonl")
    if prompt is not None:
        return [{"prompt": prompt}]
    if input_jsonl is not None:
        return read_jsonl(input_jsonl)
    from specpilot_rs.tokenizer import decode_utf8

    if file is not None:
        return [{"prompt": decode_utf8(read_bytes(file), str(file))}]
    if open_stdin().isatty():
        raise request_error("no prompt: give PROMPT, --file, --input-jsonl, or pipe one in")
    # What ends the last line of a pipe is no part of the prompt, as in a shell's $(...).
    return [{"prompt": re.sub(r"\r?\n\Z", "", decode_utf8(open_stdin().buffer.read(), "stdin"))}]


def open_stdin() -> TextIO:
    """Returns standard input."""
    # Python has no stdin where the caller closed it.
    if sys.stdin is None:
        raise request_error("stdin: expected an open stream, got a closed one")
    return sys.stdin


def read_jsonl(file: Path) -> list[dict[str, Any]]:
    """Returns the records of a file of JSON lines, each with a prompt."""
    from specpilot_rs.tokenizer import decode_utf8

    records = []
    for number, line in enumerate(decode_utf8(read_bytes(file), str(file)).split("\n"), start=1):
        if not line.strip():
            continue
        record = json_object(line, f"{file}, line {number}")
        if not prompt_of(record):
            raise request_error(f"{file}, line {number}: expected `prompt` or `prompt_token_ids`")
        records.append(record)
    if not records:
        raise request_error(f"{file}: holds no prompts")
    return records


def prompt_of(record: dict[str, Any]) -> dict[str, Any]:
    """Returns the prompt of a line: its text if it has one (tokens are of one tokenizer), else its tokens."""
    given = (key for key in ("prompt", "prompt_token_ids") if record.get(key) is not None)
    return {key: record[key] for key in itertools.islice(given, 1)}


def read_bytes(file: Path) -> bytes:
    """Returns the bytes of a file."""
    try:
        return file.read_bytes()
    except (OSError, ValueError) as error:  # ValueError: a null character in the name
        raise request_error(f"{file}: {getattr(error, 'strerror', None) or error}") from error


def json_object(text: str, where: str) -> dict[str, Any]:
    """Returns the JSON object that `text` holds; `where` names its place in errors."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise request_error(f"{where}: not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise request_error(f"{where}: expected a JSON object, got {type(value).__name__}")
    return value
