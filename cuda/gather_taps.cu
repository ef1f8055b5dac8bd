// y[i] = [taps[0][rows[i]], taps[1][rows[i]], ...], copied bit by bit in pieces of 4 or 16 bytes.
#include "async_copy.cuh"

constexpr u32 MAX_TAPS = 16;

struct GatherTapsParams {
    const void* taps[MAX_TAPS];  // each [rows of the pass][width]
    const u32* rows;
    void* y;          // [num_rows][y_stride], from this launch's first tap on
    u32 num_rows;
    u32 num_taps;     // of this launch
    u32 width;        // pieces of a tap's row
    u32 y_stride;     // pieces of a result's row
};

template <class Piece>
__device__ __forceinline__ void gather_taps(const GatherTapsParams& p) {
    launch_dependents();
    wait_for_predecessors();
    const u32 row_len = p.num_taps * p.width;
    const u64 num_pieces = static_cast<u64>(p.num_rows) * row_len;
    for (u64 i = static_cast<u64>(blockIdx.x) * blockDim.x + threadIdx.x; i < num_pieces; i += static_cast<u64>(gridDim.x) * blockDim.x) {
        const u32 row = i / row_len, column = i % row_len;
        const Piece* tap = static_cast<const Piece*>(p.taps[column / p.width]);
        static_cast<Piece*>(p.y)[static_cast<u64>(row) * p.y_stride + column] =
            tap[static_cast<u64>(p.rows[row]) * p.width + column % p.width];
    }
}

extern "C" __global__ void gather_taps_4(const __grid_constant__ GatherTapsParams p) { gather_taps<u32>(p); }
extern "C" __global__ void gather_taps_16(const __grid_constant__ GatherTapsParams p) { gather_taps<uint4>(p); }
