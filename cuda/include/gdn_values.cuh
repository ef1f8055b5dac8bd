// What gdn_wy makes for the value lanes of one slice before it adds anything up: gates, decays, v, products with states.
#pragma once

#include "gdn_block.cuh"
#include "power_of_two.cuh"
#include "split_product.cuh"
#include "thread_copy.cuh"

constexpr u32 SUM_WARPS = 4;
constexpr u32 STATE_WARPS = 2 * NUM_QUARTERS;
constexpr float LOG2_E = 1.44269504f;

// What is known of a node and a value head, in shared memory. Decays are logarithms to base 2.
struct Gates {
    float decay[MAX_PLANES][CHUNK_NODES];
    float beta[MAX_PLANES][CHUNK_NODES];
    float from_state[MAX_PLANES][CHUNK_NODES];     // e0
    float log_decay[MAX_PLANES][MAX_LOG_ENTRIES];
    float own[CHUNK_NODES];                        // q.k of the node
    float partial_squares[SUM_WARPS][MAX_PLANES][CHUNK_NODES];
    float squares[MAX_SLICES][MAX_PLANES][CHUNK_NODES];
    float scale[MAX_PLANES][CHUNK_NODES];          // of the norm
    u32 plane[MAX_QUADS];                          // of each four lanes; of those behind the last, the last
};

template <u32 GROUPS>
struct Values {
    static constexpr u32 OWN = 4 * GROUPS;  // lanes of a sum warp
    static constexpr u32 LANES = SUM_WARPS * OWN;
    static constexpr u32 ROW = LANES + 4;   // of values, outputs and gains: rows start in different banks
    static constexpr u32 PARTIAL_ROW = 2 * LANES + 4;
    static constexpr u32 QUADS = LANES / 4;

    const Block& block;
    const GdnWyParams& p;
    Gates& gates;
    u32 first_lane;  // within the key head's value lanes
    u32 num_lanes;
    u32 first_plane, num_planes;  // value heads, counted within the key head
    u32 first_head;               // the first of them
    u32 row_len;                  // of value rows
    u32 column;                   // of the slice's first lane in them
    u32 taps_row;                 // length of a row of `taps`

    __device__ Values(const Block& b, Gates& shared_gates) : block(b), p(b.p), gates(shared_gates) {
        const u32 all_lanes = b.heads_per_key * p.value_dim;
        first_lane = b.slice * LANES;
        num_lanes = first_lane < all_lanes ? min(LANES, all_lanes - first_lane) : 0;
        first_plane = first_lane / p.value_dim;
        num_planes = num_lanes > 0 ? (first_lane + num_lanes - 1) / p.value_dim - first_plane + 1 : 0;
        first_head = b.key_head * b.heads_per_key + first_plane;
        row_len = p.num_value_heads * p.value_dim;
        column = b.key_head * all_lanes + first_lane;
        taps_row = 2 * p.key_dim + LANES;
    }

    __device__ u32 plane_of(u32 lane) const { return gates.plane[lane / 4]; }
    __device__ u64 value_place(u32 row) const { return static_cast<u64>(row) * row_len + column; }
    __device__ u32 entry_place(u32 plane, u32 entry) const { return (plane * p.max_entries + entry) * p.chunk_rows; }
    // Factors of a plane, those of node 0 of entry 0.
    __device__ float2* factors_of(u32 plane) const {
        float* factors = block.memory + (plane == 0 ? p.shared.products : p.shared.factors + 2 * entry_place(plane - 1, 0));
        return reinterpret_cast<float2*>(factors);
    }
    __device__ float* taps() const { return block.memory + p.shared.taps; }

