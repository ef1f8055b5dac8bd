// What a block of gdn_wy knows: its arguments, its place, its shared memory, and the rows of one chunk.
//
// A block serves one segment, one key head and `lanes` of the value lanes that read it; `num_slices` blocks serve a key
// head together. Rows are taken in chunks of up to 32, in topological order: in a chunk rows are "nodes", one per lane of
// a warp. A node's "entries" are the tokens between its anchor and itself, counted from the anchor of the segment's first
// position, first the logged ones and then its own path. "Slots" are the nodes ordered by anchor, for the tensor cores.
#pragma once

#include "row_paths.cuh"

constexpr u32 BLOCK_WARPS = 8;
constexpr u32 BLOCK_THREADS = BLOCK_WARPS * WARP_LANES;
constexpr u32 CHUNK_NODES = WARP_LANES;
constexpr u32 TILE_NODES = 8;  // of one matrix instruction: a row of k and a row of q each
constexpr u32 MAX_TILES = CHUNK_NODES / TILE_NODES;
constexpr u32 ANCHOR_DELAY = 64;
constexpr u32 FOLD_INTERVAL = 32;
constexpr u32 LOG_POSITIONS = 128;
constexpr u32 STATE_RING = 3;
constexpr u32 MAX_ANCHORS = STATE_RING;
constexpr u32 MAX_PATH_ROWS = 64;
constexpr u32 MAX_TAPS = 4;
constexpr u32 MAX_PLANES = 8;
constexpr u32 KEY_STEP = 16;       // columns of a fragment
constexpr u32 MAX_KEY_STEPS = 8;
constexpr u32 NUM_QUARTERS = 4;    // chains of a product over a key's columns
constexpr u32 STEPS_PER_QUARTER = MAX_KEY_STEPS / NUM_QUARTERS;

// Offsets in a block's shared memory, in floats.
struct SharedLayout {
    u32 keys;       // k and q of the nodes as operand A: [tiles][key steps][2][32][4]
    u32 exponents;  // log decays from each entry to each node: [planes][entries][nodes]
    u32 factors;    // of d in d and in o: [planes][entries][nodes][2]; before, partial sums [4][nodes][2 lanes + 4]
    u32 log_d;      // logged d of this block's lanes: [MAX_LOG_ENTRIES][lanes]
    u32 values;     // v, then d: [nodes][lanes + 4]
    u32 outputs;    // o: [nodes][lanes + 4]
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
    float* keys;                // scratch: per segment and key head as SharedLayout::keys, of 32 nodes
    float2* products;           // scratch: per segment and key head [max_entries + 1][32]; k.k_j, q.k_j; behind them q.k
    float* squares;             // scratch: per segment and key head [num_slices][num_planes][32]
    SharedLayout shared;
    u32 num_key_heads;
    u32 num_value_heads;
    u32 key_dim;
    u32 value_dim;
    u32 num_taps;
    u32 num_slices;
    u32 num_planes;   // most value heads that one block's lanes belong to
    u32 chunk_rows;   // rows of a chunk, a multiple of 8
    u32 max_entries;
    u32 chunk;        // used where stages are launches of their own
    float norm_eps;
};

__device__ __forceinline__ u32 anchor_of(u32 position) {
    return position < ANCHOR_DELAY ? 0 : (position - ANCHOR_DELAY) / FOLD_INTERVAL * FOLD_INTERVAL;
}

__device__ __forceinline__ float silu(float x) { return x / (1.0f + expf(-x)); }

__device__ __forceinline__ float4 silu(float4 x) { return {silu(x.x), silu(x.y), silu(x.z), silu(x.w)}; }

__device__ __forceinline__ float warp_sum(float value) {
#pragma unroll
    for (u32 distance = WARP_LANES / 2; distance > 0; distance /= 2) value += __shfl_xor_sync(0xFFFFFFFF, value, distance);
    return value;
}

// The nodes of a chunk, in shared memory.
struct Nodes {
    u32 depth[CHUNK_NODES];       // path length before the node
    u32 path_start[CHUNK_NODES];  // in `paths.path_rows`
    u32 slot_of[CHUNK_NODES];
    u32 node_in[CHUNK_NODES];     // of a slot
    u32 anchor[CHUNK_NODES];      // of a node, in intervals from the segment's first
    u32 max_depth;
    u32 min_anchor;
    u32 max_anchor;
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
    u32 first, count, tiles;    // of the chunk: its first row in the segment, its nodes, and tiles of them
    u32 stride;                 // nodes of a row of products, exponents and factors

    __device__ Block(const GdnWyParams& params, float* shared, Nodes& shared_nodes)
        : p(params), memory(shared), nodes(shared_nodes), warp(threadIdx.x / WARP_LANES), lane(threadIdx.x % WARP_LANES) {
        slice = blockIdx.x % p.num_slices;
        part = blockIdx.x / p.num_slices;
        key_head = part % p.num_key_heads;
        segment = p.paths.segments[part / p.num_key_heads];
        anchor_base = anchor_of(segment.committed_len);
        log_len = segment.committed_len - anchor_base;
    }

