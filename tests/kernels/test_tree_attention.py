"""TreeAttention against a naive softmax in float64 over each row's own keys."""

from collections.abc import Iterator

import numpy as np
import pytest
from specpilot_rs._core import kernels

Parents = list[int]


def path_of(parents: Parents, row: int) -> list[int]:
    """Rows from the root to ``row``."""
    path = []
    while row >= 0:
        path.append(row)
        row = parents[row]
    return path[::-1]


def random_parents(rng: np.random.Generator, num_rows: int) -> Parents:
    """Parents before children; -1 hangs a row behind the committed tokens."""
    return [int(rng.integers(max(-1, row - 6), row)) for row in range(num_rows)]


class Request:
    """Committed keys and values of one request and the tree behind them."""

    def __init__(
        self, rng: np.random.Generator, committed_len: int, parents: Parents, kv_heads: int, head_dim: int
    ) -> None:
        self.committed_len, self.parents = committed_len, parents
        self.k, self.v = rng.normal(size=(2, committed_len, kv_heads, head_dim)).astype(np.float32)


def expected_rows(
    requests: list[Request],
    q: np.ndarray,
    k_tail: np.ndarray,
    v_tail: np.ndarray,
    scale: float,
    window: int | None,
) -> Iterator[np.ndarray]:
    group = q.shape[1] // k_tail.shape[1]
    first_row = 0
    for request in requests:
        for row in range(len(request.parents)):
            path = [first_row + r for r in path_of(request.parents, row)]
            k = np.concatenate([request.k, k_tail[path]]).astype(np.float64)
            v = np.concatenate([request.v, v_tail[path]]).astype(np.float64)
            if window is not None:
                k, v = k[-window:], v[-window:]
            k, v = k.repeat(group, axis=1), v.repeat(group, axis=1)
            scores = np.einsum("hd,thd->ht", q[first_row + row].astype(np.float64), k) * scale
            weights = np.exp(scores - scores.max(axis=1, keepdims=True))
            weights /= weights.sum(axis=1, keepdims=True)
            yield np.einsum("ht,thd->hd", weights, v)
        first_row += len(request.parents)


@pytest.mark.parametrize("window", [None, 1, 40, 64, 300])
@pytest.mark.parametrize(("q_heads", "kv_heads", "head_dim"), [(2, 1, 128), (6, 2, 24), (4, 4, 72)])
def test_rows_see_their_prefix_and_ancestors(
    q_heads: int, kv_heads: int, head_dim: int, window: int | None
) -> None:
    rng = np.random.default_rng(7)
    requests = [
        Request(rng, committed_len, random_parents(rng, num_rows), kv_heads, head_dim)
        for committed_len, num_rows in [(0, 1), (0, 30), (63, 20), (64, 1), (250, 33), (513, 9)]
    ]
    num_rows = sum(len(request.parents) for request in requests)
    q = rng.normal(size=(num_rows, q_heads, head_dim)).astype(np.float32)
    k_tail, v_tail = rng.normal(size=(2, num_rows, kv_heads, head_dim)).astype(np.float32)
    scale = float(np.float32(1.7 / np.sqrt(head_dim)))

    num_pages = 24
    free = list(rng.permutation(num_pages))
    k_pages, v_pages = np.full((2, num_pages, kv_heads, 64, head_dim), np.nan, dtype=np.float32)
    tables = []
    for request in requests:
        tables.append([int(free.pop()) for _ in range(-(-request.committed_len // 64))])
        for position in range(request.committed_len):
            page = tables[-1][position // 64]
            k_pages[page, :, position % 64] = request.k[position]
            v_pages[page, :, position % 64] = request.v[position]

    segments = [(0, request.committed_len, request.parents) for request in requests]
    got = kernels.tree_attention(q, k_tail, v_tail, k_pages, v_pages, tables, segments, scale, window)

    want = np.stack(list(expected_rows(requests, q, k_tail, v_tail, scale, window)))
    np.testing.assert_allclose(got, want, rtol=0, atol=3e-6)


@pytest.mark.parametrize(("window", "ring"), [(1, 1), (40, 2), (300, 6)])
def test_newer_positions_in_a_ring_are_not_read(window: int, ring: int) -> None:
    """Positions behind the rows, which are no numbers, lie where the rows look no more."""
    rng = np.random.default_rng(window)
    committed, heads, head_dim = 700, 2, 24
    request = Request(rng, committed, random_parents(rng, 20), heads, head_dim)
    q, k_tail, v_tail = rng.normal(size=(3, 20, heads, head_dim)).astype(np.float32)
    # As many as leave the window before the first row as it is.
    newer = np.full((64 * ring - window + 1, heads, head_dim), np.nan, dtype=np.float32)
    outputs = []
    for num_pages, behind in ((11, newer[:0]), (ring, newer)):
        k_pages, v_pages = np.full((2, num_pages, heads, 64, head_dim), np.nan, dtype=np.float32)
        for pages, committed_values in ((k_pages, request.k), (v_pages, request.v)):
            for position, values in enumerate(np.concatenate([committed_values, behind])):
                pages[position // 64 % num_pages, :, position % 64] = values
        table = [block % num_pages for block in range(-(-committed // 64))]
        segments = [(0, committed, request.parents)]
        outputs.append(
            kernels.tree_attention(q, k_tail, v_tail, k_pages, v_pages, [table], segments, 0.2, window)
        )
    want = np.stack(list(expected_rows([request], q, k_tail, v_tail, 0.2, window)))
    np.testing.assert_allclose(outputs[0], want, rtol=0, atol=3e-6)
    np.testing.assert_array_equal(outputs[0].view(np.uint32), outputs[1].view(np.uint32))


def test_large_scores_do_not_overflow() -> None:
    q = np.full((1, 1, 16), 100.0, dtype=np.float32)
    k_tail = np.full((1, 1, 16), 100.0, dtype=np.float32)
    v_tail = np.arange(16, dtype=np.float32).reshape(1, 1, 16)
    k_pages = np.full((1, 1, 64, 16), -100.0, dtype=np.float32)
    v_pages = np.ones_like(k_pages)
    got = kernels.tree_attention(q, k_tail, v_tail, k_pages, v_pages, [[0]], [(0, 64, [-1])], 1.0)
    np.testing.assert_array_equal(got, v_tail)


def test_heads_that_do_not_share_evenly_are_refused() -> None:
    q = np.zeros((1, 3, 8), dtype=np.float32)
    kv = np.zeros((1, 2, 8), dtype=np.float32)
    pages = np.zeros((1, 2, 64, 8), dtype=np.float32)
    with pytest.raises(ValueError, match="`q_heads` must be 2, got 3"):
        kernels.tree_attention(q, kv, kv, pages, pages, [[]], [(0, 0, [-1])], 1.0)
