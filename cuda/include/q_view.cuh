// The 8-bit view of W12 weights times 1..32 rows with wgmma: E4M3 by E4M3, so that a weight costs a register byte and two
// instructions, and the time is that of reading a byte a weight.
//
// A byte of the view, put together from its two planes, *is* an E4M3 number but for two corners: offset 0 reads as a
// subnormal (below 2^-14 of the channel's largest weight, so it does not matter which), and all ones would be no number:
// it is made the number below. What the view leaves open of a mantissa is met on average by LEAST_SQUARES; the channel's
// exponent base is a factor of its sum. Escapes above the window are multiplied apart, in fp32.
// Activations are E4M3 with a scale for each row (`quantise_rows`). A Q pass marks a path, it decides no token; a row's result
// is still the same beside any others, so that marks do not depend on the batch.
//
// K is cut into `num_shares` runs of whole slices, as many as it takes for the rows of one to stay in a block's shared
// memory; that follows from K alone. Blocks of a share divide its tiles; a warpgroup takes four tiles at a time, a warp each,
// streamed through the warp's own ring. Sums of shares are left in memory and added in order by one of them, one
// unit of four tiles late, so that none waits for the others.
#pragma once

#include "block_reduce.cuh"
#include "mma.cuh"
#include "slice_note.cuh"
#include "slice_sums.cuh"
#include "wgmma.cuh"

constexpr u32 UNIT_TILES = 4;                 // warps of a warpgroup
constexpr u32 Q_VIEW_GROUPS = 2;              // warpgroups of a block
constexpr u32 Q_VIEW_THREADS = Q_VIEW_GROUPS * GROUP_THREADS;
constexpr u32 CHUNK_COLUMNS = 16;             // of one row, next to each other in operand B
constexpr u32 TILE_CHUNKS = TILE_COLUMNS / CHUNK_COLUMNS;
constexpr u32 VIEW_TILE_BYTES = TILE_CHANNELS * TILE_COLUMNS;
constexpr u32 STORED_TILE_BYTES = VIEW_TILE_BYTES * 3 / 2;
constexpr u32 E4M3_BIAS = 7, FLOAT_BIAS = 127;
constexpr float MOST_E4M3 = 448.0f;
constexpr float LEAST_MAGNITUDE = 1e-30f;     // of a row's largest value; below, all of it is zero and its scale has an inverse
// What makes truncated mantissas of three bits fit the weights best (reference: least squares over Gaussian rows).
constexpr float LEAST_SQUARES = 1.042f;

// Arguments of `q_view_*`; mirrored by the launcher.
struct QViewParams {
    MatmulPart parts[MAX_PARTS];
    const u8* x;             // [super-tiles of K][chunks][padded_rows][16]: E4M3
    const float* scales;     // of each row
    float4* partial_sums;    // [worker][unit][share][row group][thread of a warpgroup]
    u32* arrivals;           // [worker][unit], zero between launches
    u32 num_rows;
    u32 num_tiles;           // of all parts
    u32 k_tiles;
    u32 log2_slices;
    u32 log2_shares;
    u32 share_tiles;         // super-tiles of the longest share
    u32 slice_tiles;         // super-tiles of the longest slice
    u32 ring_slots;
    u32 max_units;           // of a worker
    u32 adds_to_output;
};

// Arguments of `quantise_rows`; mirrored by the launcher.
struct QuantiseRowsParams {
    const u16* rounded;  // [num_rows][k_tiles * 64] BF16
    u8* x;
    float* scales;
    u32 num_rows;
    u32 padded_rows;
    u32 k_tiles;
};

__device__ __forceinline__ u32 pack_e4m3(float a, float b, float c, float d) {
    u16 low, high;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(low) : "f"(b), "f"(a));
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(high) : "f"(d), "f"(c));
    return low | static_cast<u32>(high) << 16;
}

__device__ __forceinline__ float e4m3_to_float(u32 byte) {
    u32 halves;
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(static_cast<u16>(byte)));
    float value;
    asm("{ .reg .b16 low, high; mov.b32 {low, high}, %1; cvt.f32.f16 %0, low; }" : "=f"(value) : "r"(halves));
    return value;
}

