"""`draft_select` against a stable sort and log-softmax in float64."""

import numpy as np
import pytest
from specpilot_rs._core import kernels
from tolerances import assert_close

from tests.kernels.bfloat16 import from_bits, to_bits


def shaped(logits, multiplier, softcap):
    logits = logits.astype(np.float64) * multiplier
    return logits if softcap is None else softcap * np.tanh(logits / softcap)


def log_softmax(scores, over=None):
    over = scores if over is None else over
    top = over.max(axis=-1, keepdims=True)
    return scores - top - np.log(np.exp(over - top).sum(axis=-1, keepdims=True))


def top_ids(logits, top_k):
    """Largest first, ties to the lowest id: a stable sort of the negated values."""
    return np.argsort(-logits, axis=-1, kind="stable")[..., :top_k]


def oracle_marginal(logits, top_k, multiplier=1.0, softcap=None):
    ids = top_ids(logits, top_k)
    scores = shaped(logits, multiplier, softcap)
    return ids, log_softmax(np.take_along_axis(scores, ids, -1), scores)


def oracle_selector(logits, top_k, gate, predecessor, successor, anchors, multiplier=1.0, softcap=None):
    """Log-probs [levels, blocks, parents, top_k]; level 0 has its one parent in front of NaN."""
    levels, blocks, _ = logits.shape
    ids = top_ids(logits, top_k)
    unary = np.take_along_axis(shaped(logits, multiplier, softcap), ids, -1)
    out = np.full((levels, blocks, top_k, top_k), np.nan)
    for t in range(levels):
        for b in range(blocks):
            parents = [anchors[b]] if t == 0 else ids[t - 1, b]
            for p, a in enumerate(parents):
                gated = predecessor[a].astype(np.float64) * gate[t, b]
                pair = successor[ids[t, b]].astype(np.float64) @ gated
                out[t, b, p] = log_softmax(unary[t, b] + pair)
    return ids, out


LOGIT_SHAPES = [{}, {"multiplier": 0.25}, {"softcap": 30.0}, {"multiplier": 0.5, "softcap": 4.0}]


@pytest.mark.parametrize("options", LOGIT_SHAPES)
@pytest.mark.parametrize("vocab_size", [5, 64, 100, 1000])
@pytest.mark.parametrize("top_k", [1, 5])
def test_marginals(top_k, vocab_size, options):
    logits = 3 * np.random.default_rng(0).standard_normal((4, 2, vocab_size), np.float32)
    ids, log_probs = kernels.draft_select(logits, top_k, **options)
    want_ids, want = oracle_marginal(logits, top_k, **options)
    np.testing.assert_array_equal(ids, want_ids)
    assert_close("draft_select", log_probs[:, :, 0], want)
    assert (log_probs <= 0).all()


@pytest.mark.parametrize("distinct", [1, 2, 7])
def test_ties_go_to_the_lowest_ids(distinct):
    logits = np.random.default_rng(1).integers(0, distinct, (6, 1, 700)).astype(np.float32)
    ids, _ = kernels.draft_select(logits, 16)
    np.testing.assert_array_equal(ids, top_ids(logits, 16))


@pytest.mark.parametrize("order", [1, -1])
def test_sorted_logits_are_found_wherever_they_lie(order):
    logits = np.arange(1000, dtype=np.float32)[::order].reshape(1, 1, -1).copy()
    ids, _ = kernels.draft_select(logits, 64)
    np.testing.assert_array_equal(ids, top_ids(logits, 64))


def selector_case(rng, levels=5, blocks=3, vocab_size=300, rank=24):
    logits = 4 * rng.standard_normal((levels, blocks, vocab_size), np.float32)
    gate = rng.standard_normal((levels, blocks, rank), np.float32)
    predecessor, successor = (to_bits(rng.standard_normal((vocab_size, rank))) for _ in range(2))
    anchors = rng.integers(0, vocab_size, blocks).tolist()
    return logits, gate, predecessor, successor, anchors


@pytest.mark.parametrize("options", LOGIT_SHAPES)
@pytest.mark.parametrize("top_k", [1, 4, 16])
def test_selector_scores(top_k, options):
    logits, gate, pred_bits, succ_bits, anchors = selector_case(np.random.default_rng(2))
    ids, log_probs = kernels.draft_select(
        logits, top_k, **options, selector=(gate, pred_bits, succ_bits, anchors)
    )
    want_ids, want = oracle_selector(
        logits, top_k, gate, from_bits(pred_bits), from_bits(succ_bits), anchors, **options
    )
    np.testing.assert_array_equal(ids, want_ids)
    assert_close("draft_select", log_probs[0, :, 0], want[0, :, 0])
    assert_close("draft_select", log_probs[1:], want[1:])


def test_a_zero_codebook_leaves_the_logits_among_the_candidates():
    logits, gate, pred_bits, succ_bits, anchors = selector_case(np.random.default_rng(3))
    ids, log_probs = kernels.draft_select(
        logits, 8, selector=(gate, pred_bits, np.zeros_like(succ_bits), anchors)
    )
    want = log_softmax(np.take_along_axis(logits.astype(np.float64), ids.astype(np.int64), -1))
    for parent in range(8):
        assert_close("draft_select", log_probs[1:, :, parent], want[1:])


def test_a_block_does_not_depend_on_its_neighbours():
    logits, gate, pred_bits, succ_bits, anchors = selector_case(np.random.default_rng(4))
    ids, log_probs = kernels.draft_select(logits, 16, selector=(gate, pred_bits, succ_bits, anchors))
    for b in range(3):
        one = np.s_[:, b : b + 1]
        alone = kernels.draft_select(
            logits[one].copy(), 16, selector=(gate[one].copy(), pred_bits, succ_bits, anchors[b : b + 1])
        )
        np.testing.assert_array_equal(alone[0], ids[one])
        np.testing.assert_array_equal(alone[1][1:].view(np.uint32), log_probs[one][1:].view(np.uint32))


def test_bad_arguments_are_refused_by_name():
    logits, gate, pred_bits, succ_bits, anchors = selector_case(np.random.default_rng(5))
    with pytest.raises(ValueError, match="top_k"):
        kernels.draft_select(logits, 0)
    with pytest.raises(ValueError, match=r"vocab_size.*301.*300"):
        kernels.draft_select(logits, 301)
    with pytest.raises(ValueError, match=r"anchor_tokens.*below 300, got 300"):
        kernels.draft_select(logits, 4, selector=(gate, pred_bits, succ_bits, [0, 300, 1]))
    with pytest.raises(ValueError, match=r"successor.*300.*200"):
        kernels.draft_select(logits, 4, selector=(gate, pred_bits, succ_bits[:200].copy(), anchors))
