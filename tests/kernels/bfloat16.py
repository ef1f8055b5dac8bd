"""BF16 values as the bit patterns that kernels take."""

import numpy as np


def to_bits(values: np.ndarray) -> np.ndarray:
    """Rounds float32 values to BF16, nearest even, and gives their 16 bits."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def from_bits(bits: np.ndarray) -> np.ndarray:
    """The float32 values of BF16 bit patterns."""
    return (bits.astype(np.uint32) << 16).view(np.float32)
