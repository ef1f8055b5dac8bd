"""Logits that are no numbers end the request whose token they should choose, there and nowhere else.

The checkpoint is the demo target with NaN in the embedding of one token. Its LM head is a copy of the healthy
embedding, so that only rows of that token are damaged: plain decoding fails at the first one it commits. With
the head tied to the embedding, as in the demo, every row has one logit that is NaN and can never be chosen.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from specpilot_rs import LLM, RequestOutput, SamplingParams, StreamOutput
from specpilot_rs.demo import DFLASH2_DIR, TARGET_DIR
from specpilot_rs.errors import RequestError

from .conftest import FIXTURES

SHARD = "model-00001-of-00002.safetensors"
EMBEDDING = "model.embed_tokens.weight"
HIDDEN_SIZE = 256
NAN_BF16 = b"\xc0\x7f"
ODD_TOKEN = 7777
"""An id that the prompts and continuations below do not hold."""
PARAMS = SamplingParams(max_tokens=60, ignore_eos=True)
HEALTHY = "def read_lines(path):\n    "
CONFIGS = {
    "plain": None,
    "dflash2-chain": {"model": str(DFLASH2_DIR), "tree": "chain"},
    "dflash2-conditional-32": {"model": str(DFLASH2_DIR), "tree": "conditional", "tree_nodes": 32},
    "dflash-ddtree-64": {"model": str(FIXTURES / "demo" / "dflash"), "tree": "ddtree", "tree_nodes": 64},
}
SPECULATIVE = [name for name in CONFIGS if name != "plain"]


def damaged_target(directory: Path, token_id: int, *, tied: bool = False) -> Path:
    """A copy of the demo target with NaN in the embedding of one token and, unless tied, its own LM head."""
    name = f"target-{token_id}-tied" if tied else f"target-{token_id}"
    target = Path(shutil.copytree(TARGET_DIR, directory / name, dirs_exist_ok=True))
    header, body = read_shard()
    begin, end = header[EMBEDDING]["data_offsets"]
    if not tied:
        header["lm_head.weight"] = {**header[EMBEDDING], "data_offsets": [len(body), len(body) + end - begin]}
        body += body[begin:end]
        untie(target)
    row = begin + token_id * HIDDEN_SIZE * len(NAN_BF16)
    body[row : row + HIDDEN_SIZE * len(NAN_BF16)] = NAN_BF16 * HIDDEN_SIZE
    text = json.dumps(header).encode()
    (target / SHARD).write_bytes(len(text).to_bytes(8, "little") + text + bytes(body))
    return target


def read_shard() -> tuple[dict[str, Any], bytearray]:
    """Header and data of the demo target's first shard."""
    data = (TARGET_DIR / SHARD).read_bytes()
    size = int.from_bytes(data[:8], "little")
    return json.loads(data[8 : 8 + size]), bytearray(data[8 + size :])


def untie(target: Path) -> None:
    for name, edit in (
        ("config.json", lambda config: config.update(tie_word_embeddings=False)),
        ("model.safetensors.index.json", lambda index: index["weight_map"].update({"lm_head.weight": SHARD})),
    ):
        value = json.loads((target / name).read_bytes())
        edit(value)
        (target / name).write_text(json.dumps(value), encoding="utf-8")


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("damaged")


@pytest.fixture(scope="module")
def odd_target(directory: Path) -> Path:
    return damaged_target(directory, ODD_TOKEN)


@pytest.fixture(scope="module", params=CONFIGS)
def odd_llm(request: pytest.FixtureRequest, odd_target: Path) -> LLM:
    return LLM(odd_target, speculative_config=CONFIGS[request.param])


@pytest.fixture(scope="module")
def healthy(plain_llm: LLM) -> RequestOutput:
    """What the undamaged target gives."""
    output = plain_llm.generate(HEALTHY, PARAMS, record_logits=True)[0]
    assert ODD_TOKEN not in output.prompt_token_ids + output.outputs[0].token_ids
    return output


def assert_gave_all_back(llm: LLM) -> None:
    assert not llm._engine.has_unfinished()
    plan = llm._engine.describe()
    assert plan["num_free_kv_pages"] == plan["num_kv_pages"]


def drained(stream: Iterator[StreamOutput]) -> tuple[list[StreamOutput], RequestError]:
    """The pieces of a stream that fails, and its error."""
    pieces: list[StreamOutput] = []
    with pytest.raises(RequestError, match="finite") as raised:
        pieces.extend(stream)
    return pieces, raised.value


def test_generate_names_the_prompt_and_ends_the_call(odd_llm: LLM, healthy: RequestOutput):
    odd = {"prompt_token_ids": [*healthy.prompt_token_ids, ODD_TOKEN]}
    with pytest.raises(RequestError, match=r"^prompt 1: .*finite") as raised:
        odd_llm.generate([HEALTHY, odd, HEALTHY], PARAMS)
    # The row that should have chosen the first token is the prompt's last.
    assert str(len(healthy.prompt_token_ids)) in str(raised.value)
    assert_gave_all_back(odd_llm)
    with pytest.raises(RequestError, match="finite") as raised:
        odd_llm.generate(odd, PARAMS)
    assert "prompt 0" not in str(raised.value)
    alone = odd_llm.generate(HEALTHY, PARAMS)[0]
    assert alone.outputs[0].token_ids == healthy.outputs[0].token_ids


