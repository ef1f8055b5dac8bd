// The matmul of slice_sums.cuh with Hopper's wgmma, for more rows than registers hold: its sums, bit for bit.
//
// A cluster of blocks takes *units* of 8 to 16 tiles a block and all of ROWS rows. A warp owns a tile: its weights go from the
// tile's ring through its registers, decoded, straight into operand A of its warpgroup; activations pass through shared memory as
// operand B, a super-tile of columns a slot, each block of the cluster bringing its part of them to all. A slice is one chain
// of wgmma from zero, a slice's sum is added to its octet's, an octet's to the total: the one order, so nothing of it
// depends on who computes what. Two warps of a last warpgroup ask for weights and rows, so that the others only multiply.
//
// Clusters take equal runs of slices of the units in line. An octet that a cut goes through is begun by the cluster before
// the cut, as the first thing in its run, and finished by the one after it, as the last: nobody waits in practice. Octets of a
// unit that several clusters share meet in global memory, and the warp that brings the last one adds them up. With many
// units, clusters take whole ones in turn instead, so that those that run at a time share weights in the L2 cache.
#pragma once

#include "signals.cuh"
#include "slice_sums.cuh"

// Tiles of a unit that a block multiplies, one a warp: where weights are decoded, as many warps as there are registers, and
// shared memory for two slices each.
template <class Weights, u32 ROWS>
constexpr u32 BLOCK_TILES = !Weights::IS_DECODED || ROWS > 64 ? 8 : ROWS > 32 || Weights::TILE_BYTES > 1024 ? 12 : 16;
template <class Weights, u32 ROWS>
constexpr u32 WGMMA_THREADS = (BLOCK_TILES<Weights, ROWS> + 4) * WARP_LANES;

// Registers of a thread: those that multiply take what the last warpgroup leaves of what the block starts with. Asked for more
// than that, they would wait for ever.
template <u32 TILES>
struct Registers {
    static constexpr u32 OTHERS = TILES == 8 ? 40 : TILES == 12 ? 56 : 64;
    static constexpr u32 MULTIPLYING = TILES == 8 ? 232 : TILES == 12 ? 152 : 104;
    static constexpr u32 AT_START = 65536 / ((TILES + 4) * WARP_LANES) / 8 * 8;
    static_assert(MULTIPLYING * TILES + OTHERS * 4 <= AT_START * (TILES + 4), "more registers than a block starts with");
};
constexpr u32 ROW_GROUP_BYTES = TILE_COLUMNS * 16;  // eight rows of a super-tile of columns

// Arguments of every kernel of this family; mirrored by the launcher.
struct WgmmaParams {
    MatmulParams matmul;   // x: arranged rows, see matmul_rows.cuh; octet_sums: of units that clusters share
    float4* totals;        // a block's own: octets added so far
    float4* cut_sums;      // of octets that a cut goes through, by the block before it
    u32* cut_flags;        // [blocks][warps]: whether they are there; zero between launches
    u32* octet_counts;     // [blocks][warps]: octets that have come of the unit that meets there; zero between launches
    u32 row_groups;        // groups of eight rows of x that this launch multiplies
    u32 row_stride;        // groups of eight rows from one super-tile of columns to the next
    u32 row_tiles;         // ROWS rows each
    u32 num_units;         // of channels, times row_tiles
    u32 row_slots;         // super-tiles of columns in the ring of activations
    u32 is_strided;        // whether clusters take whole units in turn
};

#if __CUDA_ARCH_FEAT_SM90_ALL
#include "wgmma_bf16.cuh"

