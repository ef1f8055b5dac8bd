// The part of gdn_wy that value heads share: k and q of the nodes, and their products with the keys of all entries.
#pragma once

#include "gdn_block.cuh"
#include "split_product.cuh"

constexpr float KEY_NORM_EPS = 1e-6f;

// Convolves and normalises k and q of a node, by a warp: lane l has columns 4l .. 4l + 3 of both.
struct Keys {
    const Block& block;
    const float* taps;  // of k's first column
    u32 taps_row, column, channel, keys_len;
    float q_scale;
    bool is_inside;

    __device__ Keys(const Block& b, const float* own_taps, u32 row_len) : block(b), taps(own_taps + b.lane * 4), taps_row(row_len) {
        column = b.lane * 4, keys_len = b.p.num_key_heads * b.p.key_dim;
        channel = b.key_head * b.p.key_dim + column;  // of q; k's lies `keys_len` behind
        q_scale = rsqrtf(static_cast<float>(b.p.key_dim));
        is_inside = column < b.p.key_dim;
    }

    __device__ static float4 normalised(float4 x, float scale) {
        float squares = x.x * x.x;
        squares = __fmaf_rn(x.y, x.y, squares);
        squares = __fmaf_rn(x.z, x.z, squares);
        squares = __fmaf_rn(x.w, x.w, squares);
        const float factor = rsqrtf(warp_sum(squares) + KEY_NORM_EPS) * scale;
        return {x.x * factor, x.y * factor, x.z * factor, x.w * factor};
    }

    __device__ void make(u32 node, bool keeps_k) const {
        float4 k = {0.0f, 0.0f, 0.0f, 0.0f}, q = k;
        if (is_inside) {
            const Block::Inputs of_k = block.load_inputs(node, keys_len + channel), of_q = block.load_inputs(node, channel);
            k = block.convolve(of_k, taps, taps_row), q = block.convolve(of_q, taps + block.p.key_dim, taps_row);
        }
        __syncwarp();
        k = normalised(k, 1.0f), q = normalised(q, q_scale);
        if (column < block.key_steps * KEY_STEP) {
            float* to = block.memory + block.p.shared.keys + block.key_place(block.nodes.slot_of[node], block.lane / 4, block.lane % 4);
            *reinterpret_cast<float4*>(to) = k;
            *reinterpret_cast<float4*>(to + FRAGMENT_LEN / 2) = q;
        }
        if (keeps_k && is_inside) *reinterpret_cast<float4*>(block.p.tail_k + static_cast<u64>(block.row_of(node)) * keys_len + channel) = k;
    }
};

// Products of the chunk's k and q with the keys of entries, eight keys at a time: first the logged ones, then the rows of
// the segment, of which a node takes its ancestors and itself. A block makes every `num_sharing`th of these tiles and
// hands them to all that share.
struct KeyProducts {
    const Block& block;
    float* own;  // q.k of the nodes
    u32 rank, num_sharing;
    u32 first_entry, log_tiles, num_units;

    __device__ KeyProducts(const Block& b, float* own_products, u32 own_rank, u32 sharing)
        : block(b), own(own_products), rank(own_rank), num_sharing(sharing) {
        first_entry = b.nodes.min_anchor * FOLD_INTERVAL;
        log_tiles = b.log_len > first_entry ? (b.log_len - first_entry + 7) / 8 : 0;
        const u32 num_tiles = log_tiles + (b.first + b.count + 7) / 8;
        num_units = num_tiles > rank ? (num_tiles - rank + num_sharing - 1) / num_sharing * b.tiles : 0;
    }

    __device__ u32 tile_of(u32 unit) const { return rank + unit / block.tiles * num_sharing; }

