// The recurrence of gdn_wy: what is left of v, and o, by adding entries in the order of positions. First come products with
// the state, then logged entries, then the node's own path, level by level: once its entries are all in, a node's d is
// known, and the nodes below take it.
#pragma once

#include "gdn_values.cuh"

// Adds an entry to four lanes of both sums.
__device__ __forceinline__ void add_entry(float* rest, float* out, float2 factor, float4 d) {
    rest[0] = __fmaf_rn(factor.x, d.x, rest[0]), rest[1] = __fmaf_rn(factor.x, d.y, rest[1]);
    rest[2] = __fmaf_rn(factor.x, d.z, rest[2]), rest[3] = __fmaf_rn(factor.x, d.w, rest[3]);
    out[0] = __fmaf_rn(factor.y, d.x, out[0]), out[1] = __fmaf_rn(factor.y, d.y, out[1]);
    out[2] = __fmaf_rn(factor.y, d.z, out[2]), out[3] = __fmaf_rn(factor.y, d.w, out[3]);
}

// The sums of all nodes: four warps have some lanes each, a thread those of a node.
template <u32 GROUPS>
struct NodeSums {
    typedef Values<GROUPS> V;
    static constexpr u32 OWN = V::OWN, LANES = V::LANES;

    const V& values;
    const Block& block;
    const GdnWyParams& p;
    u32 node, first;        // the warp's first lane
    u32 planes[2];          // of its first and last lanes
    bool is_last[GROUPS];   // whether a group of four lanes belongs to the last one's plane
    bool is_node;
    float rest[OWN], out[OWN];

    __device__ explicit NodeSums(const V& v) : values(v), block(v.block), p(v.p), node(v.block.lane), first(v.block.warp * OWN) {
        is_node = node < block.count;
        planes[0] = v.plane_of(first), planes[1] = v.plane_of(first + OWN - 1);
#pragma unroll
        for (u32 group = 0; group < GROUPS; group++) is_last[group] = v.plane_of(first + group * 4) != planes[0];
    }

    __device__ float* row_of(u32 region, u32 of_node) const { return block.memory + region + of_node * V::ROW + first; }

    // Starts with v and the products with the state: their quarters, scaled by the state's decay.
    __device__ void start() {
        if (!is_node) return;
        const float scales[2] = {values.gates.from_state[planes[0]][node], values.gates.from_state[planes[1]][node]};
        const float* partial = block.memory + p.shared.factors + node * V::PARTIAL_ROW + first;
        const u32 quarter = p.chunk_rows * V::PARTIAL_ROW;
#pragma unroll
        for (u32 group = 0; group < GROUPS; group++) {
            const float scale = is_last[group] ? scales[1] : scales[0];
            const float4 v = *reinterpret_cast<const float4*>(row_of(p.shared.values, node) + group * 4);
#pragma unroll
            for (u32 which = 0; which < 2; which++) {
                const float* at = partial + which * LANES + group * 4;
                const float4 a = *reinterpret_cast<const float4*>(at), b = *reinterpret_cast<const float4*>(at + quarter);
                const float4 c = *reinterpret_cast<const float4*>(at + 2 * quarter), e = *reinterpret_cast<const float4*>(at + 3 * quarter);
                const float4 sum = {__fmul_rn(scale, (a.x + b.x) + (c.x + e.x)), __fmul_rn(scale, (a.y + b.y) + (c.y + e.y)),
                                    __fmul_rn(scale, (a.z + b.z) + (c.z + e.z)), __fmul_rn(scale, (a.w + b.w) + (c.w + e.w))};
                if (which == 0) {
                    rest[group * 4] = __fsub_rn(v.x, sum.x), rest[group * 4 + 1] = __fsub_rn(v.y, sum.y);
                    rest[group * 4 + 2] = __fsub_rn(v.z, sum.z), rest[group * 4 + 3] = __fsub_rn(v.w, sum.w);
                } else {
                    out[group * 4] = sum.x, out[group * 4 + 1] = sum.y, out[group * 4 + 2] = sum.z, out[group * 4 + 3] = sum.w;
                }
            }
        }
    }

    // Factors of an entry for the warp's first and last lanes.
    template <bool TWO_PLANES>
    struct Factors {
        float2 first, last;

