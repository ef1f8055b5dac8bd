"""The plan of the five published targets, against sizes worked out from their published dimensions alone."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from specpilot_rs.options import EngineOptions
from specpilot_rs.plan_report import plan_memory

CONFIGS = Path(__file__).parent / "fixtures" / "configs"
PAGE_TOKENS = 64
# Bits of a W12 weight: 12, an eighth bit a byte for what decoding needs beside them, and rare escapes.
W12_BITS = 12.154


@dataclass(frozen=True)
class Attention:
    """One kind of attention layer."""

    layers: int
    q_rows: int
    kv_rows: int
    # Rows that `o_proj` reads.
    mixed: int
    own_values: bool = True
    gate_rows: int = 0
    norms: int = 0
    # Positions that a row sees, itself included; 0 for all.
    window: int = 0


@dataclass(frozen=True)
class Recurrent:
    """Gated DeltaNet: key heads, value heads; all of 128 channels, convolved over 4 tokens."""

    layers: int
    key_heads: int
    value_heads: int


@dataclass(frozen=True)
class Target:
    """Dimensions as published."""

    hidden: int
    inter: int
    vocab: int
    tied: bool
    billions: float
    # Norms of the residual stream in a layer, and scalars.
    layer_norms: int
    scalars: int
    attention: tuple[Attention, ...]
    recurrent: Recurrent | None = None

    @property
    def matrices(self) -> list[tuple[int, int, bool]]:
        """Rows and columns of the linear layers, and whether published FP8 files convert them."""
        hidden, found = self.hidden, []
        for kind in self.attention:
            one = [(kind.q_rows, hidden), (kind.kv_rows, hidden), (hidden, kind.mixed)]
            one += [(kind.kv_rows, hidden)] * kind.own_values + [(kind.gate_rows, hidden)] * bool(
                kind.gate_rows
            )
            found += [(*shape, True) for shape in one * kind.layers]
        if self.recurrent:
            keys, values = self.recurrent.key_heads * 128, self.recurrent.value_heads * 128
            one = [(2 * keys + values, hidden), (values, hidden), (hidden, values)]
            small = [(self.recurrent.value_heads, hidden)] * 2
            found += [(*shape, True) for shape in one * self.recurrent.layers]
            found += [(*shape, False) for shape in small * self.recurrent.layers]
        mlp = [(self.inter, hidden), (self.inter, hidden), (hidden, self.inter)]
        return found + [(*shape, True) for shape in mlp * self.num_layers]

    @property
    def num_layers(self) -> int:
        return sum(kind.layers for kind in self.attention) + (self.recurrent.layers if self.recurrent else 0)

    @property
    def num_vector_values(self) -> int:
        values = self.hidden + self.num_layers * (self.layer_norms * self.hidden + self.scalars)
        values += sum(kind.layers * kind.norms for kind in self.attention)
        if self.recurrent:
            channels = 128 * (2 * self.recurrent.key_heads + self.recurrent.value_heads)
            values += self.recurrent.layers * (4 * channels + 2 * self.recurrent.value_heads + 128)
        return values

    @property
    def num_parameters(self) -> int:
        tables = self.vocab * self.hidden * (1 if self.tied else 2)
        return sum(rows * columns for rows, columns, _ in self.matrices) + tables + self.num_vector_values

    def kv_token_bytes(self, windowed: bool) -> int:
        """Keys and values of a token: BF16 in meaning, held in 4 bytes, as activations are."""
        kinds = (kind for kind in self.attention if (kind.window > 0) == windowed)
        return sum(2 * 4 * kind.layers * kind.kv_rows for kind in kinds)

    @property
    def ring(self) -> int:
        """Pages that hold what a row sees of its window before itself."""
        return max(math.ceil(max(kind.window - 1, 0) / PAGE_TOKENS) for kind in self.attention)


TARGETS = {
    "qwen3.8-27b": Target(
        5120, 17408, 248320, False, 26.896, 2, 0,
        (Attention(16, 2 * 24 * 256, 4 * 256, 24 * 256, norms=2 * 256),), Recurrent(48, 16, 48),
    ),
    "qwen3.5-4b": Target(
        2560, 9216, 248320, True, 4.206, 2, 0,
        (Attention(8, 2 * 16 * 256, 4 * 256, 16 * 256, norms=2 * 256),), Recurrent(24, 16, 32),
    ),
    "llama-3.1-8b": Target(
        4096, 14336, 128256, False, 8.030, 2, 0, (Attention(32, 32 * 128, 8 * 128, 32 * 128),)
    ),
    # The published file has 11.96: 11 of its 678 tensors embed images and sound, and are not read.
    "gemma-4-12b": Target(
        3840, 15360, 262144, True, 11.907, 4, 1,
        (
            Attention(40, 4096, 2048, 4096, norms=2 * 256, window=1024),
            Attention(8, 8192, 512, 8192, own_values=False, norms=2 * 512),
        ),
    ),
    "muse-glimmer-30b": Target(
        6656, 19968, 202048, False, 27.85, 4, 0,
        (
            Attention(13, 4096, 256, 4096, gate_rows=4096),
            Attention(39, 4096, 256, 4096, gate_rows=4096, window=2048),
        ),
    ),
}  # fmt: skip


def planned(name: str, gigabytes: int, **options: Any) -> dict[str, Any]:
    settings = EngineOptions(**options)
    return plan_memory(CONFIGS / name, memory=f"{gigabytes}GB", device="cuda", options=settings)


@pytest.mark.parametrize("name", TARGETS)
def test_parameters_and_weight_bytes(name: str) -> None:
    target, plan = TARGETS[name], planned(name, 141, max_num_seqs=1)
    assert plan["num_parameters"] == target.num_parameters
    assert target.num_parameters / 1e9 == pytest.approx(target.billions, abs=6e-3)
    assert plan["kv_bytes_per_token"] == target.kv_token_bytes(windowed=False)
    assert plan["window_bytes_per_token"] == target.kv_token_bytes(windowed=True)
    assert plan["window_pages"] == target.ring
    num_weights = sum(rows * columns for rows, columns, _ in target.matrices)
    table = 2 * target.vocab * target.hidden
    fp8 = sum(
        rows * columns if converted else 2 * rows * columns for rows, columns, converted in target.matrices
    )
    # A matrix's own bookkeeping and padding to tiles; of W12, what an escape takes; of FP8, a GPU's notes.
    expected = {
        "bf16": (2 * num_weights, 1e-6),
        "w12": (W12_BITS / 8 * num_weights, 3e-3),
        "fp8": (fp8, 2.5e-2),
    }
    for form, (linear, tolerance) in expected.items():
        held = plan["formats"][form]["bytes"]
        assert held["linear_layers"] == pytest.approx(linear, rel=tolerance), form
        assert held["embedding"] == pytest.approx(table, abs=64)
        assert held["lm_head"] == pytest.approx(0 if target.tied else table, abs=64)
        assert held["vectors"] == 4 * target.num_vector_values
        # A ring of three states in fp32.
        states = 0 if target.recurrent is None else target.recurrent.layers * target.recurrent.value_heads
        assert held["gdn_states"] == 3 * 4 * 128 * 128 * states


def hand_out(left: int, page: int, window_page: int, ring: int, longest: int, slots: int) -> tuple[int, int]:
    """Hands pages out one by one: of everything, and of windows.

    Args:
        left: Bytes to take from.
        page: Bytes of 64 tokens in the layers that keep everything.
        window_page: Bytes of 64 tokens in the others.
        ring: Pages that these keep of a request.
        longest: Pages of the longest request.
        slots: Requests at once.
    """
    pages = window_pages = 0
    # The longest request, then a window with as much context for every other, then contexts.
    for count, with_window in ((ring, True), (longest - ring, False), (ring * (slots - 1), True)):
        size = page + window_page * with_window
        for _ in range(count):
            if left < size:
                break
            left, pages, window_pages = left - size, pages + 1, window_pages + with_window
        if window_pages < ring:
            return pages, window_pages
    return pages + left // page, window_pages


@pytest.mark.parametrize("name", TARGETS)
@pytest.mark.parametrize("gigabytes", [80, 96, 141])
def test_contexts_and_concurrency(name: str, gigabytes: int) -> None:
    """What the share of the card leaves beside what is held, in pages; a request of 8,192 takes 128."""
    target = TARGETS[name]
    alone = planned(name, gigabytes, max_num_seqs=1)
    busy = planned(name, gigabytes, max_num_seqs=8, max_model_len=8192)
    longest = 131_072 if name.startswith(("llama", "muse")) else 262_144
    page, window_page = (PAGE_TOKENS * target.kv_token_bytes(windowed) for windowed in (False, True))
    for plan, slots in ((alone, 1), (busy, 8)):
        budget = int(gigabytes * 10**9 * 0.9)
        per_request = math.ceil(plan["max_model_len"] / PAGE_TOKENS)
        for form in plan["formats"].values():
            left = max(budget - sum(form["bytes"].values()), 0)
            pages, window_pages = hand_out(left, page, window_page, target.ring, per_request, slots)
            assert (form["pool_pages"], form["pool_window_pages"]) == (pages, window_pages)
            assert form["pool_bytes"] == pages * page + window_pages * window_page <= left
            one, _ = hand_out(left, page, window_page, target.ring, longest // PAGE_TOKENS, 1)
            assert form["largest_context"] == min(one * PAGE_TOKENS, longest)
            served = pages // per_request
            if target.ring:
                served = min(served, window_pages // target.ring)
            if served >= slots:
                served = left // (per_request * page + target.ring * window_page)
            assert form["full_requests"] == served


def test_a_card_of_80_gb_holds_gemmas_whole_context() -> None:
    """Keys and values of all 262,144 tokens in 8 layers take 8.6 GB, windows of 1,024 in 40 layers 0.7 GB."""
    form = planned("gemma-4-12b", 80, max_num_seqs=1)["formats"]["bf16"]
    assert form["largest_context"] == 262_144
    request = 262_144 * 8 * 2 * 512 * 4 + 1_024 * 40 * 2 * 8 * 256 * 4
    assert request == 9_261_023_232
    left = 72 * 10**9 - form["fixed_bytes"]
    assert form["full_requests"] == left // request >= 4