    // Copies what depends neither on rows nor on caches.
    __device__ void fetch_constants() const {
        const u32 key_dim = p.key_dim, keys_len = p.num_key_heads * key_dim, thread = threadIdx.x;
        if (thread < key_dim) {
            block.fetch_taps(keys_len + block.key_head * key_dim, key_dim, taps(), taps_row, thread);
        } else if (thread < 2 * key_dim) {
            block.fetch_taps(block.key_head * key_dim, key_dim, taps() + key_dim, taps_row, thread - key_dim);
        } else {
            block.fetch_taps(2 * keys_len + column, num_lanes, taps() + 2 * key_dim, taps_row, thread - 2 * key_dim);
        }
        if (thread < QUADS) gates.plane[thread] = min((first_lane + 4 * thread) / p.value_dim - first_plane, num_planes - 1);
    }

    // Asks for the lines that the block will read of its caches.
    __device__ void prefetch() const {
        if (num_lanes == 0) return;
        for (u32 i = threadIdx.x; i < 2 * block.log_len; i += BLOCK_THREADS) {
            prefetch_line(p.log_d + value_place(block.log_row(i / 2)) + (i % 2 == 0 ? 0 : num_lanes - 1));
        }
        const u32 ring = block.segment.slot * STATE_RING + block.anchor_base / FOLD_INTERVAL % STATE_RING;
        for (u32 plane = 0; plane < num_planes; plane++) {
            const u32 begin = plane == 0 ? first_lane % p.value_dim : 0;
            const u32 end = min(p.value_dim, first_lane + num_lanes - (first_plane + plane) * p.value_dim);
            const float* state = p.states + (static_cast<u64>(ring) * p.num_value_heads + first_head + plane) * p.key_dim * p.value_dim;
            for (u32 i = threadIdx.x; i < 2 * p.key_dim; i += BLOCK_THREADS) {
                prefetch_line(state + i / 2 * p.value_dim + (i % 2 == 0 ? begin : end - 1));
            }
        }
    }

    // Starts copying the logged updates of this slice.
    __device__ void fetch_log() const {
        float* log_d = block.memory + p.shared.log_d;
        for (u32 i = threadIdx.x; i < block.log_len * QUADS; i += BLOCK_THREADS) {
            const u32 entry = i / QUADS, lane = i % QUADS * 4;
            const bool is_inside = lane < num_lanes;
            const float* from = p.log_d + value_place(block.log_row(entry)) + lane;
            thread_copy_16(log_d + entry * LANES + lane, is_inside ? from : p.log_d, is_inside);
        }
        thread_copy_commit();
    }

    // Decay and update strength of all nodes, then the decays from all entries to them, from the node backwards; behind
    // the last entry the state's. A warp takes a plane.
    __device__ void make_weights(u32 plane) const {
        const u32 node = block.lane, head = first_head + plane, log_len = block.log_len;
        const bool is_node = node < block.count;
        const u64 at = static_cast<u64>(block.row_of(is_node ? node : 0)) * p.num_value_heads + head;
        const float x = p.a[at] + p.dt_bias[head], strength = p.b[at], rate = p.a_log[head];
        float* log_decay = gates.log_decay[plane];
        for (u32 i = block.lane; i < log_len; i += WARP_LANES) log_decay[i] = p.log_g[block.log_row(i) * p.num_value_heads + head] * LOG2_E;
        const float decay = -expf(rate) * (fmaxf(x, 0.0f) + log1pf(expf(-fabsf(x))));
        float sum = decay * LOG2_E;
        gates.decay[plane][node] = sum;
        if (is_node) {
            gates.beta[plane][node] = sigmoid(strength);
            // The slice with a head's first lane writes it down.
            if ((first_plane + plane) * p.value_dim >= first_lane) p.tail_g[at] = decay;
        }
        __syncwarp();
        const u32 depth = is_node ? block.nodes.depth[node] : 0;
        float* weights = block.memory + p.shared.weights + entry_place(plane, log_len) + node;
        // Decays are read in batches: a store to `weights` would keep the next one waiting.
        constexpr u32 LEVELS = 4, LOGGED = 8;
        for (u32 top = block.nodes.max_depth; top > 0; top -= min(top, LEVELS)) {
            float decays[LEVELS];
#pragma unroll
            for (u32 i = 0; i < LEVELS; i++) {
                const u32 level = top - i;  // of which the ancestor stands above
                decays[i] = 0.0f;
                if (i >= top || level > depth) continue;
                const u32 row = block.nodes.ancestors[level - 1][node];
                decays[i] = row >= block.first ? gates.decay[plane][row - block.first]
                                               : __ldcg(p.tail_g + static_cast<u64>(block.segment.first_row + row) * p.num_value_heads + head) * LOG2_E;
            }
#pragma unroll
            for (u32 i = 0; i < LEVELS; i++) {
                if (i >= top || top - i > depth) continue;
                weights[(top - i - 1) * p.chunk_rows] = power_of_two(sum);
                sum += decays[i];
            }
        }
        if (!is_node) return;
        const u32 start = block.nodes.anchor[node] * FOLD_INTERVAL, common = block.nodes.max_anchor * FOLD_INTERVAL;
        u32 entry = log_len;
        for (; entry >= common + LOGGED; entry -= LOGGED) {
            float decays[LOGGED];
#pragma unroll
            for (u32 i = 0; i < LOGGED; i++) decays[i] = log_decay[entry - 1 - i];
#pragma unroll
            for (u32 i = 0; i < LOGGED; i++) {
                weights -= p.chunk_rows;
                *weights = power_of_two(sum);
                sum += decays[i];
            }
        }
        for (; entry > start; entry--) {
            weights -= p.chunk_rows;
            *weights = power_of_two(sum);
            sum += log_decay[entry - 1];
        }
        gates.from_state[plane][node] = power_of_two(sum);
    }

