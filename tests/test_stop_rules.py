"""Ends of turns, beginning tokens and thinking switches of each family, by tokenizers of control tokens."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from specpilot_rs import LLM, SamplingParams
from tokenizers import Tokenizer as Model
from tokenizers import models, pre_tokenizers, processors

from .conftest import FIXTURES

WORDS = ("system", "user", "assistant", "model", "thought", "low", "high", "hello", "Strength:")


@dataclass(frozen=True)
class Family:
    """A fixture, and what its publisher calls the ids that end or begin something."""

    case: str
    # Names of the ids in generation_config.json, in its order.
    ends: tuple[str, ...]
    # What tokenizer_config.json names; it knows of one end only.
    tokenizer_end: str
    bos: str | None
    other_controls: tuple[str, ...]
    template: str
    # Variables and the prompt that they give.
    prompts: tuple[tuple[dict[str, Any], str], ...]


ROUND = "{% for m in messages %}"
QWEN = (
    ROUND + "<|im_start|> {{ m.role }} {{ m.content }} <|im_end|> {% endfor %}"
    "{% if add_generation_prompt %}<|im_start|> assistant <think>"
    "{% if enable_thinking is defined and enable_thinking is false %} </think>{% endif %}{% endif %}"
)
LLAMA = (
    "{{ bos_token }} " + ROUND + "<|start_header_id|> {{ m.role }} <|end_header_id|> {{ m.content }} "
    "<|eot_id|> {% endfor %}{% if add_generation_prompt %}"
    "<|start_header_id|> assistant <|end_header_id|>{% endif %}"
)
GEMMA = (
    "{{ bos_token }} {% if enable_thinking is defined and enable_thinking %}<|turn> system <|think|> <turn|> "
    "{% endif %}" + ROUND + "<|turn> {{ m.role }} {{ m.content }} <turn|> {% endfor %}<|turn> model"
    "{% if not enable_thinking %} <|channel> thought <channel|>{% endif %}"
)
MUSE = (
    "{{ bos_token }} <|start|> system <|message|> Strength: {{ reasoning_strength | default('high') }} "
    "<|eot|> "
    + ROUND
    + "<|start|> {{ m.role }} <|message|> {{ m.content }} <|eot|> {% endfor %}<|start|> assistant"
)
ASKED = "<|im_start|> user hello <|im_end|> <|im_start|> assistant <think>"
TURN = "<|turn> user hello <turn|> <|turn> model"
FAMILIES = (
    Family(
        "qwen3_5_wrapper",
        ("<|im_end|>", "<|endoftext|>"),
        "<|im_end|>",
        None,
        ("<|im_start|>", "<think>", "</think>"),
        QWEN,
        (
            ({}, ASKED),
            ({"enable_thinking": True}, ASKED),
            ({"enable_thinking": False}, f"{ASKED} </think>"),
        ),
    ),
    Family(
        "llama_rope_scaling",
        ("<|end_of_text|>", "<|eom_id|>", "<|eot_id|>"),
        "<|end_of_text|>",
        "<|begin_of_text|>",
        ("<|start_header_id|>", "<|end_header_id|>"),
        LLAMA,
        (
            (
                {},
                "<|begin_of_text|> <|start_header_id|> user <|end_header_id|> hello <|eot_id|> "
                "<|start_header_id|> assistant <|end_header_id|>",
            ),
        ),
    ),
    Family(
        "gemma4_unified",
        ("<eos>", "<turn|>", "<|tool_response>"),
        "<eos>",
        "<bos>",
        ("<|turn>", "<|think|>", "<|channel>", "<channel|>"),
        GEMMA,
        (
            ({}, f"<bos> {TURN} <|channel> thought <channel|>"),
            ({"enable_thinking": True}, f"<bos> <|turn> system <|think|> <turn|> {TURN}"),
        ),
    ),
    Family(
        "muse_glimmer",
        ("<|end_of_text|>", "<|eot|>"),
        "<|end_of_text|>",
        "<|begin_of_text|>",
        ("<|start|>", "<|message|>"),
        MUSE,
        tuple(
            (
                variables,
                f"<|begin_of_text|> <|start|> system <|message|> Strength: {strength} <|eot|> "
                "<|start|> user <|message|> hello <|eot|> <|start|> assistant",
            )
            for variables, strength in (({}, "high"), ({"reasoning_strength": "low"}, "low"))
        ),
    ),
)


class Checkpoint:
    """A copy of a fixture with a tokenizer."""

    def __init__(self, family: Family, directory: Path) -> None:
        self.family, self.directory = family, directory
        shutil.copytree(FIXTURES / "families" / family.case, directory)
        generation = json.loads((directory / "generation_config.json").read_text())
        self.ends = dict(zip(family.ends, generation["eos_token_id"], strict=True))
        self.ids = dict(self.ends)
        if family.bos is not None:
            self.ids[family.bos] = generation["bos_token_id"]
        free = (number for number in range(20, 150) if number not in self.ids.values())
        for name in (*family.other_controls, *WORDS, "?"):
            self.ids[name] = next(free)
        model = Model(models.WordLevel(self.ids, unk_token="?"))
        model.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        model.add_special_tokens(
            [*family.ends, *family.other_controls, *([family.bos] if family.bos else [])]
        )
        if family.bos is not None:
            start = [(family.bos, self.ids[family.bos])]
            model.post_processor = processors.TemplateProcessing(f"{family.bos} $A", special_tokens=start)
        model.save(str(directory / "tokenizer.json"))
        config = {"eos_token": family.tokenizer_end, "bos_token": family.bos}
        (directory / "tokenizer_config.json").write_text(json.dumps(config))
        (directory / "chat_template.jinja").write_text(family.template)

    def open(self) -> LLM:
        return LLM(str(self.directory), max_model_len=160)

    def encoded(self, text: str) -> list[int]:
        return [self.ids[word] for word in text.split()]


@pytest.fixture(scope="module", params=FAMILIES, ids=lambda family: family.case)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return Checkpoint(request.param, tmp_path_factory.mktemp("family") / "model")


def config_ends(directory: Path) -> set[int]:
    """Ids that config.json names, on whichever level."""
    config = json.loads((directory / "config.json").read_text())
    found: set[int] = set()
    for level in (config, config.get("text_config", {})):
        ends = level.get("eos_token_id")
        found |= set() if ends is None else {ends} if isinstance(ends, int) else set(ends)
    return found


def test_turns_end_with_what_any_file_names(checkpoint: Checkpoint, tmp_path: Path) -> None:
    named = set(checkpoint.ends.values())
    assert set(checkpoint.open().describe()["eos_token_ids"]) == named | config_ends(checkpoint.directory)
    tokenizer_end = checkpoint.ids[checkpoint.family.tokenizer_end]
    # Without the file that knows them all, the other two are left; the tokenizer's counts by its name.
    copy = Path(shutil.copytree(checkpoint.directory, tmp_path / "copy"))
    (copy / "generation_config.json").unlink()
    ends = LLM(str(copy), max_model_len=128).describe()["eos_token_ids"]
    assert set(ends) == config_ends(copy) | {tokenizer_end}
    if checkpoint.family.case == "muse_glimmer":
        assert checkpoint.ids["<|eot|>"] not in ends


def test_every_end_ends_a_request(checkpoint: Checkpoint) -> None:
    """The fixture's prompts were made so that one of its continuations holds an end."""
    llm = checkpoint.open()
    golden = json.loads((checkpoint.directory / "golden.json").read_text())
    stopped = 0
    for sequence in golden["sequences"]:
        want = sequence["fp32"]["greedy"]
        prompt = {"prompt_token_ids": sequence["input_ids"]}
        [output] = llm.generate([prompt], SamplingParams(max_tokens=48), use_tqdm=False)
        length = want["stop_len"] or 48
        assert list(output.outputs[0].token_ids) == want["ids"][:length]
        assert output.outputs[0].finish_reason == ("stop" if want["stop_len"] else "length")
        stopped += want["stop_len"] is not None
    assert stopped > 0


def test_prompts_begin_as_the_family_does(checkpoint: Checkpoint) -> None:
    tokenizer = checkpoint.open().get_tokenizer()
    family = checkpoint.family
    start = [] if family.bos is None else [checkpoint.ids[family.bos]]
    words = checkpoint.encoded("hello user")
    assert tokenizer.encode("hello user") == start + words
    if family.bos is None:
        assert tokenizer.bos_token_id is None
    else:
        assert tokenizer.encode(f"{family.bos} hello user") == start + words
        assert tokenizer.bos_token_id == checkpoint.ids[family.bos]


def test_chats_follow_the_template_and_its_switches(checkpoint: Checkpoint) -> None:
    llm = checkpoint.open()
    messages = [{"role": "user", "content": "hello"}]
    for variables, text in checkpoint.family.prompts:
        [output] = llm.chat(
            messages, SamplingParams(max_tokens=1), use_tqdm=False, chat_template_kwargs=variables
        )
        assert list(output.prompt_token_ids) == checkpoint.encoded(text), variables
