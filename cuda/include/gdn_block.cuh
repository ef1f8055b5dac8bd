// What a block of gdn_wy knows: its arguments, its place, its shared memory, and the rows of its segment.
//
// A block serves one segment, one key head and some of the value lanes that read it, eight lanes a warp; `num_slices`
// blocks serve a key head together. Rows are taken in chunks, in topological order: in a chunk they are "nodes", eight to
// a tile of the tensor cores. A node's "entries" are the tokens between its anchor and itself, counted from the anchor of
// the segment's first position: first the logged ones, then its own path.
#pragma once

#include "row_paths.cuh"
#include "split_product.cuh"
#include "thread_copy.cuh"

constexpr u32 BLOCK_WARPS = 8;
constexpr u32 BLOCK_THREADS = BLOCK_WARPS * WARP_LANES;
constexpr u32 WARP_VALUES = 8;     // value lanes of a warp: columns of a matrix instruction
constexpr u32 TILE_NODES = 8;      // of one matrix instruction: a row of k and a row of q each
constexpr u32 ANCHOR_DELAY = 64;
constexpr u32 FOLD_INTERVAL = 32;
constexpr u32 MAX_LOG_ENTRIES = ANCHOR_DELAY + FOLD_INTERVAL;
constexpr u32 LOG_POSITIONS = 128;
constexpr u32 STATE_RING = 3;
constexpr u32 MAX_SEGMENT_ROWS = 64;
constexpr u32 MAX_TAPS = 4;
constexpr u32 MAX_PLANES = 8;
constexpr u32 KEY_STEP = 16;       // columns of a fragment
constexpr u32 MAX_KEY_STEPS = 8;
constexpr u32 FRAGMENT_LEN = 2 * WARP_LANES * 4;  // k and q of a tile, one step
constexpr u32 STATE_PAD = 2;       // floats behind a row of a state: its fragments meet all banks
constexpr u32 KEY_PAD = 16;
constexpr u32 UPDATE_PAD = 8;

// Offsets in a block's shared memory, in floats.
struct SharedLayout {
    u32 states;   // [num_states][key steps * 16][lanes + STATE_PAD]
    u32 log_d;    // logged d of this block's lanes: [MAX_LOG_ENTRIES][lanes]
    u32 log_k;    // the first logged keys of this block's share: [16][key steps * 16 + KEY_PAD]
    u32 keys;     // k and q of the chunk as operand A: [tiles][key steps][2][32][4]
    u32 factors;  // k.k_j, q.k_j, then times decays: [planes][max_entries + 1][nodes + 1][2]; the last entry is the node
    u32 updates;  // d of the segment's rows: [MAX_SEGMENT_ROWS or fewer][lanes + UPDATE_PAD]
    u32 squares;  // of o, by node and warp of the key head: [nodes][num_slices * lanes / 8]
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
    float* squares;             // scratch where blocks stand alone: [rows][value heads * value_dim / 8]
    SharedLayout shared;
    u32 num_key_heads;
    u32 num_value_heads;
    u32 key_dim;
    u32 value_dim;
    u32 num_taps;
    u32 num_slices;
    u32 lanes;        // value lanes of a block
    u32 num_states;   // states that fit in shared memory
    u32 max_entries;
    float norm_eps;
};

__device__ __forceinline__ u32 anchor_of(u32 position) {
    return position < ANCHOR_DELAY ? 0 : (position - ANCHOR_DELAY) / FOLD_INTERVAL * FOLD_INTERVAL;
}

__device__ __forceinline__ float silu(float x) { return x / (1.0f + expf(-x)); }

