"""Decodes prompt sets with every configuration and counts what each of them accepts.

In: a way to open the target with some speculation, prompt sets, configurations. Out: counts per configuration
and prompt, in an `AcceptanceRun`: whatever interrupts it leaves the configurations that are complete. Every
configuration's tokens are compared with those of plain decoding in the same run. Prompts are decoded one at a
time, so that no row budget is shared and a tree is as large as it may be.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from specpilot_rs.bench.progress import Progress
from specpilot_rs.bench.rounds import PromptCounts
from specpilot_rs.errors import DrafterError, RequestError
from specpilot_rs.llm import LLM
from specpilot_rs.options import SamplingParams, SpeculativeConfig
from specpilot_rs.outputs import RequestOutput
from specpilot_rs.prompt_input import prompt_of, read_jsonl
from specpilot_rs.running import naming

ALL_SETS = "all"
"""What figures of all sets together are called."""


@dataclass(frozen=True)
class BenchPrompt:
    """A prompt with the name that reports give it."""

    name: str
    prompt: dict[str, Any]


@dataclass(frozen=True)
class PromptSet:
    """Prompts whose figures are added up."""

    name: str
    prompts: tuple[BenchPrompt, ...]


@dataclass(frozen=True)
class Configuration:
    """A way to speculate.

    Attributes:
        drafter: What reports call its drafter.
        speculation: What was asked for.
    """

    drafter: str
    speculation: SpeculativeConfig

    @property
    def name(self) -> str:
        """What was asked for, in short."""
        asked = self.speculation
        return configuration_name(self.drafter, asked.tree or "usual tree", asked.tree_nodes, asked.q_passes)


def configuration_name(drafter: str, tree: str, tree_nodes: int | Sequence[int] | None, q_passes: int) -> str:
    """Returns a configuration's name, such as "dflash2 conditional 32 + 1Q"."""
    sizes = [] if tree_nodes is None else [tree_nodes] if isinstance(tree_nodes, int) else tree_nodes
    words = [drafter, tree] + ["/".join(map(str, sizes))] * bool(sizes)
    return " ".join(words + ([f"+ {q_passes}Q"] if q_passes else []))


@dataclass(frozen=True)
class ConfigurationCounts:
    """What a configuration did.

    Attributes:
        configuration: As it was asked for.
        plan: What the engine made of it, as `LLM.describe()` tells.
        counts: Per prompt set, in order, the counts of each of its prompts.
    """

    configuration: Configuration
    plan: dict[str, Any]
    counts: list[list[PromptCounts]]

    @property
    def name(self) -> str:
        """Name by what the engine made of it."""
        plan = self.plan
        return configuration_name(
            self.configuration.drafter, plan["tree"], plan["tree_nodes"], plan["q_passes"]
        )


@dataclass(frozen=True)
class SkippedConfiguration:
    """A configuration that was not measured."""

    name: str
    reason: str


@dataclass(frozen=True)
class TokenMismatch:
    """An output that is not plain decoding's: the promise is broken.

    Attributes:
        configuration: Name of the configuration.
        prompt_set: The prompt's set.
        prompt: The prompt's name in it.
        index: First output token that differs.
        expected: What plain decoding has there; None if it had ended.
        got: What the configuration has there; None if it had ended.
    """

    configuration: str
    prompt_set: str
    prompt: str
    index: int
    expected: int | None
    got: int | None


