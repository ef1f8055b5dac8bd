// Sums and maxima over a warp and over a block, in one order whatever the data.
#pragma once

#include "async_copy.cuh"

constexpr u32 ALL_LANES = 0xFFFFFFFF;

// The sum over a warp, in every lane. Both lanes of a pair add the same two values, so all lanes hold the same bits.
__device__ __forceinline__ float warp_sum(float value) {
#pragma unroll
    for (u32 distance = WARP_LANES / 2; distance > 0; distance /= 2) value += __shfl_xor_sync(ALL_LANES, value, distance);
    return value;
}

__device__ __forceinline__ u64 warp_max(u64 value) {
#pragma unroll
    for (u32 distance = WARP_LANES / 2; distance > 0; distance /= 2) {
        value = max(value, __shfl_xor_sync(ALL_LANES, value, distance));
    }
    return value;
}

// The sum over a block of NUM_WARPS warps, in every thread: warps first, then their sums in ascending order.
template <u32 NUM_WARPS>
__device__ __forceinline__ float block_sum(float value) {
    __shared__ float sums[NUM_WARPS];
    value = warp_sum(value);
    __syncthreads();
    if (threadIdx.x % WARP_LANES == 0) sums[threadIdx.x / WARP_LANES] = value;
    __syncthreads();
    float total = sums[0];
#pragma unroll
    for (u32 warp = 1; warp < NUM_WARPS; warp++) total += sums[warp];
    return total;
}

// The maximum over a block of NUM_WARPS warps, in every thread.
template <u32 NUM_WARPS>
__device__ __forceinline__ u64 block_max(u64 value) {
    __shared__ u64 values[NUM_WARPS];
    value = warp_max(value);
    __syncthreads();
    if (threadIdx.x % WARP_LANES == 0) values[threadIdx.x / WARP_LANES] = value;
    __syncthreads();
    u64 largest = values[0];
#pragma unroll
    for (u32 warp = 1; warp < NUM_WARPS; warp++) largest = max(largest, values[warp]);
    return largest;
}
