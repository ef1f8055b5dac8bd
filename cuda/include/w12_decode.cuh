// W12 planes to BF16 fragments in registers: the layout is that of rust/weights/w12.
//
// A lane's four registers of a fragment hold channels g (r0, r2) and g + 8 (r1, r3). The words give sign, offset in the
// channel's window and mantissa; adding the channel's base to both exponent fields makes the checkpoint's bits.
#pragma once

#include "async_copy.cuh"

// Exponent bases of a lane's two channels, in both halves of a word, ready to add.
struct LaneBases {
    u32 low;   // channel g
    u32 high;  // channel g + 8
};

// Bits of `a` where `mask` has ones, else of `b`: one instruction, which the compiler does not find by itself.
__device__ __forceinline__ u32 select_bits(u32 a, u32 b, u32 mask) {
    u32 bits;
    asm("lop3.b32 %0, %1, %2, %3, 0xE2;" : "=r"(bits) : "r"(a), "r"(mask), "r"(b));
    return bits;
}

__device__ __forceinline__ void decode_w12(u32 u, u32 v, u32 x, LaneBases bases, u32 (&r)[4]) {
    const u32 high_a = u & 0x87878787;
    const u32 high_b = __funnelshift_r(u, u, 4) & 0x87878787;
    const u32 low_a = select_bits(v, x, 0xF0F0F0F0), nibbles_b = select_bits(v, x, 0x0F0F0F0F);
    const u32 low_b = __funnelshift_l(nibbles_b, nibbles_b, 4);
    r[0] = __byte_perm(low_a, high_a, 0x5140) + bases.low;
    r[1] = __byte_perm(low_a, high_a, 0x7362) + bases.high;
    r[2] = __byte_perm(low_b, high_b, 0x5140) + bases.low;
    r[3] = __byte_perm(low_b, high_b, 0x7362) + bases.high;
}

// Puts the bits of an escape (`lane << 21 | slot << 16 | bits`) over its lane's junk code; `a` holds a super-tile.
// The register is picked by comparing, so that the array stays in registers.
__device__ __forceinline__ void patch_escape(u32 (&a)[4][4], u32 entry, u32 lane) {
    if (entry >> 21 == lane) {
        const u32 place = entry >> 17 & 15;
        const u32 halves = entry & 0x10000 ? 0x5410 : 0x3254;
#pragma unroll
        for (u32 i = 0; i < 16; i++) {
            if (place == i) a[i / 4][i % 4] = __byte_perm(a[i / 4][i % 4], entry, halves);
        }
    }
}

// As patch_escape, for warps that wait for each other at every super-tile: no lane goes a way of its own.
__device__ __forceinline__ void patch_escape_together(u32 (&a)[4][4], u32 entry, bool is_own) {
    const u32 place = is_own ? 0x10000u << (entry >> 17 & 15) : 0;
    const u32 halves = entry & 0x10000 ? 0x5410 : 0x3254;
#pragma unroll
    for (u32 i = 0; i < 16; i++) {
        if (place >> (16 + i) & 1) a[i / 4][i % 4] = __byte_perm(a[i / 4][i % 4], entry, halves);
    }
}
