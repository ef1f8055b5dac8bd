// What stands before the planes of a slice of W12 weights.
#pragma once

#include "async_copy.cuh"

// The head of a slice in memory, before its 8-bit planes and its 4-bit planes; made when the weights are loaded.
struct SliceNote {
    static constexpr u32 BYTES = 64, NUM_ENTRIES = 10;
    static constexpr u32 ENDS = 0;      // u32: 6 bits a super-tile, escapes up to its end; or CROWDED
    static constexpr u32 FIRST = 4;     // u32: index of the slice's first super-tile in escape_starts
    static constexpr u32 BASES = 8;     // u8 of each channel: exponent base
    static constexpr u32 ENTRIES = 24;  // u32 each: `lane << 21 | slot << 16 | bits`
    static constexpr u32 CROWDED = 0xFFFFFFFF;  // more escapes than entries: they are found through escape_starts
};
