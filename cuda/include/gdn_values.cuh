// The recurrence of gdn_wy for the value lanes of one block, from products of keys to outputs before the norm.
//
// Four warps hold the sums of all nodes, a node per lane and 4 * GROUPS value lanes per warp, and add entries in the
// order of positions: products with the state, then logged entries, then the node's own path, level by level.
#pragma once

#include "gdn_block.cuh"
#include "split_product.cuh"

constexpr u32 SUM_WARPS = 4;
constexpr u32 MAX_LOG_ENTRIES = ANCHOR_DELAY + FOLD_INTERVAL;

// What is known of a node and a value head, in shared memory.
struct Gates {
    float decay[MAX_PLANES][CHUNK_NODES];   // log decay g
    float beta[MAX_PLANES][CHUNK_NODES];
    float from_state[MAX_PLANES][CHUNK_NODES];  // e0
    float log_decay[MAX_PLANES][MAX_LOG_ENTRIES];
    float own[CHUNK_NODES];                 // q.k of the node
    float scale[MAX_PLANES][CHUNK_NODES];   // of the norm
};

template <u32 GROUPS>
struct Values {
    static constexpr u32 LANES = SUM_WARPS * GROUPS * 4;
    static constexpr u32 ROW = LANES + 4;           // of values and outputs: rows start in different banks
    static constexpr u32 PARTIAL_ROW = 2 * LANES + 4;

    const Block& block;
    const GdnWyParams& p;
    Gates& gates;
    u32 first_lane;  // within the key head's value lanes
    u32 num_lanes;
    u32 first_plane, num_planes;  // value heads, counted within the key head

    __device__ Values(const Block& b, Gates& shared_gates) : block(b), p(b.p), gates(shared_gates) {
        const u32 all_lanes = b.heads_per_key() * p.value_dim;
        first_lane = b.slice * LANES;
        num_lanes = first_lane < all_lanes ? min(LANES, all_lanes - first_lane) : 0;
        first_plane = first_lane / p.value_dim;
        num_planes = num_lanes > 0 ? (first_lane + num_lanes - 1) / p.value_dim - first_plane + 1 : 0;
    }

    __device__ u32 head_of(u32 plane) const { return block.key_head * block.heads_per_key() + first_plane + plane; }
    __device__ u32 plane_of(u32 lane) const { return (first_lane + lane) / p.value_dim - first_plane; }
    __device__ u32 values_len() const { return p.num_value_heads * p.value_dim; }
    // A row's first value of this block.
    __device__ u64 value_place(u64 row) const {
        return row * values_len() + block.key_head * block.heads_per_key() * p.value_dim + first_lane;
    }
    __device__ u32 factor_place(u32 plane, u32 entry) const { return (plane * p.max_entries + entry) * block.stride; }

    // Fetches the logged updates and decays of this block, once for all chunks.
    __device__ void fetch_log() const {
        float* log_d = block.memory + p.shared.log_d;
        for (u32 i = threadIdx.x; i < block.log_len * (LANES / 4); i += BLOCK_THREADS) {
            const u32 entry = i / (LANES / 4), lane = i % (LANES / 4) * 4;
            float4 d = {0.0f, 0.0f, 0.0f, 0.0f};
            if (lane < num_lanes) d = *reinterpret_cast<const float4*>(p.log_d + value_place(block.log_row(entry)) + lane);
            *reinterpret_cast<float4*>(log_d + entry * LANES + lane) = d;
        }
        for (u32 i = threadIdx.x; i < block.log_len * num_planes; i += BLOCK_THREADS) {
            const u32 plane = i / block.log_len, entry = i % block.log_len;
            gates.log_decay[plane][entry] = p.log_g[block.log_row(entry) * p.num_value_heads + head_of(plane)];
        }
    }

    // v of all nodes.
    __device__ void make_values() const {
        float* values = block.memory + p.shared.values;
        const u32 channel = 2 * p.num_key_heads * p.key_dim + static_cast<u32>(value_place(0));
        for (u32 i = threadIdx.x; i < block.count * (LANES / 4); i += BLOCK_THREADS) {
            const u32 node = i / (LANES / 4), lane = i % (LANES / 4) * 4;
            if (lane < num_lanes) *reinterpret_cast<float4*>(values + node * ROW + lane) = block.convolve(node, channel + lane);
        }
    }

