"""Where a request ends must not depend on speculation: every kind of stop, against plain decoding."""

import dataclasses
import json
import shutil

import numpy as np
import pytest
from specpilot_rs import LLM, SamplingParams, _core
from specpilot_rs.demo import DFLASH2_DIR, TARGET_DIR
from specpilot_rs.options import EngineOptions

from .conftest import FIXTURES

CONFIGS = {
    "dflash2-chain": {"method": "dflash2", "tree": "chain"},
    "dflash2-conditional-32": {"method": "dflash2", "tree": "conditional", "tree_nodes": 32},
    "dflash-ddtree-64": {"model": str(FIXTURES / "demo" / "dflash"), "tree": "ddtree", "tree_nodes": 64},
}


@pytest.fixture(scope="module")
def prompts(golden_cases, benchmark_prompts):
    return [case["prompt"] for case in golden_cases] + benchmark_prompts(2)


@pytest.fixture(scope="module", params=CONFIGS)
def speculative(request):
    return LLM.demo(speculative_config=CONFIGS[request.param], max_num_seqs=4)


@pytest.fixture(scope="module")
def free_runs(plain_llm, prompts):
    """Plain decoding past every stop: what each cut is a cut of."""
    return plain_llm.generate(prompts, SamplingParams(max_tokens=100, ignore_eos=True), use_tqdm=False)


def kept(output):
    completion = output.outputs[0]
    return (completion.token_ids, completion.text, completion.finish_reason, completion.stop_reason)


def assert_same_ends(plain_llm, speculative, prompts, params):
    plain = plain_llm.generate(prompts, params, use_tqdm=False)
    fast = speculative.generate(prompts, params, use_tqdm=False)
    assert [kept(output) for output in fast] == [kept(output) for output in plain]
    for output in fast:
        metrics = output.metrics
        # Only emitted tokens count: the first is the prompt's, every pass emitted its accepted drafts and its
        # own token, except that a cut may fall on a draft.
        emitted = len(output.outputs[0].token_ids) - 1
        assert metrics.num_accepted_tokens + metrics.num_target_passes - emitted in (0, 1)
    return plain, fast


def test_end_of_sequence(plain_llm, speculative, prompts, free_runs):
    """The end token often falls inside an accepted block."""
    plain, fast = assert_same_ends(plain_llm, speculative, prompts, SamplingParams(max_tokens=100))
    stopped = [output for output in plain if output.outputs[0].finish_reason == "stop"]
    assert len(stopped) >= 4
    for output, free in zip(plain, free_runs, strict=True):
        assert free.outputs[0].token_ids[: len(output.outputs[0].token_ids)] == output.outputs[0].token_ids
    assert any(
        output.metrics.num_accepted_tokens + output.metrics.num_target_passes
        > len(output.outputs[0].token_ids) - 1
        for output in fast
    ), "no cut fell inside a block: the test lost its point"


@pytest.mark.parametrize("max_tokens", [1, 2, 3, 5, 16, 17, 40])
def test_max_tokens(plain_llm, speculative, prompts, free_runs, max_tokens):
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    plain, _ = assert_same_ends(plain_llm, speculative, prompts, params)
    for output, free in zip(plain, free_runs, strict=True):
        assert output.outputs[0].token_ids == free.outputs[0].token_ids[:max_tokens]
        assert output.outputs[0].finish_reason == "length"


def test_stop_ids_at_every_place(plain_llm, speculative, prompts, free_runs):
    """Each request stops at a token of its own, met first at another place of its text."""
    params = []
    for place, free in enumerate(free_runs):
        token = free.outputs[0].token_ids[7 + 3 * place]
        params.append(SamplingParams(max_tokens=100, ignore_eos=True, stop_token_ids=[token]))
    plain, _ = assert_same_ends(plain_llm, speculative, prompts, params)
    for output, free, param in zip(plain, free_runs, params, strict=True):
        ids = free.outputs[0].token_ids
        token = param.stop_token_ids[0]
        assert output.outputs[0].token_ids == ids[: ids.index(token) + 1]
        assert output.outputs[0].stop_reason == token


