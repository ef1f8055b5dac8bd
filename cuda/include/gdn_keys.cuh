// The part of gdn_wy that value heads share: k and q of the nodes, and their products with the keys of all entries.
#pragma once

#include "gdn_block.cuh"

constexpr float KEY_NORM_EPS = 1e-6f;

__device__ __forceinline__ float warp_sum(float value) {
#pragma unroll
    for (u32 distance = WARP_LANES / 2; distance > 0; distance /= 2) value += __shfl_xor_sync(0xFFFFFFFF, value, distance);
    return value;
}

// Convolves and normalises k and q of the chunk: lane l has columns 4l .. 4l + 3 of a vector. Of many nodes the blocks of a
// key head make a share each and send them to all, a warp k or q of a node; of few every block makes all, half of the warps k
// and half q.
template <u32 TILES, bool IS_CLUSTER>
struct KeyMaker {
    static constexpr bool IS_SHARED = IS_CLUSTER && TILES > 1;
    static constexpr u32 WARPS = Block<TILES>::WARPS, HALF = WARPS / 2;
    static constexpr u32 BATCH = TILES == 1 ? 2 : 1;    // vectors on their way at a time
    static constexpr bool LOADS_EARLY = TILES == 1;     // weights; other registers hold no more

    const Block<TILES>& block;
    u32 which;              // what the warp makes: k (0) or q (1)
    u32 first_node, apart;  // of the warp's nodes
    u32 column;             // of the lane's first, within the key
    bool is_inside;
    ConvWeights<4> weights;
    ConvInputs<4> inputs[BATCH];

    __device__ __forceinline__ explicit KeyMaker(const Block<TILES>& b) : block(b) {
        const u32 shared_place = b.warp() * b.p.num_slices + b.slice;
        which = IS_SHARED ? shared_place % 2 : b.warp() / HALF;
        // Of few nodes by warps that have no products.
        first_node = IS_SHARED ? shared_place / 2 : (b.warp() + 2) % HALF;
        apart = IS_SHARED ? HALF * b.p.num_slices : HALF;
        is_inside = b.lane() * 4 < b.p.key_dim;
        column = is_inside ? b.lane() * 4 : 0;
        if (LOADS_EARLY) weights.load(b.p, channel());
    }

    __device__ u32 channel() const { return (which == 0 ? block.keys_len() : 0) + block.key_head * block.p.key_dim + column; }
    __device__ bool has_nodes() const { return first_node < block.count; }

    // Starts to load inputs of the batch that begins with node `start`.
    __device__ __forceinline__ void load(u32 start) {
#pragma unroll
        for (u32 i = 0; i < BATCH; i++) {
            const u32 node = start + i * apart;
            if (node < block.count) inputs[i].load(block, block.first + node, channel(), is_inside);
        }
    }

    // Of the first batch.
    __device__ __forceinline__ void begin() {
        // Otherwise what the chunk before has left would keep its registers.
        if (!LOADS_EARLY) weights = {}, inputs[0] = {};
        if (!LOADS_EARLY && has_nodes()) weights.load(block.p, channel());
        load(first_node);
    }

    __device__ __forceinline__ void finish(u32 start) const {
#pragma unroll
        for (u32 i = 0; i < BATCH; i++) {
            const u32 node = start + i * apart;
            if (node >= block.count) return;
            float x[4], squares = 0.0f;
#pragma unroll
            for (u32 j = 0; j < 4; j++) {
                x[j] = inputs[i].result(weights, j);  // zero behind the key's end
                squares = __fmaf_rn(x[j], x[j], squares);
            }
            const float unit = which == 0 ? 1.0f : rsqrtf(static_cast<float>(block.p.key_dim));
            const float factor = unit * rsqrtf(warp_sum(squares) + KEY_NORM_EPS);
            keep(node, {x[0] * factor, x[1] * factor, x[2] * factor, x[3] * factor});
        }
    }

    // Where all who need it find it.
    __device__ __forceinline__ void keep(u32 node, float4 key) const {
        float* place = block.key_place(node, block.lane() / 4, block.lane() % 4);
        if (!IS_SHARED) {
            place += which;
            place[0] = key.x, place[2] = key.y, place[HALF_FRAGMENT] = key.z, place[HALF_FRAGMENT + 2] = key.w;
            return;
        }
        const u32 address = shared_address(place + which * HALF_FRAGMENT), barrier = block.barrier_of(Exchange::KEYS);
        for (u32 rank = 0; rank < block.p.num_slices; rank++) {
            store_in_block(address_in_block(address, rank), key, address_in_block(barrier, rank));
        }
    }

