// The part of gdn_wy that value heads share: k and q of the nodes, and their products with the keys of all entries.
#pragma once

#include "gdn_block.cuh"

constexpr float KEY_NORM_EPS = 1e-6f;

__device__ __forceinline__ float warp_sum(float value) {
#pragma unroll
    for (u32 distance = WARP_LANES / 2; distance > 0; distance /= 2) value += __shfl_xor_sync(0xFFFFFFFF, value, distance);
    return value;
}

// Convolves and normalises k (the first half of the warps) and q (the second) of the chunk, a vector per warp at a time:
// lane l has columns 4l .. 4l + 3. Of many nodes the blocks of a key head make a share each and send them to all; of few
// every block makes all.
template <u32 TILES, bool IS_CLUSTER>
struct KeyMaker {
    static constexpr bool IS_SHARED = IS_CLUSTER && TILES > 1;
    static constexpr u32 HALF = BLOCK_WARPS / 2;
    static constexpr u32 BATCH = 2;  // vectors on their way at a time

    const Block<TILES>& block;
    u32 which, channel;
    u32 first_node, apart;  // of the warp's nodes
    float unit;             // length of the result
    bool is_inside;
    ConvWeights<4> weights;
    ConvInputs<4> inputs[BATCH];

    __device__ __forceinline__ explicit KeyMaker(const Block<TILES>& b) : block(b), which(b.warp() / HALF) {
        const GdnWyParams& p = b.p;
        const u32 shares = IS_SHARED ? p.num_slices : 1;
        first_node = b.warp() % HALF * shares + (IS_SHARED ? b.slice : 0), apart = HALF * shares;
        is_inside = b.lane() * 4 < p.key_dim;
        channel = (which == 0 ? b.keys_len() : 0) + b.key_head * p.key_dim + (is_inside ? b.lane() * 4 : 0);
        unit = which == 0 ? 1.0f : rsqrtf(static_cast<float>(p.key_dim));
        weights.prefetch_from(p, channel);
    }

    // Starts to load the weights and the first batch of inputs.
    __device__ __forceinline__ void begin() {
        weights.load(block.p, channel);
        load(first_node);
    }

    // Starts to load inputs of the batch that begins with node `start`.
    __device__ __forceinline__ void load(u32 start) {
#pragma unroll
        for (u32 i = 0; i < BATCH; i++) inputs[i].load(block, block.row_of(start + i * apart), channel);
    }

    __device__ __forceinline__ void finish(u32 start) const {
        float x[BATCH][4], squares[BATCH];
#pragma unroll
        for (u32 i = 0; i < BATCH; i++) {
            squares[i] = 0.0f;
#pragma unroll
            for (u32 j = 0; j < 4; j++) {
                x[i][j] = is_inside ? inputs[i].result(weights, j) : 0.0f;
                squares[i] = __fmaf_rn(x[i][j], x[i][j], squares[i]);
            }
        }
#pragma unroll
        for (u32 i = 0; i < BATCH; i++) squares[i] = warp_sum(squares[i]);
#pragma unroll
        for (u32 i = 0; i < BATCH; i++) {
            const u32 node = start + i * apart;
            if (node >= block.count) break;
            const float factor = unit * rsqrtf(squares[i] + KEY_NORM_EPS);
            keep(node, {x[i][0] * factor, x[i][1] * factor, x[i][2] * factor, x[i][3] * factor});
        }
    }

    __device__ __forceinline__ void keep(u32 node, float4 key) const {
        const GdnWyParams& p = block.p;
        float* place = block.key_place(node, block.lane() / 4, which, block.lane() % 4);
        if (IS_SHARED) {
            const u32 address = shared_address(place), barrier = block.barrier_of(Exchange::KEYS);
            for (u32 rank = 0; rank < p.num_slices; rank++) store_in_block(address_in_block(address, rank), key, address_in_block(barrier, rank));
        } else {
            *reinterpret_cast<float4*>(place) = key;
        }
    }

