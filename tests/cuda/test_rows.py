"""The row-wise CUDA kernels: copies and choices bit for bit, values against float64, rows on their own."""

from __future__ import annotations

import numpy as np
import pytest
from specpilot_rs._core import kernels

from tests.kernels.bfloat16 import from_bits

GPU = {"device": "cuda"}


def normal(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def bits(values: np.ndarray) -> np.ndarray:
    return values.view(np.uint32)


@pytest.mark.parametrize(("vocab_size", "width"), [(1, 1), (37, 20), (300, 67), (50, 250), (1000, 5120)])
def test_embedding_rows_are_exact_copies(vocab_size: int, width: int) -> None:
    rng = np.random.default_rng(0)
    table = rng.integers(0, 2**16, (vocab_size, width), dtype=np.uint16)
    ids = rng.integers(0, vocab_size, 70, dtype=np.uint32)
    ids[:2] = [0, vocab_size - 1]
    got = kernels.embed_rows(table, ids, **GPU)
    np.testing.assert_array_equal(bits(got), bits(from_bits(table)[ids]))
    assert kernels.embed_rows(table, ids[:0], **GPU).shape == (0, width)
    table &= 0xBFFF  # no NaN, no overflow
    scaled = kernels.embed_rows(table, ids, np.float32(3.7), **GPU)
    np.testing.assert_array_equal(bits(scaled), bits(from_bits(table)[ids] * np.float32(3.7)))


@pytest.mark.parametrize("width", [1, 15, 17, 128, 256, 512, 513, 768, 5120, 5376])
def test_rms_norm_is_right_and_knows_no_neighbours(width: int) -> None:
    x, weight = normal(1, 64, width), normal(2, width)
    x[1] = 0
    x[2] *= 1e15
    x[3] *= 1e-12
    got = kernels.rms_norm(x.ravel(), 0, width, 64, width, 1e-6, weight, **GPU)
    x64 = x.astype(np.float64)
    want = x64 / np.sqrt((x64**2).mean(1, keepdims=True) + np.float64(np.float32(1e-6))) * weight
    np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-30)
    plain = kernels.rms_norm(x.ravel(), 0, width, 64, width, 1e-6, **GPU)
    for first, count in [(0, 1), (5, 1), (5, 7), (60, 4), (17, 33)]:
        rows = np.ascontiguousarray(x[first : first + count])
        part = kernels.rms_norm(rows.ravel(), 0, width, count, width, 1e-6, weight, **GPU)
        np.testing.assert_array_equal(bits(part), bits(got[first : first + count]))
        # Inside wider rows, at an odd place.
        wide = np.full((count, width + 5), np.nan, np.float32)
        wide[:, 3 : 3 + width] = rows
        part = kernels.rms_norm(wide.ravel(), 3, width + 5, count, width, 1e-6, **GPU)
        np.testing.assert_array_equal(bits(part), bits(plain[first : first + count]))


@pytest.mark.parametrize("width", [15, 128, 512, 513, 3840, 5376, 6656])
def test_sums_of_norm_and_residual(width: int) -> None:
    x, weight, residual = normal(11, 40, width), normal(12, width), normal(13, 40, width)
    args = (width, 40, width, 1e-8, weight, residual, 0.37)
    got = kernels.rms_norm(x.ravel(), 0, *args, **GPU)
    np.testing.assert_allclose(got, kernels.rms_norm(x.ravel(), 0, *args), rtol=2e-6, atol=1e-6)
    alone = kernels.rms_norm(x[7], 0, width, 1, width, 1e-8, weight, residual[7:8], 0.37, **GPU)
    np.testing.assert_array_equal(bits(alone[0]), bits(got[7]))


