// The matmul of slice_sums.cuh for 17..32 rows where blocks have much shared memory: same order, same bits, twice the warps.
//
// Activations of so many rows fill the registers of eight warps, and two warps a scheduler cannot hide each other's waits.
// Here they lie in shared memory as operands B, read once a launch, and sixteen warps share them: a block holds one octet,
// eight warps a tile of 16 channels, two tiles at a time (*lanes* of tiles). A tile's slice sums go from warp to warp:
// slice s adds its own to the sum of those before, so that they are added in ascending order by whoever is through, and
// nobody collects. The octets of a tile meet in the inbox of the block of the cluster whose turn it is (octet_sums.cuh).
#pragma once

#include "octet_sums.cuh"

constexpr u32 STAGED_LANES = 2;        // tiles that a block works on at a time
constexpr u32 STAGED_THREADS = STAGED_LANES * BLOCK_THREADS;
constexpr u32 PREFIX_BUFFERS = 2;      // tiles of a lane whose sums are on their way

// Shared memory; the launcher computes the same size.
template <class Weights, u32 GROUPS>
struct StagedLayout {
    static constexpr u32 SUM_BYTES = GROUPS * WARP_LANES * 16;  // of an octet of a tile
    static constexpr u32 ROWS_BYTES = GROUPS * 1024;            // of a super-tile
    u32 rows, slot_bytes, ring, prefix, inbox, ring_full, prefix_full, inbox_full, inbox_free;

    __device__ __forceinline__ StagedLayout(const MatmulParams& p, u32 start) {
        rows = start;
        slot_bytes = Weights::NOTE_BYTES + p.piece_tiles * Weights::TILE_BYTES;
        ring = rows + p.octet_tiles * ROWS_BYTES;
        prefix = ring + STAGED_LANES * SLICES * p.ring_slots * slot_bytes;
        inbox = prefix + STAGED_LANES * PREFIX_BUFFERS * SUM_BYTES;
        ring_full = inbox + (p.cluster_blocks > 1 ? STAGED_LANES * p.inbox_slots * p.num_octets * SUM_BYTES : 0);
        prefix_full = ring_full + STAGED_LANES * SLICES * p.ring_slots * 8;
        inbox_full = prefix_full + STAGED_LANES * SLICES * PREFIX_BUFFERS * 8;
        inbox_free = inbox_full + STAGED_LANES * p.inbox_slots * 8;
    }
};

// A warp's ring: pieces of its slice of tile after tile of its lane.
template <class Weights>
struct StagedRing {
    const MatmulParams& p;
    const u32 k_tiles, slice_of_all, lane;
    const SliceSpan span;
    const u32 slots_start, slot_bytes, barriers_start;
    u32 tile, end_tile;  // the next piece's, and with which the run ends
    u32 part_end;
    u32 first;           // the next piece's first super-tile in its slice
    const u8* from;      // the slice

    __device__ __forceinline__ u64 tile_stride() const {
        return static_cast<u64>(k_tiles) * Weights::STORED_TILE_BYTES + p.num_octets * SLICES * Weights::NOTE_BYTES;
    }

    __device__ __forceinline__ void find_slice() {
        if (tile >= end_tile) return;
        const PartTile place(p, tile);
        part_end = p.parts[place.part].end_tile;
        from = p.parts[place.part].weights + place.tile * tile_stride() + span.first * Weights::STORED_TILE_BYTES +
               slice_of_all * Weights::NOTE_BYTES;
    }

    __device__ __forceinline__ void ask(u32 slot) {
        if (tile >= end_tile) return;
        const u32 barrier = barriers_start + slot * 8, to = slots_start + slot * slot_bytes;
        copy_piece<Weights>(to, from, span.len, first, min(span.len - first, p.piece_tiles), barrier, read_once_policy(), lane);
        first += p.piece_tiles;
        if (first < span.len) return;
        first = 0;
        tile += STAGED_LANES;
        if (tile >= part_end) find_slice();
        else from += tile_stride() * STAGED_LANES;
    }
};

