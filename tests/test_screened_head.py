"""The screened LM head in the engine: the tokens of the dense head, with every kind of decoding and mask."""

import itertools
import json
import shutil

import numpy as np
import pytest
from specpilot_rs import LLM, SamplingParams
from specpilot_rs._core import kernels
from specpilot_rs.demo import TARGET_DIR
from specpilot_rs.errors import OptionError

from .conftest import FIXTURES

NUM_TOKENS = 64
PARAMS = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True)
SPECULATION = [
    pytest.param(None, id="plain"),
    pytest.param({"method": "dflash2", "tree_nodes": 32}, id="conditional"),
    pytest.param({"model": str(FIXTURES / "demo" / "dflash"), "tree": "ddtree"}, id="ddtree"),
    pytest.param({"method": "dflash2", "tree": "chain"}, id="chain"),
]
FAMILIES = [
    "gemma4_unified",
    "llama_rope_parameters",
    "llama_rope_scaling",
    "muse_glimmer",
    "qwen3_5_fp8",
    "qwen3_5_text",
    "qwen3_5_wrapper",
]


def demo(head, speculative_config=None, **options):
    return LLM.demo(speculative_config=speculative_config, max_model_len=2048, head=head, **options)


def generate(llm, prompts, params=PARAMS, **record):
    return llm.generate(prompts, params, use_tqdm=False, **record)


def ids(outputs):
    return [output.outputs[0].token_ids for output in outputs]


@pytest.fixture(scope="module")
def prompts(benchmark_prompts):
    return benchmark_prompts(12)


@pytest.fixture(scope="module")
def dense(prompts):
    return generate(demo("dense", weight_format="bf16"), prompts)


def num_screened_rows(output):
    return output.metrics.num_screened_rows


@pytest.mark.parametrize("weight_format", ["bf16", "w12"])
@pytest.mark.parametrize("speculative_config", SPECULATION)
def test_tokens_are_those_of_bf16_and_the_dense_head(
    speculative_config, weight_format, prompts, dense, report
):
    llm = demo("screened", speculative_config, weight_format=weight_format)
    assert llm.describe()["weight_format"] == weight_format
    if speculative_config is not None:
        # Between them the formats decode every prompt.
        half = slice(weight_format == "w12", None, 2)
        prompts, dense = prompts[half], dense[half]
    outputs = generate(llm, prompts)
    assert ids(outputs) == ids(dense)
    metrics = [output.metrics for output in outputs]
    for m in metrics:
        # Every verified row, and the prompt's last one.
        assert m.num_screened_rows == m.num_draft_tokens + m.num_target_passes + 1
        assert m.num_screen_survivors >= m.num_screened_rows - m.num_screen_fallbacks
    rows = sum(m.num_screened_rows for m in metrics)
    survivors = sum(m.num_screen_survivors for m in metrics)
    fallbacks = sum(m.num_screen_fallbacks for m in metrics)
    assert fallbacks == 0
    method = "plain" if speculative_config is None else str(speculative_config.get("tree", "conditional"))
    report(
        f"screened head, {weight_format}, {method}: {rows} rows, {survivors / rows:.2f} survivors a row, "
        f"{fallbacks} fallbacks"
    )


def test_the_dense_head_screens_nothing(dense):
    assert {num_screened_rows(output) for output in dense} == {0}


def test_recorded_rows_take_the_dense_head_and_give_the_same_tokens(prompts, dense):
    llm = demo("screened", {"method": "dflash2"})
    recorded = generate(llm, prompts[::6], record_logits=True)
    assert ids(recorded) == ids(dense[::6])
    assert {num_screened_rows(output) for output in recorded} == {0}
    want = generate(demo("dense"), prompts[::6], record_logits=True)
    for output, plain in zip(recorded, want, strict=True):
        np.testing.assert_array_equal(
            output.record.logits.view(np.uint32), plain.record.logits.view(np.uint32)
        )


def test_recorded_and_unrecorded_requests_share_a_pass(prompts, dense):
    llm = demo("screened", {"method": "dflash2"}, max_num_seqs=4)
    engine, tokenizer = llm._engine, llm.get_tokenizer()
    requests = [
        engine.add_request(tokenizer.encode(prompt), PARAMS, i % 2 == 0, False)
        for i, prompt in enumerate(prompts[:6])
    ]
    while engine.has_unfinished():
        engine.step()
    for i, request in enumerate(requests):
        output = engine.take_output(request)
        assert output.token_ids == dense[i].outputs[0].token_ids
        assert (output.metrics.num_screened_rows == 0) == (i % 2 == 0)


