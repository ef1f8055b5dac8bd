"""The extension keeps what its stub promises: stubtest sees no types of values, so each name is used."""

from __future__ import annotations

import numpy as np
import pytest
import specpilot_rs
from specpilot_rs import LLM, SamplingParams, _core
from specpilot_rs.demo import DFLASH2_DIR, TARGET_DIR
from specpilot_rs.options import EngineOptions

NUM_TOKENS = 12


@pytest.fixture(scope="module")
def engine() -> _core.Engine:
    options = EngineOptions(max_model_len=256)
    return _core.Engine(model=str(TARGET_DIR), drafter=str(DFLASH2_DIR), options=options)


@pytest.fixture(scope="module")
def prompt(demo_llm: LLM) -> list[int]:
    return demo_llm.get_tokenizer().encode("def add(a, b):\n")


def run_to_end(engine: _core.Engine, request_id: int) -> list[_core.StepEvent]:
    events = []
    while engine.has_unfinished():
        events += engine.step()
    assert {event.request_id for event in events} == {request_id}
    return events


def test_public_names_load():
    for name in specpilot_rs.__all__:
        assert getattr(specpilot_rs, name) is not None
    assert set(specpilot_rs.__all__) <= set(dir(specpilot_rs))
    with pytest.raises(AttributeError, match="nothing_of_the_kind"):
        _ = specpilot_rs.nothing_of_the_kind


def test_describe(engine: _core.Engine):
    plan = engine.describe()
    assert plan["vocab_size"] == 8192
    assert plan["max_model_len"] == 256
    assert plan["eos_token_ids"] == [0]
    assert {
        "architecture",
        "dtype",
        "device",
        "method",
        "tree",
        "tree_nodes",
        "num_parameters",
    } <= plan.keys()


def test_a_request_from_end_to_end(engine: _core.Engine, prompt: list[int]):
    assert engine.step() == []
    params = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True)
    request_id = engine.add_request(prompt, params, True, True)
    events = run_to_end(engine, request_id)
    assert events[-1].finish_reason == "length"
    assert all(event.finish_reason is None for event in events[:-1])
    assert events[-1].num_prompt_tokens_done == len(prompt)
    output = engine.take_output(request_id)
    assert output.token_ids == [token for event in events for token in event.new_token_ids]
    assert len(output.token_ids) == NUM_TOKENS
    assert (output.finish_reason, output.stop_token_id) == ("length", None)
    assert output.record is not None
    assert output.record.logits.shape == (NUM_TOKENS, 8192)
    assert output.rounds
    for drafted in output.rounds:
        assert len(drafted.draft_token_ids) == len(drafted.parents)
        assert all(-1 <= parent < node for node, parent in enumerate(drafted.parents))
        assert 0 <= drafted.num_accepted <= len(drafted.draft_token_ids)
        assert drafted.anchor_position >= len(prompt) - 1
        assert drafted.num_marked == 0
        assert len(drafted.greedy_token_ids) in (0, len(drafted.candidate_token_ids))
        assert all(0 < len(set(tokens)) == len(tokens) <= 16 for tokens in drafted.candidate_token_ids)
    metrics = output.metrics
    assert metrics.num_prompt_passes >= 1
    assert metrics.num_target_passes == len(output.rounds) == sum(metrics.acceptance_histogram)
    assert metrics.num_accepted_tokens == sum(metrics.per_position_accepted)
    assert metrics.num_draft_tokens >= metrics.num_accepted_tokens
    assert all(a <= d for a, d in zip(metrics.per_position_accepted, metrics.per_position_draft, strict=True))
    assert metrics.time_to_first_token_s > 0
    assert metrics.decode_time_s > 0


def test_an_output_is_taken_once(engine: _core.Engine, prompt: list[int]):
    request_id = engine.add_request(prompt, SamplingParams(max_tokens=1), False, False)
    run_to_end(engine, request_id)
    assert engine.take_output(request_id).record is None
    with pytest.raises(_core.RequestError) as raised:
        engine.take_output(request_id)
    assert raised.value.code == "request"


def test_stop_at_drops_later_tokens(engine: _core.Engine, prompt: list[int]):
    params = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True)
    request_id = engine.add_request(prompt, params, True, False)
    tokens: list[int] = []
    while len(tokens) < 3:
        tokens += [token for event in engine.step() for token in event.new_token_ids]
    engine.stop_at(request_id, 3)
    assert not engine.has_unfinished()
    output = engine.take_output(request_id)
    assert output.token_ids == tokens[:3]
    assert output.finish_reason == "stop"
    assert output.record is not None
    assert len(output.record.logits) == 3
    metrics = output.metrics
    assert metrics.num_accepted_tokens + metrics.num_target_passes >= 2


def test_stop_at_a_token_of_a_request_that_just_ended(engine: _core.Engine, prompt: list[int]):
    request_id = engine.add_request(prompt, SamplingParams(max_tokens=4, ignore_eos=True), False, False)
    run_to_end(engine, request_id)
    engine.stop_at(request_id, 2)
    output = engine.take_output(request_id)
    assert (len(output.token_ids), output.finish_reason) == (2, "stop")


def test_abort(engine: _core.Engine, prompt: list[int]):
    request_id = engine.add_request(prompt, SamplingParams(max_tokens=200, ignore_eos=True), False, False)
    engine.step()
    engine.abort(request_id)
    assert not engine.has_unfinished()
    assert engine.take_output(request_id).finish_reason == "abort"


def test_score(engine: _core.Engine, prompt: list[int]):
    request_id = engine.add_score_request(prompt)
    while engine.has_unfinished():
        engine.step()
    output = engine.take_output(request_id)
    assert (output.token_ids, output.finish_reason) == ([], "length")
    record = output.record
    assert record is not None
    num_layers, num_tokens = 8, len(prompt)
    assert record.logits.shape == (num_tokens, 8192)
    assert record.residual_l2.shape == (num_layers + 1, num_tokens)
    assert record.final_norm_l2.shape == (num_tokens,)
    assert record.last_residuals.shape == (num_layers + 1, 256)
    assert record.gdn_state is not None
    assert record.gdn_state.shape == (6, 2, 128, 128)
    arrays = (
        record.logits,
        record.residual_l2,
        record.final_norm_l2,
        record.last_residuals,
        record.gdn_state,
    )
    assert all(array.dtype == np.float32 and np.isfinite(array).all() for array in arrays)


@pytest.mark.parametrize("call", ["stop_at", "abort", "take_output"])
def test_unknown_requests_are_refused(engine: _core.Engine, call: str):
    with pytest.raises(_core.RequestError, match="no request"):
        getattr(engine, call)(*((10**6, 1) if call == "stop_at" else (10**6,)))


def test_errors_form_one_family():
    for name in ("Device", "Kernel", "Checkpoint", "Config", "Drafter", "Option", "Request"):
        error = getattr(_core, f"{name}Error")
        assert issubclass(error, _core.SpecPilotError)
        assert getattr(specpilot_rs, f"{name}Error") is error
        assert error("x").code == name.lower()
