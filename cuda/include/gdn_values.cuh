// The recurrence of gdn_wy for the value lanes of one block, from products of keys to outputs.
//
// A warp has eight value lanes and all nodes of the chunk, spread over its threads as a matrix instruction leaves them:
// thread 4g + c has lanes 2c and 2c + 1 of the nodes g, g + 8, .. So from the products with the state to d and o no
// thread waits for another warp. Entries are added in the order of positions, one fused multiply-add each.
#pragma once

#include "gdn_block.cuh"

__device__ __forceinline__ float norm_scale(const GdnWyParams& p, float squares) {
    return rsqrtf(__fdividef(squares, static_cast<float>(p.value_dim)) + p.norm_eps);
}

__device__ __forceinline__ void store_output(float* y, float2 o, float scale, float2 weight, float2 gate) {
    *reinterpret_cast<float2*>(y) = {o.x * scale * weight.x * gate.x, o.y * scale * weight.y * gate.y};
}

template <u32 TILES>
struct Values {
    static constexpr u32 LOG_BATCH = 8;  // logged entries whose factors are on their way at a time

    static constexpr u32 NO_DEPTH = ~0u;

    Block<TILES>& block;
    const GdnWyParams& p;
    u32 first_lane;               // of the block, within the key head's value lanes
    u32 num_lanes;
    u32 first_plane, num_planes;  // value heads of the block, counted within the key head
    bool works;                   // whether the warp has lanes
    u32 own_lane;                 // the thread's first, within the block
    u32 plane, column;            // its value head, and its place there
    ConvWeights<2> conv_weights;
    u32 staged = 0;               // anchors whose states lie in shared memory, a byte each, plus one
    // Of the thread's nodes, by tile; a pair of lanes each.
    ConvInputs<2> inputs[TILES];
    float2 values[TILES];  // v, then d
    float2 gates[TILES], seen[TILES], out[TILES];

    __device__ __forceinline__ explicit Values(Block<TILES>& b) : block(b), p(b.p) {
        const u32 all_lanes = p.heads_per_key * p.value_dim;
        first_lane = b.slice * p.lanes;
        num_lanes = min(p.lanes, all_lanes - first_lane);
        first_plane = first_lane / p.value_dim;
        num_planes = (first_lane + num_lanes - 1) / p.value_dim - first_plane + 1;
        works = b.warp * WARP_VALUES < num_lanes;
        own_lane = (works ? b.warp * WARP_VALUES : 0) + b.lane % 4 * 2;
        const u32 head = (first_lane + own_lane) / p.value_dim;
        column = first_lane + own_lane - head * p.value_dim;
        plane = head - first_plane;
        conv_weights.load(p, channel());
    }

    __device__ u32 group() const { return block.lane / 4; }
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

    // Starts to copy the state of an anchor to its stage, a row per warp.
    __device__ __forceinline__ void fetch_state(u32 anchor) {
        const u32 ring = (block.anchor_base / FOLD_INTERVAL + anchor) % STATE_RING, lane = block.lane * 2;
        const u32 in_head = min(first_lane + lane, first_lane + num_lanes - 2), head = in_head / p.value_dim;
        const u32 first_head = block.slot * STATE_RING * p.num_value_heads + ring * p.num_value_heads + block.key_head * p.heads_per_key;
        const float* from = p.states + static_cast<u64>(first_head + head) * p.key_dim * p.value_dim + in_head - head * p.value_dim;
        float* to = stage(anchor) + lane;
#pragma unroll 4
        for (u32 row = block.warp; row < KEY_LEN; row += BLOCK_WARPS) {
            const bool is_there = row < p.key_dim && lane < num_lanes;
            thread_copy_8(to + row * STATE_ROW, from + (is_there ? row * p.value_dim : 0), is_there);
        }
        const u32 shift = stage_of(anchor) * 8;
        staged = (staged & ~(0xFFu << shift)) | (anchor + 1) << shift;
    }

