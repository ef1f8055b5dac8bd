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

// Brings what lies at an address into the L2 cache.
__device__ __forceinline__ void prefetch(const float* from) { asm volatile("prefetch.global.L2 [%0];" ::"l"(from)); }
