// The matmul of slice_sums.cuh with Hopper's wgmma, for more rows than registers hold: its sums, bit for bit.
//
// A warpgroup takes a *unit* of four tiles, a tile a warp, so that one instruction multiplies 64 channels with all rows.
// Weights go from a warp's own ring through its registers, decoded, straight into operand A; activations lie in shared
// memory as operand B and cost no register. The 2 C warpgroups of a cluster of C blocks hold K between them: a *share* of
// consecutive slices each. What they make of a unit meets in inboxes, of which every block of the cluster owns a part of
// the unit's results. Slices are added pairwise to shares and to octets, octets in ascending order, as everywhere.
#pragma once

#include "octet_sums.cuh"

#if __CUDA_ARCH_FEAT_SM90_ALL

constexpr u32 UNIT_TILES = 4;
constexpr u32 GROUP_WARPS = 4;
constexpr u32 BLOCK_GROUPS = 2;
constexpr u32 FRAGMENT_BYTES = WARP_LANES * 16;  // sums of a tile and eight rows

// Operand B of 16 columns: where it lies in shared memory, core matrices of 8 rows x 16 bytes without swizzle, 128 bytes apart
// along K and `across` bytes from eight rows to the next. The upper bits of an address name the block in its cluster.
__device__ __forceinline__ u64 rows_descriptor(u32 address, u32 across) {
    return static_cast<u64>((address & 0x3FFFF) >> 4) | static_cast<u64>(128 >> 4) << 16 | static_cast<u64>(across >> 4) << 32;
}

#define WGMMA_SUMS_4(d, i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define WGMMA_SUMS_8(d, i) WGMMA_SUMS_4(d, i), WGMMA_SUMS_4(d, i + 4)
#define WGMMA_SUMS_16(d, i) WGMMA_SUMS_8(d, i), WGMMA_SUMS_8(d, i + 8)
#define WGMMA_SUMS_32(d, i) WGMMA_SUMS_16(d, i), WGMMA_SUMS_16(d, i + 16)
#define WGMMA_WEIGHTS(a) "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3])

// d += a b for 64 channels x 16 columns and ROWS rows; runs on its own until waited for.
template <u32 ROWS>
__device__ __forceinline__ void wgmma_k16(float (&d)[ROWS / 2], const u32 (&a)[4], u64 b);

template <>
__device__ __forceinline__ void wgmma_k16<8>(float (&d)[4], const u32 (&a)[4], u64 b) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%0,%1,%2,%3}, {%4,%5,%6,%7}, %8, 1, 1, 1, 0;"
                 : WGMMA_SUMS_4(d, 0) : WGMMA_WEIGHTS(a), "l"(b));
}

template <>
__device__ __forceinline__ void wgmma_k16<16>(float (&d)[8], const u32 (&a)[4], u64 b) {
    asm volatile(
        "wgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16 {%0,%1,%2,%3,%4,%5,%6,%7}, {%8,%9,%10,%11}, %12, 1, 1, 1, 0;"
        : WGMMA_SUMS_8(d, 0) : WGMMA_WEIGHTS(a), "l"(b));
}

template <>
__device__ __forceinline__ void wgmma_k16<32>(float (&d)[16], const u32 (&a)[4], u64 b) {
    asm volatile(
        "wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 {%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15},"
        "{%16,%17,%18,%19}, %20, 1, 1, 1, 0;"
        : WGMMA_SUMS_16(d, 0) : WGMMA_WEIGHTS(a), "l"(b));
}

template <>
__device__ __forceinline__ void wgmma_k16<64>(float (&d)[32], const u32 (&a)[4], u64 b) {
    asm volatile(
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,"
        "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31}, {%32,%33,%34,%35}, %36, 1, 1, 1, 0;"
        : WGMMA_SUMS_32(d, 0) : WGMMA_WEIGHTS(a), "l"(b));
}

