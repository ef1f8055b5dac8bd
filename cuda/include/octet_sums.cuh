// From octet sums to the output: the last step of skinny_matmul.cuh.
//
// If a block holds all octets of a tile it adds them itself. Else, in a cluster of blocks that hold them between them,
// the blocks take turns in owning a tile: each sends its octets to the owner's inbox in shared memory, which has room
// for `inbox_slots` tiles and says to each sender when a slot is free again. Without clusters, sums go to global memory
// and the grid adds them once all blocks are through. The order of additions is the same in all three.
#pragma once

#include "signals.cuh"
#include "slice_sums.cuh"

// Stores four channels of a row, the first of them number `within` of the tile.
__device__ __forceinline__ void store_channels(const MatmulParams& p, u32 row, PartTile place, u32 within, float4 sum) {
    if (row >= p.num_rows) return;
    const MatmulPart& part = p.parts[place.part];
    const u32 channel = place.tile * TILE_CHANNELS + within;
    float* y = part.y + static_cast<u64>(row) * part.out_features + channel;
    if (part.out_features % 4 == 0 && channel < part.out_features) {
        float4* to = reinterpret_cast<float4*>(y);
        if (p.adds_to_output) {
            float4 before = *to;
            add_to(before, sum);
            sum = before;
        }
        *to = sum;
        return;
    }
    const float values[4] = {sum.x, sum.y, sum.z, sum.w};
#pragma unroll
    for (u32 c = 0; c < 4; c++) {
        if (channel + c < part.out_features) y[c] = p.adds_to_output ? y[c] + values[c] : values[c];
    }
}

// Where a tile meets its owner: the block's `index`-th unit.
struct InboxPlace {
    u32 owner, slot, parity;

    __device__ __forceinline__ InboxPlace(const MatmulParams& p, u32 index) {
        // All powers of two, and divisions take their time.
        const u32 turn = index >> log2_of(p.cluster_blocks);
        owner = index & p.cluster_blocks - 1;
        slot = turn & p.inbox_slots - 1;
        parity = turn >> log2_of(p.inbox_slots) & 1;
    }
};

// Adds the slices of the block's unit `index` to octets and passes these on.
template <class Weights, u32 GROUPS, u32 BLOCK_OCTETS>
__device__ __forceinline__ void finish_unit(const MatmulParams& p, const SharedLayout<Weights, GROUPS, BLOCK_OCTETS>& shared,
                                            u32 index, UnitCursor unit, u32 lane) {
    const bool is_whole = p.num_octets == BLOCK_OCTETS;
    const InboxPlace place(p, index);
    if (p.cluster_blocks > 1) {
        barrier_wait(shared.inbox_free + (place.owner * p.inbox_slots + place.slot) * 8, place.parity ^ 1);
    }
    float4 total[GROUPS];
#pragma unroll
    for (u32 i = 0; i < BLOCK_OCTETS; i++) {
        float4 sums[GROUPS];
        add_slices<Weights, GROUPS, BLOCK_OCTETS>(shared, index * BLOCK_OCTETS + i, lane, sums);
        const u32 octet = unit.group * BLOCK_OCTETS + i;
        const u32 inbox = shared.inbox + (place.slot * p.num_octets + octet) * shared.OCTET_SUM_BYTES + lane * 16;
#pragma unroll
        for (u32 group = 0; group < GROUPS; group++) {
            if (is_whole) {
                if (i == 0) total[group] = sums[group];
                else add_to(total[group], sums[group]);
            } else if (p.cluster_blocks > 1) {
                store_in_block(address_in_block(inbox + group * WARP_LANES * 16, place.owner), sums[group],
                               address_in_block(shared.inbox_full + place.slot * 8, place.owner));
            } else {
                const u64 first = (static_cast<u64>(unit.tile) * p.num_octets + octet) * GROUPS * WARP_LANES;
                __stcg(p.octet_sums + first + group * WARP_LANES + lane, sums[group]);
            }
        }
    }
    if (!is_whole) return;
    const PartTile tile(p, unit.tile);
#pragma unroll
    for (u32 group = 0; group < GROUPS; group++) {
        store_channels(p, group * 8 + lane / 4, tile, lane % 4 * 4, total[group]);
    }
}

