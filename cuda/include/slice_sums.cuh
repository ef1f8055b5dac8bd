// y[r, n] = sum_k x[r, k] w[n, k] for 1..32 rows, at the speed at which the weights can be read.
//
// A launch multiplies the same rows by one matrix or several of one K and format, tile after tile of all of them: small
// ones share what a launch costs. Which matrices stand beside it does not show in a sum.
//
// One order for every row count and weight format. Weights come in super-tiles of 16 channels x 64 columns. K is cut
// into 8 * num_octets slices of whole super-tiles, num_octets a power of two. A slice's sum is one chain of mma.m16n8k16
// over ascending k from zero; eight slice sums are added in ascending order to an octet's, these in ascending order to
// the result. The rows beside a row only fill other columns of operand B, so nothing here depends on how many there are.
//
// A block has eight warps; each owns a slice of the octets the block works on (two where the activations of both fit
// in registers, else one). It takes a run of *units* (group of octets, tile of 16 channels), so that all blocks read
// the same number of bytes to one unit. A warp keeps its slices of the activations in registers and streams weights
// through its own ring in shared memory. Its sums go to shared memory, where the warps take turns in adding a unit's,
// one unit late so that none waits for the slowest. Where a block holds only some octets of a tile, octet_sums.cuh
// brings them together. Weights are asked for before the predecessor's results are waited for.
#pragma once

#include "mma.cuh"

constexpr u32 SLICES = 8;                 // warps of a block: slices of an octet
constexpr u32 MAX_SLICE_TILES = 5;        // super-tiles of a slice, at most: its activations stay in registers
constexpr u32 BLOCK_THREADS = SLICES * WARP_LANES;
constexpr u32 TILE_CHANNELS = 16;
constexpr u32 TILE_COLUMNS = 64;
constexpr u32 SUM_STRIDE = 20;        // floats between the rows of a slice sum: no two lanes meet in a bank
constexpr u32 SUM_BUFFERS = 2;            // units whose slice sums wait to be added

constexpr u32 MAX_PARTS = 4;              // matrices of a launch

// One matrix and its result; mirrored by the launcher.
struct MatmulPart {
    const u8* weights;         // [tiles][slices]: a slice's note, then its super-tiles
    const u32* escape_starts;  // W12: first escape of every super-tile, and the end
    const u32* escapes;
    float* y;                  // [num_rows][out_features]
    u32 out_features;
    u32 end_tile;              // tiles of this part and of those before
};

// Arguments of every kernel of this family; mirrored by the launcher.
struct MatmulParams {
    MatmulPart parts[MAX_PARTS];
    const u16* x;              // [num_rows][in_features padded to 64] BF16, zero in the padding
    float4* octet_sums;        // without clusters: [tiles][num_octets][row group][32 lanes]
    u32* grid_barrier;         // without clusters: see wait_for_grid
    u32 num_rows;
    u32 num_tiles;             // of all parts
    u32 in_features;
    u32 num_octets;            // a power of two
    u32 log2_slices;           // of SLICES * num_octets
    u32 slice_tiles;           // super-tiles of the longest slice: size of a ring slot
    u32 ring_slots;            // slices of a warp's ring
    u32 cluster_blocks;        // blocks that hold all octets of a tile between them, a power of two; 1 without clusters
    u32 inbox_slots;           // tiles whose octets an owner may hold at a time, 1 or 2; 1 without clusters
    u32 adds_to_output;        // y = y + sum
    u32 run_len;               // units that a block takes, or blocks that hold a tile's octets between them; slices with wgmma
    u32 longer_runs;           // runs, from the first on, that are one longer
};

// Of a power of two.
__device__ __forceinline__ u32 log2_of(u32 value) { return 31 - __clz(value); }

// What lies in line for a block, or for several together, among equal runs.
struct Run {
    u32 start, len;

    __device__ __forceinline__ Run(const MatmulParams& p, u32 index)
        : start(index * p.run_len + min(index, p.longer_runs)), len(p.run_len + (index < p.longer_runs)) {}
};