// A block a row. Byte `4 t + b` of a row's chunk c of a super-tile is column `16 t + 4 c + b`: what lane t of a quad holds of
// fragment c.
__device__ __forceinline__ void quantise(const QuantiseRowsParams& p) {
    constexpr u32 MAX_WARPS = 32;
    __shared__ float largest[MAX_WARPS];
    launch_dependents();
    wait_for_predecessors();
    const u32 row = blockIdx.x, num_chunks = p.k_tiles * TILE_CHUNKS, lane = threadIdx.x % WARP_LANES;
    const u16* from = p.rounded + static_cast<u64>(row) * p.k_tiles * TILE_COLUMNS;
    const uint4* all = reinterpret_cast<const uint4*>(from);
    // BF16 magnitudes compare as integers do.
    u32 most = 0;
    for (u32 i = threadIdx.x; i < p.k_tiles * TILE_COLUMNS / 8; i += blockDim.x) {
        const uint4 values = all[i];
        for (const u32 pair : {values.x, values.y, values.z, values.w}) {
            most = max(most, max(pair & 0x7FFF, pair >> 16 & 0x7FFF));
        }
    }
    most = __reduce_max_sync(ALL_LANES, most);
    if (lane == 0) largest[threadIdx.x / WARP_LANES] = __uint_as_float(most << 16);
    __syncthreads();
    float magnitude = 0.0f;
    for (u32 i = 0; i < blockDim.x / WARP_LANES; i++) magnitude = fmaxf(magnitude, largest[i]);
    const float scale = magnitude > LEAST_MAGNITUDE ? magnitude / MOST_E4M3 : 1.0f, inverse = 1.0f / scale;
    if (threadIdx.x == 0) p.scales[row] = scale;
    for (u32 chunk = threadIdx.x; chunk < num_chunks; chunk += blockDim.x) {
        const u16* columns = from + chunk / TILE_CHUNKS * TILE_COLUMNS + chunk % TILE_CHUNKS * 4;
        u32 words[4];
#pragma unroll
        for (u32 t = 0; t < 4; t++) {
            const uint2 four = *reinterpret_cast<const uint2*>(columns + 16 * t);
            words[t] = pack_e4m3(__uint_as_float(four.x << 16) * inverse, __uint_as_float(four.x & 0xFFFF0000) * inverse,
                                 __uint_as_float(four.y << 16) * inverse, __uint_as_float(four.y & 0xFFFF0000) * inverse);
        }
        reinterpret_cast<uint4*>(p.x)[static_cast<u64>(chunk) * p.padded_rows + row] = make_uint4(words[0], words[1], words[2], words[3]);
    }
}

// d += a b for 64 channels x 32 columns and 32 columns x ROWS; `a` in registers, runs on its own until waited for.
template <u32 ROWS>
__device__ __forceinline__ void wgmma_e4m3(float (&d)[ROWS / 2], u32 a0, u32 a1, u32 a2, u32 a3, u64 b);

#define Q_VIEW_SUMS_4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define Q_VIEW_WGMMA(ROWS, D, A, B, ADDS, ...)                                                                                         \
    template <>                                                                                                                        \
    __device__ __forceinline__ void wgmma_e4m3<ROWS>(float (&d)[ROWS / 2], u32 a0, u32 a1, u32 a2, u32 a3, u64 b) {                     \
        asm volatile("{ .reg .pred adds; setp.ne.u32 adds, " ADDS ", 0; wgmma.mma_async.sync.aligned.m64n" #ROWS                       \
                     "k32.f32.e4m3.e4m3 {" D "}, {" A "}, " B ", adds, 1, 1; }"                                                        \
                     : __VA_ARGS__ : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(b), "r"(1));                                              \
    }
Q_VIEW_WGMMA(8, "%0,%1,%2,%3", "%4,%5,%6,%7", "%8", "%9", Q_VIEW_SUMS_4(0))
Q_VIEW_WGMMA(16, "%0,%1,%2,%3,%4,%5,%6,%7", "%8,%9,%10,%11", "%12", "%13", Q_VIEW_SUMS_4(0), Q_VIEW_SUMS_4(4))
Q_VIEW_WGMMA(24, "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11", "%12,%13,%14,%15", "%16", "%17", Q_VIEW_SUMS_4(0), Q_VIEW_SUMS_4(4),
             Q_VIEW_SUMS_4(8))
Q_VIEW_WGMMA(32, "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15", "%16,%17,%18,%19", "%20", "%21", Q_VIEW_SUMS_4(0),
             Q_VIEW_SUMS_4(4), Q_VIEW_SUMS_4(8), Q_VIEW_SUMS_4(12))

