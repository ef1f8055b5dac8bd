// Rotary position embedding, rotate-half form, in place: a thread turns one pair of one head of one row.
#include "async_copy.cuh"

struct RopeParams {
    float* x;  // [num_rows][num_heads][head_dim]
    const u32* positions;
    const float* inverse_frequencies;  // [num_pairs]
    u32 num_rows;
    u32 num_heads;
    u32 head_dim;
    u32 num_pairs;
    u32 pair_offset;
};

extern "C" __global__ void rope(const __grid_constant__ RopeParams p) {
    launch_dependents();
    const u32 index = blockIdx.x * blockDim.x + threadIdx.x;
    const u32 pair = index % p.num_pairs, vector = index / p.num_pairs, row = vector / p.num_heads;
    float sin = 0.0f, cos = 1.0f;
    if (row < p.num_rows) sincosf(static_cast<float>(p.positions[row]) * p.inverse_frequencies[pair], &sin, &cos);
    wait_for_predecessors();
    if (row >= p.num_rows) return;
    float* x = p.x + static_cast<u64>(vector) * p.head_dim + pair;
    const float a = x[0], b = x[p.pair_offset];
    x[0] = a * cos - b * sin;
    x[p.pair_offset] = b * cos + a * sin;
}