__device__ __forceinline__ void wgmma_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Waits until no more than PENDING batches run.
template <u32 PENDING>
__device__ __forceinline__ void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

// Shared memory: activations, rings, inboxes, barriers. The launcher computes the same size.
template <class Weights, u32 ROWS>
struct GroupLayout {
    static constexpr u32 INBOX_BYTES = BLOCK_GROUPS * UNIT_TILES * (ROWS / 8) * FRAGMENT_BYTES;
    u32 slot_bytes, across, rows, ring, inbox, rows_full, ring_full, inbox_full, inbox_free;

    __device__ __forceinline__ GroupLayout(const MatmulParams& p, u32 start) {
        slot_bytes = Weights::NOTE_BYTES + p.slice_tiles * Weights::TILE_BYTES;
        across = p.block_tiles * TILE_COLUMNS * 16;
        rows = start;
        ring = rows + ROWS / 8 * across;
        inbox = ring + SLICES * p.ring_slots * slot_bytes;
        rows_full = inbox + p.inbox_slots * INBOX_BYTES;
        ring_full = rows_full + 8;
        inbox_full = ring_full + SLICES * p.ring_slots * 8;
        inbox_free = inbox_full + p.inbox_slots * 8;
    }
};

// What a warpgroup does: its units, and its share of the slices.
struct GroupWork {
    u32 k_tiles, first_unit, num_units, share, first_slice, num_slices;

    __device__ __forceinline__ GroupWork(const MatmulParams& p, u32 group) {
        k_tiles = (p.in_features + TILE_COLUMNS - 1) / TILE_COLUMNS;
        const u32 all_units = (p.num_tiles + UNIT_TILES - 1) / UNIT_TILES;
        const u32 cluster = blockIdx.x / p.cluster_blocks, num_clusters = gridDim.x / p.cluster_blocks;
        first_unit = cluster * all_units / num_clusters;
        num_units = (cluster + 1) * all_units / num_clusters - first_unit;
        share = blockIdx.x % p.cluster_blocks * BLOCK_GROUPS + group;
        num_slices = (p.num_octets * SLICES) / (p.cluster_blocks * BLOCK_GROUPS);
        first_slice = share * num_slices;
    }

    __device__ __forceinline__ SliceSpan span(const MatmulParams& p, u32 index) const {
        return slice_span(p, k_tiles, 0, first_slice + index);
    }
};

// A warp's ring: asks for its tiles' slices in order, as far ahead as there are slots.
template <class Weights>
struct SliceRing {
    const MatmulParams& p;
    const GroupWork& work;
    const u32 slots_start, slot_bytes, barriers_start, lane;
    const u64 policy;
    u32 next_tile, next_slice, units_left;
    const u8* tile_start;

    __device__ __forceinline__ void find_tile() {
        const PartTile place(p, min(next_tile, p.num_tiles - 1));
        const u64 stride = static_cast<u64>(work.k_tiles) * Weights::STORED_TILE_BYTES + p.num_octets * SLICES * Weights::NOTE_BYTES;
        tile_start = p.parts[place.part].weights + place.tile * stride;
    }

    __device__ __forceinline__ void ask(u32 slot) {
        if (units_left == 0) return;
        const SliceSpan span = work.span(p, next_slice);
        const u32 num_bytes = Weights::NOTE_BYTES + span.len * Weights::TILE_BYTES;
        const u8* from = tile_start + span.first * Weights::STORED_TILE_BYTES + (work.first_slice + next_slice) * Weights::NOTE_BYTES;
        copy_begin(barriers_start + slot * 8, num_bytes, lane);
        copy_async(slots_start + slot * slot_bytes, from, num_bytes, barriers_start + slot * 8, policy, lane);
        if (++next_slice < work.num_slices) return;
        next_slice = 0;
        next_tile += UNIT_TILES;
        if (--units_left > 0) find_tile();
    }
};

