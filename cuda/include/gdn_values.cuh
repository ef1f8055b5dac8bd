// The recurrence of gdn_wy for the value lanes of one block, from products of keys to outputs.
//
// A warp has eight value lanes and all nodes of the chunk, spread over its threads as a matrix instruction leaves them:
// thread 4g + c has lanes 2c and 2c + 1 of the nodes g, g + 8, .. So from the products with the state to d and o no
// thread waits for another warp. Entries are added in the order of positions, one fused multiply-add each.
#pragma once

#include "gdn_block.cuh"

template <u32 TILES>
struct Values {
    static constexpr u32 NODES = TILES * TILE_NODES;
    static constexpr u32 NO_ANCHOR = ~0u;

    Block& block;
    const GdnWyParams& p;
    u32 first_lane;               // of the block, within the key head's value lanes
    u32 num_lanes;
    u32 first_plane, num_planes;  // value heads of the block, counted within the key head
    bool works;                   // whether the warp has lanes
    u32 own_lane;                 // the thread's first, within the block
    u32 group, column;            // g, and the own first lane within its value head
    u32 plane;                    // its value head
    ConvWeights<2> conv_weights;
    u32 staged = 0;               // anchors whose states lie in shared memory, a byte each, plus one
    // Of the thread's nodes, by tile; a pair of lanes each.
    float2 values[TILES], gates[TILES], seen[TILES], out[TILES];

    __device__ explicit Values(Block& b) : block(b), p(b.p) {
        const u32 all_lanes = b.heads_per_key() * p.value_dim;
        first_lane = b.slice * p.lanes;
        num_lanes = min(p.lanes, all_lanes - first_lane);
        first_plane = first_lane / p.value_dim;
        num_planes = (first_lane + num_lanes - 1) / p.value_dim - first_plane + 1;
        works = b.warp * WARP_VALUES < num_lanes;
        own_lane = (works ? b.warp * WARP_VALUES : 0) + b.lane % 4 * 2;
        group = b.lane / 4;
        const u32 head = (first_lane + own_lane) / p.value_dim;
        column = first_lane + own_lane - head * p.value_dim;
        plane = head - first_plane;
        if (works) conv_weights.load(p, channel());
    }

    __device__ u32 head_of(u32 of_plane) const { return block.key_head * block.heads_per_key() + first_plane + of_plane; }
    // The thread's first value of a row.
    __device__ u64 value_place(u64 row) const { return row * block.values_len() + head_of(plane) * p.value_dim + column; }
    __device__ u32 channel() const { return 2 * block.keys_len() + static_cast<u32>(value_place(0)); }
    __device__ u32 node_of(u32 tile) const { return tile * TILE_NODES + group; }
    __device__ u64 row_of(u32 tile) const { return block.segment.first_row + block.first + node_of(tile); }
    __device__ bool has_node(u32 tile) const { return node_of(tile) < block.count; }

    __device__ u32 state_row() const { return p.lanes + STATE_PAD; }
    __device__ float* stage(u32 anchor) const {
        return block.memory + p.shared.states + anchor % p.num_states * block.key_steps() * KEY_STEP * state_row();
    }

    // Starts to copy the state of an anchor to its stage.
    __device__ __forceinline__ void fetch_state(u32 anchor) {
        const u32 ring = (block.anchor_base / FOLD_INTERVAL + anchor) % STATE_RING;
        const float* states = p.states + static_cast<u64>(block.segment.slot * STATE_RING + ring) * block.values_len() * p.key_dim;
        float* to = stage(anchor);
        const u32 pairs = p.lanes / 2, num_pairs = block.key_steps() * KEY_STEP * pairs;
        for (u32 i = threadIdx.x; i < num_pairs; i += BLOCK_THREADS) {
            const u32 row = i / pairs, lane = i % pairs * 2;
            const bool is_there = row < p.key_dim && lane < num_lanes;
            const u32 head = (first_lane + lane) / p.value_dim;
            const float* from = states + (static_cast<u64>(head + block.key_head * block.heads_per_key()) * p.key_dim + row) * p.value_dim;
            thread_copy_8(to + row * state_row() + lane, is_there ? from + first_lane + lane - head * p.value_dim : states, is_there);
        }
        const u32 shift = anchor % p.num_states * 8;
        staged = (staged & ~(0xFFu << shift)) | (anchor + 1) << shift;
    }

