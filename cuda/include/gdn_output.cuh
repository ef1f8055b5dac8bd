// The end of gdn_wy: squares of o by value head, which several slices may share, and y.
#pragma once

#include "gdn_values.cuh"

template <u32 GROUPS>
struct Output {
    typedef Values<GROUPS> V;
    static constexpr u32 LANES = V::LANES, QUADS = V::QUADS, ROW = V::ROW;

    const V& values;
    const Block& block;
    const GdnWyParams& p;
    Gates& gates;

    __device__ explicit Output(const V& v) : values(v), block(v.block), p(v.p), gates(v.gates) {}

    // This slice's squares of a node and plane, warp by warp.
    __device__ float squares_of_slice(u32 node, u32 plane) const {
        float sum = 0.0f;
#pragma unroll
        for (u32 warp = 0; warp < SUM_WARPS; warp++) {
            const bool has_plane = values.plane_of(warp * V::OWN) <= plane && plane <= values.plane_of((warp + 1) * V::OWN - 1);
            if (has_plane) sum += gates.partial_squares[warp][plane][node];
        }
        return sum;
    }

    // Hands the slice's squares to all blocks of the cluster.
    __device__ void share_squares() const {
        for (u32 plane = block.warp; plane < values.num_planes; plane += BLOCK_WARPS) {
            if (block.lane >= block.count) continue;
            const float squares = squares_of_slice(block.lane, plane);
            const u32 address = shared_address(&gates.squares[block.slice][plane][block.lane]);
            for (u32 rank = 0; rank < p.num_slices; rank++) store_remote(address_in_block(address, rank), squares);
        }
    }

    __device__ float* kept_squares(u32 slice, u32 plane) const {
        return p.squares + ((static_cast<u64>(block.part) * p.num_slices + slice) * p.num_planes + plane) * p.max_rows;
    }

    // Keeps the slice's squares for a later launch.
    __device__ void keep_squares() const {
        for (u32 plane = block.warp; plane < values.num_planes; plane += BLOCK_WARPS) {
            if (block.lane < block.count) kept_squares(block.slice, plane)[block.first + block.lane] = squares_of_slice(block.lane, plane);
        }
    }

    // The factor of a plane's norm; `squares(slice, plane)` are those of one slice that has lanes of the head.
    template <typename Squares>
    __device__ float scale_of(u32 plane, Squares squares) const {
        const u32 begin = (values.first_plane + plane) * p.value_dim, end = begin + p.value_dim;
        float sum = 0.0f;
        for (u32 slice = begin / LANES; slice * LANES < end; slice++) {
            sum += squares(slice, values.first_plane + plane - slice * LANES / p.value_dim);
        }
        return rsqrtf(sum / static_cast<float>(p.value_dim) + p.norm_eps);
    }

    __device__ void make_scales() const {
        for (u32 plane = block.warp; plane < values.num_planes; plane += BLOCK_WARPS) {
            gates.scale[plane][block.lane] = scale_of(plane, [&](u32 slice, u32 of_slice) { return gates.squares[slice][of_slice][block.lane]; });
        }
    }

    // Writes d down.
    __device__ void store_updates() const {
        for (u32 i = threadIdx.x; i < block.count * QUADS; i += BLOCK_THREADS) {
            const u32 node = i / QUADS, lane = i % QUADS * 4;
            if (lane >= values.num_lanes) continue;
            *reinterpret_cast<float4*>(p.tail_d + values.value_place(block.row_of(node)) + lane) =
                *reinterpret_cast<const float4*>(block.memory + p.shared.values + node * ROW + lane);
        }
    }

    // y, or, where the norm is a launch of its own, o.
    __device__ void store_outputs(bool is_scaled) const {
        for (u32 i = threadIdx.x; i < block.count * QUADS; i += BLOCK_THREADS) {
            const u32 node = i / QUADS, lane = i % QUADS * 4;
            if (lane >= values.num_lanes) continue;
            float4 y = *reinterpret_cast<const float4*>(block.memory + p.shared.outputs + node * ROW + lane);
            if (is_scaled) y = scaled(y, gates.scale[values.plane_of(lane)][node], *reinterpret_cast<const float4*>(block.memory + p.shared.gains + node * ROW + lane));
            *reinterpret_cast<float4*>(p.y + values.value_place(block.row_of(node)) + lane) = y;
        }
    }

    __device__ static float4 scaled(float4 o, float scale, float4 gain) {
        return {o.x * scale * gain.x, o.y * scale * gain.y, o.z * scale * gain.z, o.w * scale * gain.w};
    }
};