    // Decay and update strength of all nodes.
    __device__ void make_gates() const {
        for (u32 plane = block.warp; plane < num_planes; plane += BLOCK_WARPS) {
            if (block.lane >= block.count) continue;
            const u32 head = head_of(plane);
            const u64 at = static_cast<u64>(block.row_of(block.lane)) * p.num_value_heads + head;
            const float x = p.a[at] + p.dt_bias[head];
            const float softplus = fmaxf(x, 0.0f) + log1pf(expf(-fabsf(x)));
            const float decay = -expf(p.a_log[head]) * softplus;
            gates.decay[plane][block.lane] = decay;
            gates.beta[plane][block.lane] = 1.0f / (1.0f + expf(-p.b[at]));
            // The block with a head's first lane writes it down.
            if ((first_plane + plane) * p.value_dim >= first_lane) p.tail_g[at] = decay;
        }
    }

    // Sums of log decays from each entry to each node, from the node backwards; behind the last the state's factor.
    __device__ void sum_decays() const {
        float* exponents = block.memory + p.shared.exponents;
        for (u32 plane = block.warp; plane < num_planes; plane += BLOCK_WARPS) {
            if (block.lane >= block.count) continue;
            const u32 node = block.lane, start = block.nodes.anchor[node] * FOLD_INTERVAL;
            float sum = gates.decay[plane][node];
            u32 entry = block.log_len + block.nodes.depth[node];
            while (entry > start) {
                entry--;
                exponents[factor_place(plane, entry) + node] = sum;
                float decay;
                if (entry < block.log_len) {
                    decay = gates.log_decay[plane][entry];
                } else {
                    const u32 row = block.nodes.ancestors[entry - block.log_len][node];
                    decay = row >= block.first ? gates.decay[plane][row - block.first]
                                               : __ldcg(p.tail_g + static_cast<u64>(block.segment.first_row + row) * p.num_value_heads + head_of(plane));
                }
                sum += decay;
            }
            gates.from_state[plane][node] = expf(sum);
        }
    }

    // Factors of all entries, from the products in scratch.
    __device__ void weigh_products() const {
        const float* exponents = block.memory + p.shared.exponents;
        float2* factors = reinterpret_cast<float2*>(block.memory + p.shared.factors);
        const float2* products = block.scratch_products();
        const u32 first_entry = block.nodes.min_anchor * FOLD_INTERVAL, end = block.log_len + block.nodes.max_depth;
        for (u32 i = threadIdx.x; i < (end - first_entry) * block.stride; i += BLOCK_THREADS) {
            const u32 entry = first_entry + i / block.stride, node = i % block.stride;
            if (node >= block.count || entry < block.nodes.anchor[node] * FOLD_INTERVAL ||
                entry >= block.log_len + block.nodes.depth[node]) {
                continue;
            }
            const float2 product = __ldcg(products + entry * block.stride + node);
            for (u32 plane = 0; plane < num_planes; plane++) {
                const u32 at = factor_place(plane, entry) + node;
                const float weight = expf(exponents[at]);
                factors[at] = {weight * product.x, weight * product.y};
            }
        }
        if (threadIdx.x < block.count) gates.own[threadIdx.x] = __ldcg(products + p.max_entries * block.stride + threadIdx.x).y;
    }

    // The columns of a state that a warp multiplies: a quarter of the key's steps, half of the block's lanes by eights.
    struct StateColumns {
        float4 values[GROUPS][STEPS_PER_QUARTER];
    };

    __device__ void load_state(u32 anchor, StateColumns& state) const {
        const u32 ring = (anchor_base_interval() + anchor) % STATE_RING;
        const u32 quarter = block.warp / 2, half = block.warp % 2;
#pragma unroll
        for (u32 group = 0; group < GROUPS; group++) {
            const u32 lane = (half * GROUPS + group) * 8 + block.lane / 4;
            const bool is_inside = lane < num_lanes;
            const u32 head = head_of(is_inside ? plane_of(lane) : 0);
            const float* from = p.states +
                                (static_cast<u64>(block.segment.slot * STATE_RING + ring) * p.num_value_heads + head) * p.key_dim * p.value_dim +
                                (first_lane + lane) % p.value_dim;
#pragma unroll
            for (u32 step = 0; step < STEPS_PER_QUARTER; step++) {
                const u32 column = (quarter + step * NUM_QUARTERS) * KEY_STEP + block.lane % 4 * 4;
                state.values[group][step] = {0.0f, 0.0f, 0.0f, 0.0f};
                if (is_inside && column < p.key_dim) {
                    const float* at = from + static_cast<u64>(column) * p.value_dim;
                    state.values[group][step] = {at[0], at[p.value_dim], at[2 * p.value_dim], at[3 * p.value_dim]};
                }
            }
        }
    }