@pytest.mark.parametrize(
    ("num_heads", "head_dim", "rotary_dim", "pair_offset"),
    [(2, 128, 128, 64), (24, 256, 64, 32), (1, 6, 6, 3), (3, 40, 2, 1), (2, 64, 16, 32)],
)
def test_rope_turns_by_the_rows_position_alone(
    num_heads: int, head_dim: int, rotary_dim: int, pair_offset: int
) -> None:
    positions = np.array([0, 1, 2, 63, 64, 1000, 32_767, 131_071, 262_143], np.uint32)
    x = normal(3, len(positions), num_heads, head_dim)
    frequencies = (1e7 ** (-np.arange(0, rotary_dim, 2) / rotary_dim)).astype(np.float32)
    got = kernels.rope(x, positions, frequencies, pair_offset, **GPU)
    host = kernels.rope(x, positions, frequencies, pair_offset)
    np.testing.assert_allclose(got, host, rtol=1e-6, atol=1e-6)
    np.testing.assert_array_equal(got[0], x[0])
    num_pairs = rotary_dim // 2
    still = np.ones(head_dim, bool)
    still[:num_pairs] = still[pair_offset : pair_offset + num_pairs] = False
    np.testing.assert_array_equal(got[..., still], x[..., still])
    for row in (1, 8):
        alone = kernels.rope(
            x[row : row + 1].copy(), positions[row : row + 1], frequencies, pair_offset, **GPU
        )
        np.testing.assert_array_equal(bits(alone[0]), bits(got[row]))


@pytest.mark.parametrize(
    ("head_dim", "rotary_dim", "pair_offset"),
    [(128, 128, 64), (256, 64, 32), (512, 128, 256), (6, 6, 3), (40, 0, 0)],
)
@pytest.mark.parametrize("num_rows", [1, 5, 64])
def test_normed_heads_are_turned_as_by_two_launches(
    head_dim: int, rotary_dim: int, pair_offset: int, num_rows: int
) -> None:
    eps, positions = 1e-6, np.arange(1000, 1000 + num_rows, dtype=np.uint32)
    frequencies = (1e7 ** (-np.arange(0, rotary_dim, 2) / max(rotary_dim, 1))).astype(np.float32)
    # Queries beside their gates, keys, and heads of a norm without weights; more of them than a launch takes.
    groups = [(24, 2 * head_dim, True), (4, head_dim, True), (2, head_dim + 3, False)] * 3
    projections = [
        (normal(20 + i, num_rows, heads, stride), normal(40 + i, head_dim) if weighted else None)
        for i, (heads, stride, weighted) in enumerate(groups)
    ]
    turn = (frequencies, pair_offset) if rotary_dim else ()
    got = kernels.normed_rope(projections, head_dim, eps, positions, *turn, **GPU)
    for (x, weight), heads in zip(projections, got, strict=True):
        _, num_heads, stride = x.shape
        args = (0, stride, num_rows * num_heads, head_dim, eps, weight)
        want = kernels.rms_norm(x.ravel(), *args, **GPU).reshape(num_rows, num_heads, head_dim)
        if rotary_dim:
            want = kernels.rope(want, positions, frequencies, pair_offset, **GPU)
        np.testing.assert_array_equal(bits(heads), bits(want))


@pytest.mark.parametrize(("multiplier", "softcap"), [(0.25, None), (1.0, 30.0)])
def test_shaped_logits(multiplier: float, softcap: float | None) -> None:
    logits = 20 * normal(6, 3, 5003)
    logits[:, :4] = [0, 1e4, -1e4, 1e-6]
    scaled = multiplier * logits.astype(np.float64)
    want = scaled if softcap is None else softcap * np.tanh(scaled / softcap)
    got = kernels.shape_logits(logits, multiplier, softcap, **GPU)
    np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("kind", ["silu", "sigmoid", "gelu_tanh"])
@pytest.mark.parametrize("width", [1, 31, 600, 768, 17408])
@pytest.mark.parametrize("is_merged", [False, True])
def test_gates(kind: str, width: int, is_merged: bool) -> None:
    """Gates that start anywhere, and those of a merged projection, which are read by quads."""
    offset, stride = (0, 2 * width) if is_merged else (3, width + 7)
    x, y = 4 * normal(4, 33, stride), normal(5, 33, width)
    x[0, offset] = 1e4
    x[-1, offset] = -1e4
    x[1, offset] = -90
    got = kernels.gate(kind, x.ravel(), offset, stride, y, **GPU)
    assert_gated(kind, got, x[:, offset : offset + width], y)
    for row in (0, 1, 32):
        alone = kernels.gate(kind, x[row], offset, stride, y[row : row + 1], **GPU)
        np.testing.assert_array_equal(bits(alone[0]), bits(got[row]))


