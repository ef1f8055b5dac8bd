// The matmul of slice_sums.cuh and octet_sums.cuh: a warp's stream of units, and the kernels of a weight format.
#pragma once

#include "matmul_rows.cuh"
#include "octet_sums.cuh"

template <class Weights, u32 GROUPS, u32 BLOCK_OCTETS>
__device__ __forceinline__ void stream_units(const MatmulParams& p, const SharedLayout<Weights, GROUPS, BLOCK_OCTETS>& shared, u32 slice,
                                             u32 lane, UnitCursor unit, u32 num_units, u32 k_tiles, u32 num_tiles) {
    WeightRing<Weights, BLOCK_OCTETS> ring{p, k_tiles, num_tiles, slice, lane,
                                           shared.ring + slice * p.ring_slots * shared.slot_bytes, shared.slot_bytes,
                                           shared.ring_full + slice * p.ring_slots * 8,
                                           read_once_policy(), unit, {}, {}, num_units, 0};
    ring.find_slices();
    SliceSpan spans[BLOCK_OCTETS];
#pragma unroll
    for (u32 octet = 0; octet < BLOCK_OCTETS; octet++) {
        spans[octet] = slice_span(p, k_tiles, unit.group * BLOCK_OCTETS + octet, slice);
    }
    u32 asked = 0;  // octet of the group to ask for next
    for (u32 slot = 0; slot < p.ring_slots; slot++) {
        ring.ask(slot, asked);
        asked = (asked + 1) % BLOCK_OCTETS;
    }
    // The ring's barriers are the warp's affair, these are the block's. Weights are on their way by now.
    if (threadIdx.x < shared.BUFFERS) {
        barrier_init(shared.sums_full + lane * 8, SLICES);
        barrier_init(shared.sums_empty + lane * 8, 1);
    }
    init_inbox<Weights, GROUPS, BLOCK_OCTETS>(p, shared);
    barrier_init_fence();
    __syncthreads();
    if (p.cluster_blocks > 1) cluster_arrive();
    wait_for_predecessors();

    typename Weights::template Rows<GROUPS> rows[BLOCK_OCTETS];
#pragma unroll
    for (u32 octet = 0; octet < BLOCK_OCTETS; octet++) load_slice_rows<GROUPS>(p, spans[octet], k_tiles, lane, rows[octet]);
    if (p.cluster_blocks > 1) cluster_wait();
    u32 slot = 0, parity = 0;
    const u32 num_steps = p.cluster_blocks > 1 ? num_units + 2 : num_units + 1;
    for (u32 i = 0; i < num_steps; i++) {
        if (i < num_units) {
            if (i > 0 && unit.advance(num_tiles)) {
#pragma unroll
                for (u32 octet = 0; octet < BLOCK_OCTETS; octet++) {
                    spans[octet] = slice_span(p, k_tiles, unit.group * BLOCK_OCTETS + octet, slice);
                    load_slice_rows<GROUPS>(p, spans[octet], k_tiles, lane, rows[octet]);
                }
            }
#pragma unroll
            for (u32 octet = 0; octet < BLOCK_OCTETS; octet++) {
                float sums[GROUPS][4] = {};
                const u32 at = ring.slots_start + slot * shared.slot_bytes;
                barrier_wait(ring.barriers_start + slot * 8, parity);
                __syncwarp();
                const typename Weights::Slice arrived(p, unit.tile, at, spans[octet].len, lane);
                multiply_slice<Weights>(arrived, spans[octet].len, rows[octet], sums);
                // The slot's bytes are in registers, and used: it may be written again.
                __syncwarp();
                ring.ask(slot, asked);
                asked = (asked + 1) % BLOCK_OCTETS;
                if (++slot == p.ring_slots) slot = 0, parity ^= 1;
                leave_slice_sums<Weights, GROUPS, BLOCK_OCTETS>(shared, i * BLOCK_OCTETS + octet, slice, lane, sums);
            }
        }
        if (i > 0 && i <= num_units) {
            if ((i - 1) % SLICES == slice) {
                // Behind the last unit the cursor stays.
                const UnitCursor finished = unit.before(i < num_units, num_tiles);
                finish_unit<Weights, GROUPS, BLOCK_OCTETS>(p, shared, i - 1, finished, lane);
            }
        }
        if (i > 1 && p.cluster_blocks > 1) {
            // One warp for each inbox slot, so that the slot's phases are waited for in their order.
            const InboxPlace place(p, i - 2);
            if (place.owner == (blockIdx.x & p.cluster_blocks - 1) && slice == SLICES / 2 + place.slot) {
                const UnitCursor owned = unit.before(min(i, num_units - 1) - (i - 2), num_tiles);
                add_inbox<Weights, GROUPS, BLOCK_OCTETS>(p, shared, i - 2, owned.tile, lane);
            }
        }
    }
}

