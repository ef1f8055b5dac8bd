// Signals between blocks of a grid, in global memory. Each orders exactly one thing after another: a release makes what the
// caller wrote, and what its warp or block wrote before the barrier that it came through, visible before the signal; an
// acquire keeps what follows behind it. `__threadfence` would be sequentially consistent, which nothing here needs.
#pragma once

#include "async_copy.cuh"

// Adds to a counter, after everything before and before everything behind. Gives what was there.
__device__ __forceinline__ u32 signal_add(u32* counter, u32 value) {
    u32 before;
    asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], %2;" : "=r"(before) : "l"(counter), "r"(value) : "memory");
    return before;
}

__device__ __forceinline__ u32 signal_read(const u32* signal) {
    u32 value;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(signal) : "memory");
    return value;
}

__device__ __forceinline__ void signal_raise(u32* flag) {
    asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(flag), "r"(1) : "memory");
}

// Waits for a flag and takes it down. Called by one thread of all.
__device__ __forceinline__ void signal_take(u32* flag) {
    while (signal_read(flag) == 0) {
    }
    asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(flag), "r"(0) : "memory");
}

// Returns once every thread of the grid has called it, with all their writes visible. All blocks are resident. The word's low bits
// count arrivals and are zero between calls; the highest one turns over when all have arrived, whatever the grid.
__device__ __forceinline__ void wait_for_grid(u32* barrier) {
    constexpr u32 TURN = 0x80000000;
    __syncthreads();
    if (threadIdx.x == 0) {
        const u32 before = signal_add(barrier, blockIdx.x == 0 ? TURN - (gridDim.x - 1) : 1);
        while (((signal_read(barrier) ^ before) & TURN) == 0) {
        }
    }
    __syncthreads();
}
