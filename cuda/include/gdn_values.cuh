// The recurrence of gdn_wy: from products with the state and factors of entries to d, o and y.
//
// Whole stretches come by matrix instructions, entries of the own one in the order of positions, a fused multiply-add each.
#pragma once

#include "gdn_lanes.cuh"

__device__ __forceinline__ float norm_scale(const GdnWyParams& p, float squares) {
    return rsqrtf(__fdividef(squares, static_cast<float>(p.value_dim)) + p.norm_eps);
}

__device__ __forceinline__ void store_output(const RowsOutput& y, u32 row, u32 column, float2 o, float scale, float2 weight, float2 gate) {
    y.store_pair(row, column, {o.x * scale * weight.x * gate.x, o.y * scale * weight.y * gate.y});
    if (column + 2 == y.width) y.pad(row, 0, 1);
}

template <u32 TILES, u32 USED>
struct Values : Lanes<TILES, USED> {
    typedef Lanes<TILES, USED> Base;
    typedef typename Base::Places Places;
    using Base::block, Base::p, Base::NO_DEPTH;
    using Base::column, Base::first_lane, Base::own_lane, Base::plane, Base::works;
    using Base::gates, Base::out, Base::seen, Base::values;
    using Base::group, Base::node_of, Base::own_value, Base::place_of, Base::row_of, Base::stores;

    float2 norm_weight;

    __device__ __forceinline__ explicit Values(Block<TILES>& b) : Base(b) {}

    // Starts to load what makes y of o.
    __device__ __forceinline__ void load_gates() {
        norm_weight = *reinterpret_cast<const float2*>(p.norm_weight + column);
#pragma unroll
        for (u32 tile = 0; tile < USED; tile++) gates[tile] = *reinterpret_cast<const float2*>(p.z + place_of(tile));
    }

    __device__ __forceinline__ static void add_entry(float2& seen, float2& out, float2 factor, float2 d) {
        seen.x = __fmaf_rn(factor.x, d.x, seen.x), seen.y = __fmaf_rn(factor.x, d.y, seen.y);
        out.x = __fmaf_rn(factor.y, d.x, out.x), out.y = __fmaf_rn(factor.y, d.y, out.y);
    }

    // From the products with the state to d (over v) and o.
    __device__ __forceinline__ void add_entries(const Places& at) {
        if (!works) return;
        if (at.last_stretch == 0) {
            add_all<true>(at);
        } else {
            add_all<false>(at);
        }
    }

    // `IS_FIRST` promises that all nodes stand in the stretch in which the segment begins.
    template <bool IS_FIRST>
    __device__ __forceinline__ void add_all(const Places& at) {
        SplitSums whole[USED];  // over stretches before the own
#pragma unroll
        for (u32 tile = 0; tile < USED; tile++) whole[tile] = {};
        add_committed<IS_FIRST>(at, whole);
        float* updates = block.memory + p.shared.updates + own_lane;
        if (IS_FIRST) {
            enter_stretch<true>(at, 0, whole);
            add_logged<true>(at);
            add_paths(at, 0, at.last_depth + 1, updates);
        } else {
#pragma unroll 1
            for (u32 stretch = 0; stretch <= at.last_stretch; stretch++) {
                if (stretch > 0) add_stretch(at, stretch, whole);
                enter_stretch<false>(at, stretch, whole);
                const u32 begin = block.stretch_depth(stretch), end = min(block.stretch_depth(stretch + 1), at.last_depth + 1);
                if (stretch == 0) add_logged<false>(at);
                add_paths(at, begin, end, updates);
            }
        }
#pragma unroll
        for (u32 tile = 0; tile < USED; tile++) {
            const float own = block.products(block.own_entry())[node_of(tile)].y;
            out[tile] = {__fmaf_rn(own, values[tile].x, out[tile].x), __fmaf_rn(own, values[tile].y, out[tile].y)};
            if (stores(tile)) *reinterpret_cast<float2*>(p.tail_d + place_of(tile)) = values[tile];
        }
    }

    // Adds sixteen positions of the two stretches before the own to all nodes.
    __device__ __forceinline__ void add_step(u32 step, const SplitColumn& by, SplitSums (&sums)[USED]) const {
        const float* factors = block.weighed(plane) + step * FRAGMENT_LEN + block.lane() * 4;
#pragma unroll
        for (u32 tile = 0; tile < USED; tile++) multiply_split(sums[tile], split_pair(factors + tile * 2 * STRETCH_STEPS * FRAGMENT_LEN), by);
    }

