// Rows that go into caches and where, as `PlacedRows` of rust/kernels/placed_rows.rs lays them out; and copying rows.
#pragma once

#include "async_copy.cuh"

struct PlacedRow {
    u32 row;  // of the pass's tail
    u32 slot;
    u32 position;
    u32 page;
};

// Copies `len` floats with `num_threads` threads, by fours where both ends allow it.
__device__ __forceinline__ void copy_floats(float* to, const float* from, u32 len, u32 thread, u32 num_threads) {
    const bool by_fours = ((reinterpret_cast<u64>(to) | reinterpret_cast<u64>(from)) % 16 | len % 4) == 0;
    if (by_fours) {
        for (u32 i = thread; i < len / 4; i += num_threads) reinterpret_cast<float4*>(to)[i] = reinterpret_cast<const float4*>(from)[i];
    } else {
        for (u32 i = thread; i < len; i += num_threads) to[i] = from[i];
    }
}
