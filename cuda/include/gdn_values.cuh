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

template <u32 TILES>
struct Values : Lanes<TILES> {
    typedef Lanes<TILES> Base;
    typedef typename Base::Places Places;
    typedef SplitSums Sums[Base::INSTRUCTIONS];
    static constexpr u32 UPDATE_BYTES = UPDATE_ROW * sizeof(float);
    using Base::block, Base::p, Base::NO_DEPTH, Base::LEN;
    using Base::column, Base::first_lane, Base::own_lane, Base::plane;
    using Base::gates, Base::out, Base::seen, Base::values;
    using Base::group, Base::has_lanes, Base::node, Base::own_value, Base::place, Base::row, Base::stores, Base::works;

    FloatRow<LEN> norm_weight;

    __device__ __forceinline__ explicit Values(Block<TILES>& b) : Base(b) {}

    // Starts to load what makes y of o.
    __device__ __forceinline__ void load_gates() { gates = FloatRow<LEN>::load(p.z + place()); }
    __device__ __forceinline__ void load_norm_weight() { norm_weight = FloatRow<LEN>::load(p.norm_weight + column); }

    __device__ __forceinline__ void add_entry(float2 factor, const FloatRow<LEN>& d) {
#pragma unroll
        for (u32 i = 0; i < LEN; i++) seen[i] = __fmaf_rn(factor.x, d[i], seen[i]), out[i] = __fmaf_rn(factor.y, d[i], out[i]);
    }

    // An address in shared memory, in a register for good.
    __device__ __forceinline__ static u32 fixed_address(const void* place) {
        u32 address = shared_address(place);
        asm volatile("" : "+r"(address));
        return address;
    }

    // From the products with the state to d (over v) and o.
    __device__ __forceinline__ void add_entries(const Places& at) {
        if (!works()) return;
        if (at.last_stretch == 0) {
            add_all<true>(at);
        } else {
            add_all<false>(at);
        }
    }

    // `IS_FIRST` promises that all nodes stand in the stretch in which the segment begins.
    template <bool IS_FIRST>
    __device__ __forceinline__ void add_all(const Places& at) {
        Sums whole = {};  // over stretches before the own
        add_committed<IS_FIRST>(at, whole);
        float* updates = block.memory + p.shared.updates + own_lane;
        if (IS_FIRST) {
            enter_stretch<true>(at, 0, whole);
            add_logged<true>(at);
            add_path(at, 0, at.last_depth + 1, updates);
        } else {
#pragma unroll 1
            for (u32 stretch = 0; stretch <= at.last_stretch; stretch++) {
                if (stretch > 0) add_stretch(at, stretch, whole);
                enter_stretch<false>(at, stretch, whole);
                const u32 begin = block.stretch_depth(stretch), end = min(block.stretch_depth(stretch + 1), at.last_depth + 1);
                if (stretch == 0) add_logged<false>(at);
                add_path(at, begin, end, updates);
            }
        }
        const float own = block.products(block.own_entry())[node()].y;
#pragma unroll
        for (u32 i = 0; i < LEN; i++) out[i] = __fmaf_rn(own, values[i], out[i]);
    }

    // Writes d down.
    __device__ __forceinline__ void store_updates() const {
        if (stores()) values.store(p.tail_d + place());
    }

    // Adds sixteen positions of the two stretches before the own.
    __device__ __forceinline__ void add_step(u32 step, const SplitColumn (&by)[Base::INSTRUCTIONS], Sums& sums) const {
        const float* factors = block.weighed(plane) + (Base::tile() * 2 * STRETCH_STEPS + step) * FRAGMENT_LEN + block.lane() * 4;
        Base::multiply(sums, split_pair(factors), by);
    }

    // Adds one whole stretch, the first (0) or second (1) before the own, to the thread's node if it reads it; `row(step, i)` is
    // where the column's rows lie.
    template <typename Row>
    __device__ __forceinline__ void add_whole(u32 which, Sums& whole, Row row, bool reads) const {
        Sums sums;
#pragma unroll
        for (u32 j = 0; j < Base::INSTRUCTIONS; j++) sums[j] = whole[j];
#pragma unroll 1
        for (u32 step = 0; step < STRETCH_STEPS; step++) {
            SplitColumn by[Base::INSTRUCTIONS];
            Base::split_columns(by, [&](u32 i) { return row(step, i); });
            add_step(which * STRETCH_STEPS + step, by, sums);
        }
#pragma unroll
        for (u32 j = 0; j < Base::INSTRUCTIONS; j++) {
            if (reads) whole[j] = sums[j];
        }
    }