    // Adds one whole stretch, the first (0) or second (1) before the own, to the nodes that `reads` says.
    template <typename Column, typename Reads>
    __device__ __forceinline__ void add_whole(u32 which, SplitSums (&whole)[USED], Column column_of_step, Reads reads) const {
        SplitSums sums[USED];
#pragma unroll
        for (u32 tile = 0; tile < USED; tile++) sums[tile] = whole[tile];
#pragma unroll 1
        for (u32 step = 0; step < STRETCH_STEPS; step++) add_step(which * STRETCH_STEPS + step, column_of_step(step), sums);
#pragma unroll
        for (u32 tile = 0; tile < USED; tile++) {
            if (reads(tile)) whole[tile] = sums[tile];
        }
    }

    // Whole stretches of logged entries.
    template <bool IS_FIRST>
    __device__ __forceinline__ void add_committed(const Places& at, SplitSums (&whole)[USED]) const {
        const float* log_d = block.memory + p.shared.log_d + staged_lane(block.lane() % 4 * 4, block.warp() * WARP_VALUES + group());
        const u32 own = block.committed_len / STRETCH;
        const auto column = [](const float* rows) { return split_column({rows[0], rows[MAX_LANES], rows[2 * MAX_LANES], rows[3 * MAX_LANES]}); };
        if (IS_FIRST) {
            const float* from = log_d + (own * STRETCH - block.anchor_base) * MAX_LANES;
#pragma unroll(USED == 1 ? 2 : 1)
            for (u32 back = min(own, 2u) * STRETCH_STEPS; back > 0; back--) {
                add_step(2 * STRETCH_STEPS - back, column(from - back * 16 * MAX_LANES), whole);
            }
            return;
        }
#pragma unroll 1
        for (u32 stretch = 0; stretch <= min(at.last_stretch, 1u); stretch++) {
#pragma unroll 1
            for (u32 which = own + stretch < 2 ? 2 - own - stretch : 0; which + stretch < 2; which++) {
                const float* from = log_d + ((own + stretch + which - 2) * STRETCH - block.anchor_base) * MAX_LANES;
                add_whole(which, whole, [&](u32 step) { return column(from + step * 16 * MAX_LANES); },
                          [&](u32 tile) { return at.stretch[tile] == stretch; });
            }
        }
    }

    // Whole stretches that end before `stretch` begins and are not all committed: each node's has its own ancestors, and
    // nodes that share the last of them share all.
    __device__ __forceinline__ void add_stretch(const Places& at, u32 stretch, SplitSums (&whole)[USED]) const {
        const u32 last_level = block.stretch_depth(stretch) - 1, c = block.lane() % 4;
        const u32 lane = block.warp() * WARP_VALUES + group();
#pragma unroll 1
        for (u32 which = 2; which-- > 0;) {
            // Nodes of `stretch` read it as the second, those of the next as the first.
            const u32 readers = stretch + 1 - which;
            u32 last[USED];  // of the ancestors
#pragma unroll
            for (u32 tile = 0; tile < USED; tile++) {
                const bool reads = at.depth[tile] != NO_DEPTH && at.stretch[tile] == readers;
                last[tile] = reads ? block.rows.ancestors[last_level][at.row[tile]] : ~0u;
            }
            while (true) {
                u32 next = ~0u;
#pragma unroll
                for (u32 tile = 0; tile < USED; tile++) next = min(next, last[tile]);
                next = __reduce_min_sync(0xFFFFFFFF, next);
                if (next == ~0u) break;
                const auto d_of = [&](u32 step, u32 i) {
                    // How far the position lies behind the log.
                    const int level = static_cast<int>(last_level + 1 + step * 16 + c * 4 + i) - static_cast<int>(STRETCH);
                    const u32 logged = p.shared.log_d + staged_lane(block.log_len + level, lane);
                    const u32 of_path = p.shared.updates + block.rows.ancestors[level < 0 ? 0 : level][next] * UPDATE_ROW + lane;
                    return block.memory[level < 0 ? logged : of_path];
                };
                add_whole(which, whole, [&](u32 step) { return split_column({d_of(step, 0), d_of(step, 1), d_of(step, 2), d_of(step, 3)}); },
                          [&](u32 tile) { return last[tile] == next; });
#pragma unroll
                for (u32 tile = 0; tile < USED; tile++) last[tile] = last[tile] == next ? ~0u : last[tile];
            }
        }
    }

