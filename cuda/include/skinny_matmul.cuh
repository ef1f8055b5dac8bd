// y[r, n] = sum_k x[r, k] w[n, k] for 1..32 rows, at the speed at which the weights can be read.
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
// one unit late so that none waits for the slowest. Where a block holds only some octets of a tile, octet sums go to
// global memory and the grid adds them once all blocks are through. Weights are asked for before the predecessor's
// results are waited for.
#pragma once

#include "mma.cuh"

constexpr u32 SLICES = 8;                 // warps of a block: slices of an octet
constexpr u32 MAX_SLICE_TILES = 5;        // super-tiles of a slice, at most: its activations stay in registers
constexpr u32 BLOCK_THREADS = SLICES * WARP_LANES;
constexpr u32 TILE_CHANNELS = 16;
constexpr u32 TILE_COLUMNS = 64;
constexpr u32 SUM_STRIDE = 20;        // floats between the rows of a slice sum: no two lanes meet in a bank
constexpr u32 SUM_BUFFERS = 2;            // units whose slice sums wait to be added

// Arguments of every kernel of this family; mirrored by the launcher.
struct MatmulParams {
    const u8* plane8;          // W12: U and V words, 1024 B a super-tile. BF16: fragments, 2048 B a super-tile
    const u8* plane4;          // W12: X words, 512 B a super-tile
    const u8* bases;           // W12: exponent base of every channel of the padded matrix
    const u32* escape_starts;  // W12: first escape of every super-tile, and the end
    const u32* escapes;
    const u16* x;              // [num_rows][in_features padded to 64] BF16, zero in the padding
    float* y;                  // [num_rows][out_features]
    float4* octet_sums;        // [tiles][num_octets][row group][32 lanes]
    u32* grid_barrier;         // blocks arrived, zero between launches; generation
    u32 num_rows;
    u32 out_features;
    u32 in_features;
    u32 num_octets;            // a power of two
    u32 log2_slices;           // of SLICES * num_octets
    u32 slice_tiles;           // super-tiles of the longest slice: size of a ring slot
    u32 ring_slots;            // slices of a warp's ring
    u32 adds_to_output;        // y = y + sum
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

    __device__ __forceinline__ UnitCursor(u32 unit, u32 num_tiles) : group(unit / num_tiles), tile(unit % num_tiles) {}

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
            const u32 row = group * 8 + token;
            uint4 low = {}, high = {};
            if (j < span.len && row < p.num_rows) {
                const u32 column = (span.first + j) * TILE_COLUMNS + quad * 16;
                const uint4* from = reinterpret_cast<const uint4*>(p.x + static_cast<u64>(row) * k_tiles * TILE_COLUMNS + column);
                low = from[0], high = from[1];
            }
            rows[j][0][group][0] = low.x, rows[j][0][group][1] = low.y;
            rows[j][1][group][0] = low.z, rows[j][1][group][1] = low.w;
            rows[j][2][group][0] = high.x, rows[j][2][group][1] = high.y;
            rows[j][3][group][0] = high.z, rows[j][3][group][1] = high.w;
        }
    }
}

// Shared memory: rings, then slice sums, then barriers. The launcher computes the same size.
template <class Weights, u32 GROUPS, u32 BLOCK_OCTETS>
struct SharedLayout {
    static constexpr u32 SLICE_SUM_BYTES = GROUPS * 8 * SUM_STRIDE * 4;
    static constexpr u32 BUFFERS = SUM_BUFFERS * BLOCK_OCTETS;
    u32 slot_bytes, ring, sums, ring_full, sums_full, sums_empty;