// The owner's part for the block's unit `index`: adds the octets in its inbox.
template <class Weights, u32 GROUPS, u32 BLOCK_OCTETS>
__device__ __forceinline__ void add_inbox(const MatmulParams& p, const SharedLayout<Weights, GROUPS, BLOCK_OCTETS>& shared,
                                          u32 index, u32 tile, u32 lane) {
    const InboxPlace place(p, index);
    const u32 full = shared.inbox_full + place.slot * 8;
    barrier_wait(full, place.parity);
    float4 total[GROUPS];
    for (u32 octet = 0; octet < p.num_octets; octet++) {
        const u32 from = shared.inbox + (place.slot * p.num_octets + octet) * shared.OCTET_SUM_BYTES + lane * 16;
#pragma unroll
        for (u32 group = 0; group < GROUPS; group++) {
            const float4 sum = load_shared_float4(from + group * WARP_LANES * 16);
            if (octet == 0) total[group] = sum;
            else add_to(total[group], sum);
        }
    }
    const PartTile part_tile(p, tile);
#pragma unroll
    for (u32 group = 0; group < GROUPS; group++) {
        store_channels(p, group * 8 + lane / 4, part_tile, lane % 4 * 4, total[group]);
    }
    __syncwarp();
    if (lane == 0) barrier_expect(full, p.num_octets * shared.OCTET_SUM_BYTES);
    __syncwarp();
    if (lane < p.cluster_blocks) {
        barrier_arrive_in_block(address_in_block(shared.inbox_free + (place.owner * p.inbox_slots + place.slot) * 8, lane));
    }
}

template <class Weights, u32 GROUPS, u32 BLOCK_OCTETS>
__device__ __forceinline__ void init_inbox(const MatmulParams& p, const SharedLayout<Weights, GROUPS, BLOCK_OCTETS>& shared) {
    if (p.cluster_blocks == 1) return;
    if (threadIdx.x < p.inbox_slots) {
        const u32 full = shared.inbox_full + threadIdx.x * 8;
        barrier_init(full, 1);
        barrier_expect(full, p.num_octets * shared.OCTET_SUM_BYTES);
    }
    if (threadIdx.x < p.inbox_slots * p.cluster_blocks) barrier_init(shared.inbox_free + threadIdx.x * 8, 1);
}

// Returns once what was sent to other blocks for the `num_units` units of this one has been taken: it may leave, for nobody
// reaches into it any more. Called by one warp.
template <class Weights, u32 GROUPS, u32 BLOCK_OCTETS>
__device__ __forceinline__ void wait_for_owners(const MatmulParams& p, const SharedLayout<Weights, GROUPS, BLOCK_OCTETS>& shared,
                                                u32 num_units, u32 lane) {
    for (u32 inbox = lane; inbox < p.cluster_blocks * p.inbox_slots; inbox += WARP_LANES) {
        // The first unit that met there, and how often one did.
        const u32 first = inbox % p.inbox_slots * p.cluster_blocks + inbox / p.inbox_slots, apart = p.cluster_blocks * p.inbox_slots;
        if (num_units <= first) continue;
        const u32 num_times = (num_units - first + apart - 1) / apart;
        barrier_wait(shared.inbox_free + inbox * 8, (num_times - 1) & 1);
    }
}

// Adds the octets of this block's share of the tiles, which any blocks may have computed. A warp has the sums of several
// groups of rows on their way at a time: one after the other would each take a round trip to the L2 cache. There are at
// least two octets, and an even number of them.
template <u32 GROUPS>
__device__ __forceinline__ void add_octets(const MatmulParams& p, u32 num_tiles) {
    constexpr u32 AT_A_TIME = 4;
    const u32 first = blockIdx.x * num_tiles / gridDim.x, end = (blockIdx.x + 1) * num_tiles / gridDim.x;
    const u32 lane = threadIdx.x % WARP_LANES;
    for (u32 i = first * GROUPS + threadIdx.x / WARP_LANES; i < end * GROUPS; i += AT_A_TIME * SLICES) {
        const float4* from[AT_A_TIME];
        float4 total[AT_A_TIME];
#pragma unroll
        for (u32 b = 0; b < AT_A_TIME; b++) {
            const u32 own = min(i + b * SLICES, end * GROUPS - 1), tile = own / GROUPS, group = own % GROUPS;
            from[b] = p.octet_sums + (static_cast<u64>(tile) * p.num_octets * GROUPS + group) * WARP_LANES + lane;
        }
        for (u32 octet = 0; octet < p.num_octets; octet += 2) {
            float4 even[AT_A_TIME], odd[AT_A_TIME];
#pragma unroll
            for (u32 b = 0; b < AT_A_TIME; b++) {
                even[b] = __ldcg(from[b] + octet * GROUPS * WARP_LANES);
                odd[b] = __ldcg(from[b] + (octet + 1) * GROUPS * WARP_LANES);
            }
#pragma unroll
            for (u32 b = 0; b < AT_A_TIME; b++) {
                if (octet == 0) total[b] = even[b];
                else add_to(total[b], even[b]);
                add_to(total[b], odd[b]);
            }
        }
#pragma unroll
        for (u32 b = 0; b < AT_A_TIME; b++) {
            const u32 own = i + b * SLICES;
            if (own < end * GROUPS) store_channels(p, own % GROUPS * 8 + lane / 4, PartTile(p, own / GROUPS), lane % 4 * 4, total[b]);
        }
    }
}