// Copies to the same place in every block of the cluster, counted there on the same barrier. Without a hint: what many blocks
// read stays in the L2 cache.
__device__ __forceinline__ void copy_to_cluster(u32 to, const u8* from, u32 num_bytes, u32 barrier, u32 num_blocks) {
    if (num_blocks == 1) {
        asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to), "l"(from),
                     "r"(num_bytes), "r"(barrier) : "memory");
        return;
    }
    const u16 all = (1u << num_blocks) - 1;
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
    static constexpr u32 MAX_RING_SLOTS = 3, MAX_ROW_SLOTS = 12, BARRIER_BYTES = 1024;
    u32 slot_bytes, rows_full, rows_empty, ring_full, ring_empty, rows, ring;

    __device__ __forceinline__ WgmmaLayout(const WgmmaParams& p, u32 start) {
        slot_bytes = Weights::NOTE_BYTES + p.matmul.slice_tiles * Weights::TILE_BYTES;
        rows_full = start;
        rows_empty = rows_full + MAX_ROW_SLOTS * 8;
        ring_full = rows_empty + MAX_ROW_SLOTS * 8;
        ring_empty = ring_full + TILES * MAX_RING_SLOTS * 8;
        rows = start + BARRIER_BYTES;
        ring = rows + p.row_slots * ROW_SLOT_BYTES;
    }
};

// Slices of an octet that a cluster sums in one go.
struct OctetPart {
    u32 unit, octet, first, end;
};

// What a cluster does: parts in this order, the begun octet first, the one to finish last.
struct ClusterRun {
    u32 first_octet, num_octets;  // whole ones, of all units in line
    u32 head, tail;               // slice from which the octet before them is the cluster's; slices of the one after them
    u32 num_parts;
    u32 unit_octets, cluster, num_clusters;
    bool is_strided;

    __device__ __forceinline__ ClusterRun(const WgmmaParams& p) {
        unit_octets = p.matmul.num_octets;
        cluster = blockIdx.x / p.matmul.cluster_blocks, num_clusters = gridDim.x / p.matmul.cluster_blocks;
        is_strided = p.is_strided;
        if (is_strided) {
            first_octet = 0, head = 0, tail = 0;
            num_octets = (p.num_units - cluster + num_clusters - 1) / num_clusters * unit_octets;
            num_parts = num_octets;
            return;
        }
        const u32 all_slices = p.num_units * unit_octets * SLICES;
        const u32 start = cluster * all_slices / num_clusters, end = (cluster + 1) * all_slices / num_clusters;
        first_octet = (start + SLICES - 1) / SLICES;
        num_octets = end / SLICES - first_octet;
        head = start % SLICES, tail = end % SLICES;
        num_parts = num_octets + (head > 0) + (tail > 0);
    }

    __device__ __forceinline__ OctetPart part(u32 index) const {
        u32 at = first_octet + index - (tail > 0), first = 0, end = SLICES;
        if (tail > 0 && index == 0) at = first_octet + num_octets, end = tail;
        else if (head > 0 && index + 1 == num_parts) at = first_octet - 1, first = head;
        const u32 unit = at / unit_octets;
        return {is_strided ? cluster + unit * num_clusters : unit, at % unit_octets, first, end};
    }

    // Whether all octets of a unit are whole ones of this cluster.
    __device__ __forceinline__ bool is_alone(u32 unit) const {
        return is_strided || (unit * unit_octets >= first_octet && (unit + 1) * unit_octets <= first_octet + num_octets);
    }

    // Where octets of a unit that clusters share meet: with more units than clusters, at that in whose run it begins. Of those
    // that begin there, only one is shared.
    __device__ __forceinline__ u32 meeting_place(const WgmmaParams& p, u32 unit) const {
        if (p.num_units <= num_clusters) return unit;
        const u32 octet_slices = unit_octets * SLICES;
        return ((unit * octet_slices + 1) * num_clusters - 1) / (p.num_units * octet_slices);
    }
};

// Returns once the barriers of all blocks of the cluster are initialised, and predecessors are done. By then a warp's own ring,
// which is nobody else's affair, is on its way.
__device__ __forceinline__ void meet_cluster(u32 num_blocks) {
    __syncthreads();
    if (num_blocks > 1) cluster_arrive();
    wait_for_predecessors();
    if (num_blocks > 1) cluster_wait();
}

