"""`LLM`: a target, perhaps a drafter, and the ways to ask them for tokens.

In: prompts as text, chat messages or token ids. Out: `RequestOutput` in input order, or pieces as they are
decoded. Every prompt and parameter is checked before the engine sees the first one; an error or Ctrl-C ends
the requests of its call and leaves the engine usable.
"""

from __future__ import annotations

import dataclasses
import inspect
import logging
import os
from collections.abc import Generator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from specpilot_rs import _cuda
from specpilot_rs._core import PLANTED_NAMES, Engine, ScoreRecord, check_target
from specpilot_rs.demo import DFLASH2_DIR, TARGET_DIR
from specpilot_rs.errors import OptionError, RequestError, SpecPilotError
from specpilot_rs.hub import model_directory
from specpilot_rs.options import (
    PLANTED_OPTIONS,
    EngineOptions,
    SamplingParams,
    SpeculativeConfig,
    refuse_unknown_options,
    shown,
    without_neutral,
)
from specpilot_rs.outputs import RequestOutput, StreamOutput
from specpilot_rs.progress_bar import ProgressBar
from specpilot_rs.prompt_reader import Prompt, PromptReader, as_list, params_for
from specpilot_rs.running import RunningRequest, RunningRequests, Submission, naming
from specpilot_rs.speculation import drafter_directory, refuse_another_drafter, with_speculation
from specpilot_rs.tokenizer import Tokenizer

Message = Mapping[str, Any]

_LOG = logging.getLogger("specpilot_rs")
_DEMO_SPECULATION: Mapping[str, Any] = MappingProxyType({"method": "dflash2"})


