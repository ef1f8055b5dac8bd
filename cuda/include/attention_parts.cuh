// Attention over one block of 64 positions, and how the results of blocks and splits are put together.
//
// Operands are BF16: q, k and v rounded, weights as a rounded part and the rest of it. A block's maximum, weights, sum and
// weighted values follow from it alone; results are then merged in the order of positions. So it does not matter who
// computes a block, nor beside which rows.
#pragma once

#include "matrix_loads.cuh"
#include "power_of_two.cuh"

constexpr u32 KV_BLOCK = 64;
constexpr u32 KV_SPLIT = 256;
constexpr u32 SPLIT_BLOCKS = KV_SPLIT / KV_BLOCK;
constexpr u32 BLOCK_WARPS = 8;
constexpr u32 BLOCK_THREADS = BLOCK_WARPS * WARP_LANES;
constexpr u32 TILE_QUERIES = 16;          // rows of a matrix instruction
constexpr u32 SCORE_ROW = KV_BLOCK + 4;   // floats
constexpr u32 WEIGHT_ROW = KV_BLOCK + 8;  // BF16 values; rows of 16-byte pieces start in different banks

#define NO_SCORE (-__int_as_float(0x7F800000))

// Maximum of the scores so far, in powers of two, and the sum of weights relative to it.
struct Softmax {
    float max, sum;
};

// Factors that take two results to their common maximum.
struct MergeFactors {
    float old_part, new_part;
};

__device__ __forceinline__ MergeFactors merge(Softmax& total, Softmax part) {
    const float max = fmaxf(total.max, part.max);
    const MergeFactors factors = {total.max == NO_SCORE ? 0.0f : power_of_two(total.max - max), part.max == NO_SCORE ? 0.0f : power_of_two(part.max - max)};
    total.sum = __fmaf_rn(part.sum, factors.new_part, __fmul_rn(total.sum, factors.old_part));
    total.max = max;
    return factors;
}

__device__ __forceinline__ float merge(float total, float part, MergeFactors factors) {
    return __fmaf_rn(part, factors.new_part, __fmul_rn(total, factors.old_part));
}

// Shared memory of one item of work, for queries of up to QUERIES rows and heads of up to HEAD_DIM.
template <u32 HEAD_DIM, u32 QUERIES>
struct AttentionMemory {
    static constexpr u32 ROW = HEAD_DIM + 8;  // BF16 values
    u16 queries[QUERIES * ROW];
    u16 positions[KV_BLOCK * ROW];            // keys of a block, then its values
    float scores[QUERIES * SCORE_ROW];
    u16 weights[QUERIES * WEIGHT_ROW];        // rounded
    u16 rests[QUERIES * WEIGHT_ROW];          // what rounding left of them
    Softmax softmax[QUERIES];
    MergeFactors factors[QUERIES];
    u32 own_positions[QUERIES];               // of the queries' rows
    const float* sources[2][SPLIT_BLOCKS * KV_BLOCK];  // keys and values of the positions, null where there are none
};

// A warp's part of the work: one tile of queries, and of these a share of the keys, then of the values' columns.
template <u32 HEAD_DIM, u32 TILES>
struct AttentionWarp {
    static constexpr u32 QUERIES = TILES * TILE_QUERIES;
    static constexpr u32 SHARES = BLOCK_WARPS / TILES;
    static constexpr u32 OWN_KEYS = KV_BLOCK / SHARES;
    static constexpr u32 OWN_COLUMNS = HEAD_DIM / SHARES;
    static constexpr u32 NUM_GROUPS = OWN_COLUMNS / 8;
    static constexpr u32 KEY_STEPS = HEAD_DIM / 16;
    typedef AttentionMemory<HEAD_DIM, QUERIES> Memory;

    Memory& memory;
    u32 warp, lane, first_query, share;
    float outputs[NUM_GROUPS][4];

    __device__ explicit AttentionWarp(Memory& m) : memory(m) {
        warp = threadIdx.x / WARP_LANES, lane = threadIdx.x % WARP_LANES;
        first_query = warp / SHARES * TILE_QUERIES, share = warp % SHARES;
    }

    __device__ void clear() {
#pragma unroll
        for (u32 group = 0; group < NUM_GROUPS; group++) {
#pragma unroll
            for (u32 i = 0; i < 4; i++) outputs[group][i] = 0.0f;
        }
    }

    // Products of queries and keys, into `scores`.
    __device__ void score() const {
        float sums[OWN_KEYS / 8][4] = {};
        const u16* query = memory.queries + (first_query + lane % 16) * Memory::ROW + lane / 16 * 8;
        // Two matrices of a group of eight keys side by side are one step; four are two steps.
        const u16* key = memory.positions + (share * OWN_KEYS + lane % 8) * Memory::ROW + lane / 8 * 8;
#pragma unroll 2
        for (u32 step = 0; step < KEY_STEPS; step += 2) {
            u32 a[2][4];
            load_matrices(a[0], query + step * 16);
            load_matrices(a[1], query + step * 16 + 16);
#pragma unroll
            for (u32 group = 0; group < OWN_KEYS / 8; group++) {
                u32 b[4];
                load_matrices(b, key + group * 8 * Memory::ROW + step * 16);
                mma_m16n8k16(sums[group], a[0], b[0], b[1]);
                mma_m16n8k16(sums[group], a[1], b[2], b[3]);
            }
        }
#pragma unroll
        for (u32 group = 0; group < OWN_KEYS / 8; group++) {
            float* to = memory.scores + (first_query + lane / 4) * SCORE_ROW + share * OWN_KEYS + group * 8 + lane % 4 * 2;
            *reinterpret_cast<float2*>(to) = {sums[group][0], sums[group][1]};
            *reinterpret_cast<float2*>(to + 8 * SCORE_ROW) = {sums[group][2], sums[group][3]};
        }
    }

