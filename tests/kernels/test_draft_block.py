"""`draft_block` against attention written out in float64."""

import numpy as np
import pytest
from specpilot_rs._core import kernels
from tolerances import assert_close

PAGE = 64


def oracle(q, k_block, v_block, k_context, v_context, *, scale, causal, window):
    """One block: q [B, q_heads, d], keys and values [B or n, kv_heads, d]."""
    block_size, q_heads, _ = q.shape
    kv_heads = k_block.shape[1]
    context_len = len(k_context)
    out = np.empty(q.shape, np.float64)
    for i in range(block_size):
        position = context_len + i
        in_sight = [p for p in range(context_len) if window is None or position - p < window]
        last = i + 1 if causal else block_size
        keys = np.concatenate([k_context[in_sight], k_block[:last]]).astype(np.float64)
        values = np.concatenate([v_context[in_sight], v_block[:last]]).astype(np.float64)
        for h in range(q_heads):
            g = h // (q_heads // kv_heads)
            scores = scale * keys[:, g] @ q[i, h].astype(np.float64)
            weights = np.exp(scores - scores.max())
            out[i, h] = weights @ values[:, g] / weights.sum()
    return out


class Case:
    """Blocks of one call, with contexts scattered over pages; unused page slots hold NaN."""

    def __init__(self, rng, context_lens, *, block_size=5, q_heads=4, kv_heads=2, head_dim=24):
        num_blocks = len(context_lens)
        self.context_lens = context_lens

        def normal(*shape):
            return rng.standard_normal(shape, np.float32)

        self.q = 2 * normal(block_size, num_blocks, q_heads, head_dim)
        self.k = normal(block_size, num_blocks, kv_heads, head_dim)
        self.v = normal(block_size, num_blocks, kv_heads, head_dim)
        self.k_context = [normal(n, kv_heads, head_dim) for n in context_lens]
        self.v_context = [normal(n, kv_heads, head_dim) for n in context_lens]
        num_pages = [-(-n // PAGE) for n in context_lens]
        order = rng.permutation(sum(num_pages)).astype(np.uint32)
        ends = np.cumsum(num_pages)
        self.page_tables = [order[end - n : end] for n, end in zip(num_pages, ends, strict=True)]
        self.k_pages = np.full((len(order) + 1, kv_heads, PAGE, head_dim), np.nan, np.float32)
        self.v_pages = self.k_pages.copy()
        for table, k, v in zip(self.page_tables, self.k_context, self.v_context, strict=True):
            for p in range(len(k)):
                self.k_pages[table[p // PAGE], :, p % PAGE] = k[p]
                self.v_pages[table[p // PAGE], :, p % PAGE] = v[p]

    def run(self, blocks=None, **options):
        blocks = range(len(self.context_lens)) if blocks is None else blocks
        pick = list(blocks)
        return kernels.draft_block(
            np.ascontiguousarray(self.q[:, pick]),
            np.ascontiguousarray(self.k[:, pick]),
            np.ascontiguousarray(self.v[:, pick]),
            self.k_pages,
            self.v_pages,
            [self.page_tables[b] for b in pick],
            [self.context_lens[b] for b in pick],
            **options,
        )

    def expected(self, **options):
        blocks = [
            oracle(self.q[:, b], self.k[:, b], self.v[:, b], self.k_context[b], self.v_context[b], **options)
            for b in range(len(self.context_lens))
        ]
        return np.stack(blocks, axis=1)


@pytest.mark.parametrize("window", [None, 1, 3, 63, 64, 65, 200])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("context_lens", [[0], [1, 0, 64], [63, 65, 128], [300]])
def test_matches_the_formula(context_lens, causal, window):
    case = Case(np.random.default_rng(0), context_lens)
    options = {"scale": 0.2, "causal": causal, "window": window}
    assert_close("draft_block", case.run(**options), case.expected(**options))


@pytest.mark.parametrize("heads", [(1, 1), (6, 2), (8, 8)])
@pytest.mark.parametrize("head_dim", [2, 16, 64, 128])
def test_head_layouts(heads, head_dim):
    rng = np.random.default_rng(1)
    case = Case(rng, [70, 5], block_size=16, q_heads=heads[0], kv_heads=heads[1], head_dim=head_dim)
    options = {"scale": head_dim**-0.5, "causal": False, "window": None}
    assert_close("draft_block", case.run(**options), case.expected(**options))


def test_large_scores_do_not_overflow():
    case = Case(np.random.default_rng(2), [20])
    case.q *= 200
    options = {"scale": 1.0, "causal": False, "window": None}
    got, want = case.run(**options), case.expected(**options)
    # One key wins nearly everywhere; fp32 scores of some thousands decide the rest only roughly.
    assert np.isfinite(got).all()
    assert np.abs(got - want).max() < 1e-3


def test_a_block_does_not_depend_on_its_neighbours():
    case = Case(np.random.default_rng(3), [130, 0, 77, 64])
    options = {"scale": 0.2, "causal": False, "window": 100}
    together = case.run(**options)
    for b in range(4):
        alone = case.run([b], **options)
        np.testing.assert_array_equal(alone[:, 0].view(np.uint32), together[:, b].view(np.uint32))


def test_bad_arguments_are_refused_by_name():
    case = Case(np.random.default_rng(4), [70])
    options = {"scale": 1.0, "causal": False}
    with pytest.raises(ValueError, match="window"):
        case.run(window=0, **options)
    case.context_lens = [129]
    with pytest.raises(ValueError, match=r"page_table.*at least 3.*got 2"):
        case.run(**options)
    case.context_lens = [70]
    case.page_tables = [np.array([0, 99], np.uint32)]
    with pytest.raises(ValueError, match=r"page_table.*below 3, got 99"):
        case.run(**options)
