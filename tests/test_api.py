"""The Python API on the demo pair: same tokens as plain decoding, exact stops, order, streams, metrics."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import shutil
import struct
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from specpilot_rs import LLM, RequestOutput, SamplingParams, SpecPilotError
from specpilot_rs.demo import DFLASH2_DIR, TARGET_DIR
from specpilot_rs.errors import OptionError, RequestError
from specpilot_rs.options import EngineOptions

PROMPTS = [
    "def add(a, b):\n    ",
    "Question: Tom has 12 boxes with 8 apples each. How many apples are there?\nAnswer:",
    "Once upon a time there was",
    "import os\n\n\nclass Reader:\n",
    "The",
]
LONG = SamplingParams(max_tokens=48, ignore_eos=True)


def ids(outputs: list[RequestOutput]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


@pytest.fixture(scope="module")
def plain_outputs(plain_llm: LLM) -> list[RequestOutput]:
    """What each prompt gives alone and without speculation."""
    return [plain_llm.generate(prompt, LONG)[0] for prompt in PROMPTS]


def test_speculation_changes_no_token_and_saves_passes(demo_llm: LLM, plain_outputs: list[RequestOutput]):
    outputs = demo_llm.generate(PROMPTS, LONG)
    assert ids(outputs) == ids(plain_outputs)
    assert [output.outputs[0].text for output in outputs] == [o.outputs[0].text for o in plain_outputs]
    passes = sum(output.metrics.num_target_passes for output in outputs)
    assert passes * 2 < sum(output.metrics.num_target_passes for output in plain_outputs)


def test_the_bundled_pair_needs_few_passes(
    demo_llm: LLM, golden_cases: list[dict[str, Any]], report: Callable[[str], None]
):
    """With its default speculation, at least 3.5 times fewer passes than tokens."""
    prompts = [case["prompt"] for case in golden_cases]
    outputs = demo_llm.generate(prompts, SamplingParams(max_tokens=96, ignore_eos=True))
    num_tokens = sum(len(tokens) for tokens in ids(outputs))
    num_passes = sum(output.metrics.num_target_passes for output in outputs)
    assert num_tokens == 96 * len(prompts)
    report(f"bundled pair, default tree: {num_tokens} tokens in {num_passes} target passes")
    assert num_tokens >= 3.5 * num_passes


def test_golden_continuations(demo_llm: LLM, golden_cases: list[dict[str, Any]]):
    sure = [case for case in golden_cases if case["min_top2_gap"] > 1e-3]
    assert sure
    outputs = demo_llm.generate(
        [case["prompt"] for case in sure], SamplingParams(max_tokens=96, ignore_eos=True)
    )
    assert [output.prompt_token_ids for output in outputs] == [case["prompt_ids"] for case in sure]
    assert ids(outputs) == [case["greedy_ids"] for case in sure]


def test_outputs_come_in_the_order_of_the_prompts(plain_outputs: list[RequestOutput]):
    llm = LLM.demo(max_num_seqs=2)
    lengths = [48, 3, 20, 1, 7]
    outputs = llm.generate(PROMPTS, [SamplingParams(max_tokens=n, ignore_eos=True) for n in lengths])
    assert [output.prompt for output in outputs] == PROMPTS
    assert ids(outputs) == [tokens[:n] for tokens, n in zip(ids(plain_outputs), lengths, strict=True)]
    assert {output.outputs[0].finish_reason for output in outputs} == {"length"}


def test_forms_of_prompts(demo_llm: LLM):
    token_ids = demo_llm.get_tokenizer().encode(PROMPTS[0])
    forms: list[Any] = [PROMPTS[0], {"prompt": PROMPTS[0]}, {"prompt_token_ids": token_ids}]
    forms.append({"prompt_token_ids": np.array(token_ids)})
    outputs = demo_llm.generate(forms, SamplingParams(max_tokens=8))
    assert len({tuple(tokens) for tokens in ids(outputs)}) == 1
    assert [output.prompt for output in outputs] == [PROMPTS[0], PROMPTS[0], None, None]
    assert demo_llm.generate([]) == []
    assert len(demo_llm.generate(PROMPTS[0])[0].outputs[0].token_ids) <= 16


def stop_in(llm: LLM, output: RequestOutput) -> tuple[str, int, str]:
    """A stop string that spans two tokens, the number of tokens that complete it, and the text before it."""
    tokens, tokenizer = output.outputs[0].token_ids, llm.get_tokenizer()
    text = output.outputs[0].text
    middle = len(tokenizer.decode(tokens[:20]))
    stop = text[middle - 2 : middle + 2]
    start = text.index(stop)
    needed = next(n for n in range(1, len(tokens) + 1) if stop in tokenizer.decode(tokens[:n]))
    return stop, needed, text[:start]


@pytest.mark.parametrize("include", [False, True])
def test_a_stop_string_cuts_at_its_last_token(
    demo_llm: LLM, plain_llm: LLM, plain_outputs: list[RequestOutput], include: bool
):
    for index, reference in enumerate(plain_outputs):
        stop, needed, before = stop_in(plain_llm, reference)
        params = SamplingParams(
            max_tokens=48, ignore_eos=True, stop=["\0never\0", stop], include_stop_str_in_output=include
        )
        for llm in (plain_llm, demo_llm):
            completion = llm.generate(PROMPTS[index], params)[0].outputs[0]
            assert completion.token_ids == reference.outputs[0].token_ids[:needed]
            assert completion.text == before + (stop if include else "")
            assert (completion.finish_reason, completion.stop_reason) == ("stop", stop)


def test_min_tokens_puts_a_stop_string_off(demo_llm: LLM, plain_llm: LLM, plain_outputs: list[RequestOutput]):
    stop, needed, _ = stop_in(plain_llm, plain_outputs[0])
    params = SamplingParams(max_tokens=48, ignore_eos=True, stop=stop, min_tokens=needed)
    results = [llm.generate(PROMPTS[0], params)[0].outputs[0] for llm in (plain_llm, demo_llm)]
    assert results[0].token_ids == results[1].token_ids
    assert len(results[0].token_ids) > needed


def test_a_stop_token_ends_the_output(demo_llm: LLM, plain_outputs: list[RequestOutput]):
    tokens = plain_outputs[0].outputs[0].token_ids
    stop = tokens[17]
    first = tokens.index(stop)
    output = demo_llm.generate(
        PROMPTS[0], SamplingParams(max_tokens=48, ignore_eos=True, stop_token_ids=[stop])
    )[0]
    completion = output.outputs[0]
    assert completion.token_ids == tokens[: first + 1]
    assert (completion.finish_reason, completion.stop_reason) == ("stop", stop)
    assert completion.text == demo_llm.get_tokenizer().decode(tokens[:first])
    assert output.finished
    kept = SamplingParams(
        max_tokens=48, ignore_eos=True, stop_token_ids=[stop], include_stop_str_in_output=True
    )
    output = demo_llm.generate(PROMPTS[0], kept)[0]
    assert output.outputs[0].token_ids == completion.token_ids
    assert output.outputs[0].text == demo_llm.get_tokenizer().decode(tokens[: first + 1]) != completion.text


def test_the_end_token_ends_the_output(demo_llm: LLM, plain_llm: LLM, golden_cases: list[dict[str, Any]]):
    case = next(case for case in golden_cases if 0 in case["greedy_ids"] and case["min_top2_gap"] > 1e-4)
    length = case["greedy_ids"].index(0) + 1
    for llm in (plain_llm, demo_llm):
        completion = llm.generate(case["prompt"], SamplingParams(max_tokens=96))[0].outputs[0]
        assert completion.token_ids == case["greedy_ids"][:length]
        assert (completion.finish_reason, completion.stop_reason) == ("stop", None)
        assert completion.text == llm.get_tokenizer().decode(case["greedy_ids"][: length - 1])


def test_the_tokenizers_end_token_ends_the_output_too(tmp_path: Path, plain_outputs: list[RequestOutput]):
    """Only `tokenizer_config.json` names it: the model's own configs keep theirs."""
    tokens = plain_outputs[0].outputs[0].token_ids
    directory = Path(shutil.copytree(TARGET_DIR, tmp_path / "target"))
    file = directory / "tokenizer_config.json"
    vocab = json.loads((directory / "tokenizer.json").read_bytes())["model"]["vocab"]
    [name] = [name for name, token in vocab.items() if token == tokens[17]]
    file.write_text(json.dumps({**json.loads(file.read_bytes()), "eos_token": name}), encoding="utf-8")
    for config in (None, {"model": str(DFLASH2_DIR)}):
        llm = LLM(directory, speculative_config=config)
        assert llm.describe()["eos_token_ids"] == [0, tokens[17]]
        output = llm.generate(PROMPTS[0], SamplingParams(max_tokens=48))[0]
        completion = output.outputs[0]
        assert completion.token_ids == tokens[: tokens.index(tokens[17]) + 1]
        assert (completion.finish_reason, completion.stop_reason) == ("stop", None)
        unheeded = llm.generate(PROMPTS[0], LONG)
        assert ids(unheeded) == ids(plain_outputs[:1])
    assert LLM(directory, skip_tokenizer_init=True).describe()["eos_token_ids"] == [0]


