// The part of gdn_wy that value heads share: k and q of the nodes, and their products with the keys of all entries.
#pragma once

#include "gdn_block.cuh"

constexpr float KEY_NORM_EPS = 1e-6f;
constexpr u32 STAGED_KEYS = 16;  // logged keys that a block copies ahead

__device__ __forceinline__ float warp_sum(float value) {
#pragma unroll
    for (u32 distance = WARP_LANES / 2; distance > 0; distance /= 2) value += __shfl_xor_sync(0xFFFFFFFF, value, distance);
    return value;
}

// Convolves and normalises k (the first half of the warps) and q (the second) of the chunk, a vector per warp: lane l has
// columns 4l .. 4l + 3. Every block makes all vectors; where blocks are `shares` to a key head each writes down some k.
template <u32 TILES>
struct KeyMaker {
    static constexpr u32 HALF = BLOCK_WARPS / 2;
    static constexpr u32 BATCH = TILES == 1 ? 1 : 4;  // vectors on their way at a time

    const Block& block;
    u32 which, column, channel;
    bool is_inside;
    ConvWeights<4> weights;

    __device__ explicit KeyMaker(const Block& b) : block(b), which(b.warp / HALF), column(b.lane * 4) {
        is_inside = column < block.p.key_dim;
        channel = (which == 0 ? block.keys_len() : 0) + block.key_head * block.p.key_dim + column;
        if (is_inside) weights.load(block.p, channel);
    }

    __device__ __forceinline__ void run(u32 shares) const {
        const u32 own = block.warp % HALF;
#pragma unroll 1
        for (u32 start = own; start < block.count; start += HALF * BATCH) {
            ConvInputs<4> inputs[BATCH];
#pragma unroll
            for (u32 i = 0; i < BATCH; i++) {
                const u32 node = start + i * HALF;
                if (node < block.count && is_inside) inputs[i].load(block, block.first + node, channel);
            }
#pragma unroll
            for (u32 i = 0; i < BATCH; i++) {
                const u32 node = start + i * HALF;
                if (node < block.count) finish(node, inputs[i], shares);
            }
        }
    }

    __device__ __forceinline__ void finish(u32 node, const ConvInputs<4>& inputs, u32 shares) const {
        const GdnWyParams& p = block.p;
        float x[4] = {};
        float squares = 0.0f;
        if (is_inside) {
#pragma unroll
            for (u32 i = 0; i < 4; i++) {
                x[i] = inputs.result(weights, p.num_taps, i);
                squares = __fmaf_rn(x[i], x[i], squares);
            }
        }
        const float norm = sqrtf(warp_sum(squares) + KEY_NORM_EPS);
        const float factor = (which == 0 ? 1.0f : 1.0f / sqrtf(static_cast<float>(p.key_dim))) / norm;
        const float4 key = {x[0] * factor, x[1] * factor, x[2] * factor, x[3] * factor};
        if (column < block.key_steps() * KEY_STEP) {
            *reinterpret_cast<float4*>(block.key_place(node, column / KEY_STEP, which, block.lane % 4)) = key;
        }
        if (which == 0 && is_inside && (shares == 1 || node % shares == block.slice)) {
            const u64 row = block.segment.first_row + block.first + node;
            *reinterpret_cast<float4*>(p.tail_k + row * block.keys_len() + block.key_head * p.key_dim + column) = key;
        }
    }
};

// Products of the chunk's k and q with the keys of entries, this block's share, into the factors of all blocks that share.
// Eight keys at a time: first the logged ones, then the rows of the segment, of which a node takes its ancestors and
// itself.
template <u32 TILES>
struct KeyProducts {
    const Block& block;
    u32 shares, first_tile, log_tiles;

    __device__ KeyProducts(const Block& b, u32 num_shares)
        : block(b), shares(num_shares), first_tile(num_shares == 1 ? 0 : b.slice), log_tiles((b.log_len + 7) / 8) {}

    __device__ u32 tile_of(u32 unit) const { return first_tile + unit / TILES * shares; }
    __device__ u32 key_row() const { return block.key_steps() * KEY_STEP + KEY_PAD; }
    __device__ const float* logged_key(u32 entry) const {
        return block.p.log_k + block.log_row(entry) * block.keys_len() + block.key_head * block.p.key_dim;
    }

