"""The drafter's CUDA kernels against the host's: ids exactly, values by tolerance, blocks on their own."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from specpilot_rs._core import kernels

from tests.kernels.bfloat16 import to_bits

GPU = {"device": "cuda"}
PAGE = 64


def normal(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.standard_normal(shape, np.float32)


@pytest.mark.parametrize("output_side", [False, True])
@pytest.mark.parametrize(
    ("block_size", "blocks", "width", "taps", "group"),
    [(1, 1, 16, 2, 16), (16, 3, 256, 2, 16), (5, 2, 21, 3, 7), (4, 1, 8, 1, 8), (16, 1, 5120, 4, 128)],
)
def test_block_conv_gives_the_hosts_bits(
    block_size: int, blocks: int, width: int, taps: int, group: int, output_side: bool
) -> None:
    rng = np.random.default_rng(0)
    x, residual = normal(rng, block_size, blocks, width), normal(rng, block_size, blocks, width)
    delta = normal(rng, block_size, blocks, 2, taps, width // group)
    base = normal(rng, 2, taps, width)
    for y in (None, residual):
        got = kernels.block_conv(x, delta, base, output_side, y, **GPU)
        np.testing.assert_array_equal(got, kernels.block_conv(x, delta, base, output_side, y))


class Blocks:
    """Blocks with contexts scattered over pages; unused page slots hold NaN."""

    def __init__(
        self, context_lens: list[int], block_size: int, q_heads: int, kv_heads: int, head_dim: int
    ) -> None:
        rng = np.random.default_rng([*context_lens, block_size, q_heads, head_dim])
        num_blocks = len(context_lens)
        self.context_lens = context_lens
        self.q = 2 * normal(rng, block_size, num_blocks, q_heads, head_dim)
        self.k = normal(rng, block_size, num_blocks, kv_heads, head_dim)
        self.v = normal(rng, block_size, num_blocks, kv_heads, head_dim)
        num_pages = [-(-n // PAGE) for n in context_lens]
        order = rng.permutation(sum(num_pages)).astype(np.uint32)
        ends = np.cumsum(num_pages)
        self.tables = [order[end - n : end] for n, end in zip(num_pages, ends, strict=True)]
        self.pages = normal(rng, 2, len(order) + 1, kv_heads, PAGE, head_dim)
        for table, length in zip(self.tables, context_lens, strict=True):
            if length % PAGE:
                self.pages[:, table[-1], :, length % PAGE :] = np.nan

    def run(self, blocks: list[int] | None = None, **options: Any) -> np.ndarray:
        pick = list(range(len(self.tables))) if blocks is None else blocks
        arrays = [np.ascontiguousarray(x[:, pick]) for x in (self.q, self.k, self.v)]
        tables = [self.tables[b] for b in pick]
        return kernels.draft_block(
            *arrays, *self.pages, tables, [self.context_lens[b] for b in pick], **options
        )


def assert_attends(blocks: Blocks, **options: Any) -> None:
    got = blocks.run(**options, **GPU)
    np.testing.assert_allclose(got, blocks.run(**options), rtol=3e-5, atol=3e-6)
    for b in range(len(blocks.tables)):
        alone = blocks.run([b], **options, **GPU)
        np.testing.assert_array_equal(alone[:, 0].view(np.uint32), got[:, b].view(np.uint32))


@pytest.mark.parametrize("window", [None, 1, 3, 63, 64, 65, 200])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("context_lens", [[0], [1, 0, 64], [63, 65, 128], [300, 1029, 2]])
def test_draft_block_sees_what_the_host_sees(
    context_lens: list[int], causal: bool, window: int | None
) -> None:
    blocks = Blocks(context_lens, 5, 4, 2, 24)
    assert_attends(blocks, scale=0.2, causal=causal, window=window)


@pytest.mark.parametrize(("q_heads", "kv_heads"), [(1, 1), (6, 2), (8, 8), (32, 8)])
@pytest.mark.parametrize("head_dim", [2, 6, 64, 128, 200, 256])
def test_draft_block_head_layouts(q_heads: int, kv_heads: int, head_dim: int) -> None:
    blocks = Blocks([70, 5], 16, q_heads, kv_heads, head_dim)
    assert_attends(blocks, scale=head_dim**-0.5, causal=False)


def test_draft_block_of_published_shape() -> None:
    blocks = Blocks([4100, 700], 16, 32, 8, 128)
    assert_attends(blocks, scale=128**-0.5, causal=False, window=2048)
    blocks = Blocks([9000], 70, 8, 4, 128)
    assert_attends(blocks, scale=128**-0.5, causal=True)


LOGIT_SHAPES: list[dict[str, float]] = [{}, {"multiplier": 0.25}, {"multiplier": 0.5, "softcap": 4.0}]


@pytest.mark.parametrize("options", LOGIT_SHAPES)
@pytest.mark.parametrize("vocab_size", [5, 1000, 4097, 32_000])
@pytest.mark.parametrize("top_k", [1, 5])
def test_draft_select_marginals(top_k: int, vocab_size: int, options: dict[str, float]) -> None:
    logits = 3 * normal(np.random.default_rng(1), 4, 2, vocab_size)
    ids, log_probs = kernels.draft_select(logits, top_k, **options, **GPU)
    host_ids, host_log_probs = kernels.draft_select(logits, top_k, **options)
    np.testing.assert_array_equal(ids, host_ids)
    np.testing.assert_allclose(log_probs, host_log_probs, rtol=0, atol=3e-5)
    assert (log_probs <= 0).all()
    alone = kernels.draft_select(logits[2:3, 1:].copy(), top_k, **options, **GPU)
    np.testing.assert_array_equal(alone[1][0, 0], log_probs[2, 1])


@pytest.mark.parametrize("top_k", [16, 64])
@pytest.mark.parametrize("distinct", [1, 2, 7, 10_000])
def test_draft_select_ties_go_to_the_lowest_ids(distinct: int, top_k: int) -> None:
    logits = np.random.default_rng(2).integers(0, distinct, (6, 1, 9000)).astype(np.float32)
    logits[1] = np.sort(logits[1])
    logits[2] = -np.sort(-logits[2])
    ids, _ = kernels.draft_select(logits, top_k, **GPU)
    np.testing.assert_array_equal(ids, np.argsort(-logits, axis=-1, kind="stable")[..., :top_k])


@pytest.mark.parametrize("options", LOGIT_SHAPES)
@pytest.mark.parametrize(("top_k", "rank"), [(1, 24), (4, 1), (16, 64), (16, 256), (33, 70)])
def test_draft_select_scores_pairs(top_k: int, rank: int, options: dict[str, float]) -> None:
    rng = np.random.default_rng(3)
    logits, gate = 4 * normal(rng, 5, 3, 9000), normal(rng, 5, 3, rank)
    predecessor, successor = (to_bits(normal(rng, 9000, rank) / rank**0.25) for _ in range(2))
    anchors = [8999, 0, 17]

    def select(blocks: slice, device: str) -> tuple[np.ndarray, np.ndarray]:
        selector = (gate[:, blocks].copy(), predecessor, successor, anchors[blocks])
        return kernels.draft_select(
            logits[:, blocks].copy(), top_k, **options, selector=selector, device=device
        )

    ids, log_probs = select(slice(0, 3), "cuda")
    host_ids, host_log_probs = select(slice(0, 3), "cpu")
    np.testing.assert_array_equal(ids, host_ids)
    np.testing.assert_allclose(log_probs[0, :, 0], host_log_probs[0, :, 0], rtol=0, atol=3e-5)
    np.testing.assert_allclose(log_probs[1:], host_log_probs[1:], rtol=0, atol=3e-5)
    alone_ids, alone = select(slice(1, 2), "cuda")
    np.testing.assert_array_equal(alone_ids[:, 0], ids[:, 1])
    np.testing.assert_array_equal(alone[1:, 0], log_probs[1:, 1])


def test_sampled_rows_are_the_hosts() -> None:
    rng = np.random.default_rng(4)
    logits = 3 * normal(rng, 24, 9000)
    masked = [rng.integers(0, 9000, 5).tolist() for _ in range(24)]
    samplers = [
        (temperature, top_k, top_p, min_p, 7, position)
        for position, (temperature, top_k, top_p, min_p) in enumerate(
            [(0.0, 0, 1.0, 0.0), (1.0, 0, 1.0, 0.0), (0.7, 20, 0.9, 0.0), (1.7, 0, 1.0, 0.05)] * 6
        )
    ]
    ids, chosen = kernels.sample_rows(logits, masked, samplers, **GPU)
    host_ids, host_chosen = kernels.sample_rows(logits, masked, samplers)
    np.testing.assert_array_equal(ids, host_ids)
    np.testing.assert_array_equal(chosen, host_chosen)
    assert (ids[::4] == kernels.greedy_argmax(logits, masked, **GPU)[0][::4]).all()
    alone, _ = kernels.sample_rows(logits[5:6].copy(), masked[5:6], samplers[5:6], **GPU)
    assert alone[0] == ids[5]