    __device__ u32 anchor_base_interval() const { return block.anchor_base / FOLD_INTERVAL; }

    // Products of k and q with the state of `anchor` for the nodes that read it, quarter by quarter.
    __device__ void multiply_state(u32 anchor, const StateColumns& state) const {
        const float* keys = block.memory + p.shared.keys;
        float* partial = block.memory + p.shared.factors;
        const u32 quarter = block.warp / 2, half = block.warp % 2;
        for (u32 tile = 0; tile < block.tiles; tile++) {
            const u32 slot = tile * TILE_NODES + block.lane / 4;
            const bool reads = slot < block.count && block.nodes.anchor[block.nodes.node_in[slot]] == anchor;
            if (__ballot_sync(0xFFFFFFFF, reads) == 0) continue;
            float sums[GROUPS][4] = {};
#pragma unroll
            for (u32 step = 0; step < STEPS_PER_QUARTER; step++) {
                const u32 key_step = quarter + step * NUM_QUARTERS;
                if (key_step >= block.key_steps()) continue;
                const float* at = keys + ((tile * block.key_steps() + key_step) * 2 * WARP_LANES + block.lane) * 4;
                const SplitPair pair = split_pair(*reinterpret_cast<const float4*>(at), *reinterpret_cast<const float4*>(at + WARP_LANES * 4));
#pragma unroll
                for (u32 group = 0; group < GROUPS; group++) multiply_split(sums[group], pair, state.values[group][step]);
            }
            if (!reads) continue;
            float* to = partial + (quarter * p.chunk_rows + block.nodes.node_in[slot]) * PARTIAL_ROW;
#pragma unroll
            for (u32 group = 0; group < GROUPS; group++) {
                const u32 lane = (half * GROUPS + group) * 8 + block.lane % 4 * 2;
                *reinterpret_cast<float2*>(to + lane) = {sums[group][0], sums[group][1]};
                *reinterpret_cast<float2*>(to + LANES + lane) = {sums[group][2], sums[group][3]};
            }
        }
    }

    // The sums of a node over `4 * GROUPS` lanes.
    struct Sums {
        float seen[4 * GROUPS], out[4 * GROUPS];
    };

    // Adds the quarters of the products with the state, and scales them by its decay.
    __device__ void take_state(u32 node, Sums& sums) const {
        const float* partial = block.memory + p.shared.factors + node * PARTIAL_ROW;
        const u32 first = block.warp * 4 * GROUPS;
#pragma unroll
        for (u32 i = 0; i < 4 * GROUPS; i += 4) {
            const float scale = gates.from_state[min(plane_of(first + i), num_planes - 1)][node];
            for (u32 which = 0; which < 2; which++) {
                float4 quarters[NUM_QUARTERS];
#pragma unroll
                for (u32 quarter = 0; quarter < NUM_QUARTERS; quarter++) {
                    quarters[quarter] = *reinterpret_cast<const float4*>(partial + quarter * p.chunk_rows * PARTIAL_ROW + which * LANES + first + i);
                }
                float(&to)[4 * GROUPS] = which == 0 ? sums.seen : sums.out;
                to[i] = scale * ((quarters[0].x + quarters[1].x) + (quarters[2].x + quarters[3].x));
                to[i + 1] = scale * ((quarters[0].y + quarters[1].y) + (quarters[2].y + quarters[3].y));
                to[i + 2] = scale * ((quarters[0].z + quarters[1].z) + (quarters[2].z + quarters[3].z));
                to[i + 3] = scale * ((quarters[0].w + quarters[1].w) + (quarters[2].w + quarters[3].w));
            }
        }
    }

    // Factors of one entry for a warp's lanes: those of its first and, where its lanes belong to two heads, last group.
    struct Factors {
        float2 first, last;
    };

