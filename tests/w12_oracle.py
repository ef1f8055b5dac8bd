"""W12 written a second time, from its description: windows, plane words and escape entries, in numpy."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Bits = NDArray[np.uint16]
LANE = np.arange(32)
G, T = LANE // 4, LANE % 4
FRAGMENT = np.arange(4)
# The eight weights A0..A3, B0..B3 of a lane's fragment in an m16n8k16 A operand: r0 = A0, A1 and r2 = B0, B1
# belong to channel g, r1 = A2, A3 and r3 = B2, B3 to channel g + 8; A holds the first two of its columns.
CHANNEL_STEP = np.array([0, 0, 8, 8, 0, 0, 8, 8])
COLUMN_STEP = np.array([0, 1, 0, 1, 2, 3, 2, 3])


def exponents(bits: Bits) -> NDArray[np.int64]:
    """The 8-bit exponent fields."""
    return (bits.astype(np.int64) >> 7) & 0xFF


def choose_bases(bits: Bits) -> NDArray[np.int64]:
    """Each channel's first of the 16 exponents holding most weights: the highest such, or 1 without any."""
    histograms = np.stack([np.bincount(row, minlength=256) for row in exponents(bits)])
    below = np.pad(histograms.cumsum(axis=1), ((0, 0), (1, 0)))
    starts = np.arange(1, 240)
    mass = below[:, starts + 16] - below[:, starts]
    highest = starts[-1] - mass[:, ::-1].argmax(axis=1)
    return np.where(mass.max(axis=1) == 0, 1, highest)


def blocks(matrix: NDArray[np.int64]) -> NDArray[np.int64]:
    """`[16 n, 64 k]` as `[n, k, lane, fragment, A0..A3 B0..B3]`."""
    n_tiles, k_tiles = matrix.shape[0] // 16, matrix.shape[1] // 64
    tiles = matrix.reshape(n_tiles, 16, k_tiles, 64).transpose(0, 2, 1, 3)
    channel = (G[:, None, None] + CHANNEL_STEP).repeat(4, axis=1)
    column = 16 * T[:, None, None] + 4 * FRAGMENT[None, :, None] + COLUMN_STEP
    return tiles[:, :, channel, column]


def words(byte_columns: list[NDArray[np.int64]]) -> NDArray[np.uint8]:
    """Four byte arrays as little-endian words, flat."""
    return np.stack(byte_columns, axis=-1).astype(np.uint8)


def reason(bits: Bits, bases: NDArray[np.int64]) -> str | None:
    """Words of the reason for which a matrix stays BF16: the first bad channel's, else the whole matrix's."""
    exponent = exponents(bits)
    offset = exponent - bases[:, None]
    outside = (offset < 0) | (offset > 15)
    rescaled = exponent + 112 - bases[:, None]
    lost = (exponent == 0) | (rescaled < 1) | (rescaled > 254)
    not_finite = (exponent == 255).any(axis=1)
    out_of_reach = (outside & lost & ((bits & 0x7FFF) != 0)).any(axis=1)
    if len(bad := np.flatnonzero(not_finite | out_of_reach)):
        return "NaN or infinity" if not_finite[bad[0]] else "out of reach"
    if outside.sum() * 100 > bits.size:
        return "more than 1 %"
    if num_bytes(bits.shape, int(outside.sum())) >= 0.9 * 2 * bits.size:
        return "not less than 0.9"
    return None