def test_only_the_damaged_stream_ends(odd_llm: LLM, healthy: RequestOutput):
    """A batch mate decodes on, beside the request that fails and after it, to the tokens it gets alone."""
    mate = odd_llm.stream(HEALTHY, PARAMS)
    tokens = [token for _ in range(2) for token in next(mate).token_ids]
    odd = odd_llm.stream({"prompt_token_ids": [5, ODD_TOKEN, 6]}, PARAMS)
    pieces, _ = drained(odd)
    assert [piece.finish_reason for piece in pieces] == ["abort"]
    assert pieces[0].result is not None
    assert not pieces[0].result.finished
    assert pieces[0].token_ids == []
    tokens += [token for piece in mate for token in piece.token_ids]
    assert tokens == healthy.outputs[0].token_ids
    assert_gave_all_back(odd_llm)


def test_a_scored_prompt_keeps_its_numbers(odd_llm: LLM, healthy: RequestOutput):
    """Nothing is chosen by the rows of a scored prompt, so they are returned as they are."""
    prompt = healthy.prompt_token_ids
    scored = odd_llm.score([*prompt, ODD_TOKEN])
    assert np.isnan(scored.logits[-1]).all()
    assert healthy.record is not None
    np.testing.assert_array_equal(scored.logits[len(prompt) - 1], healthy.record.logits[0])


@pytest.mark.parametrize("name", SPECULATIVE)
def test_a_damaged_row_that_is_rejected_changes_nothing(name: str, directory: Path, healthy: RequestOutput):
    """A drafted token that the target does not take may have a row of NaN beside the accepted ones."""
    drafting = LLM(TARGET_DIR, speculative_config=CONFIGS[name])
    rounds = drafting.generate(HEALTHY, PARAMS, record_rounds=True)[0].rounds
    assert rounds is not None
    committed = {*healthy.prompt_token_ids, *healthy.outputs[0].token_ids}
    rejected = [token for drafted in rounds for token in drafted.draft_token_ids if token not in committed]
    # The one drafted most often: NaN beside as many accepted rows as can be had.
    token_id = max(sorted(set(rejected)), key=rejected.count)
    damaged = LLM(damaged_target(directory, token_id), speculative_config=CONFIGS[name])
    output = damaged.generate(HEALTHY, PARAMS, record_logits=True, record_rounds=True)[0]
    assert output.rounds is not None
    drafted = [token for drafted in output.rounds for token in drafted.draft_token_ids]
    assert drafted.count(token_id) == rejected.count(token_id) > 0
    assert output.outputs[0].token_ids == healthy.outputs[0].token_ids
    assert output.record is not None
    assert healthy.record is not None
    for values in ("logits", "residual_l2", "gdn_state"):
        got, want = getattr(output.record, values), getattr(healthy.record, values)
        np.testing.assert_array_equal(got.view(np.uint32), want.view(np.uint32))


@pytest.mark.parametrize("place", [1, 7, 20])
def test_speculation_fails_where_plain_decoding_does(place: int, directory: Path, healthy: RequestOutput):
    """The target's own choice is a damaged token: emitted, and the end, inside an accepted block or not."""
    tokens = healthy.outputs[0].token_ids
    token_id = tokens[place]
    assert token_id not in healthy.prompt_token_ids
    want = tokens[: tokens.index(token_id) + 1]
    target = damaged_target(directory, token_id)
    messages = set()
    for config in CONFIGS.values():
        llm = LLM(target, speculative_config=config)
        pieces, error = drained(llm.stream(HEALTHY, PARAMS))
        assert [token for piece in pieces for token in piece.token_ids] == want
        messages.add(str(error))
        assert_gave_all_back(llm)
    assert len(messages) == 1


@pytest.mark.parametrize("name", CONFIGS)
def test_a_token_whose_logit_is_no_number_is_never_chosen(name: str, directory: Path, healthy: RequestOutput):
    """Neither the target's choices nor its drafter's may depend on a column of NaN."""
    target = damaged_target(directory, ODD_TOKEN, tied=True)
    llm = LLM(target, speculative_config=CONFIGS[name])
    output = llm.generate(HEALTHY, PARAMS, record_logits=True)[0]
    assert output.outputs[0].token_ids == healthy.outputs[0].token_ids
    assert output.record is not None
    assert np.isnan(output.record.logits[:, ODD_TOKEN]).all()
    assert np.isfinite(np.delete(output.record.logits, ODD_TOKEN, axis=1)).all()
    if CONFIGS[name] is not None:
        assert output.metrics.mean_acceptance_length > 1.5