def test_no_limit_of_tokens_goes_to_the_context_limit():
    llm = LLM.demo(max_model_len=64)
    output = llm.generate(PROMPTS[0], SamplingParams(max_tokens=None, ignore_eos=True))[0]
    assert output.outputs[0].finish_reason == "length"
    assert len(output.prompt_token_ids) + len(output.outputs[0].token_ids) == 64
    # However many tokens are asked for at least, the context has its end.
    for min_tokens in (1, 60, 1000):
        params = SamplingParams(max_tokens=None, min_tokens=min_tokens, ignore_eos=True)
        assert ids(llm.generate(PROMPTS[0], params)) == ids([output])
    with pytest.raises(RequestError, match="64"):
        llm.generate({"prompt_token_ids": [5] * 64}, SamplingParams(max_tokens=None))
    last = llm.generate({"prompt_token_ids": [5] * 63}, SamplingParams(max_tokens=None))[0]
    assert len(last.outputs[0].token_ids) == 1


def test_a_stream_adds_up_to_the_output(demo_llm: LLM, plain_outputs: list[RequestOutput]):
    reference = plain_outputs[2].outputs[0]
    pieces = list(demo_llm.stream(PROMPTS[2], LONG))
    assert len(pieces) > 3
    assert "".join(piece.text for piece in pieces) == reference.text
    assert [token for piece in pieces for token in piece.token_ids] == reference.token_ids
    assert [piece.result is not None for piece in pieces] == [False] * (len(pieces) - 1) + [True]
    assert pieces[-1].finish_reason == "length"
    assert pieces[-1].result is not None
    assert pieces[-1].result.finished


