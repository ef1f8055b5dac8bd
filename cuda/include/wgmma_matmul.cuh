// The matmul of slice_sums.cuh with Hopper's wgmma, for more rows than registers hold: its sums, bit for bit.
//
// A cluster of blocks takes *units* of 8 or 12 tiles a block and all of ROWS rows. A warp owns a tile: its weights go from the
// tile's ring through its registers, decoded, straight into operand A of its warpgroup; activations pass through shared memory as
// operand B, a super-tile of columns a slot, each block of the cluster bringing its part of them to all. A slice is one chain
// of wgmma from zero, a slice's sum is added to its octet's, an octet's to the total: the one order, so nothing of it
// depends on who computes what. Warps of a last warpgroup ask for weights and rows and signal to other clusters, so that the
// others only multiply: a fence or an atomic takes microseconds while the memory is busy.
//
// Who takes what is in cluster_run.cuh, where sums go in unit_tile.cuh.
#pragma once

#include "unit_tile.cuh"

// Tiles of a unit that a block multiplies, one a warp: where weights are decoded, as many warps as there is shared memory for
// two slices each.
template <class Weights, u32 ROWS>
constexpr u32 BLOCK_TILES = !Weights::IS_DECODED || ROWS > 64 ? 8 : 12;
template <class Weights, u32 ROWS>
constexpr u32 WGMMA_THREADS = (BLOCK_TILES<Weights, ROWS> + 4) * WARP_LANES;

// Registers that are left free beside a block, counted in threads of its own: 16,384, for a block of the small kernel between
// two matmuls. Those wait there while the first matmul runs, and the second one's blocks start as the first one's end, not as
// the small kernel's do. With more rows a prompt is read, and the sums take all registers.
template <u32 ROWS>
constexpr u32 NEIGHBOUR_THREADS = ROWS <= 64 ? 4 * WARP_LANES : 0;

// Registers of a thread: those that multiply take what the last warpgroup leaves of what the block starts with. Asked for more
// than that, they would wait for ever.
template <u32 TILES, u32 ROWS>
struct Registers {
    static constexpr u32 OTHERS = ROWS > 64 ? 40 : 48, MULTIPLYING = ROWS > 64 ? 232 : TILES == 8 ? 168 : 112;
    static constexpr u32 AT_START = 65536 / ((TILES + 4) * WARP_LANES + NEIGHBOUR_THREADS<ROWS>) / 8 * 8;
    static_assert(MULTIPLYING * TILES + OTHERS * 4 <= AT_START * (TILES + 4), "more registers than a block starts with");
};
constexpr u32 ROW_GROUP_BYTES = TILE_COLUMNS * 16;  // eight rows of a super-tile of columns

#if __CUDA_ARCH_FEAT_SM90_ALL
#include "wgmma_bf16.cuh"

// Copies to the same place in every block of the cluster, counted there on the same barrier. Without a hint: what many blocks
// read stays in the L2 cache.
__device__ __forceinline__ void copy_to_cluster(u32 to, const u8* from, u32 num_bytes, u32 barrier) {
    constexpr u16 all = (1u << CLUSTER_BLOCKS) - 1;
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1], %2, [%3], %4;" ::"r"(to),
                 "l"(from), "r"(num_bytes), "r"(barrier), "h"(all) : "memory");
}