// A lane that brings a tile's slices in the order of the run, as far ahead as its ring has slots.
template <class Weights>
struct TileStream {
    const WgmmaParams& p;
    const ClusterRun& run;
    const u32 k_tiles, tile_in_unit, slots_start, slot_bytes, full_start, empty_start;
    const u64 policy;
    u32 index, slice, octet, end;
    const u8* tile_start;

    // `tile` of the block's.
    __device__ __forceinline__ TileStream(const WgmmaParams& params, const ClusterRun& cluster_run, u32 num_k_tiles, u32 tile,
                                          u32 num_tiles, u32 slots, u32 bytes, u32 full, u32 empty)
        : p(params), run(cluster_run), k_tiles(num_k_tiles),
          tile_in_unit(blockIdx.x % params.matmul.cluster_blocks * num_tiles + tile),
          slots_start(slots + tile * params.matmul.ring_slots * bytes), slot_bytes(bytes),
          full_start(full), empty_start(empty),
          policy(params.row_tiles > 1 ? read_again_policy() : read_once_policy()), index(0) {
        find_part(num_tiles);
    }

    __device__ __forceinline__ bool has_more() const { return index < run.num_parts; }

    __device__ __forceinline__ void find_part(u32 num_tiles) {
        if (!has_more()) return;
        const OctetPart part = run.part(index);
        slice = part.first, octet = part.octet, end = part.end;
        const u32 tile = part.unit / p.row_tiles * num_tiles * p.matmul.cluster_blocks + tile_in_unit;
        const PartTile place(p.matmul, min(tile, p.matmul.num_tiles - 1));
        const u32 tile_bytes = k_tiles * Weights::STORED_TILE_BYTES + p.matmul.num_octets * SLICES * Weights::NOTE_BYTES;
        tile_start = p.matmul.parts[place.part].weights + static_cast<u64>(place.tile) * tile_bytes;
    }

    __device__ __forceinline__ void ask(u32 slot, u32 num_tiles) {
        const SliceSpan span = slice_span(p.matmul, k_tiles, octet, slice);
        const u32 num_bytes = Weights::NOTE_BYTES + span.len * Weights::TILE_BYTES;
        const u8* from = tile_start + span.first * Weights::STORED_TILE_BYTES + (octet * SLICES + slice) * Weights::NOTE_BYTES;
        copy_begin(full_start + slot * 8, num_bytes, 0);
        copy_async(slots_start + slot * slot_bytes, from, num_bytes, full_start + slot * 8, policy, 0);
        if (++slice < end) return;
        index++;
        find_part(num_tiles);
    }
};

// A warp of a block asks for weights, a lane for a tile's; before it waits for other kernels, which write none.
template <class Weights, u32 ROWS>
__device__ __forceinline__ void stream_tiles(const WgmmaParams& p, const WgmmaLayout<Weights, ROWS>& shared, const ClusterRun& run,
                                             u32 k_tiles, u32 lane) {
    constexpr u32 TILES = BLOCK_TILES<Weights, ROWS>;
    const u32 ring_slots = p.matmul.ring_slots, own = min(lane, TILES - 1);
    const u32 barriers = own * shared.MAX_RING_SLOTS * 8;
    TileStream<Weights> stream(p, run, k_tiles, own, TILES, shared.ring, shared.slot_bytes, shared.ring_full + barriers,
                               shared.ring_empty + barriers);
    if (lane < TILES) {
        for (u32 slot = 0; slot < ring_slots; slot++) {
            barrier_init(stream.full_start + slot * 8, 1);
            barrier_init(stream.empty_start + slot * 8, 1);
        }
        barrier_init_fence();
        for (u32 slot = 0; slot < ring_slots && stream.has_more(); slot++) stream.ask(slot, TILES);
    }
    __syncwarp();
    meet_cluster(p.matmul.cluster_blocks);
    if (lane >= TILES) return;
    u32 slot = 0, parity = 0;
    while (stream.has_more()) {
        barrier_wait(stream.empty_start + slot * 8, parity);
        stream.ask(slot, TILES);
        if (++slot == ring_slots) slot = 0, parity ^= 1;
    }
}