def test_a_stream_never_shows_a_part_of_a_stop_string(demo_llm: LLM, plain_outputs: list[RequestOutput]):
    stop, needed, before = stop_in(demo_llm, plain_outputs[0])
    pieces = list(demo_llm.stream(PROMPTS[0], SamplingParams(max_tokens=48, ignore_eos=True, stop=stop)))
    assert "".join(piece.text for piece in pieces) == before
    assert sum(len(piece.token_ids) for piece in pieces) == needed
    assert pieces[-1].finish_reason == "stop"


def test_closing_a_stream_aborts_it(demo_llm: LLM, plain_outputs: list[RequestOutput]):
    stream = demo_llm.stream(PROMPTS[0], SamplingParams(max_tokens=2000, ignore_eos=True))
    next(stream)
    assert demo_llm._engine.has_unfinished()
    [request] = demo_llm._running._by_id.values()
    stream.close()
    assert not demo_llm._engine.has_unfinished()
    assert request.output is not None
    assert (request.output.finished, request.output.outputs[0].finish_reason) == (False, "abort")
    assert ids(demo_llm.generate(PROMPTS[:1], LONG)) == ids(plain_outputs[:1])


def test_streams_and_batches_share_one_engine(demo_llm: LLM, plain_outputs: list[RequestOutput]):
    streams = [demo_llm.stream(prompt, LONG) for prompt in PROMPTS[:2]]
    seen: list[list[int]] = [list(next(stream).token_ids) for stream in streams]
    assert ids(demo_llm.generate(PROMPTS[2:], LONG)) == ids(plain_outputs[2:])
    for tokens, stream in zip(seen, streams, strict=True):
        tokens += [token for piece in stream for token in piece.token_ids]
    assert seen == ids(plain_outputs[:2])


def test_threads_share_one_engine(demo_llm: LLM, plain_outputs: list[RequestOutput]):
    results: dict[int, list[list[int]]] = {}

    def work(index: int) -> None:
        results[index] = ids(demo_llm.generate(PROMPTS[index : index + 1], LONG))

    threads = [threading.Thread(target=work, args=(index,)) for index in range(len(PROMPTS))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=300)
    assert [results[index][0] for index in range(len(PROMPTS))] == ids(plain_outputs)


