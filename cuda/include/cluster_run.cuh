// What a launch of wgmma_matmul.cuh takes, and what each of its clusters does.
//
// Clusters take equal runs of slices of the units in line. An octet that a cut goes through is begun by the cluster before
// the cut, as the first thing in its run, and finished by the one after it, as the last: nobody waits in practice. A run is an
// octet at least, so no octet is cut twice. Octets of a unit that several clusters share meet in global memory. With many
// units, clusters take whole ones in turn instead, so that those that run at a time share weights in the L2 cache.
#pragma once

#include "slice_sums.cuh"

constexpr u32 CLUSTER_BLOCKS = 2;  // as the launcher has them

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

    // Which channels and which rows a unit multiplies.
    __device__ __forceinline__ u32 channels_of(u32 unit) const { return row_tiles == 1 ? unit : unit / row_tiles; }
    __device__ __forceinline__ u32 rows_of(u32 unit) const { return row_tiles == 1 ? 0 : unit % row_tiles; }
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
    u32 log2_octets, cluster, num_clusters;
    bool is_strided;

    __device__ __forceinline__ ClusterRun(const WgmmaParams& p) {
        static_assert(SLICES == 8, "slices of an octet");
        log2_octets = p.matmul.log2_slices - 3;
        cluster = blockIdx.x / CLUSTER_BLOCKS, num_clusters = gridDim.x / CLUSTER_BLOCKS;
        is_strided = p.is_strided;
        if (is_strided) {
            first_octet = 0, head = 0, tail = 0;
            num_octets = (p.num_units - cluster + num_clusters - 1) / num_clusters << log2_octets;
            num_parts = num_octets;
            return;
        }
        const Run run(p.matmul, cluster);
        const u32 start = run.start, end = run.start + run.len;
        first_octet = (start + SLICES - 1) / SLICES;
        num_octets = end / SLICES - first_octet;
        head = start % SLICES, tail = end % SLICES;
        num_parts = num_octets + (head > 0) + (tail > 0);
    }

    __device__ __forceinline__ OctetPart part(u32 index) const {
        u32 at = first_octet + index - (tail > 0), first = 0, end = SLICES;
        if (tail > 0 && index == 0) at = first_octet + num_octets, end = tail;
        else if (head > 0 && index + 1 == num_parts) at = first_octet - 1, first = head;
        const u32 unit = at >> log2_octets;
        return {is_strided ? cluster + unit * num_clusters : unit, at & (1u << log2_octets) - 1, first, end};
    }

    // Whether all octets of a unit are whole ones of this cluster. Of the others a run has two at most, at its ends.
    __device__ __forceinline__ bool is_alone(u32 unit) const {
        return is_strided || (unit << log2_octets >= first_octet && unit + 1 << log2_octets <= first_octet + num_octets);
    }

    // Where octets of a unit that clusters share meet: with more units than clusters, at that in whose run it begins. Of those
    // that begin there, only one is shared.
    __device__ __forceinline__ u32 meeting_place(const WgmmaParams& p, u32 unit) const {
        if (p.num_units <= num_clusters) return unit;
        const u32 first = unit * SLICES << log2_octets, len = p.matmul.run_len, in_longer = p.matmul.longer_runs * (len + 1);
        return first < in_longer ? first / (len + 1) : p.matmul.longer_runs + (first - in_longer) / len;
    }
};
