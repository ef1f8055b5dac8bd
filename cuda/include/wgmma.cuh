// Hopper's matrix instruction for BF16: weights from registers as operand A, rows from shared memory as operand B.
#pragma once

#include "async_copy.cuh"

#if __CUDA_ARCH_FEAT_SM90_ALL

// Core matrices of 8 x 16 bytes without swizzle: where they lie, and the distance from one to the next along K and across it.
// The upper bits of an address name the block in its cluster, and are left out.
__device__ __forceinline__ u64 core_matrices(u32 address, u32 along_k, u32 across) {
    return static_cast<u64>((address & 0x3FFFF) >> 4) | static_cast<u64>(along_k >> 4) << 16 | static_cast<u64>(across >> 4) << 32;
}

#define WGMMA_SUMS_4(d, i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define WGMMA_SUMS_16(d, i) WGMMA_SUMS_4(d, i), WGMMA_SUMS_4(d, i + 4), WGMMA_SUMS_4(d, i + 8), WGMMA_SUMS_4(d, i + 12)
#define WGMMA_SUMS_32(d, i) WGMMA_SUMS_16(d, i), WGMMA_SUMS_16(d, i + 16)
#define WGMMA_SUMS_64(d, i) WGMMA_SUMS_32(d, i), WGMMA_SUMS_32(d, i + 32)

// d += a b for 64 channels x 16 columns and ROWS rows; runs on its own until waited for.
template <u32 ROWS>
__device__ __forceinline__ void wgmma_k16(float (&d)[ROWS / 2], const u32 (&a)[4], u64 b);

template <>
__device__ __forceinline__ void wgmma_k16<64>(float (&d)[32], const u32 (&a)[4], u64 b) {
    asm volatile(
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,"
        "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31}, {%32,%33,%34,%35}, %36, 1, 1, 1, 0;"
        : WGMMA_SUMS_32(d, 0) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}

template <>
__device__ __forceinline__ void wgmma_k16<128>(float (&d)[64], const u32 (&a)[4], u64 b) {
    asm volatile(
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,"
        "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,"
        "%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63}, {%64,%65,%66,%67}, %68, 1, 1, 1, 0;"
        : WGMMA_SUMS_64(d, 0) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}

__device__ __forceinline__ void wgmma_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Waits until no more than PENDING batches run.
template <u32 PENDING>
__device__ __forceinline__ void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

// Copies to the same place in every block of the cluster, counted there on the same barrier. Without a hint: what many blocks
// read stays in the L2 cache.
__device__ __forceinline__ void copy_to_cluster(u32 to, const u8* from, u32 num_bytes, u32 barrier, u32 num_blocks) {
    if (num_blocks == 1) {
        asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to), "l"(from),
                     "r"(num_bytes), "r"(barrier) : "memory");
        return;
    }
    const u16 all = (1u << num_blocks) - 1;
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1], %2, [%3], %4;" ::"r"(to),
                 "l"(from), "r"(num_bytes), "r"(barrier), "h"(all) : "memory");
}

// An L2 policy for data that other blocks read again soon.
__device__ __forceinline__ u64 read_again_policy() {
    u64 policy;
    asm volatile("createpolicy.fractional.L2::evict_normal.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}
#endif
