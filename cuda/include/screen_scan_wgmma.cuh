// The scan of lm_head_screen with wgmma, at the speed at which codes can be read: both operands come from shared memory, so no
// instruction touches a weight between the copy engine and the matrix unit.
//
// A block keeps the codes of all rows for its part of K in shared memory and streams tiles of 64 channels past them, 128
// columns a stage, through a ring that one lane fills. Two warpgroups take tiles in turn, so that one multiplies while the
// other turns sums into bounds or estimates. Where the codes of all rows do not fit, two or four blocks of a cluster hold a part of
// K each: for every tile they exchange sums, and each decides every second or fourth group of eight rows.
#pragma once

#include "screen.cuh"
#include "wgmma.cuh"

constexpr u32 STAGE_CHUNKS = 8;
constexpr u32 STAGE_BYTES = STAGE_CHUNKS * CHUNK_BYTES;
constexpr u32 NUM_CONSUMERS = 2;
constexpr u32 WGMMA_THREADS = NUM_CONSUMERS * GROUP_THREADS + WARP_LANES;

// d += a b for 64 channels x 32 columns of codes and 32 x COLUMNS, exactly; runs on its own until waited for.
template <u32 COLUMNS>
__device__ __forceinline__ void wgmma_k32(int (&d)[COLUMNS / 2], u64 a, u64 b);

#define WGMMA_REGS_4(d, i) "+r"(d[i]), "+r"(d[i + 1]), "+r"(d[i + 2]), "+r"(d[i + 3])
#define WGMMA_REGS_8(d, i) WGMMA_REGS_4(d, i), WGMMA_REGS_4(d, i + 4)
#define WGMMA_REGS_16(d, i) WGMMA_REGS_8(d, i), WGMMA_REGS_8(d, i + 8)
#define WGMMA_REGS_32(d, i) WGMMA_REGS_16(d, i), WGMMA_REGS_16(d, i + 16)

template <>
__device__ __forceinline__ void wgmma_k32<16>(int (&d)[8], u64 a, u64 b) {
    asm volatile(
        "{ .reg .pred adds; setp.ne.u32 adds, %10, 0;"
        "wgmma.mma_async.sync.aligned.m64n16k32.s32.s8.s8 {%0,%1,%2,%3,%4,%5,%6,%7}, %8, %9, adds; }"
        : WGMMA_REGS_8(d, 0) : "l"(a), "l"(b), "r"(1));
}

template <>
__device__ __forceinline__ void wgmma_k32<32>(int (&d)[16], u64 a, u64 b) {
    asm volatile(
        "{ .reg .pred adds; setp.ne.u32 adds, %18, 0;"
        "wgmma.mma_async.sync.aligned.m64n32k32.s32.s8.s8 {%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15}, %16, %17, adds; }"
        : WGMMA_REGS_16(d, 0) : "l"(a), "l"(b), "r"(1));
}

template <>
__device__ __forceinline__ void wgmma_k32<96>(int (&d)[48], u64 a, u64 b) {
    asm volatile(
        "{ .reg .pred adds; setp.ne.u32 adds, %50, 0;"
        "wgmma.mma_async.sync.aligned.m64n96k32.s32.s8.s8 {%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,"
        "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,%32,%33,%34,%35,%36,%37,%38,%39,"
        "%40,%41,%42,%43,%44,%45,%46,%47}, %48, %49, adds; }"
        : WGMMA_REGS_32(d, 0), WGMMA_REGS_16(d, 32) : "l"(a), "l"(b), "r"(1));
}

template <>
__device__ __forceinline__ void wgmma_k32<64>(int (&d)[32], u64 a, u64 b) {
    asm volatile(
        "{ .reg .pred adds; setp.ne.u32 adds, %34, 0;"
        "wgmma.mma_async.sync.aligned.m64n64k32.s32.s8.s8 {%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,"
        "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31}, %32, %33, adds; }"
        : WGMMA_REGS_32(d, 0) : "l"(a), "l"(b), "r"(1));
}

// Where things lie in shared memory; the launcher computes the same size.
template <u32 ROWS>
struct ScanLayout {
    static constexpr u32 COLUMNS = 2 * ROWS, COLUMN_GROUPS = COLUMNS / 8, ROW_GROUPS = ROWS / 8;
    // Sums of a group of rows, high and low: two float4 for each thread.
    static constexpr u32 GROUP_BYTES = 2 * GROUP_THREADS * 16;
    u32 row_codes, ring, inbox, row_bounds, rows_full, ring_full, ring_empty, inbox_full, inbox_free, turns;
    u32 inbox_bytes;  // of a consumer, of the block that decides most groups

