// fp32 products on tensor cores: each factor is split in two TF32 parts, and three of the four part products are summed.
//
// A fragment holds sixteen columns of the sum: the lanes of a row's group of four carry columns 4c .. 4c + 3, one
// 16-byte load each. Which columns meet in one instruction is thereby fixed, whatever rows there are.
#pragma once

#include "tf32.cuh"

// A value as the sum of two that TF32 holds, up to 2^-21 of it.
struct SplitFloat {
    float high, low;
};

__device__ __forceinline__ SplitFloat split_float(float value) {
    const float high = __uint_as_float(__float_as_uint(value) & 0xFFFFE000);
    return {high, value - high};
}

// Two rows of operand A (rows g and g + 8 of the tile), sixteen columns: two steps of the instruction.
struct SplitPair {
    float high[2][4], low[2][4];
};

__device__ __forceinline__ SplitPair split_pair(float4 upper, float4 lower) {
    const float values[2][4] = {{upper.x, lower.x, upper.y, lower.y}, {upper.z, lower.z, upper.w, lower.w}};
    SplitPair split;
#pragma unroll
    for (u32 step = 0; step < 2; step++) {
#pragma unroll
        for (u32 i = 0; i < 4; i++) {
            const SplitFloat parts = split_float(values[step][i]);
            split.high[step][i] = parts.high, split.low[step][i] = parts.low;
        }
    }
    return split;
}

// sum += a b over sixteen columns, small parts first.
__device__ __forceinline__ void multiply_split(float (&sum)[4], const SplitPair& a, float4 b) {
    const SplitFloat parts[4] = {split_float(b.x), split_float(b.y), split_float(b.z), split_float(b.w)};
#pragma unroll
    for (u32 step = 0; step < 2; step++) {
        const SplitFloat b0 = parts[2 * step], b1 = parts[2 * step + 1];
        mma_m16n8k8(sum, a.low[step], b0.high, b1.high);
        mma_m16n8k8(sum, a.high[step], b0.low, b1.low);
        mma_m16n8k8(sum, a.high[step], b0.high, b1.high);
    }
}