    // Brings k and q of all nodes, which came whole, to the order in which the instruction takes them.
    __device__ __forceinline__ void interleave() const {
#pragma unroll
        for (u32 node = block.warp(); node < Block<TILES>::NODES; node += WARPS) {
            float4* place = reinterpret_cast<float4*>(block.key_place(node, block.lane() / 4, block.lane() % 4));
            const float4 k = place[0], q = place[HALF_FRAGMENT / 4];
            place[0] = {k.x, q.x, k.y, q.y}, place[HALF_FRAGMENT / 4] = {k.z, q.z, k.w, q.w};
        }
    }

    // Writes down k of the chunk, once it is in shared memory: the blocks of a key head in turn. Where other chunks follow
    // every block writes all of it, for there it reads what itself has written. Begins with warps that have no products.
    __device__ __forceinline__ void store_keys() const {
        if (block.lane() * 4 >= block.p.key_dim) return;
        const bool writes_all = !IS_CLUSTER || block.num_rows > block.NODES;
        const u32 turn = (block.warp() + WARPS / 4) % WARPS, shares = writes_all ? 1 : block.p.num_slices;
#pragma unroll 1
        for (u32 node = turn * shares + (writes_all ? 0 : block.slice); node < block.count; node += WARPS * shares) {
            const u32 place = (block.first_row + block.first + node) * block.keys_len() + block.key_head * block.p.key_dim + block.lane() * 4;
            *reinterpret_cast<float4*>(block.p.tail_k + place) = block.key_of(node, block.lane() / 4, block.lane() % 4);
        }
    }

    // All vectors; the first batch is on its way.
    __device__ __forceinline__ void run() {
        finish(first_node);
        if (!IS_SHARED && Block<TILES>::NODES <= HALF * BATCH) return;
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
    static constexpr u32 NO_ENTRY = ~0u, WARPS = Block<TILES>::WARPS;
    static_assert(STAGED_KEYS % WARPS == 0, "as many keys for every warp");

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
        const GdnWyParams& p = block.p;
        const u32 column = block.lane() * 4, keys_len = block.keys_len();
        const u32 to = shared_address(block.memory + p.shared.log_k + block.warp() * KEY_ROW + column);
        const float* from = p.log_k + static_cast<u64>(block.slot * LOG_POSITIONS) * keys_len + block.key_head * p.key_dim + min(column, p.key_dim - 4);
#pragma unroll
        for (u32 i = 0; i < STAGED_KEYS / WARPS; i++) {
            const u32 key = i * WARPS + block.warp(), entry = tile_of(key / 8) * 8 + key % 8, position = (block.anchor_base + entry) % LOG_POSITIONS;
            const bool is_there = entry < block.log_len && column < p.key_dim;
            thread_copy_16(to + i * WARPS * KEY_ROW * sizeof(float), from + (is_there ? position * keys_len : 0), is_there);
        }
    }

    // Bytes that the block will be sent for this chunk, and with word of what others have read. Called by a whole warp.
    __device__ __forceinline__ u32 num_bytes() const {
        static_assert(Block<TILES>::NODES <= WARP_LANES, "a lane per node");
        const u32 entries = block.lane() < block.count ? log_tiles * 8 + block.rows.depth[block.row_of(block.lane())] + 1 : 0;
        return __reduce_add_sync(0xFFFFFFFF, entries) * sizeof(float2) + (block.chunk > 0 ? shares * sizeof(float) : 0);
    }

    // The key of an earlier chunk or the log that `lane` / 4 stands for, from column 4c on. Where there is no such key it is
    // any other.
    __device__ __forceinline__ const float* earlier_key(u32 own_tile) const {
        const GdnWyParams& p = block.p;
        const u32 tile = tile_of(own_tile), c = block.lane() % 4, own = own_tile * 8 + block.lane() / 4;
        if (tile < log_tiles) {
            if (own < STAGED_KEYS && block.chunk == 0) return block.memory + p.shared.log_k + own * KEY_ROW + 4 * c;
            return logged_key(min(tile * 8 + block.lane() / 4, block.log_len - 1)) + 4 * c;
        }
        const u32 row = (tile - log_tiles) * 8 + block.lane() / 4;
        return p.tail_k + static_cast<u64>(block.first_row + row) * block.keys_len() + block.key_head * p.key_dim + 4 * c;
    }

