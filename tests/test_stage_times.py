"""Times of decode steps: every step counts once, every stage that runs takes time, all add up."""

import time

import pytest
from specpilot_rs import LLM, OptionError, SamplingParams

PARAMS = SamplingParams(max_tokens=24, ignore_eos=True)
EVERY_STEP = {"between", "draft", "tree", "forward", "head", "commit", "context"}
Q_PASSES_ONLY = {"q_forward", "q_head", "mark"}


@pytest.mark.parametrize("settled", [False, True])
@pytest.mark.parametrize("q_passes", [0, 1])
def test_stages_of_all_steps_add_up(q_passes, settled):
    llm = LLM.demo(speculative_config={"method": "dflash2", "q_passes": q_passes}, device="cpu")
    llm.generate("1 + 1 =", PARAMS, use_tqdm=False)
    llm.set_stage_clock(settled=settled)
    start = time.perf_counter()
    outputs = llm.generate(["1 + 1 =", "def f(x):"], PARAMS, use_tqdm=False)
    seconds = time.perf_counter() - start
    times = llm.stage_times()
    passes = [output.metrics.num_target_passes for output in outputs]
    # Both prompts take one pass and then decode side by side.
    assert times["num_steps"] == max(passes)
    assert set(times["seconds"]) == EVERY_STEP | Q_PASSES_ONLY
    running = EVERY_STEP | (Q_PASSES_ONLY if q_passes else set())
    assert {stage for stage, took in times["seconds"].items() if took > 0} == running
    assert 0 < sum(times["seconds"].values()) <= seconds
    # A forward of the target is most of a step on a CPU.
    assert times["seconds"]["forward"] > times["seconds"]["tree"]
    # A CPU is not asked for anything.
    assert not any(times["activity"].values())


def test_a_clock_is_settled_or_not(plain_llm):
    with pytest.raises(OptionError, match="`settled` should be True or False, got 1"):
        plain_llm.set_stage_clock(settled=1)


def test_a_clock_that_is_set_begins_at_zero():
    llm = LLM.demo(speculative_config=None, device="cpu")
    llm.generate("1 + 1 =", PARAMS, use_tqdm=False)
    assert llm.stage_times()["num_steps"] == PARAMS.max_tokens - 1
    llm.set_stage_clock()
    times = llm.stage_times()
    assert times["num_steps"] == 0
    assert not any(times["seconds"].values())
