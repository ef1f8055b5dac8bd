// FP8 slices as they lie in memory, and activations rounded to E4M3 beside them.
//
// A slice is a note (scales, and which channels hold codes that are no numbers), then its super-tiles. Scales are one a
// channel for the whole slice, or one a super-tile for all channels. A row of activations is its codes, padded with
// zeros to whole super-tiles, then a scale for every group of 128 columns, padded to 16 bytes.
#pragma once

#include "fp8_decode.cuh"
#include "slice_sums.cuh"

constexpr u32 GROUP_TILES = 2;  // super-tiles whose activations share a scale

struct Fp8Layout {
    static constexpr u32 TILE_BYTES = TILE_CHANNELS * TILE_COLUMNS;
    static constexpr u32 STORED_TILE_BYTES = TILE_BYTES;
    static constexpr u32 HALF_BYTES = TILE_BYTES / 2;
    // The note: 16 scales; u32 whether they go by super-tiles; u32 a bit for every channel with a code that is no number.
    static constexpr u32 NOTE_BYTES = 80, GOES_BY_TILES = 64, NAN_CHANNELS = 68;
};

// A slice that has arrived, for one lane.
struct Fp8Slice {
    static constexpr u32 HALF_BYTES = Fp8Layout::HALF_BYTES;
    const u32 start;
    u32 scale, nans;  // `scale` is even, and odd where scales go by super-tiles: registers are dear

    __device__ __forceinline__ Fp8Slice(u32 at, u32 lane) : start(at + Fp8Layout::NOTE_BYTES + lane * 16) {
        const u32 goes_by_tiles = load_shared_u32(at + Fp8Layout::GOES_BY_TILES);
        scale = at + (goes_by_tiles ? 1 : lane / 4 * 4);
        nans = load_shared_u32(at + Fp8Layout::NAN_CHANNELS) >> lane / 4;
    }

    __device__ __forceinline__ u32 codes(u32 j) const { return start + j * Fp8Layout::TILE_BYTES; }
    __device__ __forceinline__ u32 low_scale_at(u32 j) const { return scale & 1 ? scale - 1 + j * 4 : scale; }
    __device__ __forceinline__ u32 high_scale_at(u32 j) const { return scale & 1 ? scale - 1 + j * 4 : scale + 32; }
    __device__ __forceinline__ bool has_low_nan() const { return nans & 1; }
    __device__ __forceinline__ bool has_high_nan() const { return nans & 256; }
};

__device__ __forceinline__ u32 num_row_groups(u32 k_tiles) { return (k_tiles + GROUP_TILES - 1) / GROUP_TILES; }

__device__ __forceinline__ u64 quantised_row_bytes(u32 k_tiles) {
    return k_tiles * TILE_COLUMNS + (num_row_groups(k_tiles) * 4 + 15) / 16 * 16;
}

// The activations of a slice as operands B, and the scales of a lane's two tokens of each row group.
template <u32 GROUPS>
struct QuantisedSliceRows {
    static constexpr u32 MAX_SCALES = (MAX_SLICE_TILES + GROUP_TILES) / GROUP_TILES;
    u32 codes[MAX_SLICE_TILES][GROUPS][4];
    float scales[MAX_SCALES][GROUPS][2];
    u32 starts_odd;  // inside a group

    __device__ __forceinline__ float scale(u32 j, u32 group, u32 i, u32 odd) const {
        return odd ? scales[(j + 1) / GROUP_TILES][group][i] : scales[j / GROUP_TILES][group][i];
    }
};

template <u32 GROUPS>
__device__ __forceinline__ void load_slice_rows(const MatmulParams& p, SliceSpan span, u32 k_tiles, u32 lane, QuantisedSliceRows<GROUPS>& rows) {
    const u8* x = reinterpret_cast<const u8*>(p.x);
    const u64 stride = quantised_row_bytes(k_tiles);
    const u32 quad = lane % 4, last_row = p.num_rows - 1;
    rows.starts_odd = span.first % GROUP_TILES;
#pragma unroll
    for (u32 group = 0; group < GROUPS; group++) {
        // Where there is no such row or super-tile any other will do: nobody looks at what comes of it.
        const u8* row = x + min(group * 8 + lane / 4, last_row) * stride + quad * 16;
#pragma unroll
        for (u32 j = 0; j < MAX_SLICE_TILES; j++) {
            const uint4 codes = *reinterpret_cast<const uint4*>(row + min(span.first + j, k_tiles - 1) * TILE_COLUMNS);
            rows.codes[j][group][0] = codes.x, rows.codes[j][group][1] = codes.y;
            rows.codes[j][group][2] = codes.z, rows.codes[j][group][3] = codes.w;
        }
#pragma unroll
        for (u32 i = 0; i < 2; i++) {
            const u8* own = x + min(group * 8 + quad * 2 + i, last_row) * stride + k_tiles * TILE_COLUMNS;
#pragma unroll
            for (u32 n = 0; n < rows.MAX_SCALES; n++) {
                const u32 at = min(span.first / GROUP_TILES + n, num_row_groups(k_tiles) - 1);
                rows.scales[n][group][i] = reinterpret_cast<const float*>(own)[at];
            }
        }
    }
}

