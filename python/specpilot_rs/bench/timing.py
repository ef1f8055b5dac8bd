"""Times presets against each other: one process, interleaved, tokens checked as it goes.

In: a way to open engines, prompts, presets. Out: a `TimingRun`: per preset and round the seconds and tokens
of a prompt, where the time of its steps went, and every token compared with plain decoding's. Round by round
all presets decode the same prompt in turn, so that a slow moment hits them all; they are warm before the
first. A run that is interrupted keeps the rounds that all presets have finished, and every wrong token.
"""

from __future__ import annotations

import itertools
import shutil
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from specpilot_rs.bench.presets import TREE_NODES, Preset, opening_config, opening_head
from specpilot_rs.bench.progress import Progress
from specpilot_rs.llm import LLM
from specpilot_rs.options import SamplingParams, SpeculativeConfig, option_error
from specpilot_rs.outputs import RequestOutput

VERIFY_ROWS = (1, 2, 4, 8, 12, 16, 20, 24, 28, 32, 40, 48, 64)
"""Rows of a pass for the table of its cost."""
MOST_CHAIN_ROWS = 16
"""Rows of the longest chains: an anchor and what a block drafts."""
VERIFY_TOKENS = 48
"""Tokens decoded for each entry of it."""
BREAKDOWN_TOKENS = 128
LOGIT_TOKENS = 24
"""Tokens whose logits are compared, all of a row, in each preset."""
CLOCK_FIELDS = ("clocks.sm", "clocks.mem", "power.draw", "temperature.gpu")


@dataclass(frozen=True)
class Sample:
    """One prompt decoded by one preset.

    Attributes:
        num_tokens: Tokens after the first, which the prompt gave.
        num_passes: Exact passes.
        num_rows: Rows that they verified, roots included.
        seconds: From the first token to the last.
        block: Which of the run's blocks it is of: presets of one block were timed in turn.
    """

    num_tokens: int
    num_passes: int
    num_rows: int
    seconds: float
    block: int


@dataclass
class PresetTiming:
    """What a preset did.

    Attributes:
        preset: As it was asked for.
        plan: What the engine made of it.
        samples: One a round and block.
        stage_times: Sums of `LLM.stage_times`, each stage on its own; None before they were taken.
        num_checked_tokens: Tokens compared with plain decoding's.
        num_wrong_tokens: Those that differed, counted to the end of the output from the first on.
        num_parted: Outputs that differed.
        num_checked_logits: Rows of logits compared bit by bit.
        num_wrong_logits: Those that differed.
    """

    preset: Preset
    plan: dict[str, Any] = field(default_factory=dict)
    samples: list[Sample] = field(default_factory=list)
    stage_times: dict[str, Any] | None = None
    num_checked_tokens: int = 0
    num_wrong_tokens: int = 0
    num_parted: int = 0
    num_checked_logits: int = 0
    num_wrong_logits: int = 0

    def check(self, got: Sequence[int], expected: Sequence[int]) -> None:
        """Compares an output with plain decoding's."""
        pairs = enumerate(itertools.zip_longest(expected, got))
        first = next((index for index, (want, token) in pairs if want != token), None)
        self.num_checked_tokens += len(expected)
        if first is not None:
            self.num_wrong_tokens += len(expected) - first
            self.num_parted += 1

    @property
    def mismatch_rate(self) -> float:
        """Share of the tokens with the same text before them that were not plain decoding's."""
        num_same = self.num_checked_tokens - self.num_wrong_tokens
        return self.num_parted / max(num_same + self.num_parted, 1)


