// Weights that are a function of a seed, a row and a column, written in the layouts that matmuls read.
//
// All entries share only that function, `weight_bits`, so a matrix holds the same numbers in every layout, and no code
// is ever encoded on the host. Whole numbers and exactly rounded products alone: the host computes the same bits.
#include "fp8_decode.cuh"

constexpr u32 TILE_CHANNELS = 16, TILE_COLUMNS = 64, NOTE_BYTES = 64, NOTE_ENTRIES = 10, FP8_NOTE_BYTES = 80;
// In place of the ends of more escapes than a note has entries for; and beside them, that some escape is above its window.
constexpr u32 CROWDED = 0x3FFFFFFF, HAS_ABOVE = 0x40000000;
constexpr u64 ROW_SALT = 0x9E3779B97F4A7C15ull;
constexpr u32 LAYER = 0, SUCCESSORS = 2;

struct PlantMatrixParams {
    u8* slices;              // w12, bf16 or fp8 layout
    const u32* slice_starts; // num_slices + 1
    u32* escape_starts;      // counted first, then starts
    u32* escapes;
    u16* rows;               // [out_features][in_features]
    u32 out_features;
    u32 in_features;
    u32 k_tiles;
    u32 num_slices;
    u32 seed;
    u32 kind;
    float unit;              // a weight's factor
    u32 table_seed;          // SUCCESSORS: rows of the table
    u32 strides[2];          // from a row to the one that it is the first and second successor of
    u32 strength;            // share of the first one's row, in 256ths
    u32 noise;               // share of the row's own numbers, in 256ths
};

__device__ __forceinline__ u64 mix(u64 z) {
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9ull;
    z = (z ^ z >> 27) * 0x94D049BB133111EBull;
    return z ^ z >> 31;
}

__device__ __forceinline__ u64 row_key(u32 seed, u32 row) { return mix(static_cast<u64>(seed) << 32 ^ row); }

// Nearly Gaussian: the sum of four even numbers of 16 bits about zero, never zero itself.
__device__ __forceinline__ int centred(u64 bits) {
    const u32 sum = (bits & 0xFFFF) + (bits >> 16 & 0xFFFF) + (bits >> 32 & 0xFFFF) + (bits >> 48);
    return static_cast<int>(2 * sum) - 262139;
}

// A row's factor: layers' rows are 0.5 to 1.5 times as large as `unit` says.
__device__ __forceinline__ float row_unit(const PlantMatrixParams& p, u32 row) {
    if (p.kind != LAYER) return p.unit;
    const u64 bits = mix(row_key(p.seed, row) ^ ROW_SALT);
    const u32 spread = 65536 + (bits & 0xFFFF) + (bits >> 16 & 0xFFFF);
    return __fmul_rn(p.unit, __fmul_rn(__uint2float_rn(spread), 0x1p-17f));
}

// The window of a layer's row: up to the largest number that a row can draw, some 2^18 units.
__device__ __forceinline__ u32 row_base(const PlantMatrixParams& p, u32 row) {
    return (__float_as_uint(row_unit(p, row)) >> 23) + 3;
}

__device__ __forceinline__ u32 round_to_bf16(float w) {
    const u32 f = __float_as_uint(w);
    return (f + 0x7FFF + (f >> 16 & 1)) >> 16;
}

__device__ __forceinline__ u32 weight_bits(const PlantMatrixParams& p, u32 row, u32 column) {
    const u64 bits = mix(row_key(p.seed, row) ^ column);
    if (p.kind == SUCCESSORS) {
        const u32 n = p.out_features, first = (row + n - p.strides[0]) % n, second = (row + n - p.strides[1]) % n;
        const int rival = static_cast<int>(p.strength * (90 + mix(row_key(p.seed, row) ^ ROW_SALT) % 103) / 256);
        const int sum = static_cast<int>(p.strength) * centred(mix(row_key(p.table_seed, first) ^ column)) +
                        rival * centred(mix(row_key(p.table_seed, second) ^ column)) +
                        static_cast<int>(p.noise) * centred(bits);
        return round_to_bf16(__fmul_rn(__int2float_rn(sum), p.unit));
    }
    float w = __fmul_rn(__int2float_rn(centred(bits)), row_unit(p, row));
    if (p.kind == LAYER) {
        // Far below or above the window, so that with the Gaussian's own about 4e-4 of all weights escape.
        const u32 lot = mix(bits) & 0xFFFFF;
        if (lot < 300) w *= 0x1p-14f;
        else if (lot < 320) w *= 64.0f;
    }
    return round_to_bf16(w);
}

__device__ __forceinline__ u32 channel_of(u32 lane, u32 slot) { return lane / 4 + 8 * (slot / 2 % 2); }

__device__ __forceinline__ u32 column_of(u32 lane, u32 slot) {
    return 16 * (lane % 4) + 4 * (slot / 8) + 2 * (slot % 8 / 4) + slot % 2;
}

