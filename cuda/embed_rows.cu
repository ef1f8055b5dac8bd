// y[r] = scale * table[token_ids[r]], widened, from a table in the fragment order of bf16_matmul.
//
// The table of a tied model is also its head, so it is kept once, as the head wants it. A row then comes in runs of
// 8 bytes, 16 apart: twice its bytes are read, which for the few rows of a pass is less than a launch costs.
#include "async_copy.cuh"

struct EmbedRowsParams {
    const u8* slices;      // [tiles][super-tiles][fragment][lane][8] BF16
    const u32* token_ids;
    float* y;              // [num_rows][width]
    u32 num_rows;
    u32 width;
    float scale;
};

// A thread takes four columns.
extern "C" __global__ void embed_rows(const __grid_constant__ EmbedRowsParams p) {
    wait_for_predecessors();
    launch_dependents();
    const u32 row_quads = (p.width + 3) / 4, k_tiles = (p.width + 63) / 64;
    const u32 index = blockIdx.x * blockDim.x + threadIdx.x;
    const u32 row = index / row_quads, quad = index % row_quads;
    if (row >= p.num_rows) return;
    const u32 id = p.token_ids[row], channel = id % 16;
    const u32 k_tile = quad / 16, lane = channel % 8 * 4 + quad / 4 % 4, fragment = quad % 4;
    const u64 tile = static_cast<u64>(id / 16) * k_tiles + k_tile;
    // Registers 0 and 2 of a fragment hold the low channels of a tile, 1 and 3 the high ones.
    const u32* words = reinterpret_cast<const u32*>(p.slices + tile * 2048 + fragment * 512 + lane * 16) + channel / 8;
    const u32 low = words[0], high = words[2];
    const u32 bits[4] = {low << 16, low & 0xFFFF0000, high << 16, high & 0xFFFF0000};
    float* y = p.y + static_cast<u64>(row) * p.width + quad * 4;
#pragma unroll
    for (u32 i = 0; i < 4; i++) {
        // A product would quiet a signalling NaN.
        const float value = __uint_as_float(bits[i]);
        if (quad * 4 + i < p.width) y[i] = p.scale == 1.0f ? value : value * p.scale;
    }
}
