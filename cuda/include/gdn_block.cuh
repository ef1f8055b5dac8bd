// What a block of gdn_wy knows: its arguments, its place, its shared memory, and the rows of one chunk.
//
// A block serves one segment, one key head and some of the value lanes that read it, a "slice"; the slices of a key head
// share its products of keys. Rows are taken in chunks of up to 32, in topological order: in a chunk rows are "nodes", one
// per lane of a warp. A node's "entries" are the tokens between its anchor and itself, counted from the anchor of the
// segment's first position: first the logged ones, then its own path. "Slots" are the nodes ordered by anchor, for the
// tensor cores. "Planes" are the value heads that the slice's lanes belong to.
#pragma once

#include "cluster_stores.cuh"
#include "row_paths.cuh"

constexpr u32 BLOCK_WARPS = 16;
constexpr u32 BLOCK_THREADS = BLOCK_WARPS * WARP_LANES;
constexpr u32 CHUNK_NODES = WARP_LANES;
constexpr u32 TILE_NODES = 8;  // of one matrix instruction: a row of k and a row of q each
constexpr u32 ANCHOR_DELAY = 64;
constexpr u32 FOLD_INTERVAL = 32;
constexpr u32 LOG_POSITIONS = 128;
constexpr u32 MAX_LOG_ENTRIES = ANCHOR_DELAY + FOLD_INTERVAL;
constexpr u32 STATE_RING = 3;
constexpr u32 MAX_ANCHORS = STATE_RING;
constexpr u32 MAX_PATH_ROWS = 64;
constexpr u32 MAX_TAPS = 4;
constexpr u32 MAX_PLANES = 8;
constexpr u32 MAX_SLICES = 8;
constexpr u32 MAX_QUADS = 16;  // of a slice's lanes
constexpr u32 KEY_STEP = 16;   // columns of a fragment
constexpr u32 MAX_KEY_STEPS = 8;
constexpr u32 FRAGMENT_LEN = 2 * WARP_LANES * 4;
constexpr u32 NUM_QUARTERS = 4;  // chains of a product over a key's columns
constexpr u32 STEPS_PER_QUARTER = MAX_KEY_STEPS / NUM_QUARTERS;

// Offsets in a block's shared memory, in floats.
struct SharedLayout {
    u32 keys;      // k and q of the nodes as operand A: [tiles][key steps][2][32][4]
    u32 products;  // k.k_j and q.k_j of each entry: [entries][nodes][2]; later the first plane's factors of d
    u32 weights;   // decay from each entry to each node: [planes][entries][nodes]
    u32 factors;   // of d in d and in o, for the other planes: [planes - 1][entries][nodes][2]; before, products with the
                   // state: [quarters][nodes][2 lanes + 4]
    u32 log_d;     // logged d of this slice's lanes: [MAX_LOG_ENTRIES][lanes]
    u32 values;    // v, then d: [nodes][lanes + 4]
    u32 outputs;   // o: [nodes][lanes + 4]
    u32 gains;     // of o in y, before the norm: [nodes][lanes + 4]
    u32 taps;      // weights of the convolution: [taps][2 key_dim + lanes], for k, q and v
};

struct GdnWyParams {
    RowPaths paths;
    const float* qkv;           // [rows][channels]
    const float* z;             // [rows][value heads][value_dim]
    const float* a;             // [rows][value heads]
    const float* b;
    const float* conv_weights;  // [channels][taps]
    const float* a_log;         // [value heads]
    const float* dt_bias;
    const float* norm_weight;   // [value_dim]
    const float* states;        // [slot][STATE_RING][value heads][key_dim][value_dim]
    const float* log_k;         // [slot][LOG_POSITIONS][key heads][key_dim]
    const float* log_d;         // [slot][LOG_POSITIONS][value heads][value_dim]
    const float* log_g;         // [slot][LOG_POSITIONS][value heads]
    const float* conv_inputs;   // [slot][taps][channels]
    float* tail_k;              // [rows][key heads][key_dim]
    float* tail_d;              // [rows][value heads][value_dim]
    float* tail_g;              // [rows][value heads]
    float* y;                   // [rows][value heads][value_dim]
    float* squares;             // scratch where blocks are alone: [segment and key head][slices][planes][rows of a segment]
    SharedLayout shared;
    u32 num_key_heads;
    u32 num_value_heads;
    u32 key_dim;
    u32 value_dim;
    u32 num_taps;
    u32 num_slices;
    u32 num_planes;   // most value heads that one slice's lanes belong to
    u32 chunk_rows;   // rows of a chunk, a multiple of 8
    u32 max_entries;
    u32 max_rows;     // of a segment
    float norm_eps;
};