// The part that a tile belongs to, and its place there.
struct PartTile {
    u32 part;
    u32 tile;

    __device__ __forceinline__ PartTile(const MatmulParams& p, u32 of_all) : part(0), tile(of_all) {
        while (of_all >= p.parts[part].end_tile) {
            tile = of_all - p.parts[part].end_tile;
            part++;
        }
    }
};

// Where a unit's super-tiles lie for one slice.
struct SliceSpan {
    u32 first;
    u32 len;
};

__device__ __forceinline__ SliceSpan slice_span(const MatmulParams& p, u32 k_tiles, u32 octet, u32 slice) {
    const u32 index = octet * SLICES + slice;
    const u32 first = index * k_tiles >> p.log2_slices;
    return {first, ((index + 1) * k_tiles >> p.log2_slices) - first};
}

// A run over units (group of BLOCK_OCTETS octets, tile), tiles fastest.
struct UnitCursor {
    u32 group;
    u32 tile;

    // `num_units` behind the first of a group.
    __device__ __forceinline__ UnitCursor(u32 first_group, u32 num_units, u32 num_tiles) : group(first_group), tile(num_units) {
        while (tile >= num_tiles) tile -= num_tiles, group++;
    }

    // `num_units` earlier in the run.
    __device__ __forceinline__ UnitCursor before(u32 num_units, u32 num_tiles) const {
        UnitCursor earlier = *this;
        while (earlier.tile < num_units) earlier.tile += num_tiles, earlier.group--;
        earlier.tile -= num_units;
        return earlier;
    }

    // Whether the group of octets changed.
    __device__ __forceinline__ bool advance(u32 num_tiles) {
        tile++;
        if (tile < num_tiles) return false;
        tile = 0;
        group++;
        return true;
    }
};

// The activations of a slice as operands B: [super-tile][fragment][row group][register].
template <u32 GROUPS>
using SliceRows = u32[MAX_SLICE_TILES][4][GROUPS][2];

template <u32 GROUPS>
__device__ __forceinline__ void load_slice_rows(const MatmulParams& p, SliceSpan span, u32 k_tiles, u32 lane, SliceRows<GROUPS>& rows) {
    const u32 token = lane / 4, quad = lane % 4;
#pragma unroll
    for (u32 j = 0; j < MAX_SLICE_TILES; j++) {
#pragma unroll
        for (u32 group = 0; group < GROUPS; group++) {
            // Where there is no such row or super-tile any other will do: nobody looks at what comes of it.
            const u32 row = min(group * 8 + token, p.num_rows - 1);
            const u32 tile = min(span.first + j, k_tiles - 1);
            const u64 first = (static_cast<u64>(row) * k_tiles + tile) * TILE_COLUMNS + quad * 16;
            const uint4* from = reinterpret_cast<const uint4*>(p.x + first);
            const uint4 low = from[0], high = from[1];
            rows[j][0][group][0] = low.x, rows[j][0][group][1] = low.y;
            rows[j][1][group][0] = low.z, rows[j][1][group][1] = low.w;
            rows[j][2][group][0] = high.x, rows[j][2][group][1] = high.y;
            rows[j][3][group][0] = high.z, rows[j][3][group][1] = high.w;
        }
    }
}

// Shared memory: rings, slice sums, octet sums of other blocks, barriers. The launcher computes the same size.
template <class Weights, u32 GROUPS, u32 BLOCK_OCTETS>
struct SharedLayout {
    static constexpr u32 SLICE_SUM_BYTES = GROUPS * 8 * SUM_STRIDE * 4;
    static constexpr u32 OCTET_SUM_BYTES = GROUPS * WARP_LANES * 16;
    static constexpr u32 BUFFERS = SUM_BUFFERS * BLOCK_OCTETS;
    u32 slot_bytes, ring, sums, inbox, ring_full, sums_full, sums_empty, inbox_full, inbox_free;

