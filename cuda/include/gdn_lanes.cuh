// The value lanes of one block of gdn_wy: what they are made of, and their products with the states.
//
// A warp has one tile of the chunk's nodes and eight or sixteen value lanes, spread over its threads as one or two matrix
// instructions leave them: thread 4g + c has node g of the tile, and two or four lanes in a row. Which column of which
// instruction a lane is shows in no sum. From the products with the state to d and o no thread waits for lanes of another
// warp; for nodes, only those above its own.
#pragma once

#include "gdn_block.cuh"

// `LEN` (2 or 4) floats in a row, in one load or store.
template <u32 LEN>
struct FloatRow {
    float values[LEN];

    __device__ __forceinline__ float& operator[](u32 i) { return values[i]; }
    __device__ __forceinline__ float operator[](u32 i) const { return values[i]; }

    __device__ __forceinline__ static FloatRow load(const float* from) {
        FloatRow row;
        if (LEN == 4) {
            const float4 x = *reinterpret_cast<const float4*>(from);
            row[0] = x.x, row[1] = x.y, row[LEN - 2] = x.z, row[LEN - 1] = x.w;
        } else {
            const float2 x = *reinterpret_cast<const float2*>(from);
            row[0] = x.x, row[1] = x.y;
        }
        return row;
    }

    // Where only an address in shared memory is known.
    __device__ __forceinline__ static FloatRow load_shared(u32 from) {
        FloatRow row;
        if (LEN == 4) {
            asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                         : "=f"(row[0]), "=f"(row[1]), "=f"(row[LEN - 2]), "=f"(row[LEN - 1]) : "r"(from) : "memory");
        } else {
            asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(row[0]), "=f"(row[1]) : "r"(from) : "memory");
        }
        return row;
    }

    __device__ __forceinline__ void store_shared(u32 to) const {
        if (LEN == 4) {
            asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(to), "f"(values[0]), "f"(values[1]), "f"(values[LEN - 2]),
                         "f"(values[LEN - 1]) : "memory");
        } else {
            asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(to), "f"(values[0]), "f"(values[1]) : "memory");
        }
    }

    __device__ __forceinline__ void store(float* to) const {
        if (LEN == 4) {
            *reinterpret_cast<float4*>(to) = {values[0], values[1], values[LEN - 2], values[LEN - 1]};
        } else {
            *reinterpret_cast<float2*>(to) = {values[0], values[1]};
        }
    }
};

__device__ __forceinline__ float2 load_shared_pair(u32 from) {
    const FloatRow<2> pair = FloatRow<2>::load_shared(from);
    return {pair[0], pair[1]};
}

template <u32 TILES>
struct Lanes {
    static constexpr u32 NO_DEPTH = ~0u;
    static constexpr u32 THREADS = Block<TILES>::THREADS;
    static constexpr u32 GROUPS = Block<TILES>::WARPS / TILES;  // warps of a tile, one a group of lanes
    static constexpr u32 GROUP_LANES = MAX_LANES / GROUPS;
    static constexpr u32 INSTRUCTIONS = GROUP_LANES / TILE_VALUES;
    static constexpr u32 LEN = 2 * INSTRUCTIONS;                // lanes of a thread
    static constexpr u32 COPIED_QUADS = MAX_LANES / 4, COPIED_ROWS = THREADS / COPIED_QUADS;
    static_assert(COPIED_ROWS % 16 == 0, "staged_lane has the same order for all rows of a thread");
    static_assert(INSTRUCTIONS == 1 || INSTRUCTIONS == 2, "a column is a float or a pair of them");

    Block<TILES>& block;
    const GdnWyParams& p;
    u32 first_lane;               // of the block, within the key head's value lanes
    u32 num_lanes;
    u32 first_plane, num_planes;  // value heads of the block, counted within the key head
    u32 own_lane;                 // the thread's first, within the block
    u32 plane, column;            // its value head, the same for all of the warp, and its place there
    u32 staged = 0;               // anchors whose states lie in shared memory, a byte each, plus one
    const float* copied_state;    // the first value that the thread copies of the first anchor's state
    // Of the row and head whose gates the thread makes.
    float dt_bias, decay_rate;
    // Of the thread's node.
    ConvWeights<LEN> conv_weights;
    ConvInputs<LEN> inputs;
    FloatRow<LEN> values;  // v, then d
    FloatRow<LEN> gates, seen, out;

