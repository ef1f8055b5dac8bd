"""Tokens and text: round trips, pieces without half characters, beginning tokens, chat templates."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from specpilot_rs.demo import TARGET_DIR
from specpilot_rs.errors import CheckpointError, RequestError
from specpilot_rs.tokenizer import TextDecoder, Tokenizer, decode_utf8
from tokenizers import Tokenizer as Model
from tokenizers import decoders, models, pre_tokenizers, processors

DEMO = Tokenizer(TARGET_DIR)
USER = [{"role": "user", "content": "Hi <b> & \N{GRINNING FACE}"}]


def write_tokenizer(directory: Path, model: Model | None = None, **config: Any) -> Tokenizer:
    if model is None:
        model = Model(models.WordLevel({"<s>": 0, "</s>": 1, "a": 2, "b": 3, "?": 4}, unk_token="?"))
        model.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        model.add_special_tokens(["<s>", "</s>"])
        model.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 0)])
    model.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return Tokenizer(directory)


def pieces_of(tokenizer: Tokenizer, token_ids: list[int], *, skip_special_tokens: bool = True) -> list[str]:
    decoder = TextDecoder(tokenizer, skip_special_tokens=skip_special_tokens)
    return [*(decoder.push(token) for token in token_ids), decoder.finish()]


@given(st.text(alphabet=st.characters(codec="utf-8"), max_size=60))
def test_text_survives_the_round_trip(text: str):
    token_ids = DEMO.encode(text)
    pieces = pieces_of(DEMO, token_ids, skip_special_tokens=False)
    assert DEMO.decode(token_ids, skip_special_tokens=False) == text
    assert "".join(pieces) == text
    if "\N{REPLACEMENT CHARACTER}" not in text:
        assert not any("\N{REPLACEMENT CHARACTER}" in piece for piece in pieces)


@settings(max_examples=300)
@given(st.lists(st.integers(0, DEMO.vocab_size - 1), max_size=40), st.booleans())
def test_pieces_of_any_tokens_make_the_text_of_the_whole(token_ids: list[int], skip: bool):
    assert "".join(pieces_of(DEMO, token_ids, skip_special_tokens=skip)) == DEMO.decode(
        token_ids, skip_special_tokens=skip
    )


def test_a_character_appears_when_its_last_byte_does():
    token_ids = DEMO.encode("\N{GRINNING FACE}")
    assert len(token_ids) > 1
    pieces = pieces_of(DEMO, token_ids)
    assert pieces[: len(token_ids) - 1] == [""] * (len(token_ids) - 1)
    assert pieces[len(token_ids) - 1] == "\N{GRINNING FACE}"


def test_text_before_half_a_character_is_not_held_back():
    first_byte = DEMO.encode("\N{GRINNING FACE}")[0]
    decoder = TextDecoder(DEMO, skip_special_tokens=True)
    word = DEMO.encode("hello")
    assert "".join(decoder.push(token) for token in [*word, first_byte]) == "hello"
    assert decoder.finish() == "\N{REPLACEMENT CHARACTER}"


def test_a_run_of_left_out_tokens_is_cheap():
    decoder = TextDecoder(DEMO, skip_special_tokens=True)
    assert {decoder.push(0) for _ in range(5000)} == {""}
    assert len(decoder._window) <= 1
    assert decoder.push(DEMO.encode("x")[0]) == "x"


def test_pieces_with_a_decoder_that_strips_the_first_space(tmp_path: Path):
    vocab = {f"<0x{byte:02X}>": byte for byte in range(256)}
    for token in ("<unk>", "\u2581", "h", "i", "\u2581h", "\u2581hi"):
        vocab[token] = len(vocab)
    model = Model(
        models.BPE(vocab, [("\u2581", "h"), ("\u2581h", "i")], unk_token="<unk>", byte_fallback=True)
    )
    model.pre_tokenizer = pre_tokenizers.Metaspace()
    model.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer = write_tokenizer(tmp_path, model)
    token_ids = tokenizer.encode("hi  hi \N{EURO SIGN}i h")
    assert (
        "".join(pieces_of(tokenizer, token_ids)) == tokenizer.decode(token_ids) == "hi  hi \N{EURO SIGN}i h"
    )


def test_one_beginning_token_at_most(tmp_path: Path):
    tokenizer = write_tokenizer(tmp_path, bos_token={"content": "<s>"}, eos_token="</s>")
    assert tokenizer.encode("a b") == [0, 2, 3]
    assert tokenizer.encode("<s> a b") == [0, 2, 3]
    assert tokenizer.encode("a b", add_special_tokens=False) == [2, 3]
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (0, 1)


def test_a_chat_gets_only_the_beginning_token_of_its_template(tmp_path: Path):
    template = "{{ bos_token }} {% for m in messages %}{{ m.content }} {% endfor %}"
    tokenizer = write_tokenizer(tmp_path, bos_token="<s>", chat_template=template)
    assert tokenizer.encode_chat([{"role": "user", "content": "a b"}]) == ("<s> a b ", [0, 2, 3])


def test_settings_for_training_batches_are_dropped(tmp_path: Path):
    model = Model.from_file(str(TARGET_DIR / "tokenizer.json"))
    model.enable_truncation(3)
    model.enable_padding(length=8)
    text = "one two three four five six"
    assert write_tokenizer(tmp_path, model).encode(text) == DEMO.encode(text)


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{{ messages[0].content }}", "Hi <b> & \N{GRINNING FACE}"),
        ("{{ messages[0] | tojson }}", '{"role": "user", "content": "Hi <b> & \N{GRINNING FACE}"}'),
        ("{{ {'a': [1]} | tojson(indent=1) }}", '{\n "a": [\n  1\n ]\n}'),
        ("  {% if true %}\nx\n  {% endif %}\ny", "x\ny"),
        ("{% for i in [1, 2, 3] %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", "1"),
        ("{% generation %}answer{% endgeneration %}", "answer"),
        ("{{ eos_token }}{{ bos_token is defined }}", "<|endoftext|>False"),
        ("{{ tools is none }}{{ enable_thinking }}", "Truefalse!"),
        (
            "{% set s = namespace(n=0) %}{% for i in [1, 2] %}{% set s.n = s.n + i %}{% endfor %}{{ s.n }}",
            "3",
        ),
    ],
)
def test_templates_see_what_published_ones_expect(template: str, expected: str):
    variables = {"enable_thinking": "false!"}
    assert DEMO.render_chat(USER, chat_template=template, chat_template_kwargs=variables) == expected


def test_the_clock_of_a_template():
    text = DEMO.render_chat(USER, chat_template="{{ strftime_now('%Y') }}")
    assert text.isdigit()
    assert len(text) == 4


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{% if %}", "if %}' does not compile: TemplateSyntaxError"),
        ("{{ messages.append(1) }}", "chat template"),
        ("{{ ''.__class__.__mro__ }}", "chat template"),
        ("{{ messages[0].content + 1 }}", "failed on the messages: TypeError"),
        ("{{ " + "(" * 5000 + " }}", "does not compile: RecursionError"),
        ("{{ \ud800 }}", "chat template"),
        ("{% set None = 1 %}", "does not compile"),
        ("{% for x in y recursive %}{{ loop(y) }}{% endfor %}{{ z.a }}", "UndefinedError|undefined"),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "RecursionError"),
    ],
)
def test_a_template_that_fails_is_a_request_error(template: str, message: str):
    with pytest.raises(RequestError, match=message):
        DEMO.render_chat(USER, chat_template=template)


@pytest.mark.parametrize(
    "options",
    [
        {"chat_template": 5},
        {"chat_template": b"{{ x }}"},
        {"chat_template_kwargs": "abc"},
        {"chat_template_kwargs": 5},
        {"chat_template_kwargs": {1: 2}},
        {"chat_template_kwargs": {"self": 1, "messages": 2}},
    ],
)
def test_chat_options_of_another_form_are_refused(options: dict[str, Any]):
    with pytest.raises(RequestError, match="chat_template"):
        DEMO.render_chat(USER, **options)


def test_a_template_cannot_change_the_messages():
    messages = [{"role": "user", "content": "x"}]
    with pytest.raises(RequestError):
        DEMO.render_chat(messages, chat_template="{{ messages[0].update({'content': 'y'}) }}")
    assert messages == [{"role": "user", "content": "x"}]


def test_the_demo_template():
    assert DEMO.render_chat([{"role": "user", "content": "1+1?"}]) == "Question: 1+1?\nAnswer:"
    assert (
        DEMO.render_chat([{"role": "user", "content": "1+1?"}], add_generation_prompt=False)
        == "Question: 1+1?\n"
    )


def test_named_templates(tmp_path: Path):
    named = [{"name": "default", "template": "D{{ 1 }}"}, {"name": "tool_use", "template": "T{{ 1 }}"}]
    tokenizer = write_tokenizer(tmp_path, chat_template=named)
    assert tokenizer.render_chat(USER) == "D1"
    assert tokenizer.render_chat(USER, chat_template="tool_use") == "T1"
    with pytest.raises(RequestError, match="did you mean `tool_use`"):
        tokenizer.render_chat(USER, chat_template="tool_usage")


def test_the_template_file_comes_before_the_config(tmp_path: Path):
    (tmp_path / "chat_template.jinja").write_text("file {{ 1 }}", encoding="utf-8")
    assert write_tokenizer(tmp_path, chat_template="config").render_chat(USER) == "file 1"


@pytest.mark.parametrize(
    "messages", [[], "hi", {"role": "user"}, [{"content": "x"}], [{"role": "user", "contnt": "x"}]]
)
def test_messages_of_another_form_are_refused(messages: Any):
    with pytest.raises(RequestError, match="message"):
        DEMO.render_chat(messages)


PARTS = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b<"}]}]


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages[0].content }}",
        "{% for m in messages %}{{ m['content'] | trim }}{% endfor %}",
        "{% for m in messages %}{% set text = m.content %}{{ text }}{% endfor %}",
        "{% for m in messages %}{% for line in m.content.split('x') %}{{ line }}{% endfor %}{% endfor %}",
    ],
)
def test_a_template_of_texts_gets_the_parts_of_a_content_as_one(template: str):
    """As vLLM does: the text parts, one a line."""
    assert DEMO.render_chat(PARTS, chat_template=template) == "a\nb<"
    assert PARTS[0]["content"][1] == {"type": "text", "text": "b<"}


@pytest.mark.parametrize(
    "template",
    [
        "{% for part in messages[0].content %}{{ part.text }}|{% endfor %}",
        "{% for part in messages[0]['content'] | list %}{{ part['text'] }}|{% endfor %}",
        "{% set parts = messages[0].content %}{% for part in parts %}{{ part.text }}|{% endfor %}",
        "{% macro text(content) %}{% for p in content %}{{ p.text }}|{% endfor %}{% endmacro %}"
        "{{ text(messages[0].content) }}",
    ],
)
def test_a_template_of_parts_gets_parts(template: str):
    assert DEMO.render_chat(PARTS, chat_template=template) == "a|b<|"


def test_the_demos_template_takes_parts_too():
    text = DEMO.render_chat([{"role": "user", "content": [{"type": "text", "text": "1+1?"}]}])
    assert text == "Question: 1+1?\nAnswer:"


@pytest.mark.parametrize(
    "part", [{"type": "image_url", "image_url": {"url": "x"}}, {"type": "text"}, {"text": "x"}, 5, None]
)
def test_parts_that_are_no_text_are_refused(part: Any):
    messages = [{"role": "user", "content": [{"type": "text", "text": "a"}, part]}]
    with pytest.raises(RequestError, match=r"message 0, part 1: expected .*text"):
        DEMO.render_chat(messages)


def test_no_template_is_said_plainly(tmp_path: Path):
    with pytest.raises(RequestError, match="no chat template"):
        write_tokenizer(tmp_path).render_chat(USER)


def test_a_directory_without_tokenizer_points_to_the_way_out(tmp_path: Path):
    with pytest.raises(CheckpointError, match="skip_tokenizer_init") as raised:
        Tokenizer(tmp_path)
    assert raised.value.code == "checkpoint"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tokenizer_config.json", "[" * 50000, "not valid JSON"),
        ("tokenizer_config.json", r'{"eos_token": "\ud800"}', "eos_token"),
        ("tokenizer.json", "[" * 50000, "not a tokenizer"),
        ("tokenizer.json", "{}", "not a tokenizer"),
        ("tokenizer_config.json", "{", "not valid JSON"),
        ("tokenizer_config.json", "[]", "expected a JSON object"),
        ("tokenizer_config.json", '{"chat_template": 3}', "chat_template"),
        ("tokenizer_config.json", '{"chat_template": [{"name": "x"}]}', "chat_template"),
    ],
)
def test_damaged_files_are_named(tmp_path: Path, name: str, content: str, message: str):
    write_tokenizer(tmp_path)
    (tmp_path / name).write_text(content, encoding="utf-8")
    with pytest.raises(CheckpointError, match=message) as raised:
        Tokenizer(tmp_path)
    assert name in str(raised.value)


def test_invalid_utf8_names_the_byte():
    assert decode_utf8("\N{EURO SIGN}".encode(), "x") == "\N{EURO SIGN}"
    with pytest.raises(RequestError, match=r"prompt\.txt: expected UTF-8, got byte 0xff at offset 2"):
        decode_utf8(b"ab\xff", "prompt.txt")


class PanicException(BaseException):
    """What the tokenizers library raises when its Rust code panics."""


@pytest.mark.parametrize("error", [PanicException("index out of bounds"), Exception("bad merge")])
def test_failures_of_the_library_are_typed(error: BaseException, tmp_path: Path):
    class Broken:
        def encode(self, *_: object, **__: object) -> None:
            raise error

        decode = encode

    tokenizer = write_tokenizer(tmp_path)
    tokenizer._model = Broken()  # type: ignore[assignment]
    with pytest.raises(RequestError, match=f"cannot encode the prompt: {error}"):
        tokenizer.encode("a")
    with pytest.raises(RequestError, match=f"cannot decode the tokens: {error}"):
        tokenizer.decode([2])


def test_half_a_surrogate_pair_is_refused():
    with pytest.raises(RequestError, match="not valid Unicode"):
        DEMO.encode("a\ud800")
