// The factors of entries in gdn_wy: products of keys times decays, for the sums of one value head.
#pragma once

#include "gdn_block.cuh"

template <u32 TILES>
struct Factors {
    static constexpr u32 WARPS = Block<TILES>::WARPS, OWN = Block<TILES>::NODES / WARPS;  // nodes of a warp

    const Block<TILES>& block;

    // Decays from the positions of the three stretches to the warp's nodes, as many apart as there are warps. The first node is
    // the last warp's, which has no products of keys to make of few rows. Lanes are positions of a stretch; sums of log decays
    // run from the node backwards, stretch by stretch.
    struct Decays {
        float values[OWN][3];
        float from_state[OWN];
    };

    __device__ u32 first_node() const { return WARPS - 1 - block.warp(); }
    __device__ bool has_nodes() const { return first_node() < block.count; }
    __device__ u32 weighed_row(u32 i) const { return block.row_of(first_node() + i * WARPS); }

    // Where a position of the stretches is found: its entry, counted from the segment's anchor, which may lie before 0.
    __device__ int first_entry(u32 row, u32 stretch) const {
        return static_cast<int>((block.position_of(row) / STRETCH + stretch) * STRETCH) - static_cast<int>(2 * STRETCH + block.anchor_base);
    }

    // `is_first` says that all nodes stand in the stretch in which the segment begins.
    __device__ __forceinline__ Decays make_decays(u32 of_plane, bool is_first) const {
        return OWN > 1 && is_first ? sum_decays<true>(of_plane) : sum_decays<false>(of_plane);
    }

    // `SHARES` where all nodes have the same two whole stretches.
    template <bool SHARES>
    __device__ __forceinline__ Decays sum_decays(u32 of_plane) const {
        const auto is_copy = [](u32 i, u32 stretch) { return SHARES && i > 0 && stretch < 2; };
        const Rows& rows = block.rows;
        const u32 lane = block.lane();
        Decays decays;
        float sums[OWN][3];
#pragma unroll
        for (u32 i = 0; i < OWN; i++) {
            const u32 row = weighed_row(i), depth = rows.depth[row];
#pragma unroll
            for (u32 stretch = 0; stretch < 3; stretch++) {
                if (is_copy(i, stretch)) continue;
                const int entry = first_entry(row, stretch) + static_cast<int>(lane), behind_log = entry - static_cast<int>(block.log_len);
                const bool is_logged = behind_log < 0, is_there = entry >= 0 && behind_log <= static_cast<int>(depth);
                const float logged = rows.log_decay[of_plane][is_logged && entry > 0 ? entry : 0];
                const float of_path = rows.decay[of_plane][rows.ancestors[is_logged || !is_there ? 0 : behind_log][row]];
                sums[i][stretch] = is_there ? (is_logged ? logged : of_path) : 0.0f;
            }
        }
        // From each position to the end of its stretch.
#pragma unroll
        for (u32 distance = 1; distance < WARP_LANES; distance *= 2) {
            const bool adds = lane + distance < WARP_LANES;
#pragma unroll
            for (u32 i = 0; i < OWN; i++) {
#pragma unroll
                for (u32 stretch = 0; stretch < 3; stretch++) {
                    if (is_copy(i, stretch)) continue;
                    const float later = __shfl_down_sync(0xFFFFFFFF, sums[i][stretch], distance);
                    sums[i][stretch] += adds ? later : 0.0f;
                }
            }
        }
#pragma unroll
        for (u32 i = 0; i < OWN; i++) {
            float behind = 0.0f;  // of later stretches
#pragma unroll
            for (u32 stretch = 3; stretch-- > 0;) {
                const float sum = sums[is_copy(i, stretch) ? 0 : i][stretch];
                const float later = __shfl_down_sync(0xFFFFFFFF, sum, 1), whole = __shfl_sync(0xFFFFFFFF, sum, 0);
                decays.values[i][stretch] = expf((lane + 1 < WARP_LANES ? later : 0.0f) + behind);
                behind += whole;
            }
            decays.from_state[i] = expf(behind);
        }
        return decays;
    }

    // Products times decays, where the sums look for them.
    __device__ __forceinline__ void weigh_products(u32 of_plane, const Decays& decays) const {
        const u32 lane = block.lane();
#pragma unroll
        for (u32 i = 0; i < OWN; i++) {
            const u32 node = first_node() + i * WARPS, row = weighed_row(i);
            if (node >= block.count) break;
            float* weighed = block.weighed(of_plane) + node / TILE_NODES * 2 * STRETCH_STEPS * FRAGMENT_LEN;
#pragma unroll
            for (u32 stretch = 0; stretch < 3; stretch++) {
                const int entry = first_entry(row, stretch) + static_cast<int>(lane), behind_log = entry - static_cast<int>(block.log_len);
                if (entry < 0 || behind_log >= static_cast<int>(block.rows.depth[row])) continue;
                const float2 product = block.products(behind_log < 0 ? entry : MAX_LOG_ENTRIES + behind_log)[node];
                const float2 factor = {decays.values[i][stretch] * product.x, decays.values[i][stretch] * product.y};
                if (stretch == 2) {
                    block.own(of_plane)[lane * block.NODE_STRIDE + node] = factor;
                } else {
                    float* to = weighed + (stretch * STRETCH_STEPS + lane / 16) * FRAGMENT_LEN + lane % 4 / 2 * HALF_FRAGMENT;
                    *reinterpret_cast<float2*>(to + (node % TILE_NODES * 4 + lane % 16 / 4) * 4 + lane % 2 * 2) = factor;
                }
            }
            if (lane == 0) block.rows.from_state[of_plane][row] = decays.from_state[i];
        }
    }
};