    __device__ __forceinline__ SharedLayout(const MatmulParams& p, u32 start) {
        slot_bytes = Weights::NOTE_BYTES + p.slice_tiles * Weights::TILE_BYTES;
        ring = start;
        sums = ring + SLICES * p.ring_slots * slot_bytes;
        inbox = sums + BUFFERS * SLICES * SLICE_SUM_BYTES;
        ring_full = inbox + (p.cluster_blocks > 1 ? p.inbox_slots * p.num_octets * OCTET_SUM_BYTES : 0);
        sums_full = ring_full + SLICES * p.ring_slots * 8;
        sums_empty = sums_full + BUFFERS * 8;
        inbox_full = sums_empty + BUFFERS * 8;
        inbox_free = inbox_full + p.inbox_slots * 8;
    }
};

// A warp's ring: asks for the slices of its run in order, as far ahead as there are slots.
template <class Weights, u32 BLOCK_OCTETS>
struct WeightRing {
    const MatmulParams& p;
    const u32 k_tiles, num_tiles, slice, lane;
    const u32 slots_start, slot_bytes, barriers_start;
    u64 policy;
    UnitCursor next;
    const u8* from[BLOCK_OCTETS];  // the next unit's slices
    u32 num_bytes[BLOCK_OCTETS];
    u32 units_left;
    u32 part_end;                  // tile with which the next unit's part ends

    __device__ __forceinline__ u64 tile_stride() const {
        return static_cast<u64>(k_tiles) * Weights::STORED_TILE_BYTES + p.num_octets * SLICES * Weights::NOTE_BYTES;
    }

    __device__ __forceinline__ void find_slices() {
        const PartTile place(p, next.tile);
        part_end = p.parts[place.part].end_tile;
#pragma unroll
        for (u32 i = 0; i < BLOCK_OCTETS; i++) {
            const u32 octet = next.group * BLOCK_OCTETS + i;
            const SliceSpan span = slice_span(p, k_tiles, octet, slice);
            from[i] = p.parts[place.part].weights + place.tile * tile_stride() + span.first * Weights::STORED_TILE_BYTES +
                      (octet * SLICES + slice) * Weights::NOTE_BYTES;
            num_bytes[i] = Weights::NOTE_BYTES + span.len * Weights::TILE_BYTES;
        }
    }

    // Asks for the slice of octet number `octet` of the next unit's group; octets come in turn.
    __device__ __forceinline__ void ask(u32 slot, u32 octet) {
        if (units_left == 0) return;
        const u32 barrier = barriers_start + slot * 8;
        const bool is_first = octet == 0;
        const u32 bytes = is_first ? num_bytes[0] : num_bytes[BLOCK_OCTETS - 1];
        copy_begin(barrier, bytes, lane);
        copy_async(slots_start + slot * slot_bytes, is_first ? from[0] : from[BLOCK_OCTETS - 1], bytes, barrier, policy, lane);
        copy_end(barrier);
        if (octet + 1 < BLOCK_OCTETS) return;
        units_left--;
        if (next.advance(num_tiles) || next.tile == part_end) {
            // Past the last unit there may be no part, and nobody asks.
            if (units_left > 0) find_slices();
        } else {
#pragma unroll
            for (u32 i = 0; i < BLOCK_OCTETS; i++) from[i] += tile_stride();
        }
    }
};

template <u32 GROUPS>
__device__ __forceinline__ void multiply_tile(const u32 (&a)[4][4], const u32 (&rows)[4][GROUPS][2], float (&sums)[GROUPS][4]) {
#pragma unroll
    for (u32 fragment = 0; fragment < 4; fragment++) {
#pragma unroll
        for (u32 group = 0; group < GROUPS; group++) {
            mma_m16n8k16(sums[group], a[fragment], rows[fragment][group][0], rows[fragment][group][1]);
        }
    }
}