__device__ __forceinline__ u32 anchor_of(u32 position) {
    return position < ANCHOR_DELAY ? 0 : (position - ANCHOR_DELAY) / FOLD_INTERVAL * FOLD_INTERVAL;
}

__device__ __forceinline__ float sigmoid(float x) { return __fdividef(1.0f, 1.0f + __expf(-x)); }

__device__ __forceinline__ float silu(float x) { return __fdividef(x, 1.0f + __expf(-x)); }

__device__ __forceinline__ float4 silu(float4 x) { return {silu(x.x), silu(x.y), silu(x.z), silu(x.w)}; }

__device__ __forceinline__ float warp_sum(float value) {
#pragma unroll
    for (u32 distance = WARP_LANES / 2; distance > 0; distance /= 2) value += __shfl_xor_sync(0xFFFFFFFF, value, distance);
    return value;
}

// The nodes of a chunk, in shared memory.
struct Nodes {
    const float* inputs[CHUNK_NODES][MAX_TAPS];  // rows that the convolution reads, from the oldest tap; null before the first token
    u32 depth[CHUNK_NODES];                      // path length before the node
    u32 path_start[CHUNK_NODES];                 // in `paths.path_rows`
    u32 slot_of[CHUNK_NODES];
    u32 node_in[CHUNK_NODES];                    // of a slot
    u32 anchor[CHUNK_NODES];                     // of a node, in intervals from the segment's first
    u32 max_depth;
    u32 min_anchor;
    u32 max_anchor;
    u32 next_item;                               // of work that warps take in turn
    unsigned short ancestors[MAX_PATH_ROWS][CHUNK_NODES];  // rows of the segment, by depth
};

struct Block {
    const GdnWyParams& p;
    float* memory;
    Nodes& nodes;
    SegmentFacts segment;
    u32 key_head, slice, part;  // `part` numbers pairs of segment and key head
    u32 anchor_base;            // anchor of the segment's first position
    u32 log_len;                // logged entries from there on
    u32 warp, lane;
    u32 num_channels, heads_per_key, key_steps;
    u32 first, count, tiles;    // of the chunk: its first row in the segment, its nodes, and tiles of them

    __device__ Block(const GdnWyParams& params, float* shared, Nodes& shared_nodes)
        : p(params), memory(shared), nodes(shared_nodes), warp(threadIdx.x / WARP_LANES), lane(threadIdx.x % WARP_LANES) {
        slice = blockIdx.x % p.num_slices;
        part = blockIdx.x / p.num_slices;
        key_head = part % p.num_key_heads;
        segment = p.paths.segments[part / p.num_key_heads];
        anchor_base = anchor_of(segment.committed_len);
        log_len = segment.committed_len - anchor_base;
        num_channels = 2 * p.num_key_heads * p.key_dim + p.num_value_heads * p.value_dim;
        heads_per_key = p.num_value_heads / p.num_key_heads;
        key_steps = (p.key_dim + KEY_STEP - 1) / KEY_STEP;
    }

    __device__ u32 row_of(u32 node) const { return segment.first_row + first + node; }
    // Where k of a slot lies in `keys`, columns 4c .. 4c + 3 of a step; q lies half a fragment behind.
    __device__ u32 key_place(u32 slot, u32 step, u32 c) const {
        return (slot / TILE_NODES * key_steps + step) * FRAGMENT_LEN + (slot % TILE_NODES * 4 + c) * 4;
    }
    // A logged row, by entry.
    __device__ u32 log_row(u32 entry) const { return segment.slot * LOG_POSITIONS + (anchor_base + entry) % LOG_POSITIONS; }

    // Reads the nodes of a chunk. Returns false when the segment has none there.
    __device__ bool begin(u32 chunk) {
        first = chunk * p.chunk_rows;
        if (first >= segment.num_rows) return false;
        count = min(p.chunk_rows, segment.num_rows - first);
        tiles = (count + TILE_NODES - 1) / TILE_NODES;
        __syncthreads();
        if (warp == 0) order_nodes();
        __syncthreads();
        if (warp < p.num_taps) {
            if (lane < count) find_input(warp);
        } else {
            for (u32 depth = warp - p.num_taps; depth <= nodes.max_depth; depth += BLOCK_WARPS - p.num_taps) {
                if (lane < count && depth <= nodes.depth[lane]) nodes.ancestors[depth][lane] = static_cast<unsigned short>(path_row(depth) - segment.first_row);
            }
        }
        __syncthreads();
        return true;
    }