// One thread of a block asks for activations, of which it brings the cluster its share.
template <class Weights, u32 ROWS>
__device__ __forceinline__ void stream_rows(const WgmmaParams& p, const WgmmaLayout<Weights, ROWS>& shared, const ClusterRun& run,
                                            u32 k_tiles) {
    const u32 num_blocks = p.matmul.cluster_blocks, rank = blockIdx.x % num_blocks;
    u32 slot = 0, parity = 1;
    for (u32 index = 0; index < run.num_parts; index++) {
        const OctetPart part = run.part(index);
        const u32 first_group = part.unit % p.row_tiles * (ROWS / 8), groups = min(ROWS / 8, p.row_groups - first_group);
        const u32 mine = rank * groups / num_blocks, mine_bytes = ((rank + 1) * groups / num_blocks - mine) * ROW_GROUP_BYTES;
        const u32 k_end = slice_span(p.matmul, k_tiles, part.octet, part.end).first;
        for (u32 k = slice_span(p.matmul, k_tiles, part.octet, part.first).first; k < k_end; k++) {
            barrier_wait(shared.rows_empty + slot * 8, parity);
            barrier_expect(shared.rows_full + slot * 8, groups * ROW_GROUP_BYTES);
            const u32 to = shared.rows + slot * shared.ROW_SLOT_BYTES + mine * ROW_GROUP_BYTES;
            const u8* from = reinterpret_cast<const u8*>(p.matmul.x) +
                             (static_cast<u64>(k) * p.row_stride + first_group + mine) * ROW_GROUP_BYTES;
            if (mine_bytes > 0) copy_to_cluster(to, from, mine_bytes, shared.rows_full + slot * 8, num_blocks);
            if (++slot == p.row_slots) slot = 0, parity ^= 1;
        }
    }
    // The block may leave once all blocks have read the last of it: then nobody reaches into it any more.
    for (u32 i = 0; i < p.row_slots; i++) {
        barrier_wait(shared.rows_empty + slot * 8, parity);
        if (++slot == p.row_slots) slot = 0, parity ^= 1;
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
        if (lane < p.matmul.cluster_blocks) barrier_arrive_in_block(address_in_block(shared.rows_empty + slot * 8, lane));
    }

    __device__ __forceinline__ static void add_slice(float (&sums)[ROWS / 2], float (&octet_sums)[ROWS / 2]) {
#pragma unroll
        for (u32 i = 0; i < ROWS / 2; i++) {
            asm volatile("" : "+f"(sums[i]));  // no read of a sum before the wait
            octet_sums[i] += sums[i];
        }
    }
};

// A warp's part of a unit.
template <u32 ROWS, u32 TILES>
struct UnitTile {
    static constexpr u32 FRAGMENTS = ROWS / 8, FLOATS4 = FRAGMENTS * WARP_LANES;  // a fragment: sums of a tile and eight rows
    // Floats that are loaded before the first of them is used, and octets' worth of those.
    static constexpr u32 AT_ONCE = ROWS < 64 ? ROWS / 2 : 32, OCTETS_AT_ONCE = 64 / AT_ONCE;
    const WgmmaParams& p;
    const ClusterRun& run;
    const u32 warp, lane;
    u32 unit, tile, first_row;

    __device__ __forceinline__ UnitTile(const WgmmaParams& params, const ClusterRun& cluster_run, u32 unit_index, u32 warp_index,
                                        u32 lane_index)
        : p(params), run(cluster_run), warp(warp_index), lane(lane_index), unit(unit_index) {
        const u32 num_blocks = p.matmul.cluster_blocks;
        tile = (unit / p.row_tiles * num_blocks + blockIdx.x % num_blocks) * TILES + warp;
        first_row = unit % p.row_tiles * ROWS;
    }