    __device__ Factors factors_of(u32 entry, u32 node, u32 first_of_warp, u32 last_of_warp) const {
        const float2* factors = reinterpret_cast<const float2*>(block.memory + p.shared.factors) + node;
        const float2 first = factors[factor_place(first_of_warp, entry)];
        return {first, first_of_warp == last_of_warp ? first : factors[factor_place(last_of_warp, entry)]};
    }

    __device__ static void add_entry(Sums& sums, u32 i, float2 factor, float4 d) {
        sums.seen[i] = __fmaf_rn(factor.x, d.x, sums.seen[i]);
        sums.seen[i + 1] = __fmaf_rn(factor.x, d.y, sums.seen[i + 1]);
        sums.seen[i + 2] = __fmaf_rn(factor.x, d.z, sums.seen[i + 2]);
        sums.seen[i + 3] = __fmaf_rn(factor.x, d.w, sums.seen[i + 3]);
        sums.out[i] = __fmaf_rn(factor.y, d.x, sums.out[i]);
        sums.out[i + 1] = __fmaf_rn(factor.y, d.y, sums.out[i + 1]);
        sums.out[i + 2] = __fmaf_rn(factor.y, d.z, sums.out[i + 2]);
        sums.out[i + 3] = __fmaf_rn(factor.y, d.w, sums.out[i + 3]);
    }

    // From `sums` of all nodes to d (over v) and o. Called by the first SUM_WARPS warps.
    __device__ void solve(Sums& sums) const {
        const u32 node = block.lane, first = block.warp * 4 * GROUPS;
        const u32 planes[2] = {min(plane_of(first), num_planes - 1), min(plane_of(first + 4 * GROUPS - 1), num_planes - 1)};
        const bool is_node = node < block.count;
        const u32 start = is_node ? block.nodes.anchor[node] * FOLD_INTERVAL : block.log_len;
        const float* log_d = block.memory + p.shared.log_d + first;
        for (u32 entry = block.nodes.min_anchor * FOLD_INTERVAL; entry < block.log_len; entry++) {
            if (entry < start) continue;
            const Factors factors = factors_of(entry, node, planes[0], planes[1]);
#pragma unroll
            for (u32 i = 0; i < 4 * GROUPS; i += 4) {
                const float2 factor = plane_of(first + i) == planes[0] ? factors.first : factors.last;
                add_entry(sums, i, factor, *reinterpret_cast<const float4*>(log_d + entry * LANES + i));
            }
        }
        const u32 own_depth = is_node ? block.nodes.depth[node] : 0;
        float d[4 * GROUPS] = {};
        for (u32 depth = 0; depth <= block.nodes.max_depth; depth++) {
            if (is_node && own_depth == depth) finish(sums, node, first, d);
            const bool reads = is_node && own_depth > depth;
            const u32 row = reads ? block.nodes.ancestors[depth][node] : 0;
            const bool is_near = reads && row >= block.first;
            Factors factors = {};
            if (reads) factors = factors_of(block.log_len + depth, node, planes[0], planes[1]);
#pragma unroll
            for (u32 i = 0; i < 4 * GROUPS; i += 4) {
                const u32 source = is_near ? row - block.first : block.lane;
                float4 entry = {__shfl_sync(0xFFFFFFFF, d[i], source), __shfl_sync(0xFFFFFFFF, d[i + 1], source),
                                __shfl_sync(0xFFFFFFFF, d[i + 2], source), __shfl_sync(0xFFFFFFFF, d[i + 3], source)};
                if (reads && !is_near && first + i < num_lanes) {
                    const u64 place = value_place(block.segment.first_row + row) + first + i;
                    entry = __ldcg(reinterpret_cast<const float4*>(p.tail_d + place));
                }
                if (reads) add_entry(sums, i, plane_of(first + i) == planes[0] ? factors.first : factors.last, entry);
            }
        }
    }

    // d and o of a node whose entries are all in its sums.
    __device__ void finish(Sums& sums, u32 node, u32 first, float (&d)[4 * GROUPS]) const {
        float* values = block.memory + p.shared.values + node * ROW + first;
        float* outputs = block.memory + p.shared.outputs + node * ROW + first;
        const float own = gates.own[node];
#pragma unroll
        for (u32 i = 0; i < 4 * GROUPS; i++) {
            const float beta = gates.beta[min(plane_of(first + i), num_planes - 1)][node];
            d[i] = __fmul_rn(beta, __fsub_rn(values[i], sums.seen[i]));
            values[i] = d[i];
            outputs[i] = __fmaf_rn(own, d[i], sums.out[i]);
        }
    }