    // State and whole stretches together, for the nodes whose own stretch begins.
    template <bool IS_FIRST>
    __device__ __forceinline__ void enter_stretch(const Places& at, u32 stretch, const SplitSums (&whole)[USED]) {
#pragma unroll
        for (u32 tile = 0; tile < USED; tile++) {
            if (!IS_FIRST && at.stretch[tile] != stretch) continue;
            const float scale = block.rows.from_state[plane][at.row[tile]];
            seen[tile] = {__fmaf_rn(scale, seen[tile].x, whole[tile].value(0)), __fmaf_rn(scale, seen[tile].y, whole[tile].value(1))};
            out[tile] = {__fmaf_rn(scale, out[tile].x, whole[tile].value(2)), __fmaf_rn(scale, out[tile].y, whole[tile].value(3))};
        }
    }

    // Logged entries of the stretch in which the segment begins.
    template <bool IS_FIRST>
    __device__ __forceinline__ void add_logged(const Places& at) {
        const u32 count = block.committed_len % STRETCH;
        const float* log_d = block.memory + p.shared.log_d + (block.log_len - count) * MAX_LANES;
        const float2* factors = block.own(plane) + group();
        const auto add = [&](const float* from, const float2* by) {
            const float2 d = *reinterpret_cast<const float2*>(from);
#pragma unroll
            for (u32 tile = 0; tile < USED; tile++) {
                const float2 factor = by[tile * TILE_NODES];
                if (IS_FIRST || at.stretch[tile] == 0) add_entry(seen[tile], out[tile], factor, d);
            }
        };
        u32 entry = 0;
#pragma unroll 1
        for (; entry + 4 <= count; entry += 4, factors += 4 * block.NODE_STRIDE) {
            const float* from = log_d + staged_lane(entry, own_lane);  // of four rows in the same order
#pragma unroll(USED == 4 ? 2 : 4)
            for (u32 i = 0; i < 4; i++) add(from + i * MAX_LANES, factors + i * block.NODE_STRIDE);
        }
#pragma unroll 1
        for (; entry < count; entry++, factors += block.NODE_STRIDE) add(log_d + staged_lane(entry, own_lane), factors);
    }

    // Entries of the nodes' own paths, level by level, within one stretch.
    __device__ __forceinline__ void add_paths(const Places& at, u32 begin, u32 end, float* updates) {
        float beta[USED];
#pragma unroll
        for (u32 tile = 0; tile < USED; tile++) beta[tile] = block.rows.beta[plane][at.row[tile]];
        u32 level = add_levels<0>(at, begin, begin, end, beta, updates);
        if (USED > 1) level = add_levels<1>(at, begin, level, end, beta, updates);
        if (USED > 2) level = add_levels<2>(at, begin, level, end, beta, updates);
        if (USED > 2) level = add_levels<3>(at, begin, level, end, beta, updates);
    }

    // Those levels from `level` on that a tile up to `FIRST` has, for it and those behind it: rows come in topological order,
    // so the first tiles are mostly done first. Returns the next level.
    template <u32 FIRST>
    __device__ __forceinline__ u32 add_levels(const Places& at, u32 begin, u32 level, u32 end, const float (&beta)[USED], float* updates) {
        u32 stop = end;
        if (FIRST + 1 < USED) {
            const u32 depth = at.depth[FIRST < USED ? FIRST : 0];
            stop = min(end, __reduce_max_sync(0xFFFFFFFF, depth == NO_DEPTH ? 0 : depth) + 1);
        }
        const float2* factors = block.own(plane) + (block.committed_len + begin) % STRETCH * block.NODE_STRIDE + group();
        float2 factor[USED];
        u32 source[USED];
        const auto load = [&](u32 of_level) {
#pragma unroll
            for (u32 tile = FIRST; tile < USED; tile++) {
                source[tile] = block.rows.ancestors[of_level][at.row[tile]];
                factor[tile] = factors[(of_level - begin) * block.NODE_STRIDE + tile * TILE_NODES];
            }
        };
        if (level < stop) load(level);
#pragma unroll 1
        while (level < stop) {
#pragma unroll
            for (u32 tile = FIRST; tile < USED; tile++) {
                // d of the nodes that have all their entries.
                if (at.depth[tile] != level) continue;
                const float2 d = {__fmul_rn(beta[tile], __fsub_rn(values[tile].x, seen[tile].x)), __fmul_rn(beta[tile], __fsub_rn(values[tile].y, seen[tile].y))};
                values[tile] = d;
                *reinterpret_cast<float2*>(updates + at.row[tile] * UPDATE_ROW) = d;
            }
            __syncwarp();
            float2 d[USED], by[USED];
#pragma unroll
            for (u32 tile = FIRST; tile < USED; tile++) {
                d[tile] = *reinterpret_cast<const float2*>(updates + source[tile] * UPDATE_ROW);
                by[tile] = factor[tile];
            }
            const u32 done = level++;
            load(min(level, stop - 1));
#pragma unroll
            for (u32 tile = FIRST; tile < USED; tile++) {
                if (at.depth[tile] > done && at.depth[tile] < end) add_entry(seen[tile], out[tile], by[tile], d[tile]);
            }
        }
        return level;
    }