// Adds a slice that has arrived to `sums`. A super-tile is decoded while the one before is multiplied.
template <class Weights, u32 ROWS>
__device__ __forceinline__ void multiply_slice(const typename Weights::Slice& slice, u32 len, u64 rows, float (&sums)[ROWS / 2]) {
    u32 a[2][4][4];
#pragma unroll
    for (u32 j = 0; j < MAX_SLICE_TILES; j++) {
        if (j >= len) break;
        if (j >= 2) wgmma_wait<1>();
        slice.decode(j, a[j % 2]);
        slice.patch(j, a[j % 2]);
        wgmma_begin();
#pragma unroll
        for (u32 fragment = 0; fragment < 4; fragment++) {
            wgmma_k16<ROWS>(sums, a[j % 2][fragment], rows + (j * 4 + fragment) * (2 * 128 >> 4));
        }
        wgmma_commit();
    }
    wgmma_wait<0>();
}

// Slices of a share, four at most, are added pairwise.
template <u32 VALUES>
struct PairwiseSum {
    float one[VALUES], two[VALUES];

    __device__ __forceinline__ static void add(float (&to)[VALUES], const float (&before)[VALUES]) {
#pragma unroll
        for (u32 i = 0; i < VALUES; i++) to[i] = before[i] + to[i];
    }

    __device__ __forceinline__ static void keep(float (&to)[VALUES], const float (&from)[VALUES]) {
#pragma unroll
        for (u32 i = 0; i < VALUES; i++) to[i] = from[i];
    }

    // Takes slice number `index`; after the last of one, two or four, `sums` is the sum of all.
    __device__ __forceinline__ void take(u32 index, float (&sums)[VALUES]) {
        if (index % 2 == 0) return keep(one, sums);
        add(sums, one);
        if (index == 1) return keep(two, sums);
        add(sums, two);
    }
};

// Sends a warp's sums of a unit to those who own them.
template <class Weights, u32 ROWS>
__device__ __forceinline__ void send_sums(const MatmulParams& p, const GroupLayout<Weights, ROWS>& shared, u32 index, u32 share, u32 tile,
                                          u32 lane, const float (&sums)[ROWS / 2]) {
    constexpr u32 ROW_GROUPS = ROWS / 8;
    const u32 slot = index % p.inbox_slots, owned = UNIT_TILES * ROW_GROUPS / p.cluster_blocks;
    barrier_wait_cluster(shared.inbox_free + slot * 8, index / p.inbox_slots & 1 ^ 1);
#pragma unroll
    for (u32 group = 0; group < ROW_GROUPS; group++) {
        const u32 place = tile * ROW_GROUPS + group, owner = place / owned;
        const u32 to = shared.inbox + slot * shared.INBOX_BYTES + (share * owned + place % owned) * FRAGMENT_BYTES + lane * 16;
        const float4 value = {sums[4 * group], sums[4 * group + 1], sums[4 * group + 2], sums[4 * group + 3]};
        store_in_block(address_in_block(to, owner), value, address_in_block(shared.inbox_full + slot * 8, owner));
    }
}

__device__ __forceinline__ void store_sum(const MatmulParams& p, const PartTile& place, u32 row, u32 within, float sum) {
    const MatmulPart& part = p.parts[place.part];
    const u32 channel = place.tile * TILE_CHANNELS + within;
    if (row >= p.num_rows || channel >= part.out_features) return;
    float* y = part.y + static_cast<u64>(row) * part.out_features + channel;
    *y = p.adds_to_output ? *y + sum : sum;
}

