// fp32 products on tensor cores: each factor is split in two TF32 parts, and three of the four part products are summed.
//
// A fragment holds sixteen columns of the sum: the lanes of a row's group of four carry columns 4c .. 4c + 3. Which columns
// meet in one instruction is thereby fixed, whatever rows there are.
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

// The fragment lies as the instruction takes it, so that no register moves: of each step 16 bytes a lane, its two columns of
// row g and row g + 8 in turn. `lanes` is where the lane's lie.
__device__ __forceinline__ SplitPair split_pair(const float* lanes) {
    SplitPair split;
#pragma unroll
    for (u32 step = 0; step < 2; step++) {
        const float4 quad = *reinterpret_cast<const float4*>(lanes + step * WARP_LANES * 4);
        const SplitFloat parts[4] = {split_float(quad.x), split_float(quad.y), split_float(quad.z), split_float(quad.w)};
#pragma unroll
        for (u32 i = 0; i < 4; i++) split.high[step][i] = parts[i].high, split.low[step][i] = parts[i].low;
    }
    return split;
}

// A column of operand B, sixteen rows.
struct SplitColumn {
    float high[4], low[4];
};

__device__ __forceinline__ SplitColumn split_column(float4 values) {
    const SplitFloat parts[4] = {split_float(values.x), split_float(values.y), split_float(values.z), split_float(values.w)};
    SplitColumn split;
#pragma unroll
    for (u32 i = 0; i < 4; i++) split.high[i] = parts[i].high, split.low[i] = parts[i].low;
    return split;
}

// A product tile by its parts, which grow apart so that no instruction waits for the one before.
struct SplitSums {
    float high[4], left[4], right[4];

    __device__ __forceinline__ float value(u32 i) const { return high[i] + (left[i] + right[i]); }
};

// sums += a b over sixteen columns.
__device__ __forceinline__ void multiply_split(SplitSums& sums, const SplitPair& a, const SplitColumn& b) {
#pragma unroll
    for (u32 step = 0; step < 2; step++) {
        mma_m16n8k8(sums.left, a.low[step], b.high[2 * step], b.high[2 * step + 1]);
        mma_m16n8k8(sums.right, a.high[step], b.low[2 * step], b.low[2 * step + 1]);
        mma_m16n8k8(sums.high, a.high[step], b.high[2 * step], b.high[2 * step + 1]);
    }
}
