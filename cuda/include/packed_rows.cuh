// Single rows of a BF16 matrix that lies in the fragment order of bf16_matmul.
//
// A row comes in runs of 8 bytes, 16 apart: twice its bytes are read, which for a few rows is less than a launch costs.
#pragma once

#include "async_copy.cuh"

// Columns 4 * quad .. 4 * quad + 3 of channel `channel`, widened; past the last column they are zero.
__device__ __forceinline__ float4 packed_quad(const u8* slices, u32 in_features, u32 channel, u32 quad) {
    constexpr u32 TILE_BYTES = 16 * 64 * 2, FRAGMENT_BYTES = 512;
    const u64 tile = static_cast<u64>(channel / 16) * ((in_features + 63) / 64) + quad / 16;
    const u32 lane = channel % 8 * 4 + quad / 4 % 4, fragment = quad % 4;
    // Registers 0 and 2 of a fragment hold the low channels of a tile, 1 and 3 the high ones.
    const u8* at = slices + tile * TILE_BYTES + fragment * FRAGMENT_BYTES + lane * 16 + channel % 16 / 8 * 4;
    const u32 low = *reinterpret_cast<const u32*>(at), high = *reinterpret_cast<const u32*>(at + 8);
    return {__uint_as_float(low << 16), __uint_as_float(low & 0xFFFF0000), __uint_as_float(high << 16),
            __uint_as_float(high & 0xFFFF0000)};
}