// Bits of the weight in a lane's slot of a super-tile; zero in the padding, which `is_padding` tells apart.
__device__ __forceinline__ u32 slot_bits(const PlantMatrixParams& p, u32 tile, u32 k_tile, u32 lane, u32 slot, bool& is_padding) {
    const u32 row = tile * TILE_CHANNELS + channel_of(lane, slot), column = k_tile * TILE_COLUMNS + column_of(lane, slot);
    is_padding = row >= p.out_features || column >= p.in_features;
    return is_padding ? 0 : weight_bits(p, row, column);
}

// The code of a weight, and whether it escapes.
__device__ __forceinline__ u32 code_of(u32 bits, u32 base, bool& escapes) {
    const u32 magnitude = (bits & 0x7FFF) - (base << 7);
    escapes = magnitude >= 0x800;
    if (!escapes) return (bits & 0x8000) | magnitude;
    return (bits >> 7 & 0xFF) < base ? bits & 0x8000 : (bits & 0x8000) | 0x7FF;
}

extern "C" __global__ void plant_rows(const __grid_constant__ PlantMatrixParams p) {
    const u64 all = static_cast<u64>(p.out_features) * p.in_features;
    for (u64 i = blockIdx.x * static_cast<u64>(blockDim.x) + threadIdx.x; i < all; i += gridDim.x * static_cast<u64>(blockDim.x)) {
        p.rows[i] = weight_bits(p, i / p.in_features, i % p.in_features);
    }
}

// A warp a super-tile.
extern "C" __global__ void plant_bf16(const __grid_constant__ PlantMatrixParams p) {
    const u32 lane = threadIdx.x % 32, warp = (blockIdx.x * blockDim.x + threadIdx.x) / 32, num_warps = gridDim.x * blockDim.x / 32;
    const u32 num_tiles = (p.out_features + TILE_CHANNELS - 1) / TILE_CHANNELS;
    for (u32 i = warp; i < num_tiles * p.k_tiles; i += num_warps) {
        u32* to = reinterpret_cast<u32*>(p.slices + static_cast<u64>(i) * 2048);
        for (u32 slot = 0; slot < 32; slot += 2) {
            bool padding;
            const u32 low = slot_bits(p, i / p.k_tiles, i % p.k_tiles, lane, slot, padding);
            const u32 high = slot_bits(p, i / p.k_tiles, i % p.k_tiles, lane, slot + 1, padding);
            to[slot / 8 * 128 + lane * 4 + slot % 8 / 2] = low | high << 16;
        }
    }
}

// Escapes of a super-tile among a lane's slots, as a mask.
__device__ __forceinline__ u32 escape_mask(const PlantMatrixParams& p, u32 tile, u32 k_tile, u32 lane) {
    u32 mask = 0;
    for (u32 slot = 0; slot < 32; slot++) {
        bool padding, escapes;
        const u32 bits = slot_bits(p, tile, k_tile, lane, slot, padding);
        code_of(bits, row_base(p, tile * TILE_CHANNELS + channel_of(lane, slot)), escapes);
        if (escapes && !padding) mask |= 1u << slot;
    }
    return mask;
}

// A warp a super-tile.
extern "C" __global__ void count_escapes(const __grid_constant__ PlantMatrixParams p) {
    const u32 lane = threadIdx.x % 32, warp = (blockIdx.x * blockDim.x + threadIdx.x) / 32, num_warps = gridDim.x * blockDim.x / 32;
    const u32 num_tiles = (p.out_features + TILE_CHANNELS - 1) / TILE_CHANNELS;
    for (u32 i = warp; i < num_tiles * p.k_tiles; i += num_warps) {
        const u32 count = __reduce_add_sync(0xFFFFFFFF, __popc(escape_mask(p, i / p.k_tiles, i % p.k_tiles, lane)));
        if (lane == 0) p.escape_starts[i] = count;
    }
}