    // Starts to fetch what was committed: states, logged updates and decays.
    __device__ __forceinline__ void fetch_committed() {
        const u32 last = min(block.anchor_index(block.max_depth), p.num_states - 1);
#pragma unroll 1
        for (u32 anchor = 0; anchor <= last; anchor++) fetch_state(anchor);
        // Half a warp an entry; zeros up to a whole batch.
        const u32 lane = block.lane % 16 * 4, first_value = block.key_head * p.heads_per_key * p.value_dim + first_lane;
#pragma unroll
        for (u32 i = 0; i < MAX_LOG_ENTRIES; i += 2 * BLOCK_WARPS) {
            const u32 entry = i + threadIdx.x / 16;
            const bool is_there = entry < block.log_len && lane < num_lanes;
            const u32 row = is_there ? block.log_row(entry) : 0;
            const float* from = p.log_d + static_cast<u64>(row) * block.values_len() + (is_there ? first_value + lane : 0);
            thread_copy_16(block.memory + p.shared.log_d + entry * MAX_LANES + lane, from, is_there);
        }
        thread_copy_commit();
        if (threadIdx.x < block.log_len) {
            const float* from = p.log_g + block.log_row(threadIdx.x) * p.num_value_heads + head_of(0);
            for (u32 of_plane = 0; of_plane < num_planes; of_plane++) block.rows.log_decay[of_plane][threadIdx.x] = from[of_plane];
        }
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

    // Starts to load what v and the output gate are made of.
    __device__ __forceinline__ void load_values() {
#pragma unroll
        for (u32 tile = 0; tile < TILES; tile++) {
            inputs[tile].load(block, row_of(tile), channel());
            gates[tile] = *reinterpret_cast<const float2*>(p.z + place_of(tile));
        }
    }

    __device__ __forceinline__ void make_values() {
#pragma unroll
        for (u32 tile = 0; tile < TILES; tile++) {
            values[tile] = {inputs[tile].result(conv_weights, 0), inputs[tile].result(conv_weights, 1)};
            gates[tile] = {silu(gates[tile].x), silu(gates[tile].y)};
        }
    }

    // Products of k (into `seen`) and q (into `out`) with the states that the nodes read.
    __device__ __forceinline__ void multiply_states() {
        u32 anchors[TILES], least = ~0u, most = 0;
#pragma unroll
        for (u32 tile = 0; tile < TILES; tile++) {
            anchors[tile] = block.anchor_index(block.rows.depth[row_of(tile)]);
            least = min(least, anchors[tile]), most = max(most, anchors[tile]);
        }
        least = __reduce_min_sync(0xFFFFFFFF, least), most = __reduce_max_sync(0xFFFFFFFF, most);
#pragma unroll 1
        for (u32 anchor = least; anchor <= most; anchor++) {
            if ((staged >> stage_of(anchor) * 8 & 0xFF) != anchor + 1) {
                __syncthreads();
                fetch_state(anchor);
                thread_copy_commit();
                thread_copy_wait<0>();
                __syncthreads();
            }
            if (works) multiply_state(anchor, anchors);
        }
    }

    __device__ __forceinline__ void multiply_state(u32 anchor, const u32 (&anchors)[TILES]) {
        const float* state = stage(anchor) + block.lane % 4 * 4 * STATE_ROW + block.warp * WARP_VALUES + group();
        const float* keys = block.key_place(0, 0, 0, 0) + block.lane * 4;
        SplitSums sums[TILES];
#pragma unroll
        for (u32 tile = 0; tile < TILES; tile++) sums[tile] = {};
#pragma unroll 2
        for (u32 step = 0; step < KEY_STEPS; step++) {
            const float* at = state + step * KEY_STEP * STATE_ROW;
            const SplitColumn column_of_state = split_column({at[0], at[STATE_ROW], at[2 * STATE_ROW], at[3 * STATE_ROW]});
#pragma unroll
            for (u32 tile = 0; tile < TILES; tile++) {
                const float* pair = keys + (tile * KEY_STEPS + step) * FRAGMENT_LEN;
                const float4 k = *reinterpret_cast<const float4*>(pair), q = *reinterpret_cast<const float4*>(pair + WARP_LANES * 4);
                multiply_split(sums[tile], split_pair(k, q), column_of_state);
            }
        }
#pragma unroll
        for (u32 tile = 0; tile < TILES; tile++) {
            const bool reads = anchors[tile] == anchor;
            seen[tile] = {reads ? sums[tile].value(0) : seen[tile].x, reads ? sums[tile].value(1) : seen[tile].y};
            out[tile] = {reads ? sums[tile].value(2) : out[tile].x, reads ? sums[tile].value(3) : out[tile].y};
        }
    }

    // Turns products into factors: times the decay from each entry to each node, and zero for logged entries that a node
    // does not read. A warp takes a node; its lanes are positions modulo 32, and sums of log decays run from the node
    // backwards, in three stretches of them.
    __device__ __forceinline__ void make_factors() const {
#pragma unroll 1
        for (u32 node = block.warp; node < block.count; node += BLOCK_WARPS) {
            // The products lie where the first head's factors go.
#pragma unroll 1
            for (u32 of_plane = num_planes; of_plane-- > 0;) weigh_node(node, of_plane);
        }
    }

    __device__ __forceinline__ void weigh_node(u32 node, u32 of_plane) const {
        constexpr u32 STRETCHES = MAX_LOG_ENTRIES / WARP_LANES;
        const Rows& rows = block.rows;
        const u32 row = block.first + node, lane = block.lane, depth = rows.depth[row], log_len = block.log_len;
        const u32 start = block.anchor_index(depth) * FOLD_INTERVAL, end = log_len + depth;  // the row's own entry
        float sums[STRETCHES];
        float2 products[STRETCHES];
        u32 places[STRETCHES];
#pragma unroll
        for (u32 i = 0; i < STRETCHES; i++) {
            const u32 entry = start + i * WARP_LANES + lane;
            const bool is_logged = entry < log_len;
            const u32 level = is_logged ? 0 : min(entry - log_len, depth);
            places[i] = is_logged ? entry : MAX_LOG_ENTRIES + level;
            const float logged = rows.log_decay[of_plane][is_logged ? entry : 0], of_path = rows.decay[of_plane][rows.ancestors[level][row]];
            products[i] = block.factors(0, places[i])[node];
            sums[i] = is_logged ? logged : entry <= end ? of_path : 0.0f;
        }
        // From each position to the end of its stretch.
#pragma unroll
        for (u32 distance = 1; distance < WARP_LANES; distance *= 2) {
#pragma unroll
            for (u32 i = 0; i < STRETCHES; i++) {
                const float later = __shfl_down_sync(0xFFFFFFFF, sums[i], distance);
                sums[i] += lane + distance < WARP_LANES ? later : 0.0f;
            }
        }
        float behind = 0.0f;  // of later stretches
#pragma unroll
        for (u32 i = STRETCHES; i-- > 0;) {
            const float later = __shfl_down_sync(0xFFFFFFFF, sums[i], 1), whole = __shfl_sync(0xFFFFFFFF, sums[i], 0);
            const float decay = expf((lane + 1 < WARP_LANES ? later : 0.0f) + behind);
            if (start + i * WARP_LANES + lane < end) block.factors(of_plane, places[i])[node] = {decay * products[i].x, decay * products[i].y};
            behind += whole;
        }
        if (lane == 0) block.rows.from_state[of_plane][row] = expf(behind);
        // Logged entries before the anchor, and behind the log to the end of a batch.
        const u32 batches_end = (log_len + LOG_BATCH - 1) / LOG_BATCH * LOG_BATCH;
#pragma unroll 1
        for (u32 entry = lane; entry < min(start, log_len); entry += WARP_LANES) block.factors(of_plane, entry)[node] = {0.0f, 0.0f};
        if (log_len + lane < batches_end) block.factors(of_plane, log_len + lane)[node] = {0.0f, 0.0f};
    }

    __device__ __forceinline__ static void add_entry(float2& seen, float2& out, float2 factor, float2 d) {
        seen.x = __fmaf_rn(factor.x, d.x, seen.x), seen.y = __fmaf_rn(factor.x, d.y, seen.y);
        out.x = __fmaf_rn(factor.y, d.x, out.x), out.y = __fmaf_rn(factor.y, d.y, out.y);
    }

    // From the products with the state to d (over v) and o.
    __device__ __forceinline__ void add_entries() {
        if (!works) return;
#pragma unroll
        for (u32 tile = 0; tile < TILES; tile++) {
            const float scale = block.rows.from_state[plane][row_of(tile)];
            // Never minus zero, to which a factor of zero would make a difference.
            seen[tile] = {__fadd_rn(__fmul_rn(scale, seen[tile].x), 0.0f), __fadd_rn(__fmul_rn(scale, seen[tile].y), 0.0f)};
            out[tile] = {__fadd_rn(__fmul_rn(scale, out[tile].x), 0.0f), __fadd_rn(__fmul_rn(scale, out[tile].y), 0.0f)};
        }
        add_log();
        add_paths();
    }

    __device__ __forceinline__ void add_log() {
        const float* log_d = block.memory + p.shared.log_d + own_lane;
        const float2* factors = block.factors(plane, 0) + group();
        constexpr u32 HALF = TILES > 2 ? LOG_BATCH / 2 : LOG_BATCH;  // registers are few
#pragma unroll 1
        for (u32 entry = 0; entry < block.log_len; entry += HALF) {
            float2 d[HALF], factor[HALF][TILES];
#pragma unroll
            for (u32 i = 0; i < HALF; i++) {
                d[i] = *reinterpret_cast<const float2*>(log_d + (entry + i) * MAX_LANES);
#pragma unroll
                for (u32 tile = 0; tile < TILES; tile++) factor[i][tile] = factors[(entry + i) * block.NODE_STRIDE + tile * TILE_NODES];
            }
#pragma unroll
            for (u32 i = 0; i < HALF; i++) {
#pragma unroll
                for (u32 tile = 0; tile < TILES; tile++) add_entry(seen[tile], out[tile], factor[i][tile], d[i]);
            }
        }
    }

    __device__ __forceinline__ void add_paths() {
        float* updates = block.memory + p.shared.updates + own_lane;
        const float2* factors = block.factors(plane, MAX_LOG_ENTRIES) + group();
        u32 depth[TILES], row[TILES], last = 0;
        float beta[TILES], own[TILES];
#pragma unroll
        for (u32 tile = 0; tile < TILES; tile++) {
            row[tile] = row_of(tile);
            last = max(last, block.rows.depth[row[tile]]);
            depth[tile] = node_of(tile) < block.count ? block.rows.depth[row[tile]] : NO_DEPTH;
            beta[tile] = block.rows.beta[plane][row[tile]];
            own[tile] = block.factors(0, block.own_entry())[node_of(tile)].y;
        }
        last = __reduce_max_sync(0xFFFFFFFF, last);
#pragma unroll 1
        for (u32 level = 0; level <= last; level++) {
            float2 factor[TILES];
            u32 source[TILES];
#pragma unroll
            for (u32 tile = 0; tile < TILES; tile++) {
                source[tile] = block.rows.ancestors[level][row[tile]];
                factor[tile] = factors[level * block.NODE_STRIDE + tile * TILE_NODES];
            }
#pragma unroll
            for (u32 tile = 0; tile < TILES; tile++) {
                // d of the nodes that have all their entries.
                if (depth[tile] != level) continue;
                const float2 d = {__fmul_rn(beta[tile], __fsub_rn(values[tile].x, seen[tile].x)), __fmul_rn(beta[tile], __fsub_rn(values[tile].y, seen[tile].y))};
                values[tile] = d;
                *reinterpret_cast<float2*>(updates + row[tile] * UPDATE_ROW) = d;
            }
            __syncwarp();
#pragma unroll
            for (u32 tile = 0; tile < TILES; tile++) {
                const float2 d = *reinterpret_cast<const float2*>(updates + source[tile] * UPDATE_ROW);
                if (depth[tile] > level) add_entry(seen[tile], out[tile], factor[tile], d);
            }
        }
#pragma unroll
        for (u32 tile = 0; tile < TILES; tile++) {
            out[tile] = {__fmaf_rn(own[tile], values[tile].x, out[tile].x), __fmaf_rn(own[tile], values[tile].y, out[tile].y)};
            if (stores(tile)) *reinterpret_cast<float2*>(p.tail_d + place_of(tile)) = values[tile];
        }
    }

    // Squares of o over the warp's lanes.
    __device__ __forceinline__ float square_sum(u32 tile) const {
        float squares = __fmaf_rn(out[tile].y, out[tile].y, out[tile].x * out[tile].x);
        squares += __shfl_xor_sync(0xFFFFFFFF, squares, 1);
        squares += __shfl_xor_sync(0xFFFFFFFF, squares, 2);
        return squares;
    }

    __device__ u32 num_groups() const { return p.num_slices * p.lanes / WARP_VALUES; }
    __device__ u32 own_group() const { return (first_lane + own_lane) / WARP_VALUES; }

    // Gives the squares of the own lanes to all blocks of the key head: each thread of a node to every fourth.
    __device__ __forceinline__ void share_squares() const {
        if (!works) return;
        const u32 base = shared_address(block.memory + p.shared.squares + group() * num_groups() + own_group());
        float squares[TILES];
#pragma unroll
        for (u32 tile = 0; tile < TILES; tile++) squares[tile] = square_sum(tile);
#pragma unroll
        for (u32 i = 0; i < 2; i++) {
            const u32 rank = block.lane % 4 + i * 4;
            const u32 there = address_in_block(base, min(rank, p.num_slices - 1));
#pragma unroll
            for (u32 tile = 0; tile < TILES; tile++) {
                const bool is_wanted = rank < p.num_slices && node_of(tile) < block.count;
                store_in_block(there + tile * TILE_NODES * num_groups() * sizeof(float), squares[tile], is_wanted);
            }
        }
    }

    // y from o and the squares of all lanes of its head, in their order.
    __device__ __forceinline__ void store_outputs() const {
        const u32 num_squares = p.value_dim / WARP_VALUES, first = own_group() - column / WARP_VALUES;
        const float2 weight = *reinterpret_cast<const float2*>(p.norm_weight + column);
        const float* squares = block.memory + p.shared.squares + group() * num_groups() + first;
        float sums[TILES] = {};
#pragma unroll 4
        for (u32 i = 0; i < num_squares; i++) {
#pragma unroll
            for (u32 tile = 0; tile < TILES; tile++) sums[tile] += squares[tile * TILE_NODES * num_groups() + i];
        }
#pragma unroll
        for (u32 tile = 0; tile < TILES; tile++) {
            if (stores(tile)) store_output(p.y + place_of(tile), out[tile], norm_scale(p, sums[tile]), weight, gates[tile]);
        }
    }

    // o and its squares, for a later launch.
    __device__ __forceinline__ void keep_outputs() const {
#pragma unroll
        for (u32 tile = 0; tile < TILES; tile++) {
            const float squares = square_sum(tile);
            if (!stores(tile)) continue;
            *reinterpret_cast<float2*>(p.y + place_of(tile)) = out[tile];
            if (block.lane % 4 == 0) p.squares[place_of(tile) / WARP_VALUES] = squares;
        }
    }
};