// Brings the block's octet of the activations to shared memory: [super-tile][row group][half of a lane's columns][lane].
template <u32 GROUPS>
__device__ __forceinline__ void stage_rows(const MatmulParams& p, u32 to, u32 first_tile, u32 num_tiles, u32 k_tiles) {
    const u32 lane = threadIdx.x % WARP_LANES, half = lane % 2, quad = lane / 2 % 4;
    for (u32 i = threadIdx.x / WARP_LANES; i < num_tiles * GROUPS * 2; i += STAGED_THREADS / WARP_LANES) {
        const u32 token = i % 2 * 4 + lane / 8, group = i / 2 % GROUPS, j = i / 2 / GROUPS;
        // Where there is no such row any other will do: nobody looks at what comes of it.
        const u32 row = min(group * 8 + token, p.num_rows - 1);
        const u16* from = p.x + (static_cast<u64>(row) * k_tiles + first_tile + j) * TILE_COLUMNS + quad * 16 + half * 8;
        const u32 at = to + ((j * GROUPS + group) * 2 + half) * 512 + (token * 4 + quad) * 16;
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(at), "l"(from) : "memory");
    }
    asm volatile("cp.async.wait_all;" ::: "memory");
}

// As multiply_piece, operands B from shared memory: `rows` is the first super-tile's, at this lane.
template <class Weights, u32 GROUPS>
__device__ __forceinline__ void multiply_staged(const typename Weights::Piece& piece, u32 first, u32 num, u32 rows, float (&sums)[GROUPS][4]) {
    typename Weights::Codes codes;
    piece.load(0, codes);
#pragma unroll 1
    for (u32 j = 0; j < num; j++) {
        u32 a[4][4];
        piece.decode(codes, a);
        // Past the end this loads what lies behind in shared memory, and nobody looks at it.
        piece.load(j + 1, codes);
        piece.patch(first + j, a);
#pragma unroll
        for (u32 half = 0; half < 2; half++) {
            uint4 b[GROUPS];
#pragma unroll
            for (u32 group = 0; group < GROUPS; group++) b[group] = load_shared_16(rows + (group * 2 + half) * 512);
#pragma unroll
            for (u32 group = 0; group < GROUPS; group++) mma_m16n8k16(sums[group], a[2 * half], b[group].x, b[group].y);
#pragma unroll
            for (u32 group = 0; group < GROUPS; group++) mma_m16n8k16(sums[group], a[2 * half + 1], b[group].z, b[group].w);
        }
        rows += GROUPS * 1024;
    }
}

// Stores a tile's sums as matrix instructions leave them.
template <u32 GROUPS>
__device__ __forceinline__ void store_tile(const MatmulParams& p, u32 of_all, u32 lane, const float4 (&sums)[GROUPS]) {
    const PartTile place(p, of_all);
    const MatmulPart& part = p.parts[place.part];
    const u32 channel = place.tile * TILE_CHANNELS + lane / 4;
#pragma unroll
    for (u32 group = 0; group < GROUPS; group++) {
        const float values[4] = {sums[group].x, sums[group].y, sums[group].z, sums[group].w};
#pragma unroll
        for (u32 c = 0; c < 4; c++) {
            const u32 row = group * 8 + lane % 4 * 2 + c % 2, at = channel + c / 2 * 8;
            if (row >= p.num_rows || at >= part.out_features) continue;
            float* y = part.y + static_cast<u64>(row) * part.out_features + at;
            *y = p.adds_to_output ? *y + values[c] : values[c];
        }
    }
}

template <class Weights, u32 GROUPS>
struct StagedSums {
    const MatmulParams& p;
    const StagedLayout<Weights, GROUPS>& shared;
    const u32 octet, tile_lane, slice, lane;

