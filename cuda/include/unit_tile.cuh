// Sums of a warp's tile of a unit on their way: to the next cluster, to where a unit's octets meet, to the result.
#pragma once

#include "cluster_run.cuh"
#include "signals.cuh"

// A warp's part of a unit.
template <u32 ROWS, u32 TILES>
struct UnitTile {
    static constexpr u32 FRAGMENTS = ROWS / 8, FLOATS4 = FRAGMENTS * WARP_LANES;  // a fragment: sums of a tile and eight rows
    // Floats that are loaded before the first of them is used, and octets' worth of those.
    static constexpr u32 AT_ONCE = ROWS < 64 ? ROWS / 2 : 32, OCTETS_AT_ONCE = 64 / AT_ONCE;
    // Whether registers hold the sum of the octets so far of a unit that is a cluster's alone; else memory does.
    static constexpr bool KEEPS_TOTALS = ROWS <= 32;
    typedef float Totals[KEEPS_TOTALS ? ROWS / 2 : 1];
    const WgmmaParams& p;
    const ClusterRun& run;
    const u32 warp, lane;
    u32 unit, tile, first_row;

    __device__ __forceinline__ UnitTile(const WgmmaParams& params, const ClusterRun& cluster_run, u32 unit_index, u32 warp_index,
                                        u32 lane_index)
        : p(params), run(cluster_run), warp(warp_index), lane(lane_index), unit(unit_index) {
        tile = (p.channels_of(unit) * CLUSTER_BLOCKS + blockIdx.x % CLUSTER_BLOCKS) * TILES + warp;
        first_row = p.rows_of(unit) * ROWS;
    }

    __device__ __forceinline__ u32 place(u32 block) const { return block * TILES + warp; }

    // Where the first of a lane's sums goes: a row of `stride` channels, of which the lane has two, eight apart.
    struct Place {
        float* y;
        u32 stride, rows_left;
        bool is_there[2];

        __device__ __forceinline__ bool is_wanted(u32 i) const { return row(i) < rows_left && is_there[i % 4 / 2]; }
        __device__ __forceinline__ float* of(u32 i) const { return y + row(i) * stride + i % 4 / 2 * 8; }
        __device__ __forceinline__ static u32 row(u32 i) { return i / 4 * 8 + i % 2; }
    };

    __device__ __forceinline__ Place output() const {
        const PartTile at(p.matmul, min(tile, p.matmul.num_tiles - 1));
        const MatmulPart& part = p.matmul.parts[at.part];
        const u32 channel = at.tile * TILE_CHANNELS + lane / 4, row = first_row + lane % 4 * 2;
        const bool is_tile = tile < p.matmul.num_tiles;
        return {part.y + static_cast<u64>(row) * part.out_features + channel, part.out_features,
                p.matmul.num_rows - min(p.matmul.num_rows, row),
                {is_tile && channel < part.out_features, is_tile && channel + 8 < part.out_features}};
    }

    // What is there to be added to, of sums from `first` on.
    __device__ __forceinline__ void load_output(const Place& to, u32 first, float (&before)[AT_ONCE]) const {
#pragma unroll
        for (u32 i = 0; i < AT_ONCE; i++) before[i] = to.is_wanted(first + i) ? __ldcg(to.of(first + i)) : 0.0f;
    }

