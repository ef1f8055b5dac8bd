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

    __device__ __forceinline__ explicit Values(Block<TILES>& b) : block(b), p(b.p) {
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

    // Decays from the positions of the three stretches to the warp's nodes: node `warp` and every eighth from there. Lanes
    // are positions of a stretch; sums of log decays run from the node backwards, stretch by stretch.
    struct Decays {
        float values[TILES][3];
        float from_state[TILES];
    };

    __device__ u32 weighed_row(u32 i) const { return block.row_of(block.warp() + i * BLOCK_WARPS); }

    // Where a position of the stretches is found: its entry, counted from the segment's anchor, which may lie before 0.
    __device__ int first_entry(u32 row, u32 stretch) const {
        return static_cast<int>((block.position_of(row) / STRETCH + stretch) * STRETCH) - static_cast<int>(2 * STRETCH + block.anchor_base);
    }

    __device__ __forceinline__ Decays make_decays(u32 of_plane) const {
        const Rows& rows = block.rows;
        const u32 lane = block.lane();
        Decays decays;
        float sums[TILES][3];
#pragma unroll
        for (u32 i = 0; i < TILES; i++) {
            const u32 row = weighed_row(i), depth = rows.depth[row];
#pragma unroll
            for (u32 stretch = 0; stretch < 3; stretch++) {
                const int entry = first_entry(row, stretch) + static_cast<int>(lane), behind_log = entry - static_cast<int>(block.log_len);
                const bool is_logged = behind_log < 0, is_there = entry >= 0 && behind_log <= static_cast<int>(depth);
                const float logged = rows.log_decay[of_plane][is_logged && entry > 0 ? entry : 0];
                const float of_path = rows.decay[of_plane][rows.ancestors[is_logged || !is_there ? 0 : behind_log][row]];
                sums[i][stretch] = is_there ? (is_logged ? logged : of_path) : 0.0f;
            }
        }
        // From each position to the end of its stretch.
#pragma unroll
        for (u32 distance = 1; distance < WARP_LANES; distance *= 2) {
            const bool adds = lane + distance < WARP_LANES;
#pragma unroll
            for (u32 i = 0; i < TILES; i++) {
#pragma unroll
                for (u32 stretch = 0; stretch < 3; stretch++) {
                    const float later = __shfl_down_sync(0xFFFFFFFF, sums[i][stretch], distance);
                    sums[i][stretch] += adds ? later : 0.0f;
                }
            }
        }
#pragma unroll
        for (u32 i = 0; i < TILES; i++) {
            float behind = 0.0f;  // of later stretches
#pragma unroll
            for (u32 stretch = 3; stretch-- > 0;) {
                const float later = __shfl_down_sync(0xFFFFFFFF, sums[i][stretch], 1), whole = __shfl_sync(0xFFFFFFFF, sums[i][stretch], 0);
                decays.values[i][stretch] = expf((lane + 1 < WARP_LANES ? later : 0.0f) + behind);
                behind += whole;
            }
            decays.from_state[i] = expf(behind);
        }
        return decays;
    }

    // Products times decays, where the sums look for them.
    __device__ __forceinline__ void weigh_products(u32 of_plane, const Decays& decays) const {
        const u32 lane = block.lane();
#pragma unroll
        for (u32 i = 0; i < TILES; i++) {
            const u32 node = block.warp() + i * BLOCK_WARPS, row = weighed_row(i);
            if (node >= block.count) break;
            float* weighed = block.weighed(of_plane) + node / TILE_NODES * 2 * STRETCH_STEPS * FRAGMENT_LEN;
#pragma unroll
            for (u32 stretch = 0; stretch < 3; stretch++) {
                const int entry = first_entry(row, stretch) + static_cast<int>(lane), behind_log = entry - static_cast<int>(block.log_len);
                if (entry < 0 || behind_log >= static_cast<int>(block.rows.depth[row])) continue;
                const float2 product = block.products(behind_log < 0 ? entry : MAX_LOG_ENTRIES + behind_log)[node];
                const float2 factor = {decays.values[i][stretch] * product.x, decays.values[i][stretch] * product.y};
                if (stretch == 2) {
                    block.own(of_plane)[lane * block.NODE_STRIDE + node] = factor;
                } else {
                    float* to = weighed + (stretch * STRETCH_STEPS + lane / 16) * FRAGMENT_LEN + node % TILE_NODES * 16 + lane % 16;
                    to[0] = factor.x, to[WARP_LANES * 4] = factor.y;
                }
            }
            if (lane == 0) block.rows.from_state[of_plane][row] = decays.from_state[i];
        }
    }

    __device__ __forceinline__ static void add_entry(float2& seen, float2& out, float2 factor, float2 d) {
        seen.x = __fmaf_rn(factor.x, d.x, seen.x), seen.y = __fmaf_rn(factor.x, d.y, seen.y);
        out.x = __fmaf_rn(factor.y, d.x, out.x), out.y = __fmaf_rn(factor.y, d.y, out.y);
    }

    // From the products with the state to d (over v) and o.
    __device__ __forceinline__ void add_entries(const Places& at) {
        if (!works) return;
        SplitSums whole[TILES];  // over stretches before the own
#pragma unroll
        for (u32 tile = 0; tile < TILES; tile++) whole[tile] = {};
        add_committed(at, whole);
        float* updates = block.memory + p.shared.updates + own_lane;
#pragma unroll 1
        for (u32 stretch = 0; stretch <= at.last_stretch; stretch++) {
            if (stretch > 0) add_stretch(at, stretch, whole);
            enter_stretch(at, stretch, whole);
            const u32 begin = block.stretch_depth(stretch), end = min(block.stretch_depth(stretch + 1), at.last_depth + 1);
            if (stretch == 0) add_logged(at);
            add_paths(at, begin, end, updates);
        }
#pragma unroll
        for (u32 tile = 0; tile < TILES; tile++) {
            const float own = block.products(block.own_entry())[node_of(tile)].y;
            out[tile] = {__fmaf_rn(own, values[tile].x, out[tile].x), __fmaf_rn(own, values[tile].y, out[tile].y)};
            if (stores(tile)) *reinterpret_cast<float2*>(p.tail_d + place_of(tile)) = values[tile];
        }
    }

    // Adds one whole stretch, the first (0) or second (1) before the own, to the nodes that `reads` says.
    template <typename Column, typename Reads>
    __device__ __forceinline__ void add_whole(u32 which, SplitSums (&whole)[TILES], Column column_of_step, Reads reads) const {
        SplitSums sums[TILES];
#pragma unroll
        for (u32 tile = 0; tile < TILES; tile++) sums[tile] = whole[tile];
        const float* factors = block.weighed(plane) + which * STRETCH_STEPS * FRAGMENT_LEN + block.lane() * 4;
#pragma unroll(TILES == 1 ? STRETCH_STEPS : 1)
        for (u32 step = 0; step < STRETCH_STEPS; step++) {
            const SplitColumn by = column_of_step(step);
#pragma unroll
            for (u32 tile = 0; tile < TILES; tile++) multiply_tile(sums[tile], factors + (tile * 2 * STRETCH_STEPS + step) * FRAGMENT_LEN, by);
        }
#pragma unroll
        for (u32 tile = 0; tile < TILES; tile++) {
            if (reads(tile)) whole[tile] = sums[tile];
        }
    }

    // Whole stretches of logged entries.
    __device__ __forceinline__ void add_committed(const Places& at, SplitSums (&whole)[TILES]) const {
        const float* log_d = block.memory + p.shared.log_d + block.lane() % 4 * 4 * LOG_ROW + block.warp() * WARP_VALUES + group();
        const u32 own = block.committed_len / STRETCH;
#pragma unroll 1
        for (u32 stretch = 0; stretch <= min(at.last_stretch, 1u); stretch++) {
#pragma unroll 1
            for (u32 which = own + stretch < 2 ? 2 - own - stretch : 0; which + stretch < 2; which++) {
                const float* from = log_d + ((own + stretch + which - 2) * STRETCH - block.anchor_base) * LOG_ROW;
                add_whole(which, whole,
                          [&](u32 step) {
                              const float* rows = from + step * 16 * LOG_ROW;
                              return split_column({rows[0], rows[LOG_ROW], rows[2 * LOG_ROW], rows[3 * LOG_ROW]});
                          },
                          [&](u32 tile) { return at.stretch[tile] == stretch; });
            }
        }
    }

    // Whole stretches that end before `stretch` begins and are not all committed: each node's has its own ancestors, and
    // nodes that share the last of them share all.
    __device__ __forceinline__ void add_stretch(const Places& at, u32 stretch, SplitSums (&whole)[TILES]) const {
        const u32 last_level = block.stretch_depth(stretch) - 1, c = block.lane() % 4;
        const float* lanes = block.memory + block.warp() * WARP_VALUES + group();
#pragma unroll 1
        for (u32 which = 2; which-- > 0;) {
            // Nodes of `stretch` read it as the second, those of the next as the first.
            const u32 readers = stretch + 1 - which;
            u32 last[TILES];  // of the ancestors
#pragma unroll
            for (u32 tile = 0; tile < TILES; tile++) {
                const bool reads = at.depth[tile] != NO_DEPTH && at.stretch[tile] == readers;
                last[tile] = reads ? block.rows.ancestors[last_level][at.row[tile]] : ~0u;
            }
            while (true) {
                u32 next = ~0u;
#pragma unroll
                for (u32 tile = 0; tile < TILES; tile++) next = min(next, last[tile]);
                next = __reduce_min_sync(0xFFFFFFFF, next);
                if (next == ~0u) break;
                const auto d_of = [&](u32 step, u32 i) {
                    // How far the position lies behind the log.
                    const int level = static_cast<int>(last_level + 1 + step * 16 + c * 4 + i) - static_cast<int>(STRETCH);
                    const u32 logged = p.shared.log_d + (block.log_len + level) * LOG_ROW;
                    const u32 of_path = p.shared.updates + block.rows.ancestors[level < 0 ? 0 : level][next] * UPDATE_ROW;
                    return lanes[level < 0 ? logged : of_path];
                };
                add_whole(which, whole, [&](u32 step) { return split_column({d_of(step, 0), d_of(step, 1), d_of(step, 2), d_of(step, 3)}); },
                          [&](u32 tile) { return last[tile] == next; });
#pragma unroll
                for (u32 tile = 0; tile < TILES; tile++) last[tile] = last[tile] == next ? ~0u : last[tile];
            }
        }
    }

    // State and whole stretches together, for the nodes whose own stretch begins.
    __device__ __forceinline__ void enter_stretch(const Places& at, u32 stretch, const SplitSums (&whole)[TILES]) {
#pragma unroll
        for (u32 tile = 0; tile < TILES; tile++) {
            if (at.stretch[tile] != stretch) continue;
            const float scale = block.rows.from_state[plane][at.row[tile]];
            seen[tile] = {__fmaf_rn(scale, seen[tile].x, whole[tile].value(0)), __fmaf_rn(scale, seen[tile].y, whole[tile].value(1))};
            out[tile] = {__fmaf_rn(scale, out[tile].x, whole[tile].value(2)), __fmaf_rn(scale, out[tile].y, whole[tile].value(3))};
        }
    }

    // Logged entries of the stretch in which the segment begins.
    __device__ __forceinline__ void add_logged(const Places& at) {
        const u32 count = block.committed_len % STRETCH;
        const float* log_d = block.memory + p.shared.log_d + (block.log_len - count) * LOG_ROW + own_lane;
        const float2* factors = block.own(plane) + group();
#pragma unroll(TILES == 1 ? 4 : 2)
        for (u32 entry = 0; entry < count; entry++) {
            const float2 d = *reinterpret_cast<const float2*>(log_d + entry * LOG_ROW);
#pragma unroll
            for (u32 tile = 0; tile < TILES; tile++) {
                const float2 factor = factors[entry * block.NODE_STRIDE + tile * TILE_NODES];
                if (at.stretch[tile] == 0) add_entry(seen[tile], out[tile], factor, d);
            }
        }
    }

    // Entries of the nodes' own paths, level by level, within one stretch.
    __device__ __forceinline__ void add_paths(const Places& at, u32 begin, u32 end, float* updates) {
        const float2* factors = block.own(plane) + (block.committed_len + begin) % STRETCH * block.NODE_STRIDE + group();
        float beta[TILES];
#pragma unroll
        for (u32 tile = 0; tile < TILES; tile++) beta[tile] = block.rows.beta[plane][at.row[tile]];
#pragma unroll 1
        for (u32 level = begin; level < end; level++) {
            float2 factor[TILES];
            u32 source[TILES];
#pragma unroll
            for (u32 tile = 0; tile < TILES; tile++) {
                source[tile] = block.rows.ancestors[level][at.row[tile]];
                factor[tile] = factors[(level - begin) * block.NODE_STRIDE + tile * TILE_NODES];
            }
#pragma unroll
            for (u32 tile = 0; tile < TILES; tile++) {
                // d of the nodes that have all their entries.
                if (at.depth[tile] != level) continue;
                const float2 d = {__fmul_rn(beta[tile], __fsub_rn(values[tile].x, seen[tile].x)), __fmul_rn(beta[tile], __fsub_rn(values[tile].y, seen[tile].y))};
                values[tile] = d;
                *reinterpret_cast<float2*>(updates + at.row[tile] * UPDATE_ROW) = d;
            }
            __syncwarp();
#pragma unroll
            for (u32 tile = 0; tile < TILES; tile++) {
                const float2 d = *reinterpret_cast<const float2*>(updates + source[tile] * UPDATE_ROW);
                if (at.depth[tile] > level && at.depth[tile] < end) add_entry(seen[tile], out[tile], factor[tile], d);
            }
        }
    }

    // Squares of o over the warp's lanes.
    __device__ __forceinline__ float square_sum(u32 tile) const {
        float squares = __fmaf_rn(out[tile].y, out[tile].y, out[tile].x * out[tile].x);
        squares += __shfl_xor_sync(0xFFFFFFFF, squares, 1);
        squares += __shfl_xor_sync(0xFFFFFFFF, squares, 2);
        return squares;
    }

    __device__ u32 squares_row() const { return p.num_slices * p.lanes / WARP_VALUES + 1; }
    __device__ u32 own_group() const { return (first_lane + own_lane) / WARP_VALUES; }

    // Gives the squares of the own lanes to all blocks of the key head: each thread of a node to every fourth.
    __device__ __forceinline__ void share_squares() const {
        if (!works) return;
        const u32 base = shared_address(block.memory + p.shared.squares + group() * squares_row() + own_group());
        const u32 barrier = block.barrier_of(Exchange::SQUARES);
        float squares[TILES];
#pragma unroll
        for (u32 tile = 0; tile < TILES; tile++) squares[tile] = square_sum(tile);
#pragma unroll
        for (u32 i = 0; i < 2; i++) {
            const u32 rank = block.lane() % 4 + i * 4, to = min(rank, p.num_slices - 1);
            const u32 there = address_in_block(base, to), barrier_there = address_in_block(barrier, to);
#pragma unroll
            for (u32 tile = 0; tile < TILES; tile++) {
                const bool is_wanted = rank < p.num_slices && node_of(tile) < block.count;
                store_in_block(there + tile * TILE_NODES * squares_row() * sizeof(float), squares[tile], barrier_there, is_wanted);
            }
        }
    }

    // y from o and the squares of all lanes of its head: every fourth warp's by each thread of a node, then theirs.
    __device__ __forceinline__ void store_outputs() const {
        const u32 num_squares = p.value_dim / WARP_VALUES, first = own_group() - column / WARP_VALUES;
        const float2 weight = *reinterpret_cast<const float2*>(p.norm_weight + column);
        const float* squares = block.memory + p.shared.squares + group() * squares_row() + first;
        float sums[TILES] = {};
#pragma unroll 4
        for (u32 i = block.lane() % 4; i < num_squares; i += 4) {
#pragma unroll
            for (u32 tile = 0; tile < TILES; tile++) sums[tile] += squares[tile * TILE_NODES * squares_row() + i];
        }
        __syncwarp();
#pragma unroll
        for (u32 tile = 0; tile < TILES; tile++) {
            sums[tile] += __shfl_xor_sync(0xFFFFFFFF, sums[tile], 1);
            sums[tile] += __shfl_xor_sync(0xFFFFFFFF, sums[tile], 2);
            const float2 gate = {silu(gates[tile].x), silu(gates[tile].y)};
            if (stores(tile)) store_output(p.y + place_of(tile), out[tile], norm_scale(p, sums[tile]), weight, gate);
        }
    }

    // o and its squares, for a later launch.
    __device__ __forceinline__ void keep_outputs() const {
#pragma unroll
        for (u32 tile = 0; tile < TILES; tile++) {
            const float squares = square_sum(tile);
            if (!stores(tile)) continue;
            *reinterpret_cast<float2*>(p.y + place_of(tile)) = out[tile];
            if (block.lane() % 4 == 0) p.squares[place_of(tile) / WARP_VALUES] = squares;
        }
    }
};