// All ones of magnitude, which would be no number, to the number below, in each byte.
__device__ __forceinline__ u32 without_nan(u32 bytes) {
    const u32 carries = (bytes & 0x7F7F7F7F) + 0x01010101;
    return bytes ^ (carries >> 7 & 0x01010101);
}

// A lane's eight weights of a fragment from its words of both planes, as E4M3: of channel g, and of channel g + 8.
__device__ __forceinline__ void join_planes(u32 u, u32 v, u32& low, u32& high) {
    const u32 turned = __funnelshift_r(u, u, 4);
    const u32 signs_a = (u & 0x80808080) | (u << 4 & 0x7F7F7F7F), signs_b = (turned & 0x80808080) | (u & 0x7F7F7F7F);
    const u32 a = (signs_a & 0xF0F0F0F0) | (v >> 4 & 0x0F0F0F0F), b = (signs_b & 0xF0F0F0F0) | (v & 0x0F0F0F0F);
    low = without_nan(__byte_perm(a, b, 0x5410));
    high = without_nan(__byte_perm(a, b, 0x7632));
}

// The place of an escape among what lanes hold: `lane << 21 | fragment << 19 | register << 17 | half << 16 | bits`.
struct EscapePlace {
    u32 lane, fragment, is_high, byte;

    __device__ __forceinline__ explicit EscapePlace(u32 entry)
        : lane(entry >> 21), fragment(entry >> 19 & 3), is_high(entry >> 17 & 1), byte((entry >> 18 & 1) * 2 + (entry >> 16 & 1)) {}
    __device__ __forceinline__ u32 channel() const { return lane / 4 + 8 * is_high; }
};

// A warp's slice that has arrived.
struct ViewSlice {
    const QViewParams& p;
    const u32 at, lane;
    u32 ends;
    bool is_crowded;

    __device__ __forceinline__ ViewSlice(const QViewParams& params, u32 address, u32 lane_index) : p(params), at(address), lane(lane_index) {
        ends = load_shared_u32(at + SliceNote::ENDS);
        is_crowded = ends == SliceNote::CROWDED;
    }

    __device__ __forceinline__ u32 base(u32 channel) const { return load_shared_u8(at + SliceNote::BASES + channel); }

    // Operand A of both instructions of super-tile j.
    __device__ __forceinline__ void decode(u32 j, u32 (&a)[8]) const {
        const u32 from = at + SliceNote::BYTES + j * VIEW_TILE_BYTES + lane * 16;
        const uint4 u = load_shared_16(from), v = load_shared_16(from + 512);
        join_planes(u.x, v.x, a[0], a[1]);
        join_planes(u.y, v.y, a[2], a[3]);
        join_planes(u.z, v.z, a[4], a[5]);
        join_planes(u.w, v.w, a[6], a[7]);
    }

    // Calls `use(entry)` for each escape above the window in super-tile j, by all lanes together.
    template <class Use>
    __device__ __forceinline__ void for_each_large(const MatmulPart& part, u32 j, Use use) const {
        u32 i = j == 0 ? 0 : ends >> (6 * j - 6) & 63, end = ends >> 6 * j & 63;
        if (is_crowded) {
            const u32* starts = part.escape_starts + load_shared_u32(at + SliceNote::FIRST) + j;
            i = __ldg(starts);
            end = __ldg(starts + 1);
        }
#pragma unroll 1
        for (; i < end; i++) {
            const u32 entry = is_crowded ? __ldg(part.escapes + i) : load_shared_u32(at + SliceNote::ENTRIES + i * 4);
            if ((entry >> 7 & 0xFF) >= base(EscapePlace(entry).channel())) use(entry);
        }
    }

    // Takes large escapes out of operand A.
    __device__ __forceinline__ void clear_large(const MatmulPart& part, u32 j, u32 (&a)[8]) const {
        for_each_large(part, j, [&](u32 entry) {
            const EscapePlace place(entry);
            if (place.lane != lane) return;
            const u32 index = place.fragment * 2 + place.is_high, kept = ~(0xFFu << 8 * place.byte);
#pragma unroll
            for (u32 i = 0; i < 8; i++) {
                if (i == index) a[i] &= kept;
            }
        });
    }

