"""Two-stage verification: no bit depends on what a Q pass marks, whoever drafts, however weights are held."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from specpilot_rs import LLM, SamplingParams
from specpilot_rs.bench.rounds import tree_depth
from specpilot_rs.demo import DFLASH2_DIR, TARGET_DIR
from specpilot_rs.errors import OptionError

from .kernels.bfloat16 import from_bits, to_bits

NUM_TOKENS = 32
PARAMS = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True)


def demo(speculative_config: dict[str, Any] | None, **options: Any) -> LLM:
    return LLM.demo(speculative_config=speculative_config, max_model_len=2048, **options)


@pytest.fixture(scope="module")
def prompts(benchmark_prompts: Any) -> list[str]:
    return benchmark_prompts(2)[:8]


@pytest.fixture(scope="module")
def plain(prompts: list[str]) -> list[Any]:
    llm = demo(None, max_num_seqs=1, weight_format="bf16")
    return llm.generate(prompts, PARAMS, use_tqdm=False, record_logits=True)


def passes(outputs: list[Any]) -> int:
    return sum(output.metrics.num_target_passes for output in outputs)


def test_marking_pays(prompts: list[str]) -> None:
    num_passes = [
        passes(demo({"method": "dflash2", "q_passes": n}).generate(prompts, PARAMS, use_tqdm=False))
        for n in (0, 1, 2)
    ]
    assert num_passes[0] > 1.5 * num_passes[1]
    assert num_passes[1] > num_passes[2]


def test_marks_are_those_of_the_8_bit_view(benchmark_prompts: Any, report: Any) -> None:
    """The view is nearly right and sometimes wrong; marks of the exact weights would always be accepted."""
    llm = demo({"method": "dflash2", "q_passes": 1})
    metrics = [o.metrics for o in llm.generate(benchmark_prompts(4), PARAMS, use_tqdm=False)]
    marked = sum(m.num_marked_tokens for m in metrics)
    accepted = sum(m.num_accepted_marks for m in metrics)
    report(f"dflash2, one Q pass: {accepted} of {marked} marked tokens accepted")
    assert 0.93 < accepted / marked < 1


def test_marks_are_drawn_by_the_noise_of_the_exact_pass(prompts: list[str], report: Any) -> None:
    """No token depends on it, but marks drawn by other noise would hardly ever be accepted."""
    llm = demo({"method": "dflash2", "q_passes": 1})
    params = [SamplingParams(max_tokens=64, temperature=1.0, seed=i, ignore_eos=True) for i in range(8)]
    metrics = [output.metrics for output in llm.generate(prompts, params, use_tqdm=False)]
    marked = sum(m.num_marked_tokens for m in metrics)
    accepted = sum(m.num_accepted_marks for m in metrics)
    report(f"dflash2, one Q pass, temperature 1: {accepted} of {marked} marked tokens accepted")
    assert accepted > 0.85 * marked


@pytest.mark.parametrize("tree", ["conditional", "eagle"])
def test_rows_of_a_marked_path_are_paid_for(tree: str, prompts: list[str], plain: list[Any]) -> None:
    """Beyond 24 rows a pass is dear: a second tree stops there, however long the path is that it hangs on."""
    costs = [1.0] * 24 + [1000.0] * 40
    config = {"method": "dflash2", "q_passes": 1, "tree": tree, "verify_costs": costs}
    outputs = demo(config).generate(prompts, PARAMS, use_tqdm=False, record_rounds=True)
    assert [o.outputs[0].token_ids for o in outputs] == [o.outputs[0].token_ids for o in plain]
    rounds = [drafting for output in outputs for drafting in output.rounds]
    assert max(len(drafting.draft_token_ids) + 1 for drafting in rounds) == 24


@pytest.mark.parametrize("max_tokens", [1, 2, 3, 5, 17])
def test_a_request_may_end_anywhere_in_a_marked_path(
    max_tokens: int, prompts: list[str], plain: list[Any]
) -> None:
    llm = demo({"method": "dflash2", "q_passes": 2, "tree_nodes": 32})
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    outputs = llm.generate(prompts, params, use_tqdm=False, record_rounds=True)
    for output, want in zip(outputs, plain, strict=True):
        assert output.outputs[0].token_ids == want.outputs[0].token_ids[:max_tokens]
        assert output.outputs[0].finish_reason == "length"
        last_position = len(output.prompt_token_ids) + max_tokens - 1
        for drafting in output.rounds:
            # Caches end before the last token, which is the target's own in any case.
            assert drafting.anchor_position + tree_depth(drafting.parents) < last_position


@pytest.mark.parametrize("seed", range(3))
def test_batch_mates_and_short_row_budgets_change_nothing(
    seed: int, prompts: list[str], plain: list[Any]
) -> None:
    """Sixteen requests of up to 64 rows each share 256, so some get a stem and nothing more."""
    order = random.Random(seed)
    chosen = [order.randrange(len(prompts)) for _ in range(16)]
    lengths = [order.choice([3, 9, NUM_TOKENS]) for _ in chosen]
    llm = demo({"method": "dflash2", "q_passes": 1, "tree_nodes": 32}, max_num_seqs=16)
    params = [SamplingParams(max_tokens=length, ignore_eos=True) for length in lengths]
    outputs = llm.generate([prompts[i] for i in chosen], params, use_tqdm=False)
    for output, i, length in zip(outputs, chosen, lengths, strict=True):
        assert output.outputs[0].token_ids == plain[i].outputs[0].token_ids[:length]


def test_masks_hold_in_q_passes(prompts: list[str], plain: list[Any]) -> None:
    """Stop tokens that min_tokens holds back are not marked, so trees keep being of use."""
    stop = plain[0].outputs[0].token_ids[6]
    params = SamplingParams(max_tokens=NUM_TOKENS, min_tokens=20, stop_token_ids=[stop], ignore_eos=True)
    want = demo(None).generate(prompts[0], params, use_tqdm=False)[0]
    got = demo({"method": "dflash2", "q_passes": 1}).generate(prompts[0], params, use_tqdm=False)[0]
    assert got.outputs[0] == want.outputs[0]
    assert want.outputs[0].token_ids[:7] != plain[0].outputs[0].token_ids[:7]


@pytest.mark.parametrize(
    ("tree_nodes", "draft_lengths"), [([24, 8], [15, 7]), ([2, 62], 15), ([32, 1], [3, 31]), (40, [31, 3])]
)
def test_trees_of_other_sizes_change_nothing(
    tree_nodes: Any, draft_lengths: Any, prompts: list[str], plain: list[Any]
) -> None:
    config = {"tree_nodes": tree_nodes, "num_speculative_tokens": draft_lengths, "q_passes": 1}
    llm = demo({"method": "dflash2", **config}, max_num_seqs=3)
    assert {name: llm.describe()[name] for name in config} == config
    outputs = llm.generate(prompts, PARAMS, use_tqdm=False, record_rounds=True)
    assert [o.outputs[0].token_ids for o in outputs] == [o.outputs[0].token_ids for o in plain]
    first, second = tree_nodes if isinstance(tree_nodes, list) else (tree_nodes, tree_nodes)
    lengths = draft_lengths if isinstance(draft_lengths, list) else (draft_lengths, draft_lengths)
    num_rows = [len(drafting.draft_token_ids) + 1 for o in outputs for drafting in o.rounds]
    # A marked path takes at most the first tree's rows, or its depth and the root, and the token after it.
    most = min(64, min(first, lengths[0] + 1) + second)
    assert second < max(num_rows) <= most


@pytest.fixture(scope="module")
def coarse_target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo target with a head whose every channel has one large weight, in whose steps the others vanish.

    It is the same one for all channels, so all logits move alike and the model still says something.
    """
    directory = tmp_path_factory.mktemp("coarse") / "target"
    shutil.copytree(TARGET_DIR, directory)
    config = json.loads((directory / "config.json").read_bytes())
    (directory / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": False}))
    index_file = directory / "model.safetensors.index.json"
    index = json.loads(index_file.read_bytes())
    first = (directory / index["weight_map"]["model.embed_tokens.weight"]).read_bytes()
    header_len = int.from_bytes(first[:8], "little")
    entry = json.loads(first[8:][:header_len])["model.embed_tokens.weight"]
    begin, end = entry["data_offsets"]
    values = np.frombuffer(first[8 + header_len :][begin:end], np.uint16).reshape(entry["shape"])
    head = from_bits(values)
    head[:, 0] += 40 * np.abs(head).max()
    header = json.dumps({"lm_head.weight": {**entry, "data_offsets": [0, end - begin]}}).encode()
    head_shard = len(header).to_bytes(8, "little") + header + to_bits(head).tobytes()
    (directory / "head.safetensors").write_bytes(head_shard)
    index["weight_map"]["lm_head.weight"] = "head.safetensors"
    index_file.write_text(json.dumps(index))
    return directory


def test_a_wrong_estimate_costs_rows_and_no_token(coarse_target: Path, prompts: list[str]) -> None:
    def generate(config: dict[str, Any] | None) -> list[Any]:
        llm = LLM(str(coarse_target), speculative_config=config, head="screened", max_model_len=1024)
        return llm.generate(prompts, PARAMS, use_tqdm=False)

    plain = generate(None)
    config = {"model": str(DFLASH2_DIR), "q_passes": 1}
    exact, int8 = (generate({**config, "q_head": q_head}) for q_head in ("exact", "int8"))
    for outputs in (exact, int8):
        assert [o.outputs[0].token_ids for o in outputs] == [o.outputs[0].token_ids for o in plain]
    assert passes(exact) < passes(int8)


def test_estimates_of_a_usual_head_mark_as_well(prompts: list[str]) -> None:
    num_passes = []
    for q_head in ("exact", "int8"):
        llm = demo({"method": "dflash2", "q_passes": 1, "q_head": q_head}, head="screened")
        assert llm.describe()["q_head"] == q_head
        num_passes.append(passes(llm.generate(prompts, PARAMS, use_tqdm=False)))
    assert num_passes[1] <= 1.1 * num_passes[0]


def test_the_int8_copy_serves_q_passes_unasked_where_there_is_one() -> None:
    for head, q_head in (("screened", "int8"), ("dense", "exact")):
        assert demo({"method": "dflash2", "q_passes": 1}, head=head).describe()["q_head"] == q_head
    assert demo({"method": "dflash2"}).describe()["q_head"] is None
    with pytest.raises(OptionError, match="q_head"):
        demo({"method": "dflash2", "q_passes": 1, "q_head": "int8"}, head="dense")
    with pytest.raises(OptionError, match="q_head 'q_view' is unknown"):
        demo({"method": "dflash2", "q_head": "q_view"})


@pytest.mark.parametrize("sizes", [[8, 8, 8], [], [0, 8], [1, 8], [8, 65], [8, True], "88", [8.0, 8]])
def test_sizes_that_are_not_one_for_each_tree_are_refused(sizes: Any) -> None:
    with pytest.raises(OptionError, match=r"tree_nodes.*(one for each of the 2 trees|[12]\.\.=64)"):
        demo({"method": "dflash2", "q_passes": 1, "tree_nodes": sizes})


@pytest.mark.parametrize("q_passes", [-1, 9, 1.5, "1", True, None])
def test_bad_numbers_of_q_passes_are_refused(q_passes: Any) -> None:
    with pytest.raises(OptionError, match="q_passes"):
        demo({"method": "dflash2", "q_passes": q_passes})


def test_the_plan_counts_the_views_that_bf16_needs() -> None:
    for weight_format, has_views in (("bf16", True), ("w12", False)):
        llm = demo({"method": "dflash2", "q_passes": 1}, weight_format=weight_format)
        assert llm.describe()["q_passes"] == 1
        assert (llm.describe()["q_view_bytes"] > 0) == has_views
    assert demo({"method": "dflash2"}).describe()["q_view_bytes"] == 0