    // Starts to copy the first logged keys of the block's share.
    __device__ void fetch_keys() const {
        const u32 quads = block.key_steps() * KEY_STEP / 4;
        for (u32 i = threadIdx.x; i < STAGED_KEYS * quads; i += BLOCK_THREADS) {
            const u32 key = i / quads, column = i % quads * 4, entry = tile_of(key / 8 * TILES) * 8 + key % 8;
            const bool is_there = entry < block.log_len && column < block.p.key_dim;
            float* to = block.memory + block.p.shared.log_k + key * key_row() + column;
            thread_copy_16(to, is_there ? logged_key(entry) + column : block.p.log_k, is_there);
        }
        thread_copy_commit();
    }

    // Where the key that `lane` / 4 stands for lies, from column 4c on, and how far apart its steps are.
    struct KeySource {
        const float* from;
        u32 step_len;
    };

    __device__ __forceinline__ KeySource source_of(u32 tile) const {
        const GdnWyParams& p = block.p;
        const u32 c = block.lane % 4;
        if (tile < log_tiles) {
            const u32 own = (tile - first_tile) / shares * 8 + block.lane / 4, entry = tile * 8 + block.lane / 4;
            if (own < STAGED_KEYS) return {block.memory + p.shared.log_k + own * key_row() + 4 * c, KEY_STEP};
            return {entry < block.log_len ? logged_key(entry) + 4 * c : nullptr, KEY_STEP};
        }
        const u32 row = (tile - log_tiles) * 8 + block.lane / 4;
        if (row < block.first) {
            return {p.tail_k + static_cast<u64>(block.segment.first_row + row) * block.keys_len() + block.key_head * p.key_dim + 4 * c, KEY_STEP};
        }
        return {row < block.first + block.count ? block.key_place(row - block.first, 0, 0, c) : nullptr, FRAGMENT_LEN};
    }

    // Where the products of one node and one key go, if the node reads it; else nowhere.
    __device__ float2* place_of(u32 node, u32 tile, u32 column) const {
        if (node >= block.count) return nullptr;
        if (tile < log_tiles) {
            const u32 entry = tile * 8 + column;
            return entry < block.log_len ? block.factors(0, entry) + node : nullptr;
        }
        const u32 row = (tile - log_tiles) * 8 + column, own = block.first + node;
        if (row == own) return block.factors(0, block.p.max_entries) + node;
        if (row > own) return nullptr;
        const u32 depth = block.rows.depth[row];
        const bool reads = depth < block.rows.depth[own] && block.rows.ancestors[depth][own] == row;
        return reads ? block.factors(0, block.log_len + depth) + node : nullptr;
    }

    __device__ void keep(float2* place, float2 products) const {
        if (place == nullptr) return;
        if (shares == 1) {
            *place = products;
            return;
        }
        const u32 address = shared_address(place);
        for (u32 rank = 0; rank < shares; rank++) store_pair_in_block(address_in_block(address, rank), products);
    }

    __device__ __forceinline__ void run() const {
        const u32 num_tiles = log_tiles + (block.first + block.count + 7) / 8;
#pragma unroll 1
        for (u32 unit = block.warp; tile_of(unit) < num_tiles; unit += BLOCK_WARPS) {
            const u32 tile = tile_of(unit), nodes = unit % TILES;
            if (nodes >= block.tiles) continue;
            const KeySource source = source_of(tile);
            SplitSums sums = {};
#pragma unroll
            for (u32 step = 0; step < MAX_KEY_STEPS; step++) {
                if (step < block.key_steps()) {
                    float4 key = {0.0f, 0.0f, 0.0f, 0.0f};
                    if (source.from != nullptr && step * KEY_STEP + block.lane % 4 * 4 < block.p.key_dim) {
                        key = *reinterpret_cast<const float4*>(source.from + step * source.step_len);
                    }
                    const float* at = block.key_place(nodes * TILE_NODES, step, 0, 0) + block.lane * 4;
                    const float4 k = *reinterpret_cast<const float4*>(at), q = *reinterpret_cast<const float4*>(at + WARP_LANES * 4);
                    multiply_split(sums, split_pair(k, q), split_column(key));
                }
            }
            const u32 node = nodes * TILE_NODES + block.lane / 4, column = block.lane % 4 * 2;
            keep(place_of(node, tile, column), {sums.value(0), sums.value(2)});
            keep(place_of(node, tile, column + 1), {sums.value(1), sums.value(3)});
        }
    }
};
