// Loads from global memory: without branches, zero where there is nothing to load, and ahead of time.
#pragma once

#include "async_copy.cuh"

__device__ __forceinline__ float4 load_if(const float4* from, bool is_there) {
    float4 x;
    asm volatile(
        "{ .reg .pred p; setp.ne.u32 p, %5, 0; mov.f32 %0, 0f00000000; mov.f32 %1, 0f00000000; mov.f32 %2, 0f00000000;"
        " mov.f32 %3, 0f00000000; @p ld.global.v4.f32 {%0, %1, %2, %3}, [%4]; }"
        : "=&f"(x.x), "=&f"(x.y), "=&f"(x.z), "=&f"(x.w)
        : "l"(from), "r"(static_cast<u32>(is_there))
        : "memory");
    return x;
}

__device__ __forceinline__ float2 load_if(const float2* from, bool is_there) {
    float2 x;
    asm volatile(
        "{ .reg .pred p; setp.ne.u32 p, %3, 0; mov.f32 %0, 0f00000000; mov.f32 %1, 0f00000000;"
        " @p ld.global.v2.f32 {%0, %1}, [%2]; }"
        : "=&f"(x.x), "=&f"(x.y)
        : "l"(from), "r"(static_cast<u32>(is_there))
        : "memory");
    return x;
}

// Evenly spread parts of weights that a later launch reads; mirrored by upcoming_weights.rs.
struct UpcomingWeights {
    const u8* start;
    u32 num_parts;
    u32 part_bytes, stride;  // multiples of 16
    u32 unused;
};

// Brings them into the L2 cache: every `num_threads`th part, from `thread` on.
__device__ __forceinline__ void prefetch(const UpcomingWeights& weights, u32 thread, u32 num_threads) {
#if __CUDA_ARCH__ >= 900
#pragma unroll 1
    for (u32 i = thread; i < weights.num_parts; i += num_threads) {
        const u8* part = weights.start + static_cast<u64>(i) * weights.stride;
        asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(part), "r"(weights.part_bytes));
    }
#endif
}

// Brings what lies at an address into the L2 cache.
__device__ __forceinline__ void prefetch(const float* from) { asm volatile("prefetch.global.L2 [%0];" ::"l"(from)); }
