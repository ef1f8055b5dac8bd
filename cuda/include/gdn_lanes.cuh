// The value lanes of one block of gdn_wy: what they are made of, and their products with the states.
//
// A warp has eight value lanes and all nodes of the chunk, spread over its threads as a matrix instruction leaves them:
// thread 4g + c has lanes 2c and 2c + 1 of the nodes g, g + 8, .. So from the products with the state to d and o no
// thread waits for another warp.
#pragma once

#include "gdn_block.cuh"

template <u32 TILES>
struct Lanes {
    static constexpr u32 NO_DEPTH = ~0u;

    Block<TILES>& block;
    const GdnWyParams& p;
    u32 first_lane;               // of the block, within the key head's value lanes
    u32 num_lanes;
    u32 first_plane, num_planes;  // value heads of the block, counted within the key head
    bool works;                   // whether the warp has lanes
    u32 own_lane;                 // the thread's first, within the block
    u32 plane, column;            // its value head, and its place there
    u32 staged = 0;               // anchors whose states lie in shared memory, a byte each, plus one
    // Of the thread's nodes, by tile; a pair of lanes each.
    ConvWeights<2> conv_weights;
    ConvInputs<2> inputs[TILES];
    float2 values[TILES];  // v, then d
    float2 gates[TILES], seen[TILES], out[TILES];

    __device__ __forceinline__ explicit Lanes(Block<TILES>& b) : block(b), p(b.p) {
        const u32 all_lanes = p.heads_per_key * p.value_dim;
        first_lane = b.slice * p.lanes;
        num_lanes = min(p.lanes, all_lanes - first_lane);
        first_plane = first_lane / p.value_dim;
        num_planes = (first_lane + num_lanes - 1) / p.value_dim - first_plane + 1;
        works = b.warp() * WARP_VALUES < num_lanes;
        own_lane = (works ? b.warp() * WARP_VALUES : 0) + b.lane() % 4 * 2;
        const u32 head = (first_lane + own_lane) / p.value_dim;
        column = first_lane + own_lane - head * p.value_dim;
        plane = head - first_plane;
        ConvWeights<2>::prefetch_from(p, channel());
    }

    __device__ u32 group() const { return block.lane() / 4; }
    __device__ u32 head_of(u32 of_plane) const { return block.key_head * p.heads_per_key + first_plane + of_plane; }
    // The thread's first value of a row.
    __device__ u32 own_value() const { return head_of(plane) * p.value_dim + column; }
    __device__ u32 channel() const { return 2 * block.keys_len() + own_value(); }
    __device__ u32 node_of(u32 tile) const { return tile * TILE_NODES + group(); }
    __device__ u32 row_of(u32 tile) const { return block.row_of(node_of(tile)); }
    __device__ u64 place_of(u32 tile) const { return static_cast<u64>(block.first_row + row_of(tile)) * block.values_len() + own_value(); }
    __device__ bool stores(u32 tile) const { return works && node_of(tile) < block.count; }

    // Of an anchor, counted from the segment's first: two follow each other, a third takes the place of the first.
    __device__ u32 stage_of(u32 anchor) const { return anchor < p.num_states ? anchor : 0; }
    __device__ float* stage(u32 anchor) const { return block.memory + p.shared.states + stage_of(anchor) * KEY_LEN * STATE_ROW; }

    // The state of an anchor: its first row, from value `lane` of this block on.
    __device__ __forceinline__ const float* state_of(u32 anchor, u32 lane) const {
        const u32 ring = (block.anchor_base / FOLD_INTERVAL + anchor) % STATE_RING, head = (first_lane + lane) / p.value_dim;
        const u32 first_head = (block.slot * STATE_RING + ring) * p.num_value_heads + block.key_head * p.heads_per_key;
        return p.states + static_cast<u64>(first_head + head) * p.key_dim * p.value_dim + first_lane + lane - head * p.value_dim;
    }
    __device__ const float* own_state(u32 anchor) const { return state_of(anchor, own_lane - block.lane() % 4 * 2); }

    // Starts to copy the state of an anchor to its stage, a row per warp.
    __device__ __forceinline__ void fetch_state(u32 anchor) {
        const u32 lane = block.lane() * 2;
        const float* from = state_of(anchor, min(lane, num_lanes - 2));
        float* to = stage(anchor) + lane;
#pragma unroll 4
        for (u32 row = block.warp(); row < KEY_LEN; row += BLOCK_WARPS) {
            const bool is_there = row < p.key_dim && lane < num_lanes;
            thread_copy_8(to + row * STATE_ROW, from + (is_there ? row * p.value_dim : 0), is_there);
        }
        const u32 shift = stage_of(anchor) * 8;
        staged = (staged & ~(0xFFu << shift)) | (anchor + 1) << shift;
    }

