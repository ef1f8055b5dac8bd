// Plain stores into the shared memory of other blocks of the cluster; a cluster barrier makes them visible there.
#pragma once

#include "async_copy.cuh"

// Stores to shared memory at `remote`, an address that `address_in_block` gave.
__device__ __forceinline__ void store_remote(u32 remote, float2 value) {
#if __CUDA_ARCH__ >= 900
    asm volatile("st.shared::cluster.v2.f32 [%0], {%1, %2};" ::"r"(remote), "f"(value.x), "f"(value.y) : "memory");
#endif
}

__device__ __forceinline__ void store_remote(u32 remote, float value) {
#if __CUDA_ARCH__ >= 900
    asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(remote), "f"(value) : "memory");
#endif
}

// Brings the line at `from` into the L2 cache. Changes nothing that anyone reads, so it may run ahead of predecessors.
__device__ __forceinline__ void prefetch_line(const void* from) { asm volatile("prefetch.global.L2 [%0];" ::"l"(from)); }
