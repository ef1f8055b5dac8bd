// Gated DeltaNet over the rows of a pass: one launch where blocks come in clusters, with one more for the norm where not.
//
// The blocks of a key head share products of keys and, at the end, squares of outputs: each writes its part into the
// memory of all. Where there are no clusters a block makes all products itself. All arithmetic is the same in both
// forms, and each row's is a function of its own path.
//
// Weights, and where rows stand, are read before predecessors have finished: that comes from the host, behind whose copies
// kernels start only when those are done. What kernels have written is only brought nearer by then. All that can be done by
// then is: at few rows a launch takes as long as its instructions from there on, one after another.
#include "gdn_factors.cuh"
#include "gdn_keys.cuh"
#include "gdn_values.cuh"

extern __shared__ float4 dynamic_memory[];

constexpr u32 NORM_THREADS = 256;

template <bool IS_CLUSTER, bool IS_SINGLE, u32 TILES>
__device__ __forceinline__ void run_chunk(const Block<TILES>& block, const KeyProducts<TILES, IS_CLUSTER>& products,
                                          KeyMaker<TILES, IS_CLUSTER>& keys, Values<TILES>& values,
                                          const Factors<TILES>& factors, const typename Values<TILES>::Places& first_places) {
    const bool is_first = IS_SINGLE || block.chunk == 0;
    const auto gate = values.load_gate();
    keys.begin();
    if (IS_SINGLE) values.load_values();
    if (is_first) {
        products.fetch_keys();
        values.fetch_committed();
    }
    keys.run();
    // Registers hold keys or values on their way; while these come, so do others' keys.
    if (!IS_SINGLE) values.load_values();
    const auto places = IS_SINGLE ? first_places : values.places();
    if (is_first) values.make_gates(gate);
    // Of a single chunk there are registers, and warps with keys to make leave v for later.
    const bool is_late = IS_SINGLE && keys.has_nodes();
    if (!is_late) values.make_values();
    if (is_first) thread_copy_wait<0>();
    __syncthreads();
    if (keys.IS_SHARED) {
        block.wait_for(Exchange::KEYS);
        keys.interleave();
        __syncthreads();
    }
    products.run();
    if (!IS_SINGLE) keys.store_keys();
    values.template multiply_states<IS_SINGLE>(places);
    if (is_late) values.make_values();
    if (!IS_CLUSTER) __syncthreads();
#pragma unroll 1
    for (u32 plane = 0; factors.has_nodes() && plane < values.num_planes; plane++) {
        const auto decays = factors.make_decays(plane, places.last_stretch == 0);
        if (IS_CLUSTER && plane == 0) block.wait_for(Exchange::PRODUCTS);
        factors.weigh_products(plane, decays);
    }
    values.load_gates();
    __syncthreads();
    values.add_entries(places);
    if (IS_CLUSTER) {
        values.load_norm_weight();
        values.share_squares();
        // What others do not wait for, while theirs come. But then they may send keys of a next chunk.
        if (IS_SINGLE) keys.store_keys();
        values.store_updates();
        values.finish_gates();
        block.wait_for(Exchange::SQUARES);
        values.store_outputs();
    } else {
        values.store_updates();
        values.keep_outputs();
    }
}

