// What every step of lm_head_screen shares: layouts, and from integer sums to bounds or estimates of logits.
//
// Codes of the head lie in tiles of 64 channels, [chunk of 16 columns][8 groups of channels][8 channels][16 columns]: what
// wgmma takes as core matrices, and what a warp reads in whole lines for mma. K is padded with zeros to 256.
// Codes of activations likewise, [chunk][columns / 8][8][16], one column for the high term of each row, then one for its low
// term. All products are of integers and their sums exact, so nothing depends on the instruction or on how K is cut.
#pragma once

#include "block_reduce.cuh"
#include "logit_keys.cuh"
#include "mma.cuh"

constexpr u32 SCREEN_CHANNELS = 64;   // of a tile
constexpr u32 CHUNK_COLUMNS = 16;
constexpr u32 CHUNK_BYTES = SCREEN_CHANNELS * CHUNK_COLUMNS;
constexpr u32 NOT_SCREENED = 0xFFFFFFFF;  // a count of survivors
constexpr u32 LOWEST_ORDER = 0x007FFFFF;  // of -inf

// Arguments of all kernels of a call; mirrored by the launcher.
struct ScreenParams {
    const u8* codes;         // of the head
    const float4* bounds;    // of each channel: scale, norm of the residual, norm of what the codes give
    const u8* exact;         // the head in the fragment order of bf16_matmul
    const float* x;          // [num_rows][in_features]
    const u32* mask_starts;  // of each row, and the end
    const u32* masked;
    u8* row_codes;
    u16* rounded;            // [num_rows][in_features padded to 64], BF16
    float4* row_bounds;      // of each row: see RowBound
    u32* mask_bits;          // [num_rows][channels / 32], or null where nothing is masked
    float* upper;            // [num_rows][channels]: upper bounds where they reached the threshold of their time
    float* group_upper;      // [num_rows][channels / 16]: the largest of 16 channels
    u32* thresholds;         // [num_rows]: the largest lower bound, as order_of_float
    u32* survivors;          // [num_rows][max_survivors]
    u32* counts;             // [num_rows]: survivors, or NOT_SCREENED
    u64* best;               // [num_rows]: key of the largest exact logit
    float* estimates;        // [num_rows][vocab_size], of a scan for estimates
    double order;            // relative error of the engine's order of sums
    double largest_norm;     // of a channel without NaN or infinity
    u32 num_rows;            // up to the kernel's
    u32 vocab_size;
    u32 in_features;
    u32 num_tiles;
    u32 num_chunks;          // of K
    u32 max_survivors;
    u32 num_octets;          // of the exact product's order
    u32 log2_slices;
    u32 ring_slots;          // of the wgmma scan, and blocks that share K there
    u32 cluster_blocks;

    __device__ __forceinline__ u32 num_channels() const { return num_tiles * SCREEN_CHANNELS; }
};

__device__ __forceinline__ float lowest() { return __uint_as_float(0xFF800000); }

__device__ __forceinline__ u32 order_of_float(float value) {
    const u32 bits = __float_as_uint(value);
    return bits & 0x80000000 ? ~bits : bits | 0x80000000;
}

__device__ __forceinline__ float float_of_order(u32 order) {
    return __uint_as_float(order & 0x80000000 ? order ^ 0x80000000 : ~order);
}

// The numbers of a row: a channel's logit is within `residual * of_residual + coded * of_coded + rest` of `scale * sum * step`.
// They are rounded up, with room for the roundings of the fp32 arithmetic below (lm_head_screen/cuda.rs counts them).
struct RowBound {
    float of_residual, of_coded, rest, step;

    __device__ __forceinline__ explicit RowBound(float4 stored)
        : of_residual(stored.x), of_coded(stored.y), rest(stored.z), step(stored.w) {}
};

// What a scan is for.
enum class ScanGoal : u32 {
    BOUNDS,     // which channels could hold a row's largest logit
    ESTIMATES,  // what the codes say that every logit is
};

// A group of 16 channels times eight rows, as an mma leaves it in a warp: a lane has channels g and g + 8 of rows 2t and
// 2t + 1. `bounds` and `thresholds` are read ahead.
struct ScreenGroup {
    u32 group;           // channels / 16
    float4 bounds[2];