    __device__ __forceinline__ SharedLayout(const MatmulParams& p, u32 start) {
        slot_bytes = p.slice_tiles * Weights::TILE_BYTES;
        ring = start;
        sums = ring + SLICES * p.ring_slots * slot_bytes;
        ring_full = sums + BUFFERS * SLICES * SLICE_SUM_BYTES;
        sums_full = ring_full + SLICES * p.ring_slots * 8;
        sums_empty = sums_full + BUFFERS * 8;
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
    u32 octet;  // of the group
    u32 units_left;

    __device__ __forceinline__ void ask(u32 slot) {
        if (units_left == 0) return;
        const u32 barrier = barriers_start + slot * 8;
        const SliceSpan span = slice_span(p, k_tiles, next.group * BLOCK_OCTETS + octet, slice);
        const u64 tile = static_cast<u64>(next.tile) * k_tiles + span.first;
        copy_begin(barrier, span.len * Weights::TILE_BYTES, lane);
        Weights::copy(p, tile, span.len, slots_start + slot * slot_bytes, barrier, policy, lane);
        copy_end(barrier);
        if (++octet < BLOCK_OCTETS) return;
        octet = 0;
        units_left--;
        next.advance(num_tiles);
    }
};

// The sums of a slice of LEN super-tiles that lie at `slot`.
template <u32 LEN, class Weights, u32 GROUPS>
__device__ __forceinline__ void multiply_slice(const MatmulParams& p, Weights& weights, u32 slot, u32 lane,
                                               const SliceRows<GROUPS>& rows, float (&sums)[GROUPS][4]) {
    typename Weights::Raw raw = weights.load(p, slot, 0, lane);
#pragma unroll
    for (u32 j = 0; j < LEN; j++) {
        const typename Weights::Raw current = raw;
        if (j + 1 < LEN) raw = weights.load(p, slot, j + 1, lane);
        u32 a[4][4];
        weights.decode(p, current, j, lane, a);
#pragma unroll
        for (u32 fragment = 0; fragment < 4; fragment++) {
#pragma unroll
            for (u32 group = 0; group < GROUPS; group++) {
                mma_m16n8k16(sums[group], a[fragment], rows[j][fragment][group][0], rows[j][fragment][group][1]);
            }
        }
    }
}

__device__ __forceinline__ void add_to(float4& sum, float4 value) {
    sum.x += value.x, sum.y += value.y, sum.z += value.z, sum.w += value.w;
}

// Stores four channels of a row.
__device__ __forceinline__ void store_channels(const MatmulParams& p, u32 row, u32 channel, float4 sum) {
    if (row >= p.num_rows) return;
    float* y = p.y + static_cast<u64>(row) * p.out_features + channel;
    if (p.out_features % 4 == 0 && channel < p.out_features) {
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
        if (channel + c < p.out_features) y[c] = p.adds_to_output ? y[c] + values[c] : values[c];
    }
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
            const uint4 bits = load_shared_16(shared.sums + (buffer * SLICES + slice) * shared.SLICE_SUM_BYTES + place * 4);
            const float4 value = {__uint_as_float(bits.x), __uint_as_float(bits.y), __uint_as_float(bits.z),
                                  __uint_as_float(bits.w)};
            if (slice == 0) sums[group] = value;
            else add_to(sums[group], value);
        }
    }
    __syncwarp();
    if (lane == 0) barrier_arrive(shared.sums_empty + buffer * 8);
}

// Finishes the block's unit `index`: to the output if the block holds all octets, else to global memory.
template <class Weights, u32 GROUPS, u32 BLOCK_OCTETS>
__device__ __forceinline__ void finish_unit(const MatmulParams& p, const SharedLayout<Weights, GROUPS, BLOCK_OCTETS>& shared, u32 index,
                                            UnitCursor unit, u32 lane) {
    float4 total[GROUPS];
#pragma unroll
    for (u32 octet = 0; octet < BLOCK_OCTETS; octet++) {
        float4 sums[GROUPS];
        add_slices<Weights, GROUPS, BLOCK_OCTETS>(shared, index * BLOCK_OCTETS + octet, lane, sums);
        const u64 place = static_cast<u64>(unit.tile) * p.num_octets + unit.group * BLOCK_OCTETS + octet;
#pragma unroll
        for (u32 group = 0; group < GROUPS; group++) {
            if (p.num_octets > BLOCK_OCTETS) __stcg(p.octet_sums + (place * GROUPS + group) * WARP_LANES + lane, sums[group]);
            if (octet == 0) total[group] = sums[group];
            else add_to(total[group], sums[group]);
        }
    }
    if (p.num_octets > BLOCK_OCTETS) return;
#pragma unroll
    for (u32 group = 0; group < GROUPS; group++) {
        store_channels(p, group * 8 + lane / 4, unit.tile * TILE_CHANNELS + lane % 4 * 4, total[group]);
    }
}

// Returns once every block of the grid has called it, with all their writes visible. All blocks are resident.
__device__ __forceinline__ void wait_for_grid(u32* barrier) {
    __syncthreads();
    if (threadIdx.x == 0) {
        volatile u32* generation = barrier + 1;
        const u32 before = *generation;
        __threadfence();
        if (atomicAdd(barrier, 1) + 1 == gridDim.x) {
            *barrier = 0;
            __threadfence();
            *generation = before + 1;
        } else {
            while (*generation == before) {
            }
        }
        __threadfence();
    }
    __syncthreads();
}

// Adds the octets of this block's share of the tiles, which any blocks may have computed.
template <u32 GROUPS>
__device__ __forceinline__ void add_octets(const MatmulParams& p, u32 num_tiles) {
    const u32 first = blockIdx.x * num_tiles / gridDim.x, end = (blockIdx.x + 1) * num_tiles / gridDim.x;
    const u32 lane = threadIdx.x % WARP_LANES;
    for (u32 i = first * GROUPS + threadIdx.x / WARP_LANES; i < end * GROUPS; i += SLICES) {
        const u32 tile = i / GROUPS, group = i % GROUPS;
        const float4* sums = p.octet_sums + (static_cast<u64>(tile) * p.num_octets * GROUPS + group) * WARP_LANES + lane;
        float4 total = __ldcg(sums);
        for (u32 octet = 1; octet < p.num_octets; octet++) add_to(total, __ldcg(sums + octet * GROUPS * WARP_LANES));
        store_channels(p, group * 8 + lane / 4, tile * TILE_CHANNELS + lane % 4 * 4, total);
    }
}