    __device__ __forceinline__ ScanLayout(const ScreenParams& p, u32 start) {
        row_codes = start;
        ring = row_codes + p.num_chunks / p.cluster_blocks * COLUMNS * CHUNK_COLUMNS;
        inbox = ring + p.ring_slots * STAGE_BYTES;
        inbox_bytes = (p.cluster_blocks - 1) * groups_of(p, 0) * GROUP_BYTES;
        row_bounds = inbox + NUM_CONSUMERS * inbox_bytes;
        rows_full = row_bounds + ROWS * 16;
        ring_full = rows_full + 8;
        ring_empty = ring_full + p.ring_slots * 8;
        inbox_full = ring_empty + p.ring_slots * 8;
        inbox_free = inbox_full + NUM_CONSUMERS * 8;
        turns = inbox_free + NUM_CONSUMERS * 8;
    }

    // Groups of rows that block `part` of a cluster decides: `part` itself, and every cluster_blocks-th from there.
    static __device__ __forceinline__ u32 groups_of(const ScreenParams& p, u32 part) {
        return (ROW_GROUPS - part + p.cluster_blocks - 1) / p.cluster_blocks;
    }

    // What the others send a consumer of block `part` for a tile.
    __device__ __forceinline__ u32 received_bytes(const ScreenParams& p, u32 part) const {
        return (p.cluster_blocks - 1) * groups_of(p, part) * GROUP_BYTES;
    }
};

// The share of tiles of a cluster.
struct TileRun {
    u32 first, len;

    __device__ __forceinline__ explicit TileRun(const ScreenParams& p) {
        const u32 share = blockIdx.x / p.cluster_blocks, num_shares = gridDim.x / p.cluster_blocks;
        first = static_cast<u64>(share) * p.num_tiles / num_shares;
        len = static_cast<u64>(share + 1) * p.num_tiles / num_shares - first;
    }
};

// The producer: asks for the block's part of each tile, stage by stage; for the rows' codes once they are written.
template <u32 ROWS>
__device__ __forceinline__ void stream_codes(const ScreenParams& p, const ScanLayout<ROWS>& shared, u32 part) {
    const TileRun run(p);
    const u64 policy = read_once_policy();
    const u32 part_chunks = p.num_chunks / p.cluster_blocks, num_stages = part_chunks / STAGE_CHUNKS;
    const u8* from = p.codes + (static_cast<u64>(run.first) * p.num_chunks + part * part_chunks) * CHUNK_BYTES;
    const u32 all_stages = run.len * num_stages;
    u32 slot = 0, parity = 1, in_tile = 0;
    for (u32 i = 0; i < all_stages; i++) {
        if (i == p.ring_slots || (i < p.ring_slots && i + 1 == all_stages)) {
            // The first stages are under way: now what earlier kernels wrote.
            wait_for_predecessors();
            const u32 num_bytes = part_chunks * shared.COLUMNS * CHUNK_COLUMNS;
            barrier_expect(shared.rows_full, num_bytes);
            copy_shared_data(shared.row_codes, p.row_codes + static_cast<u64>(part) * num_bytes, num_bytes, shared.rows_full);
        }
        barrier_wait(shared.ring_empty + slot * 8, parity);
        barrier_expect(shared.ring_full + slot * 8, STAGE_BYTES);
        asm volatile(
            "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::"r"(shared.ring + slot * STAGE_BYTES),
            "l"(from), "r"(STAGE_BYTES), "r"(shared.ring_full + slot * 8), "l"(policy) : "memory");
        from += STAGE_BYTES;
        if (++in_tile == num_stages) in_tile = 0, from += static_cast<u64>(p.num_chunks - part_chunks) * CHUNK_BYTES;
        if (++slot == p.ring_slots) slot = 0, parity ^= 1;
    }
}

// A consumer's sums of one tile, over the block's part of K.
template <u32 ROWS>
__device__ __forceinline__ void multiply_tile(const ScreenParams& p, const ScanLayout<ROWS>& shared, u32 index, int (&sums)[ROWS]) {
    constexpr u32 K32_CHUNKS = 2;
    const u32 num_stages = p.num_chunks / p.cluster_blocks / STAGE_CHUNKS;
    const u32 lane = threadIdx.x % WARP_LANES;
    // Whether a stage's products are started before those of the one before have ended. With more rows they take half as long as a
    // stage to come, and beside the codes of 32 rows the ring has six stages, of which one more would not be under way.
    constexpr bool IS_AHEAD = ROWS == 8;
    u32 last_slot = 0;
    for (u32 stage = 0; stage < num_stages; stage++) {
        const u32 place = index * num_stages + stage, slot = place % p.ring_slots;
        barrier_wait(shared.ring_full + slot * 8, place / p.ring_slots & 1);
        wgmma_begin();
#pragma unroll
        for (u32 i = 0; i < STAGE_CHUNKS / K32_CHUNKS; i++) {
            const u32 chunk = stage * STAGE_CHUNKS + i * K32_CHUNKS;
            const u64 a = matrix_descriptor(shared.ring + slot * STAGE_BYTES + i * K32_CHUNKS * CHUNK_BYTES, CHUNK_BYTES, 128);
            const u64 b = matrix_descriptor(shared.row_codes + chunk * shared.COLUMNS * CHUNK_COLUMNS, shared.COLUMNS * CHUNK_COLUMNS, 128);
            wgmma_k32<2 * ROWS>(sums, a, b);
        }
        wgmma_commit();
        if (IS_AHEAD) wgmma_wait<1>();
        else wgmma_wait<0>();
        if (lane == 0 && (!IS_AHEAD || stage > 0)) barrier_arrive(shared.ring_empty + (IS_AHEAD ? last_slot : slot) * 8);
        last_slot = slot;
    }
    if (!IS_AHEAD) return;
    wgmma_wait<0>();
    if (lane == 0) barrier_arrive(shared.ring_empty + last_slot * 8);
}

