"""Tree attention on CUDA: values against float64, and the same bits for a token path however it is run.

Keys, values and queries are BF16 numbers here, for the kernel rounds them to that.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from specpilot_rs._core import kernels

from tests.kernels.bfloat16 import from_bits, to_bits
from tests.kernels.test_tree_attention import Request, expected_rows, path_of, random_parents

ROW_COUNTS = [1, 2, 7, 8, 9, 16, 17, 31, 32, 33, 63, 64]
# Query heads, kv heads, length: the demo's, the 27B's, those of other families, and odd ones.
SHAPES = [(2, 1, 128), (24, 4, 256), (32, 8, 64), (16, 1, 512), (6, 2, 24), (4, 4, 72), (12, 2, 300)]
NUM_PAGES = 40


def rounded(x: np.ndarray) -> np.ndarray:
    return from_bits(to_bits(x.astype(np.float32))).reshape(x.shape)


@dataclass
class Pool:
    """Pages of all requests, in shuffled order; what is not written is NaN or far off."""

    k: np.ndarray
    v: np.ndarray
    free: list[int]

    @classmethod
    def empty(cls, rng: np.random.Generator, kv_heads: int, head_dim: int) -> Pool:
        shape = (NUM_PAGES, kv_heads, 64, head_dim)
        return cls(
            np.full(shape, 3e3, dtype=np.float32),
            np.full(shape, np.nan, dtype=np.float32),
            [int(page) for page in rng.permutation(NUM_PAGES)],
        )

    def add(self, k: np.ndarray, v: np.ndarray, ring: int = NUM_PAGES) -> list[int]:
        """Writes ``[tokens, kv_heads, head_dim]`` over and over to ``ring`` pages; returns the table."""
        num_blocks = -(-len(k) // 64)
        own = [self.free.pop() for _ in range(min(num_blocks, ring))]
        pages = [own[block % ring] for block in range(num_blocks)]
        for position in range(len(k)):
            self.k[pages[position // 64], :, position % 64] = k[position]
            self.v[pages[position // 64], :, position % 64] = v[position]
        return pages


@dataclass
class Case:
    """Requests with their trees, and what all rows give."""

    rng: np.random.Generator
    requests: list[Request]
    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    scale: float
    window: int | None
    out: np.ndarray

    @classmethod
    def random(
        cls, shape: tuple[int, int, int], trees: list[tuple[int, list[int]]], window: int | None, seed: int
    ) -> Case:
        q_heads, kv_heads, head_dim = shape
        rng = np.random.default_rng(seed)
        requests = [Request(rng, committed, parents, kv_heads, head_dim) for committed, parents in trees]
        for request in requests:
            request.k, request.v = rounded(request.k), rounded(request.v)
        num_rows = sum(len(parents) for _, parents in trees)
        q = rounded(rng.normal(size=(num_rows, q_heads, head_dim)))
        k, v = rounded(rng.normal(size=(2, num_rows, kv_heads, head_dim)))
        scale = float(np.float32(1.7 / np.sqrt(head_dim)))
        case = cls(rng, requests, q, k, v, scale, window, q)
        case.out = case.run(slice(0, num_rows), requests)
        return case

    def run(self, rows: slice | list[int], requests: list[Request], ring: int = NUM_PAGES) -> np.ndarray:
        """The kernel over the given rows, which are those of ``requests``, each in up to ``ring`` pages."""
        k, v = self.k[rows], self.v[rows]
        pool = Pool.empty(self.rng, k.shape[1], k.shape[2])
        tables = [pool.add(request.k, request.v, ring) for request in requests]
        segments = [(0, request.committed_len, request.parents) for request in requests]
        pages = (pool.k, pool.v, tables)
        return kernels.tree_attention(
            self.q[rows], k, v, *pages, segments, self.scale, self.window, device="cuda"
        )

    def committed_then_plain(self, request: Request, path: list[int]) -> np.ndarray:
        """The last row of ``path`` alone, behind the rows before it once they are committed."""
        alone = Request(self.rng, 0, [-1], self.k.shape[1], self.k.shape[2])
        alone.k = np.concatenate([request.k, self.k[path[:-1]]])
        alone.v = np.concatenate([request.v, self.v[path[:-1]]])
        alone.committed_len = len(alone.k)
        return self.run(path[-1:], [alone])[0]


@pytest.mark.parametrize("window", [None, 1, 40, 300])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rows_see_their_prefix_and_ancestors(shape: tuple[int, int, int], window: int | None) -> None:
    rng = np.random.default_rng(1)
    lengths = [(0, 1), (0, 30), (63, 20), (64, 1), (250, 33), (513, 9)]
    trees = [(committed, random_parents(rng, num_rows)) for committed, num_rows in lengths]
    case = Case.random(shape, trees, window, 2)
    args = (case.requests, case.q, case.k, case.v, case.scale, window)
    np.testing.assert_allclose(case.out, np.stack(list(expected_rows(*args))), rtol=0, atol=2e-5)
    first = 0
    for request in case.requests:
        rows = slice(first, first + len(request.parents))
        first = rows.stop
        np.testing.assert_array_equal(case.run(rows, [request]), case.out[rows])


@pytest.mark.parametrize(("window", "ring"), [(1, 1), (40, 1), (65, 1), (66, 2), (300, 5), (385, 6)])
@pytest.mark.parametrize("shape", SHAPES[:4], ids=str)
def test_windows_through_a_ring_of_pages(shape: tuple[int, int, int], window: int, ring: int) -> None:
    """Pages that hold a window and no more, written over since: what is out of sight has no weight."""
    rng = np.random.default_rng(window)
    lengths = [(700, 33), (64, 1), (0, 9), (513, 64), (895, 20)]
    trees = [(committed, random_parents(rng, num_rows)) for committed, num_rows in lengths]
    case = Case.random(shape, trees, window, 5)
    got = case.run(slice(0, len(case.q)), case.requests, ring)
    np.testing.assert_array_equal(got.view(np.uint32), case.out.view(np.uint32))


@pytest.mark.parametrize(("window", "ring"), [(1, 1), (40, 2), (65, 2), (300, 6), (385, 7)])
@pytest.mark.parametrize("shape", SHAPES[:4], ids=str)
def test_newer_positions_in_a_ring_are_not_read(shape: tuple[int, int, int], window: int, ring: int) -> None:
    """Rows of a prompt whose later rows are in the ring already, and are no numbers."""
    rng = np.random.default_rng(window)
    lengths = [(700, 33), (64, 1), (513, 64), (895, 20)]
    trees = [(committed, random_parents(rng, num_rows)) for committed, num_rows in lengths]
    case = Case.random(shape, trees, window, 5)
    num_newer = 64 * ring - (window - 1)
    for request in case.requests:
        newer = np.full((num_newer, *request.k.shape[1:]), np.nan, np.float32)
        request.k, request.v = (np.concatenate([x, newer]) for x in (request.k, request.v))
    got = case.run(slice(0, len(case.q)), case.requests, ring)
    np.testing.assert_array_equal(got.view(np.uint32), case.out.view(np.uint32))


@pytest.mark.parametrize("committed", [0, 63, 190, 300])
@pytest.mark.parametrize("shape", SHAPES[:3], ids=str)
def test_a_path_has_one_result(shape: tuple[int, int, int], committed: int) -> None:
    rng = np.random.default_rng(committed)
    parents = random_parents(rng, 64)
    case = Case.random(shape, [(committed, parents)], None, 3)
    (request,) = case.requests
    for num_rows in ROW_COUNTS:
        request.parents = parents[:num_rows]
        got = case.run(slice(0, num_rows), [request])
        np.testing.assert_array_equal(got, case.out[:num_rows], err_msg=f"{num_rows} rows")
    for row in (0, 5, 20, 41, 63):
        path = path_of(parents, row)
        request.parents = list(range(-1, len(path) - 1))
        np.testing.assert_array_equal(case.run(path, [request])[-1], case.out[row], err_msg=f"chain to {row}")
        plain = case.committed_then_plain(request, path)
        np.testing.assert_array_equal(plain, case.out[row], err_msg=f"plain after {row}'s path")
    request.parents = parents


def test_a_prompt_in_chunks_is_a_prompt_row_by_row() -> None:
    num_tokens, shape = 200, (6, 1, 256)
    chain = list(range(-1, 63))
    whole: list[np.ndarray] = []
    case = Case.random(shape, [(0, list(range(-1, 63))), (0, chain), (0, chain), (0, chain[:8])], None, 4)
    for chunk_rows in (64, 17, 1):
        request = Request(case.rng, 0, [], shape[1], shape[2])
        outputs = []
        for first in range(0, num_tokens, chunk_rows):
            rows = slice(first, min(first + chunk_rows, num_tokens))
            request.parents = list(range(-1, rows.stop - rows.start - 1))
            request.k, request.v, request.committed_len = case.k[:first], case.v[:first], first
            outputs.append(case.run(rows, [request]))
        whole.append(np.concatenate(outputs))
    np.testing.assert_array_equal(whole[0], whole[1])
    np.testing.assert_array_equal(whole[0], whole[2])


def test_large_scores_do_not_overflow() -> None:
    q = np.full((1, 1, 16), 100.0, dtype=np.float32)
    v_tail = np.arange(16, dtype=np.float32).reshape(1, 1, 16)
    k_pages = np.full((1, 1, 64, 16), -100.0, dtype=np.float32)
    args = (q, q, v_tail, k_pages, np.ones_like(k_pages), [[0]], [(0, 64, [-1])], 1.0)
    np.testing.assert_array_equal(kernels.tree_attention(*args, device="cuda"), v_tail)


def test_heads_that_no_block_holds_are_refused() -> None:
    q = np.zeros((1, 1, 516), dtype=np.float32)
    pages = np.zeros((1, 1, 64, 516), dtype=np.float32)
    with pytest.raises(ValueError, match="`head_dim` must be 512, got 516"):
        kernels.tree_attention(q, q, q, pages, pages, [[]], [(0, 0, [-1])], 1.0, device="cuda")
