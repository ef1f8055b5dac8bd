// y[r] = scale * table[token_ids[r]], widened, from a table in the fragment order of bf16_matmul.
//
// The table of a tied model is also its head, so it is kept once, as the head wants it.
#include "packed_rows.cuh"

struct EmbedRowsParams {
    const u8* slices;  // the table
    const u32* token_ids;
    float* y;          // [num_rows][width]
    u32 num_rows;
    u32 width;
    float scale;
};

// A thread takes four columns.
extern "C" __global__ void embed_rows(const __grid_constant__ EmbedRowsParams p) {
    launch_dependents();
    wait_for_predecessors();
    const u32 row_quads = (p.width + 3) / 4;
    const u32 index = blockIdx.x * blockDim.x + threadIdx.x;
    const u32 row = index / row_quads, quad = index % row_quads;
    if (row >= p.num_rows) return;
    const float4 quad_values = packed_quad(p.slices, p.width, p.token_ids[row], quad);
    const float values[4] = {quad_values.x, quad_values.y, quad_values.z, quad_values.w};
    float* y = p.y + static_cast<u64>(row) * p.width + quad * 4;
#pragma unroll
    for (u32 i = 0; i < 4; i++) {
        // A product would quiet a signalling NaN.
        if (quad * 4 + i < p.width) y[i] = p.scale == 1.0f ? values[i] : values[i] * p.scale;
    }
}