    // Writes down k of the chunk, once it is in shared memory. Where other chunks follow every block writes all of it, for
    // there it reads what itself has written.
    __device__ __forceinline__ void store_keys() const {
        const bool writes_all = !IS_CLUSTER || block.num_rows > block.NODES;
        for (u32 node = block.warp(); node < block.count && block.lane() * 4 < block.p.key_dim; node += BLOCK_WARPS) {
            if (!writes_all && node % block.p.num_slices != block.slice) continue;
            const u32 place = (block.first_row + block.first + node) * block.keys_len() + block.key_head * block.p.key_dim + block.lane() * 4;
            *reinterpret_cast<float4*>(block.p.tail_k + place) = *reinterpret_cast<const float4*>(block.key_place(node, block.lane() / 4, 0, block.lane() % 4));
        }
    }

    // All vectors; the first batch is on its way.
    __device__ __forceinline__ void run() {
        finish(first_node);
#pragma unroll 1
        for (u32 start = first_node + BATCH * apart; start < block.count; start += BATCH * apart) {
            load(start);
            finish(start);
        }
    }
};

// Products of the chunk's k and q with the keys of entries, this block's share, sent to all blocks of the key head. Eight
// keys at a time: first the logged ones, then the rows of the segment, of which a node takes its ancestors and itself.
template <u32 TILES, bool IS_CLUSTER>
struct KeyProducts {
    static constexpr u32 NO_ENTRY = ~0u;

    const Block<TILES>& block;
    u32 shares, first_tile, log_tiles;

    __device__ __forceinline__ explicit KeyProducts(const Block<TILES>& b)
        : block(b), shares(IS_CLUSTER ? b.p.num_slices : 1), first_tile(IS_CLUSTER ? b.slice : 0), log_tiles((b.log_len + 7) / 8) {}

    __device__ u32 tile_of(u32 own_tile) const { return first_tile + own_tile * shares; }
    __device__ const float* logged_key(u32 entry) const {
        return block.p.log_k + static_cast<u64>(block.log_row(entry)) * block.keys_len() + block.key_head * block.p.key_dim;
    }

    // Brings the first logged keys of the block's share nearer, 32 columns a thread.
    __device__ __forceinline__ void prefetch_keys() const {
        const u32 key = threadIdx.x / 4, entry = tile_of(key / 8) * 8 + key % 8, column = threadIdx.x % 4 * 32;
        if (key < STAGED_KEYS && entry < block.log_len && column < block.p.key_dim) prefetch(logged_key(entry) + column);
    }

    // Starts to copy them, a warp each.
    __device__ __forceinline__ void fetch_keys() const {
#pragma unroll
        for (u32 i = 0; i < STAGED_KEYS / BLOCK_WARPS; i++) {
            const u32 entry = tile_of(i) * 8 + block.warp(), column = block.lane() * 4;
            const bool is_there = entry < block.log_len && column < block.p.key_dim;
            float* to = block.memory + block.p.shared.log_k + (i * 8 + block.warp()) * KEY_ROW + column;
            thread_copy_16(to, is_there ? logged_key(entry) + column : block.p.log_k, is_there);
        }
    }

    // Bytes that the block will be sent for this chunk, and with word of what others have read. Called by a whole warp.
    __device__ __forceinline__ u32 num_bytes() const {
        u32 entries = 0;
        for (u32 node = block.lane(); node < block.count; node += WARP_LANES) entries += log_tiles * 8 + block.rows.depth[block.first + node] + 1;
        return __reduce_add_sync(0xFFFFFFFF, entries) * sizeof(float2) + (block.chunk > 0 ? shares * sizeof(float) : 0);
    }

    // Where the key that `lane` / 4 stands for lies, from column 4c on, and how far apart its steps are. Where there is no
    // such key it is any other.
    struct KeySource {
        const float* from;
        u32 step_len;
    };

