// Hopper's matrix instruction for BF16: weights from registers as operand A, rows from shared memory as operand B.
#pragma once

#include "wgmma.cuh"

#define WGMMA_SUMS_4(d, i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define WGMMA_SUMS_8(d, i) WGMMA_SUMS_4(d, i), WGMMA_SUMS_4(d, i + 4)
#define WGMMA_SUMS_16(d, i) WGMMA_SUMS_8(d, i), WGMMA_SUMS_8(d, i + 8)
#define WGMMA_SUMS_32(d, i) WGMMA_SUMS_16(d, i), WGMMA_SUMS_16(d, i + 16)
#define WGMMA_SUMS_64(d, i) WGMMA_SUMS_32(d, i), WGMMA_SUMS_32(d, i + 32)

// d = a b, or d += a b if it `adds`, for 64 channels x 16 columns and ROWS rows; runs on its own until waited for.
template <u32 ROWS>
__device__ __forceinline__ void wgmma_k16(float (&d)[ROWS / 2], const u32 (&a)[4], u64 b, bool adds);

template <>
__device__ __forceinline__ void wgmma_k16<8>(float (&d)[4], const u32 (&a)[4], u64 b, bool adds) {
    asm volatile(
        "{ .reg .pred adds; setp.ne.u32 adds, %9, 0; "
        "wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%0,%1,%2,%3}, {%4,%5,%6,%7}, %8, adds, 1, 1, 0; }"
        : WGMMA_SUMS_4(d, 0) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<u32>(adds)));
}

template <>
__device__ __forceinline__ void wgmma_k16<16>(float (&d)[8], const u32 (&a)[4], u64 b, bool adds) {
    asm volatile(
        "{ .reg .pred adds; setp.ne.u32 adds, %13, 0; "
        "wgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16 {%0,%1,%2,%3,%4,%5,%6,%7}, {%8,%9,%10,%11}, %12, adds, 1, 1, 0; }"
        : WGMMA_SUMS_8(d, 0) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<u32>(adds)));
}

template <>
__device__ __forceinline__ void wgmma_k16<32>(float (&d)[16], const u32 (&a)[4], u64 b, bool adds) {
    asm volatile(
        "{ .reg .pred adds; setp.ne.u32 adds, %21, 0; "
        "wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 {"
        "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15}, {%16,%17,%18,%19}, %20, adds, 1, 1, 0; }"
        : WGMMA_SUMS_16(d, 0) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<u32>(adds)));
}

template <>
__device__ __forceinline__ void wgmma_k16<48>(float (&d)[24], const u32 (&a)[4], u64 b, bool adds) {
    asm volatile(
        "{ .reg .pred adds; setp.ne.u32 adds, %29, 0; "
        "wgmma.mma_async.sync.aligned.m64n48k16.f32.bf16.bf16 {"
        "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23}, "
        "{%24,%25,%26,%27}, %28, adds, 1, 1, 0; }"
        : WGMMA_SUMS_16(d, 0), WGMMA_SUMS_8(d, 16)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<u32>(adds)));
}

template <>
__device__ __forceinline__ void wgmma_k16<64>(float (&d)[32], const u32 (&a)[4], u64 b, bool adds) {
    asm volatile(
        "{ .reg .pred adds; setp.ne.u32 adds, %37, 0; "
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {"
        "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31}, "
        "{%32,%33,%34,%35}, %36, adds, 1, 1, 0; }"
        : WGMMA_SUMS_32(d, 0) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<u32>(adds)));
}

template <>
__device__ __forceinline__ void wgmma_k16<128>(float (&d)[64], const u32 (&a)[4], u64 b, bool adds) {
    asm volatile(
        "{ .reg .pred adds; setp.ne.u32 adds, %69, 0; "
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {"
        "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,"
        "%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63}, "
        "{%64,%65,%66,%67}, %68, adds, 1, 1, 0; }"
        : WGMMA_SUMS_64(d, 0) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<u32>(adds)));
}
