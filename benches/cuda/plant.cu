// Weights that are a function of seed, row and column, written in three layouts by kernels that share only that function.
//
// Rows are Gaussian with a log-normal spread of scales; a few weights lie far below or above, so that about 4e-4 of all
// are outside their channel's window, below and above. Nothing is ever encoded on the host.
#include "async_copy.cuh"

constexpr u32 TILE_CHANNELS = 16, TILE_COLUMNS = 64, NOTE_BYTES = 64, NOTE_ENTRIES = 10;

struct PlantParams {
    u8* slices;              // w12 or bf16 layout
    const u32* slice_starts; // num_slices + 1
    u32* escape_starts;      // counted first, then starts
    u32* escapes;
    u16* rows;               // [out_features][in_features]
    const u16* x;            // [num_rows][k_tiles * 64] BF16
    double* reference;       // [num_rows][out_features]
    double* magnitude;       // sum of |x w|
    u32 seed;
    u32 num_rows;
    u32 out_features;
    u32 in_features;
    u32 k_tiles;
    u32 num_slices;
};

__device__ __forceinline__ u64 mix(u64 z) {
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9ull;
    z = (z ^ z >> 27) * 0x94D049BB133111EBull;
    return z ^ z >> 31;
}

__device__ __forceinline__ float gaussian(u64 bits) {
    const float u = (static_cast<u32>(bits) >> 8) * 0x1p-24f + 0x1p-25f;
    const float v = (static_cast<u32>(bits >> 32) >> 8) * 0x1p-24f;
    return sqrtf(-2.0f * logf(u)) * cospif(2.0f * v);
}

__device__ __forceinline__ float row_scale(u32 seed, u32 row) {
    return 0.02f * expf(0.35f * gaussian(mix(static_cast<u64>(seed) << 32 ^ row ^ 0x9E3779B97F4A7C15ull)));
}

// Exponent base of a row: its window reaches from 2^-12 to 2^4 times the row's scale.
__device__ __forceinline__ u32 row_base(u32 seed, u32 row) { return (__float_as_uint(row_scale(seed, row)) >> 23) - 12; }

__device__ __forceinline__ u32 weight_bits(u32 seed, u32 row, u32 column) {
    const u64 bits = mix(mix(static_cast<u64>(seed) << 32 ^ row) ^ column);
    const u32 lot = mix(bits) & 0xFFFFF;
    float w = gaussian(bits) * row_scale(seed, row);
    if (lot < 160) w *= 0x1p-14f;
    else if (lot < 180) w *= 64.0f;
    const u32 f = __float_as_uint(w);
    return (f + 0x7FFF + (f >> 16 & 1)) >> 16;
}

__device__ __forceinline__ u32 channel_of(u32 lane, u32 slot) { return lane / 4 + 8 * (slot / 2 % 2); }

__device__ __forceinline__ u32 column_of(u32 lane, u32 slot) {
    return 16 * (lane % 4) + 4 * (slot / 8) + 2 * (slot % 8 / 4) + slot % 2;
}

// Bits of the weight in a lane's slot of a super-tile; zero in the padding, which `is_padding` tells apart.
__device__ __forceinline__ u32 slot_bits(const PlantParams& p, u32 tile, u32 k_tile, u32 lane, u32 slot, bool& is_padding) {
    const u32 row = tile * TILE_CHANNELS + channel_of(lane, slot), column = k_tile * TILE_COLUMNS + column_of(lane, slot);
    is_padding = row >= p.out_features || column >= p.in_features;
    return is_padding ? 0 : weight_bits(p.seed, row, column);
}

// The code of a weight, and whether it escapes.
__device__ __forceinline__ u32 code_of(u32 bits, u32 base, bool& escapes) {
    const u32 magnitude = (bits & 0x7FFF) - (base << 7);
    escapes = magnitude >= 0x800;
    if (!escapes) return bits & 0x8000 | magnitude;
    return (bits >> 7 & 0xFF) < base ? bits & 0x8000 : bits & 0x8000 | 0x7FF;
}

extern "C" __global__ void plant_rows(const __grid_constant__ PlantParams p) {
    const u64 all = static_cast<u64>(p.out_features) * p.in_features;
    for (u64 i = blockIdx.x * static_cast<u64>(blockDim.x) + threadIdx.x; i < all; i += gridDim.x * static_cast<u64>(blockDim.x)) {
        p.rows[i] = weight_bits(p.seed, i / p.in_features, i % p.in_features);
    }
}