class LLM:
    """A model ready to generate."""

    def __init__(
        self,
        model: str | os.PathLike[str],
        *,
        tokenizer: str | os.PathLike[str] | None = None,
        skip_tokenizer_init: bool = False,
        dtype: str = EngineOptions.dtype,
        device: str = EngineOptions.device,
        weight_format: str = EngineOptions.weight_format,
        kernels: str = EngineOptions.kernels,
        head: str = EngineOptions.head,
        max_model_len: int | None = EngineOptions.max_model_len,
        max_num_seqs: int = EngineOptions.max_num_seqs,
        max_num_batched_tokens: int | None = EngineOptions.max_num_batched_tokens,
        gpu_memory_utilization: float = EngineOptions.gpu_memory_utilization,
        revision: str | None = None,
        speculative_config: Mapping[str, Any] | SpeculativeConfig | None = None,
        seed: int = EngineOptions.seed,
        profile: str | os.PathLike[str] | None = None,
        num_threads: int | None = EngineOptions.num_threads,
        **unknown: Any,
    ) -> None:
        """Loads a model.

        Args:
            model: Directory or hub id of the target.
            tokenizer: Directory or hub id of another tokenizer.
            skip_tokenizer_init: Work with token ids only; texts come back empty.
            dtype: Type of activations.
            device: "cpu", "cuda:N" for a GPU, or "auto": the first GPU if it can be used, else the CPU.
            weight_format: How the target's linear layers are held; a drafter's stay as its files are.
            kernels: What the target runs on: "lossless", or "stock" for a baseline outside the promise.
            head: How greedy tokens are found: "dense", "screened" or "auto"; the tokens are the same.
            max_model_len: Most tokens of prompt and output together.
            max_num_seqs: Most requests decoded at once.
            max_num_batched_tokens: Most rows of a pass over all requests, and so of a prompt chunk; tokens
                do not depend on it.
            gpu_memory_utilization: Share of the device's memory that the engine may take.
            revision: Revision of the target on the hub.
            speculative_config: `None` for plain decoding, else the fields of `SpeculativeConfig`.
            seed: Seed of requests that sample and bring none of their own.
            profile: A tuned profile; not in this release.
            num_threads: Worker threads on the CPU; for a GPU they load weights.
            **unknown: Other options of vLLM, accepted where they ask for nothing (`tensor_parallel_size=1`,
                `trust_remote_code=False`); all else is refused, with the nearest valid name.

        Raises:
            SpecPilotError: Of the class that says what is wrong; no engine is left behind.
        """
        known = tuple(inspect.signature(LLM.__init__).parameters)[1:-1]
        refuse_unknown_options(without_neutral(unknown, "LLM"), known, "LLM")
        if not isinstance(skip_tokenizer_init, bool):
            raise OptionError(
                f"option `skip_tokenizer_init` should be True or False, got {shown(skip_tokenizer_init)}"
            )
        if profile is not None:
            raise OptionError(
                f"option `profile` should be None (profiles are not in this release), got {profile!r}"
            )
        speculation = None if speculative_config is None else SpeculativeConfig.of(speculative_config)
        options = EngineOptions(
            dtype=dtype,
            device=device,
            weight_format=weight_format,
            kernels=kernels,
            head=head,
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            gpu_memory_utilization=gpu_memory_utilization,
            seed=seed,
            num_threads=num_threads,
        )
        drafter = drafter_directory(speculation)
        target = model_directory(model, revision)
        self._tokenizer: Tokenizer | None = None
        # A drafter has no tokenizer either, and that it is none is the better answer.
        check_target(target)
        if not skip_tokenizer_init:
            self._tokenizer = Tokenizer(target if tokenizer is None else model_directory(tokenizer))
            end = self._tokenizer.eos_token_id
            options = dataclasses.replace(options, extra_eos_token_ids=() if end is None else (end,))
        _cuda.prepare(options.device, options.kernels)
        engine_options = with_speculation(options, speculation)
        engine = Engine(model=str(target), drafter=drafter, options=engine_options)
        self._start(engine, options, speculation)

    def _start(self, engine: Engine, options: EngineOptions, speculation: SpeculativeConfig | None) -> None:
        """Takes over an opened engine; `options` are those without `speculation`."""
        self._engine, self._options = engine, options
        self._plan = engine.describe()
        self._opened = speculation and dataclasses.replace(speculation, method=self._plan["method"])
        if self._plan["drafter"] is not None:
            _LOG.info("drafter: %s", self._plan["drafter"])
        self._running = RunningRequests(self._engine)
        self._prompts = PromptReader(self._tokenizer, int(self._plan["vocab_size"]))

    @classmethod
    def demo(
        cls,
        speculative_config: Mapping[str, Any] | SpeculativeConfig | None = _DEMO_SPECULATION,
        **options: Any,
    ) -> LLM:
        """Loads the bundled pair, speculating unless told otherwise.

        Args:
            speculative_config: As for `LLM`; without `model` the bundled DFlash2 drafter is taken.
            **options: Other options of `LLM`.
        """
        if "model" in options:
            raise OptionError(
                "LLM.demo takes no `model`, it loads the bundled one; use LLM(model) for another"
            )
        if speculative_config is not None:
            config = SpeculativeConfig.of(speculative_config)
            if config.model is None and config.method != "ngram":
                if config.method not in (None, "dflash2"):
                    raise OptionError(
                        f"only a dflash2 drafter is bundled; for method {config.method!r} give `model`, "
                        "a directory or hub id of such a drafter"
                    )
                config = dataclasses.replace(config, model=str(DFLASH2_DIR))
            speculative_config = config
        return cls(TARGET_DIR, speculative_config=speculative_config, **options)

    @classmethod
    def planted(
        cls,
        name: str,
        speculative_config: Mapping[str, Any] | SpeculativeConfig | None = None,
        **options: Any,
    ) -> LLM:
        """Opens a made-up model of a published shape, to measure costs: no files, no tokenizer.

        Its drafter runs in full; what it proposes is then made right as often as
        `_core.planted_acceptance()` says, by the texts given to `add_script`.

        Args:
            name: One of `_core.PLANTED_NAMES`.
            speculative_config: As for `LLM`, without `model` and `method`.
            **options: `device`, `kernels`, `weight_format`, `head`, `max_model_len`, `max_num_seqs`,
                `max_num_batched_tokens`, `gpu_memory_utilization`, `num_threads`.
        """
        refuse_unknown_options(options, PLANTED_OPTIONS, "LLM.planted")
        if not isinstance(name, str):
            raise OptionError(
                f"option `planted` should be one of {', '.join(PLANTED_NAMES)}, got {shown(name)}"
            )
        speculation = None if speculative_config is None else SpeculativeConfig.of(speculative_config)
        if speculation is not None and (speculation.model, speculation.method) != (None, None):
            raise OptionError("a planted model comes with its drafter: give neither `model` nor `method`")
        engine_options = EngineOptions(**options)
        _cuda.prepare(engine_options.device, engine_options.kernels)
        llm = cls.__new__(cls)
        llm._tokenizer = None
        llm._start(
            Engine.planted(
                name=name,
                speculates=speculation is not None,
                options=with_speculation(engine_options, speculation),
            ),
            engine_options,
            speculation,
        )
        return llm

    def add_script(self, token_ids: Sequence[int]) -> None:
        """Tells a planted drafter a text that plain decoding gave, prompt and output.

        Raises:
            OptionError: The model is not planted.
            RequestError: It is no text of token ids.
        """
        self._engine.add_script(self._prompts.checked_ids(token_ids, "token_ids"))

    def switch_speculation(
        self,
        speculative_config: Mapping[str, Any] | SpeculativeConfig | None,
        *,
        head: str | None = None,
    ) -> None:
        """Decodes from now on with other trees and Q passes, or plainly; what is held in memory stays.

        Args:
            speculative_config: As for `LLM`; `model` and `method` are those that it was opened with. None for
                plain decoding.
            head: Another `head` than it was opened with.

        Raises:
            OptionError: While requests run, or for anything larger than what it was opened for.
        """
        speculation = None if speculative_config is None else SpeculativeConfig.of(speculative_config)
        if speculation is not None and self._opened is not None:
            refuse_another_drafter(speculation, self._opened)
        options = self._options if head is None else dataclasses.replace(self._options, head=head)
        self._engine.switch_to(
            speculates=speculation is not None, options=with_speculation(options, speculation)
        )
        self._plan = self._engine.describe()

    def describe(self) -> dict[str, Any]:
        """Returns the resolved plan: architecture, sizes, limits, drafter and tree."""
        return dict(self._plan)

    def stage_times(self) -> dict[str, Any]:
        """Returns where the time of decode steps went, as sums over steps without prompt rows.

        `num_steps`; `seconds` by stage: `between` (from a step's end to the next one's start), `draft`,
        `tree`, `q_forward`, `q_head`, `mark`, `forward`, `head`, `commit`, `context`; and `activity`, what a
        GPU was asked to do: `launches`, `replays`, `captures`, `uploads`, `read_backs`, and `waited_s`, the
        seconds in which the host only waited for it.
        """
        return self._engine.stage_times()

    def set_stage_clock(self, *, settled: bool = False) -> None:
        """Sets the times of `stage_times` to zero.

        Args:
            settled: From now on, wait for the GPU at the end of every stage. Each is then what it takes on
                its own; without, what a stage gave to the GPU is waited for by the next that reads back.

        Raises:
            OptionError: `settled` is neither True nor False.
        """
        if not isinstance(settled, bool):
            raise OptionError(f"option `settled` should be True or False, got {shown(settled)}")
        self._engine.set_stage_clock(settled)

    def get_tokenizer(self) -> Tokenizer:
        """Returns the tokenizer.

        Raises:
            OptionError: The model was opened with `skip_tokenizer_init=True`.
        """
        if self._tokenizer is None:
            raise OptionError("this LLM has no tokenizer: it was opened with skip_tokenizer_init=True")
        return self._tokenizer

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        *,
        record_logits: bool = False,
        record_rounds: bool = False,
    ) -> list[RequestOutput]:
        """Completes prompts.

        Args:
            prompts: One or several; each a text, `{"prompt": text}` or `{"prompt_token_ids": ids}`.
            sampling_params: For all prompts, or one per prompt.
            use_tqdm: Show progress on stderr if it is a terminal.
            record_logits: Keep the logits of generated positions in `RequestOutput.record`.
            record_rounds: Keep what was drafted in `RequestOutput.rounds`.

        Returns:
            Outputs in the order of the prompts.

        Raises:
            RequestError: A prompt or parameter cannot be served, and nothing was generated; or a request
                could not go on, because its logits were no numbers, which ends the whole call and drops what
                its other prompts gave. Of several prompts the message names the one.
        """
        for option, value in (("record_logits", record_logits), ("record_rounds", record_rounds)):
            if not isinstance(value, bool):
                raise RequestError(f"`{option}` should be True or False, got {shown(value)}")
        several = [prompts] if isinstance(prompts, str | Mapping) else as_list(prompts, "prompts")
        submissions = []
        for index, (prompt, params) in enumerate(
            zip(several, params_for(sampling_params, len(several)), strict=True)
        ):
            name = f"prompt {index}" if len(several) > 1 else None
            with naming(name):
                submission = self._prompts.submission(
                    prompt,
                    params,
                    name=name,
                    call_index=index,
                    record_logits=record_logits,
                    record_rounds=record_rounds,
                )
            submissions.append(submission)
        return self._run(submissions, use_tqdm)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        *,
        add_generation_prompt: bool = True,
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answers one conversation or several.

        Args:
            messages: A list of `{"role": ..., "content": ...}`, or a list of such lists.
            sampling_params: For all conversations, or one per conversation.
            use_tqdm: Show progress on stderr if it is a terminal.
            add_generation_prompt: Open the assistant's turn.
            chat_template: A named template of the checkpoint, or Jinja source.
            chat_template_kwargs: Further variables, such as `enable_thinking`.

        Returns:
            Outputs in the order of the conversations.

        Raises:
            RequestError: As for `generate`.
        """
        tokenizer = self.get_tokenizer()
        listed = as_list(messages, "messages")
        conversations: list[Any] = [listed] if not listed or isinstance(listed[0], Mapping) else listed
        submissions = []
        for index, (conversation, params) in enumerate(
            zip(conversations, params_for(sampling_params, len(conversations)), strict=True)
        ):
            name = f"conversation {index}" if len(conversations) > 1 else None
            with naming(name):
                text, token_ids = tokenizer.encode_chat(
                    conversation,
                    add_generation_prompt=add_generation_prompt,
                    chat_template=chat_template,
                    chat_template_kwargs=chat_template_kwargs,
                )
                submission = self._prompts.submission_of_tokens(
                    text, token_ids, params, name=name, call_index=index
                )
            submissions.append(submission)
        return self._run(submissions, use_tqdm)

    def stream(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None
    ) -> Generator[StreamOutput, None, None]:
        """Completes one prompt piece by piece.

        The request is checked now and starts with the first piece. Closing the iterator aborts it.

        Args:
            prompt: As for `generate`.
            sampling_params: How to decode.

        Returns:
            An iterator of pieces; the last one carries the whole output.

        Raises:
            RequestError: The prompt or a parameter cannot be served; or, from the iterator after the last
                piece, the request could not go on, because its logits were no numbers.
        """
        submission = self._prompts.submission(prompt, params_for(sampling_params, 1)[0])
        self._running.check(submission)
        return self._pieces(submission)

    def score(self, prompt_token_ids: Sequence[int]) -> ScoreRecord:
        """Returns fp32 logits, residual norms and the final recurrent state of a prompt; generates nothing.

        Args:
            prompt_token_ids: T token ids.

        Returns:
            Float32 arrays: `logits` `[T, vocabulary]`, `residual_l2` `[layers + 1, T]` (L2 norms of the
            residual stream entering layer 0 and after each layer), `final_norm_l2` `[T]`, `last_residuals`
            `[layers + 1, hidden]` at the last position, and `gdn_state` `[GDN layers, value heads, key size,
            value size]` or None.

        Raises:
            RequestError: The prompt is empty, too long, or holds an id outside the vocabulary.
        """
        submission = Submission(
            None, self._prompts.checked_ids(prompt_token_ids), SamplingParams(), None, score_only=True
        )
        [output] = self._run([submission], use_tqdm=False)
        if output.record is None:
            raise SpecPilotError("a scored prompt should leave a record, got none")
        return output.record

    def _pieces(self, submission: Submission) -> Generator[StreamOutput, None, None]:
        requests: list[RunningRequest] = []
        try:
            self._running.submit([submission], requests)
            [request] = requests
            while True:
                finished = request.finished
                piece = request.take_piece()
                if piece is not None:
                    yield piece
                if finished:
                    request.raise_failure()
                    return
                self._running.advance([request])
        finally:
            self._running.abort(requests)

    def _run(self, submissions: Sequence[Submission], use_tqdm: bool) -> list[RequestOutput]:
        requests: list[RunningRequest] = []
        try:
            self._running.submit(submissions, requests)
            with ProgressBar(requests, int(self._plan["max_model_len"]), use_tqdm) as progress:
                while not all(request.finished for request in requests):
                    self._running.advance(requests)
                    progress.update()
                    for request in requests:
                        request.raise_failure()
        finally:
            self._running.abort(requests)
        return [request.output for request in requests if request.output is not None]