    // v of `WARP_LANES` quads of lanes, by a warp.
    __device__ void make_values(u32 item) const {
        const u32 i = item * WARP_LANES + block.lane, node = i / QUADS, lane = i % QUADS * 4;
        if (node >= block.count || lane >= num_lanes) return;
        const Block::Inputs inputs = block.load_inputs(node, 2 * p.num_key_heads * p.key_dim + column + lane);
        *reinterpret_cast<float4*>(block.memory + p.shared.values + node * ROW + lane) = block.convolve(inputs, taps() + 2 * p.key_dim + lane, taps_row);
    }

    // What o is multiplied by besides the norm's scale, by threads `thread` of `num_threads`.
    __device__ void make_gains(u32 thread, u32 num_threads) const {
        for (u32 i = thread; i < block.count * QUADS; i += num_threads) {
            const u32 node = i / QUADS, lane = i % QUADS * 4;
            if (lane < num_lanes) *reinterpret_cast<float4*>(block.memory + p.shared.gains + node * ROW + lane) = gain_of(block.row_of(node), lane);
        }
    }

    __device__ float4 gain_of(u32 row, u32 lane) const {
        const float4 z = silu(*reinterpret_cast<const float4*>(p.z + value_place(row) + lane));
        const u32 head_first = (first_plane + plane_of(lane)) * p.value_dim;
        const float4 w = *reinterpret_cast<const float4*>(p.norm_weight + first_lane + lane - head_first);
        return {w.x * z.x, w.y * z.y, w.z * z.z, w.w * z.w};
    }

    // The columns of a state that a warp multiplies: a quarter of the key's steps, half of the slice's lanes by eights.
    struct StateColumns {
        float4 values[GROUPS][STEPS_PER_QUARTER];
    };

    __device__ void load_state(u32 warp, u32 anchor, StateColumns& state) const {
        const u32 ring = block.segment.slot * STATE_RING + (block.anchor_base / FOLD_INTERVAL + anchor) % STATE_RING;
        const u32 key = warp / 2 * KEY_STEP + block.lane % 4 * 4, row = p.value_dim;
        const float* states = p.states + ((static_cast<u64>(ring) * p.num_value_heads + first_head) * p.key_dim + key) * row;
#pragma unroll
        for (u32 group = 0; group < GROUPS; group++) {
            const u32 lane = (warp % 2 * GROUPS + group) * 8 + block.lane / 4, plane = plane_of(lane);
            const float* from = states + plane * p.key_dim * row + first_lane + lane - (first_plane + plane) * row;
#pragma unroll
            for (u32 step = 0; step < STEPS_PER_QUARTER; step++) {
                state.values[group][step] = {0.0f, 0.0f, 0.0f, 0.0f};
                if (lane < num_lanes && key + step * NUM_QUARTERS * KEY_STEP < p.key_dim) {
                    const float* at = from + step * NUM_QUARTERS * KEY_STEP * row;
                    state.values[group][step] = {at[0], at[row], at[2 * row], at[3 * row]};
                }
            }
        }
    }