    // Adds their products: the lanes of a channel each have two rows of every group.
    template <u32 ROWS>
    __device__ __forceinline__ void add_large(const MatmulPart& part, u32 j, u32 x_tile, float (&d)[ROWS / 2]) const {
        for_each_large(part, j, [&](u32 entry) {
            const EscapePlace place(entry);
            if (place.lane / 4 != lane / 4) return;
            const float unit = __uint_as_float((2 * FLOAT_BIAS - E4M3_BIAS - base(place.channel())) << 23) / LEAST_SQUARES;
            const float weight = __uint_as_float(entry << 16) * unit;
            const u32 from = x_tile + place.fragment * ROWS * CHUNK_COLUMNS + 4 * (place.lane % 4) + place.byte;
#pragma unroll
            for (u32 i = 0; i < ROWS / 4; i++) {
                const u32 row = i / 2 * 8 + lane % 4 * 2 + i % 2;
                const float product = weight * e4m3_to_float(load_shared_u8(from + row * CHUNK_COLUMNS));
                // Which of a thread's sums, without an index into registers.
                d[i / 2 * 4 + i % 2] += place.is_high ? 0.0f : product;
                d[i / 2 * 4 + 2 + i % 2] += place.is_high ? product : 0.0f;
            }
        });
    }
};

// The share of K and the run of tiles that a warpgroup has.
struct QViewWork {
    u32 share, worker, first_slice, num_slices, first_k_tile, num_k_tiles, first_tile, num_units, end_tile;

    __device__ __forceinline__ QViewWork(const QViewParams& p, u32 group) {
        const u32 num_shares = 1u << p.log2_shares;
        share = blockIdx.x % num_shares;
        worker = blockIdx.x / num_shares * Q_VIEW_GROUPS + group;
        const u32 num_workers = gridDim.x / num_shares * Q_VIEW_GROUPS;
        num_slices = 1u << (p.log2_slices - p.log2_shares);
        first_slice = share * num_slices;
        first_k_tile = first_slice * p.k_tiles >> p.log2_slices;
        num_k_tiles = ((first_slice + num_slices) * p.k_tiles >> p.log2_slices) - first_k_tile;
        first_tile = worker * p.num_tiles / num_workers;
        end_tile = (worker + 1) * p.num_tiles / num_workers;
        num_units = (end_tile - first_tile + UNIT_TILES - 1) / UNIT_TILES;
    }
};

struct TileOfPart {
    u32 part, tile;

    __device__ __forceinline__ TileOfPart(const QViewParams& p, u32 of_all) : part(0), tile(of_all) {
        while (of_all >= p.parts[part].end_tile) tile = of_all - p.parts[part++].end_tile;
    }
};

// A warp's ring over the slices of its tiles, in the order in which they are multiplied.
struct ViewRing {
    const QViewParams& p;
    const QViewWork& work;
    const u32 slots, slot_bytes, barriers, lane;
    const u64 policy;
    u32 tile, slice;

    __device__ __forceinline__ void ask(u32 slot) {
        if (tile >= work.end_tile) return;
        const u32 index = work.first_slice + slice;
        const u32 first = index * p.k_tiles >> p.log2_slices, len = ((index + 1) * p.k_tiles >> p.log2_slices) - first;
        const TileOfPart place(p, tile);
        const u64 tile_stride = static_cast<u64>(p.k_tiles) * STORED_TILE_BYTES + (SliceNote::BYTES << p.log2_slices);
        const u8* from = p.parts[place.part].weights + place.tile * tile_stride + first * STORED_TILE_BYTES + index * SliceNote::BYTES;
        const u32 num_bytes = SliceNote::BYTES + len * VIEW_TILE_BYTES;
        copy_begin(barriers + slot * 8, num_bytes, lane);
        copy_async(slots + slot * slot_bytes, from, num_bytes, barriers + slot * 8, policy, lane);
        if (++slice == work.num_slices) slice = 0, tile += UNIT_TILES;
    }
};

__device__ __forceinline__ void group_sync(u32 group) { asm volatile("bar.sync %0, %1;" ::"r"(group + 1), "n"(GROUP_THREADS) : "memory"); }

// Writes a unit's sums: y = sum * scale of the row.
template <u32 ROWS>
__device__ __forceinline__ void store_unit(const QViewParams& p, u32 tile, u32 lane, const float (&d)[ROWS / 2]) {
    const TileOfPart place(p, tile);
    const MatmulPart& part = p.parts[place.part];
#pragma unroll
    for (u32 i = 0; i < ROWS / 2; i++) {
        const u32 row = i / 4 * 8 + lane % 4 * 2 + i % 2, channel = place.tile * TILE_CHANNELS + lane / 4 + i % 4 / 2 * 8;
        if (row < p.num_rows && channel < part.out_features) {
            float* y = part.y + static_cast<u64>(row) * part.out_features + channel;
            const float value = d[i] * p.scales[row];
            *y = p.adds_to_output ? *y + value : value;
        }
    }
}