    // Starts to fetch what was committed: states, logged updates and decays.
    __device__ __forceinline__ void fetch_committed() {
        const u32 last = block.anchor_index_at(block.max_depth);
        for (u32 anchor = 0; anchor <= last && anchor < p.num_states; anchor++) fetch_state(anchor);
        const u32 quads = p.lanes / 4, first_value = block.key_head * block.heads_per_key() * p.value_dim + first_lane;
        for (u32 i = threadIdx.x; i < block.log_len * quads; i += BLOCK_THREADS) {
            const u32 entry = i / quads, lane = i % quads * 4;
            float* to = block.memory + p.shared.log_d + entry * p.lanes + lane;
            if (lane < num_lanes) thread_copy_16(to, p.log_d + block.log_row(entry) * block.values_len() + first_value + lane, true);
        }
        thread_copy_commit();
        for (u32 i = threadIdx.x; i < MAX_LOG_ENTRIES * num_planes; i += BLOCK_THREADS) {
            const u32 of_plane = i / MAX_LOG_ENTRIES, entry = i % MAX_LOG_ENTRIES;
            if (entry < block.log_len) block.rows.log_decay[of_plane][entry] = p.log_g[block.log_row(entry) * p.num_value_heads + head_of(of_plane)];
        }
    }

    // Decay and update strength of all rows of the segment.
    __device__ __forceinline__ void make_gates() const {
        for (u32 i = threadIdx.x; i < num_planes * MAX_SEGMENT_ROWS; i += BLOCK_THREADS) {
            const u32 of_plane = i / MAX_SEGMENT_ROWS, row = i % MAX_SEGMENT_ROWS, head = head_of(of_plane);
            if (row >= block.segment.num_rows) continue;
            const u64 at = static_cast<u64>(block.segment.first_row + row) * p.num_value_heads + head;
            const float x = p.a[at] + p.dt_bias[head];
            const float softplus = fmaxf(x, 0.0f) + log1pf(expf(-fabsf(x)));
            const float decay = -expf(p.a_log[head]) * softplus;
            block.rows.decay[of_plane][row] = decay;
            block.rows.beta[of_plane][row] = 1.0f / (1.0f + expf(-p.b[at]));
            // The block with a head's first lane writes it down.
            if ((first_plane + of_plane) * p.value_dim >= first_lane) p.tail_g[at] = decay;
        }
    }

    // v and the inputs of the output gate.
    __device__ __forceinline__ void load_values() {
        if (!works) return;
#pragma unroll
        for (u32 tile = 0; tile < TILES; tile++) {
            if (!has_node(tile)) continue;
            ConvInputs<2> inputs;
            inputs.load(block, block.first + node_of(tile), channel());
            gates[tile] = *reinterpret_cast<const float2*>(p.z + value_place(row_of(tile)));
            values[tile] = {inputs.result(conv_weights, p.num_taps, 0), inputs.result(conv_weights, p.num_taps, 1)};
        }
    }