// A warpgroup's turn in adding up what the block owns of unit number `index`.
template <class Weights, u32 ROWS>
__device__ __forceinline__ void finish_group_unit(const MatmulParams& p, const GroupLayout<Weights, ROWS>& shared, const GroupWork& work,
                                                  u32 index, u32 warp, u32 lane) {
    constexpr u32 ROW_GROUPS = ROWS / 8;
    const u32 slot = index % p.inbox_slots, owned = UNIT_TILES * ROW_GROUPS / p.cluster_blocks;
    const u32 octet_shares = p.cluster_blocks * BLOCK_GROUPS / p.num_octets, full = shared.inbox_full + slot * 8;
    barrier_wait_cluster(full, index / p.inbox_slots & 1);
    for (u32 i = warp; i < owned; i += GROUP_WARPS) {
        const u32 from = shared.inbox + slot * shared.INBOX_BYTES + i * FRAGMENT_BYTES + lane * 16;
        const u32 stride = owned * FRAGMENT_BYTES;
        float totals[4];
#pragma unroll
        for (u32 c = 0; c < 4; c++) {
            totals[c] = add_pairwise(from + c * 4, stride, octet_shares);
            for (u32 octet = 1; octet < p.num_octets; octet++) {
                totals[c] += add_pairwise(from + c * 4 + octet * octet_shares * stride, stride, octet_shares);
            }
        }
        const u32 place = blockIdx.x % p.cluster_blocks * owned + i;
        const u32 tile = (work.first_unit + index) * UNIT_TILES + place / ROW_GROUPS;
        if (tile >= p.num_tiles) continue;
        const PartTile part_tile(p, tile);
        const u32 row = place % ROW_GROUPS * 8 + lane % 4 * 2, channel = lane / 4;
        store_sum(p, part_tile, row, channel, totals[0]);
        store_sum(p, part_tile, row + 1, channel, totals[1]);
        store_sum(p, part_tile, row, channel + 8, totals[2]);
        store_sum(p, part_tile, row + 1, channel + 8, totals[3]);
    }
    __syncwarp();
    // Ready for the next unit before anybody may know that it is.
    if (warp == 0 && lane == 0) barrier_expect(full, shared.INBOX_BYTES);
    __syncwarp();
    if (lane < p.cluster_blocks) barrier_arrive_in_block(address_in_block(shared.inbox_free + slot * 8, lane));
}

// Asks for the block's columns of all rows.
template <class Weights, u32 ROWS>
__device__ __forceinline__ void ask_for_rows(const MatmulParams& p, const GroupLayout<Weights, ROWS>& shared, const GroupWork& first_group) {
    const u32 first = first_group.span(p, 0).first;
    const SliceSpan last = first_group.span(p, BLOCK_GROUPS * first_group.num_slices - 1);
    const u32 num_bytes = (last.first + last.len - first) * TILE_COLUMNS * 16;
    barrier_expect(shared.rows_full, ROWS / 8 * num_bytes);
    if (num_bytes == 0) return;
    for (u32 group = 0; group < ROWS / 8; group++) {
        const u8* from = reinterpret_cast<const u8*>(p.x) + (static_cast<u64>(group) * first_group.k_tiles + first) * TILE_COLUMNS * 16;
        asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                         shared.rows + group * shared.across), "l"(from), "r"(num_bytes), "r"(shared.rows_full) : "memory");
    }
}

