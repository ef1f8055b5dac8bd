// Dynamic causal convolution over the rows of a draft block: a thread takes one channel of one row.
#include "matmul_rows.cuh"

struct BlockConvParams {
    const float* x;      // [block_size][num_blocks][width]
    const float* delta;  // [block_size][num_blocks][2 sides][kernel_size][width / group_size]
    const float* base;   // [2 sides][kernel_size][width]
    RowsOutput y;        // [block_size][num_blocks][width]
    u32 num_rows;
    u32 num_blocks;
    u32 width;
    u32 kernel_size;
    u32 group_size;
    u32 side;
    u32 adds_to_output;  // to y.values
};

extern "C" __global__ void block_conv(const __grid_constant__ BlockConvParams p) {
    launch_dependents();
    wait_for_predecessors();
    const u32 index = blockIdx.x * blockDim.x + threadIdx.x;
    const u32 row = index / p.width, channel = index % p.width;
    if (row >= p.num_rows) return;
    const u32 num_groups = p.width / p.group_size;
    const float* base = p.base + p.side * p.kernel_size * p.width + channel;
    const float* delta = p.delta + static_cast<u64>(2 * row + p.side) * p.kernel_size * num_groups + channel / p.group_size;
    float sum = 0.0f;
    for (u32 tap = 0; tap < p.kernel_size && tap * p.num_blocks <= row; tap++) {
        const u64 source = static_cast<u64>(row - tap * p.num_blocks) * p.width + channel;
        sum = fmaf(base[tap * p.width] + delta[tap * num_groups], p.x[source], sum);
    }
    p.y.store(row, channel, p.adds_to_output ? p.y.values[index] + sum : sum);
    if (channel + 1 == p.width) p.y.pad(row, 0, 1);
}