// A warp a super-tile.
extern "C" __global__ void plant_bf16(const __grid_constant__ PlantParams p) {
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
__device__ __forceinline__ u32 escape_mask(const PlantParams& p, u32 tile, u32 k_tile, u32 lane) {
    u32 mask = 0;
    for (u32 slot = 0; slot < 32; slot++) {
        bool padding, escapes;
        const u32 bits = slot_bits(p, tile, k_tile, lane, slot, padding);
        code_of(bits, row_base(p.seed, tile * TILE_CHANNELS + channel_of(lane, slot)), escapes);
        if (escapes && !padding) mask |= 1u << slot;
    }
    return mask;
}

extern "C" __global__ void count_escapes(const __grid_constant__ PlantParams p) {
    const u32 lane = threadIdx.x % 32, warp = (blockIdx.x * blockDim.x + threadIdx.x) / 32, num_warps = gridDim.x * blockDim.x / 32;
    const u32 num_tiles = (p.out_features + TILE_CHANNELS - 1) / TILE_CHANNELS;
    for (u32 i = warp; i < num_tiles * p.k_tiles; i += num_warps) {
        const u32 count = __reduce_add_sync(0xFFFFFFFF, __popc(escape_mask(p, i / p.k_tiles, i % p.k_tiles, lane)));
        if (lane == 0) p.escape_starts[i] = count;
    }
}

// A warp a slice.
extern "C" __global__ void plant_w12(const __grid_constant__ PlantParams p) {
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
            note[8 + lane] = row < p.out_features ? row_base(p.seed, row) : 112;
        }
        u32 ends = 0;
        for (u32 j = 0; j < 5; j++) ends |= min(starts[min(first + j + 1, end)] - slice_start, 63u) << 6 * j;
        if (lane == 0) {
            reinterpret_cast<u32*>(note)[0] = is_crowded ? 0xFFFFFFFF : ends;
            reinterpret_cast<u32*>(note)[1] = tile * p.k_tiles + first;
        }
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
                    code[k] = code_of(bits, row_base(p.seed, tile * TILE_CHANNELS + channel_of(lane, slot)), escapes);
                    if (padding) code[k] = 0;
                    if (mask >> slot & 1) {
                        const u32 entry = lane << 21 | slot << 16 | bits;
                        const u32 at = starts[first + j] + before++;
                        p.escapes[at] = entry;
                        if (!is_crowded) reinterpret_cast<u32*>(note)[6 + at - slice_start] = entry;
                    }
                }
                u32 u = 0, v = 0, x = 0;
                for (u32 k = 0; k < 4; k++) {
                    const u32 a = code[k], b = code[4 + k], next = (k + 1) % 4 * 8, previous = (k + 3) % 4 * 8;
                    u |= (a >> 15 << 7 | a >> 8 & 7 | (b >> 8 & 7) << 4) << 8 * k | (b >> 15 << 3) << next;
                    v |= ((a >> 4 & 15) << 4 | b >> 4 & 15) << 8 * k;
                    x |= (a & 15) << 8 * k | ((b & 15) << 4) << previous;
                }
                plane8[lane * 4 + fragment] = u;
                plane8[128 + lane * 4 + fragment] = v;
                plane4[lane * 4 + fragment] = x;
            }
        }
    }
}

// A warp a channel: exact products, float64 sums.
extern "C" __global__ void sum_in_float64(const __grid_constant__ PlantParams p) {
    const u32 lane = threadIdx.x % 32, warp = (blockIdx.x * blockDim.x + threadIdx.x) / 32, num_warps = gridDim.x * blockDim.x / 32;
    for (u32 channel = warp; channel < p.out_features; channel += num_warps) {
        for (u32 row = 0; row < p.num_rows; row++) {
            double sum = 0.0, magnitude = 0.0;
            for (u32 k = lane; k < p.in_features; k += 32) {
                const float w = __uint_as_float(weight_bits(p.seed, channel, k) << 16);
                const float x = __uint_as_float(static_cast<u32>(p.x[static_cast<u64>(row) * p.k_tiles * TILE_COLUMNS + k]) << 16);
                sum += static_cast<double>(w) * x;
                magnitude += fabs(static_cast<double>(w) * x);
            }
            for (u32 step = 16; step > 0; step /= 2) {
                sum += __shfl_xor_sync(0xFFFFFFFF, sum, step);
                magnitude += __shfl_xor_sync(0xFFFFFFFF, magnitude, step);
            }
            if (lane == 0) {
                p.reference[static_cast<u64>(row) * p.out_features + channel] = sum;
                p.magnitude[static_cast<u64>(row) * p.out_features + channel] = magnitude;
            }
        }
    }
}
