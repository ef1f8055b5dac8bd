"""The promise: speculation never changes a token, nor a bit of a committed position's logits.

Everything is compared with plain decoding, one request at a time, on 60 benchmark prompts.
"""

import random
from pathlib import Path

import numpy as np
import pytest
import specpilot_rs
from specpilot_rs import LLM, DrafterError, SamplingParams, _core
from specpilot_rs.options import EngineOptions

from .arrivals import Arrival, check_arrivals
from .conftest import DRAFTERS, TREES

NUM_TOKENS = 64
DFLASH, DFLASH2 = DRAFTERS["dflash"], DRAFTERS["dflash2"]
PARAMS = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True)


def demo(speculative_config, **options):
    return LLM.demo(speculative_config=speculative_config, max_model_len=2048, **options)


@pytest.fixture(scope="module")
def prompts(benchmark_prompts):
    return benchmark_prompts(12)


@pytest.fixture(scope="module")
def plain(prompts):
    """Token ids, logits and final recurrent state of plain decoding, one request at a time."""
    llm = demo(None, max_num_seqs=1)
    outputs = llm.generate(prompts, PARAMS, use_tqdm=False, record_logits=True)
    assert all(len(o.outputs[0].token_ids) == NUM_TOKENS for o in outputs)
    assert all(o.metrics.num_target_passes == NUM_TOKENS - 1 for o in outputs)
    return outputs


@pytest.fixture(scope="module")
def chain_and_tree(prompts):
    """What a chain and a tree of the usual sizes give on all prompts, by tree and number of rows."""
    return {
        (tree, tree_nodes): demo(
            {**DFLASH2, "tree": tree, "tree_nodes": tree_nodes}, max_num_seqs=8
        ).generate(prompts, PARAMS, use_tqdm=False, record_logits=True)
        for tree, tree_nodes in (("chain", 16), ("conditional", 32))
    }


def assert_identical(outputs, plain):
    for output, want in zip(outputs, plain, strict=True):
        assert output.outputs[0].token_ids == want.outputs[0].token_ids
        # Bit patterns, so that zeros of either sign and NaNs count too.
        np.testing.assert_array_equal(
            output.record.logits.view(np.uint32), want.record.logits.view(np.uint32)
        )
        np.testing.assert_array_equal(
            output.record.residual_l2.view(np.uint32), want.record.residual_l2.view(np.uint32)
        )
        np.testing.assert_array_equal(
            output.record.gdn_state.view(np.uint32), want.record.gdn_state.view(np.uint32)
        )


def mean_acceptance_length(outputs):
    tokens = sum(len(o.outputs[0].token_ids) - 1 for o in outputs)
    return tokens / sum(o.metrics.num_target_passes for o in outputs)


# A chain has no more rows than the drafter proposes, 16 here: 64 asks for more than there are.
@pytest.mark.parametrize(
    ("drafter", "tree", "tree_nodes"),
    [
        *(pytest.param(DFLASH2, "chain", n, id=f"dflash2-chain-{n}") for n in (1, 7, 16, 64)),
        *(pytest.param(DFLASH, "ddtree", n, id=f"dflash-ddtree-{n}") for n in (1, 7, 16, 32, 64)),
        *(pytest.param(DFLASH2, "conditional", n, id=f"dflash2-conditional-{n}") for n in (1, 7, 16, 32, 64)),
    ],
)
def test_speculation_changes_no_bit(drafter, tree, tree_nodes, prompts, plain, chain_and_tree, report):
    """All prompts with the two configurations of `chain_and_tree`, every other prompt with the rest."""
    llm = demo({**drafter, "tree": tree, "tree_nodes": tree_nodes}, max_num_seqs=8)
    if (outputs := chain_and_tree.get((tree, tree_nodes))) is None:
        prompts, plain = prompts[::2], plain[::2]
        outputs = llm.generate(prompts, PARAMS, use_tqdm=False, record_logits=True)
    assert_identical(outputs, plain)
    tau = mean_acceptance_length(outputs)
    assert tau == 1.0 if tree_nodes == 1 else tau > 1.5
    plan = llm.describe()
    used = f"{tree_nodes:3} rows asked, {plan['tree_nodes']:3} used"
    report(f"tau {plan['method']:8} {tree:12} {used}: {tau:.3f}")


@pytest.mark.parametrize("name", DRAFTERS)
def test_trees_that_a_drafter_has_no_scores_for_are_refused(name):
    missing = {"chain", "ddtree", "conditional", "spine", "eagle"} - set(TREES[name])
    for other in missing:
        with pytest.raises(DrafterError, match=f'tree "{other}" needs .* scores, which {name} drafters'):
            demo({**DRAFTERS[name], "tree": other})


def test_tree_beats_chain(chain_and_tree, report):
    tau = {tree: mean_acceptance_length(outputs) for (tree, _), outputs in chain_and_tree.items()}
    report(f"tau on 60 prompts, dflash2: chain {tau['chain']:.3f}, 32-node tree {tau['conditional']:.3f}")
    assert tau["conditional"] > tau["chain"]


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("name", DRAFTERS)
def test_batch_mates_and_arrival_order_change_nothing(name, seed, prompts, plain):
    """Nine requests of different lengths, arriving at random steps, one of them aborted on the way."""
    order = random.Random(seed)
    chosen = order.sample(range(len(prompts)), 9)
    config = {**DRAFTERS[name], "tree_nodes": order.choice([5, 16, 32]), "tree": TREES[name][seed]}
    arrivals = [Arrival(i, order.choice([9, 33, NUM_TOKENS])) for i in chosen]
    doomed = chosen[order.randrange(9)]
    check_arrivals(demo(config, max_num_seqs=5), prompts, arrivals, doomed, plain, order)