    // Writes d down, and the squares of o, by value head, for the blocks that share the head.
    __device__ void store_updates() const {
        const float* values = block.memory + p.shared.values;
        for (u32 i = threadIdx.x; i < block.count * (LANES / 4); i += BLOCK_THREADS) {
            const u32 node = i / (LANES / 4), lane = i % (LANES / 4) * 4;
            if (lane >= num_lanes) continue;
            *reinterpret_cast<float4*>(p.tail_d + value_place(block.row_of(node)) + lane) = *reinterpret_cast<const float4*>(values + node * ROW + lane);
        }
        for (u32 plane = block.warp; plane < num_planes; plane += BLOCK_WARPS) {
            if (block.lane >= block.count) continue;
            const float* outputs = block.memory + p.shared.outputs + block.lane * ROW;
            const u32 head_first = (first_plane + plane) * p.value_dim;  // its first lane
            const u32 begin = max(head_first, first_lane) - first_lane;
            const u32 end = min(head_first + p.value_dim, first_lane + num_lanes) - first_lane;
            float squares = 0.0f;
            for (u32 lane = begin; lane < end; lane += 4) {
                const float4 o = *reinterpret_cast<const float4*>(outputs + lane);
                squares = __fmaf_rn(o.x, o.x, squares);
                squares = __fmaf_rn(o.y, o.y, squares);
                squares = __fmaf_rn(o.z, o.z, squares);
                squares = __fmaf_rn(o.w, o.w, squares);
            }
            squares_of(block.slice, plane)[block.lane] = squares;
        }
    }

    __device__ float* squares_of(u32 slice, u32 plane) const {
        return p.squares + ((static_cast<u64>(block.part) * p.num_slices + slice) * p.num_planes + plane) * CHUNK_NODES;
    }

    // The factor of the output norm: squares of all blocks that share a head, in ascending order of its lanes.
    __device__ void make_scales() const {
        for (u32 plane = block.warp; plane < num_planes; plane += BLOCK_WARPS) {
            if (block.lane >= block.count) continue;
            const u32 head = first_plane + plane, end = (head + 1) * p.value_dim;
            float squares = 0.0f;
            for (u32 slice = head * p.value_dim / LANES; slice * LANES < end; slice++) {
                squares += __ldcg(squares_of(slice, head - slice * LANES / p.value_dim) + block.lane);
            }
            gates.scale[plane][block.lane] = 1.0f / sqrtf(squares / static_cast<float>(p.value_dim) + p.norm_eps);
        }
    }

    // y from o, which lies in shared memory or, where the norm is a launch of its own, in y.
    __device__ void store_outputs(bool is_in_y) const {
        for (u32 i = threadIdx.x; i < block.count * (LANES / 4); i += BLOCK_THREADS) {
            const u32 node = i / (LANES / 4), lane = i % (LANES / 4) * 4;
            if (lane >= num_lanes) continue;
            const u64 place = value_place(block.row_of(node)) + lane;
            float4* y = reinterpret_cast<float4*>(p.y + place);
            const float4 o = is_in_y ? *y : *reinterpret_cast<const float4*>(block.memory + p.shared.outputs + node * ROW + lane);
            const float4 z = silu(*reinterpret_cast<const float4*>(p.z + place));
            const float4 weight = *reinterpret_cast<const float4*>(p.norm_weight + (first_lane + lane) % p.value_dim);
            const float scale = gates.scale[plane_of(lane)][node];
            *y = {o.x * scale * weight.x * z.x, o.y * scale * weight.y * z.y, o.z * scale * weight.z * z.z, o.w * scale * weight.w * z.w};
        }
    }

    // o into y, for a later launch.
    __device__ void keep_outputs() const {
        for (u32 i = threadIdx.x; i < block.count * (LANES / 4); i += BLOCK_THREADS) {
            const u32 node = i / (LANES / 4), lane = i % (LANES / 4) * 4;
            if (lane >= num_lanes) continue;
            *reinterpret_cast<float4*>(p.y + value_place(block.row_of(node)) + lane) =
                *reinterpret_cast<const float4*>(block.memory + p.shared.outputs + node * ROW + lane);
        }
    }
};
