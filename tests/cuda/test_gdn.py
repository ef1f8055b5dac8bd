"""Gated DeltaNet on CUDA against the float64 recurrence; a path has the same bits however it is run."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from specpilot_rs._core import kernels

from tests.kernels.gated_delta_rule import Cache, Node, ShapeTuple, Token, Weights, run_chain, step

ROW_COUNTS = [1, 2, 7, 8, 9, 16, 17, 31, 32, 33, 63, 64]
# Key heads, value heads, lengths, taps: the demo's, the 27B's and the 4B's with fewer heads, and odd ones.
SHAPES: list[ShapeTuple] = [
    (1, 2, 128, 128, 4),
    (2, 6, 128, 128, 4),
    (2, 4, 128, 128, 4),
    (2, 6, 24, 40, 4),
    (3, 3, 16, 16, 2),
]
TOLERANCES = {"y": 2e-4, "k": 1e-6, "d": 2e-5, "g": 2e-5}

Segment = tuple[int, int, list[int]]


def anchor_of(position: int) -> int:
    return max(0, 32 * ((position - 64) // 32))


def random_parents(rng: np.random.Generator, num_rows: int) -> list[int]:
    return [int(rng.integers(max(-1, row - 5), row)) for row in range(num_rows)]


def path_of(parents: list[int], row: int) -> list[int]:
    path = []
    while row >= 0:
        path.append(row)
        row = parents[row]
    return path[::-1]


@dataclass
class Layer:
    """One layer: its weights, and the GPU's kernels on it."""

    shape: ShapeTuple
    weights: Weights

    def run(self, tokens: list[Token], segments: list[Segment], arrays: tuple[np.ndarray, ...]) -> list:
        """y, k, d and g of all tokens, which are the rows of ``segments``."""
        columns = [np.stack([getattr(token, name) for token in tokens]) for name in ("qkv", "z", "a", "b")]
        weights = self.weights
        constants = (weights.conv, weights.a_log, weights.dt_bias, weights.norm, 1e-6)
        return list(kernels.gdn_wy(self.shape, *columns, *constants, segments, arrays, device="cuda"))

    def fold(self, arrays: tuple[np.ndarray, ...], slot: int, anchor: int) -> np.ndarray:
        return kernels.gdn_fold(self.shape, arrays, slot, anchor, device="cuda")


@dataclass
class Request:
    """A slot that the GPU itself has filled: a chain of tokens, committed in chunks."""

    layer: Layer
    cache: Cache
    slot: int
    committed_len: int = 0
    newest: int = 0

    def prepare(self, last_position: int) -> None:
        """Folds until every anchor up to the last position's has its state."""
        while self.newest < anchor_of(last_position):
            self.cache.states[:] = self.layer.fold(self.cache.arrays(), self.slot, self.newest)
            self.newest += 32

    def commit(self, tokens: list[Token], results: list[np.ndarray], rows: list[int]) -> None:
        """Appends rows of a pass to the logs, by the GPU's copies."""
        _, k, d, g = results
        qkv = np.stack([token.qkv for token in tokens])
        taken = np.array(rows, dtype=np.uint32)
        cache = self.cache
        for tail, log in [(k, cache.log_k), (d, cache.log_d), (g, cache.log_g), (qkv, cache.conv)]:
            args = (tail, taken, self.committed_len, self.slot, log)
            log[:] = kernels.append_ring(*args, device="cuda")
        self.committed_len += len(rows)

    def run_chain(self, tokens: list[Token], chunk_rows: int) -> list[list[np.ndarray]]:
        """Runs and commits tokens in chunks; what each gave."""
        outputs = []
        for first in range(0, len(tokens), chunk_rows):
            chunk = tokens[first : first + chunk_rows]
            self.prepare(self.committed_len + len(chunk) - 1)
            parents = list(range(-1, len(chunk) - 1))
            segments = [(self.slot, self.committed_len, parents)]
            results = self.layer.run(chunk, segments, self.cache.arrays())
            self.commit(chunk, results, list(range(len(chunk))))
            outputs += [[values[row] for values in results] for row in range(len(chunk))]
        return outputs


def new_request(layer: Layer, slot: int = 0) -> Request:
    cache = Cache(layer.shape, slot + 1)
    cache.states[slot, 0] = 0.0
    return Request(layer, cache, slot)


def layer_of(rng: np.random.Generator, shape: ShapeTuple, rate: float) -> Layer:
    return Layer(shape, Weights.random(rng, shape, rate))


