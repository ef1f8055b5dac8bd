"""The stock configuration's own kernels on CUDA, against the same oracles as on the host."""

from __future__ import annotations

import numpy as np
import pytest
from specpilot_rs._core import kernels

from tests.kernels.gated_delta_rule import ShapeTuple
from tests.kernels.test_gdn_recurrent import SHAPES, check_advance, check_chains
from tests.kernels.test_round_rows import assert_rounded, gate_of, normed, to_bf16, values

ALL_SHAPES = [*SHAPES, (2, 6, 128, 128, 4)]


@pytest.mark.parametrize("rate", [-6.0, -1.0, 2.5], ids=["weak_decay", "decay", "strong_decay"])
@pytest.mark.parametrize("shape", ALL_SHAPES, ids=str)
def test_chains_follow_the_recurrence(shape: ShapeTuple, rate: float) -> None:
    check_chains(shape, rate, "cuda", 2e-4)


@pytest.mark.parametrize("shape", ALL_SHAPES, ids=str)
def test_states_come_forward_over_the_log(shape: ShapeTuple) -> None:
    check_advance(shape, "cuda")


@pytest.mark.parametrize("width", [1, 31, 256, 5120])
def test_plain_rows(width: int) -> None:
    x = values(33, width)
    got = kernels.round_rows(x.ravel(), (0, 1, 0, width), 33, width, device="cuda")
    np.testing.assert_array_equal(got, to_bf16(x))


@pytest.mark.parametrize("width", [7, 128, 512, 5120, 17408])
def test_normed(width: int) -> None:
    x, weight = values(9, width), values(width, seed=1)
    got = kernels.round_rows(x.ravel(), (0, 1, 0, width), 9, width, weight=weight, eps=1e-6, device="cuda")
    assert_rounded(got, normed(x, weight, 1e-6))


@pytest.mark.parametrize("kind", ["silu", "sigmoid", "gelu_tanh"])
@pytest.mark.parametrize("width", [40, 41, 17408])
def test_halves_of_a_merged_projection(kind: str, width: int) -> None:
    merged = values(4, 2 * width)
    flat = merged.ravel()
    places, gate_places = (width, 1, 0, 2 * width), (0, 1, 0, 2 * width)
    got = kernels.round_rows(
        flat, places, 4, width, gates=flat, gate_places=gate_places, kind=kind, device="cuda"
    )
    # The exponential of a gelu takes a rounded sum of up to 90.
    arithmetic = 2e-5 if kind == "gelu_tanh" else 4e-6
    assert_rounded(got, gate_of(kind, merged[:, :width]) * merged[:, width:], arithmetic)


def test_normed_heads_gated_by_a_part_of_longer_rows() -> None:
    rows, heads, width, longer = 3, 6, 128, 1000
    x, gates, weight = values(rows, heads, width), values(rows, longer, seed=1), values(width, seed=2)
    got = kernels.round_rows(
        x.ravel(),
        (0, heads, width, heads * width),
        rows * heads,
        width,
        weight=weight,
        eps=1e-6,
        gates=gates.ravel(),
        gate_places=(20, heads, width, longer),
        device="cuda",
    )
    own = gates[:, 20 : 20 + heads * width].reshape(rows, heads, width)
    assert_rounded(got, (normed(x, weight, 1e-6) * gate_of("silu", own)).reshape(rows * heads, width))
