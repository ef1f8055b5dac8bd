"""The W12 codec: parts against an independent oracle, bits back, sizes on the shapes that matter."""

from __future__ import annotations

import json
import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from specpilot_rs._core import w12
from specpilot_rs.demo import TARGET_DIR

from . import w12_oracle as oracle

PARTS = ("plane8", "plane4", "base", "counts", "escapes")


def to_bits(values: np.ndarray) -> np.ndarray:
    """Float32 to BF16, nearest even."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def decode(shape, parts):
    return w12.decode(*shape, *(parts[part] for part in PARTS))


def check(bits: np.ndarray) -> dict | None:
    """Encodes, compares with the oracle part by part and decodes; `None` where the matrix stays BF16."""
    got, want = w12.encode(bits), oracle.encode(bits)
    if isinstance(want, str):
        assert isinstance(got, str), "should stay BF16"
        assert want in got
        return None
    assert isinstance(got, dict), got
    for part in PARTS:
        np.testing.assert_array_equal(got[part], want[part], err_msg=part)
        assert got[part].dtype == want[part].dtype
    np.testing.assert_array_equal(decode(bits.shape, got), bits)
    assert got["num_escapes"] == len(got["escapes"])
    assert got["source_bytes"] == bits.nbytes
    assert got["num_bytes"] == sum(got[part].nbytes for part in PARTS)
    assert got["num_bytes"] == oracle.num_bytes(bits.shape, got["num_escapes"])
    assert got["bits_per_weight"] == pytest.approx(8 * got["num_bytes"] / bits.size)
    return got


def gaussian(rng, n, k):
    return to_bits(rng.standard_normal((n, k), np.float32) * 0.02 * rng.lognormal(0, 0.35, (n, 1)))


def laplace(rng, n, k):
    return to_bits(rng.laplace(size=(n, k)) * 0.01)


def student_t(rng, n, k):
    return to_bits(rng.standard_t(3, (n, k)) * 0.01)


def one_exponent(rng, n, k):
    exponent = rng.integers(1, 255, (n, 1))
    return (exponent << 7 | rng.integers(0, 128, (n, k)) | rng.integers(0, 2, (n, k)) << 15).astype(np.uint16)


def lowest_window(rng, n, k):
    return (rng.integers(1, 17, (n, k)) << 7 | rng.integers(0, 128, (n, k))).astype(np.uint16)


def highest_window(rng, n, k):
    return (rng.integers(239, 255, (n, k)) << 7 | rng.integers(0, 128, (n, k)) | 0x8000).astype(np.uint16)


KINDS = (gaussian, laplace, student_t, one_exponent, lowest_window, highest_window)
SPECIALS = (0x0000, 0x8000, 0x7F7F, 0xFF7F, 0x0080, 0x0001, 0x807F, 0x7F80, 0x7FC1, 0xFF80)


@settings(max_examples=300, deadline=None)
@given(
    kinds=st.lists(st.sampled_from(KINDS), min_size=1, max_size=5),
    rows_of_each=st.integers(1, 20),
    num_columns=st.integers(1, 400),
    specials=st.lists(st.tuples(st.integers(0, 10**6), st.sampled_from(SPECIALS)), max_size=6),
    seed=st.integers(0, 2**32 - 1),
)
def test_any_rows(kinds, rows_of_each, num_columns, specials, seed):
    rng = np.random.default_rng(seed)
    bits = np.concatenate([kind(rng, rows_of_each, num_columns) for kind in kinds])
    bits = np.ascontiguousarray(bits[rng.permutation(len(bits))])
    for place, value in specials:
        bits.reshape(-1)[place % bits.size] = value
    check(bits)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("shape", [(16, 64), (17, 640), (31, 639), (320, 1000), (1, 4096)])
def test_shapes_that_do_not_fill_their_tiles(kind, shape):
    check(kind(np.random.default_rng(1), *shape))


@pytest.mark.parametrize("num_escapes", [0, 1, 1023, 1024])
@pytest.mark.parametrize("value", [0x0000, 0x8000, 0x3F80, 50 << 7])
def test_escapes_of_one_tile(num_escapes, value):
    k = 64 * 2048
    bits = (100 + np.arange(16 * k) % 16 << 7).astype(np.uint16).reshape(16, k)
    tile = bits[:, 640:704].copy().reshape(-1)
    tile[:num_escapes] = value
    bits[:, 640:704] = tile.reshape(16, 64)
    parts = check(bits)
    assert parts["counts"][10] == num_escapes == parts["num_escapes"]


@pytest.mark.parametrize("value", [0x0000, 0x7F7F, 0x0080])
def test_an_escape_in_every_place_of_a_padded_tile(value):
    rng = np.random.default_rng(2)
    base = 130 if value == 0x7F7F else 100
    for channel in range(13):
        bits = (base + rng.integers(0, 16, (13, 3000)) << 7).astype(np.uint16)
        bits[channel, channel * 64 : channel * 64 + 61] = value
        check(bits)


def test_registers_hold_the_weights_that_a_warp_multiplies():
    bits = gaussian(np.random.default_rng(3), 48, 320)
    parts = w12.encode(bits)
    got = oracle.registers(parts["plane8"], parts["plane4"]).reshape(3, 5, 32, 4, 4, 2)
    exponent = oracle.exponents(bits)
    rescaled = bits.astype(np.int64) + (112 - parts["base"].astype(np.int64)[:, None] << 7)
    inside = (exponent >= parts["base"][:, None]) & (exponent <= parts["base"][:, None] + 15)
    assert inside.mean() > 0.999
    for lane in range(32):
        g, t = lane // 4, lane % 4
        for fragment in range(4):
            for register in range(4):
                for half in range(2):
                    channel = slice(g + 8 * (register % 2), None, 16)
                    column = slice(16 * t + 4 * fragment + 2 * (register // 2) + half, None, 64)
                    want = rescaled[channel, column][inside[channel, column]]
                    there = got[:, :, lane, fragment, register, half][inside[channel, column]]
                    np.testing.assert_array_equal(there, want)


def test_bits_per_weight_of_gaussian_rows(report):
    parts = w12.encode(gaussian(np.random.default_rng(4), 4096, 5120))
    report(f"W12, Gaussian rows of 5120: {parts['bits_per_weight']:.4f} bits a weight")
    assert parts["bits_per_weight"] <= 12.03


# Shape and number of the linear layers of a 27B hybrid: gated-delta-net layers, attention layers, MLPs.
LAYERS_27B = [
    ((10240, 5120), 48),
    ((6144, 5120), 48),
    ((48, 5120), 96),
    ((5120, 6144), 64),
    ((12288, 5120), 16),
    ((1024, 5120), 32),
    ((17408, 5120), 128),
    ((5120, 17408), 64),
]


def test_size_of_a_27b_layer_set(report):
    rng = np.random.default_rng(5)
    size = source = 0
    for (num_channels, num_columns), count in LAYERS_27B:
        # Whole tiles of the same width cost the same in any number, escapes on average.
        num_rows = min(num_channels, 1024)
        parts = w12.encode(gaussian(rng, num_rows, num_columns))
        size += count * parts["num_bytes"] * num_channels // num_rows
        source += count * 2 * num_channels * num_columns
    report(f"W12, layers of a 27B model: {size / source:.4f} of the BF16 bytes")
    assert source > 45e9
    assert abs(size / source - 0.752) <= 0.002


def tensors_of(directory):
    """Name and bits of every BF16 tensor, read without the package."""
    for file in sorted(directory.glob("*.safetensors")):
        data = file.read_bytes()
        (header_len,) = struct.unpack("<Q", data[:8])
        for name, entry in json.loads(data[8 : 8 + header_len]).items():
            if name != "__metadata__" and entry["dtype"] == "BF16":
                start, end = (8 + header_len + offset for offset in entry["data_offsets"])
                yield name, np.frombuffer(data[start:end], np.uint16).reshape(entry["shape"])


def test_linear_layers_of_the_demo_target(report):
    linear = [(name, bits) for name, bits in tensors_of(TARGET_DIR) if "_proj" in name]
    size = source = num_converted = 0
    for _, bits in linear:
        parts = check(bits)
        padded = -(-bits.shape[0] // 16) * 16 * -(-bits.shape[1] // 64) * 64
        assert (parts is not None) == (1.5 * padded < 0.9 * bits.nbytes)
        num_converted += parts is not None
        size += bits.nbytes if parts is None else parts["num_bytes"]
        source += bits.nbytes
    report(
        f"W12, demo target: {num_converted} of {len(linear)} linear layers, {size / source:.4f} of the bytes"
    )
    assert num_converted == 8 * 3 + 2 * 4 + 6 * 3, "all but the decays and strengths, two channels each"
    assert size / source < 0.76


def test_parts_of_another_matrix_are_refused():
    bits = student_t(np.random.default_rng(6), 48, 600)
    parts = w12.encode(bits)
    assert all(len(parts[part]) for part in PARTS)
    for shape in [(48, 64), (0, 600), (2**62, 2**62), (56, 600)]:
        with pytest.raises(ValueError, match="W12"):
            decode(shape, parts)
    for part in PARTS:
        with pytest.raises(ValueError, match="should hold"):
            decode(bits.shape, parts | {part: parts[part][:-1]})


@settings(max_examples=200, deadline=None)
@given(
    part=st.sampled_from(PARTS),
    place=st.integers(0, 2**31),
    flip=st.integers(1, 2**32 - 1),
)
def test_a_flipped_bit_is_refused_or_decodes_to_other_weights(part, place, flip):
    rng = np.random.default_rng(7)
    bits = student_t(rng, 44, 600)
    parts = w12.encode(bits)
    assert parts["num_escapes"] > 0
    damaged = parts[part].copy()
    damaged[place % len(damaged)] ^= damaged.dtype.type(flip & np.iinfo(damaged.dtype).max or 1)
    try:
        weights = decode(bits.shape, parts | {part: damaged})
    except ValueError as refused:
        error = str(refused)
    else:
        error = None
    if error is not None:
        assert "W12" in error
    else:
        # Only a code below an escape may change without showing, and those are checked.
        assert (weights != bits).any()


@pytest.mark.slow
def test_a_hundred_million_weights(report):
    rng = np.random.default_rng(8)
    num_weights = 0
    for kind in (*KINDS, gaussian, laplace):
        for num_rows, num_columns in [(2048, 5120), (163, 17408)]:
            bits = kind(rng, num_rows, num_columns)
            if kind in (gaussian, laplace):
                bits[:, 5] = rng.choice(np.array([0, 0x8000], np.uint16), num_rows)
            parts = w12.encode(bits)
            assert isinstance(parts, dict), parts
            assert (decode(bits.shape, parts) == bits).all()
            num_weights += bits.size
    report(f"W12: {num_weights:,} weights came back bit for bit")
    assert num_weights >= 10**8