    __device__ __forceinline__ explicit Lanes(Block<TILES>& b) : block(b), p(b.p) {
        const u32 all_lanes = p.heads_per_key * p.value_dim;
        first_lane = b.slice * p.lanes;
        num_lanes = min(p.lanes, all_lanes - first_lane);
        first_plane = first_lane / p.value_dim;
        num_planes = (first_lane + num_lanes - 1) / p.value_dim - first_plane + 1;
        own_lane = (has_lanes() ? group_lane() : 0) + b.lane() % 4 * LEN;
        const u32 head = (first_lane + own_lane) / p.value_dim;
        column = first_lane + own_lane - head * p.value_dim;
        plane = head - first_plane;
        ConvWeights<LEN>::prefetch_from(p, channel());
        copied_state = state_of(0, min(copied_lane(), num_lanes - 4)) + copied_row() * p.value_dim;
        const u32 gated_head = head_of(min(gate() / MAX_SEGMENT_ROWS, num_planes - 1));
        dt_bias = p.dt_bias[gated_head], decay_rate = -expf(p.a_log[gated_head]);
    }

    // What the thread copies of states and logged updates: four lanes of each `COPIED_ROWS`th row.
    __device__ static u32 copied_row() { return threadIdx.x / COPIED_QUADS; }
    __device__ static u32 copied_lane() { return threadIdx.x % COPIED_QUADS * 4; }
    __device__ static u32 tile() { return Block<TILES>::warp() / GROUPS; }
    // The first lane of the warp, and that of operand B's column which the thread loads, within the block.
    __device__ static u32 group_lane() { return Block<TILES>::warp() % GROUPS * GROUP_LANES; }
    __device__ u32 column_lane() const { return group_lane() + group() * INSTRUCTIONS; }
    __device__ u32 group() const { return block.lane() / 4; }
    __device__ bool has_lanes() const { return group_lane() < num_lanes; }
    // Whether the warp has lanes and nodes.
    __device__ bool works() const { return has_lanes() && tile() * TILE_NODES < block.count; }
    __device__ u32 head_of(u32 of_plane) const { return block.key_head * p.heads_per_key + first_plane + of_plane; }
    // The thread's first value of a row.
    __device__ u32 own_value() const { return head_of(plane) * p.value_dim + column; }
    __device__ u32 channel() const { return 2 * block.keys_len() + own_value(); }
    __device__ u32 node() const { return tile() * TILE_NODES + group(); }
    __device__ u32 row() const { return block.row_of(node()); }
    __device__ u64 place() const { return static_cast<u64>(block.first_row + row()) * block.values_len() + own_value(); }
    __device__ bool stores() const { return has_lanes() && node() < block.count; }

    // Of an anchor, counted from the segment's first: two follow each other, a third takes the place of the first.
    __device__ u32 stage_of(u32 anchor) const { return anchor < p.num_states ? anchor : 0; }
    __device__ float* stage(u32 anchor) const { return block.memory + p.shared.states + stage_of(anchor) * KEY_LEN * MAX_LANES; }

    // The state of an anchor: its first row, from value `lane` of this block on.
    __device__ __forceinline__ const float* state_of(u32 anchor, u32 lane) const {
        return states_of(anchor) + place_in_state(lane);
    }
    // Of all heads.
    __device__ __forceinline__ const float* states_of(u32 anchor) const {
        const u32 ring = (block.anchor_base / FOLD_INTERVAL + anchor) % STATE_RING;
        return p.states + static_cast<u64>(block.slot * STATE_RING + ring) * p.num_value_heads * p.key_dim * p.value_dim;
    }
    // Where a value of this block has its first row there.
    __device__ __forceinline__ u32 place_in_state(u32 lane) const {
        const u32 head = (first_lane + lane) / p.value_dim;
        const u32 rows = (block.key_head * p.heads_per_key + head) * p.key_dim;
        return rows * p.value_dim + first_lane + lane - head * p.value_dim;
    }