    // Whole stretches of logged entries.
    template <bool IS_FIRST>
    __device__ __forceinline__ void add_committed(const Places& at, Sums& whole) const {
        const float* log_d = block.memory + p.shared.log_d + staged_lane(block.lane() % 4 * 4, Base::column_lane());
        const u32 own = block.committed_len / STRETCH;
        if (IS_FIRST) {
            const float* from = log_d + (own * STRETCH - block.anchor_base) * MAX_LANES;
#pragma unroll 2
            for (u32 back = min(own, 2u) * STRETCH_STEPS; back > 0; back--) {
                SplitColumn by[Base::INSTRUCTIONS];
                Base::split_columns(by, [&](u32 i) { return from - back * 16 * MAX_LANES + i * MAX_LANES; });
                add_step(2 * STRETCH_STEPS - back, by, whole);
            }
            return;
        }
#pragma unroll 1
        for (u32 stretch = 0; stretch <= min(at.last_stretch, 1u); stretch++) {
            const bool reads = at.stretch == stretch;
            if (!Base::any(reads)) continue;
#pragma unroll 1
            for (u32 which = own + stretch < 2 ? 2 - own - stretch : 0; which + stretch < 2; which++) {
                const float* from = log_d + ((own + stretch + which - 2) * STRETCH - block.anchor_base) * MAX_LANES;
                add_whole(which, whole, [&](u32 step, u32 i) { return from + (step * 16 + i) * MAX_LANES; }, reads);
            }
        }
    }

    // Whole stretches that end before `stretch` begins and are not all committed: each node's has its own ancestors, and
    // nodes that share the last of them share all.
    __device__ __forceinline__ void add_stretch(const Places& at, u32 stretch, Sums& whole) const {
        const u32 last_level = block.stretch_depth(stretch) - 1, c = block.lane() % 4, lane = Base::column_lane();
#pragma unroll 1
        for (u32 which = 2; which-- > 0;) {
            // Nodes of `stretch` read it as the second, those of the next as the first.
            const bool reads = at.depth != NO_DEPTH && at.stretch == stretch + 1 - which;
            u32 last = reads ? block.rows.ancestors[last_level][at.row] : ~0u;  // of the ancestors
            while (true) {
                const u32 next = __reduce_min_sync(0xFFFFFFFF, last);
                if (next == ~0u) break;
                const auto row_of = [&](u32 step, u32 i) {
                    // How far the position lies behind the log.
                    const int level = static_cast<int>(last_level + 1 + step * 16 + c * 4 + i) - static_cast<int>(STRETCH);
                    const u32 logged = p.shared.log_d + staged_lane(block.log_len + level, lane);
                    const u32 of_path = p.shared.updates + block.rows.ancestors[level < 0 ? 0 : level][next] * UPDATE_ROW + lane;
                    return block.memory + (level < 0 ? logged : of_path);
                };
                add_whole(which, whole, row_of, last == next);
                if (last == next) last = ~0u;
            }
        }
    }

    // State and whole stretches together, if the node's own stretch begins.
    template <bool IS_FIRST>
    __device__ __forceinline__ void enter_stretch(const Places& at, u32 stretch, const Sums& whole) {
        if (!IS_FIRST && at.stretch != stretch) return;
        const float scale = block.rows.from_state[plane][at.row];
#pragma unroll
        for (u32 i = 0; i < LEN; i++) {
            seen[i] = __fmaf_rn(scale, seen[i], Base::sum_of(whole, i, 0));
            out[i] = __fmaf_rn(scale, out[i], Base::sum_of(whole, i, 1));
        }
    }

    // Logged entries of the stretch in which the segment begins.
    template <bool IS_FIRST>
    __device__ __forceinline__ void add_logged(const Places& at) {
        const u32 count = block.committed_len % STRETCH;
        const float* log_d = block.memory + p.shared.log_d + (block.log_len - count) * MAX_LANES;
        const float2* factors = block.own(plane) + node();
        const bool reads = IS_FIRST || at.stretch == 0;
        u32 entry = 0;
#pragma unroll 1
        for (; entry + 4 <= count; entry += 4, factors += 4 * block.NODE_STRIDE) {
            const float* from = log_d + staged_lane(entry, own_lane);  // of four rows in the same order
#pragma unroll
            for (u32 i = 0; i < 4; i++) {
                if (reads) add_entry(factors[i * block.NODE_STRIDE], FloatRow<LEN>::load(from + i * MAX_LANES));
            }
        }
#pragma unroll 1
        for (; entry < count; entry++, factors += block.NODE_STRIDE) {
            if (reads) add_entry(*factors, FloatRow<LEN>::load(log_d + staged_lane(entry, own_lane)));
        }
    }