// Super-tile `J` of a slice, already decoded in `a`, and those after it. A super-tile is decoded between the matrix
// instructions of the one before, which wait for each other.
template <class Weights, u32 GROUPS, u32 J>
__device__ __forceinline__ void multiply_from(const typename Weights::Slice& slice, u32 len, const SliceRows<GROUPS>& rows,
                                              const u32 (&a)[4][4], float (&sums)[GROUPS][4]) {
    if constexpr (J + 1 < MAX_SLICE_TILES) {
        // An end of one group is so short that the compiler would predicate it, and every super-tile wait for its four matrix
        // instructions: there, what lies behind the slice in shared memory is decoded instead, and nobody looks at it.
        if (GROUPS == 1 || J + 1 < len) {
            u32 next[4][4];
            slice.decode(J + 1, next);
            multiply_tile<GROUPS>(a, rows[J], sums);
            if (GROUPS == 1 && J + 1 >= len) return;
            slice.patch(J + 1, next);
            multiply_from<Weights, GROUPS, J + 1>(slice, len, rows, next, sums);
            return;
        }
    }
    multiply_tile<GROUPS>(a, rows[J], sums);
    // Keeps the compiler from making one of the five ends, for which every super-tile would have to move its operands.
    asm volatile("// end of a slice of %0" ::"n"(J + 1));
}

// The sums of a slice that has arrived. One piece of code for every length: several would not fit the instruction cache.
// As a loop over super-tiles it would be a third slower: the compiler predicates the matrix instructions of all five.
template <class Weights, u32 GROUPS>
__device__ __forceinline__ void multiply_slice(const typename Weights::Slice& slice, u32 len, const SliceRows<GROUPS>& rows,
                                               float (&sums)[GROUPS][4]) {
    if (len == 0) return;
    u32 a[4][4];
    slice.decode(0, a);
    slice.patch(0, a);
    multiply_from<Weights, GROUPS, 0>(slice, len, rows, a, sums);
}

// Hands a warp's sums of the block's octet number `index` over.
template <class Weights, u32 GROUPS, u32 BLOCK_OCTETS>
__device__ __forceinline__ void leave_slice_sums(const SharedLayout<Weights, GROUPS, BLOCK_OCTETS>& shared, u32 index, u32 slice, u32 lane,
                                                 const float (&sums)[GROUPS][4]) {
    const u32 buffer = index % shared.BUFFERS;
    barrier_wait(shared.sums_empty + buffer * 8, (index / shared.BUFFERS & 1) ^ 1);
    const u32 to = shared.sums + (buffer * SLICES + slice) * shared.SLICE_SUM_BYTES;
    const u32 channel = lane / 4, token = lane % 4 * 2;
#pragma unroll
    for (u32 group = 0; group < GROUPS; group++) {
#pragma unroll
        for (u32 c = 0; c < 4; c++) {
            const u32 place = (group * 8 + token + c % 2) * SUM_STRIDE + channel + c / 2 * 8;
            asm volatile("st.shared.f32 [%0], %1;" ::"r"(to + place * 4), "f"(sums[group][c]) : "memory");
        }
    }
    __syncwarp();
    if (lane == 0) barrier_arrive(shared.sums_full + buffer * 8);
}

// Adds the eight slice sums of the block's octet number `index`.
template <class Weights, u32 GROUPS, u32 BLOCK_OCTETS>
__device__ __forceinline__ void add_slices(const SharedLayout<Weights, GROUPS, BLOCK_OCTETS>& shared, u32 index, u32 lane,
                                           float4 (&sums)[GROUPS]) {
    const u32 buffer = index % shared.BUFFERS;
    barrier_wait(shared.sums_full + buffer * 8, index / shared.BUFFERS & 1);
#pragma unroll
    for (u32 group = 0; group < GROUPS; group++) {
        const u32 place = (group * 8 + lane / 4) * SUM_STRIDE + lane % 4 * 4;
#pragma unroll
        for (u32 slice = 0; slice < SLICES; slice++) {
            const float4 value = load_shared_float4(shared.sums + (buffer * SLICES + slice) * shared.SLICE_SUM_BYTES + place * 4);
            if (slice == 0) sums[group] = value;
            else add_to(sums[group], value);
        }
    }
    __syncwarp();
    if (lane == 0) barrier_arrive(shared.sums_empty + buffer * 8);
}