    // Adds the block's weighted values to the outputs.
    __device__ void add_values() {
        const u32 place = (first_query + lane % 16) * WEIGHT_ROW + lane / 16 * 8;
        const MergeFactors upper = memory.factors[first_query + lane / 4], lower = memory.factors[first_query + lane / 4 + 8];
        const u16* values = memory.positions + lane % 16 * Memory::ROW + share * OWN_COLUMNS;
        u32 weights[KV_BLOCK / 16][4], rests[KV_BLOCK / 16][4];
#pragma unroll
        for (u32 step = 0; step < KV_BLOCK / 16; step++) {
            load_matrices(weights[step], memory.weights + place + step * 16);
            load_matrices(rests[step], memory.rests + place + step * 16);
        }
        // Two groups of eight columns at a time; of an odd number the last stands alone.
#pragma unroll
        for (u32 group = 0; group < NUM_GROUPS; group += 2) {
            float sums[2][4] = {};
            const u32 column = NUM_GROUPS == 1 ? 0 : group * 8 + lane / 16 * 8;
#pragma unroll
            for (u32 step = 0; step < KV_BLOCK / 16; step++) {
                u32 b[4];
                load_transposed(b, values + step * 16 * Memory::ROW + column);
#pragma unroll
                for (u32 i = 0; i < 2; i++) {
                    if (group + i >= NUM_GROUPS) continue;
                    mma_m16n8k16(sums[i], rests[step], b[2 * i], b[2 * i + 1]);
                    mma_m16n8k16(sums[i], weights[step], b[2 * i], b[2 * i + 1]);
                }
            }
#pragma unroll
            for (u32 i = 0; i < 2; i++) {
                if (group + i >= NUM_GROUPS) continue;
                float(&to)[4] = outputs[group + i];
                to[0] = merge(to[0], sums[i][0], upper), to[1] = merge(to[1], sums[i][1], upper);
                to[2] = merge(to[2], sums[i][2], lower), to[3] = merge(to[3], sums[i][3], lower);
            }
        }
    }
};

// What a query sees.
struct Sight {
    u32 start;       // position of the block
    u32 window;      // 0 for none
    bool is_whole;   // every query sees the whole block
};

// Turns a block's scores into weights, by groups of eight threads per query.
template <typename Memory>
__device__ __forceinline__ void weigh(Memory& memory, u32 num_queries, float scale, Sight sight) {
    constexpr u32 GROUP = 8;
    const u32 member = threadIdx.x % GROUP, padded = (num_queries + 3) / 4 * 4;  // whole warps take part
#pragma unroll 1
    for (u32 query = threadIdx.x / GROUP; query < padded; query += BLOCK_THREADS / GROUP) {
        float scores[8], max = NO_SCORE;
        const u32 own = sight.is_whole ? 0 : memory.own_positions[query];
#pragma unroll
        for (u32 half = 0; half < 2; half++) {
            const u32 first = half * 32 + member * 4;
            const float4 products = *reinterpret_cast<const float4*>(memory.scores + query * SCORE_ROW + first);
            const float values[4] = {products.x, products.y, products.z, products.w};
#pragma unroll
            for (u32 i = 0; i < 4; i++) {
                const u32 position = sight.start + first + i;
                const bool sees = sight.is_whole || (position <= own && (sight.window == 0 || position + sight.window > own));
                scores[half * 4 + i] = sees ? values[i] * scale : NO_SCORE;
                max = fmaxf(max, scores[half * 4 + i]);
            }
        }
#pragma unroll
        for (u32 distance = 1; distance < GROUP; distance *= 2) max = fmaxf(max, __shfl_xor_sync(0xFFFFFFFF, max, distance));
        // Where nothing is in sight any finite maximum gives weights of zero.
        const float base = max == NO_SCORE ? 0.0f : max;
        float sum = 0.0f;
#pragma unroll
        for (u32 half = 0; half < 2; half++) {
            u32 rounded[2], rests[2];
#pragma unroll
            for (u32 i = 0; i < 2; i++) {
                const float low = power_of_two(scores[half * 4 + 2 * i] - base), high = power_of_two(scores[half * 4 + 2 * i + 1] - base);
                sum += low;
                sum += high;
                rounded[i] = pack_bf16(low, high);
                rests[i] = pack_bf16(low - __uint_as_float(rounded[i] << 16), high - __uint_as_float(rounded[i] & 0xFFFF0000));
            }
            const u32 place = query * WEIGHT_ROW + half * 32 + member * 4;
            *reinterpret_cast<uint2*>(memory.weights + place) = {rounded[0], rounded[1]};
            *reinterpret_cast<uint2*>(memory.rests + place) = {rests[0], rests[1]};
        }
#pragma unroll
        for (u32 distance = 1; distance < GROUP; distance *= 2) sum += __shfl_xor_sync(0xFFFFFFFF, sum, distance);
        if (member == 0 && query < num_queries) {
            Softmax total = memory.softmax[query];
            memory.factors[query] = merge(total, {max, sum});
            memory.softmax[query] = total;
        }
    }
}