@dataclass
class AcceptanceRun:
    """A run and what it has found so far.

    Attributes:
        open_llm: Opens the target with some speculation, or plainly.
        prompt_sets: What is decoded.
        configurations: What is measured, in this order.
        params: How to decode; greedily.
        as_chat: Whether texts are a user's messages, for the chat template, or prompts as they are.
        results: Complete configurations.
        skipped: Those that a drafter cannot serve, or that come to one measured before.
        mismatches: Outputs that differ from plain decoding's.
        is_complete: Whether all configurations are in one of these lists.
    """

    open_llm: Callable[[SpeculativeConfig | None], LLM]
    prompt_sets: Sequence[PromptSet]
    configurations: Sequence[Configuration]
    params: SamplingParams
    as_chat: bool = False
    progress: Progress = field(default_factory=Progress)
    results: list[ConfigurationCounts] = field(default_factory=list)
    skipped: list[SkippedConfiguration] = field(default_factory=list)
    mismatches: list[TokenMismatch] = field(default_factory=list)
    is_complete: bool = False

    @property
    def num_prompts(self) -> int:
        """Prompts in all sets."""
        return sum(len(prompt_set.prompts) for prompt_set in self.prompt_sets)

    def measure(self) -> None:
        """Measures all configurations.

        Raises:
            SpecPilotError: The target cannot be opened or a prompt not be served. What was found stays.
        """
        self.progress.start(self.num_prompts * (1 + len(self.configurations)))
        self.progress.note(f"plain decoding of {self.num_prompts} prompts")
        plain = self.plain_token_ids()
        for number, configuration in enumerate(self.configurations, start=1):
            line = self._measure(configuration, plain)
            self.progress.note(f"[{number}/{len(self.configurations)}] {line}")
        self.is_complete = True

    def plain_token_ids(self) -> list[list[list[int]]]:
        """Returns the tokens of plain decoding, per set and prompt."""
        llm = self.open_llm(None)
        for prompt_set, prompt in self._prompts():
            with naming(f"{prompt_set.name}, prompt {prompt.name}"):
                # A stream is checked when it is asked for, and decodes nothing until it is read.
                llm.stream(self._ready(llm, prompt.prompt), self.params).close()
        outputs = self._decode(llm, record_rounds=False)
        return [[output.outputs[0].token_ids for output in of_set] for of_set in outputs]

    def _measure(self, configuration: Configuration, plain: list[list[list[int]]]) -> str:
        """Measures one configuration and returns a line about it."""
        try:
            llm = self.open_llm(configuration.speculation)
        except DrafterError as error:
            return self._skip(configuration, str(error))
        plan = llm.describe()
        for earlier in self.results:
            same = ("tree", "tree_nodes", "q_passes", "num_speculative_tokens")
            if earlier.configuration.drafter == configuration.drafter and all(
                earlier.plan[key] == plan[key] for key in same
            ):
                return self._skip(configuration, f"comes to the same as {earlier.name}")
        outputs = self._decode(llm, record_rounds=True)
        counts = [[PromptCounts.of(output) for output in of_set] for of_set in outputs]
        result = ConfigurationCounts(configuration, plan, counts)
        mismatches = list(self._differences(result.name, outputs, plain))
        self.results.append(result)
        self.mismatches += mismatches
        total = PromptCounts.total([item for of_set in counts for item in of_set])
        line = f"{result.name}: {total.num_tokens} tokens in {total.num_passes} passes"
        if mismatches:
            line += f"; {len(mismatches)} OUTPUTS DIFFER FROM PLAIN DECODING"
        return line

    def _skip(self, configuration: Configuration, reason: str) -> str:
        self.skipped.append(SkippedConfiguration(configuration.name, reason))
        self.progress.advance(self.num_prompts)
        return f"{configuration.name}: skipped, {reason}"

    def _prompts(self) -> Iterator[tuple[PromptSet, BenchPrompt]]:
        for prompt_set in self.prompt_sets:
            for prompt in prompt_set.prompts:
                yield prompt_set, prompt

    def _decode(self, llm: LLM, *, record_rounds: bool) -> list[list[RequestOutput]]:
        outputs: list[list[RequestOutput]] = []
        for prompt_set in self.prompt_sets:
            outputs.append([])
            for prompt in prompt_set.prompts:
                with naming(f"{prompt_set.name}, prompt {prompt.name}"):
                    outputs[-1] += llm.generate(
                        self._ready(llm, prompt.prompt),
                        self.params,
                        use_tqdm=False,
                        record_rounds=record_rounds,
                    )
                self.progress.advance(1)
        return outputs

    def _ready(self, llm: LLM, prompt: dict[str, Any]) -> dict[str, Any]:
        if not self.as_chat or "prompt" not in prompt:
            return prompt
        _, token_ids = llm.get_tokenizer().encode_chat([{"role": "user", "content": prompt["prompt"]}])
        return {"prompt_token_ids": token_ids}

    def _differences(
        self, name: str, outputs: list[list[RequestOutput]], plain: list[list[list[int]]]
    ) -> Iterable[TokenMismatch]:
        for prompt_set, of_set, expected_of_set in zip(self.prompt_sets, outputs, plain, strict=True):
            for prompt, output, expected in zip(prompt_set.prompts, of_set, expected_of_set, strict=True):
                got = output.outputs[0].token_ids
                if got == expected:
                    continue
                pairs = enumerate(itertools.zip_longest(expected, got))
                index, (wanted, token) = next(item for item in pairs if item[1][0] != item[1][1])
                yield TokenMismatch(name, prompt_set.name, prompt.name, index, wanted, token)


def read_prompt_sets(files: Sequence[Path], limit: int | None = None) -> list[PromptSet]:
    """Reads prompt sets from JSON lines; a set's name is its file's stem.

    Args:
        files: One per set.
        limit: Most prompts of each; None for all.

    Raises:
        RequestError: A file cannot be read, holds no prompts, or has the name of another.
    """
    sets: list[PromptSet] = []
    for file in files:
        name = file.stem
        if name in (ALL_SETS, *(prompt_set.name for prompt_set in sets)):
            raise RequestError(f"{file}: a prompt set's name is its file's, and {name!r} is taken")
        records = enumerate(read_jsonl(file)[:limit], start=1)
        prompts = (
            BenchPrompt(str(record.get("id", number)), prompt_of(record)) for number, record in records
        )
        sets.append(PromptSet(name, tuple(prompts)))
    return sets
