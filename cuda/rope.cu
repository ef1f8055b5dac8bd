// Rotary position embedding, rotate-half form, of heads as they are or after their norm: a warp takes a head of a row.
//
// A norm is that of rms_norm.cu, to the bit. Angles follow from lists of the host alone, so they are computed while the
// predecessor still runs.
#include "norm_part.cuh"

constexpr u32 BLOCK_HEADS = 8, MAX_GROUPS = 8, MAX_HEAD_DIM = 512, QUADS = MAX_HEAD_DIM / 4 / WARP_LANES;

// Heads of one projection.
struct HeadGroup {
    const float* x;       // before the norm: vector i starts at i * x_stride; null for heads that are turned where they are
    const float* weight;  // [head_dim], or null
    float* y;             // [num_rows][num_heads][head_dim]
    u32 x_stride;
    u32 num_heads;
    u32 end_vector;       // of this group and those before it
    u32 has_quads;        // everything starts on 16 bytes and is as long as whole quads
    float eps;
};

struct RopeParams {
    HeadGroup groups[MAX_GROUPS];
    const u32* positions;
    const float* inverse_frequencies;  // [num_pairs]
    u32 num_vectors;                   // of all groups
    u32 head_dim;
    u32 num_pairs;
    u32 pair_offset;
};

extern "C" __global__ void __launch_bounds__(BLOCK_HEADS* WARP_LANES) rope(const __grid_constant__ RopeParams p) {
    __shared__ __align__(16) float heads[BLOCK_HEADS][MAX_HEAD_DIM];
    __shared__ float2 turns[BLOCK_HEADS][MAX_HEAD_DIM / 2];  // cosine and sine of each pair
    launch_dependents();
    const u32 warp = threadIdx.x / WARP_LANES, lane = threadIdx.x % WARP_LANES, index = blockIdx.x * BLOCK_HEADS + warp;
    if (index >= p.num_vectors) return;
    u32 place = 0, start = 0;
    while (index >= p.groups[place].end_vector) start = p.groups[place++].end_vector;
    const HeadGroup& group = p.groups[place];
    const u32 vector = index - start;
    const float position = p.num_pairs > 0 ? static_cast<float>(p.positions[vector / group.num_heads]) : 0.0f;
    for (u32 pair = lane; pair < p.num_pairs; pair += WARP_LANES) {
        sincosf(position * p.inverse_frequencies[pair], &turns[warp][pair].y, &turns[warp][pair].x);
    }
    NormPart<WARP_LANES, QUADS> part(group.weight, p.head_dim, group.has_quads, lane);
    wait_for_predecessors();
    float *y = group.y + static_cast<u64>(vector) * p.head_dim, *head = heads[warp];
    const float* x = group.x ? group.x + static_cast<u64>(vector) * group.x_stride : y;
    part.load(x);
    const auto keep = [&](u32 first, float4 quad) { *reinterpret_cast<float4*>(head + first) = quad; };
    if (group.x) {
        part.normalise(x, warp_sum(part.sum_of_squares(x)), group.eps, keep);
    } else {
#pragma unroll
        for (u32 i = 0; i < QUADS; i++) keep(part.place(i), part.values[i]);
    }
    __syncwarp();
    for (u32 pair = lane; pair < p.num_pairs; pair += WARP_LANES) {
        const float cos = turns[warp][pair].x, sin = turns[warp][pair].y, a = head[pair], b = head[pair + p.pair_offset];
        head[pair] = a * cos - b * sin;
        head[pair + p.pair_offset] = b * cos + a * sin;
    }
    __syncwarp();
    if (!group.has_quads) {
        for (u32 column = lane; column < p.head_dim; column += WARP_LANES) y[column] = head[column];
        return;
    }
#pragma unroll
    for (u32 i = 0; i < QUADS; i++) {
        const u32 first = part.place(i);
        if (first < p.head_dim) *reinterpret_cast<float4*>(y + first) = *reinterpret_cast<const float4*>(head + first);
    }
}