    __device__ __forceinline__ KeySource source_of(u32 own_tile) const {
        const GdnWyParams& p = block.p;
        const u32 tile = tile_of(own_tile), c = block.lane() % 4, own = own_tile * 8 + block.lane() / 4;
        if (tile < log_tiles) {
            if (own < STAGED_KEYS && block.chunk == 0) return {block.memory + p.shared.log_k + own * KEY_ROW + 4 * c, KEY_STEP};
            return {logged_key(min(tile * 8 + block.lane() / 4, block.log_len - 1)) + 4 * c, KEY_STEP};
        }
        const u32 row = min((tile - log_tiles) * 8 + block.lane() / 4, block.first + block.count - 1);
        if (row < block.first) {
            return {p.tail_k + static_cast<u64>(block.first_row + row) * block.keys_len() + block.key_head * p.key_dim + 4 * c, KEY_STEP};
        }
        return {block.key_place(row - block.first, 0, 0, c), FRAGMENT_LEN};
    }

    // The entry of one key for one node; NO_ENTRY where the node does not read it.
    __device__ __forceinline__ u32 entry_of(u32 tile, u32 column, u32 row) const {
        const u32 logged = tile * 8 + column, key_row = (tile - log_tiles) * 8 + column;
        const u32 depth = block.rows.depth[min(key_row, block.num_rows - 1)];
        const bool reads = key_row < row && depth < block.rows.depth[row] && block.rows.ancestors[depth][row] == key_row;
        const u32 of_path = key_row == row ? block.own_entry() : reads ? MAX_LOG_ENTRIES + depth : NO_ENTRY;
        return tile < log_tiles ? logged : of_path;
    }

    __device__ __forceinline__ void keep(u32 tile, u32 node, u32 column, float2 first, float2 second) const {
        const u32 row = block.row_of(node), entries[2] = {entry_of(tile, column, row), entry_of(tile, column + 1, row)};
        const bool keeps[2] = {node < block.count && entries[0] != NO_ENTRY, node < block.count && entries[1] != NO_ENTRY};
        if (!IS_CLUSTER) {
            if (keeps[0]) block.products(entries[0])[node] = first;
            if (keeps[1]) block.products(entries[1])[node] = second;
            return;
        }
        const u32 base = shared_address(block.products(0) + node), barrier = block.barrier_of(Exchange::PRODUCTS);
        constexpr u32 ENTRY_BYTES = Block<TILES>::NODE_STRIDE * sizeof(float2);
#pragma unroll 2
        for (u32 rank = 0; rank < shares; rank++) {
            const u32 there = address_in_block(base, rank), barrier_there = address_in_block(barrier, rank);
            store_in_block(there + entries[0] * ENTRY_BYTES, first, barrier_there, keeps[0]);
            store_in_block(there + entries[1] * ENTRY_BYTES, second, barrier_there, keeps[1]);
        }
    }

    __device__ __forceinline__ void run() const {
        const u32 num_tiles = log_tiles + (block.first + block.count + 7) / 8;
#pragma unroll 1
        for (u32 unit = block.warp(); tile_of(unit / TILES) < num_tiles; unit += BLOCK_WARPS) {
            const u32 nodes = unit % TILES * TILE_NODES;
            if (nodes >= block.count) continue;
            const KeySource source = source_of(unit / TILES);
            const float* own = block.key_place(nodes, 0, 0, 0) + block.lane() * 4;
            SplitSums sums = {};
#pragma unroll 4
            for (u32 step = 0; step < KEY_STEPS; step++) {
                const bool is_inside = step * KEY_STEP + block.lane() % 4 * 4 < block.p.key_dim;
                const float4 key = *reinterpret_cast<const float4*>(source.from + (is_inside ? step * source.step_len : 0));
                const float4 k = *reinterpret_cast<const float4*>(own + step * FRAGMENT_LEN);
                const float4 q = *reinterpret_cast<const float4*>(own + step * FRAGMENT_LEN + WARP_LANES * 4);
                multiply_split(sums, split_pair(k, q), split_column(key));
            }
            keep(tile_of(unit / TILES), nodes + block.lane() / 4, block.lane() % 4 * 2, {sums.value(0), sums.value(2)}, {sums.value(1), sums.value(3)});
        }
    }
};