    __device__ u32 key_steps() const { return (p.key_dim + KEY_STEP - 1) / KEY_STEP; }
    __device__ u32 num_channels() const { return 2 * p.num_key_heads * p.key_dim + p.num_value_heads * p.value_dim; }
    __device__ u32 heads_per_key() const { return p.num_value_heads / p.num_key_heads; }
    __device__ u32 position_of(u32 node) const { return segment.committed_len + nodes.depth[node]; }
    __device__ u32 row_of(u32 node) const { return segment.first_row + first + node; }
    // Where k (0) or q (1) of a slot lies in `keys`, columns 4c .. 4c + 3 of a step.
    __device__ u32 key_place(u32 slot, u32 step, u32 which, u32 c) const {
        return (((slot / TILE_NODES * key_steps() + step) * 2 + which) * WARP_LANES + slot % TILE_NODES * 4 + c) * 4;
    }
    __device__ float* scratch_keys() const { return p.keys + static_cast<u64>(part) * MAX_TILES * key_steps() * 2 * WARP_LANES * 4; }
    __device__ float2* scratch_products() const {
        return p.products + static_cast<u64>(part) * (p.max_entries + 1) * CHUNK_NODES;
    }
    // A value of logged or tail rows, by entry of a node.
    __device__ u64 log_row(u32 entry) const {
        return static_cast<u64>(segment.slot) * LOG_POSITIONS + (anchor_base + entry) % LOG_POSITIONS;
    }

    // Reads the nodes of a chunk. Returns false when the segment has none there.
    __device__ bool begin(u32 chunk) {
        first = chunk * p.chunk_rows;
        if (first >= segment.num_rows) return false;
        count = min(p.chunk_rows, segment.num_rows - first);
        tiles = (count + TILE_NODES - 1) / TILE_NODES;
        stride = tiles * TILE_NODES;
        __syncthreads();
        if (warp == 0) order_nodes();
        __syncthreads();
        for (u32 depth = warp; depth <= nodes.max_depth; depth += BLOCK_WARPS) {
            if (lane < count && depth <= nodes.depth[lane]) {
                const u32 row = p.paths.path_rows[nodes.path_start[lane] + depth];
                nodes.ancestors[depth][lane] = static_cast<unsigned short>(row - segment.first_row);
            }
        }
        __syncthreads();
        return true;
    }

    __device__ void order_nodes() {
        const bool is_node = lane < count;
        const u32 position = is_node ? p.paths.positions[row_of(lane)] : segment.committed_len;
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
        nodes.path_start[lane] = is_node ? p.paths.rows[row_of(lane)].path_start : 0;
        nodes.slot_of[lane] = slot;
        nodes.node_in[slot] = lane;
        nodes.anchor[lane] = is_node ? anchor : MAX_ANCHORS;
#pragma unroll
        for (u32 distance = WARP_LANES / 2; distance > 0; distance /= 2) depth = max(depth, __shfl_xor_sync(0xFFFFFFFF, depth, distance));
        if (lane == 0) nodes.max_depth = depth, nodes.min_anchor = least, nodes.max_anchor = most;
    }

    // Four channels after the convolution and its activation; taps from the oldest to the current token.
    __device__ float4 convolve(u32 node, u32 channel) const {
        float4 sum = {0.0f, 0.0f, 0.0f, 0.0f};
        const u32 position = position_of(node);
        const float* weights = p.conv_weights + static_cast<u64>(channel) * p.num_taps;
#pragma unroll
        for (u32 tap = 0; tap < MAX_TAPS; tap++) {
            const u32 back = p.num_taps - 1 - tap;
            if (tap >= p.num_taps || back > position) continue;
            const u32 at = position - back;
            const float* inputs;
            if (at < segment.committed_len) {
                inputs = p.conv_inputs + (static_cast<u64>(segment.slot) * p.num_taps + at % p.num_taps) * num_channels();
            } else {
                const u32 row = segment.first_row + nodes.ancestors[at - segment.committed_len][node];
                inputs = p.qkv + static_cast<u64>(row) * num_channels();
            }
            const float4 x = *reinterpret_cast<const float4*>(inputs + channel);
            sum.x = __fmaf_rn(weights[tap], x.x, sum.x);
            sum.y = __fmaf_rn(weights[p.num_taps + tap], x.y, sum.y);
            sum.z = __fmaf_rn(weights[2 * p.num_taps + tap], x.z, sum.z);
            sum.w = __fmaf_rn(weights[3 * p.num_taps + tap], x.w, sum.w);
        }
        return silu(sum);
    }
};
