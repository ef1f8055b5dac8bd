// Gated DeltaNet over the rows of a pass: one launch where blocks come in clusters, four per chunk of rows where not.
//
// The blocks of a key head share what its value heads have in common: each makes some of the keys, then some of the
// products of keys, and leaves them in scratch, which lies in the L2 cache. In between they wait for each other. All
// arithmetic is the same in both forms, and each row's is a function of its own path.
#include "gdn_keys.cuh"
#include "gdn_values.cuh"

extern __shared__ float4 dynamic_memory[];

// Products with the states of all anchors, into this block's memory.
template <u32 GROUPS>
__device__ __forceinline__ void multiply_states(const Block& block, const Values<GROUPS>& values) {
    for (u32 anchor = block.nodes.min_anchor; anchor <= block.nodes.max_anchor; anchor++) {
        typename Values<GROUPS>::StateColumns state;
        values.load_state(anchor, state);
        values.multiply_state(anchor, state);
    }
}

// From the chunk's keys to d, o and the squares of o. `wait_for_products` returns when all products are in scratch.
template <u32 GROUPS, typename Wait>
__device__ __forceinline__ void make_updates(const Block& block, const Values<GROUPS>& values, Wait wait_for_products) {
    values.make_gates();
    values.make_values();
    __syncthreads();
    values.sum_decays();
    multiply_states(block, values);
    __syncthreads();
    typename Values<GROUPS>::Sums sums = {};
    const bool sums_up = block.warp < SUM_WARPS;
    if (sums_up && block.lane < block.count) values.take_state(block.lane, sums);
    wait_for_products();
    __syncthreads();
    values.weigh_products();
    __syncthreads();
    if (sums_up) values.solve(sums);
    __syncthreads();
    values.store_updates();
}

template <u32 GROUPS>
__device__ __forceinline__ void run_in_cluster(const GdnWyParams& p) {
    __shared__ Nodes nodes;
    __shared__ Gates gates;
    wait_for_predecessors();
    launch_dependents();
    Block block(p, reinterpret_cast<float*>(dynamic_memory), nodes);
    const Values<GROUPS> values(block, gates);
    values.fetch_log();
    for (u32 chunk = 0; block.begin(chunk); chunk++) {
        if (block.count <= ALONE_NODES) {
            make_all_keys(block);
        } else {
            make_shared_keys(block);
            cluster_arrive();
            cluster_wait();
            fetch_keys(block);
        }
        __syncthreads();
        KeyProducts(block).run();
        cluster_arrive();
        make_updates(block, values, [] { cluster_wait(); });
        cluster_arrive();
        cluster_wait();
        values.make_scales();
        __syncthreads();
        values.store_outputs(false);
    }
}

template <u32 GROUPS>
__device__ __forceinline__ void run_values(const GdnWyParams& p) {
    __shared__ Nodes nodes;
    __shared__ Gates gates;
    wait_for_predecessors();
    Block block(p, reinterpret_cast<float*>(dynamic_memory), nodes);
    const Values<GROUPS> values(block, gates);
    if (!block.begin(p.chunk)) return;
    values.fetch_log();
    fetch_keys(block);
    make_updates(block, values, [] {});
    values.keep_outputs();
}

template <u32 GROUPS>
__device__ __forceinline__ void run_norm(const GdnWyParams& p) {
    __shared__ Nodes nodes;
    __shared__ Gates gates;
    wait_for_predecessors();
    Block block(p, nullptr, nodes);
    const Values<GROUPS> values(block, gates);
    if (!block.begin(p.chunk)) return;
    values.make_scales();
    __syncthreads();
    values.store_outputs(true);
}

extern "C" __global__ void __launch_bounds__(BLOCK_THREADS, 1) gdn_wy_keys(const __grid_constant__ GdnWyParams p) {
    __shared__ Nodes nodes;
    wait_for_predecessors();
    Block block(p, nullptr, nodes);
    if (block.begin(p.chunk)) make_shared_keys(block);
}

extern "C" __global__ void __launch_bounds__(BLOCK_THREADS, 1) gdn_wy_products(const __grid_constant__ GdnWyParams p) {
    __shared__ Nodes nodes;
    wait_for_predecessors();
    Block block(p, reinterpret_cast<float*>(dynamic_memory), nodes);
    if (!block.begin(p.chunk)) return;
    fetch_keys(block);
    __syncthreads();
    KeyProducts(block).run();
}

#define GDN_WY_ENTRIES(LANES, GROUPS)                                                                                        \
    extern "C" __global__ void __launch_bounds__(BLOCK_THREADS, 1) gdn_wy_##LANES(const __grid_constant__ GdnWyParams p) {        \
        run_in_cluster<GROUPS>(p);                                                                                           \
    }                                                                                                                        \
    extern "C" __global__ void __launch_bounds__(BLOCK_THREADS, 1) gdn_wy_values_##LANES(const __grid_constant__ GdnWyParams p) { \
        run_values<GROUPS>(p);                                                                                               \
    }                                                                                                                        \
    extern "C" __global__ void __launch_bounds__(BLOCK_THREADS, 1) gdn_wy_norm_##LANES(const __grid_constant__ GdnWyParams p) {   \
        run_norm<GROUPS>(p);                                                                                                 \
    }

GDN_WY_ENTRIES(16, 1)
GDN_WY_ENTRIES(32, 2)
GDN_WY_ENTRIES(48, 3)
GDN_WY_ENTRIES(64, 4)