    // The row at `depth` of the path of the lane's node.
    __device__ u32 path_row(u32 depth) const { return p.paths.path_rows[nodes.path_start[lane] + depth]; }

    __device__ void order_nodes() {
        const bool is_node = lane < count;
        const u32 position = is_node ? p.paths.positions[row_of(lane)] : segment.committed_len;
        const u32 path_start = is_node ? p.paths.rows[row_of(lane)].path_start : 0;
        const u32 anchor = (anchor_of(position) - anchor_base) / FOLD_INTERVAL;
        u32 slot = lane, before = 0, least = MAX_ANCHORS, most = 0;
#pragma unroll
        for (u32 i = 0; i < MAX_ANCHORS; i++) {
            const u32 same = __ballot_sync(0xFFFFFFFF, is_node && anchor == i);
            if (is_node && anchor == i) slot = before + __popc(same & ((1u << lane) - 1));
            before += __popc(same);
            if (same != 0) least = min(least, i), most = i;
        }
        u32 depth = position - segment.committed_len;
        nodes.depth[lane] = depth;
        nodes.path_start[lane] = path_start;
        nodes.slot_of[lane] = slot;
        nodes.node_in[slot] = lane;
        nodes.anchor[lane] = is_node ? anchor : MAX_ANCHORS;
#pragma unroll
        for (u32 distance = WARP_LANES / 2; distance > 0; distance /= 2) depth = max(depth, __shfl_xor_sync(0xFFFFFFFF, depth, distance));
        if (lane == 0) nodes.max_depth = depth, nodes.min_anchor = least, nodes.max_anchor = most, nodes.next_item = 0;
    }

    __device__ void find_input(u32 tap) {
        const u32 position = segment.committed_len + nodes.depth[lane], back = p.num_taps - 1 - tap;
        const float* row = nullptr;
        if (position >= back && position - back < segment.committed_len) {
            row = p.conv_inputs + static_cast<u64>(segment.slot * p.num_taps + (position - back) % p.num_taps) * num_channels;
        } else if (position >= back) {
            row = p.qkv + static_cast<u64>(path_row(position - back - segment.committed_len)) * num_channels;
        }
        nodes.inputs[lane][tap] = row;
    }

    // Copies the convolution's weights of `count` channels from `channel` on, tap by tap, to `to`, whose rows are `row_len`
    // long.
    __device__ void fetch_taps(u32 channel, u32 num, float* to, u32 row_len, u32 thread) const {
        if (thread >= num) return;
        const float* from = p.conv_weights + static_cast<u64>(channel + thread) * p.num_taps;
        if (p.num_taps == 4) {
            const float4 w = *reinterpret_cast<const float4*>(from);
            to[thread] = w.x, to[row_len + thread] = w.y, to[2 * row_len + thread] = w.z, to[3 * row_len + thread] = w.w;
        } else {
            for (u32 tap = 0; tap < p.num_taps; tap++) to[tap * row_len + thread] = from[tap];
        }
    }

    // The inputs of four channels of a node.
    struct Inputs {
        float4 x[MAX_TAPS];
    };

    __device__ Inputs load_inputs(u32 node, u32 channel) const {
        Inputs inputs;
#pragma unroll
        for (u32 tap = 0; tap < MAX_TAPS; tap++) {
            inputs.x[tap] = {0.0f, 0.0f, 0.0f, 0.0f};
            const float* row = tap < p.num_taps ? nodes.inputs[node][tap] : nullptr;
            if (row != nullptr) inputs.x[tap] = __ldcg(reinterpret_cast<const float4*>(row + channel));
        }
        return inputs;
    }

    // The four channels after the convolution and its activation; taps from the oldest to the current token.
    __device__ float4 convolve(const Inputs& inputs, const float* taps, u32 row_len) const {
        float4 sum = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
        for (u32 tap = 0; tap < MAX_TAPS; tap++) {
            if (tap >= p.num_taps) continue;
            const float4 w = *reinterpret_cast<const float4*>(taps + tap * row_len), x = inputs.x[tap];
            sum.x = __fmaf_rn(w.x, x.x, sum.x), sum.y = __fmaf_rn(w.y, x.y, sum.y);
            sum.z = __fmaf_rn(w.z, x.z, sum.z), sum.w = __fmaf_rn(w.w, x.w, sum.w);
        }
        return silu(sum);
    }
};