// A warp a slice.
extern "C" __global__ void plant_w12(const __grid_constant__ PlantMatrixParams p) {
    const u32 lane = threadIdx.x % 32, warp = (blockIdx.x * blockDim.x + threadIdx.x) / 32, num_warps = gridDim.x * blockDim.x / 32;
    const u32 num_tiles = (p.out_features + TILE_CHANNELS - 1) / TILE_CHANNELS;
    for (u32 i = warp; i < num_tiles * p.num_slices; i += num_warps) {
        const u32 tile = i / p.num_slices, slice = i % p.num_slices;
        const u32 first = p.slice_starts[slice], end = p.slice_starts[slice + 1], len = end - first;
        u8* note = p.slices + (static_cast<u64>(tile) * p.k_tiles + first) * 1536 + static_cast<u64>(i) * NOTE_BYTES;
        const u32* starts = p.escape_starts + static_cast<u64>(tile) * p.k_tiles;
        const u32 slice_start = starts[first], num_escapes = starts[end] - slice_start;
        const bool is_crowded = num_escapes > NOTE_ENTRIES;
        if (lane < NOTE_BYTES / 4) reinterpret_cast<u32*>(note)[lane] = 0;
        __syncwarp();
        if (lane < TILE_CHANNELS) {
            const u32 row = tile * TILE_CHANNELS + lane;
            note[8 + lane] = row < p.out_features ? row_base(p, row) : 112;
        }
        u32 ends = 0;
        for (u32 j = 0; j < 5; j++) ends |= min(starts[min(first + j + 1, end)] - slice_start, 63u) << 6 * j;
        u32 num_above = 0;
        for (u32 j = 0; j < len; j++) {
            u32* plane8 = reinterpret_cast<u32*>(note + NOTE_BYTES + j * 1024);
            u32* plane4 = reinterpret_cast<u32*>(note + NOTE_BYTES + len * 1024 + j * 512);
            const u32 mask = escape_mask(p, tile, first + j, lane);
            u32 before = 0;
            for (u32 other = 0; other < 32; other++) {
                const u32 count = __popc(__shfl_sync(0xFFFFFFFF, mask, other));
                if (other < lane) before += count;
            }
            for (u32 fragment = 0; fragment < 4; fragment++) {
                u32 code[8];
                for (u32 k = 0; k < 8; k++) {
                    const u32 slot = fragment * 8 + k;
                    bool padding, escapes;
                    const u32 bits = slot_bits(p, tile, first + j, lane, slot, padding);
                    code[k] = code_of(bits, row_base(p, tile * TILE_CHANNELS + channel_of(lane, slot)), escapes);
                    if (padding) code[k] = 0;
                    if (mask >> slot & 1) {
                        const u32 entry = lane << 21 | slot << 16 | bits;
                        num_above += (bits >> 7 & 255) >= row_base(p, tile * TILE_CHANNELS + channel_of(lane, slot)) ? 1 : 0;
                        const u32 at = starts[first + j] + before++;
                        p.escapes[at] = entry;
                        if (!is_crowded) reinterpret_cast<u32*>(note)[6 + at - slice_start] = entry;
                    }
                }
                u32 u = 0, v = 0, x = 0;
                for (u32 k = 0; k < 4; k++) {
                    const u32 a = code[k], b = code[4 + k], next = (k + 1) % 4 * 8, previous = (k + 3) % 4 * 8;
                    u |= (a >> 15 << 7 | (a >> 8 & 7) | (b >> 8 & 7) << 4) << 8 * k | (b >> 15 << 3) << next;
                    v |= ((a >> 4 & 15) << 4 | (b >> 4 & 15)) << 8 * k;
                    x |= (a & 15) << 8 * k | ((b & 15) << 4) << previous;
                }
                plane8[lane * 4 + fragment] = u;
                plane8[128 + lane * 4 + fragment] = v;
                plane4[lane * 4 + fragment] = x;
            }
        }
        num_above = __reduce_add_sync(0xFFFFFFFF, num_above);
        if (lane == 0) {
            reinterpret_cast<u32*>(note)[0] = (is_crowded ? CROWDED : ends) | (num_above > 0 ? HAS_ABOVE : 0);
            reinterpret_cast<u32*>(note)[1] = tile * p.k_tiles + first;
        }
    }
}

// The scale of a row's FP8 codes: the largest number that a row can draw is 448 times as large, up to its rounding to BF16.
__device__ __forceinline__ float fp8_scale(const PlantMatrixParams& p, u32 row) {
    return __uint_as_float(round_to_bf16(__fmul_rn(row_unit(p, row), 585.125f)) << 16);
}

// A warp a slice; scales go by channels.
extern "C" __global__ void plant_fp8(const __grid_constant__ PlantMatrixParams p) {
    const u32 lane = threadIdx.x % 32, warp = (blockIdx.x * blockDim.x + threadIdx.x) / 32, num_warps = gridDim.x * blockDim.x / 32;
    const u32 num_tiles = (p.out_features + TILE_CHANNELS - 1) / TILE_CHANNELS;
    for (u32 i = warp; i < num_tiles * p.num_slices; i += num_warps) {
        const u32 tile = i / p.num_slices, first = p.slice_starts[i % p.num_slices], end = p.slice_starts[i % p.num_slices + 1];
        u8* note = p.slices + (static_cast<u64>(tile) * p.k_tiles + first) * 1024 + static_cast<u64>(i) * FP8_NOTE_BYTES;
        if (lane < FP8_NOTE_BYTES / 4) {
            const u32 row = tile * TILE_CHANNELS + lane;
            const bool has_scale = lane < TILE_CHANNELS && row < p.out_features;
            reinterpret_cast<u32*>(note)[lane] = has_scale ? __float_as_uint(fp8_scale(p, row)) : 0;
        }
        for (u32 at = lane * 4; at < (end - first) * 1024; at += 128) {
            const u32 row = tile * TILE_CHANNELS + at % 1024 / TILE_COLUMNS;
            const u32 column = (first + at / 1024) * TILE_COLUMNS + at % TILE_COLUMNS;
            u32 codes = 0;
            for (u32 c = 0; c < 4; c++) {
                if (row >= p.out_features || column + c >= p.in_features) continue;
                const float weight = __uint_as_float(weight_bits(p, row, column + c) << 16);
                codes |= code_of(__fdiv_rn(weight, fp8_scale(p, row))) << 8 * c;
            }
            *reinterpret_cast<u32*>(note + FP8_NOTE_BYTES + at) = codes;
        }
    }
}