// An L2 policy for data that other blocks read again soon.
__device__ __forceinline__ u64 read_again_policy() {
    u64 policy;
    asm volatile("createpolicy.fractional.L2::evict_normal.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}

// Shared memory: barriers at fixed places, so that no register holds them, then both rings. The launcher computes the same size.
template <class Weights, u32 ROWS>
struct WgmmaLayout {
    static constexpr u32 TILES = BLOCK_TILES<Weights, ROWS>, ROW_SLOT_BYTES = ROWS / 8 * ROW_GROUP_BYTES;
    static constexpr u32 MAX_RING_SLOTS = 3, MAX_ROW_SLOTS = 12, MAX_OWED = 2, BARRIER_BYTES = 1152;
    static_assert(2 * 8 * (MAX_ROW_SLOTS + TILES * MAX_RING_SLOTS + 1) + TILES * MAX_OWED * 4 <= BARRIER_BYTES, "room for barriers");
    u32 slot_bytes, rows_full, rows_empty, ring_full, ring_empty, left_full, left_empty, owed, rows, ring;

    __device__ __forceinline__ WgmmaLayout(const WgmmaParams& p, u32 start) {
        slot_bytes = Weights::NOTE_BYTES + p.matmul.slice_tiles * Weights::TILE_BYTES;
        rows_full = start;
        rows_empty = rows_full + MAX_ROW_SLOTS * 8;
        ring_full = rows_empty + MAX_ROW_SLOTS * 8;
        ring_empty = ring_full + TILES * MAX_RING_SLOTS * 8;
        left_full = ring_empty + TILES * MAX_RING_SLOTS * 8;
        left_empty = left_full + 8;
        owed = left_empty + 8;  // [tiles][MAX_OWED] u32: one more than units whose octets this cluster's warp adds up, or 0
        rows = start + BARRIER_BYTES;
        ring = rows + p.row_slots * ROW_SLOT_BYTES;
    }
};

// Returns once the barriers of all blocks of the cluster are initialised.
__device__ __forceinline__ void meet_cluster() {
    // Lanes may come from different paths, and these barriers take whole warps.
    __syncwarp();
    __syncthreads();
    cluster_arrive();
    cluster_wait();
}

// A lane that brings a tile's slices in the order of the run, as far ahead as its ring has slots.
template <class Weights, u32 ROWS>
struct TileStream {
    using Layout = WgmmaLayout<Weights, ROWS>;
    const WgmmaParams& p;
    const ClusterRun& run;
    const u32 k_tiles, tile_in_unit, slots_start, slot_bytes, full_start, empty_start;
    const u64 policy;
    u32 index, slice, octet, end;
    const u8* tile_start;

    // `tile` of the block's.
    __device__ __forceinline__ TileStream(const WgmmaParams& params, const Layout& shared, const ClusterRun& cluster_run,
                                          u32 num_k_tiles, u32 tile)
        : p(params), run(cluster_run), k_tiles(num_k_tiles), tile_in_unit(blockIdx.x % CLUSTER_BLOCKS * Layout::TILES + tile),
          slots_start(shared.ring + tile * params.matmul.ring_slots * shared.slot_bytes), slot_bytes(shared.slot_bytes),
          full_start(shared.ring_full + tile * Layout::MAX_RING_SLOTS * 8),
          empty_start(shared.ring_empty + tile * Layout::MAX_RING_SLOTS * 8),
          policy(params.row_tiles > 1 ? read_again_policy() : read_once_policy()), index(0) {
        find_part();
    }

    __device__ __forceinline__ bool has_more() const { return index < run.num_parts; }

    __device__ __forceinline__ void find_part() {
        if (!has_more()) return;
        const OctetPart part = run.part(index);
        slice = part.first, octet = part.octet, end = part.end;
        const u32 tile = p.channels_of(part.unit) * Layout::TILES * CLUSTER_BLOCKS + tile_in_unit;
        const PartTile place(p.matmul, min(tile, p.matmul.num_tiles - 1));
        const u32 tile_bytes = k_tiles * Weights::STORED_TILE_BYTES + p.matmul.num_octets * SLICES * Weights::NOTE_BYTES;
        tile_start = p.matmul.parts[place.part].weights + static_cast<u64>(place.tile) * tile_bytes;
    }

    __device__ __forceinline__ void ask(u32 slot) {
        const SliceSpan span = slice_span(p.matmul, k_tiles, octet, slice);
        const u32 num_bytes = Weights::NOTE_BYTES + span.len * Weights::TILE_BYTES;
        const u8* from = tile_start + span.first * Weights::STORED_TILE_BYTES + (octet * SLICES + slice) * Weights::NOTE_BYTES;
        copy_begin(full_start + slot * 8, num_bytes, 0);
        copy_async(slots_start + slot * slot_bytes, from, num_bytes, full_start + slot * 8, policy, 0);
        advance();
    }

    __device__ __forceinline__ void advance() {
        if (++slice < end) return;
        index++;
        find_part();
    }
};

// The first lane of a multiplying warp asks for the first slices of its tile itself: one lane of another after the other would
// take as long as the memory does. It waits for no other kernel, which writes no weights.
template <class Weights, u32 ROWS>
__device__ __forceinline__ void begin_tile(const WgmmaParams& p, const WgmmaLayout<Weights, ROWS>& shared, const ClusterRun& run,
                                           u32 k_tiles, u32 tile) {
    TileStream<Weights, ROWS> stream(p, shared, run, k_tiles, tile);
    for (u32 slot = 0; slot < p.matmul.ring_slots; slot++) {
        barrier_init(stream.full_start + slot * 8, 1);
        barrier_init(stream.empty_start + slot * 8, 1);
    }
    for (u32 slot = tile; slot < p.row_slots; slot += shared.TILES) {
        barrier_init(shared.rows_full + slot * 8, 1);
        barrier_init(shared.rows_empty + slot * 8, shared.TILES * CLUSTER_BLOCKS);
    }
    barrier_init_fence();
    for (u32 slot = 0; slot < p.matmul.ring_slots && stream.has_more(); slot++) stream.ask(slot);
}

// A warp asks for the slices behind those, a lane for a tile's.
template <class Weights, u32 ROWS>
__device__ __forceinline__ void stream_tiles(const WgmmaParams& p, const WgmmaLayout<Weights, ROWS>& shared, const ClusterRun& run,
                                             u32 k_tiles, u32 lane) {
    const u32 ring_slots = p.matmul.ring_slots;
    TileStream<Weights, ROWS> stream(p, shared, run, k_tiles, min(lane, shared.TILES - 1));
    for (u32 slot = 0; slot < ring_slots && stream.has_more(); slot++) stream.advance();
    meet_cluster();
    if (lane >= shared.TILES) return;
    u32 slot = 0, parity = 0;
    while (stream.has_more()) {
        barrier_wait(stream.empty_start + slot * 8, parity);
        stream.ask(slot);
        if (++slot == ring_slots) slot = 0, parity ^= 1;
    }
}

// A thread that brings the cluster this block's share of the activations.
template <class Weights, u32 ROWS>
struct RowStream {
    using Layout = WgmmaLayout<Weights, ROWS>;
    const WgmmaParams& p;
    const Layout& shared;
    const ClusterRun& run;
    const u32 k_tiles;
    u32 index, k, k_end, num_bytes, mine_bytes, mine;
    const u8* from;

    __device__ __forceinline__ RowStream(const WgmmaParams& params, const Layout& layout, const ClusterRun& cluster_run, u32 num_k_tiles)
        : p(params), shared(layout), run(cluster_run), k_tiles(num_k_tiles), index(0) {
        find_part();
    }

    __device__ __forceinline__ bool has_more() const { return index < run.num_parts; }

    __device__ __forceinline__ void find_part() {
        if (!has_more()) return;
        const OctetPart part = run.part(index);
        const u32 rank = blockIdx.x % CLUSTER_BLOCKS;
        const u32 first_group = p.rows_of(part.unit) * (ROWS / 8), groups = min(ROWS / 8, p.row_groups - first_group);
        const u32 first = rank * groups / CLUSTER_BLOCKS;
        num_bytes = groups * ROW_GROUP_BYTES, mine = first * ROW_GROUP_BYTES;
        mine_bytes = ((rank + 1) * groups / CLUSTER_BLOCKS - first) * ROW_GROUP_BYTES;
        k = slice_span(p.matmul, k_tiles, part.octet, part.first).first, k_end = slice_span(p.matmul, k_tiles, part.octet, part.end).first;
        from = reinterpret_cast<const u8*>(p.matmul.x) + (static_cast<u64>(k) * p.row_stride + first_group + first) * ROW_GROUP_BYTES;
    }

    // Asks for a super-tile of columns.
    __device__ __forceinline__ void ask(u32 slot) {
        const u32 full = shared.rows_full + slot * 8;
        barrier_expect(full, num_bytes);
        if (mine_bytes > 0) copy_to_cluster(shared.rows + slot * Layout::ROW_SLOT_BYTES + mine, from, mine_bytes, full);
        from += p.row_stride * ROW_GROUP_BYTES;
        if (++k < k_end) return;
        index++;
        find_part();
    }
};

// One thread of a block asks for activations. It alone waits for other kernels: without rows nobody gets as far as to write.
template <class Weights, u32 ROWS>
__device__ __forceinline__ void stream_rows(const WgmmaParams& p, const WgmmaLayout<Weights, ROWS>& shared, const ClusterRun& run,
                                            u32 k_tiles, u32 lane) {
    RowStream<Weights, ROWS> stream(p, shared, run, k_tiles);
    meet_cluster();
    wait_for_predecessors();
    if (lane > 0) return;
    u32 slot = 0, parity = 1;
    while (stream.has_more()) {
        barrier_wait(shared.rows_empty + slot * 8, parity);
        stream.ask(slot);
        if (++slot == p.row_slots) slot = 0, parity ^= 1;
    }
    // The block may leave once all blocks have read the last of it: then nobody reaches into it any more.
    for (u32 i = 0; i < p.row_slots; i++) {
        barrier_wait(shared.rows_empty + slot * 8, parity);
        if (++slot == p.row_slots) slot = 0, parity ^= 1;
    }
}

// Whether a part's sums go to other clusters before the run's end, so that the block's own warp signals for all of its tiles.
__device__ __forceinline__ bool is_left(const ClusterRun& run, const OctetPart& part, u32 index) {
    return index + 1 < run.num_parts && !run.is_alone(part.unit);
}

// A warp signals what the multiplying ones have left in memory, a lane for a tile, and notes which units are complete by that.
template <class Weights, u32 ROWS>
__device__ __forceinline__ void send_signals(const WgmmaParams& p, const WgmmaLayout<Weights, ROWS>& shared, const ClusterRun& run,
                                             u32 lane) {
    constexpr u32 TILES = WgmmaLayout<Weights, ROWS>::TILES;
    const u32 owed = shared.owed + min(lane, TILES - 1) * shared.MAX_OWED * 4;
    if (lane == 0) {
        barrier_init(shared.left_full, TILES);
        barrier_init(shared.left_empty, 1);
        barrier_init_fence();
    }
    for (u32 i = 0; i < shared.MAX_OWED && lane < TILES; i++) store_shared_u32(owed + i * 4, 0);
    __syncwarp();
    meet_cluster();
    u32 parity = 0, num_owed = 0;
    for (u32 index = 0; index < run.num_parts; index++) {
        const OctetPart part = run.part(index);
        if (!is_left(run, part, index)) continue;
        barrier_wait(shared.left_full, parity);
        parity ^= 1;
        if (lane < TILES) {
            const UnitTile<ROWS, TILES> unit(p, run, part.unit, lane, 0);
            if (part.end < SLICES) unit.signal_cut();
            else if (unit.signal_octet()) store_shared_u32(owed + 4 * num_owed++, part.unit + 1);
        }
        __syncwarp();
        if (lane == 0) barrier_arrive(shared.left_empty);
    }
}

// Where someone is in a ring.
struct RingPlace {
    u32 slot, parity;

    __device__ __forceinline__ void advance(u32 num_slots) {
        if (++slot == num_slots) slot = 0, parity ^= 1;
    }
};

// A warp's sums of its tile's slices, one after the other. While a super-tile is multiplied the words of the next one are
// loaded, be it of the same slice or of the next; other warps decode meanwhile.
template <class Weights, u32 ROWS>
struct SliceSums {
    using Layout = WgmmaLayout<Weights, ROWS>;
    const WgmmaParams& p;
    const Layout& shared;
    const u32 k_tiles, tile, warp, lane;
    RingPlace &ring, &rows;
    typename Weights::GroupSlice arrived;

    __device__ __forceinline__ u32 barrier_of_slot(u32 barriers) const {
        return barriers + (warp * Layout::MAX_RING_SLOTS + ring.slot) * 8;
    }

    // Waits for a slice of `len` super-tiles.
    __device__ __forceinline__ void open(u32 len) {
        barrier_wait(barrier_of_slot(shared.ring_full), ring.parity);
        arrived.open(shared.ring + (warp * p.matmul.ring_slots + ring.slot) * shared.slot_bytes, len, lane);
    }

    // The bytes of its slot are in registers, and may be written again.
    __device__ __forceinline__ void close() {
        __syncwarp();
        if (lane == 0) barrier_arrive(barrier_of_slot(shared.ring_empty));
        ring.advance(p.matmul.ring_slots);
    }

    __device__ __forceinline__ void multiply(u32 (&a)[4][4], float (&sums)[ROWS / 2], bool adds, bool are_rows_there) {
        const u64 b = matrix_descriptor(shared.rows + rows.slot * Layout::ROW_SLOT_BYTES, 128, ROW_GROUP_BYTES);
        if (!are_rows_there) barrier_wait(shared.rows_full + rows.slot * 8, rows.parity);
        // No write of operand A behind the fence, which orders it before the products.
#pragma unroll
        for (u32 i = 0; i < 16; i++) asm volatile("" : "+r"(a[i / 4][i % 4]));
        wgmma_begin();
#pragma unroll
        for (u32 fragment = 0; fragment < 4; fragment++) {
            // Only the low word differs: no carry goes on.
            const u64 at = b & ~0xFFFFFFFFull | static_cast<u32>(b) + fragment * (256 >> 4);
            wgmma_k16<ROWS>(sums, a[fragment], at, fragment > 0 || adds);
        }
        wgmma_commit();
    }

    // Adds slices of an octet to `octet_sums`.
    __device__ __forceinline__ void add(const OctetPart& part, float (&octet_sums)[ROWS / 2]) {
        u32 slice = part.first, len = slice_span(p.matmul, k_tiles, part.octet, slice).len;
        u32 a[4][4];
        typename Weights::Words words;
        float sums[ROWS / 2];
#pragma unroll
        for (u32 i = 0; i < ROWS / 2; i++) sums[i] = 0.0f;
        open(len);
        arrived.load(0, words);
        arrived.decode(words, a);
        arrived.patch(p.matmul, tile, 0, a);
        bool are_rows_there = false;
        u32 j = 0;
#pragma unroll 1
        while (true) {
            multiply(a, sums, j > 0, are_rows_there);
            const bool is_last = ++j == len;
            if (is_last) {
                close();
                if (++slice == part.end) break;
                len = slice_span(p.matmul, k_tiles, part.octet, slice).len, j = 0;
                open(len);
            }
            arrived.load(j, words);
            const u32 slot = rows.slot;
            rows.advance(p.row_slots);
            are_rows_there = barrier_test(shared.rows_full + rows.slot * 8, rows.parity);
            finish(slot);
            if (is_last) add_slice(sums, octet_sums);
            arrived.decode(words, a);
            arrived.patch(p.matmul, tile, j, a);
        }
        finish(rows.slot);
        rows.advance(p.row_slots);
        add_slice(sums, octet_sums);
    }

    // Waits for the products of a super-tile, and gives the slot of its rows back.
    __device__ __forceinline__ void finish(u32 slot) const {
        wgmma_wait<0>();
        if (lane < CLUSTER_BLOCKS) barrier_arrive_in_block(address_in_block(shared.rows_empty + slot * 8, lane));
    }

    __device__ __forceinline__ static void add_slice(float (&sums)[ROWS / 2], float (&octet_sums)[ROWS / 2]) {
#pragma unroll
        for (u32 i = 0; i < ROWS / 2; i++) {
            asm volatile("" : "+f"(sums[i]));  // no read of a sum before the wait
            octet_sums[i] += sums[i];
        }
    }
};

// Multiplies a tile of every unit of the run.
template <class Weights, u32 ROWS>
__device__ __forceinline__ void multiply_run(const WgmmaParams& p, const WgmmaLayout<Weights, ROWS>& shared, const ClusterRun& run,
                                             u32 k_tiles, u32 warp, u32 lane) {
    using Tile = UnitTile<ROWS, BLOCK_TILES<Weights, ROWS>>;
    RingPlace ring{0, 0}, rows{0, 0};
    typename Tile::Totals totals = {};
    u32 num_left = 0, owed_unit = 0;
#pragma unroll 1
    for (u32 index = 0; index < run.num_parts; index++) {
        const OctetPart part = run.part(index);
        const Tile own(p, run, part.unit, warp, lane);
        float octet_sums[ROWS / 2];
        // Minus zero plus the first slice's sum is that sum, whatever its sign.
#pragma unroll
        for (u32 i = 0; i < ROWS / 2; i++) octet_sums[i] = -0.0f;
        if (part.first > 0) own.take_cut(octet_sums);
        SliceSums<Weights, ROWS>{p, shared, k_tiles, min(own.tile, p.matmul.num_tiles - 1), warp, lane, ring, rows}.add(part, octet_sums);
        // Found anew, so that no register holds it meanwhile.
        asm volatile("" : "+r"(index));
        const OctetPart done = run.part(index);
        const Tile unit(p, run, done.unit, warp, lane);
        if (run.is_alone(done.unit)) {
            unit.add_octet(done.octet, octet_sums, totals);
            continue;
        }
        if (done.end < SLICES) unit.leave_cut(octet_sums);
        else unit.leave_octet(done.octet, octet_sums);
        __syncwarp();
        if (is_left(run, done, index)) {
            // The one before has been signalled long since.
            if (num_left > 0) barrier_wait(shared.left_empty, (num_left - 1) & 1);
            if (lane == 0) barrier_arrive(shared.left_full);
            num_left++;
        } else {
            // At the end of a run, which completes an octet, a warp has nothing else to do.
            u32 is_complete = 0;
            if (lane == 0) is_complete = unit.signal_octet();
            owed_unit = __shfl_sync(0xFFFFFFFF, is_complete, 0) ? done.unit + 1 : 0;
        }
    }
    // What other clusters have brought is added up here, where no product waits for it.
    if (num_left > 0) barrier_wait(shared.left_empty, (num_left - 1) & 1);
#pragma unroll 1
    for (u32 i = 0; i <= shared.MAX_OWED; i++) {
        const u32 owed = i == 0 ? owed_unit : load_shared_u32(shared.owed + (warp * shared.MAX_OWED + i - 1) * 4);
        // What one lane has acquired, all lanes read.
        __syncwarp();
        if (owed > 0) Tile(p, run, owed - 1, warp, lane).add_brought();
    }
}

template <class Weights, u32 ROWS>
__device__ __forceinline__ void wgmma_matmul(const WgmmaParams& p) {
    constexpr u32 TILES = BLOCK_TILES<Weights, ROWS>;
    launch_dependents();
    extern __shared__ __align__(128) u8 shared_bytes[];
    const WgmmaLayout<Weights, ROWS> shared(p, shared_address(shared_bytes));
    // Taken from one lane, so that the compiler knows that a warp agrees on it.
    const u32 warp = __shfl_sync(0xFFFFFFFF, threadIdx.x / WARP_LANES, 0), lane = threadIdx.x % WARP_LANES;
    const u32 k_tiles = (p.matmul.in_features + TILE_COLUMNS - 1) / TILE_COLUMNS;
    const ClusterRun run(p);
    if (warp < TILES) {
        if (lane == 0) begin_tile<Weights, ROWS>(p, shared, run, k_tiles, warp);
        __syncwarp();
        asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(Registers<TILES, ROWS>::MULTIPLYING));
        meet_cluster();
        multiply_run<Weights, ROWS>(p, shared, run, k_tiles, warp, lane);
        return;
    }
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(Registers<TILES, ROWS>::OTHERS));
    if (warp == TILES) stream_tiles<Weights, ROWS>(p, shared, run, k_tiles, lane);
    else if (warp == TILES + 1) stream_rows<Weights, ROWS>(p, shared, run, k_tiles, lane);
    else if (warp == TILES + 2) send_signals<Weights, ROWS>(p, shared, run, lane);
    else meet_cluster();
}