    // Starts to copy the state of an anchor to its stage.
    __device__ __forceinline__ void fetch_state(u32 anchor) {
        if (copied_lane() < num_lanes) {
            const float* from = copied_state;
            if (anchor > 0) from += states_of(anchor) - states_of(0);
            const u32 to = shared_address(stage(anchor) + staged_lane(copied_row(), copied_lane())), apart = COPIED_ROWS * p.value_dim;
#pragma unroll 8
            for (u32 i = 0; i < KEY_LEN / COPIED_ROWS; i++) {
                const bool is_there = copied_row() + i * COPIED_ROWS < p.key_dim;
                thread_copy_16(to + i * COPIED_ROWS * MAX_LANES * sizeof(float), from, is_there);
                if (is_there) from += apart;
            }
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
        if (copied_lane() < num_lanes) {
            const u32 values_len = block.values_len(), first_value = block.key_head * p.heads_per_key * p.value_dim + first_lane;
            const float* from = p.log_d + static_cast<u64>(block.slot * LOG_POSITIONS) * values_len + first_value + copied_lane();
            const u32 to = shared_address(block.memory + p.shared.log_d + staged_lane(copied_row(), copied_lane()));
#pragma unroll
            for (u32 i = 0; i < MAX_LOG_ENTRIES / COPIED_ROWS; i++) {
                const u32 entry = copied_row() + i * COPIED_ROWS, position = (block.anchor_base + entry) % LOG_POSITIONS;
                const bool is_there = entry < block.log_len;
                thread_copy_16(to + i * COPIED_ROWS * MAX_LANES * sizeof(float), from + (is_there ? position * values_len : 0), is_there);
            }
        }
        if (threadIdx.x < block.log_len) {
            const float* from = p.log_g + block.log_row(threadIdx.x) * p.num_value_heads + head_of(0);
#pragma unroll 1
            for (u32 of_plane = 0; of_plane < num_planes; of_plane++) thread_copy_4(&block.rows.log_decay[of_plane][threadIdx.x], from + of_plane);
        }
        thread_copy_commit();
    }

    // What the gates of one row and head are made of.
    struct GateInputs {
        float a, b;
    };

    // The gate that the thread makes, by head and row. The first are the last warps', which have no keys to make of few rows.
    __device__ static u32 gate() {
        static_assert(MAX_PLANES * MAX_SEGMENT_ROWS <= THREADS, "a thread per gate");
        return THREADS - 1 - threadIdx.x;
    }
    __device__ u32 gate_place() const {
        return (block.first_row + gate() % MAX_SEGMENT_ROWS) * p.num_value_heads + head_of(gate() / MAX_SEGMENT_ROWS);
    }
    __device__ bool has_gate() const { return gate() < num_planes * MAX_SEGMENT_ROWS && gate() % MAX_SEGMENT_ROWS < block.num_rows; }
    __device__ __forceinline__ GateInputs load_gate() const {
        GateInputs inputs = {};
        if (has_gate()) inputs = {p.a[gate_place()], p.b[gate_place()]};
        return inputs;
    }

    // Decay and update strength of all rows of the segment.
    __device__ __forceinline__ void make_gates(GateInputs inputs) const {
        if (!has_gate()) return;
        const u32 of_plane = gate() / MAX_SEGMENT_ROWS, row = gate() % MAX_SEGMENT_ROWS;
        const float x = inputs.a + dt_bias;
        const float softplus = fmaxf(x, 0.0f) + log1pf(expf(-fabsf(x)));
        const float decay = decay_rate * softplus;
        block.rows.decay[of_plane][row] = decay;
        block.rows.beta[of_plane][row] = __fdividef(1.0f, 1.0f + expf(-inputs.b));
        // The block with a head's first lane writes it down.
        if ((first_plane + of_plane) * p.value_dim >= first_lane) p.tail_g[gate_place()] = decay;
    }

    // Whether a thread of the warp says so.
    __device__ __forceinline__ static bool any(bool said) { return __reduce_max_sync(0xFFFFFFFF, static_cast<u32>(said)) > 0; }

    // Starts to load what v is made of.
    __device__ __forceinline__ void load_values() {
        conv_weights.load(p, channel());
        inputs.load(block, row(), channel(), true);
    }

    __device__ __forceinline__ void make_values() {
#pragma unroll
        for (u32 i = 0; i < LEN; i++) values[i] = inputs.result(conv_weights, i);
    }

    // Where the thread's node stands, and which stretches and depths the chunk's nodes have.
    struct Places {
        u32 depth, stretch, row;  // NO_DEPTH where there is no node
        u32 last_depth, first_stretch, last_stretch;
    };

    __device__ __forceinline__ Places places() const {
        static_assert(Block<TILES>::NODES <= WARP_LANES, "a lane per node");
        Places at;
        at.row = row();
        const u32 depth = block.rows.depth[at.row], any_depth = block.rows.depth[block.row_of(block.lane())];
        at.stretch = block.stretch_of(depth);
        at.depth = node() < block.count ? depth : NO_DEPTH;
        at.last_depth = __reduce_max_sync(0xFFFFFFFF, any_depth);
        at.first_stretch = block.stretch_of(__reduce_min_sync(0xFFFFFFFF, any_depth));
        at.last_stretch = block.stretch_of(at.last_depth);
        return at;
    }

    // Products of k (into `seen`) and q (into `out`) with the states that the nodes read; `IS_STAGED` promises that shared
    // memory has room for one.
    template <bool IS_STAGED>
    __device__ __forceinline__ void multiply_states(const Places& at) {
        seen = {}, out = {};
#pragma unroll 1
        for (u32 stretch = at.first_stretch; stretch <= at.last_stretch; stretch++) {
            const u32 anchor = anchor_of_stretch(stretch);
            const bool is_staged = IS_STAGED || p.num_states > 0;
            if (is_staged && (staged >> stage_of(anchor) * 8 & 0xFF) != anchor + 1) {
                __syncthreads();
                fetch_state(anchor);
                thread_copy_commit();
                thread_copy_wait<0>();
                __syncthreads();
            }
            if (!works() || !any(at.stretch == stretch)) continue;
            if (is_staged) {
                multiply_state<true>(stage(anchor), stretch, at);
            } else {
                multiply_state<false>(state_of(anchor, column_lane()), stretch, at);
            }
        }
    }

    // The anchor of the rows in a stretch, in intervals from that of the segment's first position.
    __device__ u32 anchor_of_stretch(u32 stretch) const {
        return (anchor_of((block.committed_len / STRETCH + stretch) * STRETCH) - block.anchor_base) / FOLD_INTERVAL;
    }

    // Operands B of sixteen rows that lie where `row` says.
    template <typename Row>
    __device__ __forceinline__ static void split_columns(SplitColumn (&columns)[INSTRUCTIONS], Row row) {
        float values[INSTRUCTIONS][4];
#pragma unroll
        for (u32 i = 0; i < 4; i++) {
            const float* from = row(i);
            if (INSTRUCTIONS == 2) {
                const float2 pair = *reinterpret_cast<const float2*>(from);
                values[0][i] = pair.x, values[INSTRUCTIONS - 1][i] = pair.y;
            } else {
                values[0][i] = *from;
            }
        }
#pragma unroll
        for (u32 j = 0; j < INSTRUCTIONS; j++) columns[j] = split_column({values[j][0], values[j][1], values[j][2], values[j][3]});
    }

    // sums += a b over sixteen columns, a fragment of the warp's tile by all of its lanes.
    __device__ __forceinline__ static void multiply(SplitSums (&sums)[INSTRUCTIONS], const SplitPair& fragment,
                                                    const SplitColumn (&columns)[INSTRUCTIONS]) {
#pragma unroll
        for (u32 j = 0; j < INSTRUCTIONS; j++) multiply_split(sums[j], fragment, columns[j]);
    }

    // Of the thread's lane `i`: sums by k (0) or q (1).
    __device__ __forceinline__ static float sum_of(const SplitSums (&sums)[INSTRUCTIONS], u32 i, u32 which) {
        return sums[i % INSTRUCTIONS].value(which * 2 + i / INSTRUCTIONS);
    }

    // `state` is where the thread's column lies, or where states are staged; rows that a key lacks meet zeros.
    template <bool IS_STAGED>
    __device__ __forceinline__ void multiply_state(const float* state, u32 stretch, const Places& at) {
        const u32 own_row = block.lane() % 4 * 4, row_len = IS_STAGED ? MAX_LANES : p.value_dim;
        if (IS_STAGED) state += staged_lane(own_row, column_lane());
        const float* keys = block.key_place(tile() * TILE_NODES, 0, 0) + block.lane() * 4;
        SplitSums sums[INSTRUCTIONS] = {};
#pragma unroll(TILES == 1 ? 4 : 2)
        for (u32 step = 0; step < KEY_STEPS; step++) {
            const u32 row = step * KEY_STEP + own_row;
            const float* rows = state + (IS_STAGED ? step * KEY_STEP * MAX_LANES : row < p.key_dim ? row * row_len : 0);
            SplitColumn columns[INSTRUCTIONS];
            split_columns(columns, [&](u32 i) { return rows + i * row_len; });
            multiply(sums, split_pair(keys + step * FRAGMENT_LEN), columns);
        }
        const bool reads = at.stretch == stretch;
#pragma unroll
        for (u32 i = 0; i < LEN; i++) {
            seen[i] = reads ? sum_of(sums, i, 0) : seen[i];
            out[i] = reads ? sum_of(sums, i, 1) : out[i];
        }
    }
};