def test_prompt_chunks_and_decoding_agree(prompts, plain):
    """A prompt that holds another request's text gives the bits that decoding gave."""
    llm = demo(None)
    tokenizer = llm.get_tokenizer()
    for prompt, want in zip(prompts[::6], plain[::6], strict=True):
        prompt_ids = tokenizer.encode(prompt)
        scored = llm.score([*prompt_ids, *want.outputs[0].token_ids[:-1]])
        np.testing.assert_array_equal(
            scored.logits[len(prompt_ids) - 1 :].view(np.uint32), want.record.logits.view(np.uint32)
        )
        np.testing.assert_array_equal(scored.gdn_state.view(np.uint32), want.record.gdn_state.view(np.uint32))


def test_number_of_threads_changes_nothing(prompts, plain):
    options = EngineOptions(num_threads=1, max_model_len=2048)
    target = Path(specpilot_rs.__file__).parent / "demo" / "target"
    engine = _core.Engine(model=str(target), drafter=None, options=options)
    ids = demo(None).get_tokenizer().encode(prompts[0])
    request = engine.add_request(ids, PARAMS, True, False)
    while engine.has_unfinished():
        engine.step()
    output = engine.take_output(request)
    np.testing.assert_array_equal(
        output.record.logits.view(np.uint32), plain[0].record.logits.view(np.uint32)
    )


@pytest.mark.parametrize("tree", [None, {**DFLASH2, "tree_nodes": 32}], ids=["plain", "conditional"])
def test_long_multi_turn_state_equals_one_prompt(tree, prompts):
    """Turns appended one after another, each decoded, end in the state that one long prompt gives."""
    llm = demo(tree)
    tokenizer = llm.get_tokenizer()
    ids = []
    for prompt in prompts[:6]:
        ids += tokenizer.encode(prompt)
        request = [{"prompt_token_ids": ids}]
        params = SamplingParams(max_tokens=40, ignore_eos=True)
        output = llm.generate(request, params, use_tqdm=False, record_logits=True)[0]
        ids = ids + output.outputs[0].token_ids
        scored = llm.score(ids[:-1])
        np.testing.assert_array_equal(
            output.record.gdn_state.view(np.uint32), scored.gdn_state.view(np.uint32)
        )
    assert len(ids) > 600


# Attention reads positions in splits of this many.
KV_SPLIT = 256
CROSSING = SamplingParams(max_tokens=70, ignore_eos=True)


@pytest.fixture(scope="module")
def long_prompts(benchmark_prompts, plain_llm):
    """Token ids whose continuation lies beyond four splits or crosses the end of one, each of the four."""
    encoded = [plain_llm.get_tokenizer().encode(prompt) for prompt in benchmark_prompts(80)]
    by_length = sorted(encoded, key=len)
    longest = by_length[-1]
    assert len(longest) > 4 * KV_SPLIT
    texts = [ids for ids in by_length if len(ids) > 520]
    # Decoding starts a few positions before a split ends, or just within reach of it.
    cuts = [190, 213, 240, 254, 255, 450, 475, 501, 511, 3 * KV_SPLIT - 40, 4 * KV_SPLIT - 11]
    assert len(texts) >= len(cuts)
    return [longest, by_length[-7], *(ids[:cut] for ids, cut in zip(texts[-len(cuts) :], cuts, strict=True))]


@pytest.fixture(scope="module")
def plain_long(long_prompts):
    llm = demo(None, max_num_seqs=1)
    prompts = [{"prompt_token_ids": ids} for ids in long_prompts]
    outputs = llm.generate(prompts, CROSSING, use_tqdm=False, record_logits=True)
    ends = [len(ids) + CROSSING.max_tokens for ids in long_prompts]
    crossed = {
        end // KV_SPLIT
        for ids, end in zip(long_prompts, ends, strict=True)
        if len(ids) // KV_SPLIT < end // KV_SPLIT
    }
    assert crossed == {1, 2, 3, 4}
    return outputs


@pytest.mark.parametrize("tree_nodes", [12, 64])
@pytest.mark.parametrize(
    ("drafter", "tree"),
    [
        pytest.param(DFLASH2, "chain", id="dflash2-chain"),
        pytest.param(DFLASH, "ddtree", id="dflash-ddtree"),
        pytest.param(DFLASH2, "conditional", id="dflash2-conditional"),
    ],
)
def test_speculation_changes_no_bit_across_attention_splits(
    drafter, tree, tree_nodes, long_prompts, plain_long
):
    """Trees that lie across the end of a split of positions, and rows that read several splits."""
    llm = demo({**drafter, "tree": tree, "tree_nodes": tree_nodes}, max_num_seqs=6)
    prompts = [{"prompt_token_ids": ids} for ids in long_prompts]
    outputs = llm.generate(prompts, CROSSING, use_tqdm=False, record_logits=True, record_rounds=True)
    assert_identical(outputs, plain_long)
    spanning = [
        drafting
        for output in outputs
        for drafting in output.rounds
        if drafting.num_accepted > 0
        and drafting.anchor_position // KV_SPLIT
        < (drafting.anchor_position + drafting.num_accepted) // KV_SPLIT
    ]
    assert spanning, "no accepted path crosses a split: the test lost its point"


def test_prompts_and_decoding_agree_across_attention_splits(long_prompts, plain_long):
    llm = demo(None)
    for ids, want in zip(long_prompts[::3], plain_long[::3], strict=True):
        scored = llm.score([*ids, *want.outputs[0].token_ids[:-1]])
        np.testing.assert_array_equal(
            scored.logits[len(ids) - 1 :].view(np.uint32), want.record.logits.view(np.uint32)
        )