@dataclass
class TimingRun:
    """A run and what it has found so far.

    Attributes:
        open_llm: Opens the target as a preset needs it, with a head and some speculation.
        drafter: `model` or `method` of the drafter; empty where it comes with the target.
        prompts: One a round, the first one also to warm up; token ids or texts.
        presets: What is measured, in this order; the last is compared with each other.
        max_tokens: Tokens of an output.
        is_planted: Whether drafters go by scripts.
        verify_costs: Whether to measure what a pass costs by its rows.
        timings: One per preset.
        costs: Per engine the milliseconds of a pass by its rows.
        clocks: What the GPU said before each round.
        num_whole_rounds: Rounds that every preset of their block has finished.
        is_complete: Whether all rounds are done.
        facts: What the first engine said of itself, and the first with a drafter of that.
    """

    open_llm: Callable[[Preset, str, SpeculativeConfig | None], LLM]
    drafter: dict[str, Any]
    prompts: Sequence[dict[str, Any]]
    presets: Sequence[Preset]
    max_tokens: int
    is_planted: bool
    verify_costs: bool = True
    progress: Progress = field(default_factory=Progress)
    timings: list[PresetTiming] = field(init=False)
    costs: dict[str, list[dict[str, float]]] = field(default_factory=dict)
    clocks: list[dict[str, float]] = field(default_factory=list)
    num_whole_rounds: int = 0
    is_complete: bool = False
    facts: dict[str, Any] = field(default_factory=dict)
    _llms: dict[tuple[str, str], LLM] = field(default_factory=dict)
    _plain: dict[int, list[int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Makes an empty timing for every preset."""
        self.timings = [PresetTiming(preset) for preset in self.presets]

    def measure(self) -> None:
        """Measures everything.

        Raises:
            SpecPilotError: An engine cannot be opened or a prompt not be served. What was found stays.
        """
        blocks = self._blocks()
        writes_scripts = self.is_planted and any(map(_drafts_on_stock, self.presets))
        num_timed = sum(map(len, blocks))
        self.progress.start(len(self.prompts) * (num_timed + 1 + writes_scripts))
        for block, timings in enumerate(blocks):
            self._open(timings)
            self._measure_costs([timing for timing in timings if timing.preset.is_fitted])
            self.progress.note("warm-up, and all logits of a few rows")
            self._check_logits(timings)
            for number, prompt in enumerate(self.prompts):
                clocks = gpu_clocks(self.facts["gpu_uuid"])
                samples = []
                for timing in timings:
                    # Nothing here keeps an engine that the next block closes.
                    [output] = self._generate(self._switch(timing), prompt)
                    timing.check(output.outputs[0].token_ids, self._plain[number])
                    samples.append(_sample(output, block))
                    self.progress.advance(1)
                for timing, sample in zip(timings, samples, strict=True):
                    timing.samples.append(sample)
                if clocks is not None:
                    self.clocks.append(clocks)
                self.num_whole_rounds += 1
                self.progress.note(f"round {number + 1}: {_round_line(timings)}")
            self.progress.note("times of stages")
            for timing in timings:
                if timing.stage_times is None:
                    num_tokens = min(BREAKDOWN_TOKENS, self.max_tokens)
                    timing.stage_times = self._stage_times(self._switch(timing), num_tokens)
            if self.verify_costs:
                self._measure_costs(timings)
        self.is_complete = True

    @property
    def num_rounds(self) -> int:
        """Rounds of all blocks."""
        return len(self._blocks()) * len(self.prompts)

    @property
    def timed(self) -> list[PresetTiming]:
        """Presets with at least a round."""
        return [timing for timing in self.timings if timing.samples]

    def _blocks(self) -> list[list[PresetTiming]]:
        """Presets by the engines that are open together: beside stock ones only the last's, for memory."""
        last = self.timings[-1]
        own = [timing for timing in self.timings if timing.preset.is_lossless]
        stock = [timing for timing in self.timings if not timing.preset.is_lossless]
        beside = [last] if last.preset.is_lossless else []
        return [block for block in (own, [*stock, *beside] if stock else []) if block]

    def _open(self, timings: Sequence[PresetTiming]) -> None:
        """Opens the engines of a block and closes others."""
        wanted = {timing.preset.engine for timing in timings}
        for engine in set(self._llms) - wanted:
            del self._llms[engine]
        for engine in dict.fromkeys(timing.preset.engine for timing in timings):
            if engine in self._llms:
                continue
            sharing = [timing.preset for timing in self.timings if timing.preset.engine == engine]
            speculation = opening_config(sharing, self.drafter)
            self.progress.note(f"opening {sharing[0].kernels} kernels with {engine[1]} weights")
            llm = self.open_llm(sharing[0], opening_head(sharing), speculation)
            self._llms[engine] = llm
            plan = llm.describe()
            self.facts = self.facts or plan
            # An engine for plain decoding alone has none.
            self.facts["drafter"] = self.facts["drafter"] or plan["drafter"]
            if not sharing[0].is_lossless:
                self._write_stock_scripts(llm, sharing)
        if not self._plain:
            self._decode_plainly()

    def _write_stock_scripts(self, llm: LLM, presets: Sequence[Preset]) -> None:
        """Tells a planted drafter what stock kernels say, in passes of as many rows as when timed."""
        drafting = next(filter(_drafts_on_stock, presets), None)
        if drafting is None or not self.is_planted:
            return
        llm.switch_speculation(drafting.speculative_config(self.drafter))
        for prompt in self.prompts:
            # No script goes on here yet, so drafts are wrong and no rows are saved.
            [output] = self._generate(llm, prompt)
            llm.add_script(output.prompt_token_ids + output.outputs[0].token_ids)
            self.progress.advance(1)

    def _switch(self, timing: PresetTiming) -> LLM:
        preset, llm = timing.preset, self._llms[timing.preset.engine]
        costs = self._step_costs(preset) if preset.is_fitted else None
        llm.switch_speculation(preset.speculative_config(self.drafter, costs), head=preset.head)
        timing.plan = llm.describe()
        return llm

    def _decode_plainly(self) -> None:
        """Keeps plain decoding's tokens, and tells them to planted drafters."""
        llm = next(iter(self._llms.values()))
        llm.switch_speculation(None, head="dense")
        for number, prompt in enumerate(self.prompts):
            [output] = self._generate(llm, prompt)
            self._plain[number] = output.outputs[0].token_ids
            for other in self._llms.values() if self.is_planted else ():
                other.add_script(output.prompt_token_ids + output.outputs[0].token_ids)
            self.progress.advance(1)

    def _check_logits(self, timings: Sequence[PresetTiming]) -> None:
        """Compares all logits of some rows with those of plain decoding, and so warms up."""
        own = [timing for timing in timings if timing.preset.is_lossless]
        expected = self._logits(PresetTiming(_plain_on(own[0].preset))) if own else None
        for timing in timings:
            if timing.preset.is_lossless and expected is not None:
                got = self._logits(timing)
                differ = (got.view(np.uint32) != expected.view(np.uint32)).any(axis=1)
                timing.num_checked_logits += len(differ)
                timing.num_wrong_logits += int(differ.sum())
            self._generate(self._switch(timing), self.prompts[0], max_tokens=LOGIT_TOKENS)

    def _logits(self, timing: PresetTiming) -> np.ndarray[Any, np.dtype[np.float32]]:
        num_tokens = min(LOGIT_TOKENS, self.max_tokens)
        [output] = self._generate(
            self._switch(timing), self.prompts[0], max_tokens=num_tokens, record_logits=True
        )
        return output.record.logits  # type: ignore[union-attr]

    def _step_costs(self, preset: Preset) -> list[float]:
        """Milliseconds of a step of 1, 2, ... rows; unmeasured ones cost what the next measured one does."""
        measured = {row["rows"]: row["step_ms"] for row in self.costs[" ".join(preset.engine)]}
        num_q_passes = 0 if preset.speculation is None else preset.speculation.get("q_passes", 0)
        # A Q pass and the draft before it take about what a step of its tree does.
        before = num_q_passes * measured[TREE_NODES]
        rows = range(1, max(VERIFY_ROWS) + 1)
        return [before + measured[min(item for item in measured if item >= num_rows)] for num_rows in rows]

    def _stage_times(self, llm: LLM, num_tokens: int) -> dict[str, Any]:
        llm.set_stage_clock(settled=True)
        self._generate(llm, self.prompts[0], max_tokens=num_tokens)
        times = llm.stage_times()
        llm.set_stage_clock(settled=False)
        return times

    def _measure_costs(self, timings: Sequence[PresetTiming]) -> None:
        """Measures what an exact pass costs by its rows, on each engine once."""
        for engine in dict.fromkeys(timing.preset.engine for timing in timings):
            llm, name = self._llms[engine], " ".join(engine)
            opened = [preset for preset in self.presets if preset.engine == engine]
            most = opening_config(opened, self.drafter)
            if most is None or name in self.costs:
                continue
            head = opening_head(opened)
            self.progress.note(f"cost of a pass by its rows, {name}")
            rows = []
            for num_rows in VERIFY_ROWS:
                if most.tree == "chain" and num_rows > MOST_CHAIN_ROWS:
                    break
                speculation = SpeculativeConfig(**self.drafter, tree=most.tree, tree_nodes=num_rows)
                llm.switch_speculation(None if num_rows == 1 else speculation, head=head)
                num_tokens = min(VERIFY_TOKENS, self.max_tokens)
                # Graphs are captured the first time.
                self._generate(llm, self.prompts[0], max_tokens=num_tokens)
                times = self._stage_times(llm, num_tokens)
                stage_ms = {
                    stage: 1e3 * seconds / max(times["num_steps"], 1)
                    for stage, seconds in times["seconds"].items()
                }
                entry = {
                    "rows": num_rows,
                    "forward_ms": stage_ms["forward"],
                    "head_ms": stage_ms["head"],
                    "step_ms": sum(stage_ms.values()),
                }
                rows.append(entry)
            self.costs[name] = rows

    def _generate(
        self, llm: LLM, prompt: dict[str, Any], max_tokens: int | None = None, **record: bool
    ) -> list[RequestOutput]:
        params = SamplingParams(
            max_tokens=self.max_tokens if max_tokens is None else max_tokens,
            ignore_eos=True,
            detokenize=False,
        )
        return llm.generate(prompt, params, use_tqdm=False, **record)


def _drafts_on_stock(preset: Preset) -> bool:
    return not preset.is_lossless and preset.speculation is not None


def _plain_on(preset: Preset) -> Preset:
    """Plain decoding on the engine of a preset."""
    return Preset("plain", preset.weight_format, "dense", None, "", preset.kernels)


def _sample(output: RequestOutput, block: int) -> Sample:
    metrics = output.metrics
    if metrics.num_target_passes == 0:
        raise option_error("a prompt leaves no room for a second token, so there is no decoding to time")
    return Sample(
        num_tokens=metrics.num_output_tokens - 1,
        num_passes=metrics.num_target_passes,
        num_rows=metrics.num_target_passes + metrics.num_draft_tokens,
        seconds=metrics.decode_time_s,
        block=block,
    )


def _round_line(timings: Sequence[PresetTiming]) -> str:
    last = [(timing.preset.name, timing.samples[-1]) for timing in timings]
    return ", ".join(f"{name} {sample.num_tokens / sample.seconds:.1f} tokens/s" for name, sample in last)


def gpu_clocks(gpu_uuid: str | None) -> dict[str, float] | None:
    """Returns what nvidia-smi says of a GPU now: MHz, watts, degrees.

    Args:
        gpu_uuid: Which GPU, as `LLM.describe` says; None on a CPU.

    Returns:
        Values by field; None on a CPU, and where nvidia-smi says nothing.
    """
    program = shutil.which("nvidia-smi")
    if program is None or gpu_uuid is None:
        return None
    query = [program, f"--query-gpu={','.join(CLOCK_FIELDS)}", "--format=csv,noheader,nounits"]
    query.append(f"--id={gpu_uuid}")
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=10, check=True).stdout
        values = [float(item) for item in answer.strip().split(",")]
    except (OSError, ValueError, subprocess.SubprocessError):
        return None
    return dict(zip(CLOCK_FIELDS, values, strict=True))