template <class Weights, u32 GROUPS, u32 BLOCK_OCTETS>
__device__ __forceinline__ void stream_units(const MatmulParams& p, const SharedLayout<Weights, GROUPS, BLOCK_OCTETS>& shared, u32 slice,
                                             u32 lane, u32 first_unit, u32 num_units, u32 k_tiles, u32 num_tiles) {
    UnitCursor unit(first_unit, num_tiles);
    SliceSpan spans[BLOCK_OCTETS];
#pragma unroll
    for (u32 octet = 0; octet < BLOCK_OCTETS; octet++) {
        spans[octet] = slice_span(p, k_tiles, unit.group * BLOCK_OCTETS + octet, slice);
    }
    WeightRing<Weights, BLOCK_OCTETS> ring{p, k_tiles, num_tiles, slice, lane,
                                           shared.ring + slice * p.ring_slots * shared.slot_bytes, shared.slot_bytes,
                                           shared.ring_full + slice * p.ring_slots * 8,
                                           read_once_policy(), unit, 0, num_units};
    for (u32 slot = 0; slot < p.ring_slots; slot++) ring.ask(slot);
    typename Weights::template Context<BLOCK_OCTETS> weights(p, unit, spans[0], num_units, k_tiles, num_tiles, slice, lane);
    launch_dependents();
    wait_for_predecessors();

    SliceRows<GROUPS> rows[BLOCK_OCTETS];
#pragma unroll
    for (u32 octet = 0; octet < BLOCK_OCTETS; octet++) load_slice_rows<GROUPS>(p, spans[octet], k_tiles, lane, rows[octet]);
    u32 slot = 0, parity = 0;
    UnitCursor finished = unit;
    for (u32 i = 0; i <= num_units; i++) {
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
                weights.begin_slice(p, k_tiles, num_tiles, slice, lane);
const u32 at = ring.slots_start + slot * shared.slot_bytes;
                barrier_wait(ring.barriers_start + slot * 8, parity);
                __syncwarp();
                switch (spans[octet].len) {
                    case 5: multiply_slice<5>(p, weights, at, lane, rows[octet], sums); break;
                    case 4: multiply_slice<4>(p, weights, at, lane, rows[octet], sums); break;
                    case 3: multiply_slice<3>(p, weights, at, lane, rows[octet], sums); break;
                    case 2: multiply_slice<2>(p, weights, at, lane, rows[octet], sums); break;
                    case 1: multiply_slice<1>(p, weights, at, lane, rows[octet], sums); break;
                    default: break;
                }
                // The slot's bytes are in registers, and used: it may be written again.
                __syncwarp();
                ring.ask(slot);
                if (++slot == p.ring_slots) slot = 0, parity ^= 1;
                leave_slice_sums<Weights, GROUPS, BLOCK_OCTETS>(shared, i * BLOCK_OCTETS + octet, slice, lane, sums);
            }
        }
        if (i > 0) {
            if ((i - 1) % SLICES == slice) finish_unit<Weights, GROUPS, BLOCK_OCTETS>(p, shared, i - 1, finished, lane);
            finished.advance(num_tiles);
        }
    }
}

template <class Weights, u32 GROUPS, u32 BLOCK_OCTETS>
__device__ __forceinline__ void skinny_matmul(const MatmulParams& p) {
    extern __shared__ __align__(128) u8 shared_bytes[];
    const SharedLayout<Weights, GROUPS, BLOCK_OCTETS> shared(p, shared_address(shared_bytes));
    // Taken from one lane, so that the compiler knows that a warp agrees on it.
    const u32 warp = __shfl_sync(0xFFFFFFFF, threadIdx.x / WARP_LANES, 0), lane = threadIdx.x % WARP_LANES;
    const u32 k_tiles = (p.in_features + TILE_COLUMNS - 1) / TILE_COLUMNS;
    const u32 num_tiles = (p.out_features + TILE_CHANNELS - 1) / TILE_CHANNELS;
    const u32 all_units = num_tiles * (p.num_octets / BLOCK_OCTETS);
    const u32 first_unit = blockIdx.x * all_units / gridDim.x;
    const u32 num_units = (blockIdx.x + 1) * all_units / gridDim.x - first_unit;
    for (u32 slot = lane; slot < p.ring_slots; slot += WARP_LANES) {
        barrier_init(shared.ring_full + (warp * p.ring_slots + slot) * 8, COPY_ARRIVALS);
    }
    if (threadIdx.x < shared.BUFFERS) {
        barrier_init(shared.sums_full + lane * 8, SLICES);
        barrier_init(shared.sums_empty + lane * 8, 1);
    }
    barrier_init_fence();
    __syncthreads();
    stream_units<Weights, GROUPS, BLOCK_OCTETS>(p, shared, warp, lane, first_unit, num_units, k_tiles, num_tiles);
    if (p.num_octets > BLOCK_OCTETS) {
        wait_for_grid(p.grid_barrier);
        add_octets<GROUPS>(p, num_tiles);
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