@pytest.mark.parametrize("rate", [-6.0, -1.0, 2.5], ids=["weak_decay", "decay", "strong_decay"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_trees_follow_the_recurrence(shape: ShapeTuple, rate: float) -> None:
    rng = np.random.default_rng(3)
    layer = layer_of(rng, shape, rate)
    lengths = [(0, 1), (0, 40), (1, 7), (2, 3), (63, 20), (64, 1), (95, 30), (96, 12), (127, 64), (300, 33)]
    cache = Cache(shape, len(lengths))
    segments: list[Segment] = []
    tokens: list[Token] = []
    want: list[Node] = []
    for slot, (committed_len, num_rows) in enumerate(lengths):
        chain = [Token.random(rng, shape) for _ in range(committed_len)]
        committed = run_chain(shape, layer.weights, chain)
        parents = random_parents(rng, num_rows)
        nodes: list[Node] = []
        positions = []
        for row, parent in enumerate(parents):
            before = nodes[parent] if parent >= 0 else (committed[-1] if committed else None)
            tokens.append(Token.random(rng, shape))
            nodes.append(step(shape, layer.weights, before, tokens[-1]))
            positions.append(committed_len + len(path_of(parents, row)) - 1)
        cache.fill(slot, committed, sorted({anchor_of(position) for position in positions}))
        segments.append((slot, committed_len, parents))
        want += nodes
    got = layer.run(tokens, segments, cache.arrays())
    for (name, atol), values in zip(TOLERANCES.items(), got, strict=True):
        expected = np.stack([getattr(node, name) for node in want])
        np.testing.assert_allclose(values, expected, rtol=1e-6, atol=atol, err_msg=name)

    first = 0
    for segment in segments:
        rows = slice(first, first + len(segment[2]))
        first = rows.stop
        for alone, beside in zip(layer.run(tokens[rows], [segment], cache.arrays()), got, strict=True):
            np.testing.assert_array_equal(alone, beside[rows], err_msg=f"slot {segment[0]}")


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_next_anchor_follows_the_recurrence(shape: ShapeTuple) -> None:
    rng = np.random.default_rng(5)
    layer = layer_of(rng, shape, -1.0)
    nodes = run_chain(shape, layer.weights, [Token.random(rng, shape) for _ in range(210)])
    for anchor in (0, 32, 160):
        cache = Cache(shape, 2)
        cache.fill(1, nodes[: anchor + 50], [anchor])
        states = layer.fold(cache.arrays(), 1, anchor)
        following = (anchor // 32 + 1) % 3
        np.testing.assert_allclose(states[1, following], nodes[anchor + 31].state, rtol=0, atol=2e-5)
        cache.states[1, following] = states[1, following]
        np.testing.assert_array_equal(states, cache.states)


@pytest.mark.parametrize("shape", SHAPES[:4], ids=str)
def test_a_prompt_in_chunks_is_a_prompt_row_by_row(shape: ShapeTuple) -> None:
    rng = np.random.default_rng(6)
    layer = layer_of(rng, shape, -3.0)
    tokens = [Token.random(rng, shape) for _ in range(200)]
    want = [node.y for node in run_chain(shape, layer.weights, tokens)]
    plain = new_request(layer).run_chain(tokens, 1)
    np.testing.assert_allclose(np.stack([row[0] for row in plain]), want, rtol=0, atol=5e-4)
    for chunk_rows, slot in [(64, 0), (33, 2), (7, 0)]:
        chunked = new_request(layer, slot).run_chain(tokens, chunk_rows)
        for position, (got, expected) in enumerate(zip(chunked, plain, strict=True)):
            for values, same in zip(got, expected, strict=True):
                np.testing.assert_array_equal(values, same, err_msg=f"{chunk_rows} rows, token {position}")


@pytest.mark.parametrize("committed", [0, 70, 127])
@pytest.mark.parametrize("shape", SHAPES[:3], ids=str)
def test_a_path_has_one_result(shape: ShapeTuple, committed: int) -> None:
    rng = np.random.default_rng(committed)
    layer = layer_of(rng, shape, -2.0)
    request = new_request(layer)
    request.run_chain([Token.random(rng, shape) for _ in range(committed)], 64)
    request.prepare(committed + 63)
    parents, tokens = random_parents(rng, 64), [Token.random(rng, shape) for _ in range(64)]
    arrays = request.cache.arrays()
    full = layer.run(tokens, [(0, committed, parents)], arrays)
    for num_rows in ROW_COUNTS:
        got = layer.run(tokens[:num_rows], [(0, committed, parents[:num_rows])], arrays)
        for values, whole in zip(got, full, strict=True):
            np.testing.assert_array_equal(values, whole[:num_rows], err_msg=f"{num_rows} rows")
    for row in (0, 9, 30, 45, 63):
        path = path_of(parents, row)
        chain = [tokens[node] for node in path]
        got = layer.run(chain, [(0, committed, list(range(-1, len(path) - 1)))], arrays)
        for values, whole in zip(got, full, strict=True):
            np.testing.assert_array_equal(values[-1], whole[row], err_msg=f"chain to {row}")
    # Commit a path as the tree computed it, then its last row alone.
    path = path_of(parents, 63)
    request.commit(tokens, full, path[:-1])
    request.prepare(request.committed_len)
    got = layer.run([tokens[63]], [(0, request.committed_len, [-1])], request.cache.arrays())
    for values, whole in zip(got, full, strict=True):
        np.testing.assert_array_equal(values[0], whole[63], err_msg="plain after the path")


def test_shapes_beyond_the_kernel_are_refused() -> None:
    shape = (1, 1, 128, 20, 4)
    rng = np.random.default_rng(0)
    layer = layer_of(rng, shape, 0.0)
    cache = new_request(layer).cache
    with pytest.raises(ValueError, match="`value_dim` must be 24, got 20"):
        layer.run([Token.random(rng, shape)], [(0, 0, [-1])], cache.arrays())


def test_more_rows_than_a_pass_has_are_refused() -> None:
    shape = SHAPES[-1]
    rng = np.random.default_rng(0)
    layer = layer_of(rng, shape, 0.0)
    cache = new_request(layer).cache
    tokens = [Token.random(rng, shape) for _ in range(65)]
    with pytest.raises(ValueError, match="`rows of a segment` must be 64, got 65"):
        layer.run(tokens, [(0, 0, [-1] * 65)], cache.arrays())
