// Gated DeltaNet over the rows of a pass.
//
// Where blocks come in clusters, those of a key head share the products of keys: each makes some and stores them in all.
// Elsewhere each makes all, and the norm, which needs the lanes of several blocks, is a launch of its own. All arithmetic
// is the same in both forms, and each row's is a function of its own path.
#include "gdn_keys.cuh"
#include "gdn_output.cuh"
#include "gdn_sums.cuh"

extern __shared__ float4 dynamic_memory[];

// Keys and values of the chunk's nodes, and the decays that reach them. Warps take items in turn.
template <u32 GROUPS>
__device__ __forceinline__ void make_inputs(const Block& block, const Values<GROUPS>& values) {
    // From the last warp on: the first ones wait for what they loaded ahead.
    const u32 plane = BLOCK_WARPS - 1 - block.warp;
    if (plane < values.num_planes) values.make_weights(plane);
    const Keys keys(block, values.taps(), values.taps_row);
    const u32 num_items = block.count + (block.count * Values<GROUPS>::QUADS + WARP_LANES - 1) / WARP_LANES;
    while (true) {
        u32 item = 0;
        if (block.lane == 0) item = atomicAdd(&block.nodes.next_item, 1u);
        item = __shfl_sync(0xFFFFFFFF, item, 0);
        if (item >= num_items) return;
        if (item < block.count) {
            keys.make(item, block.slice == 0);
        } else {
            values.make_values(item - block.count);
        }
    }
}

// Products with the keys of all entries by half of the warps, with the states by the others.
template <u32 GROUPS>
struct Products {
    const Block& block;
    const Values<GROUPS>& values;
    const KeyProducts keys;
    const bool is_of_state;
    u32 own_warp;
    union Operands {
        float4 key[MAX_KEY_STEPS];
        typename Values<GROUPS>::StateColumns state;
    } operands;
    bool is_loaded;

    // Loads what does not depend on the chunk's own keys.
    __device__ Products(const Block& b, const Values<GROUPS>& v, u32 rank, u32 num_sharing)
        : block(b), values(v), keys(b, v.gates.own, rank, num_sharing), is_of_state(b.warp >= BLOCK_WARPS - STATE_WARPS) {
        own_warp = is_of_state ? b.warp - (BLOCK_WARPS - STATE_WARPS) : b.warp;
        if (is_of_state) {
            is_loaded = true;
            values.load_state(own_warp, block.nodes.min_anchor, operands.state);
        } else {
            is_loaded = own_warp < keys.num_units && keys.tile_of(own_warp) < keys.log_tiles;
            if (is_loaded) keys.load_key(keys.tile_of(own_warp), operands.key);
        }
    }

    __device__ void run() {
        if (is_of_state) {
#pragma unroll 1
            for (u32 anchor = block.nodes.min_anchor; anchor <= block.nodes.max_anchor; anchor++) {
                if (anchor > block.nodes.min_anchor) values.load_state(own_warp, anchor, operands.state);
                values.multiply_state(own_warp, anchor, operands.state);
            }
            return;
        }
#pragma unroll 1
        for (u32 unit = own_warp; unit < keys.num_units; unit += BLOCK_WARPS - STATE_WARPS) {
            if (unit != own_warp || !is_loaded) keys.load_key(keys.tile_of(unit), operands.key);
            keys.multiply(unit, operands.key);
        }
    }
};

// d and o of all nodes: a few warps add, the others see to what y needs besides.
template <u32 GROUPS, typename Sums, typename Solve>
__device__ __forceinline__ void add_up(const Block& block, const Values<GROUPS>& values, Sums& sums, bool works, u32 num_working, Solve solve) {
    if (works) sums.start();
    __syncthreads();
    values.weigh_products();
    __syncthreads();
    if (works) solve();
    if (threadIdx.x >= num_working) values.make_gains(threadIdx.x - num_working, BLOCK_THREADS - num_working);
    __syncthreads();
}