    // Products of k (into `seen`) and q (into `out`) with the states that the nodes read.
    __device__ __forceinline__ void multiply_states() {
        u32 anchors[TILES], least = NO_ANCHOR, most = 0;
#pragma unroll
        for (u32 tile = 0; tile < TILES; tile++) {
            anchors[tile] = has_node(tile) ? block.anchor_index(block.first + node_of(tile)) : NO_ANCHOR;
            least = min(least, anchors[tile]);
            if (has_node(tile)) most = max(most, anchors[tile]);
        }
        least = __reduce_min_sync(0xFFFFFFFF, least), most = __reduce_max_sync(0xFFFFFFFF, most);
        for (u32 anchor = least; anchor <= most; anchor++) {
            if ((staged >> anchor % p.num_states * 8 & 0xFF) != anchor + 1) {
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
        const float* state = stage(anchor) + block.lane % 4 * 4 * state_row() + block.warp * WARP_VALUES + group;
        SplitSums sums[TILES];
        bool reads[TILES];
#pragma unroll
        for (u32 tile = 0; tile < TILES; tile++) {
            sums[tile] = {};
            reads[tile] = __any_sync(0xFFFFFFFF, anchors[tile] == anchor);
        }
#pragma unroll 2
        for (u32 step = 0; step < block.key_steps(); step++) {
            const float* at = state + step * KEY_STEP * state_row();
            const SplitColumn column_of_state = split_column({at[0], at[state_row()], at[2 * state_row()], at[3 * state_row()]});
#pragma unroll
            for (u32 tile = 0; tile < TILES; tile++) {
                if (!reads[tile]) continue;
                const float* keys = block.key_place(tile * TILE_NODES, step, 0, 0) + block.lane * 4;
                const float4 k = *reinterpret_cast<const float4*>(keys), q = *reinterpret_cast<const float4*>(keys + WARP_LANES * 4);
                multiply_split(sums[tile], split_pair(k, q), column_of_state);
            }
        }
#pragma unroll
        for (u32 tile = 0; tile < TILES; tile++) {
            if (anchors[tile] != anchor) continue;
            seen[tile] = {sums[tile].value(0), sums[tile].value(1)};
            out[tile] = {sums[tile].value(2), sums[tile].value(3)};
        }
    }

    // Turns products into factors: times the decay from each entry to each node. A warp takes a node; its lanes are
    // positions modulo 32, and sums of log decays run from the node backwards, in three stretches of them.
    __device__ __forceinline__ void make_factors() const {
        for (u32 node = block.warp; node < block.count; node += BLOCK_WARPS) {
            // The products lie where the first head's factors go.
            for (u32 of_plane = num_planes; of_plane-- > 0;) weigh_node(node, of_plane);
        }
    }

    __device__ __forceinline__ void weigh_node(u32 node, u32 of_plane) const;

    // From the products with the state to d and o.
    __device__ __forceinline__ void add_entries() {
        if (!works) return;
        u32 start[TILES], depth[TILES];
        u32 least = block.log_len;
#pragma unroll
        for (u32 tile = 0; tile < TILES; tile++) {
            const u32 row = block.first + node_of(tile);
            start[tile] = has_node(tile) ? block.anchor_index(row) * FOLD_INTERVAL : block.log_len;
            depth[tile] = has_node(tile) ? block.rows.depth[row] : 0;
            least = min(least, start[tile]);
            const float scale = has_node(tile) ? block.rows.from_state[plane][block.first + node_of(tile)] : 0.0f;
            // Never minus zero, to which a factor of zero would make a difference.
            seen[tile] = {__fadd_rn(__fmul_rn(scale, seen[tile].x), 0.0f), __fadd_rn(__fmul_rn(scale, seen[tile].y), 0.0f)};
            out[tile] = {__fadd_rn(__fmul_rn(scale, out[tile].x), 0.0f), __fadd_rn(__fmul_rn(scale, out[tile].y), 0.0f)};
        }
        least = __reduce_min_sync(0xFFFFFFFF, least);
        add_log(least, start);
        add_paths(depth);
    }

    __device__ __forceinline__ void add_entry(u32 tile, float2 factor, float2 d) {
        seen[tile].x = __fmaf_rn(factor.x, d.x, seen[tile].x), seen[tile].y = __fmaf_rn(factor.x, d.y, seen[tile].y);
        out[tile].x = __fmaf_rn(factor.y, d.x, out[tile].x), out[tile].y = __fmaf_rn(factor.y, d.y, out[tile].y);
    }

    __device__ __forceinline__ void add_log(u32 first_entry, const u32 (&start)[TILES]) {
        const float* log_d = block.memory + p.shared.log_d + own_lane;
        const float2* factors = block.factors(plane, 0) + group;
#pragma unroll 8
        for (u32 entry = first_entry; entry < block.log_len; entry++) {
            const float2 d = *reinterpret_cast<const float2*>(log_d + entry * p.lanes);
#pragma unroll
            for (u32 tile = 0; tile < TILES; tile++) {
                if (tile >= block.tiles) continue;
                float2 factor = factors[entry * block.node_stride + tile * TILE_NODES];
                if (entry < start[tile]) factor = {0.0f, 0.0f};
                add_entry(tile, factor, d);
            }
        }
    }

    __device__ __forceinline__ void add_paths(const u32 (&depth)[TILES]) {
        const u32 row_len = p.lanes + UPDATE_PAD;
        float* updates = block.memory + p.shared.updates + own_lane;
        u32 deepest[TILES], last = 0;  // of each tile
#pragma unroll
        for (u32 tile = 0; tile < TILES; tile++) {
            deepest[tile] = __reduce_max_sync(0xFFFFFFFF, depth[tile]);
            last = max(last, deepest[tile]);
        }
#pragma unroll 1
        for (u32 level = 0; level <= last; level++) {
#pragma unroll
            for (u32 tile = 0; tile < TILES; tile++) {
                if (level <= deepest[tile] && has_node(tile) && depth[tile] == level) finish(tile, updates);
            }
            __syncwarp();
#pragma unroll
            for (u32 tile = 0; tile < TILES; tile++) {
                if (level < deepest[tile] && depth[tile] > level) {
                    const u32 row = block.rows.ancestors[level][block.first + node_of(tile)];
                    const float2 factor = block.factors(plane, block.log_len + level)[node_of(tile)];
                    add_entry(tile, factor, *reinterpret_cast<const float2*>(updates + row * row_len));
                }
            }
        }
    }

    // d and o of a node whose entries are all in its sums.
    __device__ __forceinline__ void finish(u32 tile, float* updates) {
        const u32 row = block.first + node_of(tile);
        const float beta = block.rows.beta[plane][row];
        const float own = block.factors(0, p.max_entries)[node_of(tile)].y;
        const float2 d = {__fmul_rn(beta, __fsub_rn(values[tile].x, seen[tile].x)), __fmul_rn(beta, __fsub_rn(values[tile].y, seen[tile].y))};
        *reinterpret_cast<float2*>(updates + row * (p.lanes + UPDATE_PAD)) = d;
        *reinterpret_cast<float2*>(p.tail_d + value_place(row_of(tile))) = d;
        out[tile] = {__fmaf_rn(own, d.x, out[tile].x), __fmaf_rn(own, d.y, out[tile].y)};
    }

    // Squares of o over the warp's lanes.
    __device__ float square_sum(u32 tile) const {
        float squares = __fmaf_rn(out[tile].y, out[tile].y, out[tile].x * out[tile].x);
        squares += __shfl_xor_sync(0xFFFFFFFF, squares, 1);
        squares += __shfl_xor_sync(0xFFFFFFFF, squares, 2);
        return squares;
    }

    __device__ u32 num_groups() const { return p.num_slices * p.lanes / WARP_VALUES; }
    __device__ u32 own_group() const { return (first_lane + own_lane) / WARP_VALUES; }

    // Gives the squares of the own lanes to all blocks of the key head.
    __device__ void share_squares() const {
        if (!works) return;
#pragma unroll
        for (u32 tile = 0; tile < TILES; tile++) {
            const float squares = square_sum(tile);
            if (!has_node(tile)) continue;
            const u32 address = shared_address(block.memory + p.shared.squares + node_of(tile) * num_groups() + own_group());
            for (u32 rank = block.lane % 4; rank < p.num_slices; rank += 4) store_in_block(address_in_block(address, rank), squares);
        }
    }

    // y from o and the squares of all lanes of its head, in their order.
    __device__ void store_outputs() const {
        if (!works) return;
        const u32 num_squares = p.value_dim / WARP_VALUES, first = own_group() - column / WARP_VALUES;
        const float2 weight = *reinterpret_cast<const float2*>(p.norm_weight + column);
#pragma unroll
        for (u32 tile = 0; tile < TILES; tile++) {
            if (!has_node(tile)) continue;
            const float* squares = block.memory + p.shared.squares + node_of(tile) * num_groups() + first;
            float sum = 0.0f;
#pragma unroll 16
            for (u32 i = 0; i < num_squares; i++) sum += squares[i];
            store_output(p.y + value_place(row_of(tile)), out[tile], norm_scale(p, sum), weight, gates[tile]);
        }
    }

    // o and its squares, for a later launch.
    __device__ void keep_outputs() const {
        if (!works) return;
#pragma unroll
        for (u32 tile = 0; tile < TILES; tile++) {
            const float squares = square_sum(tile);
            if (!has_node(tile)) continue;
            const u64 place = value_place(row_of(tile));
            *reinterpret_cast<float2*>(p.y + place) = out[tile];
            if (block.lane % 4 == 0) p.squares[place / WARP_VALUES] = squares;
        }
    }

    __device__ static float norm_scale(const GdnWyParams& p, float squares) {
        return 1.0f / sqrtf(squares / static_cast<float>(p.value_dim) + p.norm_eps);
    }

    __device__ static void store_output(float* y, float2 o, float scale, float2 weight, float2 z) {
        *reinterpret_cast<float2*>(y) = {o.x * scale * weight.x * silu(z.x), o.y * scale * weight.y * silu(z.y)};
    }
};

template <u32 TILES>
__device__ __forceinline__ void Values<TILES>::weigh_node(u32 node, u32 of_plane) const {
    constexpr u32 STRETCHES = MAX_LOG_ENTRIES / WARP_LANES;
    const Rows& rows = block.rows;
    const u32 row = block.first + node, lane = block.lane;
    const u32 start = block.anchor_index(row) * FOLD_INTERVAL, end = block.log_len + rows.depth[row];  // the row's own entry
    float sums[STRETCHES];
#pragma unroll
    for (u32 i = 0; i < STRETCHES; i++) {
        const u32 entry = start + i * WARP_LANES + lane;
        sums[i] = 0.0f;
        if (entry < block.log_len) {
            sums[i] = rows.log_decay[of_plane][entry];
        } else if (entry <= end) {
            sums[i] = rows.decay[of_plane][rows.ancestors[entry - block.log_len][row]];
        }
    }
    // From each position to the end of its stretch.
#pragma unroll
    for (u32 distance = 1; distance < WARP_LANES; distance *= 2) {
#pragma unroll
        for (u32 i = 0; i < STRETCHES; i++) {
            const float later = __shfl_down_sync(0xFFFFFFFF, sums[i], distance);
            if (lane + distance < WARP_LANES) sums[i] += later;
        }
    }
    float behind = 0.0f;  // of later stretches
#pragma unroll
    for (u32 i = STRETCHES; i-- > 0;) {
        const float later = __shfl_down_sync(0xFFFFFFFF, sums[i], 1), whole = __shfl_sync(0xFFFFFFFF, sums[i], 0);
        const float decay = expf((lane + 1 < WARP_LANES ? later : 0.0f) + behind);
        const u32 entry = start + i * WARP_LANES + lane;
        if (entry < end) {
            const float2 product = block.factors(0, entry)[node];
            block.factors(of_plane, entry)[node] = {decay * product.x, decay * product.y};
        }
        behind += whole;
    }
    if (lane == 0) block.rows.from_state[of_plane][row] = expf(behind);
}
