// Gated DeltaNet over the rows of a pass: one launch where blocks come in clusters, with one more for the norm where not.
//
// The blocks of a key head share products of keys and, at the end, squares of outputs: each writes its part into the
// memory of all. Where there are no clusters a block makes all products itself. All arithmetic is the same in both
// forms, and each row's is a function of its own path.
//
// What was committed, and where rows stand, is read before predecessors have finished: it must have been written before
// the kernel ahead of this one began. That holds behind any kernel that waits before it lets the next one start.
#include "gdn_keys.cuh"
#include "gdn_values.cuh"

extern __shared__ float4 dynamic_memory[];

template <u32 TILES, bool IS_CLUSTER>
__device__ __forceinline__ void run(const GdnWyParams& p) {
    __shared__ Rows rows;
    if (IS_CLUSTER) cluster_arrive();
    Block<TILES> block(p, reinterpret_cast<float*>(dynamic_memory), rows);
    const u32 shares = IS_CLUSTER ? p.num_slices : 1;
    block.read_rows();
    Values<TILES> values(block);
    const KeyProducts<TILES> products(block, shares);
    products.fetch_keys();
    values.fetch_committed();
    KeyMaker<TILES> keys(block);
    wait_for_predecessors();
    launch_dependents();
    for (u32 row = 0; block.begin(row); row += block.NODES) {
        const auto gate = values.load_gate(threadIdx.x);
        values.load_values();
        keys.load(0);
        if (row == 0) values.make_gates(gate);
        keys.run(shares);
        values.make_values();
        if (row == 0) {
            thread_copy_wait<0>();
            if (IS_CLUSTER) cluster_wait();
        }
        __syncthreads();
        products.run();
        if (IS_CLUSTER) cluster_arrive();
        values.multiply_states();
        if (IS_CLUSTER) {
            cluster_wait();
        } else {
            __syncthreads();
        }
        values.make_factors();
        __syncthreads();
        values.add_entries();
        if (IS_CLUSTER) {
            values.share_squares();
            cluster_arrive();
            cluster_wait();
            values.store_outputs();
        } else {
            values.keep_outputs();
            __syncthreads();
        }
    }
}

// y from o and its squares, a thread per eight lanes of a row.
extern "C" __global__ void __launch_bounds__(BLOCK_THREADS) gdn_wy_norm(const __grid_constant__ GdnWyParams p) {
    wait_for_predecessors();
    const u32 head_groups = p.value_dim / WARP_VALUES, i = blockIdx.x * BLOCK_THREADS + threadIdx.x;
    if (i >= p.paths.num_rows * p.num_value_heads * head_groups) return;
    const float* squares = p.squares + i / head_groups * head_groups;
    float sum = 0.0f;
    for (u32 group = 0; group < head_groups; group++) sum += squares[group];
    const float scale = norm_scale(p, sum);
    for (u32 lane = 0; lane < WARP_VALUES; lane += 2) {
        const u64 place = static_cast<u64>(i) * WARP_VALUES + lane;
        const float2 o = *reinterpret_cast<const float2*>(p.y + place), z = *reinterpret_cast<const float2*>(p.z + place);
        const float2 weight = *reinterpret_cast<const float2*>(p.norm_weight + i % head_groups * WARP_VALUES + lane);
        store_output(p.y + place, o, scale, weight, {silu(z.x), silu(z.y)});
    }
}

#define GDN_WY_ENTRIES(TILES, BLOCKS)                                                                                               \
    extern "C" __global__ void __launch_bounds__(BLOCK_THREADS, BLOCKS) gdn_wy_##TILES(const __grid_constant__ GdnWyParams p) {       \
        run<TILES, true>(p);                                                                                                        \
    }                                                                                                                               \
    extern "C" __global__ void __launch_bounds__(BLOCK_THREADS, BLOCKS) gdn_wy_alone_##TILES(const __grid_constant__ GdnWyParams p) { \
        run<TILES, false>(p);                                                                                                       \
    }

GDN_WY_ENTRIES(1, 1)
GDN_WY_ENTRIES(2, 1)
GDN_WY_ENTRIES(4, 1)