// Leaves a share's sums for the one that adds them, and says so.
template <u32 ROWS>
__device__ __forceinline__ void leave_sums(const QViewParams& p, const QViewWork& work, u32 unit, u32 group, const float (&d)[ROWS / 2]) {
    const u64 place = static_cast<u64>(work.worker) * p.max_units + unit;
    float4* to = p.partial_sums + ((place << p.log2_shares) + work.share) * (ROWS / 8) * GROUP_THREADS + threadIdx.x % GROUP_THREADS;
#pragma unroll
    for (u32 j = 0; j < ROWS / 8; j++) to[j * GROUP_THREADS] = {d[4 * j], d[4 * j + 1], d[4 * j + 2], d[4 * j + 3]};
    __threadfence();
    group_sync(group);
    if (threadIdx.x % GROUP_THREADS == 0) {
        asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(p.arrivals + place) : "memory");
    }
}

// Adds the sums of all shares of a unit in order, where it is this share's turn.
template <u32 ROWS>
__device__ __forceinline__ void add_shares(const QViewParams& p, const QViewWork& work, u32 unit, u32 group, u32 tile, u32 lane) {
    const u32 num_shares = 1u << p.log2_shares;
    if (unit % num_shares != work.share) return;
    const u64 place = static_cast<u64>(work.worker) * p.max_units + unit;
    if (threadIdx.x % GROUP_THREADS == 0) {
        u32 arrived;
        do {
            asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(arrived) : "l"(p.arrivals + place) : "memory");
        } while (arrived < num_shares);
        // The next launch counts from zero.
        p.arrivals[place] = 0;
    }
    group_sync(group);
    const float4* from = p.partial_sums + (place << p.log2_shares) * (ROWS / 8) * GROUP_THREADS + threadIdx.x % GROUP_THREADS;
    float d[ROWS / 2];
#pragma unroll
    for (u32 j = 0; j < ROWS / 8; j++) {
        float4 sum = __ldcg(from + j * GROUP_THREADS);
        for (u32 share = 1; share < num_shares; share++) add_to(sum, __ldcg(from + (share * (ROWS / 8) + j) * GROUP_THREADS));
        d[4 * j] = sum.x, d[4 * j + 1] = sum.y, d[4 * j + 2] = sum.z, d[4 * j + 3] = sum.w;
    }
    if (tile < work.end_tile) store_unit<ROWS>(p, tile, lane, d);
}

