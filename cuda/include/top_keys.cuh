// The largest of a block's keys, in order.
//
// Every warp finds how many of its threads' maxima it would have to give if all warps gave alike; the least that any warp
// would give bounds the answer from below. What reaches it, little more than was asked for, is ranked by counting.
#pragma once

#include "block_reduce.cuh"

constexpr u32 TOP_WARPS = 8;
constexpr u32 TOP_THREADS = TOP_WARPS * WARP_LANES;
constexpr u32 THREAD_KEYS = 16;
constexpr u32 BLOCK_KEYS = TOP_THREADS * THREAD_KEYS;
constexpr u32 MAX_TOP_K = TOP_THREADS;

struct TopKeys {
    u64 least[TOP_WARPS];
    u64 found[BLOCK_KEYS];
    u32 num_found;

    // Writes the `top_k` largest of all threads' keys to `out`, largest first, then zeros; keys differ unless they are zero,
    // which none that counts is. `out` may be read after a __syncthreads.
    __device__ __forceinline__ void pick(const u64 (&keys)[THREAD_KEYS], u32 top_k, u64* out) {
        u64 best = 0;
#pragma unroll
        for (u32 i = 0; i < THREAD_KEYS; i++) best = max(best, keys[i]);
        __syncthreads();
        if (threadIdx.x == 0) num_found = 0;
        u64 left = best, given = 0;
        for (u32 i = 0; i < (top_k + TOP_WARPS - 1) / TOP_WARPS; i++) {
            given = warp_max(left);
            if (left == given) left = 0;
        }
        if (threadIdx.x % WARP_LANES == 0) least[threadIdx.x / WARP_LANES] = given;
        __syncthreads();
        u64 bound = max(least[0], 1ull);
#pragma unroll
        for (u32 warp = 1; warp < TOP_WARPS; warp++) bound = min(bound, max(least[warp], 1ull));
        if (best >= bound) {
#pragma unroll
            for (u32 i = 0; i < THREAD_KEYS; i++) {
                if (keys[i] >= bound) found[atomicAdd(&num_found, 1)] = keys[i];
            }
        }
        __syncthreads();
        for (u32 i = threadIdx.x; i < num_found; i += TOP_THREADS) {
            const u64 key = found[i];
            u32 rank = 0;
            for (u32 j = 0; j < num_found; j++) rank += found[j] > key;
            if (rank < top_k) out[rank] = key;
        }
        for (u32 i = num_found + threadIdx.x; i < top_k; i += TOP_THREADS) out[i] = 0;
    }
};