    // Adds the sums of the lane's unit `index` to those of the slices before, and passes them on.
    __device__ __forceinline__ void pass_on(u32 index, u32 tile, const float (&own)[GROUPS][4]) const {
        const u32 buffer = index % PREFIX_BUFFERS, parity = index / PREFIX_BUFFERS & 1;
        const u32 at = shared.prefix + (tile_lane * PREFIX_BUFFERS + buffer) * shared.SUM_BYTES + lane * 16;
        // Of slice s: that the sums of those before are there. Of slice 0: that the last has taken the buffer's before.
        const u32 barriers = shared.prefix_full + (tile_lane * PREFIX_BUFFERS + buffer) * SLICES * 8;
        float4 sums[GROUPS];
        barrier_wait(barriers + slice * 8, slice == 0 ? parity ^ 1 : parity);
#pragma unroll
        for (u32 group = 0; group < GROUPS; group++) {
            sums[group] = {own[group][0], own[group][1], own[group][2], own[group][3]};
            if (slice == 0) continue;
            float4 before = load_shared_float4(at + group * WARP_LANES * 16);
            add_to(before, sums[group]);
            sums[group] = before;
        }
        if (slice + 1 < SLICES) {
#pragma unroll
            for (u32 group = 0; group < GROUPS; group++) store_shared_float4(at + group * WARP_LANES * 16, sums[group]);
        }
        __syncwarp();
        if (lane == 0) barrier_arrive(barriers + (slice + 1) % SLICES * 8);
        if (slice + 1 < SLICES) return;
        if (p.cluster_blocks == 1) return store_tile(p, tile, lane, sums);
        const InboxPlace place(p, index);
        const u32 slot = tile_lane * p.inbox_slots + place.slot;
        barrier_wait_cluster(shared.inbox_free + (place.owner * STAGED_LANES * p.inbox_slots + slot) * 8, place.parity ^ 1);
        const u32 to = address_in_block(shared.inbox + (slot * p.num_octets + octet) * shared.SUM_BYTES + lane * 16, place.owner);
        const u32 full = address_in_block(shared.inbox_full + slot * 8, place.owner);
#pragma unroll
        for (u32 group = 0; group < GROUPS; group++) store_in_block(to + group * WARP_LANES * 16, sums[group], full);
    }

    // The owner's part for the lane's unit `index`: adds the octets in its inbox. Two warps of a lane take turns, so that a
    // slot's phases are waited for in their order.
    __device__ __forceinline__ void add_octets_if_owner(u32 index, u32 tile) const {
        const InboxPlace place(p, index);
        if (place.owner != blockIdx.x % p.cluster_blocks || slice != SLICES / 2 - 1 + place.slot) return;
        const u32 slot = tile_lane * p.inbox_slots + place.slot, full = shared.inbox_full + slot * 8;
        barrier_wait_cluster(full, place.parity);
        float4 sums[GROUPS];
#pragma unroll
        for (u32 group = 0; group < GROUPS; group++) {
            const u32 from = shared.inbox + (slot * p.num_octets * GROUPS + group) * WARP_LANES * 16 + lane * 16;
            sums[group] = load_shared_float4(from);
#pragma unroll 1
            for (u32 i = 1; i < p.num_octets; i++) add_to(sums[group], load_shared_float4(from + i * shared.SUM_BYTES));
        }
        store_tile(p, tile, lane, sums);
        __syncwarp();
        if (lane == 0) barrier_expect(full, p.num_octets * shared.SUM_BYTES);
        __syncwarp();
        if (lane < p.cluster_blocks) {
            const u32 free = shared.inbox_free + (place.owner * STAGED_LANES * p.inbox_slots + slot) * 8;
            barrier_arrive_in_block(address_in_block(free, lane));
        }
    }
};