    // Entries of the node's own path, level by level, within one stretch. Warps of the same lanes meet at every level: behind
    // that all can read what one has left. Addresses are worked out once, and not for every level anew.
    __device__ __forceinline__ void add_path(const Places& at, u32 begin, u32 end, float* updates) {
        const float beta = block.rows.beta[plane][at.row];
        // Levels from which the node has an entry to add; behind the tile's last one it only meets the others.
        const u32 last = at.depth < end ? at.depth : 0, tile_last = __reduce_max_sync(0xFFFFFFFF, last);
        const u32 position = (block.committed_len + begin) % STRETCH;
        const u32 updates_at = fixed_address(updates), own_at = updates_at + at.row * UPDATE_BYTES;
        u32 factor_at = fixed_address(block.own(plane) + position * block.NODE_STRIDE + node());
        u32 source_at = fixed_address(&block.rows.ancestors[begin][at.row]);
        const u32 meeting = block.warp() % Base::GROUPS + 1, meeting_threads = (block.count + TILE_NODES - 1) / TILE_NODES * WARP_LANES;
        const auto meet = [&] {
            if (TILES == 1) {
                __syncwarp();
            } else {
                asm volatile("bar.sync %0, %1;" ::"r"(meeting), "r"(meeting_threads) : "memory");
            }
        };
        u32 level = begin;
#pragma unroll 1
        for (; level < end && level <= tile_last; level++) {
            const float2 factor = load_shared_pair(factor_at);
            const u32 source = load_shared_u8(source_at);
            if (at.depth == level) {
                // The node has all its entries.
#pragma unroll
                for (u32 i = 0; i < LEN; i++) values[i] = __fmul_rn(beta, __fsub_rn(values[i], seen[i]));
                values.store_shared(own_at);
            }
            meet();
            if (level < last) add_entry(factor, FloatRow<LEN>::load_shared(updates_at + source * UPDATE_BYTES));
            factor_at += block.NODE_STRIDE * sizeof(float2), source_at += MAX_SEGMENT_ROWS;
        }
#pragma unroll 1
        for (; level < end; level++) meet();
    }

    // Squares of o over the eight lanes of which the thread has some.
    __device__ __forceinline__ float square_sum() const {
        float squares = __fmaf_rn(out[1], out[1], out[0] * out[0]);
        if (LEN == 4) squares += __fmaf_rn(out[LEN - 1], out[LEN - 1], out[LEN - 2] * out[LEN - 2]);
        squares += __shfl_xor_sync(0xFFFFFFFF, squares, 1);
        if (LEN == 2) squares += __shfl_xor_sync(0xFFFFFFFF, squares, 2);
        return squares;
    }

    __device__ u32 squares_row() const { return p.num_slices * p.lanes / TILE_VALUES + 1; }
    __device__ u32 own_group() const { return (first_lane + own_lane) / TILE_VALUES; }

    __device__ __forceinline__ void finish_gates() {
#pragma unroll
        for (u32 i = 0; i < LEN; i++) gates[i] = silu(gates[i]);
    }

    // Gives the squares of the own lanes to all blocks of the key head: the threads that have them, to some blocks each.
    __device__ __forceinline__ void share_squares() const {
        if (!works()) return;
        constexpr u32 THREADS = TILE_VALUES / LEN;  // that have the same
        const float squares = square_sum();
        const u32 base = shared_address(block.memory + p.shared.squares + node() * squares_row() + own_group());
        const u32 barrier = block.barrier_of(Exchange::SQUARES);
#pragma unroll
        for (u32 i = 0; i < MAX_SLICES / THREADS; i++) {
            const u32 rank = block.lane() % THREADS + i * THREADS, to = min(rank, p.num_slices - 1);
            store_in_block(address_in_block(base, to), squares, address_in_block(barrier, to), rank < p.num_slices && node() < block.count);
        }
    }

    // y from o and the squares of all lanes of its head: every fourth eight lanes' by each thread of a node, then theirs.
    __device__ __forceinline__ void store_outputs() const {
        if (!works()) return;
        const u32 num_squares = p.value_dim / TILE_VALUES, first = own_group() - column / TILE_VALUES;
        const float* squares = block.memory + p.shared.squares + node() * squares_row() + first;
        float sum = 0.0f;
#pragma unroll 4
        for (u32 i = block.lane() % 4; i < num_squares; i += 4) sum += squares[i];
        __syncwarp();
        sum += __shfl_xor_sync(0xFFFFFFFF, sum, 1);
        sum += __shfl_xor_sync(0xFFFFFFFF, sum, 2);
        if (!stores()) return;
        const float scale = norm_scale(p, sum);
#pragma unroll
        for (u32 i = 0; i < LEN; i += 2) {
            const float2 o = {out[i], out[i + 1]}, weight = {norm_weight[i], norm_weight[i + 1]}, gate = {gates[i], gates[i + 1]};
            store_output(p.y, block.first_row + row(), own_value() + i, o, scale, weight, gate);
        }
    }

    // o and its squares, for a later launch.
    __device__ __forceinline__ void keep_outputs() const {
        if (!works()) return;
        const float squares = square_sum();
        if (!stores()) return;
        out.store(p.outputs + place());
        if (place() % TILE_VALUES == 0) p.squares[place() / TILE_VALUES] = squares;
    }
};