@pytest.mark.parametrize("min_tokens", [1, 10, 60])
def test_min_tokens(plain_llm, speculative, prompts, min_tokens):
    """Before min_tokens no stop id may be chosen at all, so the text may take another way."""
    params = SamplingParams(max_tokens=90, min_tokens=min_tokens)
    plain, _ = assert_same_ends(plain_llm, speculative, prompts, params)
    for output in plain:
        ids = output.outputs[0].token_ids
        assert len(ids) >= min_tokens
        assert 0 not in ids[:min_tokens]


def test_min_tokens_lets_go_exactly_there(plain_llm, speculative, prompts):
    """A stop id at output index k may be chosen with min_tokens = k, and may not with k + 1."""
    free = plain_llm.generate(prompts, SamplingParams(max_tokens=100), use_tqdm=False)
    ended = [(p, o) for p, o in zip(prompts, free, strict=True) if o.outputs[0].finish_reason == "stop"]
    for prompt, output in ended[:4]:
        ids = output.outputs[0].token_ids
        for llm in (plain_llm, speculative):
            for min_tokens, same in ((len(ids) - 1, True), (len(ids), False)):
                params = SamplingParams(max_tokens=len(ids), min_tokens=min_tokens)
                again = llm.generate([prompt], params, use_tqdm=False)[0].outputs[0].token_ids
                assert again[:-1] == ids[:-1]
                assert (again[-1] == ids[-1]) == same


def test_end_tokens_of_the_tokenizer_count(free_runs):
    """An id that only the tokenizer names as its end is an end token too."""
    ids = free_runs[0].outputs[0].token_ids
    options = EngineOptions(extra_eos_token_ids=(ids[9],))
    engine = _core.Engine(model=str(TARGET_DIR), drafter=None, options=options)
    request = engine.add_request(free_runs[0].prompt_token_ids, SamplingParams(max_tokens=100), False, False)
    while engine.has_unfinished():
        engine.step()
    output = engine.take_output(request)
    assert output.token_ids == ids[: ids.index(ids[9]) + 1]
    assert (output.finish_reason, output.stop_token_id) == ("stop", None)


@pytest.mark.parametrize("config", [None, {"method": "dflash2"}], ids=["plain", "speculative"])
def test_suppressed_tokens_never_come(config, tmp_path, prompts, free_runs):
    """`suppress_tokens` of generation_config.json: the next best token is taken, with and without trees."""
    ids = free_runs[0].outputs[0].token_ids
    banned = sorted({ids[0], ids[5], 0})
    directory = tmp_path / "target"
    shutil.copytree(TARGET_DIR, directory)
    path = directory / "generation_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "suppress_tokens": banned}))
    speculative_config = config and {**config, "model": str(DFLASH2_DIR)}
    llm = LLM(str(directory), speculative_config=speculative_config)
    params = SamplingParams(max_tokens=40)
    output = llm.generate([prompts[0]], params, use_tqdm=False, record_logits=True)[0]
    got = output.outputs[0].token_ids
    assert not set(got) & set(banned)
    allowed = output.record.logits.copy()
    allowed[:, banned] = -np.inf
    assert got == allowed.argmax(1).tolist()


@pytest.mark.parametrize("include", [False, True])
def test_stop_strings(plain_llm, speculative, prompts, free_runs, include):
    params = []
    for place, free in enumerate(free_runs):
        text = free.outputs[0].text
        start = min(5 + 7 * place, len(text) - 4)
        stops = [text[start : start + 3], "a string that never comes"]
        params.append(
            SamplingParams(max_tokens=100, ignore_eos=True, stop=stops, include_stop_str_in_output=include)
        )
    plain, _ = assert_same_ends(plain_llm, speculative, prompts, params)
    for output, free, param in zip(plain, free_runs, params, strict=True):
        stop = param.stop[0]
        end = free.outputs[0].text.index(stop) + (len(stop) if include else 0)
        assert output.outputs[0].text == free.outputs[0].text[:end]
        assert output.outputs[0].stop_reason == stop


