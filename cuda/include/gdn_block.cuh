// What a block of gdn_wy knows: its arguments, its place, its shared memory, and the rows of its segment.
//
// A block serves one segment, one key head and some of the value lanes that read it; `num_slices` blocks serve a key head
// together. Rows are taken in chunks, in topological order: in a chunk they are "nodes", eight to
// a tile of the tensor cores. Positions are cut in stretches of 32: what a row at position t reads lies in the "own"
// stretch of t and the two before it. Entries count positions from the anchor of the segment's first one: logged ones,
// and behind MAX_LOG_ENTRIES a row's own path. Loops have no branches by node: where a chunk has fewer nodes than its
// tiles, the last one is computed again and not stored.
#pragma once

#include "loads.cuh"
#include "matmul_rows.cuh"
#include "row_paths.cuh"
#include "split_product.cuh"
#include "thread_copy.cuh"

// Of a block that takes chunks of `TILES` tiles: with more than one, twice as many, so that other warps fill the time for which
// one waits for itself.
template <u32 TILES>
constexpr u32 BLOCK_WARPS = TILES == 1 ? 8 : 16;
template <u32 TILES>
constexpr u32 BLOCK_THREADS = BLOCK_WARPS<TILES> * WARP_LANES;
constexpr u32 MAX_LANES = 64;      // value lanes of a block
constexpr u32 TILE_VALUES = 8;     // columns of a matrix instruction
constexpr u32 TILE_NODES = 8;      // of one matrix instruction: a row of k and a row of q each
constexpr u32 ANCHOR_DELAY = 64;
constexpr u32 FOLD_INTERVAL = 32;
constexpr u32 MAX_LOG_ENTRIES = ANCHOR_DELAY + FOLD_INTERVAL;
constexpr u32 LOG_POSITIONS = 128;
constexpr u32 STATE_RING = 3;
constexpr u32 MAX_SEGMENT_ROWS = 64;
constexpr u32 MAX_TAPS = 4;
constexpr u32 MAX_PLANES = 4;
constexpr u32 MAX_SLICES = 8;      // blocks of a key head, a cluster
constexpr u32 STRETCH = FOLD_INTERVAL;
constexpr u32 STRETCH_STEPS = STRETCH / 16;
constexpr u32 KEY_STEP = 16;       // columns of a fragment
constexpr u32 KEY_STEPS = 8;       // shorter keys are padded with zeros
constexpr u32 KEY_LEN = KEY_STEPS * KEY_STEP;
constexpr u32 HALF_FRAGMENT = WARP_LANES * 4;
constexpr u32 FRAGMENT_LEN = 2 * HALF_FRAGMENT;  // k and q of a tile, one step
constexpr u32 KEY_ROW = KEY_LEN + 16;     // of staged keys, in floats: their fragments meet all banks
constexpr u32 STAGED_KEYS = 16;           // logged keys that a block copies ahead
constexpr u32 UPDATE_ROW = MAX_LANES + 8;

// Offsets in a block's shared memory, in floats.
struct SharedLayout {
    u32 states;   // [num_states][KEY_LEN][MAX_LANES]: see staged_lane
    u32 log_d;    // logged d of this block's lanes: [MAX_LOG_ENTRIES][MAX_LANES], likewise
    u32 log_k;    // the first logged keys of this block's share, until what follows is made: [STAGED_KEYS][KEY_ROW]
    u32 keys;     // k and q of the chunk as operand A: [tiles][KEY_STEPS][2][32][2][2], the last two columns and k or q
    u32 products; // k.k_j, q.k_j by entry and node: [max_entries][nodes + 1][2]; the last entry is the node itself
    u32 weighed;  // products with the two whole stretches times decays, likewise: [planes][tiles][4][2][32][2][2]
    u32 own;      // those with the own stretch, by position in it: [planes][32][nodes + 1][2]
    u32 updates;  // d of the segment's rows: [rows][UPDATE_ROW]
    u32 squares;  // of o, by node and eight lanes of the key head: [nodes][num_slices * lanes / 8 + 1]
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
    RowsOutput y;               // [rows][value heads * value_dim]
    float* outputs;             // o, scratch where blocks stand alone: [rows][value heads * value_dim]
    float* squares;             // likewise: [rows][value heads * value_dim / 8]
    SharedLayout shared;
    u32 num_key_heads;
    u32 num_value_heads;
    u32 heads_per_key;
    u32 key_dim;
    u32 value_dim;
    u32 num_taps;
    u32 num_channels;
    u32 num_slices;
    u32 lanes;        // value lanes of a block
    u32 num_states;   // states that fit in shared memory; if none, they are read where they lie
    u32 max_entries;
    float norm_eps;
    u32 first_row;    // rows of this launch
    u32 end_row;
};