@pytest.mark.parametrize(
    ("family", "weight_format"),
    [*itertools.product(FAMILIES, ("bf16", "w12")), ("qwen3_5_fp8", "fp8")],
)
def test_families(family, weight_format):
    directory = FIXTURES / "families" / family
    golden = json.loads((directory / "golden.json").read_bytes())
    llm = LLM(str(directory), skip_tokenizer_init=True, head="screened", weight_format=weight_format)
    for sequence in golden["sequences"]:
        want = sequence["fp32"]["greedy"]["ids"]
        params = SamplingParams(max_tokens=len(want), ignore_eos=True)
        output = generate(llm, [{"prompt_token_ids": sequence["input_ids"]}], params)[0]
        assert output.outputs[0].token_ids == want
        assert num_screened_rows(output) == len(want)


@pytest.fixture(scope="module")
def suppressing(tmp_path_factory, dense):
    """The demo target, forbidden to say the ten tokens it says most."""
    directory = tmp_path_factory.mktemp("suppressing")
    shutil.copytree(TARGET_DIR, directory, dirs_exist_ok=True)
    spoken = np.concatenate([np.array(tokens) for tokens in ids(dense)])
    values, counts = np.unique(spoken, return_counts=True)
    suppressed = values[np.argsort(-counts, kind="stable")[:10]].tolist()
    path = directory / "generation_config.json"
    config = json.loads(path.read_bytes()) if path.exists() else {}
    path.write_text(json.dumps({**config, "suppress_tokens": suppressed}))
    return directory, suppressed


def test_suppressed_tokens_are_never_chosen(suppressing, prompts, dense):
    directory, suppressed = suppressing
    dense_llm = LLM(str(directory), max_model_len=2048, head="dense")
    screened_llm = LLM(str(directory), max_model_len=2048, head="screened")
    assert sorted(screened_llm.describe()["suppress_tokens"]) == sorted(suppressed)
    want = ids(generate(dense_llm, prompts[::3]))
    got = generate(screened_llm, prompts[::3])
    assert ids(got) == want
    assert not set(suppressed) & {token for tokens in want for token in tokens}
    assert all(output.metrics.num_screened_rows == NUM_TOKENS for output in got)
    assert want != ids(dense[::3])


def test_min_tokens_holds_stop_tokens_back(prompts, dense):
    # A token each text says early, so that the mask changes something.
    stops = [tokens[4] for tokens in ids(dense[::6])]
    params = [SamplingParams(max_tokens=40, min_tokens=20, stop_token_ids=[stop]) for stop in stops]
    want = generate(demo("dense"), prompts[::6], params)
    for speculative_config in (None, {"method": "dflash2"}):
        got = generate(demo("screened", speculative_config), prompts[::6], params)
        assert ids(got) == ids(want)
        assert [o.outputs[0].finish_reason for o in got] == [o.outputs[0].finish_reason for o in want]
    for tokens, stop in zip(ids(want), stops, strict=True):
        assert stop not in tokens[:19]


def test_a_stop_string_takes_back_the_counts_of_dropped_passes(prompts):
    llm = demo("screened", {"method": "dflash2"})
    text = generate(llm, prompts[0])[0].outputs[0].text
    params = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True, stop=text[4:7])
    metrics = generate(llm, prompts[0], params)[0].metrics
    assert metrics.num_screened_rows == metrics.num_draft_tokens + metrics.num_target_passes + 1


def test_auto_screens_heads_that_are_large_enough():
    plan = demo("auto").describe()
    assert plan["head"] == ("screened" if kernels.has_byte_products() else "dense")
    plan = demo("screened").describe()
    weights = plan["vocab_size"] * plan["hidden_size"]
    # A byte a weight, and three fp32 a channel.
    assert plan["screened_head_bytes"] == weights + 12 * plan["vocab_size"]
    small = LLM(str(FIXTURES / "families" / "qwen3_5_text"), skip_tokenizer_init=True)
    assert (small.describe()["head"], small.describe()["screened_head_bytes"]) == ("dense", 0)
    assert demo("dense").describe()["screened_head_bytes"] == 0


@pytest.mark.parametrize("head", ["sparse", None])
def test_another_head_is_refused(head):
    with pytest.raises(OptionError, match="head"):
        demo(head)
