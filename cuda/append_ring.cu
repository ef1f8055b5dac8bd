// Rows into rings: a block copies one row into one ring.
#include "placed_rows.cuh"

constexpr u32 MAX_RINGS = 128;

struct Ring {
    const float* tail;  // [rows][row_len]
    float* rings;       // [slots][ring_len][row_len]
    u32 row_len;
    u32 ring_len;
};

struct AppendRingParams {
    const PlacedRow* rows;  // [num_rows], those of a slot in the order of positions
    u32 num_rows;
    u32 num_rings;
    Ring rings[MAX_RINGS];
};

extern "C" __global__ void append_ring(const __grid_constant__ AppendRingParams p) {
    launch_dependents();
    const u32 index = blockIdx.x % p.num_rows;
    const Ring& ring = p.rings[blockIdx.x / p.num_rows];
    const PlacedRow placed = p.rows[index];
    wait_for_predecessors();
    // A later row of the slot has the same lane: only that one stays.
    const u32 next = index + ring.ring_len;
    if (next < p.num_rows && p.rows[next].slot == placed.slot) return;
    const u64 lane = static_cast<u64>(placed.slot) * ring.ring_len + placed.position % ring.ring_len;
    const float* from = ring.tail + static_cast<u64>(placed.row) * ring.row_len;
    copy_floats(ring.rings + lane * ring.row_len, from, ring.row_len, threadIdx.x, blockDim.x);
}