    // Stores a unit's sums, or adds them to what is there, which is read before any of it is stored: one round trip.
    __device__ __forceinline__ void store_unit(float (&sums)[ROWS / 2]) const {
        const Place to = output();
#pragma unroll
        for (u32 first = 0; first < ROWS / 2; first += AT_ONCE) {
            if (p.matmul.adds_to_output) {
                float before[AT_ONCE];
                load_output(to, first, before);
#pragma unroll
                for (u32 i = 0; i < AT_ONCE; i++) sums[first + i] = before[i] + sums[first + i];
            }
#pragma unroll
            for (u32 i = 0; i < AT_ONCE; i++) {
                if (to.is_wanted(first + i)) *to.of(first + i) = sums[first + i];
            }
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

    __device__ __forceinline__ void leave(float4* to, const float (&sums)[ROWS / 2]) const {
#pragma unroll
        for (u32 i = 0; i < FRAGMENTS; i++) {
            __stcg(to + i * WARP_LANES, make_float4(sums[4 * i], sums[4 * i + 1], sums[4 * i + 2], sums[4 * i + 3]));
        }
    }

    // Leaves the first slices of an octet for the next cluster, which signal_cut tells.
    __device__ __forceinline__ void leave_cut(const float (&sums)[ROWS / 2]) const {
        leave(p.cut_sums + static_cast<u64>(place(blockIdx.x)) * FLOATS4 + lane, sums);
    }

    // Called by one thread, behind leave_cut of all lanes.
    __device__ __forceinline__ void signal_cut() const { signal_raise(p.cut_flags + place(blockIdx.x)); }

    // Takes them from the cluster before.
    __device__ __forceinline__ void take_cut(float (&sums)[ROWS / 2]) const {
        const u32 from = place(blockIdx.x - CLUSTER_BLOCKS);
        if (lane == 0) signal_take(p.cut_flags + from);
        __syncwarp();
        const float4* left = p.cut_sums + static_cast<u64>(from) * FLOATS4 + lane;
#pragma unroll
        for (u32 i = 0; i < FRAGMENTS; i++) {
            const float4 value = __ldcg(left + i * WARP_LANES);
            sums[4 * i] = value.x, sums[4 * i + 1] = value.y, sums[4 * i + 2] = value.z, sums[4 * i + 3] = value.w;
        }
    }

    // Adds an octet of a unit that is this cluster's alone to those before, `kept` or in memory.
    __device__ __forceinline__ void add_octet(u32 octet, float (&sums)[ROWS / 2], Totals& kept) const {
        if constexpr (KEEPS_TOTALS) {
#pragma unroll
            for (u32 i = 0; i < ROWS / 2; i++) kept[i] = octet > 0 ? kept[i] + sums[i] : sums[i];
            if (octet + 1 == p.matmul.num_octets) store_unit(kept);
            return;
        }
        float4* totals = p.totals + static_cast<u64>(place(blockIdx.x)) * FLOATS4 + lane;
        if (octet > 0) add_after(totals, sums);
        if (octet + 1 < p.matmul.num_octets) leave(totals, sums);
        else store_unit(sums);
    }

    // Where octets of a unit that clusters share meet.
    __device__ __forceinline__ u32 meeting_place() const {
        return place(run.meeting_place(p, unit) * CLUSTER_BLOCKS + blockIdx.x % CLUSTER_BLOCKS);
    }

    __device__ __forceinline__ float4* meeting_octets() const {
        return p.matmul.octet_sums + static_cast<u64>(meeting_place()) * p.matmul.num_octets * FLOATS4 + lane;
    }

    // Brings an octet there; signal_octet says so.
    __device__ __forceinline__ void leave_octet(u32 octet, const float (&sums)[ROWS / 2]) const {
        leave(meeting_octets() + octet * FLOATS4, sums);
    }

    // Whether all octets of the unit are there now: then whoever was last adds them up. Called by one thread, behind
    // leave_octet of all lanes.
    __device__ __forceinline__ bool signal_octet() const {
        u32* count = p.octet_counts + meeting_place();
        if (signal_add(count, 1) + 1 < p.matmul.num_octets) return false;
        *count = 0;
        return true;
    }

    // Adds up the octets of a unit that have all come, in their order. Several are on their way at a time, and what the output
    // has: each would else wait for a round trip to the L2 cache.
    __device__ __forceinline__ void add_brought() const {
        const Place to = output();
        const float4* octets = meeting_octets();
        const u32 num_octets = p.matmul.num_octets;
#pragma unroll
        for (u32 first = 0; first < ROWS / 2; first += AT_ONCE) {
            float before[AT_ONCE], sums[AT_ONCE];
            if (p.matmul.adds_to_output) load_output(to, first, before);
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
                    for (u32 i = 0; i < AT_ONCE; i++) sums[i] = start + o == 0 ? values[o][i] : sums[i] + values[o][i];
                }
            }
#pragma unroll
            for (u32 i = 0; i < AT_ONCE; i++) {
                if (!to.is_wanted(first + i)) continue;
                *to.of(first + i) = p.matmul.adds_to_output ? before[i] + sums[i] : sums[i];
            }
        }
    }
};