    // Squares of o over the warp's lanes.
    __device__ __forceinline__ float square_sum(u32 tile) const {
        float squares = __fmaf_rn(out[tile].y, out[tile].y, out[tile].x * out[tile].x);
        squares += __shfl_xor_sync(0xFFFFFFFF, squares, 1);
        squares += __shfl_xor_sync(0xFFFFFFFF, squares, 2);
        return squares;
    }

    __device__ u32 squares_row() const { return p.num_slices * p.lanes / WARP_VALUES + 1; }
    __device__ u32 own_group() const { return (first_lane + own_lane) / WARP_VALUES; }

    __device__ __forceinline__ void finish_gates() {
#pragma unroll
        for (u32 tile = 0; tile < USED; tile++) gates[tile] = {silu(gates[tile].x), silu(gates[tile].y)};
    }

    // Gives the squares of the own lanes to all blocks of the key head: each thread of a node to every fourth.
    __device__ __forceinline__ void share_squares() const {
        if (!works) return;
        const u32 base = shared_address(block.memory + p.shared.squares + group() * squares_row() + own_group());
        const u32 barrier = block.barrier_of(Exchange::SQUARES);
        float squares[USED];
#pragma unroll
        for (u32 tile = 0; tile < USED; tile++) squares[tile] = square_sum(tile);
#pragma unroll
        for (u32 i = 0; i < 2; i++) {
            const u32 rank = block.lane() % 4 + i * 4, to = min(rank, p.num_slices - 1);
            const u32 there = address_in_block(base, to), barrier_there = address_in_block(barrier, to);
#pragma unroll
            for (u32 tile = 0; tile < USED; tile++) {
                const bool is_wanted = rank < p.num_slices && node_of(tile) < block.count;
                store_in_block(there + tile * TILE_NODES * squares_row() * sizeof(float), squares[tile], barrier_there, is_wanted);
            }
        }
    }

    // y from o and the squares of all lanes of its head: every fourth warp's by each thread of a node, then theirs.
    __device__ __forceinline__ void store_outputs() const {
        const u32 num_squares = p.value_dim / WARP_VALUES, first = own_group() - column / WARP_VALUES;
        const float* squares = block.memory + p.shared.squares + group() * squares_row() + first;
        float sums[USED] = {};
#pragma unroll 4
        for (u32 i = block.lane() % 4; i < num_squares; i += 4) {
#pragma unroll
            for (u32 tile = 0; tile < USED; tile++) sums[tile] += squares[tile * TILE_NODES * squares_row() + i];
        }
        __syncwarp();
#pragma unroll
        for (u32 tile = 0; tile < USED; tile++) {
            sums[tile] += __shfl_xor_sync(0xFFFFFFFF, sums[tile], 1);
            sums[tile] += __shfl_xor_sync(0xFFFFFFFF, sums[tile], 2);
            if (stores(tile)) store_output(p.y, block.first_row + row_of(tile), own_value(), out[tile], norm_scale(p, sums[tile]), norm_weight, gates[tile]);
        }
    }

    // o and its squares, for a later launch.
    __device__ __forceinline__ void keep_outputs() const {
#pragma unroll
        for (u32 tile = 0; tile < USED; tile++) {
            const float squares = square_sum(tile);
            if (!stores(tile)) continue;
            *reinterpret_cast<float2*>(p.outputs + place_of(tile)) = out[tile];
            if (block.lane() % 4 == 0) p.squares[place_of(tile) / WARP_VALUES] = squares;
        }
    }
};