@pytest.mark.parametrize("kind", ["silu", "sigmoid"])
def test_gates_of_a_long_prompt(kind: str) -> None:
    """More than all threads have on their way at a time."""
    x, y = normal(4, 640, 17408), normal(5, 640, 17408)
    got = kernels.gate(kind, x.ravel(), 0, 17408, y, **GPU)
    assert_gated(kind, got, x, y)


def assert_gated(kind: str, got: np.ndarray, x: np.ndarray, y: np.ndarray) -> None:
    gate = x.astype(np.float64)
    with np.errstate(over="ignore"):
        power = np.exp(-gate)
    # Where an exponential is more than fp32 holds, its quotient is 0.
    sigmoid = np.where(power > np.finfo(np.float32).max, 0, 1 / (1 + power))
    want = sigmoid * y if kind == "sigmoid" else gate * sigmoid * y
    if kind == "gelu_tanh":
        want = gate / (1 + np.exp(np.minimum(-2 * np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3), 700))) * y
    # An exponential is off by its argument's rounding, and that of a gelu is a sum itself.
    np.testing.assert_allclose(got, want, rtol=2e-5 if kind == "gelu_tanh" else 2e-6, atol=1e-37)


@pytest.mark.parametrize("width", [20, 21, 5120])
@pytest.mark.parametrize("num_taps", [1, 5, 16, 19])
def test_taps_lie_side_by_side(num_taps: int, width: int) -> None:
    taps = list(np.random.default_rng(6).integers(0, 2**32, (num_taps, 9, width), dtype=np.uint32))
    for rows in ([0], [8, 2, 2, 0], [], list(range(9))):
        got = kernels.gather_taps([tap.view(np.float32) for tap in taps], rows, **GPU)
        want = np.concatenate([tap[np.array(rows, np.int64)] for tap in taps], axis=1)
        np.testing.assert_array_equal(bits(got), want)


def test_the_largest_logit_wins_as_on_the_host() -> None:
    rng = np.random.default_rng(7)
    pool = np.array([-np.inf, np.nan, -1.0, -0.0, 0.0, 1.0, 1.0, 2.0, np.inf], np.float32)
    for vocab_size in (1, 2, 255, 4096, 4097, 8192, 20_000):
        logits = rng.standard_normal((24, vocab_size)).astype(np.float32)
        for row in range(20):
            logits[row] = pool[rng.integers(0, 1 + row % 9, vocab_size)]
        logits[20, -1] = 9
        most = min(40, vocab_size - 1)
        masked = [rng.permutation(vocab_size)[: rng.integers(0, most + 1)].tolist() for _ in range(24)]
        masked[3] += masked[3] + [vocab_size, 2**32 - 1]
        masked[4] = list(range(vocab_size - 1))
        ids, best = kernels.greedy_argmax(logits, masked, **GPU)
        host_ids, host_best = kernels.greedy_argmax(logits, masked)
        np.testing.assert_array_equal(ids, host_ids)
        np.testing.assert_array_equal(best, host_best)


def test_wide_rows_tie_to_the_lowest_id() -> None:
    logits = np.zeros((33, 248_320), np.float32)
    for row in range(33):
        logits[row, [row * 7000 + 11, 230_000, 248_319]] = 5
    ids, best = kernels.greedy_argmax(logits, [[]] * 33, **GPU)
    assert ids.tolist() == [min(row * 7000 + 11, 230_000) for row in range(33)]
    assert (best == 5).all()
    ids, _ = kernels.greedy_argmax(logits[:1], [[11, 230_000]], **GPU)
    assert ids.tolist() == [248_319]


def test_refused_arguments_name_themselves() -> None:
    with pytest.raises(ValueError, match="`token_ids` must be below 37, got 37"):
        kernels.embed_rows(np.zeros((37, 8), np.uint16), np.array([37], np.uint32), **GPU)
    with pytest.raises(ValueError, match="must be below 3, got 3"):
        kernels.greedy_argmax(np.zeros((1, 3), np.float32), [[0, 1, 2]], **GPU)