template <u32 ROWS>
__device__ __forceinline__ void q_view(const QViewParams& p) {
    extern __shared__ __align__(128) u8 shared_bytes[];
    // Taken from one lane, so that the compiler knows that a warp agrees on it.
    const u32 warp = __shfl_sync(ALL_LANES, threadIdx.x / WARP_LANES, 0), lane = threadIdx.x % WARP_LANES;
    const u32 group = warp / UNIT_TILES;
    const QViewWork work(p, group);
    constexpr u32 X_TILE_BYTES = TILE_COLUMNS * ROWS;
    const u32 slot_bytes = SliceNote::BYTES + p.slice_tiles * VIEW_TILE_BYTES;
    const u32 x = shared_address(shared_bytes), rings = x + p.share_tiles * X_TILE_BYTES;
    const u32 barriers = rings + Q_VIEW_GROUPS * UNIT_TILES * p.ring_slots * slot_bytes;
    const u32 x_full = barriers + Q_VIEW_GROUPS * UNIT_TILES * p.ring_slots * 8;
    ViewRing ring{p, work, rings + warp * p.ring_slots * slot_bytes, slot_bytes, barriers + warp * p.ring_slots * 8, lane,
                  read_once_policy(), work.first_tile + warp % UNIT_TILES, 0};
    if (lane < p.ring_slots) barrier_init(ring.barriers + lane * 8, COPY_ARRIVALS);
    if (threadIdx.x == 0) barrier_init(x_full, 1);
    barrier_init_fence();
    __syncthreads();
    for (u32 slot = 0; slot < p.ring_slots; slot++) ring.ask(slot);
    launch_dependents();
    wait_for_predecessors();
    if (threadIdx.x == 0) {
        const u32 num_bytes = work.num_k_tiles * X_TILE_BYTES;
        barrier_expect(x_full, num_bytes);
        copy_shared_data(x, p.x + static_cast<u64>(work.first_k_tile) * X_TILE_BYTES, num_bytes, x_full);
    }
    barrier_wait(x_full, 0);

    u32 slot = 0, parity = 0;
    for (u32 unit = 0; unit < work.num_units; unit++) {
        const u32 tile = work.first_tile + unit * UNIT_TILES + warp % UNIT_TILES;
        const bool has_tile = tile < work.end_tile;
        const MatmulPart& part = p.parts[has_tile ? TileOfPart(p, tile).part : 0];
        float sums[ROWS / 2] = {}, factors[2] = {};
        u32 x_tile = x;
        for (u32 s = 0; s < work.num_slices; s++) {
            const u32 index = work.first_slice + s;
            const u32 len = ((index + 1) * p.k_tiles >> p.log2_slices) - (index * p.k_tiles >> p.log2_slices);
            const u32 at = ring.slots + slot * slot_bytes;
            // A warp without a tile keeps the others of its warpgroup company.
            if (has_tile) barrier_wait(ring.barriers + slot * 8, parity);
            __syncwarp();
            const ViewSlice slice(p, at, lane);
            const bool has_escapes = has_tile && slice.ends != 0;
            // The matrix unit adds with some 14 bits: a slice at a time, and slices in fp32.
            float d[ROWS / 2] = {};
#pragma unroll 1
            for (u32 j = 0; j < len; j += 2) {
                // Two super-tiles before the matrix unit starts, as nothing may touch its registers meanwhile. Where there is no
                // second, zeros times the activations of the first.
                const bool has_second = j + 1 < len;
                u32 a[2][8] = {};
                if (has_tile) slice.decode(j, a[0]);
                if (has_tile && has_second) slice.decode(j + 1, a[1]);
                if (has_escapes) slice.clear_large(part, j, a[0]);
                if (has_escapes && has_second) slice.clear_large(part, j + 1, a[1]);
                const u32 first = x_tile + j * X_TILE_BYTES, second = has_second ? first + X_TILE_BYTES : first;
                constexpr u32 HALF = 2 * ROWS * CHUNK_COLUMNS, ALONG_K = ROWS * CHUNK_COLUMNS, ACROSS = 128;
                wgmma_begin();
                wgmma_e4m3<ROWS>(d, a[0][0], a[0][1], a[0][2], a[0][3], matrix_descriptor(first, ALONG_K, ACROSS));
                wgmma_e4m3<ROWS>(d, a[0][4], a[0][5], a[0][6], a[0][7], matrix_descriptor(first + HALF, ALONG_K, ACROSS));
                wgmma_e4m3<ROWS>(d, a[1][0], a[1][1], a[1][2], a[1][3], matrix_descriptor(second, ALONG_K, ACROSS));
                wgmma_e4m3<ROWS>(d, a[1][4], a[1][5], a[1][6], a[1][7], matrix_descriptor(second + HALF, ALONG_K, ACROSS));
                wgmma_commit();
                wgmma_wait<0>();
            }
            if (has_escapes) {
#pragma unroll 1
                for (u32 j = 0; j < len; j++) slice.add_large<ROWS>(part, j, x_tile + j * X_TILE_BYTES, d);
            }
            if (has_tile) {
#pragma unroll
                for (u32 i = 0; i < 2; i++) {
                    factors[i] = __uint_as_float((slice.base(lane / 4 + 8 * i) + E4M3_BIAS) << 23) * LEAST_SQUARES;
                }
                __syncwarp();
                ring.ask(slot);
                if (++slot == p.ring_slots) slot = 0, parity ^= 1;
            }
            x_tile += len * X_TILE_BYTES;
#pragma unroll
            for (u32 i = 0; i < ROWS / 2; i++) sums[i] += d[i];
        }
#pragma unroll
        for (u32 i = 0; i < ROWS / 2; i++) sums[i] *= factors[i % 4 / 2];
        if (p.log2_shares == 0) {
            if (has_tile) store_unit<ROWS>(p, tile, lane, sums);
            continue;
        }
        leave_sums<ROWS>(p, work, unit, group, sums);
        if (unit > 0) add_shares<ROWS>(p, work, unit - 1, group, tile - UNIT_TILES, lane);
    }
    if (p.log2_shares > 0 && work.num_units > 0) {
        const u32 last = work.num_units - 1;
        add_shares<ROWS>(p, work, last, group, work.first_tile + last * UNIT_TILES + warp % UNIT_TILES, lane);
    }
}