__device__ __forceinline__ u32 anchor_of(u32 position) {
    return position < ANCHOR_DELAY ? 0 : (position - ANCHOR_DELAY) / FOLD_INTERVAL * FOLD_INTERVAL;
}

// Where a lane of a row of a staged state or of logged updates lies: four rows have theirs in one order, the next four in
// another, so that the rows of a fragment meet all banks.
__device__ __forceinline__ u32 staged_lane(u32 row, u32 lane) { return row * MAX_LANES + (lane ^ row / 4 % 4 * 8); }

__device__ __forceinline__ float silu(float x) { return __fdividef(x, 1.0f + expf(-x)); }

// The rows of a segment, in shared memory.
struct Rows {
    u32 depth[MAX_SEGMENT_ROWS];       // path length before the row
    u32 path_start[MAX_SEGMENT_ROWS];  // in `paths.path_rows`
    u8 ancestors[MAX_SEGMENT_ROWS][MAX_SEGMENT_ROWS];  // rows of the segment, by depth; the last is the row itself, then 0
    const float* taps[MAX_SEGMENT_ROWS][MAX_TAPS];     // inputs of the convolution from the oldest; null where there are none
    float decay[MAX_PLANES][MAX_SEGMENT_ROWS];         // log decay g
    float beta[MAX_PLANES][MAX_SEGMENT_ROWS];
    float log_decay[MAX_PLANES][MAX_LOG_ENTRIES];
    float from_state[MAX_PLANES][MAX_SEGMENT_ROWS];    // e0
    u64 arrivals[3][2];                                // barriers of what blocks send each other: Exchange, parity of the chunk
    float passed[MAX_SLICES];                          // what comes with word of it: Block::tell_passed; nobody reads it
};

// What blocks of a key head send each other, chunk by chunk. A block sends those of the next chunk only when it has all
// of this one, so two barriers in turn suffice. It writes over another's squares only when that one has read them: with
// its products, which may be none, each block says so.
enum class Exchange { KEYS, PRODUCTS, SQUARES };

template <u32 TILES>
struct Block {
    static constexpr u32 NODES = TILES * TILE_NODES;
    static constexpr u32 WARPS = BLOCK_WARPS<TILES>, THREADS = BLOCK_THREADS<TILES>;
    static constexpr u32 NODE_STRIDE = NODES + 1;  // pairs of a row of factors

    const GdnWyParams& p;
    float* memory;
    Rows& rows;
    u32 slot, committed_len, first_row, num_rows;  // of the segment
    u32 key_head, slice;
    u32 anchor_base;          // anchor of the segment's first position
    u32 log_len;              // logged entries from there on
    u32 max_depth;            // of the segment
    // Of the thread's row, if the segment is the launch's first: known as soon as where the segment begins.
    u32 guessed_position, guessed_path_start;
    u32 first = 0, count = 0; // of the chunk: its first row in the segment, its nodes
    u32 chunk = 0;

    __device__ __forceinline__ Block(const GdnWyParams& params, float* shared, Rows& shared_rows)
        : p(params), memory(shared), rows(shared_rows) {
        const u32 guess = p.first_row + threadIdx.x;
        const bool is_row = threadIdx.x < MAX_SEGMENT_ROWS && guess < p.end_row;
        guessed_position = is_row ? p.paths.positions[guess] : 0;
        guessed_path_start = is_row ? p.paths.rows[guess].path_start : 0;
        slice = blockIdx.x % p.num_slices;
        const u32 part = blockIdx.x / p.num_slices;
        key_head = part % p.num_key_heads;
        const SegmentFacts& segment = p.paths.segments[part / p.num_key_heads];
        slot = segment.slot, committed_len = segment.committed_len, first_row = segment.first_row, num_rows = segment.num_rows;
        anchor_base = anchor_of(committed_len);
        log_len = committed_len - anchor_base;
    }