    // Columns 4c .. 4c + 3 of every step of the key that `lane` / 4 stands for.
    __device__ void load_key(u32 tile, float4 (&key)[MAX_KEY_STEPS]) const {
        const GdnWyParams& p = block.p;
        const u32 c = block.lane % 4, keys_len = p.num_key_heads * p.key_dim, column = block.key_head * p.key_dim + 4 * c;
        const float* from = nullptr;
        u32 step_len = KEY_STEP;  // from one step to the next
        if (tile < log_tiles) {
            const u32 entry = first_entry + tile * 8 + block.lane / 4;
            if (entry < block.log_len) from = p.log_k + static_cast<u64>(block.log_row(entry)) * keys_len + column;
        } else {
            const u32 row = (tile - log_tiles) * 8 + block.lane / 4;
            if (row < block.first) {
                from = p.tail_k + static_cast<u64>(block.segment.first_row + row) * keys_len + column;
            } else if (row < block.first + block.count) {
                from = block.memory + p.shared.keys + block.key_place(block.nodes.slot_of[row - block.first], 0, c);
                step_len = FRAGMENT_LEN;
            }
        }
#pragma unroll
        for (u32 step = 0; step < MAX_KEY_STEPS; step++) {
            key[step] = {0.0f, 0.0f, 0.0f, 0.0f};
            if (from != nullptr && step * KEY_STEP + 4 * c < p.key_dim) key[step] = *reinterpret_cast<const float4*>(from + step * step_len);
        }
    }

    // The entry of `node` that row `row` of the segment is, or none.
    __device__ u32 entry_of(u32 node, u32 row) const {
        if (row >= block.first + node) return ~0u;
        const u32 depth = row < block.first ? block.p.paths.positions[block.segment.first_row + row] - block.segment.committed_len
                                            : block.nodes.depth[row - block.first];
        const bool is_ancestor = depth < block.nodes.depth[node] && block.nodes.ancestors[depth][node] == row;
        return is_ancestor ? block.log_len + depth : ~0u;
    }

    // Stores a value in all blocks that share, at the place of `to` in this one.
    template <typename T>
    __device__ void hand_out(T* to, T value) const {
        if (num_sharing == 1) {
            *to = value;
            return;
        }
        const u32 address = shared_address(to);
#pragma unroll
        for (u32 to_rank = 0; to_rank < MAX_SLICES; to_rank++) {
            if (to_rank < num_sharing) store_remote(address_in_block(address, to_rank), value);
        }
    }

    __device__ void multiply(u32 unit, const float4 (&key)[MAX_KEY_STEPS]) const {
        const u32 rows = unit % block.tiles, tile = tile_of(unit);
        const float* at = block.memory + block.p.shared.keys + rows * block.key_steps * FRAGMENT_LEN + block.lane * 4;
        float sums[NUM_QUARTERS][4] = {};
#pragma unroll
        for (u32 step = 0; step < MAX_KEY_STEPS; step++) {
            if (step >= block.key_steps) continue;
            const float4 k = *reinterpret_cast<const float4*>(at + step * FRAGMENT_LEN);
            const float4 q = *reinterpret_cast<const float4*>(at + step * FRAGMENT_LEN + FRAGMENT_LEN / 2);
            multiply_split(sums[step % NUM_QUARTERS], split_pair(k, q), split_quad(key[step]));
        }
        const u32 slot = rows * TILE_NODES + block.lane / 4;
        if (slot >= block.count) return;
        const u32 node = block.nodes.node_in[slot], column = block.lane % 4 * 2, row_len = block.p.chunk_rows;
        float2* products = reinterpret_cast<float2*>(block.memory + block.p.shared.products) + node;
        float2 values[2];
#pragma unroll
        for (u32 i = 0; i < 2; i++) {
            values[i] = {(sums[0][i] + sums[1][i]) + (sums[2][i] + sums[3][i]), (sums[0][i + 2] + sums[1][i + 2]) + (sums[2][i + 2] + sums[3][i + 2])};
        }
        if (tile < log_tiles) {
            // Behind the last entry, the place of the first on the path is written by another tile: keep out.
            const u32 entry = first_entry + tile * 8 + column;
            if (entry < block.log_len) hand_out(products + entry * row_len, values[0]);
            if (entry + 1 < block.log_len) hand_out(products + (entry + 1) * row_len, values[1]);
            return;
        }
        const u32 row = (tile - log_tiles) * 8 + column;
#pragma unroll
        for (u32 i = 0; i < 2; i++) {
            const u32 entry = entry_of(node, row + i);
            if (entry != ~0u) hand_out(products + entry * row_len, values[i]);
            if (row + i == block.first + node) hand_out(own + node, values[i].y);
        }
    }
};