struct QuantisedFp8Weights : Fp8Layout {
    template <u32 GROUPS>
    using Rows = QuantisedSliceRows<GROUPS>;

    struct Slice : Fp8Slice {
        __device__ __forceinline__ Slice(const MatmulParams&, u32, u32 at, u32, u32 lane) : Fp8Slice(at, lane) {}
    };
};

template <class Weights, u32 GROUPS>
__device__ __forceinline__ void multiply_slice(const Fp8Slice& slice, u32 len, const QuantisedSliceRows<GROUPS>& rows, float (&sums)[GROUPS][4]) {
    const float no_number = __uint_as_float(0x7FFFFFFF);
    // Hidden, or the compiler would choose among scales once for all slices, and keep more of them than there is room for.
    u32 odd = rows.starts_odd;
    asm volatile("" : "+r"(odd));
#pragma unroll
    for (u32 j = 0; j < MAX_SLICE_TILES; j++) {
        if (j >= len) return;
        const uint4 low = load_shared_16(slice.codes(j)), high = load_shared_16(slice.codes(j) + Fp8Layout::HALF_BYTES);
        const float low_scale = slice.has_low_nan() ? no_number : __uint_as_float(load_shared_u32(slice.low_scale_at(j)));
        const float high_scale = slice.has_high_nan() ? no_number : __uint_as_float(load_shared_u32(slice.high_scale_at(j)));
        const u32 a[2][4] = {{low.x, high.x, low.y, high.y}, {low.z, high.z, low.w, high.w}};
#pragma unroll
        for (u32 group = 0; group < GROUPS; group++) {
            float chain[4] = {};
            mma_e4m3(chain, a[0], rows.codes[j][group][0], rows.codes[j][group][1]);
            mma_e4m3(chain, a[1], rows.codes[j][group][2], rows.codes[j][group][3]);
#pragma unroll
            for (u32 c = 0; c < 4; c++) {
                const float scale = __fmul_rn(c < 2 ? low_scale : high_scale, rows.scale(j, group, c % 2, odd));
                sums[group][c] = fmaf(chain[c], scale, sums[group][c]);
            }
        }
    }
}

// Rows to be rounded: fp32, which are rounded to BF16 first, or BF16 padded to whole super-tiles.
struct Fp32Rows {
    const float* x;
    u32 in_features;
    __device__ __forceinline__ float at(u32 row, u32 column) const {
        return column < in_features ? __uint_as_float(pack_bf16(x[static_cast<u64>(row) * in_features + column], 0.0f) << 16) : 0.0f;
    }
};

struct Bf16Rows {
    const u16* x;
    u32 padded;
    __device__ __forceinline__ float at(u32 row, u32 column) const {
        return column < padded ? __uint_as_float(static_cast<u32>(x[static_cast<u64>(row) * padded + column]) << 16) : 0.0f;
    }
};

// Rows to codes and scales: `max |x| / 448` for every group of 128 columns, 1 for one of zeros. A group with a value
// that is no finite number has a scale that is none, and so has all that comes of it. A warp a group.
template <class Source>
__device__ __forceinline__ void quantise_rows(const Source& x, u16* quantised, u32 num_rows, u32 k_tiles) {
    launch_dependents();
    wait_for_predecessors();
    const u32 num_groups = num_row_groups(k_tiles);
    const u32 lane = threadIdx.x % WARP_LANES, num_warps = gridDim.x * blockDim.x / WARP_LANES;
    const u64 stride = quantised_row_bytes(k_tiles);
    for (u32 i = (blockIdx.x * blockDim.x + threadIdx.x) / WARP_LANES; i < num_rows * num_groups; i += num_warps) {
        const u32 row = i / num_groups, group = i % num_groups;
        const u32 column = group * GROUP_TILES * TILE_COLUMNS + lane * 4;
        float values[4], largest = 0.0f;
        bool is_finite = true;
#pragma unroll
        for (u32 c = 0; c < 4; c++) {
            values[c] = x.at(row, column + c);
            largest = fmaxf(largest, fabsf(values[c]));
            is_finite = is_finite && fabsf(values[c]) < __uint_as_float(0x7F800000);
        }
#pragma unroll
        for (u32 distance = 16; distance > 0; distance /= 2) largest = fmaxf(largest, __shfl_xor_sync(0xFFFFFFFF, largest, distance));
        is_finite = __all_sync(0xFFFFFFFF, is_finite);
        const float scale = largest > 0.0f ? __fdiv_rn(largest, 448.0f) : 1.0f;
        u32 codes = 0;
#pragma unroll
        for (u32 c = 0; c < 4; c++) codes |= code_of(__fdiv_rn(values[c], scale)) << 8 * c;
        u8* to = reinterpret_cast<u8*>(quantised) + row * stride;
        if (column < k_tiles * TILE_COLUMNS) *reinterpret_cast<u32*>(to + column) = codes;
        if (lane == 0) {
            reinterpret_cast<float*>(to + k_tiles * TILE_COLUMNS)[group] = is_finite ? scale : __uint_as_float(0x7FFFFFFF);
        }
    }
}