    // Products of eight nodes and eight keys, of which `key_of` gives four columns of a step.
    template <typename Key>
    __device__ __forceinline__ SplitSums multiply(u32 nodes, Key key_of) const {
        const float* own = block.key_place(nodes, 0, 0) + block.lane() * 4;
        SplitSums sums = {};
#pragma unroll 4
        for (u32 step = 0; step < KEY_STEPS; step++) multiply_split(sums, split_pair(own + step * FRAGMENT_LEN), split_column(key_of(step)));
        return sums;
    }

    // The entry of a row's key for one node; NO_ENTRY where the node does not read it.
    __device__ __forceinline__ u32 entry_of(u32 tile, u32 column, u32 row) const {
        const u32 key_row = (tile - log_tiles) * 8 + column;
        const u32 depth = block.rows.depth[min(key_row, block.num_rows - 1)];
        const bool reads = key_row < row && depth < block.rows.depth[row] && block.rows.ancestors[depth][row] == key_row;
        return key_row == row ? block.own_entry() : reads ? MAX_LOG_ENTRIES + depth : NO_ENTRY;
    }

    __device__ __forceinline__ void keep(u32 tile, u32 node, u32 column, float2 first, float2 second) const {
        if (node >= block.count) return;
        const u32 row = block.row_of(node);
        const bool is_logged = tile < log_tiles;  // then every node reads it
        u32 entries[2] = {tile * 8 + column, tile * 8 + column + 1};
        if (!is_logged) entries[0] = entry_of(tile, column, row), entries[1] = entry_of(tile, column + 1, row);
        if (!IS_CLUSTER) {
            if (entries[0] != NO_ENTRY) block.products(entries[0])[node] = first;
            if (entries[1] != NO_ENTRY) block.products(entries[1])[node] = second;
            return;
        }
        const u32 base = shared_address(block.products(0) + node), to_barrier = block.barrier_of(Exchange::PRODUCTS) - base;
        constexpr u32 ENTRY_BYTES = Block<TILES>::NODE_STRIDE * sizeof(float2);
#pragma unroll 2
        for (u32 rank = 0; is_logged && rank < shares; rank++) {
            const u32 there = address_in_block(base, rank), place = there + entries[0] * ENTRY_BYTES;
            store_in_block(place, first, there + to_barrier, true);
            store_in_block(place + ENTRY_BYTES, second, there + to_barrier, true);
        }
#pragma unroll 1
        for (u32 rank = 0; !is_logged && rank < shares; rank++) {
            const u32 there = address_in_block(base, rank);
            store_in_block(there + entries[0] * ENTRY_BYTES, first, there + to_barrier, entries[0] != NO_ENTRY);
            store_in_block(there + entries[1] * ENTRY_BYTES, second, there + to_barrier, entries[1] != NO_ENTRY);
        }
    }

    // All products.
    __device__ __forceinline__ void run() const {
        const u32 num_tiles = log_tiles + (block.first + block.count + 7) / 8;
#pragma unroll 1
        for (u32 unit = block.warp(); tile_of(unit / TILES) < num_tiles; unit += WARPS) {
            const u32 nodes = unit % TILES * TILE_NODES;
            if (nodes >= block.count) continue;
            const u32 tile = tile_of(unit / TILES);
            SplitSums sums;
            if (tile < log_tiles + block.first / 8) {
                const float* from = earlier_key(unit / TILES);
                sums = multiply(nodes, [&](u32 step) {
                    const bool is_inside = step * KEY_STEP + block.lane() % 4 * 4 < block.p.key_dim;
                    return *reinterpret_cast<const float4*>(from + (is_inside ? step * KEY_STEP : 0));
                });
            } else {
                const u32 node = min((tile - log_tiles) * 8 + block.lane() / 4 - block.first, block.count - 1);
                sums = multiply(nodes, [&](u32 step) { return block.key_of(node, step, block.lane() % 4); });
            }
            keep(tile, nodes + block.lane() / 4, block.lane() % 4 * 2, {sums.value(0), sums.value(2)}, {sums.value(1), sums.value(3)});
        }
    }
};