    // Products of k and q with the state of `anchor` for the nodes that read it, quarter by quarter.
    __device__ void multiply_state(u32 warp, u32 anchor, const StateColumns& state) const {
        const u32 quarter = warp / 2, half = warp % 2;
        SplitQuad split[GROUPS][STEPS_PER_QUARTER];
#pragma unroll
        for (u32 group = 0; group < GROUPS; group++) {
#pragma unroll
            for (u32 step = 0; step < STEPS_PER_QUARTER; step++) split[group][step] = split_quad(state.values[group][step]);
        }
        const float* at = block.memory + p.shared.keys + quarter * FRAGMENT_LEN + block.lane * 4;
        float* partial = block.memory + p.shared.factors + quarter * p.chunk_rows * PARTIAL_ROW + half * GROUPS * 8 + block.lane % 4 * 2;
#pragma unroll 1
        for (u32 tile = 0; tile < block.tiles; tile++, at += block.key_steps * FRAGMENT_LEN) {
            const u32 slot = tile * TILE_NODES + block.lane / 4, node = block.nodes.node_in[slot];
            const bool reads = block.nodes.anchor[node] == anchor;
            if (!__any_sync(0xFFFFFFFF, reads)) continue;
            float sums[GROUPS][4] = {};
#pragma unroll
            for (u32 step = 0; step < STEPS_PER_QUARTER; step++) {
                if (quarter + step * NUM_QUARTERS >= block.key_steps) continue;
                const float* fragment = at + step * NUM_QUARTERS * FRAGMENT_LEN;
                const SplitPair pair = split_pair(*reinterpret_cast<const float4*>(fragment), *reinterpret_cast<const float4*>(fragment + FRAGMENT_LEN / 2));
#pragma unroll
                for (u32 group = 0; group < GROUPS; group++) multiply_split(sums[group], pair, split[group][step]);
            }
            if (!reads) continue;
            float* to = partial + node * PARTIAL_ROW;
#pragma unroll
            for (u32 group = 0; group < GROUPS; group++) {
                *reinterpret_cast<float2*>(to + group * 8) = {sums[group][0], sums[group][1]};
                *reinterpret_cast<float2*>(to + LANES + group * 8) = {sums[group][2], sums[group][3]};
            }
        }
    }

    // Factors of all entries' d in what is left of v, hence negative, and in o: decays times products. A warp takes an
    // entry at a time.
    __device__ void weigh_products() const {
        const u32 node = block.lane, end = block.log_len + block.nodes.max_depth;
        if (node >= block.count) return;
        const u32 own_start = block.nodes.anchor[node] * FOLD_INTERVAL, own_end = block.log_len + block.nodes.depth[node];
        const float2* products = reinterpret_cast<const float2*>(block.memory + p.shared.products) + node;
        const float* weights = block.memory + p.shared.weights + node;
        for (u32 entry = block.nodes.min_anchor * FOLD_INTERVAL + block.warp; entry < end; entry += BLOCK_WARPS) {
            if (entry < own_start || entry >= own_end) continue;
            const float2 product = products[entry * p.chunk_rows];
#pragma unroll 1
            for (u32 plane = 0; plane < num_planes; plane++) {
                const float weight = weights[entry_place(plane, entry)];
                factors_of(plane)[entry * p.chunk_rows + node] = {-(weight * product.x), weight * product.y};
            }
        }
    }
};