    __device__ __forceinline__ ScreenGroup(const ScreenParams& p, u32 index, u32 lane) : group(index) {
#pragma unroll
        for (u32 half = 0; half < 2; half++) bounds[half] = __ldg(p.bounds + channel(lane, half));
    }

    __device__ __forceinline__ u32 channel(u32 lane, u32 half) const { return group * 16 + lane / 4 + 8 * half; }

    // What the codes say that a logit is: zero for channels and rows that have none.
    __device__ __forceinline__ float centre(const RowBound& of_row, u32 half, int high, int low) const {
        const float sum = static_cast<float>(255ll * high + low);
        return bounds[half].x * sum * of_row.step;
    }

    // Writes down the estimates of rows `first_row` and on.
    __device__ __forceinline__ void store(const ScreenParams& p, const float4* row_bounds, u32 first_row, u32 lane, const int (&high)[4],
                                          const int (&low)[4]) const {
#pragma unroll
        for (u32 side = 0; side < 2; side++) {
            const u32 row = first_row + lane % 4 * 2 + side;
            if (row >= p.num_rows) continue;
            const RowBound of_row(row_bounds[row]);
            float* to = p.estimates + static_cast<u64>(row) * p.vocab_size;
#pragma unroll
            for (u32 half = 0; half < 2; half++) {
                const u32 i = half * 2 + side, id = channel(lane, half);
                if (id < p.vocab_size) to[id] = centre(of_row, half, high[i], low[i]);
            }
        }
    }

    // Rows `first_row` and on. A threshold from the past only keeps more.
    __device__ __forceinline__ void note(const ScreenParams& p, const float4* row_bounds, u32 first_row, u32 lane, const int (&high)[4],
                                         const int (&low)[4], const u32 (&thresholds)[2]) const {
#pragma unroll
        for (u32 side = 0; side < 2; side++) {
            const u32 row = first_row + lane % 4 * 2 + side;
            const RowBound of_row(row_bounds[row]);
            float upper[2], largest_upper = lowest(), largest_lower = lowest();
#pragma unroll
            for (u32 half = 0; half < 2; half++) {
                const u32 i = half * 2 + side;
                const float centre = this->centre(of_row, half, high[i], low[i]);
                const float radius = fmaf(bounds[half].y, of_row.of_residual, fmaf(bounds[half].z, of_row.of_coded, of_row.rest));
                const u32 id = channel(lane, half);
                const bool is_masked = p.mask_bits && row < p.num_rows && p.mask_bits[row * (p.num_channels() / 32) + id / 32] >> id % 32 & 1;
                const bool is_there = id < p.vocab_size && !is_masked;
                upper[half] = is_there ? centre + radius : lowest();
                largest_upper = fmaxf(largest_upper, upper[half]);
                largest_lower = fmaxf(largest_lower, is_there ? centre - radius : lowest());
            }
#pragma unroll
            for (u32 distance = 4; distance < WARP_LANES; distance *= 2) {
                largest_upper = fmaxf(largest_upper, __shfl_xor_sync(ALL_LANES, largest_upper, distance));
                largest_lower = fmaxf(largest_lower, __shfl_xor_sync(ALL_LANES, largest_lower, distance));
            }
            if (row >= p.num_rows) continue;
            if (lane < 4) {
                p.group_upper[static_cast<u64>(row) * (p.num_channels() / 16) + group] = largest_upper;
                if (order_of_float(largest_lower) > thresholds[side]) atomicMax(p.thresholds + row, order_of_float(largest_lower));
            }
            if (largest_upper >= float_of_order(thresholds[side])) {
#pragma unroll
                for (u32 half = 0; half < 2; half++) p.upper[static_cast<u64>(row) * p.num_channels() + channel(lane, half)] = upper[half];
            }
        }
    }
};

// Thresholds of a lane's rows among eight, as they are now.
__device__ __forceinline__ void read_thresholds(const ScreenParams& p, u32 first_row, u32 lane, u32 (&thresholds)[2]) {
#pragma unroll
    for (u32 side = 0; side < 2; side++) {
        const u32 row = min(first_row + lane % 4 * 2 + side, p.num_rows - 1);
        thresholds[side] = *const_cast<const volatile u32*>(p.thresholds + row);
    }
}