    __device__ static u32 warp() { return threadIdx.x / WARP_LANES; }
    __device__ static u32 lane() { return threadIdx.x % WARP_LANES; }
    __device__ u32 keys_len() const { return p.num_key_heads * p.key_dim; }
    __device__ u32 values_len() const { return p.num_value_heads * p.value_dim; }
    // The row of a node in the segment; of the last one where there are fewer.
    __device__ u32 row_of(u32 node) const { return first + min(node, count - 1); }
    __device__ u32 position_of(u32 row) const { return committed_len + rows.depth[row]; }
    // Stretches between a row's own and that of the segment's first position.
    __device__ u32 stretch_of(u32 depth) const { return (committed_len + depth) / STRETCH - committed_len / STRETCH; }
    // The depth at which a stretch begins, counted likewise.
    __device__ u32 stretch_depth(u32 stretch) const { return stretch == 0 ? 0 : (committed_len / STRETCH + stretch) * STRETCH - committed_len; }
    // Where a logged value lies, by entry.
    __device__ u32 log_row(u32 entry) const { return slot * LOG_POSITIONS + (anchor_base + entry) % LOG_POSITIONS; }
    // Where a node's column 4c of a step lies in `keys`: k, q, both of the next column; two columns more half a fragment on.
    __device__ float* key_place(u32 node, u32 step, u32 c) const {
        return memory + p.shared.keys + (node / TILE_NODES * KEY_STEPS + step) * FRAGMENT_LEN + (node % TILE_NODES * 4 + c) * 4;
    }
    // k of a node, columns 4c .. 4c + 3 of a step.
    __device__ __forceinline__ float4 key_of(u32 node, u32 step, u32 c) const {
        const float* place = key_place(node, step, c);
        return {place[0], place[2], place[HALF_FRAGMENT], place[HALF_FRAGMENT + 2]};
    }
    __device__ u32 own_entry() const { return p.max_entries - 1; }
    __device__ float2* products(u32 entry) const { return reinterpret_cast<float2*>(memory + p.shared.products) + entry * NODE_STRIDE; }
    __device__ float* weighed(u32 plane) const { return memory + p.shared.weighed + plane * TILES * 2 * STRETCH_STEPS * FRAGMENT_LEN; }
    __device__ float2* own(u32 plane) const { return reinterpret_cast<float2*>(memory + p.shared.own) + plane * STRETCH * NODE_STRIDE; }

    __device__ u32 barrier_of(Exchange exchange) const { return shared_address(&rows.arrivals[static_cast<u32>(exchange)][chunk % 2]); }

    // Says how much of this chunk the block will be sent. Called by one thread.
    __device__ __forceinline__ void expect(Exchange exchange, u32 num_bytes) const { barrier_expect(barrier_of(exchange), num_bytes); }

    // Waits until all of it is there.
    __device__ __forceinline__ void wait_for(Exchange exchange) const { barrier_wait(barrier_of(exchange), chunk / 2 % 2); }

    // Tells all blocks of the key head that this one has read all of the chunk before. Called by a whole warp.
    __device__ __forceinline__ void tell_passed() const {
        const u32 rank = min(lane(), p.num_slices - 1), place = shared_address(&rows.passed[slice]);
        store_in_block(address_in_block(place, rank), 0.0f, address_in_block(barrier_of(Exchange::PRODUCTS), rank), lane() < p.num_slices);
    }

    __device__ __forceinline__ void init_barriers() const {
        if (threadIdx.x == 0) {
            for (u32 i = 0; i < 3 * 2; i++) barrier_init(shared_address(&rows.arrivals[i / 2][i % 2]), 1);
            barrier_init_fence();
        }
    }

    // Reads positions and paths of all rows.
    __device__ __forceinline__ void read_rows() {
        if (threadIdx.x < num_rows) {
            const u32 row = first_row + threadIdx.x;
            const bool is_known = first_row == p.first_row;
            rows.depth[threadIdx.x] = (is_known ? guessed_position : p.paths.positions[row]) - committed_len;
            rows.path_start[threadIdx.x] = is_known ? guessed_path_start : p.paths.rows[row].path_start;
        }
        __syncthreads();
        max_depth = 0;
#pragma unroll
        for (u32 row = lane(); row < MAX_SEGMENT_ROWS; row += WARP_LANES) max_depth = max(max_depth, row < num_rows ? rows.depth[row] : 0);
        max_depth = __reduce_max_sync(0xFFFFFFFF, max_depth);
#pragma unroll 1
        for (u32 row = lane(); row < num_rows; row += WARP_LANES) {
            const u32 own_depth = rows.depth[row];
            const u32* path = p.paths.path_rows + rows.path_start[row];
#pragma unroll 2
            for (u32 depth = warp(); depth <= max_depth; depth += WARPS) {
                u32 ancestor = depth == own_depth ? row : 0;
                if (depth < own_depth) ancestor = path[depth] - first_row;
                rows.ancestors[depth][row] = static_cast<u8>(ancestor);
            }
        }
        __syncthreads();
        const u32 row = threadIdx.x / MAX_TAPS, tap = threadIdx.x % MAX_TAPS;
        if (row < num_rows) rows.taps[row][tap] = tap_inputs(row, MAX_TAPS - 1 - tap);
        __syncthreads();
    }

