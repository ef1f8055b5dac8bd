"""Text to tokens and back.

In: a checkpoint directory with `tokenizer.json` (and `tokenizer_config.json` for special tokens and chat
template). Out: token ids of prompts and chats, and text that grows token by token without ever showing half a
character.

A prompt gets one beginning-of-sequence token at most: a text that already starts with it gets no second one.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as TokenizerModel

from specpilot_rs import chat_template as templates
from specpilot_rs.errors import CheckpointError, RequestError, SpecPilotError
from specpilot_rs.options import is_text, shown

_SPECIAL = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_BROKEN = "\N{REPLACEMENT CHARACTER}"


def decode_utf8(data: bytes, source: str) -> str:
    """Returns bytes read from a file or pipe as text.

    Args:
        data: The bytes.
        source: Where they come from, for the message.

    Raises:
        RequestError: They are not UTF-8.
    """
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise RequestError(
            f"{source}: expected UTF-8, got byte 0x{data[error.start]:02x} at offset {error.start}"
        ) from error


@contextmanager
def _library_errors(kind: type[SpecPilotError], what: str) -> Iterator[None]:
    """Makes errors of the tokenizers library, bare exceptions and panics, errors of a kind of ours."""
    try:
        yield
    except BaseException as error:
        # A panic derives from BaseException, and its class can only be known by name.
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise kind(f"{what}: {error}") from error


class Tokenizer:
    """The tokenizer of one checkpoint."""

    def __init__(self, directory: Path) -> None:
        """Opens a checkpoint's tokenizer.

        Args:
            directory: Where `tokenizer.json` lies.

        Raises:
            CheckpointError: The file is missing or damaged.
        """
        file = directory / "tokenizer.json"
        if not file.is_file():
            raise CheckpointError(
                f"{directory}: expected tokenizer.json, found none; pass tokenizer=DIRECTORY, or "
                "skip_tokenizer_init=True to work with token ids only"
            )
        with _library_errors(CheckpointError, f"{file}: not a tokenizer"):
            self._model = TokenizerModel.from_file(str(file))
        # Settings for training batches, which published files may carry, would cut or fill prompts.
        self._model.no_truncation()
        self._model.no_padding()
        config = _read_json(directory / "tokenizer_config.json")
        self.special_tokens = {name: text for name in _SPECIAL if (text := _token_text(config.get(name)))}
        for name, text in self.special_tokens.items():
            if not is_text(text):
                raise CheckpointError(
                    f"{directory / 'tokenizer_config.json'}: `{name}` should be valid Unicode, got {text!r}"
                )
        self.chat_templates = templates.read_templates(directory, config)

    @property
    def vocab_size(self) -> int:
        """Number of tokens, added ones included."""
        return self._model.get_vocab_size(with_added_tokens=True)

    @property
    def bos_token_id(self) -> int | None:
        """The token that opens a prompt, if the checkpoint names one."""
        return self._special_id("bos_token")

    @property
    def eos_token_id(self) -> int | None:
        """The token that the tokenizer's config names as the end; the model's own configs may name more."""
        return self._special_id("eos_token")

    def _special_id(self, name: str) -> int | None:
        text = self.special_tokens.get(name)
        return None if text is None else self._model.token_to_id(text)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Returns a text's tokens.

        Args:
            text: Any text; special tokens written out in it are recognised.
            add_special_tokens: Whether to add what the tokenizer puts around a text (a beginning token).

        Raises:
            RequestError: The text holds characters that UTF-8 cannot carry (half a surrogate pair).
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise RequestError(
                f"the prompt is not valid Unicode: {text[error.start]!r} at character {error.start}"
            ) from error
        bos = self.special_tokens.get("bos_token")
        starts_with_bos = bool(bos) and text.startswith(str(bos))
        with _library_errors(RequestError, "the tokenizer cannot encode the prompt"):
            encoding = self._model.encode(text, add_special_tokens=add_special_tokens and not starts_with_bos)
        return list(encoding.ids)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Returns the text of tokens; bytes that are no UTF-8 become U+FFFD."""
        with _library_errors(RequestError, "the tokenizer cannot decode the tokens"):
            return str(self._model.decode(list(token_ids), skip_special_tokens=skip_special_tokens))

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """Returns the prompt text of a conversation.

        Args:
            messages: Mappings with `role` and `content`.
            add_generation_prompt: Whether to open the assistant's turn.
            chat_template: A named template of the checkpoint, or Jinja source.
            chat_template_kwargs: Further variables, such as `enable_thinking`.

        Raises:
            RequestError: There is no template, or it refuses the messages.
        """
        source = templates.choose_template(self.chat_templates, chat_template)
        if not (chat_template_kwargs is None or isinstance(chat_template_kwargs, Mapping)):
            raise RequestError(f"chat_template_kwargs should be a mapping, got {shown(chat_template_kwargs)}")
        for key in chat_template_kwargs or {}:
            if not isinstance(key, str):
                raise RequestError(f"chat_template_kwargs should have names as keys, got {shown(key)}")
        variables: dict[str, Any] = {
            **self.special_tokens,
            "tools": None,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
            **(chat_template_kwargs or {}),
        }
        if "messages" in variables:
            raise RequestError("chat_template_kwargs may not replace `messages`")
        return templates.render(source, messages, variables)

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> tuple[str, list[int]]:
        """Returns text and tokens of a conversation; the options are those of `render_chat`.

        A template writes its own beginning token, so none is added.
        """
        text = self.render_chat(messages, **options)
        return text, self.encode(text, add_special_tokens=False)


class TextDecoder:
    """Text of a growing list of tokens, in pieces whose concatenation is the text of the whole.

    Tokens may end inside a character, and a decoder may treat the first token of a list differently. So each
    piece is what the newest tokens add to the text of a few tokens before them, and characters still
    incomplete are held back.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool) -> None:
        """Starts an empty text."""
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._window: list[int] = []
        self._num_context_tokens = 0
        self._num_emitted_chars = 0

    def _text(self, token_ids: Sequence[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=self._skip_special_tokens)

    def push(self, token_id: int) -> str:
        """Adds a token and returns the text that became certain, which may be empty."""
        self._window.append(token_id)
        text = self._text(self._window)
        certain = text.rstrip(_BROKEN)
        piece = certain[self._num_emitted_chars :]
        self._num_emitted_chars = max(self._num_emitted_chars, len(certain))
        if len(certain) == len(text) and not piece:
            # A special token that is left out: without this, a run of them would be decoded over and over.
            self._window.pop()
        elif len(certain) == len(text):
            # Everything is out: the tokens that were new become the context of the next ones.
            del self._window[: self._num_context_tokens]
            self._num_context_tokens = len(self._window)
            self._num_emitted_chars = len(self._text(self._window))
        return piece

    def finish(self) -> str:
        """Returns what was held back, incomplete characters as U+FFFD."""
        piece = self._text(self._window)[self._num_emitted_chars :]
        self._num_emitted_chars += len(piece)
        return piece


def _read_json(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        value = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{file}: not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{file}: expected a JSON object, got {type(value).__name__}")
    return value


def _token_text(entry: object) -> str | None:
    text = entry.get("content") if isinstance(entry, Mapping) else entry
    return text if isinstance(text, str) else None