def test_other_threads_run_while_the_engine_works(demo_llm: LLM):
    tokens = demo_llm.get_tokenizer().encode("word " * 1500)[:1500]
    ticks: list[float] = []
    done = threading.Event()

    def tick() -> None:
        while not done.wait(0.002):
            ticks.append(time.perf_counter())

    thread = threading.Thread(target=tick)
    thread.start()
    start = time.perf_counter()
    demo_llm.score(tokens)
    end = time.perf_counter()
    done.set()
    thread.join()
    inside = [moment for moment in ticks if start < moment < end]
    assert len(inside) > (end - start) / 0.002 / 20


def test_ctrl_c_leaves_the_engine_usable():
    code = """
import os, signal, threading
from specpilot_rs import LLM, SamplingParams

llm = LLM.demo()
short = SamplingParams(max_tokens=24, ignore_eos=True)
before = llm.generate("The", short)[0].outputs[0].token_ids
# A shell that starts this in the background has SIGINT ignored, which children inherit.
signal.signal(signal.SIGINT, signal.default_int_handler)
threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
try:
    while True:
        llm.generate(["The", "def f"], SamplingParams(max_tokens=2000, ignore_eos=True))
except KeyboardInterrupt:
    print("stopped")
assert not llm._engine.has_unfinished()
assert llm.generate("The", short)[0].outputs[0].token_ids == before
print("usable")
"""
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False
    )
    assert (result.stdout, result.stderr) == ("stopped\nusable\n", "")


def test_one_bad_prompt_in_a_batch_leaves_nothing_behind(demo_llm: LLM, plain_outputs: list[RequestOutput]):
    with pytest.raises(RequestError, match="empty"):
        demo_llm.generate([PROMPTS[0], "", PROMPTS[1]], LONG)
    assert not demo_llm._engine.has_unfinished()
    assert ids(demo_llm.generate(PROMPTS[:1], LONG)) == ids(plain_outputs[:1])


def test_errors_name_the_one_of_several(demo_llm: LLM):
    long: Any = {"prompt_token_ids": [5] * 5000}
    with pytest.raises(RequestError, match=r"^prompt 2: .*5000"):
        demo_llm.generate(["a", "b", long])
    with pytest.raises(RequestError, match=r"^prompt 1: .*got int"):
        demo_llm.generate(["a", 5])  # type: ignore[list-item]
    vocab_size = demo_llm.describe()["vocab_size"]
    params = [SamplingParams(), SamplingParams(stop_token_ids=[vocab_size])]
    with pytest.raises(RequestError, match=r"^prompt 1: .*stop_token_ids"):
        demo_llm.generate(["a", "b"], params)
    for alone in (5, [5], long, [long]):
        with pytest.raises(RequestError) as raised:
            demo_llm.generate(alone)  # type: ignore[arg-type]
        assert not str(raised.value).startswith("prompt 0")
    turn = {"role": "user", "content": "x"}
    with pytest.raises(RequestError, match=r"^conversation 1: message 0 has no `content`"):
        demo_llm.chat([[turn], [{"role": "user"}]])
    assert not demo_llm._engine.has_unfinished()


def test_a_stream_is_checked_when_it_is_asked_for(demo_llm: LLM):
    vocab_size = int(demo_llm.describe()["vocab_size"])
    every = list(range(vocab_size))
    for prompt, params, part in (
        ("", SamplingParams(), "empty"),
        ({"prompt_token_ids": [5] * 5000}, SamplingParams(), "5000"),
        ({"prompt_token_ids": [vocab_size]}, SamplingParams(), "outside the vocabulary"),
        ("x", SamplingParams(stop_token_ids=[vocab_size]), "stop_token_ids"),
        ("x", SamplingParams(stop_token_ids=every, min_tokens=1), "min_tokens"),
    ):
        with pytest.raises(RequestError, match=part):
            demo_llm.stream(prompt, params)
    demo_llm.stream("x", SamplingParams())
    assert not demo_llm._engine.has_unfinished(), "a stream that nobody reads starts nothing"


def acceptance_by_position(output: RequestOutput) -> list[float]:
    """Recounts, from the recorded trees, how often a draft at each depth was accepted."""
    drafted: dict[int, int] = {}
    accepted: dict[int, int] = {}
    for drafting in output.rounds or []:
        depths: list[int] = []
        for parent in drafting.parents:
            depths.append(1 if parent < 0 else depths[parent] + 1)
        for depth in range(1, max(depths, default=0) + 1):
            drafted[depth] = drafted.get(depth, 0) + 1
            accepted[depth] = accepted.get(depth, 0) + (drafting.num_accepted >= depth)
    return [accepted[depth] / drafted[depth] for depth in sorted(drafted)]


