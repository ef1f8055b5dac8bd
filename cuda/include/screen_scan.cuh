// The scan of lm_head_screen with mma: for GPUs without wgmma, and rows too long for their codes to stay in shared memory.
//
// A block takes tiles of 64 channels in turn; a warp takes 16 channels and half of K, and reads codes of both sides through the
// caches, which hold those of the rows.
#pragma once

#include "screen.cuh"

constexpr u32 SCAN_WARPS = 8;

// d += a b for 16 channels x 32 columns of codes (operand A) and 32 x 8 (operand B), exactly.
__device__ __forceinline__ void mma_m16n8k32(int (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

template <u32 ROWS, ScanGoal GOAL>
__device__ __forceinline__ void screen_scan(const ScreenParams& p) {
    constexpr u32 ROW_GROUPS = ROWS / 8, COLUMN_GROUPS = 2 * ROW_GROUPS;
    __shared__ int halves[SCAN_WARPS / 2][COLUMN_GROUPS][4][WARP_LANES];
    __shared__ float4 row_bounds[ROWS];
    launch_dependents();
    wait_for_predecessors();
    const u32 warp = threadIdx.x / WARP_LANES, lane = threadIdx.x % WARP_LANES;
    const u32 quarter = warp % 4, half = warp / 4;
    if (threadIdx.x < p.num_rows) row_bounds[threadIdx.x] = p.row_bounds[threadIdx.x];
    const u32 num_pairs = p.num_chunks / 2;
    const u32 first_pair = half * num_pairs / 2, end_pair = (half + 1) * num_pairs / 2;
    for (u32 tile = blockIdx.x; tile < p.num_tiles; tile += gridDim.x) {
        const ScreenGroup channels(p, tile * 4 + quarter, lane);
        int sums[COLUMN_GROUPS][4] = {};
        const u8* codes = p.codes + static_cast<u64>(tile) * p.num_chunks * CHUNK_BYTES + quarter * 256 + lane * 4;
#pragma unroll 2
        for (u32 pair = first_pair; pair < end_pair; pair++) {
            const u32* low = reinterpret_cast<const u32*>(codes + static_cast<u64>(2 * pair) * CHUNK_BYTES);
            const u32* high = low + CHUNK_BYTES / 4;
            const u32 a[4] = {__ldg(low), __ldg(low + 32), __ldg(high), __ldg(high + 32)};
            const u32* b = reinterpret_cast<const u32*>(p.row_codes + static_cast<u64>(2 * pair) * COLUMN_GROUPS * 128) + lane;
#pragma unroll
            for (u32 n = 0; n < COLUMN_GROUPS; n++) mma_m16n8k32(sums[n], a, b[n * 32], b[(COLUMN_GROUPS + n) * 32]);
        }
        __syncthreads();
        if (half == 1) {
#pragma unroll
            for (u32 n = 0; n < COLUMN_GROUPS; n++) {
#pragma unroll
                for (u32 i = 0; i < 4; i++) halves[quarter][n][i][lane] = sums[n][i];
            }
        }
        __syncthreads();
        if (half == 1) continue;
#pragma unroll
        for (u32 n = 0; n < COLUMN_GROUPS; n++) {
#pragma unroll
            for (u32 i = 0; i < 4; i++) sums[n][i] += halves[quarter][n][i][lane];
        }
#pragma unroll
        for (u32 n = 0; n < ROW_GROUPS; n++) {
            if constexpr (GOAL == ScanGoal::ESTIMATES) {
                channels.store(p, row_bounds, n * 8, lane, sums[n], sums[ROW_GROUPS + n]);
            } else {
                u32 thresholds[2];
                read_thresholds(p, n * 8, lane, thresholds);
                channels.note(p, row_bounds, n * 8, lane, sums[n], sums[ROW_GROUPS + n], thresholds);
            }
        }
    }
}