    // Brings what was committed nearer, 32 values a thread: states, logged updates and decays.
    __device__ __forceinline__ void prefetch_committed() const {
        const u32 half = threadIdx.x % 2 * 32, lane = min(half, num_lanes - 1), row = threadIdx.x / 2;
        const u32 num_anchors = anchor_of_stretch(block.stretch_of(block.max_depth)) + 1;
#pragma unroll 1
        for (u32 anchor = 0; anchor < num_anchors; anchor++) {
            if (row < p.key_dim) prefetch(state_of(anchor, lane) + row * p.value_dim);
        }
        const u32 first_value = block.key_head * p.heads_per_key * p.value_dim + first_lane;
        if (row >= block.log_len) return;
        prefetch(p.log_d + static_cast<u64>(block.log_row(row)) * block.values_len() + first_value + lane);
        prefetch(p.log_g + block.log_row(row) * p.num_value_heads + head_of(0));
    }

    // Starts to copy it.
    __device__ __forceinline__ void fetch_committed() {
        const u32 num_anchors = min(anchor_of_stretch(block.stretch_of(block.max_depth)) + 1, p.num_states);
#pragma unroll 1
        for (u32 anchor = 0; anchor < num_anchors; anchor++) fetch_state(anchor);
        const u32 lane = block.lane() * 2, first_value = block.key_head * p.heads_per_key * p.value_dim + first_lane;
#pragma unroll 4
        for (u32 entry = block.warp(); entry < block.log_len; entry += BLOCK_WARPS) {
            const bool is_there = lane < num_lanes;
            const float* from = p.log_d + static_cast<u64>(block.log_row(entry)) * block.values_len() + (is_there ? first_value + lane : 0);
            thread_copy_8(block.memory + p.shared.log_d + entry * LOG_ROW + lane, from, is_there);
        }
        if (threadIdx.x < block.log_len) {
            const float* from = p.log_g + block.log_row(threadIdx.x) * p.num_value_heads + head_of(0);
            for (u32 of_plane = 0; of_plane < num_planes; of_plane++) thread_copy_4(&block.rows.log_decay[of_plane][threadIdx.x], from + of_plane);
        }
        thread_copy_commit();
    }

    // What the gates of one row and head are made of.
    struct GateInputs {
        float a, b;
    };

    __device__ u32 gate_place(u32 index) const {
        return (block.first_row + index % MAX_SEGMENT_ROWS) * p.num_value_heads + head_of(index / MAX_SEGMENT_ROWS);
    }
    __device__ bool has_gate(u32 index) const { return index < num_planes * MAX_SEGMENT_ROWS && index % MAX_SEGMENT_ROWS < block.num_rows; }
    __device__ __forceinline__ GateInputs load_gate(u32 index) const {
        const u32 place = has_gate(index) ? gate_place(index) : 0;
        return {p.a[place], p.b[place]};
    }

    // Decay and update strength of all rows of the segment; the first of the thread's are on their way.
    __device__ __forceinline__ void make_gates(GateInputs gate) const {
#pragma unroll 1
        for (u32 index = threadIdx.x; index < num_planes * MAX_SEGMENT_ROWS; index += BLOCK_THREADS) {
            if (index >= BLOCK_THREADS) gate = load_gate(index);
            if (!has_gate(index)) continue;
            const u32 of_plane = index / MAX_SEGMENT_ROWS, row = index % MAX_SEGMENT_ROWS, head = head_of(of_plane);
            const float x = gate.a + p.dt_bias[head];
            const float softplus = fmaxf(x, 0.0f) + log1pf(expf(-fabsf(x)));
            const float decay = -expf(p.a_log[head]) * softplus;
            block.rows.decay[of_plane][row] = decay;
            block.rows.beta[of_plane][row] = __fdividef(1.0f, 1.0f + expf(-gate.b));
            // The block with a head's first lane writes it down.
            if ((first_plane + of_plane) * p.value_dim >= first_lane) p.tail_g[gate_place(index)] = decay;
        }
    }

    // Starts to load what v is made of.
    __device__ __forceinline__ void load_values() {
        conv_weights.load(p, channel());
#pragma unroll
        for (u32 tile = 0; tile < TILES; tile++) inputs[tile].load(block, row_of(tile), channel());
    }

    __device__ __forceinline__ void make_values() {
#pragma unroll
        for (u32 tile = 0; tile < TILES; tile++) values[tile] = {inputs[tile].result(conv_weights, 0), inputs[tile].result(conv_weights, 1)};
    }