def num_bytes(shape: tuple[int, ...], num_escapes: int) -> int:
    """Bytes of all parts."""
    n_tiles, k_tiles = -(-shape[0] // 16), -(-shape[1] // 64)
    return n_tiles * k_tiles * (1024 + 512 + 2) + 16 * n_tiles + 4 * num_escapes


def encode(bits: Bits) -> dict[str, NDArray] | str:
    """The parts of a matrix, or words of the reason for which it stays BF16."""
    num_channels, num_columns = bits.shape
    bases = choose_bases(bits)
    if words_of_reason := reason(bits, bases):
        return words_of_reason
    pad = ((0, -num_channels % 16), (0, -num_columns % 64))
    exponent = exponents(bits)
    offset = exponent - bases[:, None]
    below, above = offset < 0, offset > 15
    mantissa = np.where(above, 127, np.where(below, 0, bits & 0x7F))
    s = blocks(np.pad(bits.astype(np.int64) >> 15, pad))
    o = blocks(np.pad(np.clip(offset, 0, 15), pad))
    m = blocks(np.pad(mantissa.astype(np.int64), pad))
    p1 = s << 3 | o >> 1
    p2 = (o & 1) << 3 | m >> 4
    p3 = m & 15
    a, b = slice(0, 4), slice(4, 8)
    u, v, x = [], [], []
    for k in range(4):
        before = (k - 1) % 4
        after = (k + 1) % 4
        sign_b = p1[..., b][..., before] >> 3
        u.append(
            (p1[..., a][..., k] >> 3) << 7
            | (p1[..., a][..., k] & 7)
            | (p1[..., b][..., k] & 7) << 4
            | sign_b << 3
        )
        v.append(p2[..., a][..., k] << 4 | p2[..., b][..., k])
        x.append(p3[..., a][..., k] | p3[..., b][..., after] << 4)
    tiles = s.shape[:2]
    plane8 = np.stack([words(u).reshape(*tiles, 512), words(v).reshape(*tiles, 512)], axis=2)
    outside = blocks(np.pad((below | above).astype(np.int64), pad)).reshape(*tiles, 1024)
    raw = blocks(np.pad(bits.astype(np.int64), pad)).reshape(*tiles, 1024)
    place = np.arange(1024) << 16  # lane and slot are the place's two five-bit halves
    return {
        "plane8": plane8.reshape(-1),
        "plane4": words(x).reshape(-1),
        "base": np.pad(bases, pad[0], constant_values=112).astype(np.uint8),
        "counts": outside.sum(axis=2).reshape(-1).astype(np.uint16),
        "escapes": (place + raw)[outside == 1].astype(np.uint32),
    }


def q_view(bits: Bits) -> Bits:
    """The BF16 weights that the 8-bit view shows: sign, exponent, three mantissa bits, then the midpoint."""
    bases = choose_bases(bits)[:, None]
    exponent, wide = exponents(bits), bits.astype(np.int64)
    view = wide & 0xFFF0 | 8
    # Escapes below the window count as its smallest code; those above are patched in.
    view = np.where(exponent < bases, wide & 0x8000 | bases << 7 | 8, view)
    return np.where(exponent > bases + 15, wide, view).astype(np.uint16)


def registers(plane8: NDArray[np.uint8], plane4: NDArray[np.uint8]) -> NDArray[np.uint16]:
    """What ten instructions decode, `[tile, lane, fragment, register, half]`, exponents from 112."""
    planes = plane8.reshape(-1, 2, 32, 16).view("<u4").astype(np.uint64)
    u, v = planes[:, 0], planes[:, 1]
    x = plane4.reshape(-1, 32, 16).view("<u4").astype(np.uint64)

    def rotate_left(word, by):
        return ((word << np.uint64(by)) | (word >> np.uint64(32 - by))) & np.uint64(0xFFFFFFFF)

    def mask(word, bits):
        return word & np.uint64(bits)

    def permute(low, high, selector):
        halves = [low >> np.uint64(8 * i) & np.uint64(0xFF) for i in range(4)]
        halves += [high >> np.uint64(8 * i) & np.uint64(0xFF) for i in range(4)]
        chosen = [halves[selector >> 4 * i & 7] for i in range(4)]
        return np.stack([chosen[0] | chosen[1] << np.uint64(8), chosen[2] | chosen[3] << np.uint64(8)], -1)

    ha = mask(u, 0x87878787) | np.uint64(0x38383838)
    hb = mask(rotate_left(u, 28), 0x87878787) | np.uint64(0x38383838)
    la = mask(v, 0xF0F0F0F0) | mask(x, 0x0F0F0F0F)
    lb = rotate_left(mask(v, 0x0F0F0F0F) | mask(x, 0xF0F0F0F0), 4)
    r = [permute(la, ha, 0x5140), permute(la, ha, 0x7362), permute(lb, hb, 0x5140), permute(lb, hb, 0x7362)]
    return np.stack(r, axis=3).astype(np.uint16)