// Sends sums of the groups of rows that other blocks decide, and adds what they send of one's own. Sums are integers: the order
// in which they are added does not show.
template <u32 ROWS, u32 BLOCKS>
__device__ __forceinline__ void exchange_sums(const ScreenParams& p, const ScanLayout<ROWS>& shared, u32 part, u32 consumer, u32 turn,
                                              int (&sums)[ROWS]) {
    constexpr u32 ROW_GROUPS = ScanLayout<ROWS>::ROW_GROUPS, GROUP_BYTES = ScanLayout<ROWS>::GROUP_BYTES;
    const u32 thread = threadIdx.x % GROUP_THREADS, lane = thread % WARP_LANES;
    const u32 inbox = shared.inbox + consumer * shared.inbox_bytes + thread * 16;
    const u32 full = shared.inbox_full + consumer * 8, free = shared.inbox_free + consumer * 8;
    barrier_wait(free, turn & 1 ^ 1);
#pragma unroll
    for (u32 n = 0; n < ROW_GROUPS; n++) {
        const u32 decider = n % BLOCKS;
        if (decider == part) continue;
        // A place for each sender, by its distance from the decider.
        const u32 place = (part - decider) % BLOCKS - 1 + n / BLOCKS * (BLOCKS - 1);
        const u32 there = address_in_block(inbox + place * GROUP_BYTES, decider), full_there = address_in_block(full, decider);
#pragma unroll
        for (u32 term = 0; term < 2; term++) {
            const int* of_group = sums + 4 * (term * ROW_GROUPS + n);
            const float4 value = {__int_as_float(of_group[0]), __int_as_float(of_group[1]), __int_as_float(of_group[2]),
                                  __int_as_float(of_group[3])};
            store_in_block(there + term * GROUP_THREADS * 16, value, full_there);
        }
    }
    barrier_wait(full, turn & 1);
#pragma unroll
    for (u32 n = 0; n < ROW_GROUPS; n++) {
        if (n % BLOCKS != part) continue;
#pragma unroll
        for (u32 sender = 0; sender < BLOCKS - 1; sender++) {
            const u32 from = inbox + (sender + n / BLOCKS * (BLOCKS - 1)) * GROUP_BYTES;
#pragma unroll
            for (u32 term = 0; term < 2; term++) {
                int* of_group = sums + 4 * (term * ROW_GROUPS + n);
                const uint4 value = load_shared_16(from + term * GROUP_THREADS * 16);
                of_group[0] += static_cast<int>(value.x), of_group[1] += static_cast<int>(value.y);
                of_group[2] += static_cast<int>(value.z), of_group[3] += static_cast<int>(value.w);
            }
        }
    }
    __syncwarp();
    // Ready for the next turn before any other block may know that it is.
    if (thread == 0) barrier_expect(full, shared.received_bytes(p, part));
    __syncwarp();
    if (lane == 0) {
#pragma unroll
        for (u32 distance = 1; distance < BLOCKS; distance++) barrier_arrive_in_block(address_in_block(free, (part + distance) % BLOCKS));
    }
}

