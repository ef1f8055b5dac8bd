// A logit and its id as one integer: the larger logit is the larger key, among equal ones the lower id.
#pragma once

#include "async_copy.cuh"

// Zeros of either sign are equal, and a NaN is as good as -inf: above nothing but key 0, which no logit has.
__device__ __forceinline__ u64 logit_key(float logit, u32 id) {
    // A comparison with a NaN does not hold.
    const u32 bits = logit == 0.0f ? 0 : logit == logit ? __float_as_uint(logit) : 0xFF800000;
    const u32 order = bits & 0x80000000 ? ~bits : bits | 0x80000000;
    return static_cast<u64>(order) << 32 | ~id;
}

__device__ __forceinline__ u32 id_of_key(u64 key) { return ~static_cast<u32>(key); }

__device__ __forceinline__ float logit_of_key(u64 key) {
    const u32 order = key >> 32;
    return __uint_as_float(order & 0x80000000 ? order ^ 0x80000000 : ~order);
}