// Fewer rows are left to mma.sync where no weights are decoded.
#define WGMMA_MATMUL_KERNELS_OF_FEW(NAME, ...) \
    WGMMA_MATMUL_KERNEL(NAME, 16, __VA_ARGS__) \
    WGMMA_MATMUL_KERNEL(NAME, 32, __VA_ARGS__)
#define WGMMA_MATMUL_KERNELS(NAME, ...)        \
    WGMMA_MATMUL_KERNEL(NAME, 48, __VA_ARGS__) \
    WGMMA_MATMUL_KERNEL(NAME, 64, __VA_ARGS__) \
    WGMMA_MATMUL_KERNEL(NAME, 128, __VA_ARGS__)
#define WGMMA_MATMUL_KERNEL(NAME, ROWS, ...)                                                \
    extern "C" __global__ void                                                              \
        __launch_bounds__((WGMMA_THREADS<__VA_ARGS__, ROWS> + NEIGHBOUR_THREADS<ROWS>), 1)  \
            NAME##_wgmma_##ROWS(const __grid_constant__ WgmmaParams p) {                    \
        wgmma_matmul<__VA_ARGS__, ROWS>(p);                                                 \
    }
#else
#define WGMMA_MATMUL_KERNELS_OF_FEW(NAME, ...)
#define WGMMA_MATMUL_KERNELS(NAME, ...)
#endif
