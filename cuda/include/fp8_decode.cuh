// E4M3 codes: to BF16 fragments in registers with their scales, to and from the matrix instruction of their own.
//
// A super-tile lies row by row, 64 codes a channel, so that lane (g, t) of a warp finds the columns 16 t .. 16 t + 15 of
// channel g in one load and of channel g + 8 in another; word f of each makes fragment f.
#pragma once

#include "mma.cuh"

// Four codes as two pairs of BF16 numbers, 2^-120 times their values; a code that is no number becomes some number.
__device__ __forceinline__ void spread_codes(u32 codes, u32& low, u32& high) {
    const u32 a = __byte_perm(codes, 0, 0x1404), b = __byte_perm(codes, 0, 0x3424);
    low = (a >> 4 & 0x07F007F0) | (a & 0x80008000);
    high = (b >> 4 & 0x07F007F0) | (b & 0x80008000);
}

// A pair of BF16 products, rounded once.
__device__ __forceinline__ u32 multiply_bf16(u32 a, u32 b) {
    u32 product;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(product) : "r"(a), "r"(b), "r"(0x80008000));
    return product;
}

// Any scale: products are rounded to fp32 and then to BF16. A `pair` is two codes on their way to BF16 numbers.
struct WholeScale {
    float scale;

    __device__ __forceinline__ explicit WholeScale(u32 bits) : scale(__uint_as_float(bits)) {}

#if __CUDA_ARCH__ >= 890
    // Every code is an FP16 number.
    __device__ __forceinline__ static void spread(u32 codes, u32& low, u32& high) {
        asm("{ .reg .b16 a, b; mov.b32 {a, b}, %2; cvt.rn.f16x2.e4m3x2 %0, a; cvt.rn.f16x2.e4m3x2 %1, b; }"
            : "=r"(low), "=r"(high) : "r"(codes));
    }

    __device__ __forceinline__ u32 scaled(u32 pair) const {
        float low, high;
        asm("{ .reg .f16 a, b; mov.b32 {a, b}, %2; cvt.f32.f16 %0, a; cvt.f32.f16 %1, b; }" : "=f"(low), "=f"(high) : "r"(pair));
        return pack_bf16(__fmul_rn(low, scale), __fmul_rn(high, scale));
    }
#else
    __device__ __forceinline__ static void spread(u32 codes, u32& low, u32& high) { spread_codes(codes, low, high); }

    __device__ __forceinline__ float product(u32 tiny) const {
        return __fmul_rn(__fmul_rn(__uint_as_float(tiny), 0x1p120f), scale);
    }

    __device__ __forceinline__ u32 scaled(u32 pair) const { return pack_bf16(product(pair << 16), product(pair & 0xFFFF0000)); }
#endif
};

// A scale that is itself a BF16 number, and neither so large nor so small that a product could leave BF16's normal
// numbers: fp32 would hold products exactly, so one rounding gives the same bits. 2^120 goes into the scale.
struct ShortScale {
    u32 pair;

    __device__ __forceinline__ explicit ShortScale(u32 bits) : pair(__byte_perm(bits, 0, 0x3232) + (120u << 23 | 120u << 7)) {}

    __device__ __forceinline__ static void spread(u32 codes, u32& low, u32& high) { spread_codes(codes, low, high); }

    __device__ __forceinline__ u32 scaled(u32 tiny) const { return multiply_bf16(tiny, pair); }
};

// The code of the value nearest to `x`, ties to even, beyond the largest the largest; `x` is a number.
__device__ __forceinline__ u32 code_of(float x) {
    const float magnitude = fminf(fabsf(x), 448.0f);
    const u32 bits = __float_as_uint(magnitude);
    const u32 code = magnitude < 0x1p-6f ? __float2uint_rn(magnitude * 512.0f) : (bits + 0x7FFFF + (bits >> 20 & 1) >> 20) - (120u << 3);
    return code | (__float_as_uint(x) >> 24 & 0x80);
}

// d += a b for a 16 x 32 tile of codes of weights and 8 rows of codes of activations; both take columns in the same order.
__device__ __forceinline__ void mma_e4m3(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
#if __CUDA_ARCH__ >= 890
    asm(
        "mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#else
    // Every code is a BF16 number.
    const ShortScale one(0x3F800000);
    const u32 rows[2] = {b0, b1};
#pragma unroll
    for (u32 half = 0; half < 2; half++) {
        u32 low[4], high[4], row_low, row_high;
        spread_codes(a[2 * half], low[0], low[2]);
        spread_codes(a[2 * half + 1], low[1], low[3]);
        spread_codes(rows[half], row_low, row_high);
#pragma unroll
        for (u32 i = 0; i < 4; i++) high[i] = one.scaled(low[i]);
        mma_m16n8k16(d, high, one.scaled(row_low), one.scaled(row_high));
    }
#endif
}