def assert_record_ends_with_the_text(output, uncut):
    """Values of the emitted tokens only, nothing of the row and the state that the last pass ended with."""
    assert output.outputs[0].finish_reason == "stop"
    count = len(output.outputs[0].token_ids)
    record = output.record
    for got, want in (
        (record.logits, uncut.record.logits[:count]),
        (record.residual_l2, uncut.record.residual_l2[:, :count]),
        (record.final_norm_l2, uncut.record.final_norm_l2[:count]),
    ):
        assert got.shape == want.shape
        np.testing.assert_array_equal(got.view(np.uint32), want.view(np.uint32))
    assert record.last_residuals.shape == (0, uncut.record.last_residuals.shape[1])
    assert record.gdn_state is None


def test_records_end_with_the_text(plain_llm, speculative, prompts, free_runs):
    """Where a pass ended must not show in what is recorded, wherever in it a stop string is complete."""
    params = []
    for place, free in enumerate(free_runs):
        text = free.outputs[0].text
        start = min(5 + 7 * place, len(text) - 4)
        params.append(SamplingParams(max_tokens=100, ignore_eos=True, stop=text[start : start + 3]))
    record = {"use_tqdm": False, "record_logits": True, "record_rounds": True}
    uncut = plain_llm.generate(prompts, SamplingParams(max_tokens=100, ignore_eos=True), **record)
    plain, fast = (llm.generate(prompts, params, **record) for llm in (plain_llm, speculative))
    num_cut = 0
    for output, want, free in zip(fast, plain, uncut, strict=True):
        assert output.outputs[0].token_ids == want.outputs[0].token_ids
        for stopped in (output, want):
            assert_record_ends_with_the_text(stopped, free)
        last = len(output.prompt_token_ids) + len(output.outputs[0].token_ids) - 1
        # Accepted drafts follow a pass's anchor; if the last of them is the last token, the pass was cut.
        ends = [drafting.anchor_position + drafting.num_accepted for drafting in output.rounds]
        assert all(end <= last for end in ends)
        num_cut += bool(ends) and ends[-1] == last
    assert num_cut, "no stop string was complete inside a pass: the test lost its point"
    # Where the limit falls on the same token, the engine had ended the request before its reader could.
    limited = [
        dataclasses.replace(param, max_tokens=len(output.outputs[0].token_ids))
        for param, output in zip(params, plain, strict=True)
    ]
    for llm in (plain_llm, speculative):
        for output, free in zip(llm.generate(prompts, limited, **record), uncut, strict=True):
            assert_record_ends_with_the_text(output, free)


@pytest.mark.parametrize("room", [1, 2, 7, 20])
@pytest.mark.parametrize("name", CONFIGS)
def test_context_limit(name, room, prompts, free_runs):
    """A request that reaches max_model_len ends there, whatever the trees still hold."""
    longest = max(len(free.prompt_token_ids) for free in free_runs)
    llm = LLM.demo(speculative_config=CONFIGS[name], max_model_len=longest + room)
    params = SamplingParams(max_tokens=None, ignore_eos=True)
    index = next(i for i, free in enumerate(free_runs) if len(free.prompt_token_ids) == longest)
    output = llm.generate([prompts[index]], params, use_tqdm=False)[0]
    assert output.outputs[0].token_ids == free_runs[index].outputs[0].token_ids[:room]
    assert output.outputs[0].finish_reason == "length"


def test_one_batch_with_every_kind_of_stop(plain_llm, speculative, prompts, free_runs):
    base = SamplingParams(max_tokens=80)
    kinds = [
        base,
        dataclasses.replace(base, ignore_eos=True),
        dataclasses.replace(base, max_tokens=7),
        dataclasses.replace(base, min_tokens=30),
        dataclasses.replace(base, stop=["\n", "="]),
        dataclasses.replace(base, stop_token_ids=[free_runs[5].outputs[0].token_ids[11]]),
    ]
    params = [kinds[i % len(kinds)] for i in range(len(prompts))]
    assert_same_ends(plain_llm, speculative, prompts, params)