        __device__ Factors(const float2* of_first, const float2* of_last, u32 at) : first(of_first[at]) {
            if (TWO_PLANES) last = of_last[at];
        }
    };

    template <bool TWO_PLANES>
    __device__ void add(const Factors<TWO_PLANES>& factors, const float4 (&d)[GROUPS]) {
#pragma unroll
        for (u32 group = 0; group < GROUPS; group++) {
            add_entry(rest + group * 4, out + group * 4, TWO_PLANES && is_last[group] ? factors.last : factors.first, d[group]);
        }
    }

    // Adds all entries, and leaves d in `values` and o in `out`.
    template <bool TWO_PLANES>
    __device__ void solve() {
        typedef Factors<TWO_PLANES> F;
        const u32 row = p.chunk_rows;
        const float2* of_first = values.factors_of(planes[0]) + node;
        const float2* of_last = values.factors_of(planes[1]) + node;
        const float* log_d = block.memory + p.shared.log_d + first;
        float4 d[GROUPS];
        if (is_node) {
            // Up to where all nodes read, each from its own anchor.
            u32 entry = block.nodes.anchor[node] * FOLD_INTERVAL;
            const u32 common = min(block.nodes.max_anchor * FOLD_INTERVAL, block.log_len);
            for (; entry < common; entry++) {
#pragma unroll
                for (u32 group = 0; group < GROUPS; group++) d[group] = *reinterpret_cast<const float4*>(log_d + entry * LANES + group * 4);
                add(F(of_first, of_last, entry * row), d);
            }
#pragma unroll 4
            for (entry = common; entry < block.log_len; entry++) {
#pragma unroll
                for (u32 group = 0; group < GROUPS; group++) d[group] = *reinterpret_cast<const float4*>(log_d + entry * LANES + group * 4);
                add(F(of_first, of_last, entry * row), d);
            }
        }
        const u32 depth = is_node ? block.nodes.depth[node] : 0;
        if (block.first > 0 && is_node) {
            // Ancestors in earlier chunks stand at the top of the path.
            for (u32 level = 0; level < depth && block.nodes.ancestors[level][node] < block.first; level++) {
                const u64 place = values.value_place(block.segment.first_row + block.nodes.ancestors[level][node]) + first;
#pragma unroll
                for (u32 group = 0; group < GROUPS; group++) {
                    d[group] = first + group * 4 < values.num_lanes ? __ldcg(reinterpret_cast<const float4*>(p.tail_d + place + group * 4)) : float4{};
                }
                add(F(of_first, of_last, (block.log_len + level) * row), d);
            }
        }
        __syncwarp();
        const float betas[2] = {is_node ? values.gates.beta[planes[0]][node] : 0.0f, is_node ? values.gates.beta[planes[1]][node] : 0.0f};
        const float own = is_node ? values.gates.own[node] : 0.0f;
        float* own_row = row_of(p.shared.values, node);
#pragma unroll 1
        for (u32 level = 0; level <= block.nodes.max_depth; level++) {
            const bool reads = is_node && depth > level;
            const u32 ancestor = reads ? block.nodes.ancestors[level][node] : 0;
            const bool is_near = reads && ancestor >= block.first;
            const F at_level(of_first, of_last, is_near ? (block.log_len + level) * row : 0);
            if (is_node && depth == level) {
#pragma unroll
                for (u32 group = 0; group < GROUPS; group++) {
                    const float beta = TWO_PLANES && is_last[group] ? betas[1] : betas[0];
                    float update[4];
#pragma unroll
                    for (u32 i = 0; i < 4; i++) {
                        update[i] = __fmul_rn(beta, rest[group * 4 + i]);
                        out[group * 4 + i] = __fmaf_rn(own, update[i], out[group * 4 + i]);
                    }
                    *reinterpret_cast<float4*>(own_row + group * 4) = {update[0], update[1], update[2], update[3]};
                }
            }
            __syncwarp();
            if (is_near) {
                const float* from = row_of(p.shared.values, ancestor - block.first);
#pragma unroll
                for (u32 group = 0; group < GROUPS; group++) d[group] = *reinterpret_cast<const float4*>(from + group * 4);
                add(at_level, d);
            }
        }
    }

