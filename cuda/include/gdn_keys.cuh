// The part of gdn_wy that value heads share: k and q of the nodes, and their products with the keys of all entries.
#pragma once

#include "gdn_block.cuh"
#include "split_product.cuh"

constexpr float KEY_NORM_EPS = 1e-6f;
// Nodes up to which every block makes all keys itself, instead of waiting for the others.
constexpr u32 ALONE_NODES = 4;

// Convolves and normalises one vector, k (0) or q (1) of a node, by a warp: lane l has columns 4l .. 4l + 3.
__device__ __forceinline__ void make_key(const Block& block, u32 node, u32 which, float* keys, bool keeps_k) {
    const GdnWyParams& p = block.p;
    const u32 column = block.lane * 4;
    const bool is_inside = column < p.key_dim;
    const u32 keys_len = p.num_key_heads * p.key_dim;
    float4 x = {0.0f, 0.0f, 0.0f, 0.0f};
    if (is_inside) x = block.convolve(node, (which == 0 ? keys_len : 0) + block.key_head * p.key_dim + column);
    float squares = x.x * x.x;
    squares = __fmaf_rn(x.y, x.y, squares);
    squares = __fmaf_rn(x.z, x.z, squares);
    squares = __fmaf_rn(x.w, x.w, squares);
    const float norm = sqrtf(warp_sum(squares) + KEY_NORM_EPS);
    const float factor = (which == 0 ? 1.0f : 1.0f / sqrtf(static_cast<float>(p.key_dim))) / norm;
    x.x *= factor, x.y *= factor, x.z *= factor, x.w *= factor;
    if (column < block.key_steps() * KEY_STEP) {
        const u32 place = block.key_place(block.nodes.slot_of[node], column / KEY_STEP, which, block.lane % 4);
        *reinterpret_cast<float4*>(keys + place) = x;
    }
    if (which == 0 && keeps_k && is_inside) {
        *reinterpret_cast<float4*>(p.tail_k + static_cast<u64>(block.row_of(node)) * keys_len + block.key_head * p.key_dim + column) = x;
    }
}

// All vectors of the chunk, into this block's own memory.
__device__ __forceinline__ void make_all_keys(const Block& block) {
    for (u32 vector = block.warp; vector < 2 * block.count; vector += BLOCK_WARPS) {
        make_key(block, vector / 2, vector % 2, block.memory + block.p.shared.keys, block.slice == 0);
    }
}

// This block's share of the chunk's vectors, into scratch.
__device__ __forceinline__ void make_shared_keys(const Block& block) {
    const u32 num_slices = block.p.num_slices;
    for (u32 vector = block.slice + block.warp * num_slices; vector < 2 * block.count; vector += BLOCK_WARPS * num_slices) {
        make_key(block, vector / 2, vector % 2, block.scratch_keys(), true);
    }
}

// All vectors of the chunk from scratch.
__device__ __forceinline__ void fetch_keys(const Block& block) {
    const u32 len = block.tiles * block.key_steps() * 2 * WARP_LANES;
    const float4* from = reinterpret_cast<const float4*>(block.scratch_keys());
    float4* to = reinterpret_cast<float4*>(block.memory + block.p.shared.keys);
    for (u32 i = threadIdx.x; i < len; i += BLOCK_THREADS) to[i] = __ldcg(from + i);
}

// The product of all chains.
__device__ __forceinline__ float sum_quarters(const float (&sums)[NUM_QUARTERS][4], u32 i) {
    return (sums[0][i] + sums[1][i]) + (sums[2][i] + sums[3][i]);
}

// Products of the chunk's k and q with the keys of entries, this block's share, into scratch. Eight keys at a time:
// first the logged ones, then the rows of the segment, of which a node takes its ancestors and itself.
struct KeyProducts {
    const Block& block;
    u32 first_entry, log_tiles;

    __device__ explicit KeyProducts(const Block& b) : block(b) {
        first_entry = b.nodes.min_anchor * FOLD_INTERVAL;
        log_tiles = b.log_len > first_entry ? (b.log_len - first_entry + 7) / 8 : 0;
    }