// `IS_SINGLE` promises that a segment's rows are one chunk and that a state fits, and leaves registers for a second block.
template <u32 TILES, bool IS_CLUSTER, bool IS_SINGLE>
__device__ __forceinline__ void run(const GdnWyParams& p) {
    __shared__ Rows rows;
    launch_dependents();
    Block<TILES> block(p, reinterpret_cast<float*>(dynamic_memory), rows);
    if (IS_CLUSTER) {
        block.init_barriers();
        cluster_arrive();
    }
    // Loads what depends on no row while rows are on their way.
    Values<TILES> values(block);
    block.read_rows();
    const KeyProducts<TILES, IS_CLUSTER> products(block);
    products.prefetch_keys();
    values.prefetch_committed();
    KeyMaker<TILES, IS_CLUSTER> keys(block);
    const auto expect = [&] {
        if (!IS_CLUSTER || block.warp() > 0) return;
        const u32 products_bytes = products.num_bytes();
        if (block.lane() > 0) return;
        if (keys.IS_SHARED) block.expect(Exchange::KEYS, block.count * 2 * KEY_LEN * sizeof(float));
        block.expect(Exchange::PRODUCTS, products_bytes);
        block.expect(Exchange::SQUARES, block.count * p.heads_per_key * p.value_dim / TILE_VALUES * sizeof(float));
    };
    bool is_left = block.begin(0);
    expect();
    typename Values<TILES>::Places first_places;
    if (IS_SINGLE) first_places = values.places();
    if (IS_CLUSTER) cluster_wait();
    wait_for_predecessors();
    while (is_left) {
        const Factors<TILES> factors{block};
        run_chunk<IS_CLUSTER, IS_SINGLE>(block, products, keys, values, factors, first_places);
        is_left = !IS_SINGLE && block.begin(block.chunk + 1);
        if (!is_left) break;
        __syncthreads();
        expect();
        if (IS_CLUSTER && block.warp() == 0) block.tell_passed();
    }
}

// y from o and its squares, a thread per eight lanes of a row.
extern "C" __global__ void __launch_bounds__(NORM_THREADS) gdn_wy_norm(const __grid_constant__ GdnWyParams p) {
    launch_dependents();
    wait_for_predecessors();
    const u32 head_groups = p.value_dim / TILE_VALUES, row_groups = p.num_value_heads * head_groups;
    const u32 i = p.first_row * row_groups + blockIdx.x * NORM_THREADS + threadIdx.x;
    if (i >= p.end_row * row_groups) return;
    const float* squares = p.squares + i / head_groups * head_groups;
    float sums[4] = {};
    for (u32 i = 0; i < 4; i++) {
        for (u32 group = i; group < head_groups; group += 4) sums[i] += squares[group];
    }
    const float scale = norm_scale(p, (sums[0] + sums[1]) + (sums[2] + sums[3]));
    for (u32 lane = 0; lane < TILE_VALUES; lane += 2) {
        const u64 place = static_cast<u64>(i) * TILE_VALUES + lane;
        const float2 o = *reinterpret_cast<const float2*>(p.outputs + place), z = *reinterpret_cast<const float2*>(p.z + place);
        const float2 weight = *reinterpret_cast<const float2*>(p.norm_weight + i % head_groups * TILE_VALUES + lane);
        store_output(p.y, i / row_groups, i % row_groups * TILE_VALUES + lane, o, scale, weight, {silu(z.x), silu(z.y)});
    }
}

#define GDN_WY_ENTRY(NAME, TILES, IS_CLUSTER, IS_SINGLE, BLOCKS)                                                          \
    extern "C" __global__ void __launch_bounds__(BLOCK_THREADS<TILES>, BLOCKS) NAME(const __grid_constant__ GdnWyParams p) { \
        run<TILES, IS_CLUSTER, IS_SINGLE>(p);                                                                         \
    }

// From 12.0 on shared memory holds one block. Before 9.0 there are no clusters.
#if __CUDA_ARCH__ >= 1200
GDN_WY_ENTRY(gdn_wy_single, 1, true, true, 1)
#elif __CUDA_ARCH__ >= 900
GDN_WY_ENTRY(gdn_wy_single, 1, true, true, 2)
#endif
#if __CUDA_ARCH__ >= 900
GDN_WY_ENTRY(gdn_wy_1, 1, true, false, 1)
GDN_WY_ENTRY(gdn_wy_2, 2, true, false, 1)
GDN_WY_ENTRY(gdn_wy_4, 4, true, false, 1)
#endif
GDN_WY_ENTRY(gdn_wy_alone_1, 1, false, false, 1)
GDN_WY_ENTRY(gdn_wy_alone_2, 2, false, false, 1)
GDN_WY_ENTRY(gdn_wy_alone_4, 4, false, false, 1)