template <class Weights, u32 ROWS>
__device__ __forceinline__ void wgmma_matmul(const MatmulParams& p) {
    extern __shared__ __align__(128) u8 shared_bytes[];
    const GroupLayout<Weights, ROWS> shared(p, shared_address(shared_bytes));
    // Taken from one lane, so that the compiler knows that a warp agrees on it.
    const u32 warp = __shfl_sync(0xFFFFFFFF, threadIdx.x / WARP_LANES, 0), lane = threadIdx.x % WARP_LANES;
    const u32 group = warp / GROUP_WARPS, tile = warp % GROUP_WARPS;
    const GroupWork work(p, group);
    for (u32 slot = lane; slot < p.ring_slots; slot += WARP_LANES) barrier_init(shared.ring_full + (warp * p.ring_slots + slot) * 8, 1);
    if (threadIdx.x == 0) barrier_init(shared.rows_full, 1);
    if (threadIdx.x < p.inbox_slots) {
        barrier_init(shared.inbox_full + lane * 8, 1);
        barrier_expect(shared.inbox_full + lane * 8, shared.INBOX_BYTES);
        barrier_init(shared.inbox_free + lane * 8, p.cluster_blocks * GROUP_WARPS);
    }
    barrier_init_fence();
    __syncthreads();
    cluster_arrive();
    SliceRing<Weights> ring{p, work, shared.ring + warp * p.ring_slots * shared.slot_bytes, shared.slot_bytes,
                            shared.ring_full + warp * p.ring_slots * 8, lane, read_once_policy(),
                            work.first_unit * UNIT_TILES + tile, 0, work.num_units, nullptr};
    ring.find_tile();
    for (u32 slot = 0; slot < p.ring_slots; slot++) ring.ask(slot);
    launch_dependents();
    wait_for_predecessors();
    if (threadIdx.x == 0) ask_for_rows<Weights, ROWS>(p, shared, work);
    __syncwarp();
    cluster_wait();
    barrier_wait(shared.rows_full, 0);

    const u32 block_start = GroupWork(p, 0).span(p, 0).first;
    u32 slot = 0, parity = 0;
    for (u32 i = 0; i < work.num_units; i++) {
        const u32 tile_of_all = min((work.first_unit + i) * UNIT_TILES + tile, p.num_tiles - 1);
        float sums[ROWS / 2];
        PairwiseSum<ROWS / 2> share;
        for (u32 index = 0; index < work.num_slices; index++) {
            const SliceSpan span = work.span(p, index);
#pragma unroll
            for (u32 value = 0; value < ROWS / 2; value++) sums[value] = 0.0f;
            barrier_wait(ring.barriers_start + slot * 8, parity);
            __syncwarp();
            const typename Weights::Slice arrived(p, tile_of_all, ring.slots_start + slot * shared.slot_bytes, span.len, lane);
            const u64 rows = rows_descriptor(shared.rows + (span.first - block_start) * TILE_COLUMNS * 16, shared.across);
            multiply_slice<Weights, ROWS>(arrived, span.len, rows, sums);
            // The slot's bytes are in registers, and used: it may be written again.
            __syncwarp();
            ring.ask(slot);
            if (++slot == p.ring_slots) slot = 0, parity ^= 1;
            share.take(index, sums);
        }
        // Before the own sums go out: where there is one inbox slot, they wait for this.
        if (i > 0 && (i - 1) % BLOCK_GROUPS == group) finish_group_unit<Weights, ROWS>(p, shared, work, i - 1, tile, lane);
        send_sums<Weights, ROWS>(p, shared, i, work.share, tile, lane, sums);
    }
    const u32 last = work.num_units - 1;
    if (last % BLOCK_GROUPS == group) finish_group_unit<Weights, ROWS>(p, shared, work, last, tile, lane);
    // No block leaves while another may still reach into it.
    cluster_arrive();
    cluster_wait();
}

#define WGMMA_MATMUL_KERNELS(NAME, ...)       \
    WGMMA_MATMUL_KERNEL(NAME, 8, __VA_ARGS__)  \
    WGMMA_MATMUL_KERNEL(NAME, 16, __VA_ARGS__) \
    WGMMA_MATMUL_KERNEL(NAME, 32, __VA_ARGS__) \
    WGMMA_MATMUL_KERNEL(NAME, 64, __VA_ARGS__)
#define WGMMA_MATMUL_KERNEL(NAME, ROWS, ...)                                                                                    \
    extern "C" __global__ void __launch_bounds__(BLOCK_THREADS, 1) NAME##_wgmma_##ROWS(const __grid_constant__ MatmulParams p) { \
        wgmma_matmul<__VA_ARGS__, ROWS>(p);                                                                                     \
    }
#else
#define WGMMA_MATMUL_KERNELS(NAME, ...)
#endif