def test_metrics_add_up(demo_llm: LLM):
    for output in demo_llm.generate(PROMPTS, LONG, record_rounds=True):
        metrics = output.metrics
        assert metrics.num_output_tokens == len(output.outputs[0].token_ids) == 48
        assert metrics.num_target_passes == sum(metrics.acceptance_histogram)
        assert metrics.num_accepted_tokens == sum(i * n for i, n in enumerate(metrics.acceptance_histogram))
        # The prompt gives the first token, each pass its accepted tokens and its own; the last may be cut.
        emitted = metrics.num_output_tokens - 1
        uncut = metrics.num_accepted_tokens + metrics.num_target_passes
        assert uncut - 1 <= emitted <= uncut
        assert metrics.mean_acceptance_length == pytest.approx(emitted / metrics.num_target_passes)
        assert metrics.per_position_acceptance == pytest.approx(acceptance_by_position(output))
        assert 0 < metrics.time_to_first_token_s < 60
        assert 0 < metrics.decode_time_s < 60


def test_plain_decoding_makes_one_pass_a_token(plain_outputs: list[RequestOutput]):
    for output in plain_outputs:
        metrics = output.metrics
        assert metrics.num_target_passes == metrics.num_output_tokens - 1
        assert (metrics.num_draft_tokens, metrics.num_accepted_tokens) == (0, 0)
        assert metrics.mean_acceptance_length == 1.0


def test_recorded_logits_are_those_of_the_tokens(demo_llm: LLM):
    output = demo_llm.generate(PROMPTS[0], LONG, record_logits=True, record_rounds=True)[0]
    assert output.record is not None
    assert output.record.logits.shape == (48, 8192)
    assert output.record.logits.argmax(axis=1).tolist() == output.outputs[0].token_ids
    assert output.rounds is not None
    assert sum(r.num_accepted for r in output.rounds) == output.metrics.num_accepted_tokens
    assert demo_llm.generate(PROMPTS[0])[0].record is None


def test_score_gives_the_logits_of_the_next_token(demo_llm: LLM, plain_outputs: list[RequestOutput]):
    prompt, tokens = plain_outputs[0].prompt_token_ids, plain_outputs[0].outputs[0].token_ids
    logits = demo_llm.score([*prompt, *tokens]).logits
    assert logits[len(prompt) - 1 : -1].argmax(axis=1).tolist() == tokens


def test_chat_applies_the_template(demo_llm: LLM):
    messages = [{"role": "user", "content": "How many are 3 and 4?"}]
    params = SamplingParams(max_tokens=8, ignore_eos=True)
    output = demo_llm.chat(messages, params)[0]
    assert output.prompt == "Question: How many are 3 and 4?\nAnswer:"
    assert ids([output]) == ids(demo_llm.generate(output.prompt, params))
    assert ids(demo_llm.chat([messages, messages], params)) == ids([output, output])
    template = "{{ messages[0].content }}{% if enable_thinking %} think{% endif %}"
    thinking = demo_llm.chat(
        messages, params, chat_template=template, chat_template_kwargs={"enable_thinking": True}
    )[0]
    assert thinking.prompt == "How many are 3 and 4? think"
    with pytest.raises(RequestError, match="content"):
        demo_llm.chat([{"role": "user", "contnt": "x"}])


def test_working_with_token_ids_only(plain_outputs: list[RequestOutput]):
    llm = LLM.demo(skip_tokenizer_init=True)
    output = llm.generate({"prompt_token_ids": plain_outputs[0].prompt_token_ids}, LONG)[0]
    assert ids([output]) == ids(plain_outputs[:1])
    assert output.outputs[0].text == ""
    with pytest.raises(RequestError, match="prompt_token_ids"):
        llm.generate("text")
    with pytest.raises(RequestError, match="stop_token_ids"):
        llm.generate({"prompt_token_ids": [5]}, SamplingParams(stop="x"))
    with pytest.raises(OptionError, match="skip_tokenizer_init"):
        llm.get_tokenizer()