template <u32 ROWS, ScanGoal GOAL, u32 BLOCKS>
__device__ __forceinline__ void decide_tiles(const ScreenParams& p, const ScanLayout<ROWS>& shared, u32 part, u32 consumer) {
    const TileRun run(p);
    const u32 warp = threadIdx.x % GROUP_THREADS / WARP_LANES, lane = threadIdx.x % WARP_LANES;
    const float4* row_bounds = reinterpret_cast<const float4*>(__cvta_shared_to_generic(shared.row_bounds));
    barrier_wait(shared.rows_full, 0);
    for (u32 i = consumer; i < run.len; i += NUM_CONSUMERS) {
        const ScreenGroup channels(p, (run.first + i) * 4 + warp, lane);
        u32 thresholds[ScanLayout<ROWS>::ROW_GROUPS][2];
        if constexpr (GOAL == ScanGoal::BOUNDS) {
#pragma unroll
            for (u32 n = 0; n < shared.ROW_GROUPS; n++) read_thresholds(p, n * 8, lane, thresholds[n]);
        }
        int sums[ROWS] = {};
        // A barrier of the ring tells two phases apart and no more, so tiles are multiplied one after another.
        const u32 turn = i / NUM_CONSUMERS;
        barrier_wait(shared.turns + consumer * 8, turn & 1 ^ (consumer == 0));
        multiply_tile<ROWS>(p, shared, i, sums);
        if (lane == 0) barrier_arrive(shared.turns + (consumer ^ 1) * 8);
        if constexpr (BLOCKS > 1) exchange_sums<ROWS, BLOCKS>(p, shared, part, consumer, turn, sums);
#pragma unroll
        for (u32 n = 0; n < shared.ROW_GROUPS; n++) {
            if (n % BLOCKS != part) continue;
            int high[4], low[4];
#pragma unroll
            for (u32 c = 0; c < 4; c++) high[c] = sums[4 * n + c], low[c] = sums[4 * (shared.ROW_GROUPS + n) + c];
            if constexpr (GOAL == ScanGoal::ESTIMATES) channels.store(p, row_bounds, n * 8, lane, high, low);
            else channels.note(p, row_bounds, n * 8, lane, high, low, thresholds[n]);
        }
    }
    // The block may leave once its last sums have been taken: then nobody reaches into it any more.
    const u32 num_turns = (run.len + NUM_CONSUMERS - 1 - consumer) / NUM_CONSUMERS;
    if (BLOCKS > 1 && num_turns > 0) barrier_wait(shared.inbox_free + consumer * 8, (num_turns - 1) & 1);
}

template <u32 ROWS, ScanGoal GOAL>
__device__ __forceinline__ void screen_scan_wgmma(const ScreenParams& p) {
    extern __shared__ __align__(128) u8 shared_bytes[];
    const ScanLayout<ROWS> shared(p, shared_address(shared_bytes));
    const u32 part = blockIdx.x % p.cluster_blocks;
    if (threadIdx.x == 0) {
        barrier_init(shared.rows_full, 1 + WARP_LANES);
        for (u32 slot = 0; slot < p.ring_slots; slot++) {
            barrier_init(shared.ring_full + slot * 8, 1);
            // The warps of whichever warpgroup takes the tile.
            barrier_init(shared.ring_empty + slot * 8, GROUP_THREADS / WARP_LANES);
        }
        for (u32 consumer = 0; consumer < NUM_CONSUMERS; consumer++) {
            barrier_init(shared.inbox_full + consumer * 8, 1);
            barrier_expect(shared.inbox_full + consumer * 8, shared.received_bytes(p, part));
            barrier_init(shared.inbox_free + consumer * 8, max(p.cluster_blocks - 1, 1) * GROUP_THREADS / WARP_LANES);
            barrier_init(shared.turns + consumer * 8, GROUP_THREADS / WARP_LANES);
        }
    }
    barrier_init_fence();
    __syncthreads();
    if (p.cluster_blocks > 1) cluster_arrive(), cluster_wait();
    // Taken from one lane, so that the compiler knows that a warp agrees on it.
    const u32 consumer = __shfl_sync(ALL_LANES, threadIdx.x / GROUP_THREADS, 0);
    launch_dependents();
    if (consumer == NUM_CONSUMERS) {
        if (threadIdx.x % WARP_LANES == 0) stream_codes<ROWS>(p, shared, part);
        __syncwarp();
    } else {
        wait_for_predecessors();
        if (threadIdx.x < WARP_LANES) {
            float4* row_bounds = reinterpret_cast<float4*>(__cvta_shared_to_generic(shared.row_bounds));
            for (u32 row = threadIdx.x; row < p.num_rows; row += WARP_LANES) row_bounds[row] = p.row_bounds[row];
            barrier_arrive(shared.rows_full);
        }
        // Known to the compiler, so that sums that are sent stay in registers which it can name.
        constexpr u32 ROW_GROUPS = ScanLayout<ROWS>::ROW_GROUPS;
        if (p.cluster_blocks == 1) decide_tiles<ROWS, GOAL, 1>(p, shared, part, consumer);
        else if constexpr (ROW_GROUPS >= 4) {
            if (p.cluster_blocks == 4) decide_tiles<ROWS, GOAL, 4>(p, shared, part, consumer);
            else decide_tiles<ROWS, GOAL, 2>(p, shared, part, consumer);
        } else if constexpr (ROW_GROUPS >= 2) {
            decide_tiles<ROWS, GOAL, 2>(p, shared, part, consumer);
        }
    }
}