// The rows of a segment, in shared memory.
struct Rows {
    u32 depth[MAX_SEGMENT_ROWS];       // path length before the row
    u32 path_start[MAX_SEGMENT_ROWS];  // in `paths.path_rows`
    u8 ancestors[MAX_SEGMENT_ROWS][MAX_SEGMENT_ROWS];  // rows of the segment, by depth; the last is the row itself
    float decay[MAX_PLANES][MAX_SEGMENT_ROWS];         // log decay g
    float beta[MAX_PLANES][MAX_SEGMENT_ROWS];
    float log_decay[MAX_PLANES][MAX_LOG_ENTRIES];
    float from_state[MAX_PLANES][MAX_SEGMENT_ROWS];    // e0
};

struct Block {
    const GdnWyParams& p;
    float* memory;
    Rows& rows;
    SegmentFacts segment;
    u32 key_head, slice;
    u32 anchor_base;          // anchor of the segment's first position
    u32 log_len;              // logged entries from there on
    u32 warp, lane;
    u32 max_depth;            // of the segment
    u32 first = 0, count = 0, tiles = 0;  // of the chunk: its first row in the segment, its nodes, and tiles of them
    u32 node_stride;          // pairs of a row of factors

    __device__ Block(const GdnWyParams& params, float* shared, Rows& shared_rows, u32 chunk_nodes)
        : p(params), memory(shared), rows(shared_rows), warp(threadIdx.x / WARP_LANES), lane(threadIdx.x % WARP_LANES),
          node_stride(chunk_nodes + 1) {
        slice = blockIdx.x % p.num_slices;
        const u32 part = blockIdx.x / p.num_slices;
        key_head = part % p.num_key_heads;
        segment = p.paths.segments[part / p.num_key_heads];
        anchor_base = anchor_of(segment.committed_len);
        log_len = segment.committed_len - anchor_base;
    }

    __device__ u32 key_steps() const { return (p.key_dim + KEY_STEP - 1) / KEY_STEP; }
    __device__ u32 keys_len() const { return p.num_key_heads * p.key_dim; }
    __device__ u32 values_len() const { return p.num_value_heads * p.value_dim; }
    __device__ u32 num_channels() const { return 2 * keys_len() + values_len(); }
    __device__ u32 heads_per_key() const { return p.num_value_heads / p.num_key_heads; }
    __device__ u32 position_of(u32 row) const { return segment.committed_len + rows.depth[row]; }
    // In intervals from the segment's first.
    __device__ u32 anchor_index_at(u32 depth) const { return (anchor_of(segment.committed_len + depth) - anchor_base) / FOLD_INTERVAL; }
    __device__ u32 anchor_index(u32 row) const { return anchor_index_at(rows.depth[row]); }
    // Where a logged value lies, by entry.
    __device__ u64 log_row(u32 entry) const {
        return static_cast<u64>(segment.slot) * LOG_POSITIONS + (anchor_base + entry) % LOG_POSITIONS;
    }
    // Where k (0) or q (1) of a node lies in `keys`, columns 4c .. 4c + 3 of a step.
    __device__ float* key_place(u32 node, u32 step, u32 which, u32 c) const {
        const u32 fragment = (node / TILE_NODES * key_steps() + step) * 2 + which;
        return memory + p.shared.keys + (fragment * WARP_LANES + node % TILE_NODES * 4 + c) * 4;
    }
    __device__ float2* factors(u32 plane, u32 entry) const {
        return reinterpret_cast<float2*>(memory + p.shared.factors) + (plane * (p.max_entries + 1) + entry) * node_stride;
    }

    // Reads positions and paths of all rows.
    __device__ void read_rows() {
        for (u32 row = threadIdx.x; row < segment.num_rows; row += BLOCK_THREADS) {
            rows.depth[row] = p.paths.positions[segment.first_row + row] - segment.committed_len;
            rows.path_start[row] = p.paths.rows[segment.first_row + row].path_start;
        }
        __syncthreads();
        max_depth = 0;
        for (u32 row = lane; row < segment.num_rows; row += WARP_LANES) max_depth = max(max_depth, rows.depth[row]);
        max_depth = __reduce_max_sync(0xFFFFFFFF, max_depth);
        for (u32 row = lane; row < segment.num_rows; row += WARP_LANES) {
#pragma unroll 4
            for (u32 depth = warp; depth <= max_depth; depth += BLOCK_WARPS) {
                if (depth > rows.depth[row]) break;
                rows.ancestors[depth][row] = static_cast<u8>(p.paths.path_rows[rows.path_start[row] + depth] - segment.first_row);
            }
        }
        __syncthreads();
    }