template <class Weights, u32 GROUPS, u32 BLOCK_OCTETS>
__device__ __forceinline__ void skinny_matmul(const MatmulParams& p) {
    launch_dependents();
    extern __shared__ __align__(128) u8 shared_bytes[];
    const SharedLayout<Weights, GROUPS, BLOCK_OCTETS> shared(p, shared_address(shared_bytes));
    // Taken from one lane, so that the compiler knows that a warp agrees on it.
    const u32 warp = __shfl_sync(0xFFFFFFFF, threadIdx.x / WARP_LANES, 0), lane = threadIdx.x % WARP_LANES;
    const u32 k_tiles = (p.in_features + TILE_COLUMNS - 1) / TILE_COLUMNS;
    const u32 num_tiles = p.num_tiles;
    // A cluster's blocks take the same tiles, each its own octets; without clusters a block takes whatever is its share.
    const Run run(p, blockIdx.x >> log2_of(p.cluster_blocks));
    const UnitCursor first_unit(blockIdx.x & p.cluster_blocks - 1, run.start, num_tiles);
    for (u32 slot = lane; slot < p.ring_slots; slot += WARP_LANES) {
        barrier_init(shared.ring_full + (warp * p.ring_slots + slot) * 8, COPY_ARRIVALS);
    }
    barrier_init_fence();
    __syncwarp();
    stream_units<Weights, GROUPS, BLOCK_OCTETS>(p, shared, warp, lane, first_unit, run.len, k_tiles, num_tiles);
    if (p.cluster_blocks > 1) {
        // Each warp has waited for the turn before its own: what is left to wait for is one phase of each barrier.
        __syncthreads();
        if (warp == 0) wait_for_owners<Weights, GROUPS, BLOCK_OCTETS>(p, shared, run.len, lane);
    } else if (p.num_octets > BLOCK_OCTETS) {
        wait_for_grid(p.grid_barrier);
        add_octets<GROUPS>(p, num_tiles);
    }
}

// Arguments of `round_rows`; mirrored by the launcher.
struct RoundRowsParams {
    const float* x;
    u16* rounded;
    ArrangedRows arranged;
    u32 num_rows;
    u32 in_features;
};

// fp32 rows to BF16, each padded with zeros to whole super-tiles: what the matmuls take as activations.
extern "C" __global__ void round_rows(const __grid_constant__ RoundRowsParams p) {
    launch_dependents();
    wait_for_predecessors();
    const u32 padded = (p.in_features + TILE_COLUMNS - 1) / TILE_COLUMNS * TILE_COLUMNS;
    const u64 num_pairs = static_cast<u64>(p.num_rows) * padded / 2;
    for (u64 i = blockIdx.x * blockDim.x + threadIdx.x; i < num_pairs; i += gridDim.x * blockDim.x) {
        const u32 row = 2 * i / padded, column = 2 * i % padded;
        const float* from = p.x + static_cast<u64>(row) * p.in_features + column;
        const float low = column < p.in_features ? from[0] : 0.0f, high = column + 1 < p.in_features ? from[1] : 0.0f;
        const u32 pair = pack_bf16(low, high);
        reinterpret_cast<u32*>(p.rounded)[i] = pair;
        p.arranged.store_pair(row, column, pair);
    }
}

// Kernels of one weight format for 8, 16, 24 and 32 rows; `_2` takes two octets at a time.
#define SKINNY_MATMUL_KERNELS(NAME, ...)                                                                       \
    SKINNY_MATMUL_KERNEL(NAME##_8, 1, 1, __VA_ARGS__)                                                          \
    SKINNY_MATMUL_KERNEL(NAME##_8_2, 1, 2, __VA_ARGS__)                                                        \
    SKINNY_MATMUL_KERNEL(NAME##_16, 2, 1, __VA_ARGS__)                                                         \
    SKINNY_MATMUL_KERNEL(NAME##_16_2, 2, 2, __VA_ARGS__)                                                       \
    SKINNY_MATMUL_KERNEL(NAME##_24, 3, 1, __VA_ARGS__)                                                         \
    SKINNY_MATMUL_KERNEL(NAME##_32, 4, 1, __VA_ARGS__)
#define SKINNY_MATMUL_KERNEL(NAME, GROUPS, BLOCK_OCTETS, ...)                                                  \
    extern "C" __global__ void __launch_bounds__(BLOCK_THREADS, 1) NAME(const __grid_constant__ MatmulParams p) { \
        skinny_matmul<__VA_ARGS__, GROUPS, BLOCK_OCTETS>(p);                                                   \
    }
