"""Every supported family against independent fp32 values (made as tests/fixtures/families/README.md says)."""

import json
from pathlib import Path

import numpy as np
import pytest
from specpilot_rs import LLM, SamplingParams

FAMILIES = Path(__file__).parent / "fixtures" / "families"
CASES = [
    "gemma4_unified",
    "llama_rope_parameters",
    "llama_rope_scaling",
    "muse_glimmer",
    "qwen3_5_fp8",
    "qwen3_5_text",
    "qwen3_5_wrapper",
]


@pytest.fixture(scope="module", params=CASES)
def case(request):
    directory = FAMILIES / request.param
    golden = json.loads((directory / "golden.json").read_text())
    return LLM(str(directory), skip_tokenizer_init=True), golden


def test_scores_match_reference(case, report):
    llm, golden = case
    tolerance = golden["tolerance"]
    worst = 0.0
    for sequence in golden["sequences"]:
        want = sequence["fp32"]
        got = llm.score(sequence["input_ids"])
        difference = np.abs(got.logits[-1] - np.array(want["last_logits"], np.float32)).max()
        worst = max(worst, float(difference))
        assert difference <= tolerance["logits_abs"]
        relative = tolerance["residual_l2_rel"]
        np.testing.assert_allclose(got.residual_l2, np.array(want["residual_l2"]), rtol=relative)
        np.testing.assert_allclose(got.final_norm_l2, np.array(want["final_norm_l2"]), rtol=relative)
        np.testing.assert_allclose(
            got.last_residuals[:, :8], np.array(want["residual_last_head"]), atol=tolerance["logits_abs"]
        )
        clear = np.array(want["top2_gap"]) > tolerance["argmax_if_gap_above"]
        assert (got.logits.argmax(1) == np.array(want["argmax"]))[clear].all()
    report(
        f"{golden['case']}: largest |logit difference| {worst:.2e} (allowed {tolerance['logits_abs']:.0e})"
    )


def test_greedy_continuation_matches_reference(case):
    llm, golden = case
    for sequence in golden["sequences"]:
        want = sequence["fp32"]["greedy"]
        params = SamplingParams(max_tokens=len(want["ids"]), ignore_eos=True)
        output = llm.generate([{"prompt_token_ids": sequence["input_ids"]}], params, use_tqdm=False)[0]
        assert list(output.outputs[0].token_ids) == want["ids"]
        assert output.outputs[0].finish_reason == "length"


def test_stop_ids_of_generation_config_end_the_text(case):
    llm, golden = case
    stopped = 0
    for sequence in golden["sequences"]:
        want = sequence["fp32"]["greedy"]
        params = SamplingParams(max_tokens=len(want["ids"]))
        output = llm.generate([{"prompt_token_ids": sequence["input_ids"]}], params, use_tqdm=False)[0]
        stop_len = want["stop_len"] or len(want["ids"])
        assert list(output.outputs[0].token_ids) == want["ids"][:stop_len]
        assert output.outputs[0].finish_reason == ("stop" if want["stop_len"] else "length")
        stopped += want["stop_len"] is not None
    assert stopped >= 1


def test_recorded_rows_equal_scored_rows(case):
    llm, golden = case
    prompt = golden["sequences"][1]["input_ids"]
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    output = llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False, record_logits=True)[0]
    recorded = output.record
    scored = llm.score([*prompt, *output.outputs[0].token_ids[:-1]])
    first = len(prompt) - 1
    np.testing.assert_array_equal(recorded.logits, scored.logits[first:])
    np.testing.assert_array_equal(recorded.residual_l2, scored.residual_l2[:, first:])
    np.testing.assert_array_equal(recorded.last_residuals, scored.last_residuals)
    if scored.gdn_state is None:
        assert recorded.gdn_state is None
    else:
        np.testing.assert_array_equal(recorded.gdn_state, scored.gdn_state)