    // Leaves o, and its squares by plane, in shared memory.
    __device__ void store() const {
        if (!is_node) return;
        float squares[2] = {};
#pragma unroll
        for (u32 group = 0; group < GROUPS; group++) {
            const u32 i = group * 4;
            *reinterpret_cast<float4*>(row_of(p.shared.outputs, node) + i) = {out[i], out[i + 1], out[i + 2], out[i + 3]};
            if (first + i >= values.num_lanes) continue;
            float sum = is_last[group] ? squares[1] : squares[0];
            sum = __fmaf_rn(out[i], out[i], sum), sum = __fmaf_rn(out[i + 1], out[i + 1], sum);
            sum = __fmaf_rn(out[i + 2], out[i + 2], sum), sum = __fmaf_rn(out[i + 3], out[i + 3], sum);
            if (is_last[group]) squares[1] = sum;
            else squares[0] = sum;
        }
        values.gates.partial_squares[block.warp][planes[0]][node] = squares[0];
        if (planes[1] != planes[0]) values.gates.partial_squares[block.warp][planes[1]][node] = squares[1];
    }
};

// The sums of a single node, a thread per lane: the arithmetic of `NodeSums`.
template <u32 GROUPS>
struct OneNodeSums {
    typedef Values<GROUPS> V;
    const V& values;
    const Block& block;
    const GdnWyParams& p;
    u32 lane, plane;
    float rest, out;

    __device__ explicit OneNodeSums(const V& v) : values(v), block(v.block), p(v.p), lane(threadIdx.x), plane(0) {}

    __device__ bool works() const { return lane < values.num_lanes; }

    __device__ void start() {
        plane = values.plane_of(lane);
        const float* partial = block.memory + p.shared.factors + lane;
        const u32 quarter = p.chunk_rows * V::PARTIAL_ROW;
        const float scale = values.gates.from_state[plane][0];
        float sums[2];
#pragma unroll
        for (u32 which = 0; which < 2; which++) {
            const float* at = partial + which * V::LANES;
            sums[which] = __fmul_rn(scale, (at[0] + at[quarter]) + (at[2 * quarter] + at[3 * quarter]));
        }
        rest = __fsub_rn(block.memory[p.shared.values + lane], sums[0]), out = sums[1];
    }

    __device__ void solve() {
        const float2* factors = values.factors_of(plane);
        const float* log_d = block.memory + p.shared.log_d + lane;
        const u32 depth = block.nodes.depth[0];
#pragma unroll 8
        for (u32 entry = block.nodes.anchor[0] * FOLD_INTERVAL; entry < block.log_len; entry++) {
            const float2 factor = factors[entry * p.chunk_rows];
            const float d = log_d[entry * V::LANES];
            rest = __fmaf_rn(factor.x, d, rest), out = __fmaf_rn(factor.y, d, out);
        }
        // Its path, if it has one, lies in earlier chunks.
        for (u32 level = 0; level < depth; level++) {
            const float2 factor = factors[(block.log_len + level) * p.chunk_rows];
            const float d = __ldcg(p.tail_d + values.value_place(block.segment.first_row + block.nodes.ancestors[level][0]) + lane);
            rest = __fmaf_rn(factor.x, d, rest), out = __fmaf_rn(factor.y, d, out);
        }
        const float d = __fmul_rn(values.gates.beta[plane][0], rest);
        block.memory[p.shared.values + lane] = d;
        block.memory[p.shared.outputs + lane] = __fmaf_rn(values.gates.own[0], d, out);
    }

    // The squares of o over the lanes of one sum warp that belong to a plane, once all are stored.
    __device__ void store_squares() const {
        const u32 warp = threadIdx.x % SUM_WARPS, of_plane = threadIdx.x / SUM_WARPS;
        if (of_plane >= values.num_planes) return;
        const float* outputs = block.memory + p.shared.outputs;
        float sum = 0.0f;
#pragma unroll
        for (u32 i = 0; i < V::OWN; i++) {
            const u32 of_lane = warp * V::OWN + i;
            const float o = outputs[of_lane];
            if (of_lane < values.num_lanes && values.plane_of(of_lane) == of_plane) sum = __fmaf_rn(o, o, sum);
        }
        values.gates.partial_squares[warp][of_plane][0] = sum;
    }
};