template <class Weights, u32 GROUPS>
__device__ __forceinline__ void staged_matmul(const MatmulParams& p) {
    extern __shared__ __align__(128) u8 shared_bytes[];
    const StagedLayout<Weights, GROUPS> shared(p, shared_address(shared_bytes));
    const u32 warp = __shfl_sync(0xFFFFFFFF, threadIdx.x / WARP_LANES, 0), lane = threadIdx.x % WARP_LANES;
    const u32 slice = warp % SLICES, tile_lane = warp / SLICES;
    const u32 k_tiles = (p.in_features + TILE_COLUMNS - 1) / TILE_COLUMNS;
    const u32 octet = blockIdx.x % p.cluster_blocks, share = blockIdx.x / p.cluster_blocks, num_shares = gridDim.x / p.cluster_blocks;
    const u32 first_tile = share * p.num_tiles / num_shares, end_tile = (share + 1) * p.num_tiles / num_shares;
    const SliceSpan span = slice_span(p, k_tiles, octet, slice);
    const u32 octet_first = slice_span(p, k_tiles, octet, 0).first, octet_end = slice_span(p, k_tiles, octet + 1, 0).first;

    for (u32 slot = lane; slot < p.ring_slots; slot += WARP_LANES) {
        barrier_init(shared.ring_full + (warp * p.ring_slots + slot) * 8, COPY_ARRIVALS);
    }
    if (threadIdx.x < STAGED_LANES * SLICES * PREFIX_BUFFERS) barrier_init(shared.prefix_full + threadIdx.x * 8, 1);
    if (p.cluster_blocks > 1) {
        if (threadIdx.x < STAGED_LANES * p.inbox_slots) {
            barrier_init(shared.inbox_full + threadIdx.x * 8, 1);
            barrier_expect(shared.inbox_full + threadIdx.x * 8, p.num_octets * shared.SUM_BYTES);
        }
        if (threadIdx.x < STAGED_LANES * p.inbox_slots * p.cluster_blocks) barrier_init(shared.inbox_free + threadIdx.x * 8, 1);
    }
    barrier_init_fence();
    __syncwarp();
    StagedRing<Weights> ring{p, k_tiles, octet * SLICES + slice, lane, span,
                             shared.ring + warp * p.ring_slots * shared.slot_bytes, shared.slot_bytes,
                             shared.ring_full + warp * p.ring_slots * 8, first_tile + tile_lane, end_tile, 0, 0, nullptr};
    ring.find_slice();
    for (u32 slot = 0; slot < p.ring_slots; slot++) ring.ask(slot);
    launch_dependents();
    wait_for_predecessors();
    stage_rows<GROUPS>(p, shared.rows, octet_first, octet_end - octet_first, k_tiles);
    __syncthreads();
    if (p.cluster_blocks > 1) {
        cluster_arrive();
        cluster_wait();
    }

    const StagedSums<Weights, GROUPS> finish{p, shared, octet, tile_lane, slice, lane};
    const u32 rows = shared.rows + (span.first - octet_first) * shared.ROWS_BYTES + lane * 16;
    const u32 num_units = (end_tile - first_tile + STAGED_LANES - 1 - tile_lane) / STAGED_LANES;
    u32 slot = 0, parity = 0;
    for (u32 i = 0; i < num_units + 2; i++) {
        const u32 tile = first_tile + tile_lane + i * STAGED_LANES;
        if (i < num_units) {
            float sums[GROUPS][4] = {};
            for (u32 first = 0; first < span.len; first += p.piece_tiles) {
                barrier_wait(ring.barriers_start + slot * 8, parity);
                __syncwarp();
                const u32 num = min(span.len - first, p.piece_tiles);
                const typename Weights::Piece piece(p, tile, ring.slots_start + slot * shared.slot_bytes, num, lane);
                multiply_staged<Weights, GROUPS>(piece, first, num, rows + first * shared.ROWS_BYTES, sums);
                // The slot's bytes are in registers, and used: it may be written again.
                __syncwarp();
                ring.ask(slot);
                if (++slot == p.ring_slots) slot = 0, parity ^= 1;
            }
            finish.pass_on(i, tile, sums);
        }
        if (p.cluster_blocks > 1 && i > 1 && i - 2 < num_units) finish.add_octets_if_owner(i - 2, tile - 2 * STAGED_LANES);
    }
    if (p.cluster_blocks > 1) {
        // No block leaves while another may still reach into it.
        cluster_arrive();
        cluster_wait();
    }
}

#define STAGED_MATMUL_KERNELS(NAME, ...)         \
    STAGED_MATMUL_KERNEL(NAME##_24, 3, __VA_ARGS__) \
    STAGED_MATMUL_KERNEL(NAME##_32, 4, __VA_ARGS__)
#define STAGED_MATMUL_KERNEL(NAME, GROUPS, ...)                                                                     \
    extern "C" __global__ void __launch_bounds__(STAGED_THREADS, 1) NAME(const __grid_constant__ MatmulParams p) { \
        staged_matmul<__VA_ARGS__, GROUPS>(p);                                                                      \
    }
