// Where a kernel leaves rows: fp32 as they are, or BF16 for a matmul, each row padded with zeros to whole super-tiles.
#pragma once

#include "mma.cuh"

// Mirrored by `CudaRows` of the launchers.
struct RowsOutput {
    float* values;  // [rows][width], or null
    u16* rounded;   // [rows][padded_width], or null
    u32 width;
    u32 padded_width;

    __device__ __forceinline__ void store(u64 row, u32 column, float value) const {
        if (rounded) {
            rounded[row * padded_width + column] = static_cast<u16>(pack_bf16(value, 0.0f));
        } else {
            values[row * width + column] = value;
        }
    }

    // Columns `column` and the next; `column` and `width` are even.
    __device__ __forceinline__ void store_pair(u64 row, u32 column, float2 pair) const {
        if (rounded) {
            *reinterpret_cast<u32*>(rounded + row * padded_width + column) = pack_bf16(pair.x, pair.y);
        } else {
            *reinterpret_cast<float2*>(values + row * width + column) = pair;
        }
    }

    // Columns `column` .. `column + 3`; `column` and `width` are multiples of four.
    __device__ __forceinline__ void store_quad(u64 row, u32 column, float4 quad) const {
        if (rounded) {
            *reinterpret_cast<uint2*>(rounded + row * padded_width + column) = {pack_bf16(quad.x, quad.y), pack_bf16(quad.z, quad.w)};
        } else {
            *reinterpret_cast<float4*>(values + row * width + column) = quad;
        }
    }

    // The zeros behind the last column, every `threads`-th of them.
    __device__ __forceinline__ void pad(u64 row, u32 thread, u32 threads) const {
        if (!rounded) return;
        for (u32 column = width + thread; column < padded_width; column += threads) rounded[row * padded_width + column] = 0;
    }
};