    __device__ __forceinline__ u32 place(u32 block) const { return block * TILES + warp; }

    // Stores a unit's sums, or adds them to what is there. All loads come first: none waits for a store before it.
    __device__ __forceinline__ void store_unit(float (&sums)[ROWS / 2]) const {
        if (tile >= p.matmul.num_tiles) return;
        const PartTile at(p.matmul, tile);
        const MatmulPart& part = p.matmul.parts[at.part];
        const u32 channel = at.tile * TILE_CHANNELS + lane / 4, rows_left = p.matmul.num_rows - min(p.matmul.num_rows, first_row + lane % 4 * 2);
        const u64 stride = part.out_features;
        float* y = part.y + (first_row + lane % 4 * 2) * stride + channel;
        const bool is_there[2] = {channel < part.out_features, channel + 8 < part.out_features};
        if (p.matmul.adds_to_output) {
            float* from = y;
#pragma unroll
            for (u32 i = 0; i < FRAGMENTS; i++) {
                float before[4];
#pragma unroll
                for (u32 c = 0; c < 4; c++) {
                    const bool is_wanted = i * 8 + c % 2 < rows_left && is_there[c / 2];
                    before[c] = is_wanted ? __ldcg(from + c % 2 * stride + c / 2 * 8) : 0.0f;
                }
#pragma unroll
                for (u32 c = 0; c < 4; c++) sums[4 * i + c] = before[c] + sums[4 * i + c];
                from += 8 * stride;
                // One address at a time: all of them would fill the registers.
                asm volatile("" : "+l"(from));
            }
        }
#pragma unroll
        for (u32 i = 0; i < FRAGMENTS; i++) {
#pragma unroll
            for (u32 c = 0; c < 4; c++) {
                if (i * 8 + c % 2 < rows_left && is_there[c / 2]) y[c % 2 * stride + c / 2 * 8] = sums[4 * i + c];
            }
            y += 8 * stride;
            asm volatile("" : "+l"(y));
        }
    }

    // Adds what lies in memory to `sums`, which are later in the order.
    __device__ __forceinline__ void add_after(const float4* from, float (&sums)[ROWS / 2]) const {
#pragma unroll
        for (u32 first = 0; first < ROWS / 2; first += AT_ONCE) {
            float before[AT_ONCE];
            load(from + first / 4 * WARP_LANES, before);
#pragma unroll
            for (u32 i = 0; i < AT_ONCE; i++) sums[first + i] = before[i] + sums[first + i];
        }
    }

    __device__ __forceinline__ static void load(const float4* from, float (&values)[AT_ONCE]) {
#pragma unroll
        for (u32 i = 0; i < AT_ONCE / 4; i++) {
            const float4 four = __ldcg(from + i * WARP_LANES);
            values[4 * i] = four.x, values[4 * i + 1] = four.y, values[4 * i + 2] = four.z, values[4 * i + 3] = four.w;
        }
    }

    // The sum of all octets of a unit, in their order. Several are on their way at a time: each would else wait for a round trip
    // to the L2 cache.
    __device__ __forceinline__ void add_octets(const float4* octets, u32 num_octets, float (&sums)[ROWS / 2]) const {
#pragma unroll
        for (u32 first = 0; first < ROWS / 2; first += AT_ONCE) {
#pragma unroll 1
            for (u32 start = 0; start < num_octets; start += OCTETS_AT_ONCE) {
                float values[OCTETS_AT_ONCE][AT_ONCE];
#pragma unroll
                for (u32 o = 0; o < OCTETS_AT_ONCE; o++) {
                    load(octets + min(start + o, num_octets - 1) * FLOATS4 + first / 4 * WARP_LANES, values[o]);
                }
#pragma unroll
                for (u32 o = 0; o < OCTETS_AT_ONCE; o++) {
                    if (start + o >= num_octets) break;
#pragma unroll
                    for (u32 i = 0; i < AT_ONCE; i++) {
                        sums[first + i] = start + o == 0 ? values[o][i] : sums[first + i] + values[o][i];
                    }
                }
            }
        }
    }