    // The inputs of the convolution `back` tokens before a row.
    __device__ __forceinline__ const float* tap_inputs(u32 row, u32 back) const {
        const u32 depth = rows.depth[row], position = committed_len + depth;
        if (back >= p.num_taps || back > position) return nullptr;
        if (back <= depth) return p.qkv + static_cast<u64>(first_row + rows.ancestors[depth - back][row]) * p.num_channels;
        return p.conv_inputs + static_cast<u64>(slot * p.num_taps + (position - back) % p.num_taps) * p.num_channels;
    }

    // Turns to the next rows. Returns false behind the last.
    __device__ __forceinline__ bool begin(u32 next_chunk) {
        chunk = next_chunk;
        first = chunk * NODES;
        count = first < num_rows ? min(NODES, num_rows - first) : 0;
        return count > 0;
    }
};

// Weights of the convolution for `LEN` channels in a row, from the oldest tap; taps that the model lacks are zero.
template <u32 LEN>
struct ConvWeights {
    float taps[LEN][MAX_TAPS];

    __device__ __forceinline__ static void prefetch_from(const GdnWyParams& p, u32 channel) { prefetch(p.conv_weights + channel * p.num_taps); }

    __device__ __forceinline__ void load(const GdnWyParams& p, u32 channel) {
        if (p.num_taps == MAX_TAPS) {
#pragma unroll
            for (u32 i = 0; i < LEN; i++) {
                const float4 weights = *reinterpret_cast<const float4*>(p.conv_weights + (channel + i) * MAX_TAPS);
                taps[i][0] = weights.x, taps[i][1] = weights.y, taps[i][2] = weights.z, taps[i][3] = weights.w;
            }
            return;
        }
#pragma unroll
        for (u32 i = 0; i < LEN; i++) {
            const float* from = p.conv_weights + (channel + i) * p.num_taps;
#pragma unroll
            for (u32 tap = 0; tap < MAX_TAPS; tap++) {
                const u32 missing = MAX_TAPS - p.num_taps;
                taps[i][tap] = tap < missing ? 0.0f : from[tap - missing];
            }
        }
    }
};

// Inputs of the convolution for `LEN` (2 or 4) channels of one row, by tap from the oldest; zero where there are none and
// for channels that a key lacks.
template <u32 LEN>
struct ConvInputs {
    float values[MAX_TAPS][LEN];

    template <u32 TILES>
    __device__ __forceinline__ void load(const Block<TILES>& block, u32 row, u32 channel, bool is_inside) {
#pragma unroll
        for (u32 tap = 0; tap < MAX_TAPS; tap++) {
            const float* from = block.rows.taps[row][tap];
            const bool is_there = from != nullptr && is_inside;
            if (LEN == 4) {
                const float4 x = load_if(reinterpret_cast<const float4*>(from + channel), is_there);
                values[tap][0] = x.x, values[tap][1] = x.y, values[tap][LEN - 2] = x.z, values[tap][LEN - 1] = x.w;
            } else {
                const float2 x = load_if(reinterpret_cast<const float2*>(from + channel), is_there);
                values[tap][0] = x.x, values[tap][1] = x.y;
            }
        }
    }

    // After the convolution and its activation; taps from the oldest to the current token.
    __device__ __forceinline__ float result(const ConvWeights<LEN>& weights, u32 i) const {
        float sum = 0.0f;
#pragma unroll
        for (u32 tap = 0; tap < MAX_TAPS; tap++) sum = __fmaf_rn(weights.taps[i][tap], values[tap][i], sum);
        return silu(sum);
    }
};