    // Starts to load the output gate.
    __device__ __forceinline__ void load_gates() {
#pragma unroll
        for (u32 tile = 0; tile < TILES; tile++) gates[tile] = *reinterpret_cast<const float2*>(p.z + place_of(tile));
    }

    // Of every node: the stretch it stands in, its ancestors' place.
    struct Places {
        u32 depth[TILES], stretch[TILES], row[TILES];  // NO_DEPTH where there is no node
        u32 last_stretch, last_depth;                  // of the warp's, and so of the chunk's nodes
    };

    __device__ __forceinline__ Places places() const {
        Places at;
        u32 last = 0;
#pragma unroll
        for (u32 tile = 0; tile < TILES; tile++) {
            at.row[tile] = row_of(tile);
            const u32 depth = block.rows.depth[at.row[tile]];
            last = max(last, depth);
            at.stretch[tile] = block.stretch_of(depth);
            at.depth[tile] = node_of(tile) < block.count ? depth : NO_DEPTH;
        }
        at.last_depth = __reduce_max_sync(0xFFFFFFFF, last);
        at.last_stretch = block.stretch_of(at.last_depth);
        return at;
    }

    // Products of k (into `seen`) and q (into `out`) with the states that the nodes read; `ALL_STAGED` promises that all
    // lie in shared memory.
    template <bool ALL_STAGED>
    __device__ __forceinline__ void multiply_states(const Places& at) {
        u32 least = ~0u;
#pragma unroll
        for (u32 tile = 0; tile < TILES; tile++) least = min(least, at.stretch[tile]);
        least = __reduce_min_sync(0xFFFFFFFF, least);
#pragma unroll 1
        for (u32 stretch = least; stretch <= at.last_stretch; stretch++) {
            const u32 anchor = anchor_of_stretch(stretch);
            if (!ALL_STAGED && p.num_states == 0) {
                if (works) multiply_state(own_state(anchor), p.value_dim, stretch, at);
                continue;
            }
            if (!ALL_STAGED && (staged >> stage_of(anchor) * 8 & 0xFF) != anchor + 1) {
                __syncthreads();
                fetch_state(anchor);
                thread_copy_commit();
                thread_copy_wait<0>();
                __syncthreads();
            }
            if (works) multiply_state(stage(anchor) + block.warp() * WARP_VALUES, STATE_ROW, stretch, at);
        }
    }

    // The anchor of the rows in a stretch, in intervals from that of the segment's first position.
    __device__ u32 anchor_of_stretch(u32 stretch) const {
        return (anchor_of((block.committed_len / STRETCH + stretch) * STRETCH) - block.anchor_base) / FOLD_INTERVAL;
    }

    // `state` holds the warp's lanes of rows `row_len` apart; rows that a key lacks meet zeros.
    __device__ __forceinline__ void multiply_state(const float* state, u32 row_len, u32 stretch, const Places& at) {
        state += group();
        const float* keys = block.key_place(0, 0, 0, 0) + block.lane() * 4;
        SplitSums sums[TILES];
#pragma unroll
        for (u32 tile = 0; tile < TILES; tile++) sums[tile] = {};
#pragma unroll(TILES == 1 ? 4 : 1)
        for (u32 step = 0; step < KEY_STEPS; step++) {
            const u32 row = step * KEY_STEP + block.lane() % 4 * 4;
            const float* rows = state + (row_len == STATE_ROW || row < p.key_dim ? row : 0) * row_len;
            const SplitColumn column_of_state = split_column({rows[0], rows[row_len], rows[2 * row_len], rows[3 * row_len]});
#pragma unroll
            for (u32 tile = 0; tile < TILES; tile++) multiply_tile(sums[tile], keys + (tile * KEY_STEPS + step) * FRAGMENT_LEN, column_of_state);
        }
#pragma unroll
        for (u32 tile = 0; tile < TILES; tile++) {
            const bool reads = at.stretch[tile] == stretch;
            seen[tile] = {reads ? sums[tile].value(0) : seen[tile].x, reads ? sums[tile].value(1) : seen[tile].y};
            out[tile] = {reads ? sums[tile].value(2) : out[tile].x, reads ? sums[tile].value(3) : out[tile].y};
        }
    }

    // sums += a pair of fragments, k or what goes with it and q, times a column.
    __device__ __forceinline__ static void multiply_tile(SplitSums& sums, const float* pair, const SplitColumn& by) {
        const float4 k = *reinterpret_cast<const float4*>(pair), q = *reinterpret_cast<const float4*>(pair + WARP_LANES * 4);
        multiply_split(sums, split_pair(k, q), by);
    }
};