    __device__ __forceinline__ void leave(float4* to, const float (&sums)[ROWS / 2]) const {
#pragma unroll
        for (u32 i = 0; i < FRAGMENTS; i++) {
            __stcg(to + i * WARP_LANES, make_float4(sums[4 * i], sums[4 * i + 1], sums[4 * i + 2], sums[4 * i + 3]));
        }
    }

    // Leaves the first slices of an octet for the next cluster.
    __device__ __forceinline__ void leave_cut(const float (&sums)[ROWS / 2]) const {
        leave(p.cut_sums + static_cast<u64>(place(blockIdx.x)) * FLOATS4 + lane, sums);
        __syncwarp();
        if (lane == 0) signal_raise(p.cut_flags + place(blockIdx.x));
    }

    // Takes them from the cluster before.
    __device__ __forceinline__ void take_cut(float (&sums)[ROWS / 2]) const {
        const u32 from = place(blockIdx.x - p.matmul.cluster_blocks);
        if (lane == 0) signal_take(p.cut_flags + from);
        __syncwarp();
        const float4* left = p.cut_sums + static_cast<u64>(from) * FLOATS4 + lane;
#pragma unroll
        for (u32 i = 0; i < FRAGMENTS; i++) {
            const float4 value = __ldcg(left + i * WARP_LANES);
            sums[4 * i] = value.x, sums[4 * i + 1] = value.y, sums[4 * i + 2] = value.z, sums[4 * i + 3] = value.w;
        }
    }

    // Adds an octet of a unit that is this cluster's alone.
    __device__ __forceinline__ void add_octet(u32 octet, float (&sums)[ROWS / 2]) const {
        float4* totals = p.totals + static_cast<u64>(place(blockIdx.x)) * FLOATS4 + lane;
        if (octet > 0) add_after(totals, sums);
        if (octet + 1 < p.matmul.num_octets) leave(totals, sums);
        else store_unit(sums);
    }

    // Brings an octet of a unit that clusters share; who brings the last one adds them all.
    __device__ __forceinline__ void bring_octet(u32 octet, float (&sums)[ROWS / 2]) const {
        const u32 num_octets = p.matmul.num_octets, num_blocks = p.matmul.cluster_blocks;
        const u32 meets = place(run.meeting_place(p, unit) * num_blocks + blockIdx.x % num_blocks);
        float4* octets = p.matmul.octet_sums + static_cast<u64>(meets) * num_octets * FLOATS4 + lane;
        leave(octets + octet * FLOATS4, sums);
        __syncwarp();
        u32 before = 0;
        if (lane == 0) before = signal_add(p.octet_counts + meets, 1);
        before = __shfl_sync(0xFFFFFFFF, before, 0);
        if (before + 1 < num_octets) return;
        // What lane 0 has acquired, all lanes read.
        __syncwarp();
        if (lane == 0) p.octet_counts[meets] = 0;
        add_octets(octets, num_octets, sums);
        store_unit(sums);
    }
};