    // Columns 4c .. 4c + 3 of every step of the key that `lane` / 4 stands for.
    __device__ void load_key(u32 tile, float4 (&key)[MAX_KEY_STEPS]) const {
        const GdnWyParams& p = block.p;
        const u32 c = block.lane % 4, keys_len = p.num_key_heads * p.key_dim;
        const float* from = nullptr;
        u32 step_len = KEY_STEP;  // from one step to the next
        if (tile < log_tiles) {
            const u32 entry = first_entry + tile * 8 + block.lane / 4;
            if (entry < block.log_len) from = p.log_k + block.log_row(entry) * keys_len + block.key_head * p.key_dim + 4 * c;
        } else {
            const u32 row = (tile - log_tiles) * 8 + block.lane / 4;
            if (row < block.first) {
                from = p.tail_k + static_cast<u64>(block.segment.first_row + row) * keys_len + block.key_head * p.key_dim + 4 * c;
            } else if (row < block.first + block.count) {
                from = block.memory + p.shared.keys + block.key_place(block.nodes.slot_of[row - block.first], 0, 0, c);
                step_len = 2 * WARP_LANES * 4;
            }
        }
#pragma unroll
        for (u32 step = 0; step < MAX_KEY_STEPS; step++) {
            key[step] = {0.0f, 0.0f, 0.0f, 0.0f};
            if (from != nullptr && step * KEY_STEP + 4 * c < p.key_dim) key[step] = *reinterpret_cast<const float4*>(from + step * step_len);
        }
    }

    // Keeps the products of one node and one key, if the node reads it.
    __device__ void keep(u32 slot, u32 tile, u32 column, float k, float q) const {
        if (slot >= block.count) return;
        const u32 node = block.nodes.node_in[slot];
        float2* products = block.scratch_products();
        if (tile < log_tiles) {
            const u32 entry = first_entry + tile * 8 + column;
            if (entry < block.log_len) products[entry * block.stride + node] = {k, q};
            return;
        }
        const u32 row = (tile - log_tiles) * 8 + column;
        if (row == block.first + node) products[block.p.max_entries * block.stride + node] = {k, q};
        if (row >= block.first + node) return;
        const u32 depth = row < block.first ? block.p.paths.positions[block.segment.first_row + row] - block.segment.committed_len
                                            : block.nodes.depth[row - block.first];
        if (depth < block.nodes.depth[node] && block.nodes.ancestors[depth][node] == row) {
            products[(block.log_len + depth) * block.stride + node] = {k, q};
        }
    }

    __device__ void run() const {
        const u32 num_slices = block.p.num_slices;
        const u32 num_tiles = log_tiles + (block.first + block.count + 7) / 8;
        const u32 own_tiles = num_tiles > block.slice ? (num_tiles - block.slice + num_slices - 1) / num_slices : 0;
        const float* keys = block.memory + block.p.shared.keys;
        for (u32 unit = block.warp; unit < own_tiles * block.tiles; unit += BLOCK_WARPS) {
            const u32 tile = block.slice + unit / block.tiles * num_slices, rows = unit % block.tiles;
            float4 key[MAX_KEY_STEPS];
            load_key(tile, key);
            float sums[NUM_QUARTERS][4] = {};
#pragma unroll
            for (u32 step = 0; step < MAX_KEY_STEPS; step++) {
                if (step < block.key_steps()) {
                    const float* at = keys + ((rows * block.key_steps() + step) * 2 * WARP_LANES + block.lane) * 4;
                    const float4 k = *reinterpret_cast<const float4*>(at), q = *reinterpret_cast<const float4*>(at + WARP_LANES * 4);
                    multiply_split(sums[step % NUM_QUARTERS], split_pair(k, q), key[step]);
                }
            }
            const u32 slot = rows * TILE_NODES + block.lane / 4, column = block.lane % 4 * 2;
            keep(slot, tile, column, sum_quarters(sums, 0), sum_quarters(sums, 2));
            keep(slot, tile, column + 1, sum_quarters(sums, 1), sum_quarters(sums, 3));
        }
    }
};