def test_without_detokenizing_the_text_is_empty(demo_llm: LLM, plain_outputs: list[RequestOutput]):
    params = SamplingParams(max_tokens=48, ignore_eos=True, detokenize=False)
    output = demo_llm.generate(PROMPTS[0], params)[0]
    assert (ids([output]), output.outputs[0].text) == (ids(plain_outputs[:1]), "")


@pytest.mark.parametrize("num_threads", [1, 2])
def test_threads_of_the_engine_change_nothing(num_threads: int, plain_outputs: list[RequestOutput]):
    assert ids(LLM.demo(num_threads=num_threads).generate(PROMPTS, LONG)) == ids(plain_outputs)


def test_describe_tells_the_plan(demo_llm: LLM, plain_llm: LLM):
    plan = demo_llm.describe()
    assert (plan["method"], plan["tree"], plan["tree_nodes"]) == ("dflash2", "conditional", 32)
    assert plain_llm.describe()["method"] is None
    assert EngineOptions().max_num_seqs == 8


def test_no_bar_unless_stderr_is_a_terminal(demo_llm: LLM, capfd: pytest.CaptureFixture[str]):
    demo_llm.generate(PROMPTS[0])
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("use_tqdm", [True, False])
def test_a_terminal_gets_a_bar_if_wanted(use_tqdm: bool):
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 100, 0, 0))
    code = f"from specpilot_rs import LLM; LLM.demo().generate('def f', use_tqdm={use_tqdm})"
    process = subprocess.Popen([sys.executable, "-c", code], stderr=theirs, stdout=subprocess.PIPE)
    os.close(theirs)
    shown = b""
    try:
        while chunk := os.read(ours, 4096):
            shown += chunk
    except OSError:
        pass  # how Linux says that the other end has closed
    finally:
        os.close(ours)
    stdout, _ = process.communicate(timeout=120)
    assert process.returncode == 0, shown
    assert stdout == b""
    assert (b"Generating" in shown) == use_tqdm


def test_errors_are_one_family(demo_llm: LLM):
    with pytest.raises(SpecPilotError):
        demo_llm.generate("")


def test_a_score_between_pieces_of_a_stream_disturbs_nothing(plain_outputs: list[RequestOutput]):
    llm = LLM.demo()
    text = plain_outputs[0].outputs[0].text
    stop = text[20:24]
    stream = llm.stream(PROMPTS[0], SamplingParams(max_tokens=48, ignore_eos=True, stop=stop))
    pieces = [next(stream).text]
    llm.score([5] * 300)
    pieces += [piece.text for piece in stream]
    assert "".join(pieces) == text[: text.index(stop)]
    assert not llm._engine.has_unfinished()


def test_masking_every_token_is_refused(demo_llm: LLM):
    every = list(range(int(demo_llm.describe()["vocab_size"])))
    with pytest.raises(RequestError, match="min_tokens"):
        demo_llm.generate(PROMPTS[0], SamplingParams(min_tokens=1, stop_token_ids=every))


def test_whoever_waits_learns_that_a_step_failed(monkeypatch: pytest.MonkeyPatch):
    """A failure while one caller steps ends the requests of all; none may take its cut text for an answer."""
    llm = LLM.demo()
    stream = llm.stream(PROMPTS[0], LONG)
    next(stream)
    running = llm._running

    def fail(_event: object) -> None:
        raise RuntimeError("the reader broke")

    with monkeypatch.context() as patch:
        patch.setattr(running, "_deliver", fail)
        with pytest.raises(RuntimeError, match="the reader broke"):
            llm.generate(PROMPTS[1], LONG)
    with pytest.raises(SpecPilotError, match="another call"):
        list(stream)
    assert not llm._engine.has_unfinished()


def test_a_forked_child_is_told_and_can_open_its_own():
    code = """
import os
from specpilot_rs import LLM, SamplingParams, SpecPilotError

llm = LLM.demo()
want = llm.generate("The", SamplingParams(max_tokens=8))[0].outputs[0].token_ids
child = os.fork()
if child == 0:
    try:
        llm.generate("The")
        os._exit(1)
    except SpecPilotError as error:
        assert "fork" in str(error)
    got = LLM.demo().generate("The", SamplingParams(max_tokens=8))[0].outputs[0].token_ids
    os._exit(0 if got == want else 2)
assert os.waitpid(child, 0)[1] == 0
print("both")
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert (result.stdout, result.returncode) == ("both\n", 0), result.stderr