template <u32 GROUPS>
__device__ __forceinline__ void make_updates(const Block& block, const Values<GROUPS>& values) {
    if (block.count == 1) {
        OneNodeSums<GROUPS> sums(values);
        add_up(block, values, sums, sums.works(), 2 * WARP_LANES, [&] { sums.solve(); });
        sums.store_squares();
    } else {
        NodeSums<GROUPS> sums(values);
        add_up(block, values, sums, block.warp < SUM_WARPS, SUM_WARPS * WARP_LANES, [&] {
            if (sums.planes[0] == sums.planes[1]) {
                sums.template solve<false>();
            } else {
                sums.template solve<true>();
            }
            sums.store();
        });
    }
    __syncthreads();
}

template <u32 GROUPS, bool IN_CLUSTER>
__device__ __forceinline__ void run(const GdnWyParams& p) {
    __shared__ Nodes nodes;
    __shared__ Gates gates;
    if (IN_CLUSTER) cluster_arrive();
    Block block(p, reinterpret_cast<float*>(dynamic_memory), nodes);
    const Values<GROUPS> values(block, gates);
    const Output<GROUPS> output(values);
    values.fetch_constants();
    bool has_chunk = block.begin(0);
    values.prefetch();
    wait_for_predecessors();
    launch_dependents();
    values.fetch_log();
    // Nobody stores in a block that has not begun.
    if (IN_CLUSTER) cluster_wait();
    for (u32 chunk = 0; has_chunk; has_chunk = block.begin(++chunk)) {
        Products<GROUPS> products(block, values, IN_CLUSTER ? block.slice : 0, IN_CLUSTER ? p.num_slices : 1);
        make_inputs(block, values);
        __syncthreads();
        products.run();
        thread_copy_wait<0>();
        if (IN_CLUSTER) {
            cluster_arrive();
            cluster_wait();
        } else {
            __syncthreads();
        }
        make_updates(block, values);
        if (IN_CLUSTER) {
            output.share_squares();
            cluster_arrive();
            output.store_updates();
            cluster_wait();
            output.make_scales();
            __syncthreads();
        } else {
            output.keep_squares();
            output.store_updates();
        }
        output.store_outputs(IN_CLUSTER);
    }
}

// y from o, where that is a launch of its own: a block takes the rows of its segment and its slice's lanes.
template <u32 GROUPS>
__device__ __forceinline__ void run_norm(const GdnWyParams& p) {
    __shared__ Nodes nodes;
    __shared__ Gates gates;
    typedef Values<GROUPS> V;
    wait_for_predecessors();
    const Block block(p, nullptr, nodes);
    const V values(block, gates);
    const Output<GROUPS> output(values);
    if (threadIdx.x < V::QUADS) gates.plane[threadIdx.x] = min((values.first_lane + 4 * threadIdx.x) / p.value_dim - values.first_plane, values.num_planes - 1);
    __syncthreads();
    for (u32 i = threadIdx.x; i < block.segment.num_rows * V::QUADS; i += BLOCK_THREADS) {
        const u32 row = i / V::QUADS, lane = i % V::QUADS * 4;
        if (lane >= values.num_lanes) continue;
        const float scale = output.scale_of(values.plane_of(lane), [&](u32 slice, u32 plane) { return output.kept_squares(slice, plane)[row]; });
        float4* y = reinterpret_cast<float4*>(p.y + values.value_place(block.segment.first_row + row) + lane);
        *y = Output<GROUPS>::scaled(*y, scale, values.gain_of(block.segment.first_row + row, lane));
    }
}

#define GDN_WY_ENTRIES(LANES, GROUPS)                                                                                          \
    extern "C" __global__ void __launch_bounds__(BLOCK_THREADS, 1) gdn_wy_##LANES(const __grid_constant__ GdnWyParams p) {       \
        run<GROUPS, true>(p);                                                                                                  \
    }                                                                                                                          \
    extern "C" __global__ void __launch_bounds__(BLOCK_THREADS, 1) gdn_wy_alone_##LANES(const __grid_constant__ GdnWyParams p) { \
        run<GROUPS, false>(p);                                                                                                 \
    }                                                                                                                          \
    extern "C" __global__ void __launch_bounds__(BLOCK_THREADS, 1) gdn_wy_norm_##LANES(const __grid_constant__ GdnWyParams p) {  \
        run_norm<GROUPS>(p);                                                                                                   \
    }

GDN_WY_ENTRIES(16, 1)
GDN_WY_ENTRIES(32, 2)
GDN_WY_ENTRIES(48, 3)
GDN_WY_ENTRIES(64, 4)
