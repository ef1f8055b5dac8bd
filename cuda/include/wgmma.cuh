// Warpgroup matrix instructions of Hopper: descriptors of operands in shared memory, and the batches they run in.
#pragma once

#include "async_copy.cuh"

constexpr u32 GROUP_THREADS = 128;  // a warpgroup

// Of core matrices of 8 x 16 bytes without swizzle: where they lie, and the distance from one to the next along K and
// across it. An address carries its block's rank in the cluster from bit 24 up; the instruction wants none of it.
__device__ __forceinline__ u64 matrix_descriptor(u32 address, u32 along_k, u32 across) {
    return static_cast<u64>((address & 0x3FFFF) >> 4) | static_cast<u64>(along_k >> 4) << 16 | static_cast<u64>(across >> 4) << 32;
}

__device__ __forceinline__ void wgmma_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Waits until no more than PENDING batches run.
template <u32 PENDING>
__device__ __forceinline__ void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

// Copies what many blocks read: without a hint, so that it stays in the L2 cache.
__device__ __forceinline__ void copy_shared_data(u32 to, const u8* from, u32 num_bytes, u32 barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to), "l"(from),
                 "r"(num_bytes), "r"(barrier) : "memory");
}