template <class Weights, u32 ROWS>
__device__ __forceinline__ void multiply_run(const WgmmaParams& p, const WgmmaLayout<Weights, ROWS>& shared, const ClusterRun& run,
                                             u32 k_tiles, u32 warp, u32 lane) {
    meet_cluster(p.matmul.cluster_blocks);
    RingPlace ring{0, 0}, rows{0, 0};
#pragma unroll 1
    for (u32 index = 0; index < run.num_parts; index++) {
        const OctetPart part = run.part(index);
        const UnitTile<ROWS, BLOCK_TILES<Weights, ROWS>> own(p, run, part.unit, warp, lane);
        float octet_sums[ROWS / 2];
        // Minus zero plus the first slice's sum is that sum, whatever its sign.
#pragma unroll
        for (u32 i = 0; i < ROWS / 2; i++) octet_sums[i] = -0.0f;
        if (part.first > 0) own.take_cut(octet_sums);
        SliceSums<Weights, ROWS>{p, shared, k_tiles, min(own.tile, p.matmul.num_tiles - 1), warp, lane, ring, rows}.add(part, octet_sums);
        // Found anew, so that no register holds it meanwhile.
        asm volatile("" : "+r"(index));
        const OctetPart done = run.part(index);
        const UnitTile<ROWS, BLOCK_TILES<Weights, ROWS>> unit(p, run, done.unit, warp, lane);
        if (done.end < SLICES) unit.leave_cut(octet_sums);
        else if (run.is_alone(done.unit)) unit.add_octet(done.octet, octet_sums);
        else unit.bring_octet(done.octet, octet_sums);
    }
}

template <class Weights, u32 ROWS>
__device__ __forceinline__ void wgmma_matmul(const WgmmaParams& p) {
    constexpr u32 TILES = BLOCK_TILES<Weights, ROWS>;
    extern __shared__ __align__(128) u8 shared_bytes[];
    const WgmmaLayout<Weights, ROWS> shared(p, shared_address(shared_bytes));
    // Taken from one lane, so that the compiler knows that a warp agrees on it.
    const u32 warp = __shfl_sync(0xFFFFFFFF, threadIdx.x / WARP_LANES, 0), lane = threadIdx.x % WARP_LANES;
    const u32 k_tiles = (p.matmul.in_features + TILE_COLUMNS - 1) / TILE_COLUMNS;
    const ClusterRun run(p);
    launch_dependents();
    if (warp < TILES) {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(Registers<TILES>::MULTIPLYING));
        multiply_run<Weights, ROWS>(p, shared, run, k_tiles, warp, lane);
        return;
    }
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(Registers<TILES>::OTHERS));
    if (warp == TILES) {
        stream_tiles<Weights, ROWS>(p, shared, run, k_tiles, lane);
        return;
    }
    if (warp == TILES + 1 && lane < p.row_slots) {
        barrier_init(shared.rows_full + lane * 8, 1);
        barrier_init(shared.rows_empty + lane * 8, TILES * p.matmul.cluster_blocks);
        barrier_init_fence();
    }
    __syncwarp();
    meet_cluster(p.matmul.cluster_blocks);
    if (warp == TILES + 1 && lane == 0) stream_rows<Weights, ROWS>(p, shared, run, k_tiles);
}

#define WGMMA_MATMUL_KERNELS(NAME, ...)        \
    WGMMA_MATMUL_KERNEL(NAME, 8, __VA_ARGS__)  \
    WGMMA_MATMUL_KERNEL(NAME, 16, __VA_ARGS__) \
    WGMMA_MATMUL_KERNEL(NAME, 32, __VA_ARGS__) \
    WGMMA_MATMUL_KERNEL(NAME, 48, __VA_ARGS__) \
    WGMMA_MATMUL_KERNEL(NAME, 64, __VA_ARGS__) \
    WGMMA_MATMUL_KERNEL(NAME, 128, __VA_ARGS__)
#define WGMMA_MATMUL_KERNEL(NAME, ROWS, ...)                                                \
    extern "C" __global__ void __launch_bounds__((WGMMA_THREADS<__VA_ARGS__, ROWS>), 1)     \
        NAME##_wgmma_##ROWS(const __grid_constant__ WgmmaParams p) {                        \
        wgmma_matmul<__VA_ARGS__, ROWS>(p);                                                 \
    }
#else
#define WGMMA_MATMUL_KERNELS(NAME, ...)
#endif