    // Turns to the next rows. Returns false behind the last.
    __device__ bool begin(u32 row) {
        if (row >= segment.num_rows) return false;
        first = row;
        count = min(node_stride - 1, segment.num_rows - row);
        tiles = (count + TILE_NODES - 1) / TILE_NODES;
        return true;
    }

    // The inputs of the convolution `back` tokens before a row; none before the first token.
    __device__ const float* tap_inputs(u32 row, u32 back) const {
        const u32 position = position_of(row);
        if (position < back) return nullptr;
        const u32 at = position - back;
        if (at < segment.committed_len) {
            const u32 place = p.num_taps == 4 ? at % 4 : at % p.num_taps;
            return p.conv_inputs + (static_cast<u64>(segment.slot) * p.num_taps + place) * num_channels();
        }
        return p.qkv + static_cast<u64>(segment.first_row + rows.ancestors[at - segment.committed_len][row]) * num_channels();
    }
};

// Weights of the convolution for `LEN` channels in a row.
template <u32 LEN>
struct ConvWeights {
    float taps[LEN][MAX_TAPS];

    __device__ __forceinline__ void load(const GdnWyParams& p, u32 channel) {
#pragma unroll
        for (u32 i = 0; i < LEN; i++) {
            const float* from = p.conv_weights + static_cast<u64>(channel + i) * p.num_taps;
            if (p.num_taps == MAX_TAPS) {
                const float4 weights = *reinterpret_cast<const float4*>(from);
                taps[i][0] = weights.x, taps[i][1] = weights.y, taps[i][2] = weights.z, taps[i][3] = weights.w;
            } else {
#pragma unroll
                for (u32 tap = 0; tap < MAX_TAPS; tap++) taps[i][tap] = tap < p.num_taps ? from[tap] : 0.0f;
            }
        }
    }
};

// Inputs of the convolution for `LEN` (2 or 4) channels of one row, by tap from the oldest.
template <u32 LEN>
struct ConvInputs {
    float values[MAX_TAPS][LEN];
    u32 missing;  // oldest taps, before the first token

    __device__ __forceinline__ void load(const Block& block, u32 row, u32 channel) {
        missing = 0;
#pragma unroll
        for (u32 tap = 0; tap < MAX_TAPS; tap++) {
            if (tap >= block.p.num_taps) continue;
            const float* inputs = block.tap_inputs(row, block.p.num_taps - 1 - tap);
            if (inputs == nullptr) {
                missing = tap + 1;
            } else if (LEN == 4) {
                const float4 x = *reinterpret_cast<const float4*>(inputs + channel);
                values[tap][0] = x.x, values[tap][1] = x.y, values[tap][LEN - 2] = x.z, values[tap][LEN - 1] = x.w;
            } else {
                const float2 x = *reinterpret_cast<const float2*>(inputs + channel);
                values[tap][0] = x.x, values[tap][1] = x.y;
            }
        }
    }

    // After the convolution and its activation; taps from the oldest to the current token.
    __device__ __forceinline__ float result(const ConvWeights<LEN>& weights, u32 num_taps, u32 i) const {
        float sum = 0.0f;
#pragma unroll
        for (u32 tap = 0; tap < MAX_TAPS; tap++) {
            if (tap < num_taps && tap >= missing) sum = __fmaf_rn(weights.taps[i][tap], values[tap][i], sum);
        }
        return silu(sum);
    }
};
